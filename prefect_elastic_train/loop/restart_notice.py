"""Notify a train loop that its worker group is about to restart, so that it saves first.

All ranks must get the same answer, because either all of them report or none does. So rank 0 decides, and broadcasts
the answer. A broadcast takes milliseconds. To avoid most of them, rank 0 also sends a number of polls, which each rank
then answers locally with "no restart". This module does not import Ray.

A drain is read from ``ray.train.v2._internal``: the public ``get_preemption_info`` broadcasts at every call.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_BROADCAST_SECONDS = 0.25  # target interval between two broadcasts
_MAX_LOCAL_POLLS = 25  # upper limit of local polls in a row, since a fast loop may become slow at any step


@dataclass
class RestartNotice:
    """Restart notice of a worker process: the announced restart, and who was notified of it.

    It also counts the polls that need no broadcast.
    """

    growth: int = 0  # number of the announced growth; 0: none is announced
    is_ending: bool = False  # this worker, another one, or the driver is about to end: SIGTERM was sent to it
    notified: dict[bool, Any] = field(default_factory=dict)  # last restart that session (True) or loop (False) knows
    restart_waits: bool = False  # the announced restart waits for the next report, or for the current one
    local_polls: int = 0  # polls without a broadcast that the last broadcast allowed
    local_polls_left: int = 0  # remaining polls until the next broadcast
    broadcast_at: float = 0.0  # time of the last broadcast, by the monotonic clock; 0: none


#: Module state, since the controller sets it through Ray and the loop reads it. A worker process has one training.
state = RestartNotice()


def resize_requested() -> bool:
    """Return True once for each coming restart of the worker group, so that the loop saves before it.

    The worker group restarts to grow, or to leave a node that is drained. After True, save and report a checkpoint. The
    worker then waits in ``ray.train.report`` until it is restarted from that checkpoint, so that no step is done twice.
    A loop that does not call this is restarted after one of its own checkpoints. A loop with a session does not need
    it.

    Call it equally often on all ranks, such as once a step, since some calls broadcast. Most are answered locally, in
    less than a microsecond. Outside of a Ray Train worker it returns False.

    Example::

        if step % 1000 == 0 or loop.resize_requested():
            ray.train.report(metrics, checkpoint=save(model))
    """
    return poll_restart()[0]


def poll_restart(decide: Callable[[], Any] | None = None, together: bool = False) -> tuple[bool, Any]:
    """Check if a new restart of the worker group is announced, and share a decision of rank 0 with all ranks.

    Call it equally often on all ranks: some calls broadcast from rank 0, the other calls report no restart without
    communication.

    Args:
        decide: Function that rank 0 calls before a broadcast, which sends its return value to all ranks. The session
            passes it, the loop does not. Each of the two is notified of a restart once.
        together: If True, broadcast in this call in any case. It must be the same on all ranks.

    Returns:
        Two values, the same on all ranks. The first is True if a restart is announced of which the caller was not
        notified before. The second is the return value of ``decide`` on rank 0; None between two broadcasts.
    """
    if state.local_polls_left > 0 and not together:
        state.local_polls_left -= 1
        return False, None
    context = train_context()
    if context is None:
        return False, decide and decide()
    decision = decide() if decide and context.get_world_rank() == 0 else None
    answer = (announced_restart(context), _next_local_polls(), decision)
    if context.get_world_size() > 1:
        import ray.train.collective

        answer = ray.train.collective.broadcast_from_rank_zero(answer)
    restart, state.local_polls_left, decision = answer
    is_new = restart is not None and restart != state.notified.get(bool(decide))
    if is_new:
        state.notified[bool(decide)] = restart
        state.restart_waits = True
    return is_new, decision


def announced_growth() -> int:
    """Return the number of the growth of which the session was notified last; 0: it was a drain or an end."""
    restart = state.notified[True]
    return restart if isinstance(restart, int) else 0


def set_announced_growth(number: int) -> None:
    """Set the number of the growth that is announced to this worker; 0 withdraws it.

    The controller runs it in each worker.
    """
    state.growth = number


def announce_end() -> None:
    """Announce to this worker that its worker group is about to end. The controller runs it in each worker."""
    state.is_ending = True


def train_context() -> Any:
    """Return Ray Train's context of this worker process, or None if it is no Ray Train worker. Does not import Ray."""
    return getattr(sys.modules.get("ray.train.v2._internal.execution.context"), "_train_context", None)


def local_context() -> Any:
    """Return Ray Train's context of the latest local-mode training in this process, or None. Does not import Ray."""
    utils = getattr(sys.modules.get("ray.train.v2._internal.execution.train_fn_utils"), "_train_fn_utils", None)
    return utils and utils.get_context()


def announced_restart(context: Any) -> Any:
    """Return the announced restart; None: none.

    It is ``"end"``, the sorted ids of the nodes of a drain, or the number of a growth.
    """
    if state.is_ending:
        return "end"
    preemption = context.preemption_context.preemption_info
    if preemption:
        return sorted(preemption.preempted_node_to_ranks)
    return state.growth or None


def _next_local_polls() -> int:
    """Return the number of polls for a restart notice that follow this broadcast without another broadcast.

    It is computed from the rate of polls since the last broadcast.
    """
    now = time.monotonic()
    polls = state.local_polls - state.local_polls_left + 1
    target = int(_BROADCAST_SECONDS * polls / max(now - state.broadcast_at, 1e-6))
    # At most doubles: the first steps may be much faster than those that follow.
    state.local_polls = min(target, _MAX_LOCAL_POLLS, 2 * state.local_polls + 1)
    state.broadcast_at = now
    return state.local_polls
