"""Counts of a run and the account of its wall time, from its history; ``docs/goodput.md`` has the definitions.

Belongs to the flow process, the driver and the CLI.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.core.result import Counts, TimeAccount, WorldSize

_MAX_COMMITS = 50  # newest commits, from one of which the next attempt resumes
_MAX_HISTORY_ROWS = 2000  # rows of metrics in a result

#: Events that do not mark an activity of the run.
_TIMELESS = ev.ClusterConnected | ev.ClusterWanted | ev.ControllerAlive | ev.RunRecalled


class Tally(Counts, ev.EventHandler):
    """Counts and seconds of a run over all its attempts, updated by the run's events in order. Its size is bounded."""

    attempt: int = 0
    left: dict[str, int] = Field(default_factory=dict)  # remaining failures of each budget
    earlier_reports: int = 0  # reports of earlier attempts
    index: int = 0  # newest report of this attempt
    committed_index: int = 0  # newest report of this attempt with a commit
    #: Activity of the run: ``first`` is before a group's first report, ``stopped`` while there is no attempt.
    phase: Literal["setup", "waiting", "first", "training", "winding", "done", "stopped"] | None = None
    setup: Literal["startup", "restart", "resize"] = "startup"
    counted_until: float = 0.0  # time up to which the seconds are counted
    spent: dict[str, float] = Field(default_factory=dict)  # seconds without training, by activity in the account
    productive: float = 0.0  # seconds of training that are preserved
    uncommitted: float = 0.0  # seconds of training since the last commit
    #: Committed checkpoints, each with the seconds that are preserved by it.
    commits: list[tuple[str, float]] = Field(default_factory=list)
    #: Preserved seconds and reports at the start of the worker group.
    seconds_at_start: float = 0.0
    reports_at_start: int = 0
    #: Seconds to the group's first report, until they are split into start and training.
    seconds_to_first: float | None = None
    since_first: float = 0.0  # seconds since the first report
    first_interval: float | None = None  # seconds between the group's first two reports
    unsplit_commits: int = 0  # commits of the group before the split
    typical_interval: float | None = None  # seconds between two reports of an earlier group
    step: int = 0  # optimizer steps of the session, as far as known
    committed_step: int = 0  # optimizer steps in the newest commit

    @property
    def position(self) -> int:
        """Number of the newest report over all attempts. Reports that were lost are not counted."""
        return self.earlier_reports + self.index - self.reports_lost

    def add(self, event: ev.Event) -> None:
        """Update the counts and seconds of the run with its next event."""
        if not isinstance(event, ev.AttemptStarted):
            if self.phase in (None, "done") or isinstance(event, _TIMELESS):
                return
            self._advance((event.since or event.at) if isinstance(event, ev.WaitingForCapacity) else event.at)
        self.handle(event)
        self.step = max(self.step, event.step)

    def account(self, now: float | None = None) -> TimeAccount:
        """Return the parts of the run's wall time, such as training and restarts.

        They are counted up to the last event; if the run is active, up to ``now`` (seconds since the epoch).
        """
        tally = self.model_copy(deep=True)
        if now is not None and tally.phase not in (None, "done", "stopped"):
            tally._advance(now)
        tally._split_first()
        productive = tally.productive + tally.uncommitted
        wall = productive + sum(seconds for name, seconds in tally.spent.items() if name != "stopped")
        spent = {f"{name}_seconds": round(seconds, 3) for name, seconds in tally.spent.items()}
        return TimeAccount(wall_seconds=round(wall, 3), productive_seconds=round(productive, 3), **spent)

    def on_attempt_started(self, event: ev.AttemptStarted) -> None:
        self.attempts += event.attempt != self.attempt
        self.attempt = event.attempt
        self.left = event.left
        self._count_lost_reports()
        self.earlier_reports += self.index
        self.index = self.committed_index = 0
        began = min(event.driver_started_at or event.at, event.at)
        if self.phase is None:
            self.counted_until = began
            if event.checkpoint:  # another run's
                self.commits.append((event.checkpoint, 0.0))
        else:
            was_stopped = self.phase in ("done", "stopped") or event.counted == 1
            self._close_attempt(event, "startup" if was_stopped else "restart")
            self.phase = "stopped" if was_stopped else "setup"
            self._advance(began)
        self.phase = "setup"
        self._advance(event.at)

    def on_waiting_for_capacity(self, event: ev.WaitingForCapacity) -> None:
        self.phase = "waiting" if self.phase in ("setup", "waiting") else self.phase
        self._advance(event.at)

    def on_worker_group_started(self, event: ev.WorkerGroupStarted) -> None:
        self._close_group(self.setup)
        self._count_lost_reports()
        self.phase = "first"
        self.seconds_at_start = self.productive
        self.reports_at_start = self.position
        self.seconds_to_first = 0.0
        self.since_first = 0.0
        self.first_interval = None
        self.unsplit_commits = 0

    def on_first_step(self, event: ev.FirstStep) -> None:
        """Count the optimizer steps that a new worker group does a second time.

        The time before its first step is counted as its start, and the time after it as training.
        """
        self.steps_redone += max(0, self.step - event.step)
        self.step = self.committed_step = event.step
        if self.phase == "first" and self.seconds_to_first is not None:
            self.uncommitted = min(self.seconds_to_first, self.counted_until - event.at)
            self._spend(self.setup, self.seconds_to_first - self.uncommitted)
            self.seconds_to_first = None
            self.phase = "training"

    def on_report(self, event: ev.Report) -> None:
        self.index = event.index  # it also counts reports whose events were dropped
        if self.phase == "first":
            self.phase = "training"
        elif self.seconds_to_first is not None and self.first_interval is None:
            self.first_interval = self.since_first
        else:
            self._split_first()

    def on_checkpoint_committed(self, event: ev.CheckpointCommitted) -> None:
        self.on_report(event)
        self.committed_index = event.index
        later = 0.0
        saved = event.metrics.get("step")
        if isinstance(saved, int) and self.committed_step < saved <= event.step:
            # Steps during the upload of the checkpoint are not in it.
            later = self.uncommitted * (event.step - saved) / (event.step - self.committed_step)
            self.committed_step = saved
        self._preserve(event.checkpoint, later)

    def on_checkpoint_stalled(self, event: ev.CheckpointStalled) -> None:
        """Count the seconds in which checkpoints blocked the loop as a stall, and not as training."""
        if self.seconds_to_first is not None and self.first_interval is None:
            seconds = min(event.seconds, self.seconds_to_first) if self.phase != "first" else 0.0
            self.seconds_to_first -= seconds
        else:
            seconds = min(event.seconds, self.productive + self.uncommitted)
            self.uncommitted -= seconds
            self.first_interval = max(0.0, self.first_interval - seconds) if self.first_interval is not None else None
        self._spend("checkpoint_stall", seconds)

    def on_loop_warned(self, event: ev.LoopWarned) -> None:
        """Count the training before the worker group's start as lost if the loop ignored the checkpoint.

        The loop then does this training a second time.
        """
        if event.problem != "checkpoint-ignored":
            return
        seconds = min(self.productive, self.seconds_at_start)
        self.reports_lost += self.reports_at_start
        self.productive -= seconds
        self._spend("lost", seconds)
        self.commits = [(name, max(0.0, productive - seconds)) for name, productive in self.commits]

    def on_storage_waited(self, event: ev.StorageWaited) -> None:
        self.storage_wait_seconds = round(self.storage_wait_seconds + event.seconds, 3)

    def on_group_failed(self, event: ev.GroupFailed) -> None:
        self.preemptions += isinstance(event, ev.WorkersPreempted)
        self.worker_failures += isinstance(event, ev.WorkerFailed)
        kind = "worker failure" if isinstance(event, ev.WorkerFailed) else "preemption"
        self.left |= {kind: event.left} if event.left is not None else {}
        self.index = max(self.index, self.committed_index + event.reports_lost)
        self._close_group("restart")

    def on_worker_group_resized(self, event: ev.WorkerGroupResized) -> None:
        self.resizes += 1
        self._close_group("resize")

    def on_state_changed(self, event: ev.StateChanged) -> None:
        if self.phase == "waiting" and event.state in ("SCHEDULING", "RUNNING"):
            self.phase = "setup"
        elif self.phase in ("training", "first") and event.state == "SHUTTING_DOWN":
            self.phase = "winding"

    def on_attempt_ended(self, event: ev.AttemptEnded) -> None:
        """Count all training as kept if the attempt completed.

        Otherwise count the training since the last commit as lost.
        """
        if event.outcome is Outcome.COMPLETED:
            self.committed_index = self.index
            self.phase = "winding"  # training counts also without a report
            self._split_first()
            self.productive += self.uncommitted
            self.uncommitted = 0.0
            self.phase = "done"
        elif event.outcome.retryable and not event.final:
            self._close_group("restart")
        else:
            self._close_group("startup")
            self.phase = "stopped"

    def _advance(self, at: float) -> None:
        """Add the seconds up to ``at`` to the current activity of the run, such as training or waiting for capacity."""
        seconds = max(0.0, at - self.counted_until)
        self.counted_until += seconds
        if self.phase == "first" and self.seconds_to_first is not None:
            self.seconds_to_first += seconds
        elif self.phase == "training":
            self.uncommitted += seconds
            self.since_first += seconds
        else:
            buckets = {"waiting": "waiting_for_capacity", "winding": "startup", "stopped": "stopped"}
            self._spend(buckets.get(self.phase or "", self.setup), seconds)

    def _spend(self, bucket: str, seconds: float) -> None:
        self.spent[bucket] = self.spent.get(bucket, 0.0) + seconds

    def _preserve(self, checkpoint: str, later: float = 0.0) -> None:
        """Count the training before the commit of ``checkpoint`` as productive.

        The last ``later`` seconds stay uncommitted, because the checkpoint does not have them.
        """
        self.productive += self.uncommitted - later
        self.uncommitted = later
        self.unsplit_commits += self.seconds_to_first is not None
        self.commits = [*self.commits, (checkpoint, self.productive)][-_MAX_COMMITS:]

    def _count_lost_reports(self) -> None:
        """Count the reports of the attempt since its last commit as lost."""
        self.reports_lost += max(0, self.index - self.committed_index)
        self.committed_index = self.index

    def _split_first(self) -> None:
        """Split the time to a worker group's first report into start and training.

        The training is taken to be as long as the time between two reports.
        """
        seconds_to_first = self.seconds_to_first
        if seconds_to_first is None:
            return
        self.seconds_to_first = None
        self.typical_interval = self.typical_interval if self.first_interval is None else self.first_interval
        trained = seconds_to_first if self.typical_interval is None else min(seconds_to_first, self.typical_interval)
        trained = 0.0 if self.phase == "first" else trained  # 0 without a report
        self._spend(self.setup, seconds_to_first - trained)
        if not self.unsplit_commits:
            self.uncommitted += trained
            return
        self.productive += trained
        newest = slice(-self.unsplit_commits, None)
        self.commits[newest] = [(name, productive + trained) for name, productive in self.commits[newest]]

    def _close_group(self, then: Literal["startup", "restart", "resize"]) -> None:
        """End the account of a worker group.

        Count its training since the last commit as lost, and the time from now on as ``then``.
        """
        self._split_first()
        self._spend("lost", max(0.0, self.uncommitted))
        self.productive += min(0.0, self.uncommitted)
        self.uncommitted = 0.0
        self.phase = "setup"
        self.setup = then

    def _close_attempt(self, event: ev.AttemptStarted, then: Literal["startup", "restart"]) -> None:
        """End the account of the previous attempt when the next one starts.

        Training up to the checkpoint that the next attempt resumes from counts as kept, even if the event of its commit
        was lost. Later training counts as lost.
        """
        self._split_first()
        known = ["", *(name for name, _ in self.commits)]
        if event.checkpoint not in known and event.checkpoint_at > self.counted_until - self.uncommitted:
            self._preserve(event.checkpoint)
        self._close_group(then)
        if event.checkpoint in known:  # otherwise it is too old, and the training that it preserves is unknown
            del self.commits[known.index(event.checkpoint) :]
            preserved = min(self.productive, self.commits[-1][1] if self.commits else 0.0)
            self._spend("lost", self.productive - preserved)
            self.productive = preserved


