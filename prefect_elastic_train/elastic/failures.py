"""Why a worker group fails: telling a rank that died from one whose loop raised, and what ends a wait.

Pure functions over what Ray raises. Uses ``ray.train.v2._internal``: what Ray Train says of a worker that does not
answer has no public type.
"""

from __future__ import annotations

from collections.abc import Iterable

import ray.exceptions
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError
from ray.train.v2.api.exceptions import WorkerGroupError

from prefect_elastic_train.core.outcomes import StorageFaultError
from prefect_elastic_train.elastic.loop_watch import IgnoredCheckpointError


class CapacityTimeoutError(Exception):
    """``min_workers`` did not fit for longer than ``capacity_timeout_seconds``."""


def ignored_checkpoint(error: Exception) -> IgnoredCheckpointError | None:
    """Return what the loop has done wrong that makes it fail, None if it is anything else."""
    failures = error.worker_failures.values() if isinstance(error, WorkerGroupError) else ()
    return next((failure for failure in failures if isinstance(failure, IgnoredCheckpointError)), None)


def storage_fault(error: Exception) -> StorageFaultError | None:
    """Return what the storage refused to a rank, the permanent first; None if no rank failed by that."""
    return worst_fault(error.worker_failures.values()) if isinstance(error, WorkerGroupError) else None


def worst_fault(failures: Iterable[Exception]) -> StorageFaultError | None:
    """Return what the storage refused, the permanent first; None if no failure of a rank is that."""
    causes = (getattr(failure, "_base_exc", failure) for failure in failures)
    faults = [cause for cause in causes if isinstance(cause, StorageFaultError)]
    return min(faults, key=lambda fault: not fault.permanent, default=None)


def why_given_up(failures: Iterable[Exception]) -> str:
    """Return why a worker group is not restarted, if it is not."""
    failures = list(failures)
    fault = worst_fault(failures)
    if any(isinstance(failure, IgnoredCheckpointError) for failure in failures):
        return "the training ends, as ignored_checkpoint='fail' asks for"
    return "the storage refuses for good" if fault is not None and fault.permanent else "the budget is used up"


def is_death(failure: Exception) -> bool:
    """Return whether a rank's failure is that of its process or node, not of its train loop."""
    if isinstance(failure, ray.exceptions.RayTaskError):
        return False  # the loop itself asked Ray for something, which raised
    return isinstance(failure, ray.exceptions.RayError | WorkerHealthCheckFailedError | WorkerHealthCheckTimeoutError)
