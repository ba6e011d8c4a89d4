"""The notice that the worker group is about to be restarted, as a train loop sees it.

The controller announces a growth to every worker, and Ray a drain. The ranks must answer alike, since all of them
report or none: rank 0 decides for all, in a broadcast that they share. A broadcast costs some milliseconds, so rank 0
also says how many questions need none.

Uses ``ray.train.v2._internal`` for the drain notice: the public ``ray.train.get_preemption_info`` is a broadcast of
its own at every call. Nothing here imports Ray: a loop that runs outside of it stays without.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)

#: Seconds between two questions that the ranks really answer together.
_ASK_SECONDS = 0.25
#: Questions in a row that may go without a broadcast, however quick the loop is: it may be slow right after.
_MAX_FREE_QUESTIONS = 25
#: Seconds that a rank stands still after its last report, waiting for the restart that was announced.
_HOLD_SECONDS = 60.0
_LOOK_SECONDS = 0.02


@dataclass
class _Notice:
    """What this worker process knows of a coming restart: it works for one training."""

    growth: int = 0  # the number of the announced one; 0 while none is
    answered: Any = None  # with yes already
    #: Whether the loop was told to save and has not reported since.
    asked_to_save: bool = False
    free_questions: int = 0  # that need no broadcast any more
    #: Questions since the last broadcast, and when that was; rank 0 reckons with them.
    questions: int = 0
    asked_at: float = 0.0
    reporting: threading.local = field(default_factory=threading.local)


_notice = _Notice()


def resize_requested() -> bool:
    """Return whether the worker group is about to be restarted: with more workers, or without a node that is drained.

    Answer yes by saving and reporting a checkpoint; the worker then stands still in ``ray.train.report`` until it is
    restarted from that checkpoint, so that no step is done twice. All ranks get the same answer, so all of them must
    ask, equally often, each step for instance: most questions cost well below a microsecond. Each coming restart is
    told once. A loop that never asks is restarted at its own checkpoints.

    Returns:
        True once for each coming restart, else False; always False outside of a Ray Train worker.

    Example:
        ::

            for step in range(start, steps):
                train(step)
                if step % 500 == 0 or resize_requested():
                    ray.train.report(metrics, checkpoint=save(step))
    """
    notice = _notice
    if notice.free_questions > 0:
        notice.free_questions -= 1
        return False
    context = _train_context()
    if context is None:
        return False
    coming, free = _coming_restart(context), _affordable_silence()
    if context.get_world_size() > 1:
        import ray.train.collective

        coming, free = ray.train.collective.broadcast_from_rank_zero((coming, free))
    notice.free_questions = free
    if coming is None or coming == notice.answered:
        return False
    notice.answered = coming
    notice.asked_to_save = True
    return True


def announce(growth: int) -> None:
    """Announce a growth by its number in this worker group, or withdraw it with 0. The controller runs this in each."""
    _notice.growth = growth


def saw_checkpoint() -> None:
    """Remember that the report which this thread makes has a checkpoint."""
    _notice.reporting.checkpoint = True


def hold_after_report() -> None:
    """Stand still after a report that a restart was waiting for; bounded, and ended by a withdrawal."""
    notice = _notice
    had_checkpoint = getattr(notice.reporting, "checkpoint", False)
    notice.reporting.checkpoint = False
    asked_to_save, notice.asked_to_save = notice.asked_to_save, False
    context = _train_context() if had_checkpoint or asked_to_save else None
    coming = _coming_restart(context) if context is not None else None
    deadline = time.monotonic() + _HOLD_SECONDS
    while coming is not None and _coming_restart(context) == coming:
        if time.monotonic() > deadline:
            logger.warning("The restart that was announced did not come within %g s; training goes on", _HOLD_SECONDS)
            return
        time.sleep(_LOOK_SECONDS)


def _train_context() -> Any:
    """Return Ray's context of this worker, None outside of one. Never imports Ray where it is not loaded."""
    module = sys.modules.get("ray.train.v2._internal.execution.context")
    return getattr(module, "_train_context", None)


def _coming_restart(context: Any) -> Any:
    """Return what identifies the coming restart, None if none is."""
    preemption = context.preemption_context.preemption_info
    if preemption is not None:
        return ("drain", tuple(sorted(preemption.preempted_node_to_ranks)))
    return ("growth", _notice.growth) if _notice.growth else None


def _affordable_silence() -> int:
    """Return how many questions may go without a broadcast, from how often the loop asks."""
    notice, now = _notice, time.monotonic()
    per_second = (notice.questions + 1) / max(now - notice.asked_at, 1e-6)
    # From none on, at most twice as many each time: the first steps may be much quicker than those that follow.
    most = min(_MAX_FREE_QUESTIONS, 2 * notice.questions + 1) if notice.asked_at else 0
    notice.asked_at, notice.questions = now, min(most, int(per_second * _ASK_SECONDS))
    return notice.questions
