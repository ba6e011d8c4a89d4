"""What a run's history adds up to: a pure function of its events, over all attempts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, Field

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.core.result import TimeAccount, WorldSize
from prefect_elastic_train.report.goodput import GoodputMeter

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


class Tally(_Counts, ev.EventHandler):
    """Counts and times of a run, event by event: all that is told of them comes from here.

    Its state is plain values of a bounded size.
    """

    meter: GoodputMeter = Field(default_factory=GoodputMeter)
    attempt: int = 0
    group: _GroupReports | None = None
    #: Number of the attempt's last report.
    index: int = 0
    #: Reports that checkpoints have kept, without those that were done again.
    kept: int = 0
    #: Reports that are lost if another attempt follows.
    pending: int = 0

    @property
    def position(self) -> int:
        """Number of the last report, counted without those that were done again."""
        return self.kept + (self.group.last - self.group.kept if self.group is not None else 0)

    def take(self, event: ev.Event) -> None:
        """Take the next event in."""
        self.meter.take(event)
        self.handle(event)

    def on_attempt_started(self, event: ev.AttemptStarted) -> None:
        self._close(None)  # the attempt before died without a word
        self.steps_lost += self.pending
        self.pending = self.index = 0
        self.attempts += event.attempt != self.attempt
        self.attempt = event.attempt

    def on_worker_group_started(self, event: ev.WorkerGroupStarted) -> None:
        self._close(None)
        self.group = _GroupReports(first=self.index, last=self.index, kept=self.index, before=self.kept)

    def on_report(self, event: ev.Report) -> None:
        """Count reports; their numbers tell of those that have been dropped on the way, too."""
        self.index = event.index
        if self.group is not None:
            self.group.last = event.index

    def on_checkpoint_committed(self, event: ev.CheckpointCommitted) -> None:
        self.on_report(event)
        if self.group is not None:
            self.kept += event.index - self.group.kept
            self.group.kept = event.index

    def on_loop_warned(self, event: ev.LoopWarned) -> None:
        if self.group is None:
            return
        again = round(self.group.before * event.again)
        if event.is_redone:
            again = min(again, self.index - self.group.first)
        self.kept -= again
        self.steps_lost += again

    def on_storage_waited(self, event: ev.StorageWaited) -> None:
        self.storage_wait_seconds = round(self.storage_wait_seconds + event.seconds, 3)

    def on_group_failed(self, event: ev.GroupFailed) -> None:
        """Count a failure or a preemption; what it loses is lost once it is done again."""
        if isinstance(event, ev.WorkerFailed):
            self.worker_failures += 1
        else:
            self.preemptions += 1
        self._close(event.reports_lost if event.retried else 0)
        self.pending = 0 if event.retried else event.reports_lost

    def on_worker_group_resized(self, event: ev.WorkerGroupResized) -> None:
        self.resizes += 1
        self._close(None)

    def on_attempt_ended(self, event: ev.AttemptEnded) -> None:
        if event.outcome is Outcome.COMPLETED:
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
            if len(self._rows) > _MAX_HISTORY_ROWS:
                self._rows = self._rows[::2]
                self._stride *= 2
        self.count += 1
        self._last = row

    def taken(self) -> list[dict[str, Any]]:
        if self._last is None or self._rows[-1] is self._last:
            return self._rows
        return [*self._rows[: _MAX_HISTORY_ROWS - 1], self._last]


def add_up(events: Iterable[ev.Event]) -> Accounts:
    """Return the accounts of a run from its events, in order, over all attempts."""
    tally, rows = Tally(), _Rows()
    accounts = Accounts()
    for event in events:
        tally.take(event)
        if isinstance(event, ev.WorkerGroupStarted):
            accounts.world_sizes.append(WorldSize(at=event.at, size=event.world_size))
        elif isinstance(event, ev.Report):
            accounts.last_metrics = event.metrics
            where = {"_attempt": event.attempt, "_at": event.at, "_world_size": event.world_size}
            rows.add({**event.metrics, **where})
    counts = tally.model_dump(include=set(_Counts.model_fields))
    return accounts.model_copy(
        update={**counts, "time": tally.meter.account(), "history": rows.taken(), "reports": rows.count}
    )
