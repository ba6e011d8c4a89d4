"""How an attempt may have ended, and whether another one can heal that."""

from __future__ import annotations

import enum
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State, TaskRun
    from prefect.tasks import Task


class Outcome(str, enum.Enum):
    """How a driver attempt, and with it perhaps the training, ended.

    ``superseded``: another process of the same flow run has taken the run over, and speaks for it from then on.
    """

    COMPLETED = "completed"
    USER_ERROR = "user_error"
    DRIVER_LOST = "driver_lost"
    CLUSTER_LOST = "cluster_lost"
    STORAGE_ERROR = "storage_error"
    NO_PROGRESS = "no_progress"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    INVALID = "invalid"
    SUPERSEDED = "superseded"

    @property
    def retryable(self) -> bool:
        """Whether a new driver on the same run may succeed where this attempt did not."""
        return self in (Outcome.DRIVER_LOST, Outcome.CLUSTER_LOST)


class ElasticTrainError(Exception):
    """Base of all errors that this package raises."""


class ConfigurationError(ElasticTrainError, ValueError):
    """The training cannot start as it is configured. Nothing has been started."""


class AttemptFailedError(ElasticTrainError):
    """A driver attempt ended without a result.

    Attributes:
        outcome: How it ended; :attr:`Outcome.retryable` tells whether Prefect will start another attempt.
        attempt: Number of the attempt in the run directory, 0 if none was begun.
        final: A budget is used up, so that nothing follows whatever the outcome.
    """

    def __init__(self, message: str, *, outcome: Outcome, attempt: int = 0, final: bool = False) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.attempt = attempt
        self.final = final

    @property
    def retryable(self) -> bool:
        """Whether another attempt may follow."""
        return self.outcome.retryable and not self.final

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), outcome=self.outcome, attempt=self.attempt, final=self.final), self.args


class TrainingTimeoutError(AttemptFailedError, TimeoutError):
    """The training took longer than it may. Prefect gives a task or flow that raises it the state TimedOut."""


class StorageFaultError(ElasticTrainError, OSError):
    """The storage does not do what is asked of it.

    Attributes:
        kind: What is wrong, in a word or two, such as ``"credentials"`` or ``"no space"``.
        permanent: It stays wrong until a person mends it. A passing one was repeated for as long as the storage
            block's ``retry_seconds`` say.
    """

    def __init__(self, message: str, *, kind: str, permanent: bool) -> None:
        super().__init__(message)
        self.kind = kind
        self.permanent = permanent

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), kind=self.kind, permanent=self.permanent), self.args


class CheckpointGoneError(ElasticTrainError, FileNotFoundError):
    """The run is there and the checkpoint is not, or no longer: runs keep as many as their policy says."""


def may_retry(task: Task[Any, Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Prefect's ``retry_condition_fn``, which must be a plain function: retry what a new driver can heal, no more."""
    data = getattr(state, "data", None)
    error = getattr(data, "result", data)
    return isinstance(error, AttemptFailedError) and error.retryable
