"""What a run's report shows, as plain values of a bounded size, from its events one by one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prefect_elastic_train.core.checkpoint_names import loop_name
from prefect_elastic_train.core.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    ClusterConnected,
    ControllerAlive,
    Event,
    LoopWarned,
    Reported,
    RunRecalled,
    StateChanged,
    StorageWaited,
    WaitingForCapacity,
    WorkerFailed,
    WorkerGroupResized,
    WorkerGroupStarted,
    WorkersPreempted,
)
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.core.rank_errors import causes, ranks_in_words
from prefect_elastic_train.report.accounts import Tally
from prefect_elastic_train.report.curves import Curve, Steps

__all__ = ["WORTH_TELLING_SECONDS", "Checkpoint", "Incident", "Progress", "RunReport", "is_better"]

#: Bounds of what is kept, whatever the run does.
MAX_CURVES = 8
MAX_INCIDENTS = 60
_FIRST_INCIDENTS = 10
MAX_CHECKPOINTS = 10
MAX_METRICS = 12
_MAX_NAME = 60
_MAX_TEXT = 500
_MAX_SAMPLES = 60
_MAX_BESTS = 20
#: A storage that waits for less says nothing: a request was repeated.
WORTH_TELLING_SECONDS = 3.0

#: Metrics that tell how far the training is rather than how good, in the order in which they are asked: a ``step``
#: beside a ``global_step`` begins anew with each epoch.
_COUNTERS = ("global_step", "iteration", "step", "epoch")
_TOTALS: Mapping[str, tuple[str, ...]] = {
    "global_step": ("total_steps", "max_steps", "num_steps"),
    "iteration": ("total_iterations", "max_iterations", "num_iterations"),
    "step": ("total_steps", "max_steps", "num_steps"),
    "epoch": ("total_epochs", "max_epochs", "num_epochs"),
}
_NO_CURVE = {"progress", *_COUNTERS, *(name for names in _TOTALS.values() for name in names)}

Kind = Literal["begin", "failure", "preemption", "resize", "driver", "capacity", "storage", "repair", "loop", "end"]


class Incident(BaseModel):
    """Something that a person wants to know of: when, what, and why."""

    #: Seconds since the epoch.
    at: float
    kind: Kind
    what: str
    why: str = ""


class Checkpoint(BaseModel):
    """A checkpoint that was committed."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    name: str
    at: float
    attempt: int
    size_bytes: int
    metrics: dict[str, Any] = Field(default_factory=dict)
    #: By the score of the checkpoint policy, if there is one.
    score: float | None = None


class Progress(BaseModel):
    """How far the training is."""

    #: 0 to 1.
    fraction: float
    #: In the loop's own words, such as ``step 300 of 1000``.
    words: str
    #: At the pace since the last restart; None while that is not known.
    remaining_seconds: float | None = None


