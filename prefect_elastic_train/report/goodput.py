"""Goodput: what a run's wall time went into, as a pure function of its events. `docs/goodput.md` has the definition."""

from __future__ import annotations

import statistics
from typing import Literal

from pydantic import BaseModel, Field

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.core.result import TimeAccount

#: Reports after a group's first that tell how long one takes.
_TYPICAL_OF = 5
#: Commits remembered, one of which a next attempt goes on from.
_MAX_COMMITS = 50

#: What takes no part: said by whoever starts a driver, or of no moment of its own.
_TIMELESS = (ev.ClusterConnected, ev.ClusterWanted, ev.ControllerAlive, ev.RunRecalled)
_BUCKETS = ("startup", "waiting_for_capacity", "restart", "resize", "checkpoint_stall", "lost")

#: What the run does: sets up; waits for capacity; the loop runs and has not reported; it trains; it is done; nobody
#: tries to train.
_Phase = Literal["setup", "waiting", "first", "training", "winding", "done", "stopped"]


class _Commit(BaseModel):
    checkpoint: str
    #: Preserved seconds up to it.
    productive: float
    #: It also preserves what is not known yet: how much of the time to its group's first report was training.
    with_first: bool = False


class _FirstReport(BaseModel):
    """The time to a group's first report: partly setting up, partly training, which its next reports tell."""

    seconds: float = 0.0
    #: Seconds between the next reports, and since the last one.
    intervals: list[float] = Field(default_factory=list)
    running: float = 0.0
    committed: bool = False


