"""What a run's history adds up to: a pure function of its events, over all attempts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, Field

from prefect_elastic_train.driver.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    Event,
    Reported,
    StorageWaited,
    WorkerFailed,
    WorkerGroupResized,
    WorkerGroupStarted,
    WorkersPreempted,
)
from prefect_elastic_train.result import WorldSize

__all__ = ["Accounts", "add_up"]

#: Rows of metrics that a result carries at most.
_MAX_HISTORY_ROWS = 2000


class Accounts(BaseModel):
    """Counts and times of a run. See :class:`prefect_elastic_train.TrainingResult` for the fields."""

    attempts: int = 0
    worker_failures: int = 0
    preemptions: int = 0
    resizes: int = 0
    steps_lost: int = 0
    storage_wait_seconds: float = 0.0
    goodput: float = 0.0
    world_sizes: list[WorldSize] = Field(default_factory=list)
    last_metrics: dict[str, Any] = Field(default_factory=dict)
    history: list[dict[str, Any]] = Field(default_factory=list)


class _Group:
    """A worker group: what it did, and how much of that was kept."""

    def __init__(self, event: WorkerGroupStarted, index: int) -> None:
        self.started_at = event.at
        self.last_report_at = event.at
        self.kept_until = event.at
        # Reports are numbered over all worker groups of an attempt.
        self.last_index = index
        self.kept_index = index

    def kept_seconds(self, whole: bool) -> float:
        return (self.last_report_at if whole else self.kept_until) - self.started_at

    def lost_reports(self) -> int:
        return max(0, self.last_index - self.kept_index)


def add_up(events: Iterable[Event]) -> Accounts:
    """Give the accounts of a run from its events, in order, over all attempts.

    Productive time of a worker group is from its start to its last commit, or to its last report if training
    completed or the group was never followed by another. Goodput is the productive time of all groups over the
    time from the first event to the last.
    """
    accounts = Accounts()
    attempts: set[int] = set()
    rows: list[dict[str, Any]] = []
    group: _Group | None = None
    productive = 0.0
    first_at = last_at = 0.0
    index = pending = 0
    completed = False

    def close(lost: int | None, whole: bool = False) -> None:
        nonlocal group, productive
        if group is not None:
            productive += group.kept_seconds(whole)
            accounts.steps_lost += group.lost_reports() if lost is None else lost
        group = None

    for event in events:
        first_at = first_at or event.at
        last_at = max(last_at, event.at)
        if isinstance(event, AttemptStarted):
            close(None)  # the attempt before died without a word
            accounts.steps_lost += pending
            pending = 0
            attempts.add(event.attempt)
            index = 0
        elif isinstance(event, WorkerGroupStarted):
            close(None)
            group = _Group(event, index)
            accounts.world_sizes.append(WorldSize(at=event.at, size=event.world_size))
        elif isinstance(event, Reported):
            accounts.last_metrics = event.metrics
            index = event.index
            rows.append(
                {
                    **event.metrics,
                    "_attempt": event.attempt,
                    "_at": event.at,
                    "_world_size": event.world_size,
                }
            )
            if group is not None:
                group.last_report_at, group.last_index = event.at, event.index
                if event.checkpoint:
                    group.kept_until, group.kept_index = event.at, event.index
        elif isinstance(event, CheckpointCommitted):
            if group is not None:
                group.kept_until = max(group.kept_until, event.at)
        elif isinstance(event, StorageWaited):
            accounts.storage_wait_seconds = round(accounts.storage_wait_seconds + event.seconds, 3)
        elif isinstance(event, WorkerFailed):
            accounts.worker_failures += 1
            close(event.reports_lost if event.retried else 0)
            pending = 0 if event.retried else event.reports_lost
        elif isinstance(event, WorkersPreempted):
            accounts.preemptions += 1
            close(event.reports_lost if event.retried else 0)
            pending = 0 if event.retried else event.reports_lost
        elif isinstance(event, WorkerGroupResized):
            accounts.resizes += 1
            close(None)
        elif isinstance(event, AttemptEnded):
            completed = event.outcome == "completed"
            if completed:
                close(0, whole=True)
    close(0)
    accounts.attempts = len(attempts)
    accounts.history = _thinned(rows)
    wall = last_at - first_at
    accounts.goodput = round(min(1.0, productive / wall), 4) if wall > 0 else 0.0
    return accounts


def _thinned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give at most the allowed number of rows, evenly taken, first and last included."""
    if len(rows) <= _MAX_HISTORY_ROWS:
        return rows
    step = (len(rows) - 1) / (_MAX_HISTORY_ROWS - 1)
    return [rows[round(n * step)] for n in range(_MAX_HISTORY_ROWS)]
