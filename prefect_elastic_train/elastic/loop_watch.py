"""What the loops of a worker group make of the checkpoint that they are offered, and whether all of them report.

A loop that begins again although a checkpoint is there trains on as if nothing were wrong, and so does one that never
saves. The controller looks at each report before Ray Train handles it, so that a loop can be stopped before it
replaces a checkpoint that it has ignored. A loop that hangs is a failure of the worker group, like a worker that died;
Ray's own detector of hangs watches NCCL only.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.train import WorkerGroupError

from prefect_elastic_train.core.events import CheckpointTaken, Event, LoopWarned
from prefect_elastic_train.core.rank_errors import ranks_in_words
from prefect_elastic_train.elastic.loop_state import LoopState, loop_state, stacks

logger = logging.getLogger(__name__)

#: How long a rank waits in a report before those that keep it waiting are named.
_MISSING_SECONDS = 30.0
#: Between two questions who waits; a second more for every hundred ranks.
_ASK_SECONDS = 5.0
#: How long the ranks may take to say what their loops have asked for.
_ANSWER_SECONDS = 5.0
#: A loop without any checkpoint is told of after so many reports, if they took so long or its workers end, or after so
#: many seconds. One that reports each step saves more seldom than at each tenth.
_UNSAVED_REPORTS = 10
_UNSAVED_LEAST_SECONDS = 30.0
_UNSAVED_SECONDS = 600.0
#: How long the ranks of a loop that hangs may take to say where.
_STACKS_SECONDS = 10.0
#: Counters that may begin anew with each epoch.
_OF_EPOCHS = frozenset({"iteration", "step"})


class IgnoredCheckpointError(Exception):
    """The loop began again although a checkpoint was there, and the failure budget does not allow that."""


class HungLoopError(Exception):
    """A rank reported nothing for longer than ``stall_timeout_seconds``; carries the stacks of its threads."""


def ask(workers: Sequence[Any], question: Callable[[], Any]) -> list[Any]:
    """Have each worker run a function; nothing waits for them."""
    return [worker.execute_async(question) for worker in workers]


def have_answered(asked: Sequence[Any]) -> bool:
    """Return whether each has answered, be it with an error; nothing is waited for."""
    return len(ray.wait(list(asked), num_returns=len(asked), timeout=0)[0]) == len(asked)


def answers_of(asked: Sequence[Any], timeout_seconds: float) -> dict[int, Any]:
    """Return what has come of the answers by then, by rank; a rank that is gone has none."""
    done = set(ray.wait(list(asked), num_returns=len(asked), timeout=timeout_seconds)[0]) if asked else set()
    answers = {}
    for rank, reference in enumerate(asked):
        try:
            answers.update({rank: ray.get(reference, timeout=1)} if reference in done else {})
        except Exception as error:  # noqa: BLE001 - a rank that is gone has no answer
            logger.debug("rank %d does not answer: %s", rank, error)
    return answers


@dataclass(frozen=True)
class Verdict:
    """Whether a loop goes on from the checkpoint that it was offered.

    Attributes:
        ignored: It does not.
        where: Where its first report stands, such as ``"step 23"``; empty if it counts nothing.
        message: What is wrong and the way out; empty if nothing is.
        again: Share of the work up to the checkpoint that is done again, 0 to 1.
        is_redone: It has been done again by now.
        is_sure: No loop that is right looks like this one.
    """

    ignored: bool
    where: str = ""
    message: str = ""
    again: float = 0.0
    is_redone: bool = False
    is_sure: bool = False


class Offer:
    """A checkpoint that a worker group is offered, until it is clear whether its loop takes it.

    Where the loop counts, its counters decide, whatever it has asked for: it may restore its state by means of its
    own. It goes on if any of them is above the checkpoint's. If it has read the checkpoint, two things may set a
    counter back: another number of workers, with which an epoch has other steps, and the end of an epoch, where a
    counter of its steps alone begins anew; the latter rises beyond the checkpoint's only if steps are done again.

    Args:
        checkpoint: Its name.
        metrics: What was reported with it; empty if it is another run's.
        same_size: Whether as many workers have reported it; None if that is not known.
    """

    def __init__(self, checkpoint: str, metrics: Mapping[str, Any], same_size: bool | None = None) -> None:
        self._checkpoint = checkpoint
        self._before = _counters(metrics)
        self._same_size = same_size
        self._first: dict[str, float] | None = None
        self._last: float = 0.0
        self._reported = False

    def judge(self, metrics: Mapping[str, Any], has_checkpoint: bool, state: Callable[[], LoopState]) -> Verdict | None:
        """Return the verdict after another report, None while it is not clear.

        Args:
            metrics: What rank 0 reports.
            has_checkpoint: Whether a checkpoint comes with it.
            state: Returns what the loops have done so far, on any rank.
        """
        counters = _counters(metrics)
        here = {name: value for name, value in counters.items() if name in self._before}
        if self._first is not None:
            return self._judge_again(here, state) if here.keys() == self._first.keys() else None
        if any(value > self._before[name] for name, value in here.items()):
            return Verdict(False, _in_words(here))
        taken = state()
        if not here:
            if taken.opened:
                return Verdict(False)
            # A loop may report something before it asks.
            is_first, self._reported = not self._reported, True
            return None if is_first and not has_checkpoint else self._ignored(here, taken)
        if not taken.opened:
            return self._ignored(here, taken)
        has_fallen = any(value < self._before[name] for name, value in here.items())
        if not has_fallen or self._same_size is False:
            return Verdict(False, _in_words(here))
        if len(counters) == 1 and not _OF_EPOCHS.isdisjoint(here):
            self._first, self._last = here, next(iter(here.values()))
            return None
        return self._ignored(here, taken)

    def _judge_again(self, here: dict[str, float], state: Callable[[], LoopState]) -> Verdict | None:
        """Tell a counter of an epoch's steps, which begins anew, from one that reaches the checkpoint's again."""
        assert self._first is not None
        (name, value), last = next(iter(here.items())), self._last
        self._last = value
        if value < last:
            return Verdict(False, _in_words(self._first))
        if value <= self._before[name]:
            return None
        return replace(self._ignored(self._first, state()), is_redone=True, is_sure=False)

    def _ignored(self, first: dict[str, float], state: LoopState) -> Verdict:
        if not state.asked:
            why = "it never called ray.train.get_checkpoint()"
        elif not state.opened:
            why = "it called ray.train.get_checkpoint() and never read what it got"
        else:
            why = "it read the checkpoint and did not go on where that ends"
        where = _in_words(first)
        begun = f" at {where}" if where else ""
        of = f" of {_in_words(self._before)}" if self._before else ""
        message = (
            f"the loop began again{begun} although the checkpoint{of} is there ({self._checkpoint}): {why}. Restore "
            "model, optimizer and step from ray.train.get_checkpoint() before the loop's first step; what it had done "
            "is done again"
        )
        fallen = next((name for name, value in first.items() if value < self._before[name]), "")
        # One that has read the checkpoint may begin its epoch anew.
        is_sure = not state.opened or (self._same_size is True and fallen not in _OF_EPOCHS)
        return Verdict(True, where, message, _done_again(self._before, first, fallen), is_sure=is_sure)


def missing_ranks(
    answers: Mapping[int, tuple[LoopState, float]], world_size: int, least_seconds: float = _MISSING_SECONDS
) -> tuple[list[int], list[int]]:
    """Ranks that wait in a report, and those that keep them waiting; two empty lists if none has waited long.

    Args:
        answers: State of each rank's loop that has answered, and for how long it has waited.
        world_size: Number of ranks.
        least_seconds: How long is long.
    """
    waiting = [rank for rank, (_, seconds) in answers.items() if seconds >= least_seconds]
    if not waiting:
        return [], []
    reports = max(answers[rank][0].reports for rank in waiting)
    missing = [
        rank
        for rank in range(world_size)
        if rank not in answers or (answers[rank][0].reports < reports and not answers[rank][0].in_report)
    ]
    return (waiting, missing) if missing else ([], [])


class LoopWatch:
    """Watches the loops of one worker group after the other. Lives in the controller; for one thread.

    Args:
        fails: Whether a loop that ignores its checkpoint ends the training.
        tell: Takes the events.
        hangs_after_seconds: How long no rank may report anything, 0 for ever.
    """

    def __init__(self, fails: bool, tell: Callable[[Event], None], hangs_after_seconds: float = 0.0) -> None:
        self._fails = fails
        self._tell = tell
        self._hangs_after = hangs_after_seconds
        self._workers: Sequence[Any] = []
        self._checkpoint = ""
        self._offer: Offer | None = None
        self._reports = 0
        self._has_saved = False
        self._began = self._quiet_since = self._asked_at = 0.0
        self._asked: list[Any] = []
        self._was_polled = False
        self._has_told_of_missing = False

    def begin(
        self, workers: Sequence[Any], checkpoint: str, metrics: Mapping[str, Any], saved_by: int | None = None
    ) -> None:
        """Begin with a new worker group.

        Args:
            workers: Its workers, by rank.
            checkpoint: The checkpoint that it is offered, empty for none.
            metrics: What was reported with that.
            saved_by: How many workers have reported it; None if that is not known.
        """
        self._workers, self._checkpoint, self._asked = workers, checkpoint, []
        same_size = None if saved_by is None else saved_by == len(workers)
        self._offer = Offer(checkpoint, metrics, same_size) if checkpoint else None
        self._has_saved = self._has_saved or bool(checkpoint)
        self._began = self._quiet_since = time.monotonic()
        self._reports, self._has_told_of_missing, self._was_polled = 0, False, False

    def look(self, statuses: Sequence[Any]) -> WorkerGroupError | None:
        """Look at what a poll has found, before Ray Train does; return what the worker group fails of, if it does.

        Args:
            statuses: Ray's ``WorkerStatus`` of each rank.
        """
        now = time.monotonic()
        failure: WorkerGroupError | None = None
        reports = [status.training_report for status in statuses if status.training_report is not None]
        if reports or not self._was_polled:
            self._was_polled = True
            self._quiet_since, self._asked = now, []
        has_checkpoint = any(report.checkpoint is not None for report in reports)
        self._has_saved = self._has_saved or has_checkpoint
        has_failed = any(status.error for status in statuses)
        has_ended = has_failed or not any(status.running for status in statuses)
        if statuses and statuses[0].training_report is not None:
            self._reports += 1
            failure = self._judge(statuses[0].training_report.metrics, has_checkpoint)
        elif not reports and now - self._quiet_since >= _MISSING_SECONDS:
            self._look_for_missing(statuses)
        self._look_for_checkpoints(has_ended)
        if self._hangs_after and not has_ended and now - self._quiet_since > self._hangs_after:
            failure = self._hung()
        return failure

    def _hung(self) -> WorkerGroupError:
        found = answers_of(ask(self._workers, stacks), _STACKS_SECONDS)
        failures = {
            rank: HungLoopError(
                f"no report for {self._hangs_after:g} s; the rank was here:\n{found.get(rank, '(no answer)')}"
            )
            for rank in range(len(self._workers))
        }
        message = "\n".join(f"[Rank {rank} Error Snippet]:\n{error}" for rank, error in failures.items())
        return WorkerGroupError(message, failures)

    def _judge(self, metrics: Mapping[str, Any], has_checkpoint: bool) -> WorkerGroupError | None:
        verdict = self._offer.judge(metrics, has_checkpoint, self._state) if self._offer is not None else None
        if verdict is None:
            return None
        self._offer = None
        if not verdict.ignored:
            self._tell(CheckpointTaken(checkpoint=self._checkpoint, where=verdict.where))
            return None
        self._tell(
            LoopWarned(
                problem="checkpoint-ignored",
                message=verdict.message,
                checkpoint=self._checkpoint,
                again=verdict.again,
                is_redone=verdict.is_redone,
            )
        )
        if not (self._fails and verdict.is_sure):
            return None
        return WorkerGroupError(verdict.message, {0: IgnoredCheckpointError(verdict.message)})

    def _state(self) -> LoopState:
        """Return what the loops have done on any rank; a rank that does not answer may have done all."""
        states = [state for state, _ in answers_of(ask(self._workers, loop_state), _ANSWER_SECONDS).values()]
        if len(states) < len(self._workers):
            return LoopState(asked=True, opened=True)
        return LoopState(asked=any(s.asked for s in states), opened=any(s.opened for s in states))

    def _look_for_missing(self, statuses: Sequence[Any]) -> None:
        now = time.monotonic()
        if self._has_told_of_missing or now - self._asked_at < _ASK_SECONDS + len(self._workers) / 100:
            return
        if not self._asked:
            self._asked, self._asked_at = ask(self._workers, loop_state), now
            return
        answers, self._asked = answers_of(self._asked, 0), []
        waiting, missing = missing_ranks(answers, len(self._workers))
        if not missing:
            return
        self._has_told_of_missing = True
        returned = [rank for rank in missing if not statuses[rank].running]
        how = f"; the loop of {ranks_in_words(returned)} has returned" if returned else ""
        seconds = max(answers[rank][1] for rank in waiting)
        self._tell(
            LoopWarned(
                problem="ranks-missing",
                ranks=missing,
                message=(
                    f"{ranks_in_words(missing)} did not call ray.train.report() for {seconds:.0f} s, in which "
                    f"{ranks_in_words(waiting)} waited in it{how}. Training stands still until all ranks report: each "
                    "of them must report equally often. FailureBudget(stall_timeout_seconds=…) ends such a wait"
                ),
            )
        )

    def _look_for_checkpoints(self, has_ended: bool) -> None:
        seconds = time.monotonic() - self._began
        enough = self._reports >= _UNSAVED_REPORTS and (has_ended or seconds >= _UNSAVED_LEAST_SECONDS)
        if self._has_saved or not self._reports or not (enough or seconds >= _UNSAVED_SECONDS):
            return
        self._has_saved = True  # told once
        self._tell(
            LoopWarned(
                problem="no-checkpoint",
                message=(
                    f"the loop has reported {self._reports} times in {seconds:.0f} s and never with a checkpoint: "
                    "whatever ends the workers begins the training from the beginning. Save with "
                    "ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(…))"
                ),
            )
        )


def _counters(metrics: Mapping[str, Any]) -> dict[str, float]:
    """What a loop counts its way with, the most significant first."""
    found = {name: _number(metrics.get(name)) for name in ("global_step", "epoch", "iteration", "step")}
    return {name: value for name, value in found.items() if value is not None}


def _number(value: Any) -> float | None:
    try:
        value = value.item() if hasattr(value, "item") else value
        number = None if isinstance(value, bool | str) or value is None else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return number if number is not None and math.isfinite(number) else None


def _in_words(counters: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:,.10g}" for name, value in counters.items())


def _done_again(before: Mapping[str, float], first: Mapping[str, float], fallen: str) -> float:
    """Share of the work up to a checkpoint that a loop does again which begins at `first`, below it in `fallen`."""
    if fallen in _OF_EPOCHS and "epoch" in first:  # it does its epoch again
        return (before[fallen] - first[fallen]) / before[fallen] / (before["epoch"] + 1)
    if not fallen or first[fallen] <= 1:  # counted from 0 or from 1
        return 1.0
    return (before[fallen] - first[fallen]) / before[fallen]
