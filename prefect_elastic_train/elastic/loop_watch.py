"""Checks of the loops of a worker group: do they go on from their checkpoint, save, report, or wait for other ranks?

A loop that begins again although a checkpoint is there trains on as if nothing were wrong, and so does one that never
saves. The controller looks at each report before Ray Train handles it, so that a loop can be stopped before it
replaces a checkpoint that it has ignored. A loop that hangs fails its group; Ray's own detector watches NCCL only.

Uses ``ray.train.v2._internal``: what Ray Train says of a worker that does not answer has no public type.
"""

from __future__ import annotations

import gc
import math
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray
from ray.train import WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError

from prefect_elastic_train.core.bounds import MAX_LOG_BYTES, cut
from prefect_elastic_train.core.events import Event, FirstStep, LoopWarned
from prefect_elastic_train.core.outcomes import Outcome, StorageFaultError
from prefect_elastic_train.core.ray_output import is_consequence, ranks_in_words
from prefect_elastic_train.loop.cadence import PRIOR_SECONDS
from prefect_elastic_train.loop.notice import train_context
from prefect_elastic_train.storage.retries import Waits, take_waits

#: How long the ranks may take to say what their loops have asked for, and where those hang.
_ANSWER_SECONDS = 5.0
_STACKS_SECONDS = 10.0
#: How long the cause of broken collectives is waited for; and how long a rank may leave a poll unanswered meanwhile.
_CAUSE_SECONDS = 10.0
SILENT_SECONDS = 5.0
#: A loop without any checkpoint is told of after so many reports, if they took so long or its workers end.
_UNSAVED_REPORTS = 10
_UNSAVED_SECONDS = 30.0
_WAIT_SECONDS = 45.0  # after which a rank that waits for the others is reported
#: Files that are not the user's code.
_LIBRARIES = r"<frozen |/lib/python[^-]*\.py|-packages/(ray|torch|jax|lightning|transformers)/|/prefect_elastic_train/"
_COUNTERS = ("global_step", "epoch", "iteration", "step")  # what a loop counts its way with, most significant first
#: Functions in which Ray Train and torch wait for the other ranks.
_WAITING = re.compile(r", in \w*(?:across_ranks|barrier|broadcast|all_gather|all_reduce|reduce_scatter)")


class CapacityTimeoutError(Exception):
    """``min_workers`` did not fit for longer than ``capacity_timeout_seconds``."""


class IgnoredCheckpointError(Exception):
    """The loop began again although a checkpoint was there, and the failure budget does not allow that."""


class HungLoopError(Exception):
    """A rank reported nothing for longer than ``stall_timeout_seconds``; carries the stacks of its threads."""


class LoopFailedError(Exception):
    """An exception of the train loop as the text of its traceback."""

    _traceback_str = property(Exception.__str__)  # as in Ray's UserExceptionWithTraceback


def decisive(failures: Iterable[Exception]) -> IgnoredCheckpointError | StorageFaultError | None:
    """Return the failure of a rank that decides how training goes on: of the storage's faults the permanent first."""
    causes = [getattr(failure, "_base_exc", failure) for failure in failures]
    found = [cause for cause in causes if isinstance(cause, IgnoredCheckpointError | StorageFaultError)]
    return min(found, key=lambda cause: isinstance(cause, StorageFaultError) and not cause.permanent, default=None)


def why_never_again(failures: Iterable[Exception]) -> str:
    """Return why a new worker group would fail of the same, empty if it might not."""
    cause = decisive(failures)
    if isinstance(cause, IgnoredCheckpointError):
        return "the training ends, as ignored_checkpoint='fail' asks for"
    return "the storage refuses for good" if cause is not None and cause.permanent else ""


class Cause(NamedTuple):
    """The outcome of an attempt that ends by a failure of its workers, None while it is not known, and the reason."""

    outcome: Outcome | None
    reason: str


