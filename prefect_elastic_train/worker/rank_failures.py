"""Failures of a rank: their text, and the form in which a worker sends them to the controller.

Uses ``ray.train.v2._internal``: the errors that Ray Train raises for a worker without an answer have no public type.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError

from prefect_elastic_train.core.outcomes import StorageFaultError
from prefect_elastic_train.core.size_limits import MAX_LOG_BYTES, truncate


class LoopFailedError(Exception):
    """An exception of the train loop, as the text of its traceback."""

    _traceback_str = property(Exception.__str__)  # as in Ray's UserExceptionWithTraceback


def failure_text(failure: Exception) -> str:
    """Return the traceback of a rank's failure as text, or its type and message if it has no traceback."""
    return getattr(failure, "_traceback_str", "") or f"{type(failure).__name__}: {failure}"


def is_death(failure: Exception) -> bool:
    """Return True if a failure shows that the rank's process or node failed, False if its train loop raised."""
    if isinstance(failure, ray.exceptions.RayTaskError):
        return False  # the loop called Ray, and Ray raised
    return isinstance(failure, ray.exceptions.RayError | WorkerHealthCheckFailedError | WorkerHealthCheckTimeoutError)


def portable_failure(failure: Any) -> Any:
    """Return the error of this worker's train loop in a form that any process can unpickle; None if there is none.

    An exception may hold a lock, take other arguments than it stores, or be of a class that only workers can import. So
    the controller gets its text, unless its type decides if training continues.
    """
    cause = getattr(failure, "_base_exc", failure)
    if is_death(cause) or isinstance(cause, StorageFaultError | None):
        return failure
    return LoopFailedError(truncate(failure_text(failure), MAX_LOG_BYTES))