class RunReport(BaseModel):
    """The state of a run as far as its events tell.

    Args:
        run_name: Name of the run.
        score_attribute: Metric that checkpoints are ranked by; empty for none.
        score_order: ``"max"`` or ``"min"``.
    """

    model_config = ConfigDict(ser_json_inf_nan="constants", extra="ignore")

    run_name: str
    score_attribute: str = ""
    score_order: str = "max"
    run_uri: str = ""
    #: The checkpoint of another run that the run started from.
    started_from: str = ""
    dashboard_url: str = ""
    #: What the run does, in words, and what there is to say of that.
    state: str = "starting"
    detail: str = ""
    outcome: str = ""
    attempt: int = 0
    world_size: int = 0
    driver_restarts: int = 0
    reports: int = 0
    #: Number of the last report counted without those that were done again, as of now and of the last commit.
    position: int = 0
    kept_position: int = 0
    #: The same when the worker group started.
    begun_position: int = 0
    metrics: dict[str, Any] = Field(default_factory=dict)
    #: How far the last report that told it was, from 0 to 1, and in words.
    done: tuple[float, str] | None = None
    last_event_at: float = 0.0
    tally: Tally = Field(default_factory=Tally)
    incidents: list[Incident] = Field(default_factory=list)
    incidents_left_out: int = 0
    checkpoints: list[Checkpoint] = Field(default_factory=list)
    checkpoints_made: int = 0
    #: The checkpoints that were the best when they were made; the last one is it, as Ray Train counts: of two with
    #: the same score the later.
    bests: list[Checkpoint] = Field(default_factory=list)
    #: Number of the worker group, over all attempts.
    segment: int = 0
    #: Which counter of the loop the curves are drawn over; empty for the number of the report.
    axis: str = ""
    #: Whether no counter will do, since it begins anew within a worker group.
    by_position: bool = False
    #: Where the worker group's newest report stands on that axis.
    axis_at: float | None = None
    curves: dict[str, Curve] = Field(default_factory=dict)
    world_sizes: Steps = Field(default_factory=Steps)
    #: Time and fraction, since the last restart, and the pace before it in fractions a second.
    samples: list[tuple[float, float]] = Field(default_factory=list)
    pace: float | None = None
    sample_stride: int = 1
    samples_seen: int = 0
    #: Whether the controller waits for its storage.
    waits: bool = False
    #: Whether an attempt came before the newest, and whether the newest waiting for capacity has just begun.
    attempt_before: bool = False
    waits_anew: bool = False
    #: How the newest attempt ended.
    last_end: str = ""

    def take(self, event: Event) -> None:
        """Take the next event in."""
        if isinstance(event, RunRecalled):
            self._recall(event)
            return
        if isinstance(event, ControllerAlive):
            self._look_alive(event)
            return
        if isinstance(event, AttemptEnded) and event.already_finished:
            self._set_state("completed", event.message)
            return
        self.tally.take(event)
        self.last_event_at = max(self.last_event_at, event.at)
        if isinstance(event, Reported):
            self._report(event)
        elif isinstance(event, CheckpointCommitted):
            self._commit(event)
        elif isinstance(event, ClusterConnected):
            url = event.dashboard_url
            self.dashboard_url = f"http://{url}" if url and "://" not in url else url or self.dashboard_url
        elif isinstance(event, AttemptStarted):
            self._begin(event)
        elif isinstance(event, StateChanged):
            self._change_state(event)
        elif isinstance(event, WaitingForCapacity):
            self._wait(event)
        elif isinstance(event, WorkerGroupStarted):
            self._start_group(event)
        elif isinstance(event, WorkerFailed | WorkersPreempted):
            self._fail(event)
        elif isinstance(event, WorkerGroupResized):
            self._resize(event)
        elif isinstance(event, LoopWarned):
            self._warn(event)
        elif isinstance(event, StorageWaited):
            self._wait_for_storage(event)
        elif isinstance(event, AttemptEnded):
            self.end_attempt(event)

    def end_attempt(self, event: AttemptEnded) -> None:
        """Take in how an attempt ended."""
        self._set_world(event.at, 0)
        self.outcome = event.outcome.value
        self.last_end = f"{event.outcome.value}: {first_line(event.message)}"[:_MAX_TEXT]
        if event.outcome is Outcome.COMPLETED:
            self._settle_best(event)
            self._set_state("completed")
        elif event.outcome.retryable and not event.final:
            self._set_state("restarting the driver", first_line(event.message))
        elif event.outcome is not Outcome.SUPERSEDED:
            self._set_state(_STATES.get(event.outcome, "failed"), first_line(event.message))

    def end(self, at: float, state: str, why: str = "") -> None:
        """Take in how the training ended for the flow, which no event of the driver may tell."""
        ended = _OUTCOMES.get(state)
        if ended is not None:
            # What the driver could not say, or nobody has heard: what it trained since its last commit is lost.
            outcome = ended if ended is not Outcome.DRIVER_LOST or not self.outcome else Outcome(self.outcome)
            said_at = at if state in ("cancelled", "timed out", "interrupted") else self.last_event_at or at
            self.tally.take(AttemptEnded(at=said_at, attempt=self.attempt, outcome=outcome, final=True))
            self.outcome = outcome.value
        self._set_state(state, first_line(why) or (self.detail if state == "completed" else ""))
        self._set_world(self.last_event_at if state == "completed" else at, 0)
        self._tell(at, "end", state, why)

    def incident_of(self, kind: Kind) -> Incident | None:
        """Give the newest incident of a kind."""
        return next((incident for incident in reversed(self.incidents) if incident.kind == kind), None)

    @property
    def best(self) -> Checkpoint | None:
        """The best checkpoint by the score of the checkpoint policy."""
        return self.bests[-1] if self.bests else None

    @property
    def is_live(self) -> bool:
        """Whether the run goes on."""
        return self.state not in ("completed", "failed", "cancelled", "timed out", "interrupted", "left to its job")

    @property
    def progress(self) -> Progress | None:
        """How far the training is, if the loop reports a total or ``progress``."""
        if self.done is None:
            return None
        fraction, words = self.done
        if self.state == "completed":  # many loops count from 0
            return Progress(fraction=1.0, words=words)
        pace = self.pace
        if len(self.samples) > 1:
            (first_at, first), (last_at, last) = self.samples[0], self.samples[-1]
            if last_at > first_at and last > first:
                pace = (last - first) / (last_at - first_at)
        remaining = (1 - fraction) / pace if pace else None
        return Progress(fraction=fraction, words=words, remaining_seconds=remaining)

    def _recall(self, event: RunRecalled) -> None:
        try:
            recalled = RunReport.model_validate(event.report)
        except ValidationError:  # another version's
            return
        own = {"run_name", "score_attribute", "score_order", "dashboard_url", "state", "detail"}
        for name in RunReport.model_fields:
            if name not in own:
                setattr(self, name, getattr(recalled, name))

    def _look_alive(self, event: ControllerAlive) -> None:
        waits = event.doing == "waiting for the storage"
        if waits:
            self.detail = f"waiting for the storage for {event.seconds:.0f} s"
        elif self.waits:
            self.detail = ""
        self.waits = waits

    def _begin(self, event: AttemptStarted) -> None:
        self.attempt_before = event.attempt > 1
        self._roll_back(event)
        self.run_uri, self.attempt, self.outcome = event.run_uri, event.attempt, ""
        self.started_from = event.started_from
        if event.inherited:
            self._inherit(event)
        where = f"from checkpoint {loop_name(event.checkpoint)}" if event.checkpoint else "from the beginning"
        if self.attempt_before:
            self.driver_restarts += 1
            why = event.previous_end or self.last_end or "the driver before it ended without a word"
            self._tell(event.at, "driver", f"attempt {event.attempt}: a new driver goes on {where}", why)
        else:
            self._tell(event.at, "begin", f"attempt {event.attempt} starts {where}")
        self.last_end = ""
        for note in event.notes:
            self._tell(event.at, "repair", note)
        self._set_world(event.at, 0)
        self._set_state("starting")

    def _roll_back(self, event: AttemptStarted) -> None:
        """Forget the checkpoints after the one that an attempt goes on from: they were damaged, or never whole."""
        base = next((made for made in self.checkpoints if made.name == event.checkpoint), None)
        until = base.at if base is not None else event.checkpoint_at
        if event.checkpoint and not until:
            return
        self.checkpoints = [made for made in self.checkpoints if event.checkpoint and made.at <= until]
        self.bests = [made for made in self.bests if event.checkpoint and made.at <= until]

    def _inherit(self, event: AttemptStarted) -> None:
        """Take in that the run has a checkpoint of another one, which its own have to beat to be the best."""
        inherited = self._checkpoint(event.checkpoint, event.checkpoint_at, 0, 0, event.inherited)
        if is_better(inherited, self.best, self.score_order):
            self.bests = [*self.bests[-_MAX_BESTS + 1 :], inherited]

    def _checkpoint(self, name: str, at: float, attempt: int, size_bytes: int, metrics: dict[str, Any]) -> Checkpoint:
        score = _number(metrics.get(self.score_attribute)) if self.score_attribute else None
        return Checkpoint(
            name=name[:200],
            at=at,
            attempt=attempt,
            size_bytes=size_bytes,
            metrics=_bounded(metrics, MAX_METRICS),
            score=score if score is not None and not math.isnan(score) else None,
        )

    def _settle_best(self, event: AttemptEnded) -> None:
        """Take the best checkpoint from the result: an asynchronous validation scores one after its commit."""
        best = ((event.result or {}).get("best_checkpoints") or [None])[-1]
        if not self.score_attribute or not isinstance(best, dict):
            return
        name = str(best.get("uri", "")).rpartition("/")[2]
        if not name or (self.best is not None and self.best.name == name):
            return
        metrics = best.get("metrics") or {}
        made = next((made for made in self.checkpoints if made.name == name), None)
        at, attempt, size = (made.at, made.attempt, made.size_bytes) if made is not None else (event.at, 0, 0)
        found = self._checkpoint(name, at, attempt, size, metrics)
        if found.score is not None:
            self.bests = [*self.bests[-_MAX_BESTS + 1 :], found]

    def _wait_for_storage(self, event: StorageWaited) -> None:
        """Tell of a wait; those that follow each other are one incident."""
        if event.seconds < WORTH_TELLING_SECONDS:
            return
        what = f"the {event.who} waited {event.seconds:.1f} s for the storage"
        why = f"{event.tries} requests failed and were repeated; last: {event.last}"
        if self.incidents and self.incidents[-1].kind == "storage":
            self.incidents.pop()
            what += f", {self.tally.storage_wait_seconds:.0f} s in all so far"
        self._tell(event.at, "storage", what, why)

    def _change_state(self, event: StateChanged) -> None:
        if event.state == "SCHEDULING":
            self._set_state("starting workers")
        elif event.state == "PREEMPTING":
            self._set_state("draining", "a node is about to go")
        elif event.state == "SHUTTING_DOWN" and self.state == "training":
            self._set_state("winding up")

    def _wait(self, event: WaitingForCapacity) -> None:
        lacking = f"{event.possible_workers} of at least {event.min_workers} workers fit"
        why = f"{lacking}; lacking: {event.missing}" if event.missing else lacking
        self.waits_anew = self.state != "waiting for capacity"
        if self.waits_anew:
            self._tell(event.since or event.at, "capacity", "waiting for capacity", why)
        self._set_state("waiting for capacity", why)

    def _start_group(self, event: WorkerGroupStarted) -> None:
        if len(self.samples) > 1:
            progress = self.progress
            if progress is not None and progress.remaining_seconds:
                self.pace = (1 - progress.fraction) / progress.remaining_seconds
        self.samples, self.sample_stride, self.samples_seen = [], 1, 0
        self.axis_at = None
        self.segment += 1
        self.position = self.begun_position = self.kept_position
        self._set_world(event.at, event.world_size)
        self._set_state("training")

    def _report(self, event: Reported) -> None:
        self.reports += 1
        self.position += 1
        if event.checkpoint:
            self.kept_position = self.position
        self.metrics = _bounded(event.metrics, 4 * MAX_METRICS)
        if self.state != "training" and self.state != "draining":
            self._set_state("training")
        self._sample(event.at)
        x = self._place_on_axis()
        if x is None:
            return
        for name, value in self.metrics.items():
            number = None if name in _NO_CURVE else _number(value)
            if number is None or (name not in self.curves and len(self.curves) >= MAX_CURVES):
                continue
            if name not in self.curves and not math.isfinite(number):
                continue
            self.curves.setdefault(name, Curve()).add(self.segment, x, number)

    def _place_on_axis(self) -> float | None:
        """Give where a report stands on the axis; one that does not say stands where the one before it does."""
        if not self.axis and not self.curves and not self.by_position:
            self.axis = next((name for name in _COUNTERS if _number(self.metrics.get(name)) is not None), "")
        x = _number(self.metrics.get(self.axis)) if self.axis else None
        if x is not None and self.axis_at is not None and x < self.axis_at:
            self.axis, self.by_position, self.curves = "", True, {}
        if not self.axis:
            return float(self.position)
        self.axis_at = self.axis_at if x is None else x
        return self.axis_at

    def _sample(self, at: float) -> None:
        """Remember how far the training is now and then, at growing distances."""
        found = _fraction(self.metrics)
        if found is None:
            return
        self.done = found
        self.samples_seen += 1
        if self.samples_seen % self.sample_stride == 0 or not self.samples:
            self.samples.append((at, found[0]))
        if len(self.samples) > _MAX_SAMPLES:
            self.samples = self.samples[::2]
            self.sample_stride *= 2

    def _commit(self, event: CheckpointCommitted) -> None:
        if self.checkpoints and self.checkpoints[-1].name == event.checkpoint:
            return
        made = self._checkpoint(event.checkpoint, event.at, event.attempt, event.size_bytes, event.metrics)
        self.checkpoints_made += 1
        self.checkpoints = [*self.checkpoints[-MAX_CHECKPOINTS + 1 :], made]
        if is_better(made, self.best, self.score_order):
            self.bests = [*self.bests[-_MAX_BESTS + 1 :], made]

    def _fail(self, event: WorkerFailed | WorkersPreempted) -> None:
        preempted = isinstance(event, WorkersPreempted)
        what = "preemption" if preempted else "worker failure"
        then = "the workers are restarted" if event.retried else event.gives_up
        lost = f"; {event.reports_lost} reports are done again" if event.reports_lost else ""
        why = "; ".join(causes(event.errors, event.also)) or ("a node was drained or reclaimed" if preempted else "")
        self._tell(event.at, "preemption" if preempted else "failure", f"{what}: {then}{lost}", why)
        self._set_world(event.at, 0)
        self._set_state("restarting workers", first_line(why))

    def _warn(self, event: LoopWarned) -> None:
        what = {
            "checkpoint-ignored": f"the loop ignores checkpoint {event.checkpoint}",
            "no-checkpoint": "the loop saves no checkpoint",
            "ranks-missing": f"{ranks_in_words(event.ranks)} did not report",
        }[event.problem]
        again = round(self.begun_position * event.again)
        if event.is_redone:
            again = min(again, self.position - self.begun_position)
        self.position, self.kept_position = self.position - again, self.kept_position - again
        self._tell(event.at, "loop", what, event.message)

    def _resize(self, event: WorkerGroupResized) -> None:
        lost = f"; {event.reports_lost} reports are done again" if event.reports_lost else "; nothing is done again"
        why = {
            "commit": f"waited {event.waited_seconds:.0f} s for a checkpoint",
            "patience": f"no checkpoint came in {event.waited_seconds:.0f} s",
        }.get(event.reason, "")
        why = f"there is room for {event.new_size} workers; {why}" if why else ""
        self._tell(event.at, "resize", f"from {event.old_size} to {event.new_size} workers{lost}", why)
        self._set_world(event.at, 0)
        self._set_state("resizing", f"from {event.old_size} to {event.new_size} workers")

    def _set_state(self, state: str, detail: str = "") -> None:
        self.state, self.detail, self.waits = state, detail[:_MAX_TEXT], False

    def _set_world(self, at: float, size: int) -> None:
        self.world_sizes.add(at, size)
        self.world_size = size

    def _tell(self, at: float, kind: Kind, what: str, why: str = "") -> None:
        self.incidents.append(Incident(at=at, kind=kind, what=what[:_MAX_TEXT], why=first_line(why)[:_MAX_TEXT]))
        if len(self.incidents) > MAX_INCIDENTS:
            later = range(_FIRST_INCIDENTS, MAX_INCIDENTS)
            minor = (place for place in later if self.incidents[place].kind in ("storage", "capacity", "repair"))
            del self.incidents[next(minor, _FIRST_INCIDENTS)]
            self.incidents_left_out += 1