def cause_of(failures: Mapping[int, Exception], workers: int = 0, waited_seconds: float = math.inf) -> Cause:
    """Return why a group of `workers` ranks has failed, `waited_seconds` after its first failure.

    A failed collective is often only a consequence. It can fail before Ray notices that a peer's process or node is
    dead, and before the exception of a peer that closed the connection is known. So while only collectives have
    failed, the outcome is None, until all ranks have failed or `_CAUSE_SECONDS` have passed.
    """
    if any(map(is_death, failures.values())):
        return Cause(Outcome.CLUSTER_LOST, "workers died more often than max_failures allows")
    if not all(is_consequence(in_full(failure)) for failure in failures.values()):
        return Cause(Outcome.USER_ERROR, "the train loop failed more often than max_failures allows")
    if failures and len(failures) < workers and waited_seconds < _CAUSE_SECONDS:
        return Cause(None, "collectives have lost a peer, and its end is not known yet")
    return Cause(Outcome.CLUSTER_LOST, "connections between living workers broke more often than max_failures allows")


def in_full(failure: Exception) -> str:
    """Return the traceback of a failure, or what there is of it."""
    return getattr(failure, "_traceback_str", "") or f"{type(failure).__name__}: {failure}"


def portable(failure: Any) -> Any:
    """Return the exception of this worker's loop, if any, in a form that any process can unpickle.

    An exception may hold a lock, need other arguments than it stores, or be of a class that only workers can import. It
    is sent as text, unless its type decides how training goes on.
    """
    cause = getattr(failure, "_base_exc", failure)
    if is_death(cause) or isinstance(cause, StorageFaultError | None):
        return failure
    return LoopFailedError(cut(in_full(failure), MAX_LOG_BYTES))


def is_death(failure: Exception) -> bool:
    """Return whether a rank's failure is that of its process or node, not of its train loop."""
    if isinstance(failure, ray.exceptions.RayTaskError):
        return False  # the loop itself asked Ray for something, which raised
    return isinstance(failure, ray.exceptions.RayError | WorkerHealthCheckFailedError | WorkerHealthCheckTimeoutError)


@dataclass
class LoopState:
    """What the loop of this worker process has done with checkpoints."""

    opened: bool = False  # whether it has looked into the one that it was offered
    stalled: float = 0.0  # seconds that it has stood still for its own since that was asked last
    interval: float = 0.0  # of its saves, as it was told last


state = LoopState()  # of this worker process, which Ray starts for one loop


def note_checkpoints(context: Any) -> None:
    """Note from now on whether the loop of this worker asks Ray's ``TrainContext`` for all that it has reported."""
    get_all = context.get_all_reported_checkpoints

    def noted(*arguments: Any, **more: Any) -> Any:
        state.opened = True
        return get_all(*arguments, **more)

    context.get_all_reported_checkpoints = noted


def has_opened() -> bool:
    """Return whether this worker's loop has looked into the checkpoint that it was offered."""
    return state.opened


def take_news() -> tuple[Waits, float, str]:
    """Return what this worker has waited for since this was asked last, and how often it saves if that is new."""
    stalled = state.stalled
    state.stalled = 0.0
    return take_waits(), stalled, _new_plan()


class Position(NamedTuple):
    """The progress of a worker's session: the age of its first step in seconds, and optimizer steps before it and now.

    The age is taken by the worker's own clock, which may differ from the controller's. ``most_workers`` is the
    number of workers for which a step of the session has samples.
    """

    age: float
    began_from: int
    done: int
    most_workers: int


def position() -> Position | None:
    """Return the progress of this worker's session, None before its first step or without a session."""
    session = _session()
    if session is None or not session.began_at:
        return None
    return Position(time.time() - session.began_at, session.began_from, session.done, session.most_workers)


def innermost_frame() -> Any:
    """Return the innermost frame of the thread of this worker's loop; None if no loop runs."""
    context = train_context()
    thread = context and context.execution_context.training_thread_runner._thread
    return _frames().get(thread and thread.ident)


def _frames() -> dict[int, Any]:
    """Return the innermost frame of each thread, by the thread's identifier."""
    # In Python 3.11.0 to 3.11.8, a garbage collection during this call can deadlock the process: cpython#106883.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if was_enabled:
            gc.enable()


def line() -> str:
    """Return the innermost line of this worker's loop that is not in a library, or that the loop has ended."""
    if not (frame := innermost_frame()):
        return "the end of the loop"
    stack = traceback.extract_stack(frame)
    own = next((frame for frame in reversed(stack) if not re.search(_LIBRARIES, frame.filename)), stack[-1])
    return f"{own.filename}:{own.lineno} in {own.name}: {own.line}"


def has_session() -> bool:
    """True if this worker's loop trains in a session."""
    return _session() is not None


