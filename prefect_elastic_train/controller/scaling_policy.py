"""The scaling policy of a run: the size of its worker group. The decisions themselves are made in :mod:`.sizing`.

Uses ``ray.train.v2._internal``, since Ray has no public way to replace a scaling policy. Without ours, the coordinator
would keep the reservation of a killed driver for 180 seconds under an id that the next driver does not know, the view
of the cluster would be up to 20 seconds old, and a healthy group that grows would lose all work since its last
checkpoint.
"""

import logging
import time
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ray.train.v2._internal.callbacks import preemption_callback
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution import scaling_policy as rays
from ray.train.v2._internal.execution.controller.state import SchedulingState

from prefect_elastic_train.core.events import NodesLeftOut, WaitingForCapacity
from prefect_elastic_train.loop.restart_notice import set_announced_growth
from prefect_elastic_train.storage.store import RunStore

from . import sizing
from .controller_state import ControllerState
from .failures import CapacityTimeoutError
from .nodes import cluster_nodes, demand_of, remove_orphaned_placement_groups
from .ray_compatibility import reserved_resources

logger = logging.getLogger(__name__)

#: Seconds between two decisions while no worker group runs: Ray's control loop does not pause by itself then.
_PAUSE_SECONDS = 0.5
#: Seconds until a reservation lapses. It is renewed every 20 s. With Ray's 180, others would wait for a killed run.
_RESERVED_SECONDS = 60
#: A wait for capacity is published once it lasts this long, since the resources of a lost group are free sooner.
_PUBLISH_WAIT_AFTER_SECONDS = 2.0
_PUBLISH_WAIT_EVERY_SECONDS = 10.0
#: Seconds of a wait during which all resources of a node count as free, since the previous group may still hold some.
_SETTLED_SECONDS = 5.0
_LONG_WAIT_SECONDS = 60.0  # after which standby workers are terminated
#: Seconds before the deadline of a drain at which the workers are notified, if no other group could start.
_SAVE_SECONDS = 60.0
#: Below Ray's resolution of 1/10,000. Ray's coordinator uses binary floating point, where 20 × 0.2 exceeds 4.
_EPSILON = 1e-9


def requester_id(store: RunStore) -> str:
    """Return the id under which all attempts of a run reserve resources with Ray's coordinator."""
    return f"elastic-train-{store.uri}"


def release_reservation(requester_id: str) -> None:
    """Release the resources that Ray's coordinator reserves under an id. The controller that reserved them is dead.

    Without this call, other trainings wait until the reservation lapses.
    """
    rays.autoscaling_coordinator_client.TrainAutoscalingCoordinatorClient(requester_id).cancel_resource_request()


def delayed_preemption_watcher(demand: sizing.Demand, may_restart: bool) -> Any:
    """Return a subclass of Ray's preemption watcher that delays the notice of a drain to the workers.

    It notifies them once another worker group could start on the nodes that do not drain, or before the drain's
    deadline. Until then the workers go on training. A worker that has saved would leave its node idle up to the
    deadline.

    Args:
        demand: The resources that a worker group needs.
        may_restart: True if the budget for preemptions allows another worker group.
    """

    class DelayedPreemptionWatcher(preemption_callback.PreemptionWatcher):  # type: ignore[misc]
        def _on_drain_change(self, drained: Any) -> None:
            deadline = min(filter(None, drained.values()), default=0) / 1000
            held = {node_id: len(ranks) for node_id, ranks in self._node_to_ranks.items()}
            possible = may_restart and sizing.possible_workers(cluster_nodes(), replace(demand, held=held))
            if possible < demand.min_workers and not 0 < deadline < time.time() + _SAVE_SECONDS:
                drained.clear()  # Ray records no drain, and calls again
            super()._on_drain_change(drained)

    return DelayedPreemptionWatcher


@dataclass
class GrowthDecision(rays.ResizeDecision):  # type: ignore[misc]
    """Ray Train's resize decision for a growth of a healthy worker group, or to replace the node of a straggler.

    Attributes:
        reason: ``"commit"``, ``"memory"`` or ``"patience"``: the reason to carry out the growth now.
        waited_seconds: Seconds for which the growth waited.
    """

    reason: str
    waited_seconds: float


