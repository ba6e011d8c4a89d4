"""Why a worker group fails: telling a rank that died from one whose loop raised, and what ends a wait.

Uses ``ray.train.v2._internal``: what Ray Train says of a worker that does not answer has no public type, and there is
no public way to bring a failure policy.
"""

from __future__ import annotations

from collections.abc import Iterable

import ray.exceptions
from ray.train import PreemptionInfo
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError
from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy, FailureDecision
from ray.train.v2.api.exceptions import PreemptionError, TrainingFailedError, WorkerGroupError

from prefect_elastic_train.core.outcomes import StorageFaultError
from prefect_elastic_train.elastic import callbacks
from prefect_elastic_train.elastic.loop_watch import IgnoredCheckpointError

__all__ = ["CapacityTimeoutError", "RunFailurePolicy", "ignored_checkpoint", "is_death", "storage_fault", "worst_fault"]


class CapacityTimeoutError(Exception):
    """``min_workers`` did not fit for longer than ``capacity_timeout_seconds``."""


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


def ignored_checkpoint(error: Exception) -> IgnoredCheckpointError | None:
    """What the loop has done wrong that makes it fail, None if it is anything else."""
    failures = error.worker_failures.values() if isinstance(error, WorkerGroupError) else ()
    return next((failure for failure in failures if isinstance(failure, IgnoredCheckpointError)), None)


def storage_fault(error: Exception) -> StorageFaultError | None:
    """Give what the storage refused to a rank, the permanent first; None if no rank failed by that."""
    if not isinstance(error, WorkerGroupError):
        return None
    return worst_fault(error.worker_failures.values())


def worst_fault(failures: Iterable[Exception]) -> StorageFaultError | None:
    """Give what the storage refused, the permanent first; None if no failure of a rank is that."""
    causes = (getattr(failure, "_base_exc", failure) for failure in failures)
    faults = [cause for cause in causes if isinstance(cause, StorageFaultError)]
    return min(faults, key=lambda fault: not fault.permanent, default=None)


def is_death(failure: Exception) -> bool:
    """Tell whether a rank's failure is that of its process or node, not of its train loop."""
    if isinstance(failure, ray.exceptions.RayTaskError):
        return False  # the loop itself asked Ray for something, which raised
    return isinstance(failure, ray.exceptions.RayError | WorkerHealthCheckFailedError | WorkerHealthCheckTimeoutError)