def stacks() -> str:
    """Return the loop's current line, the step of its session, if any, and the stacks of all threads but this one.

    The first line continues a sentence: ``is at train.py:31 in step: loss.backward()``.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    threads = {
        ident: f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in _frames().items()
    }
    del threads[threading.get_ident()]
    session = _session()
    steps = [f"session.step() was called up to step {session.done} of {session.end}"] if session is not None else []
    waits = _WAITING.search("".join(traceback.format_stack(innermost_frame())))
    return "\n".join([f"{'waits for other ranks' if waits else 'is'} at {line()}", *steps, *threads.values()])


def _session() -> Any:
    """Return the session of this worker's loop, None without; what the loop does not use is not imported."""
    return getattr(sys.modules.get("prefect_elastic_train.loop.training_session"), "current", None)


def _new_plan() -> str:
    """Return how often the loop's session saves, empty without one and if it is as it was told before."""
    if (session := _session()) is None:
        return ""
    cadence = session.cadence
    interval = cadence.steps or cadence.interval()
    if abs(interval - state.interval) <= 0.25 * state.interval:
        return ""
    state.interval = interval
    if cadence.steps or cadence.seconds:
        return f"each {interval:g} {'steps' if cadence.steps else 's'}, as asked for"
    return (
        f"each {interval:.0f} s: a save blocks {cadence.blocked:.2g} s, takes {cadence.background:.2g} s beside the "
        f"steps, and a failure is expected each {cadence.between_failures() / 60:,.0f} min ({cadence.failures} in "
        f"{cadence.trained() / 60:,.0f} min so far; before any, one in {PRIOR_SECONDS / 3600:.0f} h)"
    )


def answered(references: list[Any], timeout_seconds: float) -> set[Any]:
    """Return those of Ray's references that are ready, once all are or the time is over."""
    return set(ray.wait(references, num_returns=len(references), timeout=timeout_seconds)[0]) if references else set()


def ask(workers: Sequence[Any], question: Callable[[], Any], timeout_seconds: float) -> dict[int, Any]:
    """Have each worker run a function; return what has come by then, by rank. One that is gone has no answer."""
    asked = [worker.execute_async(question) for worker in workers]
    done = answered(asked, timeout_seconds)
    answers = {}
    for rank, reference in enumerate(asked):
        if reference in done:
            with suppress(Exception):
                answers[rank] = ray.get(reference, timeout=1)
    return answers