class RunScalingPolicy(rays.ElasticScalingPolicy):  # type: ignore[misc]
    """Ray Train's scaling policy for a run: decides the size of each worker group.

    It reserves resources with Ray's coordinator under one id in all attempts. Without an id it makes no reservation,
    since the cluster has no other users.
    """

    _start_problem = ""
    _growth_planned_at = 0.0  # 0: no growth of the worker group is planned
    _growths = 0
    _commit_count = 0  # commits that were considered for a growth
    _next_check = 0.0
    _published_wait_at = 0.0

    def __init__(self, scaling_config: Any, state: ControllerState) -> None:
        requested = scaling_config.resources_per_worker or {}
        reduced = {name: amount - (_EPSILON if amount % 1 else 0) for name, amount in requested.items()}
        super().__init__(replace(scaling_config, resources_per_worker=reduced or None))
        self._state = state
        self._requester_id = state.settings.requester_id
        self._settings = state.settings.scaling
        self._demand = demand_of(scaling_config)
        self._stability = sizing.Stability(self._settings.stability_delay_seconds)
        self._start = sizing.Start(self._demand, self._settings.wait_for_max_seconds)

    def after_controller_start(self, train_run_context: Any) -> None:
        """Install the preemption watcher, and reserve resources for the run, under the same id as earlier attempts."""
        may_restart = train_run_context.run_config.failure_config.max_preemption_failures
        preemption_callback.PreemptionWatcher = delayed_preemption_watcher(self._demand, may_restart)
        if self._requester_id:
            client = rays.autoscaling_coordinator_client
            client.AUTOSCALING_REQUESTS_EXPIRE_TIME_S = _RESERVED_SECONDS
            self._coordinator_client = client.TrainAutoscalingCoordinatorClient(self._requester_id)
            self._send_resource_request()

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        """Record if a worker group has started, and renew the reservation of resources. Ray calls this at each poll."""
        if self._requester_id and not current_state.is_terminal():
            self._maybe_send_resource_request()
        if not isinstance(previous_state, SchedulingState):
            return
        size = previous_state.scaling_decision.num_workers
        error = getattr(current_state, "training_failed_error", None)
        failure = getattr(error, "controller_failure", None)
        if failure is None:
            self._start.record_start(size)
            self._start_problem = ""
        elif isinstance(failure, WorkerGroupStartupTimeoutError):
            self._start.record_failure(time.monotonic(), refused=size)
            self._start_problem = f"room for {size} worker(s), which seemed free and was not"
        else:
            self._start.record_failure(time.monotonic())
            self._start_problem = f"a successful start (the last one failed: {failure})"

    def make_decision_for_non_running_worker_group(self) -> rays.ScalingDecision:
        """Return the decision to start a worker group with as many workers as fit, or no decision if too few fit.

        The first worker group of an attempt waits up to ``wait_for_max_seconds`` for ``max_workers``; a later one does
        not. Ray Train calls this again and again until a worker group starts.

        Raises:
            CapacityTimeoutError: ``min_workers`` did not fit within ``capacity_timeout_seconds``.
        """
        now = time.monotonic()
        self._growth_planned_at = 0.0
        workers = 0
        possible = 0
        missing = "an answer of the cluster"
        try:
            possible, stable = self._capacity(now, {})
            if possible < self._demand.max_workers and remove_orphaned_placement_groups():
                logger.warning("Removed placement groups of drivers that are dead")
                possible, stable = self._capacity(now, {})
            workers = self._start.size(now, possible, stable)
            missing = self._start_problem
            if possible < self._demand.min_workers:
                missing = sizing.describe_missing(cluster_nodes(), self._demand, possible)
        except Exception:
            logger.warning("Cannot decide about a start; trying again", exc_info=True)
        if workers:
            return rays.ResizeDecision(workers, self._demand.resources)
        waited = self._start.waited_seconds(now)
        if missing:
            self._publish_wait(now, waited, possible, missing)
        time.sleep(min(_PAUSE_SECONDS, 0.05 + waited / 2))
        return rays.NoopDecision()

    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: Any
    ) -> rays.ScalingDecision:
        """Decide if a healthy worker group grows now: once its state is committed or held in memory, or after a wait.

        A healthy worker group never shrinks.
        """
        try:
            return self._decide_growth(worker_group_state.workers, worker_group_status)
        except Exception:
            logger.warning("Cannot decide about growth; training goes on", exc_info=True)
            return rays.NoopDecision()

    def _decide_growth(self, workers: list[Any], worker_group_status: Any) -> rays.ScalingDecision:
        now = time.monotonic()
        state = self._state
        if not self._growth_planned_at:
            self._commit_count = state.commit_count  # the ranks did not wait at that commit
        committed = state.commit_count > self._commit_count
        statuses = worker_group_status.worker_statuses.values()
        positions = [getattr(status, "position", None) for status in statuses]
        held = self._growth_planned_at and all(rank and rank.held_for == self._growths for rank in positions)
        if not (committed or held or now >= self._next_check) or not all(status.running for status in statuses):
            return rays.NoopDecision()
        self._next_check = now + self._settings.resize_check_interval_seconds
        held_on = Counter(worker.metadata.node_id for worker in workers)
        _, stable = self._capacity(now, held_on)
        self._commit_count = state.commit_count
        possible = min(stable, self._start.limit(now))
        target = possible if possible > len(workers) else 0
        failures = state.settings.failures
        slow = {}
        if failures.on_straggler == "replace" and failures.node_strikes:
            slow = state.loops.stragglers.slow_nodes()
        if slow and not target and self._capacity(now, held_on, slow)[1] >= len(workers):
            target = len(workers)
        if bool(target) != bool(self._growth_planned_at):
            self._growth_planned_at = now if target else 0.0
            self._growths += target > 0
            for worker in workers:
                worker.execute_async(set_announced_growth, self._growths if target else 0)
        waited = now - self._growth_planned_at
        # Without any checkpoint, a growth would lose all work.
        has_waited = state.commits.newest and 0 < self._settings.resize_patience_seconds <= waited
        if not target or not (committed or held or has_waited):
            return rays.NoopDecision()
        self._growth_planned_at = 0.0
        if target == len(workers):
            state.strikes.add(slow, failures.node_strikes)
            self._capacity(now, held_on)  # leaves the nodes out
        reason = "commit" if committed else "memory" if held else "patience"
        return GrowthDecision(target, self._demand.resources, reason, waited)

    def _publish_wait(self, now: float, waited: float, possible: int, missing: str) -> None:
        """Publish a wait for capacity, at intervals. Raise CapacityTimeoutError once it has lasted too long."""
        if waited >= _PUBLISH_WAIT_AFTER_SECONDS and now - self._published_wait_at >= _PUBLISH_WAIT_EVERY_SECONDS:
            self._published_wait_at = now
            if waited >= _LONG_WAIT_SECONDS:
                self._state.standbys.release()
            self._state.publish(
                WaitingForCapacity(
                    possible_workers=possible,
                    min_workers=self._demand.min_workers,
                    resources_per_worker=self._demand.resources,
                    missing=missing,
                    since=time.time() - waited,
                )
            )
        limit = self._settings.capacity_timeout_seconds
        if limit and waited >= limit:
            raise CapacityTimeoutError(
                f"{self._demand.min_workers} worker(s) did not fit within capacity_timeout_seconds ({limit:g} s). "
                f"Missing: {missing}. Add capacity, lower min_workers or raise capacity_timeout_seconds"
            )

    def _capacity(self, now: float, held: Mapping[str, int], without: Container[str] = ()) -> tuple[int, int]:
        """Return the number of workers of the run that fit on the nodes of the cluster now, and on its stable nodes.

        Resources that other users hold count as taken, and resources that workers of the run hold count as free. Nodes
        with too many strikes are left out, unless fewer than ``min_workers`` fit on the others.

        Args:
            now: Time of the monotonic clock.
            held: Number of workers of the run on each node.
            without: Ids of further nodes that are left out of the second number.
        """
        most = self._state.loops.most_workers
        if most < self._demand.max_workers:
            logger.warning(
                "At most %d worker(s) will train, since a step has no samples or shards for more. Lower "
                "max_workers to that, or begin a run with a larger global_batch or more shards",
                most,
            )
            self._demand = replace(self._demand, max_workers=most)
        demand = replace(self._demand, held=held)
        # The coordinator divides the resources of the cluster between trainings.
        reserved = None
        if self._requester_id:
            reserved = reserved_resources(self._autoscaling_coordinator, self._requester_id)
        nodes = self._usable_nodes(now, demand, reserved)
        self._state.assumed_nodes = {node.id for node in nodes}
        stable_nodes = [node for node in self._stability.observe(now, nodes) if node.id not in without]
        possible = sizing.possible_workers(nodes, demand, reserved)
        return possible, sizing.possible_workers(stable_nodes, demand, reserved)

    def _usable_nodes(self, now: float, demand: sizing.Demand, reserved: Any) -> list[sizing.Node]:
        """Return the nodes of the cluster without those that have too many strikes, if enough workers fit then."""
        struck = self._state.strikes.nodes_to_leave_out()
        nodes = cluster_nodes()
        good = [node for node in nodes if node.id not in struck]
        room = good
        if not demand.held and self._start.waited_seconds(now) < _SETTLED_SECONDS:  # the last group may still hold some
            room = [replace(node, available=node.total) for node in good]
        if sizing.possible_workers(room, demand, reserved) < demand.min_workers:
            good = nodes
        left_out = {node.id: struck[node.id] for node in nodes if node not in good}
        if left_out.keys() != self._state.left_out.keys():
            self._state.publish(NodesLeftOut(nodes=left_out))
        self._state.left_out = left_out
        return good
