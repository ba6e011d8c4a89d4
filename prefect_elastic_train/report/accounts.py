"""What a run's history adds up to: counts, and where its wall time goes (``docs/goodput.md`` has the definition)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.core.result import Counts, TimeAccount, WorldSize

_MAX_COMMITS = 50  # commits remembered, one of which a next attempt goes on from
_MAX_HISTORY_ROWS = 2000  # rows of metrics that a result carries at most

#: What takes no part: said by whoever starts a driver, or of no moment of its own.
_TIMELESS = ev.ClusterConnected | ev.ClusterWanted | ev.ControllerAlive | ev.RunRecalled


class Tally(Counts, ev.EventHandler):
    """Counts and seconds of a run from its events in order, over all attempts, as plain values of a bounded size."""

    attempt: int = 0
    left: dict[str, int] = Field(default_factory=dict)  # what was left of each budget after the last failure
    #: Reports of earlier attempts; and of this one the newest, and the newest that a commit keeps.
    before: int = 0
    index: int = 0
    kept: int = 0
    #: What the run does; ``first`` before a group's first report, ``stopped`` while nobody tries to train.
    phase: Literal["setup", "waiting", "first", "training", "winding", "done", "stopped"] | None = None
    setup: Literal["startup", "restart", "resize"] = "startup"
    mark: float = 0.0
    spent: dict[str, float] = Field(default_factory=dict)  # in all but training, by what it is called in the account
    #: Trained and preserved, and trained since the last commit.
    productive: float = 0.0
    pending: float = 0.0
    #: Checkpoints that were committed, each with the seconds preserved up to it.
    commits: list[tuple[str, float]] = Field(default_factory=list)
    #: What was preserved when the worker group started, in seconds and in reports.
    seconds_at_start: float = 0.0
    reports_at_start: int = 0
    #: The time to the worker group's first report, until it is known how much of that was training; the time since,
    #: that between its first two reports, and its commits so far.
    first: float | None = None
    since_first: float = 0.0
    interval: float | None = None
    unsettled: int = 0
    typical: float | None = None  # seconds between two reports of an earlier group
    #: Optimizer steps that a session has done, as far as is known, and those that a commit keeps.
    step: int = 0
    step_kept: int = 0

    @property
    def position(self) -> int:
        """Number of the last report, counted without those that were done again."""
        return self.before + self.index - self.reports_lost

    def take(self, event: ev.Event) -> None:
        """Take the next event in."""
        if not isinstance(event, ev.AttemptStarted):
            if self.phase in (None, "done") or isinstance(event, _TIMELESS):
                return
            self._advance((event.since or event.at) if isinstance(event, ev.WaitingForCapacity) else event.at)
        self.handle(event)
        self.step = max(self.step, event.step)

    def account(self, now: float | None = None) -> TimeAccount:
        """Return where the time went, up to `now` (seconds since the epoch) if the run still lives."""
        tally = self.model_copy(deep=True)
        if now is not None and tally.phase not in (None, "done", "stopped"):
            tally._advance(now)
        tally._settle()
        kept = tally.productive + tally.pending
        wall = kept + sum(seconds for name, seconds in tally.spent.items() if name != "stopped")
        spent = {f"{name}_seconds": round(seconds, 3) for name, seconds in tally.spent.items()}
        return TimeAccount(wall_seconds=round(wall, 3), productive_seconds=round(kept, 3), **spent)

    def on_attempt_started(self, event: ev.AttemptStarted) -> None:
        self.attempts += event.attempt != self.attempt
        self.attempt, self.left = event.attempt, event.left
        self._lose_reports()
        self.before += self.index
        self.index = self.kept = 0
        began = min(event.driver_started_at or event.at, event.at)
        if self.phase is None:
            self.mark = began
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
        self._lose_reports()
        self.phase = "first"
        self.seconds_at_start, self.reports_at_start = self.productive, self.position
        self.first, self.since_first, self.interval, self.unsettled = 0.0, 0.0, None, 0

    def on_first_step(self, event: ev.FirstStep) -> None:
        """Count the steps that are done again. The time before the first step is start-up; no estimate is needed."""
        self.steps_redone += max(0, self.step - event.step)
        self.step = self.step_kept = event.step
        if self.phase == "first" and self.first is not None:
            first, self.first, self.phase = self.first, None, "training"
            self.pending = min(first, self.mark - event.at)
            self._spend(self.setup, first - self.pending)

    def on_report(self, event: ev.Report) -> None:
        self.index = event.index  # which counts those that have been dropped on the way, too
        if self.phase == "first":
            self.phase = "training"
        elif self.first is not None and self.interval is None:
            self.interval = self.since_first
        else:
            self._settle()

    def on_checkpoint_committed(self, event: ev.CheckpointCommitted) -> None:
        self.on_report(event)
        self.kept = event.index
        later, saved = 0.0, event.metrics.get("step")
        if isinstance(saved, int) and self.step_kept < saved <= event.step:
            # What was trained while the checkpoint was uploaded is not in it.
            later = self.pending * (event.step - saved) / (event.step - self.step_kept)
            self.step_kept = saved
        self._preserve(event.checkpoint, later)

    def on_checkpoint_stalled(self, event: ev.CheckpointStalled) -> None:
        """Move the time in which the loop stood still for a checkpoint out of its training, or of what comes of it."""
        if self.first is not None and self.interval is None:
            seconds = min(event.seconds, self.first) if self.phase != "first" else 0.0
            self.first -= seconds
        else:
            seconds = min(event.seconds, self.productive + self.pending)
            self.pending -= seconds
            self.interval = max(0.0, self.interval - seconds) if self.interval is not None else None
        self._spend("checkpoint_stall", seconds)

    def on_loop_warned(self, event: ev.LoopWarned) -> None:
        """Give up what was preserved and is done again all the same."""
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
        self.index = max(self.index, self.kept + event.reports_lost)
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
        """Keep what was trained if the loop has returned, else give up what no commit preserves."""
        if event.outcome is Outcome.COMPLETED:
            self.kept = self.index
            self.phase = "winding"  # also a loop that never reported has done its work
            self._settle()
            self.productive, self.pending = self.productive + self.pending, 0.0
            self.phase = "done"
        elif event.outcome.retryable and not event.final:
            self._close_group("restart")
        else:
            self._close_group("startup")
            self.phase = "stopped"

    def _advance(self, at: float) -> None:
        """Spend the time up to `at` on what the run does."""
        seconds = max(0.0, at - self.mark)
        self.mark += seconds
        if self.phase == "first" and self.first is not None:
            self.first += seconds
        elif self.phase == "training":
            self.pending += seconds
            self.since_first += seconds
        else:
            buckets = {"waiting": "waiting_for_capacity", "winding": "startup", "stopped": "stopped"}
            self._spend(buckets.get(self.phase or "", self.setup), seconds)

    def _spend(self, bucket: str, seconds: float) -> None:
        self.spent[bucket] = self.spent.get(bucket, 0.0) + seconds

    def _preserve(self, checkpoint: str, later: float = 0.0) -> None:
        """Count the pending training as productive, except for the last `later` seconds, which stay pending."""
        self.productive += self.pending - later
        self.pending = later
        self.unsettled += self.first is not None
        self.commits = [*self.commits, (checkpoint, self.productive)][-_MAX_COMMITS:]

    def _lose_reports(self) -> None:
        """Count reports that no commit keeps, now that somebody does them again."""
        self.reports_lost += max(0, self.index - self.kept)
        self.kept = self.index

    def _settle(self) -> None:
        """Split the time to the first report: as much as between two reports was training, the rest setting up."""
        first, self.first = self.first, None
        if first is None:
            return
        self.typical = self.typical if self.interval is None else self.interval
        trained = first if self.typical is None else min(first, self.typical)
        trained = 0.0 if self.phase == "first" else trained  # then it never reported
        self._spend(self.setup, first - trained)
        if not self.unsettled:
            self.pending += trained
            return
        self.productive += trained
        newest = slice(-self.unsettled, None)
        self.commits[newest] = [(name, productive + trained) for name, productive in self.commits[newest]]

    def _close_group(self, then: Literal["startup", "restart", "resize"]) -> None:
        """Give up what was trained since the last commit; what follows is setting up."""
        self._settle()
        self._spend("lost", max(0.0, self.pending))
        self.productive += min(0.0, self.pending)
        self.pending = 0.0
        self.phase, self.setup = "setup", then

    def _close_attempt(self, event: ev.AttemptStarted, then: Literal["startup", "restart"]) -> None:
        """Keep up to the checkpoint that the next attempt goes on from, which the last one may not have told of."""
        self._settle()
        known = ["", *(name for name, _ in self.commits)]
        if event.checkpoint not in known and event.checkpoint_at > self.mark - self.pending:
            self._preserve(event.checkpoint)
        self._close_group(then)
        if event.checkpoint in known:  # else it is too old to be known: nothing tells what it preserves
            del self.commits[known.index(event.checkpoint) :]
            kept = min(self.productive, self.commits[-1][1] if self.commits else 0.0)
            self._spend("lost", self.productive - kept)
            self.productive = kept


class Accounts(Counts):
    """Counts and times of a run. See :class:`prefect_elastic_train.TrainingResult` for the fields."""

    time: TimeAccount = TimeAccount()
    left: dict[str, int] = Field(default_factory=dict)
    world_sizes: list[WorldSize] = Field(default_factory=list)
    last_metrics: dict[str, Any] = Field(default_factory=dict)
    history: list[dict[str, Any]] = Field(default_factory=list)
    reports: int = 0


def counts_in_words(counts: dict[str, int]) -> str:
    """Return how many there are of each, such as ``1 resize, 2 preemptions``; empty for none."""
    return ", ".join(f"{number} {name}{'' if number == 1 else 's'}" for name, number in counts.items())


def add_up(events: Iterable[ev.Event]) -> Accounts:
    """Return the accounts of a run from its events, in order, over all attempts."""
    tally, accounts, row = Tally(), Accounts(), dict[str, Any]()
    rows, stride = accounts.history, 1
    for event in events:
        tally.take(event)
        if isinstance(event, ev.WorkerGroupStarted):
            accounts.world_sizes.append(WorldSize(at=event.at, size=event.world_size))
        elif isinstance(event, ev.Report):
            accounts.last_metrics = event.metrics
            row = {**event.metrics, "_attempt": event.attempt, "_at": event.at, "_world_size": event.world_size}
            if accounts.reports % stride == 0:
                rows.append(row)
            if len(rows) > _MAX_HISTORY_ROWS:  # evenly thinned while it is read
                del rows[1::2]
                stride *= 2
            accounts.reports += 1
    if rows and rows[-1] is not row:
        rows[_MAX_HISTORY_ROWS - 1 :] = [row]
    counts = tally.model_dump(include={*Counts.model_fields, "left"})
    return accounts.model_copy(update=counts | {"time": tally.account()})
