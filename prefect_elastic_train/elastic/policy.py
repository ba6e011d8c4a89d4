"""The policies of a run: what size its worker group has, and what a failure is charged to.

Uses ``ray.train.v2._internal``, since Ray has no public way to bring a scaling policy: the coordinator would
hold the reservation of a killed driver for 180 seconds under an id that nobody knows, its view of the cluster is
up to 20 seconds old, and a healthy group that grows would lose all work since its last checkpoint. What counts and
what is decided is in :mod:`.sizing`; here it meets Ray.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.train import (
    ControllerError,
    PreemptionError,
    PreemptionInfo,
    ScalingConfig,
    TrainingFailedError,
    WorkerGroupError,
)
from ray.train.v2._internal.callbacks import preemption_callback
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution import scaling_policy as rays
from ray.train.v2._internal.execution.context import TrainRunContext
from ray.train.v2._internal.execution.controller.state import PreemptingState
from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy, FailureDecision
from ray.train.v2._internal.execution.failure_handling.default import _is_preemption_failure

from prefect_elastic_train.core.events import WaitingForCapacity
from prefect_elastic_train.core.settings import ScalingSettings
from prefect_elastic_train.elastic import callbacks, sizing, standby
from prefect_elastic_train.elastic.cluster import cluster_nodes, demand_of, remove_orphaned_groups
from prefect_elastic_train.elastic.loop_watch import CapacityTimeoutError, why_never_again
from prefect_elastic_train.loop.notice import announce
from prefect_elastic_train.storage.store import RunStore

logger = logging.getLogger(__name__)

#: Seconds between two looks at the cluster while no worker group runs: Ray's control loop does not rest by itself then.
_REST_SECONDS = 0.5
#: Seconds that a reservation outlives its last renewal, one each 20 s; with Ray's 180, others wait for a killed run.
_RESERVED_SECONDS = 60
#: A wait is told of when it has lasted so long (what a lost group held is given back sooner), and then so often.
_WORTH_TELLING_SECONDS = 2.0
_REPORT_WAITING_SECONDS = 10.0
_LONG_WAIT_SECONDS = 60.0  # for which no standby worker is kept
#: Seconds before the deadline of a drain at which the workers are notified to save, if no other group could start.
_SAVE_SECONDS = 60.0
#: Too little for Ray, which counts in ten-thousandths. Its coordinator counts in binary floating point, and cannot take
#: 0.2 twenty times from 4.
_HAIR = 1e-9


def requester_id(store: RunStore) -> str:
    """Return the id that every attempt of a run reserves resources under."""
    digest = hashlib.sha256(store.uri.encode()).hexdigest()[:12]
    return f"elastic-train-{store.path.rpartition('/')[2]}-{digest}"


def release_reservation(requester_id: str) -> None:
    """Give back what a run reserves, in place of its controller; others would wait until it lapses."""
    rays.autoscaling_coordinator_client.TrainAutoscalingCoordinatorClient(requester_id).cancel_resource_request()


def patient_watcher(demand: sizing.Demand, may_restart: bool) -> Any:
    """Return a drain watcher that notifies the workers once another group can start, or shortly before the deadline.

    Until then they train on: once they have saved, their nodes would be idle up to the deadline.
    """

    class PatientWatcher(preemption_callback.PreemptionWatcher):  # type: ignore[misc]
        def _on_drain_change(self, drained: Any) -> None:
            deadline = min(filter(None, drained.values()), default=0) / 1000
            held = {node_id: len(ranks) for node_id, ranks in self._node_to_ranks.items()}
            possible = may_restart and sizing.possible_workers(cluster_nodes(), demand, held)
            if possible < demand.min_workers and not 0 < deadline < time.time() + _SAVE_SECONDS:
                drained.clear()  # Ray notes that nothing was announced, and calls again
            super()._on_drain_change(drained)

    return PatientWatcher


@dataclass
class GrowthDecision(rays.ResizeDecision):  # type: ignore[misc]
    """A growth of a healthy worker group, why it happens now, and how long it has waited for that."""

    reason: str
    waited_seconds: float


class RunScalingPolicy(rays.ElasticScalingPolicy):  # type: ignore[misc]
    """Decides the size of the worker group of one run, which reserves resources under ``requester_id`` in all attempts.

    Without an id it reserves none, and Ray's coordinator need not boot: nobody else is on the cluster.
    ``settings`` are what Ray's configuration was made from, and say what to wait for.
    """

    def __init__(self, scaling_config: ScalingConfig, requester_id: str, settings: ScalingSettings) -> None:
        given = scaling_config.resources_per_worker or {}
        asked = {name: amount - (_HAIR if amount % 1 else 0) for name, amount in given.items()}
        super().__init__(replace(scaling_config, resources_per_worker=asked or None))
        self._requester_id = requester_id
        self._settings = settings
        self._demand = demand_of(scaling_config)
        self._stability = sizing.Stability(settings.stability_delay_seconds)
        self._start = sizing.Start(self._demand, settings.wait_for_max_seconds)
        self._asked_for = 0
        self._why_not = ""
        self._growth = sizing.Growth(0)
        self._growths = 0
        self._commit_to_use = False
        self._group_started_at = self._next_look = self._told_at = float("-inf")

    def after_controller_start(self, train_run_context: TrainRunContext) -> None:
        """Reserve under the run's own id, taking over what an earlier attempt of it still holds."""
        may_restart = train_run_context.run_config.failure_config.max_preemption_failures
        preemption_callback.PreemptionWatcher = patient_watcher(self._demand, may_restart)
        if self._requester_id:
            client = rays.autoscaling_coordinator_client
            client.AUTOSCALING_REQUESTS_EXPIRE_TIME_S = _RESERVED_SECONDS
            self._coordinator_client = client.TrainAutoscalingCoordinatorClient(self._requester_id)
            self._send_resource_request()

    def _maybe_send_resource_request(self) -> None:
        if self._requester_id:
            super()._maybe_send_resource_request()

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        """Renew what is reserved during a drain, too, in which Ray asks for no decision."""
        if isinstance(current_state, PreemptingState):
            self._maybe_send_resource_request()

    def make_decision_for_non_running_worker_group(self) -> rays.ScalingDecision:
        """Start as large as possible, once ``min_workers`` fit, which are not waited for beyond the time set for it.

        Before the first worker group, ``max_workers`` have their time to come; after a loss, work goes on at once.
        """
        now = time.monotonic()
        workers = 0
        possible = 0
        missing = "an answer of the cluster"
        try:
            self._take_in_the_last_start(now)
            self._maybe_send_resource_request()
            nodes, _, possible, stable = self._look(now, {})
            if possible < self._demand.max_workers and (orphans := remove_orphaned_groups()):
                logger.warning("Removed %d placement group(s) of jobs that are dead", orphans)
                nodes, _, possible, stable = self._look(now, {})
            workers = self._start.size(now, possible, stable)
            missing = self._why_not
            if possible < self._demand.min_workers:
                missing = sizing.describe_missing(nodes, self._demand, possible)
        except Exception:
            logger.warning("No decision about a start; it is tried again", exc_info=True)
        if workers:
            self._asked_for = workers
            return rays.ResizeDecision(workers, self._demand.resources)
        waited = self._start.waited(now)
        if missing:
            self._tell_wait(now, waited, possible, missing)
        time.sleep(min(_REST_SECONDS, 0.05 + waited / 2))
        return rays.NoopDecision()

    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: Any
    ) -> rays.ScalingDecision:
        """Grow a healthy group, at a commit or when its patience is over; never shrink one."""
        try:
            self._take_in_the_last_start(time.monotonic())
            self._maybe_send_resource_request()
            return self._decide_growth(worker_group_state, worker_group_status)
        except Exception:
            logger.warning("No decision about growth; training goes on", exc_info=True)
            return rays.NoopDecision()

    def _take_in_the_last_start(self, now: float) -> None:
        callback = callbacks.current()
        asked_for = self._asked_for
        self._asked_for = 0
        failure = callback.start_failure
        callback.start_failure = None
        if not asked_for:
            return
        if failure is None:
            self._start.started(asked_for)
            self._why_not = ""
        elif isinstance(failure, WorkerGroupStartupTimeoutError):
            self._start.failed(now, refused=asked_for)
            self._why_not = f"room for {asked_for} worker(s), which looked free and was not"
        else:
            self._start.failed(now)
            self._why_not = f"a start that succeeds (the last one: {failure})"

    def _tell_wait(self, now: float, waited: float, possible: int, missing: str) -> None:
        """Say now and then what a start waits for, and end the training if it has done so for too long."""
        bound = self._settings.capacity_timeout_seconds
        if waited >= _WORTH_TELLING_SECONDS and now - self._told_at >= _REPORT_WAITING_SECONDS:
            self._told_at = now
            if waited >= _LONG_WAIT_SECONDS:
                standby.release()
            callbacks.current().tell(
                WaitingForCapacity(
                    possible_workers=possible,
                    min_workers=self._demand.min_workers,
                    resources_per_worker=dict(self._demand.resources),
                    missing=missing,
                    since=time.time() - waited,
                )
            )
        if bound and waited >= bound:
            raise CapacityTimeoutError(
                f"{self._demand.min_workers} worker(s) did not fit within capacity_timeout_seconds ({bound:g} s): "
                f"{missing} lacking. Add capacity, lower min_workers or raise capacity_timeout_seconds"
            )

    def _decide_growth(self, group: Any, status: Any) -> rays.ScalingDecision:
        now = time.monotonic()
        callback = callbacks.current()
        growth = self._growth
        if group.start_time != self._group_started_at:
            self._group_started_at = group.start_time
            self._commit_to_use = False
            growth = self._growth = sizing.Growth(self._settings.resize_patience_seconds)
        committed = callback.take_commit() or self._commit_to_use
        # The ranks stand still since they have saved: that is used as soon as the cluster answers.
        self._commit_to_use = committed and growth.target > 0
        is_due = growth.due(now, committed, bool(callback.checkpoint)) or now >= self._next_look
        if not is_due or not all(worker.running for worker in status.worker_statuses.values()):
            return rays.NoopDecision()
        self._next_look = now + self._settings.resize_check_interval_seconds
        held = Counter(worker.metadata.node_id for worker in group.workers)
        _, reliable, _, stable = self._look(now, held)
        self._commit_to_use = False
        target = min(stable, self._start.limit(now))
        beyond = sizing.places_beyond(reliable, self._demand, held, target - group.num_workers)
        if not standby.prepare(beyond) and not growth.target:
            self._next_look = now + _REST_SECONDS
            return rays.NoopDecision()
        if growth.look(now, group.num_workers, target):
            self._growths += growth.target > 0
            for worker in group.workers:
                worker.execute_async(announce, self._growths if growth.target else 0)
        reason = growth.due(now, committed, bool(callback.checkpoint))
        if not reason:
            return rays.NoopDecision()
        self._asked_for = growth.target
        return GrowthDecision(growth.target, self._demand.resources, reason, growth.waited_seconds(now))

    def _look(self, now: float, held: Mapping[str, int]) -> tuple[list[sizing.Node], list[sizing.Node], int, int]:
        """Look at the cluster: its nodes, and those to be relied on, and how many workers fit on each of the two."""
        callback = callbacks.current()
        most = callback.loops.most_workers
        if most < self._demand.max_workers:
            logger.warning(
                "At most %d worker(s) will train, since a step has no samples for more (global_batch). Lower "
                "max_workers to that, or begin a run with a larger global_batch",
                most,
            )
            self._demand = replace(self._demand, max_workers=most)
        reserved = self._get_reserved_resources().values() if self._requester_id else None
        nodes = cluster_nodes()
        callback.counted_on = frozenset(node.id for node in nodes if not node.draining)
        reliable = self._stability.observe(now, [node.id for node in nodes])
        stable = [node for node in nodes if node.id in reliable]
        possible = sizing.possible_workers(nodes, self._demand, held, reserved)
        return nodes, stable, possible, sizing.possible_workers(stable, self._demand, held, reserved)

    def _get_reserved_resources(self) -> dict[str, dict[str, float]]:
        """Return what the coordinator, the arbiter between trainings, reserves for the run on nodes that live now."""
        asked = self._autoscaling_coordinator.get_reserved_resources.remote(self._requester_id, recompute=True)
        return dict(ray.get(asked, timeout=rays.AUTOSCALING_REQUESTS_GET_TIMEOUT_S))


