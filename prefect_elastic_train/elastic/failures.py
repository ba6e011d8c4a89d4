"""Why a worker group fails: what tells more than that a rank failed, and what ends a wait.

Uses ``ray.train.v2._internal``: what Ray Train says of a worker that does not answer has no public type.
"""

from __future__ import annotations

from collections.abc import Iterable

import ray.exceptions
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError

from prefect_elastic_train.core.outcomes import StorageFaultError


class CapacityTimeoutError(Exception):
    """``min_workers`` did not fit for longer than ``capacity_timeout_seconds``."""


class IgnoredCheckpointError(Exception):
    """The loop began again although a checkpoint was there, and the failure budget does not allow that."""


class HungLoopError(Exception):
    """A rank reported nothing for longer than ``stall_timeout_seconds``; carries the stacks of its threads."""


def decisive(failures: Iterable[Exception]) -> IgnoredCheckpointError | StorageFaultError | None:
    """Return the failure of a rank that decides how training goes on: of the storage's faults the permanent first."""
    causes = [getattr(failure, "_base_exc", failure) for failure in failures]
    found = [cause for cause in causes if isinstance(cause, IgnoredCheckpointError | StorageFaultError)]
    return min(found, key=lambda cause: isinstance(cause, StorageFaultError) and not cause.permanent, default=None)


def why_never_again(failures: Iterable[Exception]) -> str:
    """Return why a new worker group would fail of the same, empty if it might not."""
    cause = decisive(failures)
    if isinstance(cause, IgnoredCheckpointError):
        return "the training ends, as ignored_checkpoint='fail' asks for"
    return "the storage refuses for good" if cause is not None and cause.permanent else ""


def is_death(failure: Exception) -> bool:
    """Return whether a rank's failure is that of its process or node, not of its train loop."""
    if isinstance(failure, ray.exceptions.RayTaskError):
        return False  # the loop itself asked Ray for something, which raised
    return isinstance(failure, ray.exceptions.RayError | WorkerHealthCheckFailedError | WorkerHealthCheckTimeoutError)
