"""The keepers of recovery points, one on each node of a run. The controller starts them, and chooses the point.

Uses ``ray.train.v2._internal``, for the callbacks that the controller's other parts have.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import ray
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from prefect_elastic_train.core.checkpoint_names import age_of
from prefect_elastic_train.core.records import CommitRecord
from prefect_elastic_train.loop.recovery_points import StateHeader, newest_point
from prefect_elastic_train.worker.recovery_memory import NAMESPACE, Keeper, StoredState, keeper_name

logger = logging.getLogger(__name__)

_HEARTBEAT_SECONDS = 10.0
_MAX_FAILURES = 3  # worker groups that may fail at one recovery point, which may be damaged
_ANSWER_SECONDS = 8.0  # timeout of all answers, longer than a keeper waits for the end of workers
_PAUSE_SECONDS = 0.5  # wait for a further answer when there is a complete recovery point


class Keepers(ControllerCallback, WorkerGroupCallback):  # type: ignore[misc]
    """Callback of Ray Train in the controller, which starts the keepers of recovery points, and reads from them.

    Args:
        run_id: The id of the run.
        memory_fraction: Largest share of each node's memory for recovery points.

    Attributes:
        are_used: True if the session of the newest worker group makes recovery points.
        restored_point: The recovery point from which the worker group starts; None: a checkpoint.
        failures: Worker groups that have failed before their first step, by the recovery point.
    """

    are_used = False
    restored_point: StateHeader | None = None
    _heartbeat_at = 0.0

    def __init__(self, run_id: str, memory_fraction: float) -> None:
        self._run_id = run_id
        self._fraction = memory_fraction
        self._keepers: dict[str, Any] = {}  # actors by node
        self.failures = Counter[StateHeader]()
        self._workers: list[Any] = []
        self._nodes = Counter[str]()  # those of the workers, if their session makes recovery points

    def after_worker_group_training_start(self, worker_group: Any) -> None:
        self._workers = worker_group.get_workers()

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        self._nodes.clear()

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Record if a session makes recovery points, on all ranks."""
        statuses = worker_group_status.worker_statuses.values()
        made = [status.position.has_recovery_points for status in statuses if getattr(status, "position", None)]
        if made:
            self.are_used = all(made)
        if self.are_used and not self._nodes:
            self._nodes.update(worker.metadata.node_id for worker in self._workers)
            self._heartbeat_at = 0.0

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        """Start missing keepers, and send heartbeats to all. Ray calls this at each poll, also without workers."""
        if time.monotonic() - self._heartbeat_at < _HEARTBEAT_SECONDS:
            return
        self._heartbeat_at = time.monotonic()
        nodes = sorted(self._nodes)
        neighbors = dict(zip(nodes, [*nodes[1:], *nodes[:1]], strict=True)) if len(nodes) > 1 else {}
        try:
            if not self._workers:  # those of an earlier attempt, while this one waits for its first workers
                self._keepers = dict(find_keepers(self._run_id))
            self._keepers |= {node_id: self._start(node_id) for node_id in nodes}
            for node_id, keeper in self._keepers.items():
                ranks = max(self._nodes.values()) if node_id in neighbors else 0
                keeper.heartbeat.remote(neighbors.get(node_id, ""), ranks)
        except Exception:
            logger.warning("Cannot start the keepers of recovery points; training goes on", exc_info=True)

    def _start(self, node_id: str) -> Any:
        return (
            ray.remote(Keeper)
            .options(
                name=keeper_name(self._run_id, node_id),
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                max_concurrency=4,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            .remote(self._run_id, node_id, self._fraction)
        )

    def newest_states(self, newest: CommitRecord | None) -> list[list[StoredState]]:
        """Return the recovery point that the next worker group restores; empty: none is newer than the newest commit.

        Returns:
            The states by rank, each with all locations where it can be read.
        """
        committed = (*age_of(newest.checkpoint)[:2], newest.latest["metrics"].get("step", 0)) if newest else (0, 0, 0)
        try:
            states, point = self._list_states(committed)
        except Exception:
            logger.warning("Cannot read the recovery points; training continues from the checkpoint", exc_info=True)
            return []
        if not point:
            return []
        if self.failures[point] >= _MAX_FAILURES:
            logger.warning(
                "%d worker groups have failed at the recovery point of step %d; trying the checkpoint",
                _MAX_FAILURES,
                point.step,
            )
            return []
        self.restored_point = point
        self.free_before(point.attempt, point.group)
        return [
            [state for state in states if state.header[:6] == (*point[:5], rank)] for rank in range(point.world_size)
        ]

    def _list_states(self, committed: tuple[int, int, int]) -> tuple[list[StoredState], StateHeader | None]:
        """Return the states that the keepers hold, and the newest point among them.

        If there is a point, keepers that do not answer are left out.
        """
        self._keepers = dict(find_keepers(self._run_id))
        waiting = [keeper.states.remote() for keeper in self._keepers.values()]
        states: list[StoredState] = []
        point = None
        deadline = time.monotonic() + _ANSWER_SECONDS
        while waiting and time.monotonic() < deadline:
            ready, waiting = ray.wait(waiting, timeout=_PAUSE_SECONDS)
            for reference in ready:
                with suppress(ray.exceptions.RayError):  # its node was lost
                    states += ray.get(reference)
            point = newest_point((state.header for state in states), self._run_id, committed)
            if point and not ready:
                break
        return states, point

    def free_before(self, attempt: int, group: int) -> None:
        """Free the memory of all worker groups before one."""
        for keeper in self._keepers.values():
            keeper.free_before.remote((attempt, group))


def find_keepers(run_id: str) -> Iterator[tuple[str, Any]]:
    """Yield the node and the actor of each keeper of a run, also of those that an earlier attempt has started."""
    for node in ray.nodes():
        with suppress(ValueError):  # there is none
            yield node["NodeID"], ray.get_actor(keeper_name(run_id, node["NodeID"]), NAMESPACE)


def stop_keepers(run_id: str) -> None:
    """Stop the keepers of a run, whose training has ended."""
    for _, keeper in find_keepers(run_id):
        ray.kill(keeper)
