"""Why a worker group fails: telling a rank that died from one whose loop raised, and what ends a wait.

Uses ``ray.train.v2._internal``: what Ray Train says of a worker that does not answer has no public type.
"""

from __future__ import annotations

import ray.exceptions
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError

__all__ = ["CapacityTimeoutError", "is_death"]


class CapacityTimeoutError(Exception):
    """``min_workers`` did not fit for longer than ``capacity_timeout_seconds``."""


def is_death(failure: Exception) -> bool:
    """Tell whether a rank's failure is that of its process or node, not of its train loop."""
    if isinstance(failure, ray.exceptions.RayTaskError):
        return False  # the loop itself asked Ray for something, which raised
    return isinstance(failure, ray.exceptions.RayError | WorkerHealthCheckFailedError | WorkerHealthCheckTimeoutError)
