"""Pure functions on the failures of a worker group: their causes, and whether a new worker group could succeed."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from prefect_elastic_train.core.causes import Cause, short_message
from prefect_elastic_train.core.outcomes import Outcome, StorageFaultError
from prefect_elastic_train.core.size_limits import truncate
from prefect_elastic_train.worker.rank_failures import failure_text, is_death

#: Seconds for which the cause of broken collectives is awaited, and for which a rank may leave a poll unanswered then.
_CAUSE_SECONDS = 10.0
CAUSE_POLL_SECONDS = 5.0
#: Process ids, addresses and the like, which differ between ranks with the same error.
_VARIABLE = re.compile(r"[0-9a-f]{8,}|\d+")
#: Bytes of all errors of a failure, which become one event. One error, which becomes a log record, has at most half.
_MAX_ERRORS = 200_000
_MAX_CAUSES = 100


class CapacityTimeoutError(Exception):
    """The cluster had no room for ``min_workers`` for longer than ``capacity_timeout_seconds``."""


class IgnoredCheckpointError(Exception):
    """The loop started from the beginning although a checkpoint existed, and ``ignored_checkpoint`` is ``"fail"``."""


class HungLoopError(Exception):
    """A rank hangs, or waits for one that does. It exceeded ``stall_timeout_seconds``, or a limit that was learned.

    The message has the stacks of its threads.
    """

    is_of_node = True
    is_consequence = False  # True if the rank waits for one that hangs


def failures_of(error: Exception) -> dict[int, Exception]:
    """Return the failures of ranks in an error of Ray Train; none for an error that is not of a worker group.

    An error that names no rank, such as that of Ray's detector of NCCL hangs, is returned for rank -1.
    """
    failures: dict[int, Exception] | None = getattr(error, "worker_failures", None)
    return {-1: error} if failures == {} else failures or {}


def causes_of(failures: Mapping[int, Exception]) -> list[Cause]:
    """Return one Cause of limited size for each different failure of a worker group's ranks.

    Failures whose texts differ only in numbers, such as process ids, count as the same. The ranks of all failures after
    the first `_MAX_CAUSES` different ones are added to the last of these.
    """
    groups: dict[str, list[int]] = {}
    for rank, failure in sorted(failures.items()):
        text = _VARIABLE.sub("#", failure_text(failure))
        if len(groups) >= _MAX_CAUSES and text not in groups:
            text = next(reversed(groups))
        groups.setdefault(text, []).append(rank)
    limit = _MAX_ERRORS // max(2, len(groups))
    return [_make_cause(ranks, failures[ranks[0]], limit) for ranks in groups.values()]


def _make_cause(ranks: list[int], failure: Exception, limit: int) -> Cause:
    error = getattr(failure, "_base_exc", failure)
    text = f"{type(error).__name__}: {error}".replace("Training failed due to worker errors:\n", "")
    return Cause(
        ranks=[rank for rank in ranks if rank >= 0],
        message=getattr(error, "message", "") or short_message(text if is_death(error) else text.partition("\n")[0]),
        is_death=is_death(failure),
        is_consequence=_is_consequence(failure),
        traceback=truncate(failure_text(failure), limit),
    )


def skipped_steps(failures: Iterable[Exception]) -> set[int]:
    """Return the steps whose batches the next worker group skips, as guards of sessions request by a ``NumericError``.

    -1 is among them if a guard ends the training.
    """
    steps = (getattr(getattr(failure, "_base_exc", failure), "skipped_step", None) for failure in failures)
    return {step for step in steps if step is not None}


def decisive_failure(failures: Collection[Exception]) -> IgnoredCheckpointError | StorageFaultError | None:
    """Return the failure among those of the ranks that decides if training continues; None if there is none.

    It is an ignored checkpoint or a storage fault. A transient storage fault is returned only if there is nothing else.
    """
    if -1 in skipped_steps(failures):
        return None
    causes = [getattr(failure, "_base_exc", failure) for failure in failures]
    decisive = [cause for cause in causes if isinstance(cause, IgnoredCheckpointError | StorageFaultError)]
    return min(decisive, key=lambda cause: isinstance(cause, StorageFaultError) and not cause.permanent, default=None)


def permanent_reason(failures: Collection[Exception]) -> str:
    """Return the reason for which a failure ends the training; an empty text if another worker group may train.

    The reasons are an ignored checkpoint and a permanent storage fault, after which the next worker group would fail in
    the same way, and a guard that raises.
    """
    if -1 in skipped_steps(failures):
        return "the training ends, as configured by the guard of the session"
    cause = decisive_failure(failures)
    if isinstance(cause, IgnoredCheckpointError):
        return "the training ends, as configured by ignored_checkpoint='fail'"
    return "the storage refuses permanently" if cause and cause.permanent else ""


def must_await_cause(errors: Sequence[Exception | None], waited_seconds: float) -> bool:
    """Return True if only collectives have failed so far, which is often a consequence of another rank's failure.

    A collective can fail before Ray notices that a peer's process or node is dead, and before the exception of a peer
    that closed the connection is known. The cause is awaited until all ranks have failed or `_CAUSE_SECONDS` have
    passed.

    Args:
        errors: For each rank its failure, or None.
        waited_seconds: Seconds since the first failure of a rank.
    """
    failures = [*filter(None, errors)]
    return 0 < len(failures) < len(errors) and waited_seconds < _CAUSE_SECONDS and all(map(_is_consequence, failures))


def classify_failure(failures: Collection[Exception]) -> tuple[Outcome, str]:
    """Return the outcome of an attempt that a worker group's failure ends, and the reason as text."""
    if -1 in skipped_steps(failures):
        return Outcome.USER_ERROR, "the guard of the session has found a problem"
    if any(map(is_death, failures)):
        return Outcome.CLUSTER_LOST, "workers died more often than max_failures allows"
    if not all(map(_is_consequence, failures)):
        return Outcome.USER_ERROR, "the train loop failed more often than max_failures allows"
    return Outcome.CLUSTER_LOST, "connections between living workers broke more often than max_failures allows"


def is_of_node(failure: Exception) -> bool:
    """Return True if a rank's failure is a strike against its node: it died, hangs or has wrong results."""
    return is_death(failure) or (getattr(failure, "is_of_node", False) and not _is_consequence(failure))


def _is_consequence(failure: Exception) -> bool:
    return bool(getattr(failure, "is_consequence", False))
