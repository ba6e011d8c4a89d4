"""Differences between the minor versions of Ray that this package runs with.

Uses ``ray.data._internal`` and ``ray.train.v2._internal``, since Ray's coordinator has no public interface.
"""

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import ray
from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import _AutoscalingCoordinatorActor
from ray.train import FailureConfig
from ray.train.v2._internal.execution.scaling_policy import AUTOSCALING_REQUESTS_GET_TIMEOUT_S

from prefect_elastic_train.core.settings import FailureSettings

#: True if the coordinator can refresh its view of the cluster before it answers, as since Ray 2.60.
_CAN_RECOMPUTE = "recompute" in inspect.signature(_AutoscalingCoordinatorActor.get_reserved_resources).parameters


def failure_config(failures: FailureSettings) -> FailureConfig:
    """Return Ray's ``FailureConfig`` for the failure settings of a run.

    Before Ray 2.60, it has no ``preemption_grace_s`` and no ``relax_collectives_on_preemption``, and a training with
    other values than the defaults is refused.
    """
    options: dict[str, Any] = {
        "preemption_grace_s": failures.preemption_grace_seconds,
        "relax_collectives_on_preemption": failures.relax_collectives_on_preemption,
    }
    return FailureConfig(
        max_failures=failures.max_failures,
        max_preemption_failures=failures.max_preemption_failures,
        **{name: value for name, value in options.items() if value},
    )


def reserved_resources(coordinator: Any, requester_id: str) -> Collection[Mapping[str, float]]:
    """Return the resources that Ray's coordinator reserves for a requester, on the nodes that are alive now.

    Since Ray 2.60, there is one mapping for each node; before, one for each requested worker that fits.
    """
    if not _CAN_RECOMPUTE:
        # Without this call, the view is up to 20 s old. The actor executes the calls of one caller in order.
        coordinator._tick.remote()
    options = {"recompute": True} if _CAN_RECOMPUTE else {}
    reference = coordinator.get_reserved_resources.remote(requester_id, **options)
    reserved = ray.get(reference, timeout=AUTOSCALING_REQUESTS_GET_TIMEOUT_S)
    return reserved.values() if isinstance(reserved, Mapping) else reserved
