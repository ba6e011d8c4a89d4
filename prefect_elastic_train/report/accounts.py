"""What a run's history adds up to: a pure function of its events, over all attempts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, Field

from prefect_elastic_train.core.events import (
    AttemptEnded,
    AttemptStarted,
    Event,
    LoopWarned,
    Reported,
    StorageWaited,
    WorkerFailed,
    WorkerGroupResized,
    WorkerGroupStarted,
    WorkersPreempted,
)
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.core.result import TimeAccount, WorldSize
from prefect_elastic_train.report.goodput import GoodputMeter

__all__ = ["Accounts", "Tally", "add_up"]

#: Rows of metrics that a result carries at most.
_MAX_HISTORY_ROWS = 2000


class _Counts(BaseModel):
    """What is counted of a run. See :class:`prefect_elastic_train.TrainingResult` for the fields."""

    attempts: int = 0
    worker_failures: int = 0
    preemptions: int = 0
    resizes: int = 0
    steps_lost: int = 0
    storage_wait_seconds: float = 0.0


class Accounts(_Counts):
    """Counts and times of a run. See :class:`prefect_elastic_train.TrainingResult` for the fields."""

    time: TimeAccount = Field(default_factory=TimeAccount)
    world_sizes: list[WorldSize] = Field(default_factory=list)
    last_metrics: dict[str, Any] = Field(default_factory=dict)
    history: list[dict[str, Any]] = Field(default_factory=list)
    #: Reports that the history is taken from.
    reports: int = 0


class _GroupReports(BaseModel):
    """The reports of a worker group, numbered over all groups of an attempt: the last one, and the last one kept."""

    first: int
    last: int
    kept: int
    #: Reports of the run that were kept when the group started.
    before: int = 0


class Tally(_Counts):
    """Counts of a run, event by event. Its state is plain values of a bounded size."""

    meter: GoodputMeter = Field(default_factory=GoodputMeter)
    attempt: int = 0
    group: _GroupReports | None = None
    #: Number of the attempt's last report.
    index: int = 0
    #: Reports that checkpoints have kept, without those that were done again.
    kept: int = 0
    #: Reports that are lost if another attempt follows.
    pending: int = 0

    def take(self, event: Event) -> None:
        """Take the next event in."""
        self.meter.take(event)
        if isinstance(event, AttemptStarted):
            self._close(None)  # the attempt before died without a word
            self.steps_lost += self.pending
            self.pending = self.index = 0
            self.attempts += event.attempt != self.attempt
            self.attempt = event.attempt
        elif isinstance(event, WorkerGroupStarted):
            self._close(None)
            self.group = _GroupReports(first=self.index, last=self.index, kept=self.index, before=self.kept)
        elif isinstance(event, Reported):
            self.index = event.index
            if self.group is not None:
                self.group.last = event.index
                if event.checkpoint:
                    self.kept += event.index - self.group.kept
                    self.group.kept = event.index
        elif isinstance(event, LoopWarned) and self.group is not None:
            again = round(self.group.before * event.again)
            if event.is_redone:
                again = min(again, self.index - self.group.first)
            self.kept -= again
            self.steps_lost += again
        elif isinstance(event, StorageWaited):
            self.storage_wait_seconds = round(self.storage_wait_seconds + event.seconds, 3)
        elif isinstance(event, WorkerFailed | WorkersPreempted):
            if isinstance(event, WorkerFailed):
                self.worker_failures += 1
            else:
                self.preemptions += 1
            self._close(event.reports_lost if event.retried else 0)
            self.pending = 0 if event.retried else event.reports_lost
        elif isinstance(event, WorkerGroupResized):
            self.resizes += 1
            self._close(None)
        elif isinstance(event, AttemptEnded) and event.outcome is Outcome.COMPLETED:
            self._close(0)

    def _close(self, lost: int | None) -> None:
        if self.group is not None:
            self.steps_lost += max(0, self.group.last - self.group.kept) if lost is None else lost
        self.group = None


class _Rows:
    """Rows of which a bounded number is kept, evenly taken, first and last included."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._stride = 1
        self.count = 0
        self._last: dict[str, Any] | None = None

    def add(self, row: dict[str, Any]) -> None:
        if self.count % self._stride == 0:
            self._rows.append(row)
            if len(self._rows) > 2 * _MAX_HISTORY_ROWS:
                self._rows = self._rows[::2]
                self._stride *= 2
        self.count += 1
        self._last = row

    def taken(self) -> list[dict[str, Any]]:
        rows = list(self._rows)
        if self._last is not None and rows[-1] is not self._last:
            rows.append(self._last)
        if len(rows) <= _MAX_HISTORY_ROWS:
            return rows
        step = (len(rows) - 1) / (_MAX_HISTORY_ROWS - 1)
        return [rows[round(n * step)] for n in range(_MAX_HISTORY_ROWS)]


def add_up(events: Iterable[Event]) -> Accounts:
    """Give the accounts of a run from its events, in order, over all attempts."""
    tally, rows = Tally(), _Rows()
    accounts = Accounts()
    for event in events:
        tally.take(event)
        if isinstance(event, WorkerGroupStarted):
            accounts.world_sizes.append(WorldSize(at=event.at, size=event.world_size))
        elif isinstance(event, Reported):
            accounts.last_metrics = event.metrics
            where = {"_attempt": event.attempt, "_at": event.at, "_world_size": event.world_size}
            rows.add({**event.metrics, **where})
    counts = tally.model_dump(include=set(_Counts.model_fields))
    told = {"time": tally.meter.account(), "history": rows.taken(), "reports": rows.count}
    return accounts.model_copy(update={**counts, **told})
