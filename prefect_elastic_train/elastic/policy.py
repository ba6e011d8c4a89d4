"""The policies of a run: what size its worker group has, and what a failure is charged to.

Uses ``ray.train.v2._internal``, since Ray has no public way to bring a scaling policy: the coordinator would
hold the reservation of a killed driver for 180 seconds under an id that nobody knows, its view of the cluster is
up to 20 seconds old, and a healthy group that grows would lose all work since its last checkpoint. What counts and
what is decided is in :mod:`.capacity` and :mod:`.sizing`; here they meet Ray.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.train import PreemptionInfo
from ray.train._internal.autoscaling_coordinator_client import build_train_resource_request
from ray.train.v2._internal.execution.context import TrainRunContext
from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy, FailureDecision
from ray.train.v2._internal.execution.scaling_policy import (
    AUTOSCALING_REQUESTS_GET_TIMEOUT_S,
    ElasticScalingPolicy,
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
)
from ray.train.v2._internal.execution.scaling_policy.autoscaling_coordinator_client import (
    ResourceRequestPriority,
    TrainAutoscalingCoordinatorClient,
)
from ray.train.v2.api.config import ScalingConfig
from ray.train.v2.api.exceptions import PreemptionError, TrainingFailedError, WorkerGroupError

from prefect_elastic_train.core.settings import ScalingSettings
from prefect_elastic_train.elastic import callbacks
from prefect_elastic_train.elastic.capacity import (
    Node,
    could_serve,
    describe_missing,
    granted_workers,
    hair_less,
    possible_workers,
)
from prefect_elastic_train.elastic.cluster import cluster_nodes, demand_of
from prefect_elastic_train.elastic.failures import CapacityTimeoutError, ignored_checkpoint, storage_fault
from prefect_elastic_train.elastic.sizing import Growth, Reason, Stability, Start
from prefect_elastic_train.elastic.worker_group import count_on, counted_nodes, take_failure, use_run_worker_group
from prefect_elastic_train.loop.notice import announce

logger = logging.getLogger(__name__)

#: Seconds between two looks at the cluster while no worker group runs.
_LOOK_SECONDS = 0.5
#: Seconds that Ray's control loop, which does not rest by itself then, rests between two turns.
_REST_SECONDS = 0.1
#: Seconds that a reservation outlives its last renewal, of which there is one every 20 s.
_RESERVED_SECONDS = 60.0
#: Seconds between two reports that there is not enough capacity.
_REPORT_WAITING_SECONDS = 10.0
#: A wait that is over so soon is none: what a lost group held is being given back.
_WORTH_TELLING_SECONDS = 2.0


class _Reservation(TrainAutoscalingCoordinatorClient):  # type: ignore[misc]
    """What the run reserves, for a minute at a time.

    Ray's own lasts three: of a run that was killed, others would wait for it as long. If one lapses while its
    controller is busy, what its workers hold is still not free for others who look; but the run comes last in the
    order of those who wait.
    """

    def send_resource_request(self, scaling_config: ScalingConfig, num_workers: int) -> None:
        """Reserve, or renew."""
        resources, label_selectors = build_train_resource_request(scaling_config, num_workers)
        try:
            ray.get(
                self._autoscaling_coordinator.request_resources.remote(
                    requester_id=self._requester_id,
                    resources=[hair_less(bundle) for bundle in resources],
                    label_selectors=label_selectors,
                    expire_after_s=_RESERVED_SECONDS,
                    priority=ResourceRequestPriority.HIGH,
                ),
                timeout=AUTOSCALING_REQUESTS_GET_TIMEOUT_S,
            )
        except Exception as error:
            logger.log(_level(error), "Could not reserve resources for %s", self._requester_id, exc_info=True)
        else:
            self._latest_autoscaling_request_time = time.monotonic()


def _level(error: Exception) -> int:
    """Return how loudly a question without an answer is told: on a busy machine a late one is no fault."""
    return logging.DEBUG if isinstance(error, ray.exceptions.GetTimeoutError) else logging.WARNING


def release_reservation(requester_id: str) -> None:
    """Give back what a run reserves, in place of its controller; others would wait until it lapses."""
    TrainAutoscalingCoordinatorClient(requester_id).cancel_resource_request()


@dataclass
class GrowthDecision(ResizeDecision):  # type: ignore[misc]
    """A growth of a healthy worker group, and why it happens now."""

    reason: Reason = Reason.COMMIT
    waited_seconds: float = 0.0


class RunScalingPolicy(ElasticScalingPolicy):  # type: ignore[misc]
    """Decides the size of the worker group of one run.

    Args:
        scaling_config: Ray's scaling configuration, elastic.
        requester_id: Under which the run reserves resources; the same for every attempt of the run.
        settings: What the configuration was made from, which also says what to wait for.
    """

    def __init__(self, scaling_config: ScalingConfig, requester_id: str, settings: ScalingSettings) -> None:
        super().__init__(scaling_config)
        self._run_requester_id = requester_id
        self._settings = settings
        self._demand = demand_of(scaling_config)
        self._stability = Stability(self._settings.stability_delay_seconds)
        self._start = Start(
            self._demand.min_workers,
            self._demand.max_workers,
            step=self._demand.shape.workers if self._demand.shape is not None else 1,
            wait_for_max_seconds=self._settings.wait_for_max_seconds,
        )
        self._asked_for = 0
        self._why_not = ""
        self._groups_started = 0
        self._growth = self._new_growth()
        self._growths = 0
        self._commit_to_use = False
        self._group_started_at = float("-inf")
        self._looked_at = float("-inf")
        self._next_look = float("-inf")
        self._reported_waiting_at = float("-inf")

    def after_controller_start(self, train_run_context: TrainRunContext) -> None:
        """Reserve under the run's own id, taking over what an earlier attempt of it still holds."""
        self._requester_id = self._run_requester_id
        self._coordinator_client = _Reservation(self._requester_id)
        self._send_resource_request()
        use_run_worker_group()

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        """Start as large as possible, once ``min_workers`` fit.

        Before the first worker group, ``max_workers`` have their time to come; after a loss, work goes on at once. A
        group that was lost gives back first what it still holds: Ray would keep that until the next group starts,
        from others and, where it moves the bundles of a lost node to another, from the run itself.

        Raises:
            CapacityTimeoutError: ``min_workers`` did not fit for longer than they may be waited for.
        """
        now = time.monotonic()
        workers = 0
        try:
            self._take_in_what_became_of_the_last_group(now)
            if now - self._looked_at >= _LOOK_SECONDS:
                self._maybe_send_resource_request()
                workers = self._workers_to_start_with(now)
        except CapacityTimeoutError:
            raise
        except Exception as error:
            logger.log(_level(error), "No decision about a start; it is tried again", exc_info=True)
        if workers:
            self._asked_for = workers
            return self._get_resize_decision(workers)
        time.sleep(_REST_SECONDS)
        return NoopDecision()

    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: Any
    ) -> ScalingDecision:
        """Grow a healthy group, at a commit or when its patience is over; never shrink one."""
        try:
            self._maybe_send_resource_request()
            callback = callbacks.current()
            if callback is not None:
                callback.renew_reservation = self._maybe_send_resource_request
            return self._decide_growth(worker_group_state, worker_group_status)
        except Exception as error:
            logger.log(_level(error), "No decision about growth; training goes on", exc_info=True)
            return NoopDecision()

    def _take_in_what_became_of_the_last_group(self, now: float) -> None:
        callback = callbacks.current()
        lost = callback.release_group() if callback is not None else 0
        started = callback.groups_started if callback is not None else self._groups_started + bool(self._asked_for)
        if started > self._groups_started:
            self._groups_started = started
            self._start.started()
            self._why_not = ""
        elif self._asked_for:
            self._take_in_a_failed_start(now)
        self._asked_for = 0
        self._start.begin(now, lost or 0)

    def _take_in_a_failed_start(self, now: float) -> None:
        why, for_want_of_room = take_failure()
        if not for_want_of_room:
            self._start.failed(now)
            self._why_not = f"a start that succeeds (the last one: {why.splitlines()[0] if why else 'unknown'})"
        elif counted_nodes() <= {node.id for node in self._get_nodes() if not node.draining}:
            self._start.refused(now, self._asked_for)
            self._why_not = f"room for {self._asked_for} worker(s), which looked free and was not"

    def _workers_to_start_with(self, now: float) -> int:
        """Return how many workers to start, 0 to go on waiting."""
        nodes, possible, stable = self._look(now, {})
        workers = self._start.size(now, possible, stable)
        if workers or (possible >= self._demand.min_workers and not self._why_not):
            return workers
        waited = self._start.waited(now)
        missing = self._what_is_missing(nodes, possible)
        self._tell_waiting(now, possible, missing, waited)
        bound = self._settings.capacity_timeout_seconds
        if bound and waited >= bound:
            raise CapacityTimeoutError(
                f"{self._demand.min_workers} worker(s) did not fit within capacity_timeout_seconds ({bound:g} s): "
                f"{missing} lacking. Add capacity, lower min_workers or raise capacity_timeout_seconds"
            )
        return 0

    def _what_is_missing(self, nodes: list[Node] | None, possible: int) -> str:
        if nodes is None:
            return "an answer of the cluster"
        if possible >= self._demand.min_workers:
            return self._why_not
        if possible_workers(nodes, self._demand) >= self._demand.min_workers:
            return "the consent of Ray's autoscaling coordinator, which reserves what is free for another training"
        return describe_missing(nodes, self._demand, possible)

    def _decide_growth(self, group: Any, status: Any) -> ScalingDecision:
        now = time.monotonic()
        callback = callbacks.current()
        committed = (callback is not None and callback.take_commit()) or self._commit_to_use
        self._commit_to_use = False
        has_checkpoint = callback is not None and callback.has_checkpoint
        if group.start_time != self._group_started_at:
            self._group_started_at = group.start_time
            self._growth = self._new_growth()
        if not all(worker.running for worker in status.worker_statuses.values()):
            return NoopDecision()
        reason = self._growth.due(now, committed, has_checkpoint)
        if reason is None and now < self._next_look:
            return NoopDecision()
        nodes, _, stable = self._look(now, Counter(worker.metadata.node_id for worker in group.workers))
        if nodes is None:
            # The ranks stand still since they have saved: that is used as soon as the cluster answers.
            self._commit_to_use = committed and self._growth.decided
            return NoopDecision()
        until_stable = self._stability.next_change(now)
        interval = self.scaling_config.elastic_resize_monitor_interval_s
        self._next_look = now + (interval if until_stable is None else min(interval, until_stable))
        waited = self._growth.waited_seconds(now)
        stable = min(stable, self._start.limit(now))
        if self._growth.look(now, group.num_workers, stable, more_awaited=until_stable is not None):
            self._announce(group.workers)
        reason = self._growth.due(now, committed, has_checkpoint)
        if reason is None:
            return NoopDecision()
        self._asked_for = self._growth.target
        return GrowthDecision(
            num_workers=self._growth.target,
            resources_per_worker=self._demand.resources,
            reason=reason,
            waited_seconds=waited,
        )

    def _new_growth(self) -> Growth:
        return Growth(self._settings.resize_patience_seconds, self._settings.stability_delay_seconds)

    def _announce(self, workers: list[Any]) -> None:
        """Announce to the workers that a growth is coming, or that it is called off."""
        self._growths += self._growth.decided
        for worker in workers:
            worker.execute_async(announce, self._growths if self._growth.decided else 0)

    def _look(self, now: float, held: Mapping[str, int]) -> tuple[list[Node] | None, int, int]:
        """Look at the cluster: its nodes, the workers that fit, and those that fit on nodes to be relied on."""
        self._looked_at = now
        reserved = self._get_reserved_resources()
        if reserved is None:
            return None, 0, 0
        nodes = [node for node in self._get_nodes() if could_serve(node, self._demand)]
        count_on(nodes)
        granted = granted_workers(reserved.values(), self._demand.resources, self._demand.max_workers)
        reliable = self._stability.observe(now, [node.id for node in nodes])
        possible = possible_workers(nodes, self._demand, held, granted)
        stable = possible_workers([node for node in nodes if node.id in reliable], self._demand, held, granted)
        return nodes, possible, stable

    def _tell_waiting(self, now: float, possible: int, missing: str, waited: float) -> None:
        brief = waited < _WORTH_TELLING_SECONDS and not self._why_not
        if brief or now - self._reported_waiting_at < _REPORT_WAITING_SECONDS:
            return
        self._reported_waiting_at = now
        callback = callbacks.current()
        if callback is not None:
            callback.waiting_for_capacity(possible, missing, time.time() - waited)

    def _get_nodes(self) -> list[Node]:
        return cluster_nodes()

    def _get_reserved_resources(self) -> dict[str, dict[str, float]] | None:
        """Return what the coordinator, the arbiter between trainings, reserves for the run on nodes that live now."""
        try:
            reserved: dict[str, dict[str, float]] = ray.get(
                self._autoscaling_coordinator.get_reserved_resources.remote(self._requester_id, recompute=True),
                timeout=AUTOSCALING_REQUESTS_GET_TIMEOUT_S,
            )
        except Exception as error:
            logger.log(_level(error), "No answer about reserved resources for %s", self._requester_id, exc_info=True)
            return None
        return reserved


class RunFailurePolicy(DefaultFailurePolicy):  # type: ignore[misc]
    """Ray's failure policy, which counts what fails while a node is drained as part of the drain.

    A node may go before its deadline, and what the surviving ranks see first is a broken connection. Ray would charge
    ``max_failures`` with that. A loop with a fault of its own raises again after the restart. And a storage that
    refuses for good refuses after a restart too, and a loop that ignores its checkpoint ignores it again: then
    training ends at once.
    """

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        """Decide whether to go on, and from which budget."""
        fault = storage_fault(training_failed_error)
        if (fault is not None and fault.permanent) or ignored_checkpoint(training_failed_error) is not None:
            return FailureDecision.RAISE
        callback = callbacks.current()
        if isinstance(training_failed_error, WorkerGroupError) and callback is not None and callback.is_draining:
            training_failed_error = PreemptionError(PreemptionInfo(deadline_ms=None, preempted_node_to_ranks={}))
        return super().make_decision(training_failed_error)
