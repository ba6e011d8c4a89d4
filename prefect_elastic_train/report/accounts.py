"""Counts of a run and the account of its wall time, from its history; ``docs/goodput.md`` has the definitions.

Belongs to the flow process, the driver and the CLI.
"""

import math
from collections import defaultdict
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
#: Parts of the wall time in which a worker group has not started.
_Setup = Literal["startup", "restart", "resize"]
#: Parts of the wall time in which a worker group runs the loop: up to its first report, up to the second, and later.
_RUNNING = ("first", "second", "training")


class Tally(Counts, ev.EventHandler):
    """Counts and seconds of a run over all its attempts, updated by the run's events in order. Its size is bounded."""

    left: dict[str, int] = Field(default_factory=dict)  # remaining failures of each budget
    earlier_reports: int = 0  # reports of earlier attempts
    #: Numbers, over all attempts, of the newest report and of the newest one with a commit.
    newest_report: int = 0
    committed_report: int = 0
    #: Part of the wall time that the run is in now; empty before the first attempt.
    phase: Literal["", "waiting_for_capacity", "first", "second", "training", "stopped"] | _Setup = ""
    setup: _Setup = "startup"
    counted_until: float = 0.0  # time up to which the seconds are counted
    #: Seconds of each part of the wall time. "second" and "training" are not committed. "first" is not yet split into
    #: start and training.
    spent: defaultdict[str, float] = Field(default_factory=lambda: defaultdict(float))
    #: Committed checkpoints, each with the seconds that are preserved by it.
    commits: list[tuple[str, float]] = Field(default_factory=list)
    #: Preserved seconds and reports at the start of the worker group.
    seconds_at_start: float = 0.0
    reports_at_start: int = 0
    interval: float | None = None  # seconds between the first two reports of a group; None: no group had two
    unsplit_commits: int = 0  # commits of the worker group before "first" was split
    step: int = 0  # optimizer steps of the session, as far as known
    committed_step: int = 0  # optimizer steps in the newest commit

    @property
    def position(self) -> int:
        """Number of the newest report over all attempts. Reports that were lost are not counted."""
        return self.newest_report - self.reports_lost

    def add(self, event: ev.Event) -> None:
        """Update the counts and seconds of the run with its next event."""
        if not isinstance(event, ev.AttemptStarted):
            if self.phase in ("", "stopped") or isinstance(event, _TIMELESS):
                return
            self._advance((event.since or event.at) if isinstance(event, ev.WaitingForCapacity) else event.at)
        self.handle(event)
        self.step = max(self.step, event.step)

    def account(self, now: float | None = None) -> TimeAccount:
        """Return the parts of the run's wall time, such as training and restarts.

        They are counted up to the last event; if the run is active, up to ``now`` (seconds since the epoch).
        """
        tally = self.model_copy(deep=True)
        if now is not None and tally.phase not in ("", "stopped"):
            tally._advance(now)
        tally._split_first()
        tally._move("training", "productive")
        wall = sum(seconds for name, seconds in tally.spent.items() if name != "stopped")
        spent = {f"{name}_seconds": round(seconds, 3) for name, seconds in tally.spent.items()}
        return TimeAccount(wall_seconds=round(wall, 3), **spent)

    def on_attempt_started(self, event: ev.AttemptStarted) -> None:
        self.attempts += 1
        self.left = event.left
        self._count_lost_reports()
        self.earlier_reports = self.newest_report
        began = min(event.driver_started_at or event.at, event.at)
        setup: _Setup = "startup"
        if not self.phase:
            self.counted_until = began
            if event.checkpoint:  # another run's
                self.commits.append((event.checkpoint, 0.0))
        else:
            was_stopped = self.phase == "stopped" or event.counted == 1
            setup = "startup" if was_stopped else "restart"
            self._close_attempt(event)
            self.phase = "stopped" if was_stopped else setup
            self._advance(began)
        self.phase = self.setup = setup
        self._advance(event.at)

    def on_waiting_for_capacity(self, event: ev.WaitingForCapacity) -> None:
        if self.phase not in _RUNNING:
            self.phase = "waiting_for_capacity"
        self._advance(event.at)

    def on_worker_group_started(self, event: ev.WorkerGroupStarted) -> None:
        self._close_group(self.setup)
        self._count_lost_reports()
        self.phase = "first"
        self.seconds_at_start = self.spent["productive"]
        self.reports_at_start = self.position

    def on_first_step(self, event: ev.FirstStep) -> None:
        """Count the optimizer steps that a new worker group does a second time.

        The time before its first step is counted as its start, and the time after it as training.
        """
        self.steps_redone += max(0, self.step - event.step)
        self.step = self.committed_step = event.step
        if self.phase == "first":
            self._move("first", "training", self.counted_until - event.at)
            self._move("first", self.setup)
            self.phase = "training"

    def on_report(self, event: ev.Report) -> None:
        self.newest_report = self.earlier_reports + event.index  # it also counts reports whose events were dropped
        if self.phase == "first":
            self.phase = "second"
        elif self.phase == "second":
            self.phase = "training"
            self.interval = self._move("second", "training")
        else:
            self._split_first()

    def on_checkpoint_committed(self, event: ev.CheckpointCommitted) -> None:
        self.on_report(event)
        self.committed_report = self.newest_report
        later = 0.0
        saved = event.metrics.get("step")
        if isinstance(saved, int) and self.committed_step < saved <= event.step:
            # Steps during the upload of the checkpoint are not in it.
            later = self.spent["training"] * (event.step - saved) / (event.step - self.committed_step)
            self.committed_step = saved
        self._preserve(event.checkpoint, later)

    def on_checkpoint_stalled(self, event: ev.CheckpointStalled) -> None:
        """Count the seconds in which checkpoints blocked the loop as a stall, and not as training."""
        if self.phase in ("first", "second"):
            self._move("first", "checkpoint_stall", event.seconds)
            return
        in_training = self._move("training", "checkpoint_stall", event.seconds)
        self._move("productive", "checkpoint_stall", event.seconds - in_training)
        if self.spent["first"] and self.interval is not None:
            self.interval = max(0.0, self.interval - event.seconds)

    def on_loop_warned(self, event: ev.LoopWarned) -> None:
        """Count the training before the worker group's start as lost if the loop ignored the checkpoint.

        The loop then does this training a second time.
        """
        if event.problem == "checkpoint-ignored":
            seconds = self._move("productive", "lost", self.seconds_at_start)
            self.reports_lost += self.reports_at_start
            self.commits = [(name, max(0.0, productive - seconds)) for name, productive in self.commits]

    def on_storage_waited(self, event: ev.StorageWaited) -> None:
        self.storage_wait_seconds = round(self.storage_wait_seconds + event.seconds, 3)

    def on_group_failed(self, event: ev.GroupFailed) -> None:
        is_preemption = isinstance(event, ev.WorkersPreempted)
        self.preemptions += is_preemption
        self.worker_failures += not is_preemption
        if event.left is not None:
            self.left["preemption" if is_preemption else "worker failure"] = event.left
        self.newest_report = max(self.newest_report, self.committed_report + event.reports_lost)
        self._close_group("restart")

    def on_worker_group_resized(self, event: ev.WorkerGroupResized) -> None:
        self.resizes += 1
        self._close_group("resize")

    def on_state_changed(self, event: ev.StateChanged) -> None:
        if self.phase == "waiting_for_capacity" and event.state in ("SCHEDULING", "RUNNING"):
            self.phase = self.setup
        elif self.phase in _RUNNING and event.state == "SHUTTING_DOWN":
            self.phase = "startup"

    def on_attempt_ended(self, event: ev.AttemptEnded) -> None:
        """Count all training as kept if the attempt completed.

        Otherwise count the training since the last commit as lost.
        """
        if event.outcome is Outcome.COMPLETED:
            self.committed_report = self.newest_report
            self.phase = "training"  # it counts also without a report
            self._split_first()
            self._move("training", "productive")
        is_restarted = event.outcome.retryable and not event.final
        self._close_group("restart" if is_restarted else "startup")
        if not is_restarted:
            self.phase = "stopped"

    def _advance(self, at: float) -> None:
        """Add the seconds up to ``at`` to the current activity of the run, such as training or waiting for capacity."""
        seconds = max(0.0, at - self.counted_until)
        self.counted_until += seconds
        self.spent[self.phase] += seconds

    def _move(self, source: str, target: str, seconds: float = math.inf) -> float:
        """Move up to ``seconds`` from one part of the wall time to another. Return the seconds that were moved."""
        moved = max(0.0, min(seconds, self.spent[source]))
        self.spent[source] -= moved
        self.spent[target] += moved
        return moved

    def _preserve(self, checkpoint: str, later: float = 0.0) -> None:
        """Count the training before the commit of ``checkpoint`` as productive.

        The last ``later`` seconds stay uncommitted, because the checkpoint does not have them.
        """
        self._move("training", "productive", self.spent["training"] - later)
        self.unsplit_commits += self.spent["first"] > 0
        self.commits = [*self.commits, (checkpoint, self.spent["productive"])][-_MAX_COMMITS:]

    def _count_lost_reports(self) -> None:
        """Count the reports of the attempt since its last commit as lost."""
        self.reports_lost += max(0, self.newest_report - self.committed_report)
        self.committed_report = self.newest_report

    def _split_first(self) -> None:
        """Split the time to a worker group's first report into start and training.

        The training is taken to be as long as the time between two reports.
        """
        self._move("second", "training")
        interval = math.inf if self.interval is None else self.interval
        trained = 0.0  # without a report
        if self.phase != "first":
            trained = self._move("first", "productive" if self.unsplit_commits else "training", interval)
        self._move("first", self.setup)
        for index in range(-self.unsplit_commits, 0):
            name, productive = self.commits[index]
            self.commits[index] = (name, productive + trained)
        self.unsplit_commits = 0

    def _close_group(self, then: _Setup) -> None:
        """End the account of a worker group.

        Count its training since the last commit as lost, and the time from now on as ``then``.
        """
        self._split_first()
        self._move("training", "lost")
        self.phase = self.setup = then

    def _close_attempt(self, event: ev.AttemptStarted) -> None:
        """End the account of the previous attempt when the next one starts.

        Training up to the checkpoint that the next attempt resumes from counts as kept, even if the event of its commit
        was lost. Later training counts as lost.
        """
        self._split_first()
        known = ["", *(name for name, _ in self.commits)]
        if event.checkpoint not in known and event.checkpoint_at > self.counted_until - self.spent["training"]:
            self._preserve(event.checkpoint)
        self._move("training", "lost")
        if event.checkpoint in known:  # otherwise it is too old, and the training that it preserves is unknown
            del self.commits[known.index(event.checkpoint) :]
            preserved = self.commits[-1][1] if self.commits else 0.0
            self._move("productive", "lost", self.spent["productive"] - preserved)


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
