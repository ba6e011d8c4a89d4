"""Failures of a worker group: their cause, and whether a new group could succeed, as pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from prefect_elastic_train.core.causes import is_consequence
from prefect_elastic_train.core.outcomes import Outcome, StorageFaultError
from prefect_elastic_train.worker.rank_failures import failure_text, is_death

#: Seconds for which the cause of broken collectives is awaited, and for which a rank may leave a poll unanswered then.
_CAUSE_SECONDS = 10.0
CAUSE_POLL_SECONDS = 5.0


class CapacityTimeoutError(Exception):
    """The cluster had no room for ``min_workers`` for longer than ``capacity_timeout_seconds``."""


class IgnoredCheckpointError(Exception):
    """The loop started from the beginning although a checkpoint existed, and ``ignored_checkpoint`` is ``"fail"``."""


class HungLoopError(Exception):
    """A rank reported nothing for longer than ``stall_timeout_seconds``; the message has the stacks of its threads."""


class Cause(NamedTuple):
    """The cause of a worker group's failure: the outcome of the attempt if the failure ends it, and the reason as text.

    The outcome is None while the cause is not known yet.
    """

    outcome: Outcome | None
    reason: str


def decisive_failure(failures: Iterable[Exception]) -> IgnoredCheckpointError | StorageFaultError | None:
    """Return the failure among those of the ranks that decides if training continues; None if there is none.

    It is an ignored checkpoint or a storage fault. A transient storage fault is returned only if there is nothing else.
    """
    causes = [getattr(failure, "_base_exc", failure) for failure in failures]
    decisive = [cause for cause in causes if isinstance(cause, IgnoredCheckpointError | StorageFaultError)]
    return min(decisive, key=lambda cause: isinstance(cause, StorageFaultError) and not cause.permanent, default=None)


def permanent_reason(failures: Iterable[Exception]) -> str:
    """Return the reason why the next worker group would fail in the same way, or an empty text if it might succeed.

    The reasons are an ignored checkpoint and a permanent storage fault.
    """
    cause = decisive_failure(failures)
    if isinstance(cause, IgnoredCheckpointError):
        return "the training ends, as configured by ignored_checkpoint='fail'"
    return "the storage refuses permanently" if cause is not None and cause.permanent else ""


def classify_failure(failures: Mapping[int, Exception], workers: int = 0, waited_seconds: float = math.inf) -> Cause:
    """Return the cause of a worker group's failure.

    A failed collective is often only a consequence. It can fail before Ray notices that a peer's process or node is
    dead, and before the exception of a peer that closed the connection is known. So while only collectives have failed,
    the outcome is None, until all ranks have failed or `_CAUSE_SECONDS` have passed.

    Args:
        failures: The failures of the ranks.
        workers: Number of ranks of the worker group.
        waited_seconds: Seconds since the first failure of a rank.
    """
    if any(map(is_death, failures.values())):
        return Cause(Outcome.CLUSTER_LOST, "workers died more often than max_failures allows")
    if not all(is_consequence(failure_text(failure)) for failure in failures.values()):
        return Cause(Outcome.USER_ERROR, "the train loop failed more often than max_failures allows")
    if failures and len(failures) < workers and waited_seconds < _CAUSE_SECONDS:
        return Cause(None, "collectives lost a peer, and the cause is not known yet")
    return Cause(Outcome.CLUSTER_LOST, "connections between living workers broke more often than max_failures allows")
