"""The notice that the worker group is about to be restarted, as a train loop sees it.

The ranks must answer alike, since all of them report or none: rank 0 decides, in a broadcast. That costs some
milliseconds, so rank 0 also says how many questions need none. Nothing here imports Ray.

For the drain notice, ``ray.train.v2._internal``: the public ``get_preemption_info`` is a broadcast at every call.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

#: Seconds between two questions that the ranks really answer together; and questions in a row that may go without a
#: broadcast, however quick the loop is: it may be slow right after.
_ASK_SECONDS, _MAX_FREE_QUESTIONS = 0.25, 25


@dataclass
class Notice:
    """What this worker process knows of a coming restart: it works for one training."""

    growth: int = 0  # the number of the announced one; 0 while none is
    answered: dict[bool, Any] = field(default_factory=dict)  # last notice that a session (True) or the loop has got
    asked_to_save: bool = False  # and has not reported since
    free_questions: int = 0  # that need no broadcast any more
    questions: int = 0  # that the last broadcast set free
    asked_at: float = 0.0  # when that was


known = Notice()


def resize_requested() -> bool:
    """Return whether the worker group is about to be restarted: with more workers, or without a node that is drained.

    True once for each, and never outside of a Ray Train worker. The worker then stands still in ``ray.train.report``
    until it is restarted from that checkpoint, so that no step is done twice. All ranks get the same answer, so all of
    them must ask, equally often, each step for instance: most questions cost well below a microsecond. A loop that
    never asks is restarted at its own checkpoints.
    """
    return ask()[0]


def ask(decide: Callable[[], Any] | None = None, together: bool = False) -> tuple[bool, Any]:
    """Return :func:`resize_requested` and what rank 0 decides, None without a broadcast, which ``together`` forces."""
    if known.free_questions > 0 and not together:
        known.free_questions -= 1
        return False, None
    context = train_context()
    if context is None:
        return False, decide and decide()
    alone = context.get_world_size() == 1
    decided = decide() if decide and (alone or context.get_world_rank() == 0) else None
    said = coming_restart(context), _affordable_silence(), decided
    if not alone:
        import ray.train.collective

        said = ray.train.collective.broadcast_from_rank_zero(said)
    coming, known.free_questions, decided = said
    if is_new := coming is not None and coming != known.answered.get(bool(decide)):
        known.answered[bool(decide)], known.asked_to_save = coming, True
    return is_new, decided


def announce(growth: int) -> None:
    """Announce a growth by its number in this worker group, or withdraw it with 0. The controller runs this in each."""
    known.growth = growth


def train_context() -> Any:
    """Return Ray's context of this worker, None outside of one. Never imports Ray where it is not loaded."""
    module = sys.modules.get("ray.train.v2._internal.execution.context")
    return getattr(module, "_train_context", None)


def local_context() -> Any:
    """Return Ray's context of this process' latest local-mode training, or None. Does not import Ray."""
    module = sys.modules.get("ray.train.v2._internal.execution.train_fn_utils")
    utils = getattr(module, "_train_fn_utils", None)
    return utils and utils.get_context()


def coming_restart(context: Any) -> Any:
    """Return what identifies the coming restart, None if none is."""
    preemption = context.preemption_context.preemption_info
    if preemption is not None:
        return ("drain", tuple(sorted(preemption.preempted_node_to_ranks)))
    return ("growth", known.growth) if known.growth else None


def _affordable_silence() -> int:
    """Return how many questions may go without a broadcast, from how often the loop asks."""
    now = time.monotonic()
    asked = known.questions - known.free_questions + 1
    per_second = asked / max(now - known.asked_at, 1e-6)
    # From none on, at most twice as many each time: the first steps may be much quicker than those that follow.
    most = min(_MAX_FREE_QUESTIONS, 2 * known.questions + 1) if known.asked_at else 0
    known.asked_at, known.questions = now, min(most, int(per_second * _ASK_SECONDS))
    return known.questions
