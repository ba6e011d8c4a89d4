"""Counts of a run and the account of its wall time, from its history; ``docs/goodput.md`` has the definitions.

Belongs to the flow process, the driver and the CLI.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.core.result import Counts, TimeAccount, WorldSize

_MAX_COMMITS = 50  # newest commits, from one of which the next attempt resumes
_MAX_HISTORY_ROWS = 2000  # rows of metrics in a result

#: Activities in which a worker group runs the loop: up to its first report, up to the second, and later.
_RUNNING = ("first", "second", "training")
#: Activities between two attempts that do not follow each other, and before the first one.
_INACTIVE = ("", "stopped")


class Tally(Counts, ser_json_inf_nan="constants"):
    """Counts and seconds of a run over all its attempts, updated by the run's events in order. Its size is bounded."""

    left: dict[str, int] = {}  # remaining failures of each budget
    earlier_reports: int = 0  # reports of earlier attempts
    #: Numbers, over all attempts, of the newest report and of the newest one with a commit.
    newest_report: int = 0
    committed_report: int = 0
    #: Activity that the run is in: one of ``_RUNNING``, "startup", "restart", "resize", "waiting_for_capacity" or
    #: "stopped"; empty before the first attempt.
    phase: str = ""
    #: Reason why the worker group is started: "startup", "restart" or "resize".
    setup: str = "startup"
    counted_until: float = 0.0  # time up to which the seconds are counted
    #: Seconds of each part of the wall time. "second" and "training" are not committed. "first" is not yet split into
    #: start and training.
    spent: defaultdict[str, float] = defaultdict(float)
    #: The seconds that are preserved by the beginning (``""``) and by each of the newest checkpoints.
    commits: dict[str, float] = {}
    #: Preserved seconds and reports at the start of the worker group.
    seconds_at_start: float = 0.0
    reports_at_start: int = 0
    interval: float = math.inf  # seconds between the first two reports of a group; infinite: no group had two
    unsplit_commits: list[str] = []  # checkpoints of the worker group before "first" was split
    checkpoint_bytes: int = 0  # size of all committed checkpoints
    storage_retries: int = 0
    step: int = 0  # optimizer steps of the session, as far as known
    committed_step: int = 0  # optimizer steps in the newest commit
    uncommitted: float = 0.0  # seconds that were counted as lost since the last worker group trained

    @property
    def position(self) -> int:
        """Number of the newest report over all attempts. Reports that were lost are not counted."""
        return self.newest_report - self.reports_lost

    def add(self, event: ev.Event) -> None:
        """Update the counts and seconds of the run with its next event."""
        if isinstance(event, ev.AttemptStarted):
            self._start_attempt(event)
        elif self.phase not in _INACTIVE and not isinstance(
            event, ev.ClusterConnected | ev.ClusterWanted | ev.ControllerAlive | ev.RunRecalled
        ):  # those do not mark an activity of the run
            if isinstance(event, ev.WaitingForCapacity):
                self._advance(event.since or event.at)
                if self.phase not in _RUNNING:
                    self.phase = "waiting_for_capacity"
            self._advance(event.at)
            self._count(event)
            self.step = max(self.step, event.step)

    def account(self, now: float = 0.0) -> TimeAccount:
        """Return the parts of the run's wall time, such as training and restarts.

        They are counted up to the last event; if the run is active, up to ``now`` (seconds since the epoch).
        """
        tally = self.model_copy(deep=True)
        if tally.phase not in _INACTIVE:
            tally._advance(now)
        tally._split_first()
        tally._move("training", "productive")
        wall = sum(seconds for name, seconds in tally.spent.items() if name != "stopped")
        spent = {f"{name}_seconds": round(seconds, 3) for name, seconds in tally.spent.items()}
        return TimeAccount(wall_seconds=round(wall, 3), **spent)

    def _start_attempt(self, event: ev.AttemptStarted) -> None:
        """End the account of the previous attempt, and begin that of the next one.

        Training up to the checkpoint that the next attempt resumes from counts as kept, even if the event of its commit
        was lost. Later training counts as lost.
        """
        self.attempts += 1
        self.left = event.left
        self._count_lost_reports()
        self.earlier_reports = self.newest_report
        began = min(event.driver_started_at or event.at, event.at)
        if not self.phase:
            self.counted_until = began
            self.commits = {"": 0.0, event.checkpoint: 0.0}  # the checkpoint is another run's
        self._split_first()
        if event.checkpoint not in self.commits and event.checkpoint_at > self.counted_until - self.spent["training"]:
            self._preserve(event.checkpoint)
        was_stopped = self.phase in _INACTIVE or event.counted == 1
        self._close_group("startup" if was_stopped else "restart")
        if event.checkpoint in self.commits:  # otherwise it is too old, and the training that it preserves is unknown
            self._move("productive", "lost", self.spent["productive"] - self.commits[event.checkpoint])
        if was_stopped:
            self.phase = "stopped"
        self._advance(began)
        self.phase = self.setup
        self._advance(event.at)

    def _count(self, event: ev.Event) -> None:
        """Count an event of an attempt. The time up to the event is counted already."""
        match event:
            case ev.StateChanged(state="SCHEDULING" | "RUNNING") if self.phase == "waiting_for_capacity":
                self.phase = self.setup
            case ev.StateChanged(state="SHUTTING_DOWN") if self.phase in _RUNNING:
                self.phase = "startup"
            case ev.WorkerGroupStarted():
                self._close_group(self.setup)
                if event.restored_step:  # training up to this step is not lost, since its state was in memory
                    share = (event.restored_step - self.committed_step) / max(self.step - self.committed_step, 1)
                    self._move("lost", "training", self.uncommitted * min(max(share, 0.0), 1.0))
                    self.committed_report = self.newest_report
                self._count_lost_reports()
                self.phase = "first"
                self.seconds_at_start = self.spent["productive"]
                self.reports_at_start = self.position
            case ev.FirstStep():
                self.steps_redone += max(0, self.step - event.step)
                self.step = self.committed_step = event.step
                if self.phase == "first":  # the time before this step is the group's start, and then it trains
                    self._move("first", "training", self.counted_until - event.at)
                    self._move("first", self.setup)
                    self.phase = "training"
                self.uncommitted = 0.0
            case ev.Report():
                self._count_report(event)
            case ev.CheckpointStalled() if self.phase in ("first", "second"):
                self._move("first", "checkpoint_stall", event.seconds)
            case ev.CheckpointStalled():
                in_training = self._move("training", "checkpoint_stall", event.seconds)
                self._move("productive", "checkpoint_stall", event.seconds - in_training)
                if self.spent["first"]:
                    self.interval = max(0.0, self.interval - event.seconds)
            case ev.LoopWarned(problem="checkpoint-ignored"):
                # The loop does all training before the worker group's start a second time.
                seconds = self._move("productive", "lost", self.seconds_at_start)
                self.reports_lost += self.reports_at_start
                self.commits = {name: max(0.0, preserved - seconds) for name, preserved in self.commits.items()}
            case ev.StorageWaited():
                self.storage_wait_seconds = round(self.storage_wait_seconds + event.seconds, 3)
                self.storage_retries += event.tries
            case ev.GroupFailed():
                is_preemption = isinstance(event, ev.WorkersPreempted)
                self.preemptions += is_preemption
                self.worker_failures += not is_preemption
                if event.left is not None:
                    self.left["preemption" if is_preemption else "worker failure"] = event.left
                self.newest_report = max(self.newest_report, self.committed_report + event.reports_lost)
                self._close_group("restart")
            case ev.WorkerGroupResized():
                self.resizes += 1
                self._close_group("resize")
            case ev.AttemptEnded():
                if event.outcome is Outcome.COMPLETED:  # all training is kept
                    self.committed_report = self.newest_report
                    self.phase = "training"  # it counts also without a report
                    self._split_first()
                    self._move("training", "productive")
                self._close_group("restart" if event.outcome.retryable and not event.final else "stopped")

    def _count_report(self, event: ev.Report) -> None:
        self.newest_report = self.earlier_reports + event.index  # it also counts reports whose events were dropped
        if self.phase == "first":
            self.phase = "second"
        elif self.phase == "second":
            self.phase = "training"
            self.interval = self._move("second", "training")
        else:
            self._split_first()
        if isinstance(event, ev.CheckpointCommitted):
            self.committed_report = self.newest_report
            self.checkpoint_bytes += event.size_bytes
            later = 0.0
            saved = event.metrics.get("step")
            if isinstance(saved, int) and self.committed_step < saved <= event.step:
                # Steps during the upload of the checkpoint are not in it.
                later = self.spent["training"] * (event.step - saved) / (event.step - self.committed_step)
                self.committed_step = saved
            self._preserve(event.checkpoint, later)

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
        if self.spent["first"]:
            self.unsplit_commits.append(checkpoint)
        self.commits[checkpoint] = self.spent["productive"]
        for old in [*self.commits][1:-_MAX_COMMITS]:
            del self.commits[old]

    def _count_lost_reports(self) -> None:
        """Count the reports of the attempt since its last commit as lost."""
        self.reports_lost += max(0, self.newest_report - self.committed_report)
        self.committed_report = self.newest_report

    def _split_first(self) -> None:
        """Split the time to a worker group's first report into start and training.

        The training is taken to be as long as the time between two reports.
        """
        self._move("second", "training")
        if self.phase != "first":  # there was a report
            trained = self._move("first", "productive" if self.unsplit_commits else "training", self.interval)
            for name in self.unsplit_commits:
                self.commits[name] += trained
        self._move("first", self.setup)
        self.unsplit_commits = []

    def _close_group(self, then: str) -> None:
        """End the account of a worker group.

        Count its training since the last commit as lost, and the time from now on as ``then``.
        """
        self._split_first()
        self.uncommitted += self._move("training", "lost")
        self.phase = self.setup = then


class Accounts(Counts):
    """Counts and times of a run. See :class:`prefect_elastic_train.TrainingResult` for the fields."""

    time: TimeAccount = TimeAccount()
    left: dict[str, int] = {}
    world_sizes: list[WorldSize] = []
    last_metrics: dict[str, Any] = {}
    history: list[dict[str, Any]] = []
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
    return accounts.model_copy(
        update=tally.model_dump(include={*Counts.model_fields, "left"}) | {"time": tally.account()}
    )
