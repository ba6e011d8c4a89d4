"""The state of a run for its report, as plain values of a bounded size, updated by each event.

Belongs to the flow process and the driver.
"""

import math
import sys
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import Any

from pydantic import BaseModel, ValidationError

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.checkpoint_names import age_of
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.core.scores import score_of
from prefect_elastic_train.trackers.tracked_run import TrackedRun

from .accounts import Tally
from .descriptions import describe, describe_wait

#: Limits of the report's size.
_MAX_CURVES = 8
MAX_POINTS = 400
_MAX_INCIDENTS = 60
_MAX_CHECKPOINTS = 10
_MAX_METRICS = 48
_MAX_WORLD_SIZES = 400
_MAX_TEXT = 500
_MAX_NAME = 60

#: Metrics that count the progress of the training, by priority, each with metrics that hold its total. A ``step``
#: beside a ``global_step`` counts within an epoch.
COUNTERS: Mapping[str, list[str]] = {
    counter: [f"{prefix}_{counter.removeprefix('global_')}s" for prefix in ("total", "max", "num")]
    for counter in ("global_step", "iteration", "step", "epoch")
}
TOTALS = frozenset(chain.from_iterable(COUNTERS.values()))
#: Metrics that are shown as rates, also without a total.
PACED = ("samples", *(counter for counter in COUNTERS if counter != "epoch"))
#: All metrics of the progress.
POSITIONS = frozenset({"progress", "samples", *COUNTERS, *TOTALS})

#: Outcomes by the state of the flow, where the driver reported none.
_OUTCOMES = {
    "failed": Outcome.DRIVER_LOST,
    "cancelled": Outcome.CANCELLED,
    "timed out": Outcome.TIMED_OUT,
    "interrupted": Outcome.CANCELLED,
}
_STATES = {Outcome.CANCELLED: "cancelled", Outcome.TIMED_OUT: "timed out"}

#: Activities in which workers exist.
_WITH_WORKERS = ("training", "draining", "winding up")

#: Kinds of incidents that are failures, and those that are faults, which include warnings.
FAILURES = ("failure", "preemption", "driver")
FAULTS = (*FAILURES, "loop")


class Incident(BaseModel):
    """A failure, preemption, warning, restart or other change in the report of a run, with its time since the epoch."""

    at: float
    #: "begin", "failure", "preemption", "resize", "driver", "capacity", "storage", "repair", "loop" or "end".
    kind: str
    message: str
    reason: str = ""
    since: float = 0.0  # start of an interruption that has not ended yet; 0: none
    until: float = 0.0  # its end; 0: none
    #: Numbers of the first and the last report that the interruption has made undone; the same number: none was.
    redone: tuple[float, float] | None = None


class Checkpoint(BaseModel):
    """A committed checkpoint in the report of a run, with its score if the checkpoint policy has one."""

    name: str
    at: float
    attempt: int = 0
    size_bytes: int = 0
    metrics: dict[str, Any]
    score: float | None = None
    step: float = 0.0  # 0: unknown


class Progress(BaseModel):
    """Progress of the training as a number from 0 to 1 and as text, such as ``step 300 of 1,000 (30.0%)``."""

    fraction: float
    text: str


