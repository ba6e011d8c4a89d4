"""Failures of a rank: the form in which a worker sends them to the controller, and their text.

Uses ``ray.train.v2._internal``: the errors that Ray Train raises for a worker without an answer have no public type.
"""

import re
from traceback import TracebackException
from typing import Any

import ray
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError

from prefect_elastic_train.core.causes import MAX_CAUSE
from prefect_elastic_train.core.outcomes import StorageFaultError
from prefect_elastic_train.core.size_limits import MAX_LOG_BYTES, truncate

#: Errors of collectives on the surviving ranks when a rank is lost. Python's ConnectionError is not one of them.
_CONSEQUENCE = re.compile(
    # Errors of a store or the network always count. The others are recognized by their message.
    r"Dist(?:Network|Store)Error:|(?:Runtime|DistBackend)Error: (?=.{0,500}?(?:gloo|unbound_buffer|nccl|c10d|tcpstore"
    r"|processgroup|coordination serv|heartbeat|watchdog|collective|barrier)).{0,500}?"
    r"(?:(?:closed|reset) by (?:remote )?peer|connection (?:closed|reset)|broken pipe|remote (?:peer|process)"
    r"|coordination serv|heartbeat|watchdog|nccl(?:Remote|System)Error|unhandled system error"
    r"|communicator was aborted|time[d ]*-?out)",
    re.I,
)


class LoopFailedError(Exception):
    """An exception of the train loop, as the text of its traceback.

    Attributes:
        message: Type and message of the exception, in one short line.
        is_consequence: True for the error of a collective (NCCL, Gloo, …) that follows from a lost rank or connection.
        is_of_node: True for a ``WrongResultError``.
        skipped_step: That of a ``NumericError``; None for other exceptions.
    """

    _traceback_str = property(Exception.__str__)  # as in Ray's UserExceptionWithTraceback
    message: str
    is_consequence = False
    is_of_node = False
    skipped_step: int | None = None


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
    error = getattr(failure, "_base_exc", failure)
    if is_death(error) or isinstance(error, StorageFaultError | None):
        return failure
    if isinstance(error, ray.exceptions.RayTaskError):
        error = error.cause or error
    portable = LoopFailedError(truncate(failure_text(failure), MAX_LOG_BYTES))
    raised = TracebackException.from_exception(error)
    portable.message = _message(raised)[:MAX_CAUSE]
    chained: BaseException | None = error
    while chained is not None and portable.skipped_step is None:  # another error may follow, such as of a cleanup
        portable.skipped_step = getattr(chained, "skipped_step", None)
        portable.is_of_node |= getattr(chained, "is_of_node", False) is True
        chained = chained.__cause__ or chained.__context__
    cause: TracebackException | None = raised
    while cause:  # an error of a collective is often the cause of another
        portable.is_consequence |= _CONSEQUENCE.search(_message(cause)) is not None
        cause = cause.__cause__ or cause.__context__
    return portable


def _message(raised: TracebackException) -> str:
    """Return type and message of an exception in one line; for a group also those of the exceptions in it."""
    message = " ".join("".join(raised.format_exception_only()).split())
    return "; ".join([message, *map(_message, getattr(raised, "exceptions", None) or [])])