class GoodputMeter(BaseModel, ev.EventHandler):
    """Adds up where the time goes, event by event. Its state is plain values of a bounded size.

    Times are seconds; events must come in their order, over all attempts.
    """

    spent: dict[str, float] = Field(default_factory=dict)
    productive: float = 0.0
    #: Trained since the last commit.
    pending: float = 0.0
    stopped: float = 0.0
    phase: _Phase | None = None
    setup: Literal["startup", "restart", "resize"] = "startup"
    #: Up to when the time is spent, in seconds since the epoch.
    mark: float = 0.0
    first: _FirstReport | None = None
    #: Typical seconds between reports of an earlier group.
    typical: float | None = None
    commits: list[_Commit] = Field(default_factory=list)
    #: What was preserved when the worker group started.
    at_start: float = 0.0
    #: When the newest attempt began, and what was given up last, and when.
    attempt_at: float = 0.0
    given_up: float = 0.0
    given_up_at: float = 0.0

    def take(self, event: ev.Event) -> None:
        """Take the next event in."""
        if not isinstance(event, ev.AttemptStarted):
            if self.phase in (None, "done") or isinstance(event, _TIMELESS):
                return
            self._advance((event.since or event.at) if isinstance(event, ev.WaitingForCapacity) else event.at)
        self.handle(event)

    def account(self, now: float | None = None) -> TimeAccount:
        """Return the account, up to `now` (seconds since the epoch) if the run still lives."""
        meter = self.model_copy(deep=True)
        if now is not None and meter.phase not in (None, "done", "stopped"):
            meter._advance(now)
        meter._resolve_first()
        kept = meter.productive + meter.pending
        return TimeAccount(
            wall_seconds=round(kept + sum(meter.spent.values()), 3),
            productive_seconds=round(kept, 3),
            stopped_seconds=round(meter.stopped, 3),
            **{f"{name}_seconds": round(meter.spent.get(name, 0.0), 3) for name in _BUCKETS},
        )

    def on_attempt_started(self, event: ev.AttemptStarted) -> None:
        """Begin an attempt: the one before may have died without a word, and what it goes on from may be older."""
        began = min(event.driver_started_at or event.at, event.at)
        if self.phase is None:
            self.mark = began
            if event.checkpoint:  # another run's
                self.commits.append(_Commit(checkpoint=event.checkpoint, productive=0.0))
        else:
            self._close_attempt(event)
            was_stopped = self.phase in ("done", "stopped") or event.counted == 1
            self._roll_back(event.checkpoint)
            gap = max(0.0, began - self.mark)
            if was_stopped:
                self.stopped += gap
            else:
                self._spend("restart", gap)
            self.mark = max(self.mark, began)
            self.setup = "startup" if was_stopped else "restart"
        self.phase = "setup"
        self.attempt_at = self.mark
        self._advance(event.at)

    def on_waiting_for_capacity(self, event: ev.WaitingForCapacity) -> None:
        self.phase = "waiting" if self.phase in ("setup", "waiting") else self.phase
        self._advance(event.at)

    def on_worker_group_started(self, event: ev.WorkerGroupStarted) -> None:
        self._close_group()
        self.given_up, self.at_start = 0.0, self.productive
        self.first = _FirstReport()
        self.phase = "first"

    def on_report(self, event: ev.Report) -> None:
        if self.phase == "first":
            self.phase = "training"
        elif self.first is not None:
            self.first.intervals.append(self.first.running)
            self.first.running = 0.0
            if len(self.first.intervals) >= _TYPICAL_OF:
                self._resolve_first()

    def on_checkpoint_committed(self, event: ev.CheckpointCommitted) -> None:
        self.on_report(event)
        self.productive, self.pending = self.productive + self.pending, 0.0
        if self.first is not None:
            self.first.committed = True
        self._remember(event.checkpoint)

    def on_checkpoint_stalled(self, event: ev.CheckpointStalled) -> None:
        """Move the time in which the loop stood still for a checkpoint out of its training."""
        of_pending = min(event.seconds, self.pending)
        self.pending -= of_pending
        last = self.commits[-2].productive if len(self.commits) > 1 else 0.0
        of_kept = min(event.seconds - of_pending, max(0.0, self.productive - last))
        self.productive -= of_kept
        if self.commits:
            self.commits[-1].productive = min(self.commits[-1].productive, self.productive)
        of_first = 0.0
        if self.first is not None:
            if self.first.intervals:
                self.first.intervals[-1] = max(0.0, self.first.intervals[-1] - event.seconds)
            if self.phase != "first":
                of_first = min(event.seconds - of_pending - of_kept, self.first.seconds)
                self.first.seconds -= of_first
        self._spend("checkpoint_stall", of_pending + of_kept + of_first)

    def on_loop_warned(self, event: ev.LoopWarned) -> None:
        """Give up what was preserved and is done again all the same."""
        again = min(self.productive, self.at_start * event.again)
        if event.is_redone:
            if self.phase != "first":  # else nothing tells yet what the time to the first report was
                self._resolve_first()
            again = min(again, self.productive + self.pending - self.at_start)
        self.productive -= again
        for commit in self.commits:
            commit.productive = max(0.0, commit.productive - again)
        self._spend("lost", again)

    def on_group_failed(self, event: ev.GroupFailed) -> None:
        self._set_up("restart")

    def on_worker_group_resized(self, event: ev.WorkerGroupResized) -> None:
        self._set_up("resize")

    def on_state_changed(self, event: ev.StateChanged) -> None:
        if self.phase == "waiting" and event.state in ("SCHEDULING", "RUNNING"):
            self.phase = "setup"
        elif self.phase in ("training", "first") and event.state == "SHUTTING_DOWN":
            self.phase = "winding"

    def on_attempt_ended(self, event: ev.AttemptEnded) -> None:
        """Keep what was trained if the loop has returned, else give up what no commit preserves."""
        if event.outcome is Outcome.COMPLETED:
            self.phase = "winding"  # also a loop that never reported has done its work
            self._resolve_first()
            self.productive, self.pending = self.productive + self.pending, 0.0
            self.phase = "done"
        elif event.outcome.retryable and not event.final:
            self._set_up("restart")
        else:
            self._set_up("startup")
            self.phase = "stopped"

    def _set_up(self, why: Literal["startup", "restart", "resize"]) -> None:
        self._close_group()
        self.phase, self.setup = "setup", why

    def _advance(self, at: float) -> None:
        """Spend the time up to `at` on what the run does."""
        seconds = at - self.mark
        if seconds <= 0:
            return
        self.mark = at
        if self.phase == "stopped":
            self.stopped += seconds
        elif self.phase == "first" and self.first is not None:
            self.first.seconds += seconds
        elif self.phase == "training":
            self.pending += seconds
            if self.first is not None:
                self.first.running += seconds
        else:
            buckets = {"setup": self.setup, "waiting": "waiting_for_capacity", "winding": "startup"}
            self._spend(buckets[self.phase or "setup"], seconds)

    def _spend(self, bucket: str, seconds: float) -> None:
        self.spent[bucket] = self.spent.get(bucket, 0.0) + seconds

    def _resolve_first(self) -> None:
        """Split the time to the first report: a report's typical time was training, the rest setting up."""
        first, self.first = self.first, None
        if first is None:
            return
        if self.phase == "first":  # it never reported
            self._spend(self.setup, first.seconds)
            return
        if first.intervals:
            self.typical = statistics.median(first.intervals)
        trained = first.seconds if self.typical is None else min(first.seconds, self.typical)
        self._spend(self.setup, first.seconds - trained)
        if not first.committed:
            self.pending += trained
            return
        self.productive += trained
        for commit in self.commits:
            commit.productive += trained if commit.with_first else 0.0
            commit.with_first = False

    def _remember(self, checkpoint: str) -> None:
        """Remember a commit, and what is preserved up to it."""
        commit = _Commit(checkpoint=checkpoint, productive=self.productive, with_first=self.first is not None)
        self.commits = [*self.commits[-_MAX_COMMITS + 1 :], commit]

    def _close_group(self) -> None:
        """Give up what was trained since the last commit."""
        self._resolve_first()
        self._spend("lost", self.pending)
        if self.pending:
            self.given_up, self.given_up_at = self.pending, self.mark
        self.pending = 0.0

    def _close_attempt(self, event: ev.AttemptStarted) -> None:
        """Close an attempt that may have died without a word, and before it could tell of its last commit."""
        untold = self.phase == "training"
        self._close_group()
        known = {commit.checkpoint for commit in self.commits}
        if not event.checkpoint or event.checkpoint in known or event.checkpoint_at <= self.attempt_at:
            return
        later = event.checkpoint_at - self.given_up_at
        kept = max(0.0, self.given_up + min(0.0, later))
        self._spend("lost", -kept)
        if untold and later > 0:
            kept += max(0.0, event.checkpoint_at - self.mark)
            self.mark = max(self.mark, event.checkpoint_at)
        self.productive += kept
        self._remember(event.checkpoint)

    def _roll_back(self, checkpoint: str) -> None:
        """Give up what lies between the commit that an attempt goes on from and the newest."""
        kept = 0.0
        if checkpoint:
            place = next((n for n, commit in enumerate(self.commits) if commit.checkpoint == checkpoint), None)
            if place is None:
                return  # too old to be known, or another run's: nothing tells what it preserves
            kept = self.commits[place].productive
            del self.commits[place + 1 :]
        else:
            self.commits.clear()
        lost = max(0.0, self.productive - kept)
        self.productive -= lost
        self._spend("lost", lost)