class Curve(BaseModel):
    """The values of a metric by the number of the report.

    A long curve is divided into parts of equal length, and has only the lowest and the highest value of each.
    """

    points: list[tuple[float, float]] = []

    def add(self, x: float, y: float) -> None:
        """Add the value ``y`` of the metric at report number ``x``.

        It replaces the values at ``x`` and later, because these reports are done a second time.
        """
        while self.points and self.points[-1][0] >= x:
            self.points.pop()
        if len(self.points) >= MAX_POINTS:
            length = (x - self.points[0][0]) / (MAX_POINTS / 4)
            parts = [list(points) for _, points in groupby(self.points, lambda point: point[0] // length)]
            self.points = [
                point
                for part in parts
                for point in sorted({min(part, key=itemgetter(1)), max(part, key=itemgetter(1))})
            ]
        self.points.append((x, y))


class RunReport(BaseModel, ser_json_inf_nan="constants"):
    """The state of a run for the report that users see, derived from the run's events. Its size is bounded."""

    run_name: str
    score_attribute: str = ""
    score_order: str = "max"
    totals: dict[str, Any] = {}  # amounts of work from the loop's configuration
    flow_run_url: str = ""
    storage_block: str = ""  # name of the saved storage block
    run_uri: str = ""
    started_from: str = ""
    dashboard_url: str = ""
    #: Activity of the run as text, and its details.
    state: str = "starting"
    detail: str = ""
    outcome: str = ""
    attempt: int = 0
    world_size: int = 0
    driver_restarts: int = 0
    metrics: dict[str, Any] = {}
    tracked: list[TrackedRun] = []  # the training's run in each tracker
    progress: Progress | None = None
    #: Time and numbers of the first report since the last restart.
    paced_from: tuple[float, dict[str, float]] | None = None
    rates: dict[str, float] = {}  # growth per second since ``paced_from`` of the numbers that grew, and of "progress"
    #: Number of workers and ``rates`` of the worker group before, if it had another size.
    before: tuple[int, dict[str, float]] = (0, {})
    usage: dict[int, ev.RankUsage] = {}
    saves: str = ""  # interval between checkpoints and its reason
    stall_timeout: str = ""  # that of a step, and its reason
    details: str = ""  # location of the tracebacks and stacks of the last failure
    last_event_at: float = 0.0
    tally: Tally = Tally()
    incidents: list[Incident] = []
    checkpoints: list[Checkpoint] = []  # the newest, and the best one
    checkpoints_made: int = 0
    curves: dict[str, Curve] = {}
    steps: Curve = Curve()  # the step of each report, as far as known
    position: int = 0  # number of the newest report
    world_sizes: list[tuple[float, int]] = []  # the newest changes
    worker_seconds: float = 0.0  # time of all workers together, up to the last of them
    is_new_wait: bool = False  # the last event was the first of a wait for capacity
    last_end: str = ""  # reason why the last driver ended, for the next one

    def add(self, event: ev.Event) -> None:
        """Update the report with the next event of the run."""
        self.tally.add(event)
        if not isinstance(event, ev.RunRecalled | ev.ControllerAlive):
            self.last_event_at = max(self.last_event_at, event.at)
        if isinstance(event, ev.FirstStep | ev.Report) and self.world_size:  # workers train
            for incident in self.incidents:
                if incident.since:
                    incident.message += f"; training again after {event.at - incident.since:.1f} s"
                    incident.since = 0.0
                    incident.until = event.at
                    incident.redone = (self.tally.position, max(self.position, self.tally.position))
        match event:
            case ev.RunRecalled():
                self._recall(event.report)
            case ev.ControllerAlive(doing="waiting for the storage"):
                self.detail = f"{event.doing} for {event.seconds:.0f} s"
            case ev.ControllerAlive() if self.detail.startswith("waiting for the storage"):
                self.detail = ""
            case ev.ClusterConnected() if event.dashboard_url:  # without a scheme
                self.dashboard_url = f"http://{event.dashboard_url}"
            case ev.AttemptStarted():
                self._start_attempt(event)
            case ev.AttemptEnded():
                self._end_attempt(event)
            case ev.StateChanged(state="SCHEDULING"):
                self._set_state("starting workers")
            case ev.StateChanged(state="PREEMPTING"):
                self._set_state("draining")
            case ev.StateChanged(state="SHUTTING_DOWN") if self.state == "training":
                self._set_state("winding up")
            case ev.WaitingForCapacity():
                self.is_new_wait = self.state != "waiting for capacity"
                if self.is_new_wait:
                    self._describe(event, "capacity")
                self._set_state("waiting for capacity", describe_wait(event).reason)
            case ev.WorkerGroupStarted():
                size = next((size for _, size in reversed(self.world_sizes) if size), 0)
                if self.rates and size != event.world_size:
                    self.before = (size, self.rates)
                self.paced_from = None
                self.rates = {}
                self._set_state("training")
                self._set_world(event.world_size)
            case ev.Report():
                self._add_report(event)
            case ev.RanksMeasured():
                self.usage = event.usage
            case ev.SavesPlanned():
                self.saves = event.plan[:_MAX_TEXT]
            case ev.TrackersOpened():
                self.tracked = event.runs
            case ev.StallTimeoutLearned():
                self.stall_timeout = event.limit
            case ev.LoopWarned() | ev.NodesLeftOut() | ev.StragglerFound():
                self._describe(event, "loop")
            case ev.BlocksChanged():
                self._describe(event, "blocks")
                if event.is_applied:
                    self.last_end = "it was stopped to apply changed blocks"
                    self._set_state("restarting the driver", "changed blocks are applied")
            case ev.StorageWaited():
                self._describe(event, "storage")
                if [incident.kind for incident in self.incidents[-2:]] == ["storage", "storage"]:  # one incident
                    self.incidents[-1].message += f", {self.tally.storage_wait_seconds:.0f} s in all so far"
                    del self.incidents[-2]
            case ev.GroupFailed():
                self._describe(event, "preemption" if isinstance(event, ev.WorkersPreempted) else "failure")
                if event.retried:
                    self.incidents[-1].since = event.at
                self.details = event.details
                self._set_state("restarting workers", self.incidents[-1].reason)
            case ev.WorkerGroupResized():
                self._describe(event, "resize")
                self.incidents[-1].since = event.at
                self._set_state("resizing", f"from {event.old_size} to {event.new_size} workers")

    def end(self, at: float, state: str, reason: str = "") -> None:
        """Set the final state of the training, as the flow process has observed it at the time ``at``.

        The driver may have exited before it could report the state.
        """
        if outcome := _OUTCOMES.get(state):
            self.tally.add(ev.AttemptEnded(at=self.last_event_at or at, outcome=outcome, final=True))
            if state != "failed" or not self.outcome:
                self.outcome = outcome.value
        self._set_state(state, reason or (self.detail if state == "completed" else ""))
        self._add_incident(at, "end", state, reason)

    @property
    def is_live(self) -> bool:
        """True until the training has ended, or another process or its Ray job continues it."""
        return self.state not in ("completed", "continues as a job", "taken over", *_OUTCOMES)

    @property
    def best(self) -> Checkpoint | None:
        """The checkpoint with the best score; None without a score. Of equal ones the newest, which Ray Train keeps."""
        scored = {checkpoint.score: checkpoint for checkpoint in self.checkpoints if checkpoint.score is not None}
        best_of = max if self.score_order == "max" else min
        return scored[best_of(scored)] if scored else None

    def current_worker_seconds(self, until: float) -> float:
        """Return the time of all workers together from the last change of their number to ``until``."""
        return self.world_size * max(0.0, until - self.world_sizes[-1][0]) if self.world_sizes else 0.0

    def _recall(self, report: dict[str, Any]) -> None:
        """Replace the report by a summary of the run's history.

        The settings of this process stay, such as the run's name and links, and the current state.
        """
        local = {"run_name", "score_attribute", "score_order", "totals"}
        local |= {"flow_run_url", "storage_block", "run_uri", "dashboard_url", "state", "detail"}
        with suppress(ValidationError):  # written by another version
            vars(self).update(vars(RunReport.model_validate(report | self.model_dump(include=local))))

    def _start_attempt(self, event: ev.AttemptStarted) -> None:
        # Later checkpoints were damaged or incomplete.
        self.checkpoints = [
            checkpoint for checkpoint in self.checkpoints if age_of(checkpoint.name) <= age_of(event.checkpoint)
        ]
        if event.checkpoint and all(checkpoint.name != event.checkpoint for checkpoint in self.checkpoints):
            # A checkpoint of another run, which can be the best one of this run, or one whose event was lost.
            self._add_checkpoint(event.checkpoint, event.checkpoint_at or event.at, event.inherited)
        self.run_uri = event.run_uri
        self.attempt = event.attempt
        self.outcome = ""
        self.started_from = event.started_from
        is_restart = event.attempt > 1
        self.driver_restarts += is_restart
        self._describe(event, "driver" if is_restart else "begin", self.last_end)
        if is_restart:
            self.incidents[-1].since = event.driver_started_at or event.at
        self.last_end = "the previous driver exited without a final event"
        for note in event.notes:
            self._add_incident(event.at, "repair", note)
        self._set_state("starting")

    def _end_attempt(self, event: ev.AttemptEnded) -> None:
        if event.already_finished:
            self._set_state("completed", event.message)
            return
        self.outcome = event.outcome.value
        self.last_end = f"{event.outcome.value}: {_first_line(event.message)}"
        if event.outcome is Outcome.COMPLETED:
            for best in (event.result or {}).get("best_checkpoints", [])[-1:]:
                # An asynchronous validation may have scored it after its commit.
                name = best["uri"].rpartition("/")[2]
                if all(checkpoint.name != name for checkpoint in self.checkpoints):
                    self.checkpoints.insert(0, Checkpoint(name=name, at=event.at, metrics=_bounded(best["metrics"])))
                for saved in self.checkpoints:
                    saved.score = score_of(best["metrics"], self.score_attribute) if saved.name == name else None
            self._set_state("completed")
        elif event.outcome.retryable and not event.final:
            self._set_state("restarting the driver", event.message)
        elif event.outcome is not Outcome.SUPERSEDED:
            self._set_state(_STATES.get(event.outcome, "failed"), event.message)

    def _add_report(self, event: ev.Report) -> None:
        self.metrics = _bounded(event.metrics)
        if self.state not in ("training", "draining"):
            self._set_state("training")
        numbers = _numbers(self.metrics)
        for name, number in numbers.items():
            if name not in POSITIONS and (name in self.curves or len(self.curves) < _MAX_CURVES):
                self.curves.setdefault(name, Curve()).add(self.tally.position, number)
        self.position = self.tally.position
        counters = (numbers[name] for name in COUNTERS if name in numbers and name != "epoch")
        step = next(counters, event.step)
        if step:
            self.steps.add(self.position, step)
        if isinstance(event, ev.CheckpointCommitted):
            self._add_checkpoint(
                event.checkpoint,
                event.at,
                event.metrics,
                attempt=event.attempt,
                size_bytes=event.size_bytes,
                step=step,
            )
            self.checkpoints_made += 1
        progress = _find_progress(numbers) or _find_progress(_numbers(self.totals) | numbers)
        numbers.pop("progress", None)  # a metric with this name need not be a share
        if progress:
            self.progress = progress
            numbers["progress"] = progress.fraction
        self.paced_from = self.paced_from or (event.at, numbers)
        since, before = self.paced_from
        self.rates = {
            name: (number - before[name]) / (event.at - since)
            for name, number in numbers.items()
            if event.at > since and number > before.get(name, math.inf)
        }

    def _add_checkpoint(self, name: str, at: float, metrics: dict[str, Any], **written: Any) -> None:
        score = score_of(metrics, self.score_attribute)
        self.checkpoints.append(Checkpoint(name=name, at=at, metrics=_bounded(metrics), score=score, **written))
        oldest = int(self.checkpoints[0] is self.best)  # the best one stays
        if len(self.checkpoints) > _MAX_CHECKPOINTS + oldest:
            del self.checkpoints[oldest]

    def _set_state(self, state: str, detail: str = "") -> None:
        self.state = state
        self.detail = _first_line(detail)
        if state not in _WITH_WORKERS:
            self._set_world(0)
        if state == "completed" and self.progress:  # many loops count from 0
            self.progress = Progress(fraction=1.0, text=self.progress.text.partition(" (")[0])

    def _set_world(self, size: int) -> None:
        if not self.world_sizes or self.world_sizes[-1][1] != size:
            self.worker_seconds += self.current_worker_seconds(self.last_event_at)
            self.world_sizes = [*self.world_sizes, (self.last_event_at, size)][-_MAX_WORLD_SIZES:]
        self.world_size = size

    def _describe(self, event: ev.Event, kind: str, reason: str = "") -> None:
        """Add an incident to the report with the text of an event; ``reason`` is used if the event has none."""
        if description := describe(event, self.checkpoints[-1].name if self.checkpoints else ""):
            message = "; ".join(filter(None, [description.message, description.reaction]))
            self._add_incident(event.at, kind, message, description.reason or reason)

    def _add_incident(self, at: float, kind: str, message: str, reason: str = "") -> None:
        incident = Incident(at=at, kind=kind, message=message[:_MAX_TEXT], reason=_first_line(reason))
        self.incidents = [*self.incidents, incident][-_MAX_INCIDENTS:]


def remaining_seconds(report: RunReport) -> float:
    """Return the seconds that a training still needs at its pace; 0 if they are unknown, or it does not train."""
    if report.state != "training" or not report.progress or "progress" not in report.rates:
        return 0.0
    return (1 - report.progress.fraction) / report.rates["progress"]


def _first_line(text: str) -> str:
    """Return the first line of a text that is not blank, truncated."""
    return text.strip().partition("\n")[0][:_MAX_TEXT]


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are finite numbers, as floats."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    }


def _bounded(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first metrics, with shortened names and texts."""
    return {
        name[:_MAX_NAME]: value if isinstance(value, int | float | None) else str(value)[:_MAX_NAME]
        for name, value in islice(metrics.items(), _MAX_METRICS)
    }


def _find_progress(numbers: Mapping[str, float]) -> Progress | None:
    """Return the progress of a training from the metric ``progress``, or from a counter with its total.

    Return None if there is neither.
    """
    progress = numbers.get("progress", -1.0)
    if 0 <= progress <= 1:
        return Progress(fraction=progress, text=f"{progress:.1%}")
    for counter, totals in COUNTERS.items():
        total = next((numbers[name] for name in totals if numbers.get(name)), 0.0)
        if counter in numbers and total > 0:
            done = numbers[counter]
            fraction = min(1.0, max(0.0, done / total))
            return Progress(
                fraction=fraction, text=f"{counter.replace('_', ' ')} {done:,.0f} of {total:,.0f} ({fraction:.1%})"
            )
    return None