class Accounts(Counts):
    """Counts and times of a run. See :class:`prefect_elastic_train.TrainingResult` for the fields."""

    time: TimeAccount = TimeAccount()
    left: dict[str, int] = Field(default_factory=dict)
    world_sizes: list[WorldSize] = Field(default_factory=list)
    last_metrics: dict[str, Any] = Field(default_factory=dict)
    history: list[dict[str, Any]] = Field(default_factory=list)
    reports: int = 0


def add_up(events: Iterable[ev.Event]) -> Accounts:
    """Return the counts, times and metrics of a run over all attempts, from its events in order."""
    tally = Tally()
    accounts = Accounts()
    rows = accounts.history
    row: dict[str, Any] = {}
    stride = 1
    for event in events:
        tally.add(event)
        if isinstance(event, ev.WorkerGroupStarted):
            accounts.world_sizes.append(WorldSize(at=event.at, size=event.world_size))
        elif isinstance(event, ev.Report):
            accounts.last_metrics = event.metrics
            row = {**event.metrics, "_attempt": event.attempt, "_at": event.at, "_world_size": event.world_size}
            if accounts.reports % stride == 0:
                rows.append(row)
            if len(rows) > _MAX_HISTORY_ROWS:  # keep every second row
                del rows[1::2]
                stride *= 2
            accounts.reports += 1
    if rows and rows[-1] is not row:
        rows[_MAX_HISTORY_ROWS - 1 :] = [row]
    counts = tally.model_dump(include={*Counts.model_fields, "left"})
    return accounts.model_copy(update=counts | {"time": tally.account()})
