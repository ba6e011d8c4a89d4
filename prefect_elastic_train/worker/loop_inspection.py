"""The state of this worker's train loop: its position, its stacks, its use of checkpoints.

The controller runs these functions in each worker.
"""

import gc
import re
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import psutil

from prefect_elastic_train.core.events import RankUsage
from prefect_elastic_train.loop.cadence import PRIOR_SECONDS, Cadence
from prefect_elastic_train.loop.restart_notice import train_context
from prefect_elastic_train.storage.retries import Waits, collect_waits
from prefect_elastic_train.trackers.tracked_run import TrackedRun

#: Files that are not the user's code.
_LIBRARIES = r"<frozen |/lib/python[^-]*\.py|-packages/(ray|torch|jax|lightning|transformers)/|/prefect_elastic_train/"
#: Files in which the loop waits: Ray's, such as in report(), and torch's collectives. DDP's run in the backward pass.
_WAITING_FILES = "-packages/ray/|distributed_c10d|autograd/graph"
#: Lines of a stack in which Ray Train, torch or JAX waits for other ranks.
_WAITING_LINES = re.compile(
    r"distributed_c10d|, in \w*(?:across_ranks|barrier|broadcast|all_?gather|all_?reduce|reduce_scatter|wait_tensor"
    r"|sync_global)"
)


@dataclass
class LoopState:
    """The use of checkpoints by the train loop of this worker process."""

    opened: bool = False  # True once it has read the checkpoint that it may resume from
    stalled: float = 0.0  # seconds for which it waited for its own checkpoints, since the last commit
    interval: float = 0.0  # interval of its saves when it was last published
    process: Any = None  # its process, once its use of the hardware was measured


#: The state of this process: Ray starts a worker for one loop.
state = LoopState()


class Position(NamedTuple):
    """The progress of a worker's session.

    Attributes:
        age: Seconds since its first step by the worker's clock, which may differ from the controller's.
        began_from: Optimizer steps before its first step.
        done: Optimizer steps up to now.
        most_workers: Number of workers for which a step of the session has samples.
        has_recovery_points: True if it makes recovery points, or will once there is memory.
        held_for: Number of the announced growth for which it waits, with all its work in memory; 0: none.
        tracked: The training's run in each tracker; empty on ranks other than 0.
    """

    age: float
    began_from: int
    done: int
    most_workers: int
    has_recovery_points: bool
    held_for: int
    tracked: Sequence[TrackedRun] = ()


class CommitReport(NamedTuple):
    """The values that the controller collects from a worker after a commit."""

    waits: Waits  # for the storage, since the last commit
    stalled: float  # seconds for which the loop waited for its own checkpoints, since the last commit
    save_plan: str  # interval of the session's saves, as text; empty if unchanged
    usage: RankUsage


def track_checkpoint_reads(context: Any) -> None:
    """Patch a worker's train context to record in :data:`state` if the loop calls ``get_all_reported_checkpoints``."""
    get_all = context.get_all_reported_checkpoints

    def get_all_and_record(*arguments: Any, **options: Any) -> Any:
        state.opened = True
        return get_all(*arguments, **options)

    context.get_all_reported_checkpoints = get_all_and_record


def has_opened_checkpoint() -> bool:
    """Return True if this worker's train loop has read the checkpoint that it may restore."""
    return state.opened


def collect_commit_report(step: int, checkpoint_uri: str) -> CommitReport:
    """Return this worker's storage waits and stalls since the last commit, and its save plan. Reset the counters.

    Args:
        step: Optimizer steps of the session in the new commit.
        checkpoint_uri: URI of the new checkpoint.
    """
    save_plan = ""
    if session := _session():
        session.committed = step
        session.tracker.commit(step, checkpoint_uri)
        save_plan = _take_changed_save_plan(session.cadence)
    stalled = state.stalled
    state.stalled = 0.0
    return CommitReport(collect_waits(), stalled, save_plan, _measure_usage())


def _measure_usage() -> RankUsage:
    state.process = state.process or psutil.Process()
    torch = sys.modules.get("torch")
    gpu_bytes = 0
    if torch and torch.cuda.is_initialized():  # of all GPUs: this thread's current one need not be the loop's
        gpu_bytes = sum(map(torch.cuda.memory_reserved, range(torch.cuda.device_count())))
    return RankUsage(state.process.cpu_percent(), state.process.memory_info().rss, gpu_bytes)