_STATES = {Outcome.CANCELLED: "cancelled", Outcome.TIMED_OUT: "timed out"}
#: How a training ended that the flow has seen end so, unless its driver knows better.
_OUTCOMES = {
    "failed": Outcome.DRIVER_LOST,
    "cancelled": Outcome.CANCELLED,
    "timed out": Outcome.TIMED_OUT,
    "interrupted": Outcome.CANCELLED,
}


def is_better(made: Checkpoint, best: Checkpoint | None, order: str) -> bool:
    """Tell whether a checkpoint is the best so far; one without a score never is.

    Of two with the same score the later is: it is the one that Ray Train keeps.
    """
    if made.score is None:
        return False
    if best is None or best.score is None:
        return True
    return made.score >= best.score if order == "max" else made.score <= best.score


def first_line(text: str) -> str:
    """Give the first line of a text that has something to say."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "").removesuffix(" Its last output:")


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _bounded(metrics: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Give so many metrics, their names and texts cut."""
    return {
        name[:_MAX_NAME]: value if value is None or _number(value) is not None else str(value)[:_MAX_NAME]
        for name, value in list(metrics.items())[:most]
    }


def _fraction(metrics: Mapping[str, Any]) -> tuple[float, str] | None:
    """Find how far a training is: ``progress``, or a counter with its total."""
    progress = _number(metrics.get("progress"))
    if progress is not None and 0 <= progress <= 1:
        return progress, f"{progress:.1%}"
    for counter, totals in _TOTALS.items():
        done = _number(metrics.get(counter))
        total = next((number for name in totals if (number := _number(metrics.get(name)))), None)
        if done is not None and total is not None and math.isfinite(done) and total > 0 and math.isfinite(total):
            return min(1.0, max(0.0, done / total)), f"{counter.replace('_', ' ')} {done:,.0f} of {total:,.0f}"
    return None