class RunFailurePolicy(DefaultFailurePolicy):  # type: ignore[misc]
    """Ray's failure policy, which counts what fails while a node is drained as part of the drain.

    A node may go before its deadline, and what the surviving ranks see first is a broken connection. Ray would charge
    ``max_failures`` with that. A loop with a fault of its own raises again after the restart. And a storage that
    refuses for good refuses after a restart too, and a loop that ignores its checkpoint ignores it again: then
    training ends at once. And Ray would count for ever what the run has made up for long since.
    """

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        """Decide whether to go on, and from which budget."""
        callback = callbacks.current()
        if isinstance(training_failed_error, ControllerError):
            callback.start_failure = training_failed_error.controller_failure
        if isinstance(training_failed_error, WorkerGroupError):
            callback.failures = callback.failures or training_failed_error.worker_failures
            if why_never_again(training_failed_error.worker_failures.values()):
                return FailureDecision.RAISE
            if callback.is_draining:
                training_failed_error = PreemptionError(PreemptionInfo(deadline_ms=None, preempted_node_to_ranks={}))
        if isinstance(training_failed_error, WorkerGroupError | PreemptionError):
            kind = "preemption" if _is_preemption_failure(training_failed_error) else "worker_group"
            counting = callback.budget.count(kind)
            config = self.failure_config
            setattr(self, f"_{kind}_failures", counting)
            limit = config.max_preemption_failures if kind == "preemption" else config.max_failures
            callback.left = max(0, limit - counting - 1) if limit >= 0 else None
        return super().make_decision(training_failed_error)
