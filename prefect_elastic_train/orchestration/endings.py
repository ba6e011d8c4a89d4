"""How a training ended in this process: decided here from what was raised, for its flow run, its report and its job."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass

from prefect.exceptions import Abort, TerminationSignal

from prefect_elastic_train.core.events import AttemptEnded
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome, TrainingTimeoutError
from prefect_elastic_train.orchestration.cancellation import Stop, StopReason


class SilentEndError(AttemptFailedError):
    """The flow run has its state already, or another process speaks for it: the flow must end without a word.

    Prefect's ``Abort`` does that. Raised in a task it would leave the task run Running for ever, so a task fails with
    this, and whoever has called it raises the other.
    """


class End(str, enum.Enum):
    """What a training that goes on no more is shown as."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed out"
    INTERRUPTED = "interrupted"
    LEFT = "left to its job"


@dataclass(frozen=True)
class Ending:
    """How a training is shown as ended.

    Attributes:
        end: As what.
        why: What there is to say of that.
        told: Prefect was told of it before, or is not to be told.
    """

    end: End
    why: str = ""
    told: bool = False


def ending_of(error: BaseException, detached: bool, is_wanted: Callable[[], bool]) -> Ending | None:
    """How a training ended that raised an error.

    Args:
        error: The error, or what stood in for it.
        detached: Its job goes on.
        is_wanted: Asks whether somebody wanted the end: a machine that is taken away sends the same signal as a
            cancellation.

    Returns:
        None if another process shows the training now.
    """
    if isinstance(error, SilentEndError | Abort) or (isinstance(error, Stop) and error.reason is StopReason.TAKEN_OVER):
        return None
    if detached:
        return Ending(End.LEFT, "the flow process was told to end; the job goes on", told=True)
    if isinstance(error, TimeoutError):
        return Ending(End.TIMED_OUT, str(error))
    if isinstance(error, AttemptFailedError):
        return Ending(End.CANCELLED if error.outcome is Outcome.CANCELLED else End.FAILED, str(error))
    if isinstance(error, Exception):
        return Ending(End.FAILED, f"{type(error).__name__}: {error}")
    if isinstance(error, Stop) and error.reason is not None:
        cancelled = error.reason is StopReason.CANCELLING
    else:
        cancelled = isinstance(error, KeyboardInterrupt | asyncio.CancelledError) or is_wanted()
    if cancelled:
        return Ending(End.CANCELLED, str(error))
    return Ending(End.INTERRUPTED, "the flow process was told to end; what is committed stays")


def detaches(reason: BaseException, terminated: bool, is_wanted: Callable[[], bool]) -> bool:
    """Whether a job goes on when the flow process is told to end: only if nobody wants the training to end.

    Args:
        reason: What was raised.
        terminated: This process got SIGTERM: a machine that is taken away sends it, as does a runner that carries out
            a cancellation. In the main thread Prefect's own signal handler raises; elsewhere only the pipe knows.
        is_wanted: As of :func:`ending_of`.
    """
    if isinstance(reason, Stop) and reason.reason is not None:
        return reason.reason is StopReason.TAKEN_OVER
    if isinstance(reason, TimeoutError) or not (terminated or isinstance(reason, TerminationSignal)):
        return False
    return not is_wanted()


def error_of(run_name: str, ended: AttemptEnded) -> AttemptFailedError:
    """The error of an attempt that did not complete."""
    if ended.outcome is Outcome.SUPERSEDED:
        # The flow run is the other process's now: whatever this one said of it would be wrong.
        return SilentEndError(f"training {run_name!r}: {ended.message}", outcome=ended.outcome)
    attempt = f"attempt {ended.attempt}" if ended.attempt else "the driver"
    error_type = TrainingTimeoutError if ended.outcome is Outcome.TIMED_OUT else AttemptFailedError
    return error_type(
        f"training {run_name!r}, {attempt}: {ended.outcome.value}: {ended.message}",
        outcome=ended.outcome,
        attempt=ended.attempt,
        final=ended.final,
    )
