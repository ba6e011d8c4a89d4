"""Outcomes of an attempt, and the exceptions of this package. Belongs to all processes."""

from __future__ import annotations

import enum
from functools import partial
from typing import Any


class Outcome(str, enum.Enum):
    """Outcome of an attempt, which may also be the outcome of the training.

    ``superseded``: another process of the same flow run has taken over the run and reports its end.
    """

    COMPLETED = "completed"
    """The loop returned on all ranks."""
    USER_ERROR = "user_error"
    """The loop raised on all failed ranks, beyond ``max_failures``, or the datasets could not be made."""
    DRIVER_LOST = "driver_lost"
    """The driver or Ray Train's controller died, failed, or sent no heartbeat."""
    CLUSTER_LOST = "cluster_lost"
    """The cluster died or does not answer, or workers died more often than the budgets allow."""
    STORAGE_ERROR = "storage_error"
    """The storage refuses: credentials, permissions, no space, no bucket, read-only."""
    NO_PROGRESS = "no_progress"
    """``max_attempts_without_progress`` attempts in a row committed no checkpoint."""
    CANCELLED = "cancelled"
    """The flow run was cancelled, or the flow process was stopped."""
    TIMED_OUT = "timed_out"
    """``timeout_seconds`` or ``capacity_timeout_seconds`` passed."""
    INVALID = "invalid"
    """The configuration, or a run that belongs to another flow run."""
    SUPERSEDED = "superseded"
    """Another process of the same flow run has taken over the run and reports its state."""

    @property
    def retryable(self) -> bool:
        """True for an outcome after which another attempt of the run may succeed: its driver or cluster was lost."""
        return self in (Outcome.DRIVER_LOST, Outcome.CLUSTER_LOST)


class ElasticTrainError(Exception):
    """Base of all errors that this package raises.

    The attributes of a subclass are keyword arguments of its constructor, so that an error can be pickled with them.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        attributes = {name: value for name, value in vars(self).items() if name != "__notes__"}
        return partial(type(self), **attributes), self.args


class ConfigurationError(ElasticTrainError, ValueError):
    """The training is configured in a way that cannot work. Nothing has been started."""


class AttemptFailedError(ElasticTrainError):
    """A driver attempt ended without a result.

    Attributes:
        outcome: Outcome of the attempt; Prefect starts another attempt if it is :attr:`Outcome.retryable`.
        attempt: Number of the attempt in the run directory, 0 if it did not get one.
        final: A budget is exhausted, so no attempt follows, whatever the outcome.
    """

    def __init__(
        self, message: str, *, outcome: Outcome = Outcome.INVALID, attempt: int = 0, final: bool = False
    ) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.attempt = attempt
        self.final = final

    @property
    def retryable(self) -> bool:
        """True if another attempt may follow: the outcome is retryable, and no budget is exhausted."""
        return self.outcome.retryable and not self.final


class TrainingTimeoutError(AttemptFailedError, TimeoutError):
    """The training exceeded its time limit. Prefect gives a task or flow that raises it the state TimedOut."""


class StorageFaultError(ElasticTrainError, OSError):
    """An operation of the storage failed.

    Attributes:
        kind: Short name of the fault, such as ``"credentials"`` or ``"no space"``.
        permanent: A person must fix it. A transient fault was retried for the storage block's ``retry_seconds``.
    """

    def __init__(self, message: str, *, kind: str, permanent: bool) -> None:
        super().__init__(message)
        self.kind = kind
        self.permanent = permanent


class CheckpointGoneError(ElasticTrainError, FileNotFoundError):
    """The run exists and the checkpoint does not: it was never written, or the checkpoint policy deleted it."""


def may_retry(task: object, task_run: object, state: object) -> bool:
    """Return True if Prefect shall retry the task of a training that failed: a new driver may succeed.

    Prefect calls it as ``retry_condition_fn``, which must be a plain function.
    """
    data = getattr(state, "data", None)
    error = getattr(data, "result", data)
    return isinstance(error, AttemptFailedError) and error.retryable