def session_position() -> Position | None:
    """Return the progress of this worker's session; None without a session or before its first step."""
    session = _session()
    if session is None or not session.began_at:
        return None
    return Position(
        time.time() - session.began_at,
        session.began_from,
        session.done,
        session.most_workers,
        session.recovery_points.memory is not None,
        session.held_for,
        [*session.tracker.runs.values()],
    )


def session_phase() -> Any:
    """Return the current phase of this worker's loop, a ``PhaseReport``; None if it has no session."""
    session = _session()
    return session and session.phases.report(session.done - session.began_from)


def is_all_committed() -> bool:
    """Return True if a checkpoint with all steps of this worker's session is committed, or if it has no session."""
    session = _session()
    return not session or session.committed >= session.done


def has_session() -> bool:
    """Return True if this worker's loop trains in a session."""
    return _session() is not None


def is_waiting() -> bool:
    """Return True if the train loop waits for Ray or for other ranks."""
    frame = _innermost_frame()
    return bool(frame and re.search(_WAITING_FILES, frame.f_code.co_filename))


def _innermost_frame() -> Any:
    """Return the innermost frame of the thread that runs the train loop; None if no loop runs."""
    context = train_context()
    thread = context and context.execution_context.training_thread_runner._thread
    return _thread_frames().get(thread and thread.ident)


def current_line() -> str:
    """Return the innermost line of the train loop outside of libraries, with its file and function, as text.

    The text continues a sentence: ``at train.py:31 in step: loss.backward()``.
    """
    frame = _innermost_frame()
    return _user_line(traceback.extract_stack(frame)) if frame else "at the end of the loop"


def _user_line(stack: traceback.StackSummary) -> str:
    entry = next((entry for entry in reversed(stack) if not re.search(_LIBRARIES, entry.filename)), stack[-1])
    return f"at {entry.filename}:{entry.lineno} in {entry.name}: {entry.line}"


def describe_stack(stack: traceback.StackSummary) -> str:
    """Return the position and the stack of a loop as text, which begins with "waits" or "is", as :func:`thread_stacks`.

    A loop waits if its stack shows that it waits for Ray or for other ranks, or that it is in JAX.
    """
    lines = "".join(stack.format())
    waits = _WAITING_LINES.search(lines) or re.search(f"{_WAITING_FILES}|-packages/jax", stack[-1].filename)
    return f"{'waits for other ranks' if waits else 'is'} {_user_line(stack)}\n{lines}"


def thread_stacks() -> str:
    """Return as text the loop's current line, the step of its session, if any, and the stacks of all other threads.

    The first line continues a sentence: ``is at train.py:31 in step: loss.backward()``.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    threads = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in _thread_frames().items()
        if ident != threading.get_ident()
    ]
    session = _session()
    steps = [f"session.step() was called up to step {session.done} of {session.end}"] if session else []
    waits = _WAITING_LINES.search("".join(traceback.format_stack(_innermost_frame())))
    return "\n".join([f"{'waits for other ranks' if waits else 'is'} {current_line()}", *steps, *threads])


def _thread_frames() -> dict[int, Any]:
    """Return the innermost frame of each thread, by the thread's identifier."""
    # In Python 3.11.0 to 3.11.8, a garbage collection during this call can deadlock the process: cpython#106883.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if was_enabled:
            gc.enable()


def _session() -> Any:
    """Return the session of this worker's loop, or None. It does not import the module of the session."""
    return getattr(sys.modules.get("prefect_elastic_train.loop.training_session"), "current", None)


def _take_changed_save_plan(cadence: Cadence) -> str:
    """Return the interval of the session's saves as text.

    The text is empty if the interval has changed by less than 25 % since the last call that returned text.
    """
    interval = cadence.steps or cadence.interval()
    if abs(interval - state.interval) <= 0.25 * state.interval:
        return ""
    state.interval = interval
    if cadence.steps or cadence.seconds:
        return f"every {interval:g} {'steps' if cadence.steps else 's'}, as configured"
    return (
        f"every {interval:.0f} s: a save blocks the loop for {cadence.blocked:.2g} s and takes "
        f"{cadence.background:.2g} s in the background, and a failure is expected every "
        f"{cadence.between_failures() / 60:,.0f} min ({cadence.failures} in {cadence.trained() / 60:,.0f} min so far; "
        f"before the first failure, one in {PRIOR_SECONDS / 3600:.0f} h)"
    )
