"""The scaling policy: Ray Train's elastic policy with a stable identity and a fresh view of the cluster.

Uses ``ray.train.v2._internal``, since Ray has no public way to bring a scaling policy: the coordinator would
hold the reservation of a killed driver for 180 seconds under an id that nobody knows, and its view of the
cluster is up to 20 seconds old.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import ray
from ray.train.v2._internal.execution.context import TrainRunContext
from ray.train.v2._internal.execution.scaling_policy import (
    AUTOSCALING_REQUESTS_GET_TIMEOUT_S,
    ElasticScalingPolicy,
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
)
from ray.train.v2._internal.execution.scaling_policy.autoscaling_coordinator_client import (
    TrainAutoscalingCoordinatorClient,
)
from ray.train.v2.api.config import ScalingConfig

__all__ = ["RunScalingPolicy", "release_reservation"]

logger = logging.getLogger(__name__)

#: Seconds between two looks at the cluster while no worker group runs.
_LOOK_SECONDS = 0.5
#: Seconds between two reports that there is not enough capacity.
_REPORT_WAITING_SECONDS = 10.0


def release_reservation(requester_id: str) -> None:
    """Give back what a run holds, in place of its controller; others would wait for it for three minutes."""
    TrainAutoscalingCoordinatorClient(requester_id).cancel_resource_request()


class RunScalingPolicy(ElasticScalingPolicy):  # type: ignore[misc]
    """Decides the size of the worker group of one run.

    Args:
        scaling_config: Ray's scaling configuration, elastic.
        requester_id: Under which the run reserves resources; the same for every attempt of the run.
        wait_for_max_seconds: How long to wait for ``max_workers`` before starting smaller.
        on_waiting: Called with the number of workers that fit while that is below ``min_workers``.
    """

    def __init__(
        self,
        scaling_config: ScalingConfig,
        requester_id: str,
        wait_for_max_seconds: float = 0.0,
        on_waiting: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(scaling_config)
        self._run_requester_id = requester_id
        self._wait_for_max_seconds = wait_for_max_seconds
        self._on_waiting = on_waiting
        self._waiting_since: float | None = None
        self._reported_waiting_at = float("-inf")
        self._possible_workers = 0
        self._looked_at = float("-inf")
        self._reserved: dict[str, dict[str, float]] | None = None

    def after_controller_start(self, train_run_context: TrainRunContext) -> None:
        """Reserve under the run's own id, taking over what an earlier attempt of it still holds."""
        self._requester_id = self._run_requester_id
        self._coordinator_client = TrainAutoscalingCoordinatorClient(self._requester_id)
        self._send_resource_request()

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        """Start as large as possible, once ``min_workers`` fit and ``max_workers`` had their time to come."""
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        decision = super().make_decision_for_non_running_worker_group()
        if isinstance(decision, ResizeDecision):
            waited = now - self._waiting_since
            if decision.num_workers < self.scaling_config.max_workers and waited < self._wait_for_max_seconds:
                return NoopDecision()
            self._waiting_since = None
        elif now - self._reported_waiting_at >= _REPORT_WAITING_SECONDS:
            self._reported_waiting_at = now
            if self._on_waiting is not None:
                self._on_waiting(self._possible_workers)
        return decision

    def _count_possible_workers(self, reserved_resources: dict[str, dict[str, float]]) -> int:
        self._possible_workers = super()._count_possible_workers(reserved_resources)
        return self._possible_workers

    def _get_reserved_resources(self) -> dict[str, dict[str, float]] | None:
        """Give what the coordinator reserves for the run, on the nodes that are alive now."""
        if time.monotonic() - self._looked_at < _LOOK_SECONDS:
            return self._reserved
        try:
            self._reserved = ray.get(
                self._autoscaling_coordinator.get_reserved_resources.remote(self._requester_id, recompute=True),
                timeout=AUTOSCALING_REQUESTS_GET_TIMEOUT_S,
            )
        except Exception:
            logger.warning("No answer about reserved resources for %s", self._requester_id, exc_info=True)
            self._reserved = None
        self._looked_at = time.monotonic()
        return self._reserved