class LoopWatch:
    """Watches the loops of one worker group after the other, in the controller.

    A loop that ignores its checkpoint ends the training if ``fails``, one that reports nothing for
    ``hangs_after_seconds`` (0: for ever) fails the worker group.

    Attributes:
        ignored: Whether the last loop of which that is known has ignored its checkpoint.
        step: Optimizer steps that the session of the current worker group has done, at the last poll; 0 without one.
        most_workers: Number of workers for which a step of the session has samples, as far as it is known.
    """

    def __init__(self, fails: bool, tell: Callable[[Event], None], hangs_after_seconds: float = 0.0) -> None:
        self._fails = fails
        self._tell = tell
        self._hangs_after = hangs_after_seconds
        self._has_saved = self.ignored = False
        self.most_workers = sys.maxsize
        self.begin([], "", {})

    def begin(self, workers: Sequence[Any], checkpoint: str, metrics: Mapping[str, Any]) -> None:
        """Begin with a new worker group, and what was reported with the checkpoint that it is offered, if it is."""
        self._workers = workers
        self._checkpoint = checkpoint
        self._before = _counters(metrics)
        self._is_judged = not checkpoint
        self._has_saved |= bool(checkpoint)
        self._began = time.monotonic()
        self._quiet_since = math.inf  # until the first poll
        self._reports = 0
        self.step = 0
        self._has_begun = self._has_told_wait = False
        self._answered: dict[int, float] = {}  # time of each rank's last answer to a poll

    def look(self, statuses: Sequence[Any]) -> WorkerGroupError | None:
        """Look at each rank's status before Ray Train does; return what the worker group fails of, if it does."""
        now = time.monotonic()
        failure: WorkerGroupError | None = None
        positions = [found for status in statuses if (found := getattr(status, "position", None))]
        if positions and len(positions) == len(statuses) and not self._has_begun:
            self._has_begun = True
            self.step = positions[0].began_from
            self.most_workers = positions[0].most_workers
            age = min(found.age for found in positions)
            self._tell(FirstStep(at=time.time() - age, world_size=len(statuses)))
        self.step = max([self.step, *(found.done for found in positions)])
        reports = [status.training_report for status in statuses if status.training_report is not None]
        if reports or self._quiet_since > now:
            self._quiet_since = now
        has_checkpoint = any(report.checkpoint is not None for report in reports)
        self._has_saved |= has_checkpoint
        has_ended = any(status.error for status in statuses) or not any(status.running for status in statuses)
        if statuses and statuses[0].training_report is not None:
            self._reports += 1
            failure = self._judge(statuses[0].training_report.metrics, has_checkpoint)
        is_late = self._reports >= _UNSAVED_REPORTS and (has_ended or now - self._began >= _UNSAVED_SECONDS)
        if is_late and not self._has_saved:
            self._has_saved = True  # told once
            self._tell_unsaved()
        self._answered |= {rank: now for rank, status in enumerate(statuses) if hasattr(status, "waited")}
        silence = now - min(self._answered.values(), default=now)
        waited = max((getattr(status, "waited", silence) for status in statuses), default=0)
        if waited > _WAIT_SECONDS and not self._has_told_wait:
            self._has_told_wait = True
            self._tell_wait()
        if self._hangs_after and not has_ended and now - self._quiet_since > self._hangs_after:
            failure = self._hung()
        return failure

    def _tell_wait(self) -> None:
        answers = ask(self._workers, line, _ANSWER_SECONDS)
        lines = {
            rank: f"at {answers[rank]}" if rank in answers else "does not answer" for rank in range(len(self._workers))
        }
        where = "; ".join(
            f"{ranks_in_words(rank for rank, other in lines.items() if other == current)} {current}"
            for current in dict.fromkeys(lines.values())
        )
        message = f"ranks wait for others: {where}. All must call ray.train.report() and collectives equally often"
        self._tell(LoopWarned(problem="ranks-wait", message=message))

    def _hung(self) -> WorkerGroupError:
        said = ask(self._workers, stacks, _STACKS_SECONDS)
        why = f"no report for {self._hangs_after:g} s; the rank "
        failures = {rank: HungLoopError(why + said.get(rank, "does not answer")) for rank in range(len(self._workers))}
        message = "\n".join(f"[Rank {rank} Error Snippet]:\n{error}" for rank, error in failures.items())
        return WorkerGroupError(message, failures)

    def _judge(self, metrics: Mapping[str, Any], has_checkpoint: bool) -> WorkerGroupError | None:
        """Return whether the loop goes on: a counter is above the checkpoint's, or a rank has read that."""
        if self._is_judged:
            return None
        here = {name: value for name, value in _counters(metrics).items() if name in self._before}
        goes_on = any(value > self._before[name] for name, value in here.items()) or self._has_opened()
        if not (goes_on or here or has_checkpoint) and self._reports == 1:
            return None  # a loop may report something before it asks
        self._is_judged = True
        self.ignored = not goes_on
        if goes_on:
            return None
        message = (
            f"the loop began again{f' at {_in_words(here)}' if here else ''} although the checkpoint"
            f"{f' of {_in_words(self._before)}' if self._before else ''} is there ({self._checkpoint}): it never read "
            "what ray.train.get_checkpoint() returns. Restore model, optimizer and step before the first step"
        )
        self._tell(LoopWarned(problem="checkpoint-ignored", message=message, checkpoint=self._checkpoint))
        return WorkerGroupError(message, {0: IgnoredCheckpointError(message)}) if self._fails else None

    def _has_opened(self) -> bool:
        """Return whether any rank's loop has read its checkpoint; a rank that does not answer may have."""
        answers = ask(self._workers, has_opened, _ANSWER_SECONDS)
        return len(answers) < len(self._workers) or any(answers.values())

    def _tell_unsaved(self) -> None:
        message = (
            f"the loop has reported {self._reports} times in {time.monotonic() - self._began:.0f} s and never with a "
            "checkpoint: a restart would begin at step 0. Pass a checkpoint to ray.train.report(metrics, "
            "checkpoint=...), or use prefect_elastic_train.loop.session()"
        )
        self._tell(LoopWarned(problem="no-checkpoint", message=message))


def _counters(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: metrics[name]
        for name in _COUNTERS
        if type(metrics.get(name)) in (int, float) and abs(metrics[name]) < math.inf
    }


def _in_words(counters: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:,.10g}" for name, value in counters.items())
