"""What a run's report shows, as plain values of a bounded size, from its events one by one."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.checkpoint_names import loop_name
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.core.rank_errors import causes, ranks_in_words
from prefect_elastic_train.report.accounts import Tally
from prefect_elastic_train.report.curves import Curve, Steps
from prefect_elastic_train.report.metrics import COUNTERS, TOTALS, bounded, fraction, number

#: Bounds of what is kept, whatever the run does.
MAX_CURVES = 8
MAX_INCIDENTS = 60
_FIRST_INCIDENTS = 10
MAX_CHECKPOINTS = 10
MAX_METRICS = 12
_MAX_TEXT = 500
_MAX_BESTS = 20
#: A storage that waits for less says nothing: a request was repeated.
WORTH_TELLING_SECONDS = 3.0

_NO_CURVE = {"progress", *COUNTERS, *TOTALS}

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


class RunReport(BaseModel, ev.EventHandler):
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
    #: When the loop first told how far it was since the last restart, and when last; and the pace before that restart
    #: in fractions a second.
    paced_from: tuple[float, float] | None = None
    paced_to: tuple[float, float] | None = None
    pace: float | None = None
    #: Whether the controller waits for its storage.
    waits: bool = False
    #: Whether an attempt came before the newest, and whether the newest waiting for capacity has just begun.
    attempt_before: bool = False
    waits_anew: bool = False
    #: How the newest attempt ended.
    last_end: str = ""

    def take(self, event: ev.Event) -> None:
        """Take the next event in."""
        if not isinstance(event, ev.RunRecalled | ev.ControllerAlive) and not _is_old_end(event):
            self.tally.take(event)
            self.last_event_at = max(self.last_event_at, event.at)
        self.handle(event)

    def on_run_recalled(self, event: ev.RunRecalled) -> None:
        """Take over what was before, bar what this process knows itself."""
        try:
            recalled = RunReport.model_validate(event.report)
        except ValidationError:  # another version's
            return
        own = {"run_name", "score_attribute", "score_order", "dashboard_url", "state", "detail"}
        for name in RunReport.model_fields:
            if name not in own:
                setattr(self, name, getattr(recalled, name))

    def on_controller_alive(self, event: ev.ControllerAlive) -> None:
        waits = event.doing == "waiting for the storage"
        if waits:
            self.detail = f"waiting for the storage for {event.seconds:.0f} s"
        elif self.waits:
            self.detail = ""
        self.waits = waits

    def on_cluster_connected(self, event: ev.ClusterConnected) -> None:
        url = event.dashboard_url
        self.dashboard_url = f"http://{url}" if url and "://" not in url else url or self.dashboard_url

    def on_attempt_ended(self, event: ev.AttemptEnded) -> None:
        if _is_old_end(event):
            self._set_state("completed", event.message)
            return
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
            self.tally.take(ev.AttemptEnded(at=said_at, attempt=self.attempt, outcome=outcome, final=True))
            self.outcome = outcome.value
        self._set_state(state, first_line(why) or (self.detail if state == "completed" else ""))
        self._set_world(self.last_event_at if state == "completed" else at, 0)
        self._tell(at, "end", state, why)

    def incident_of(self, kind: Kind) -> Incident | None:
        """Return the newest incident of a kind."""
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
        done, words = self.done
        if self.state == "completed":  # many loops count from 0
            return Progress(fraction=1.0, words=words)
        pace = self._known_pace()
        remaining = (1 - done) / pace if pace else None
        return Progress(fraction=done, words=words, remaining_seconds=remaining)

    def _known_pace(self) -> float | None:
        if self.paced_from is None or self.paced_to is None:
            return self.pace
        (first_at, first), (last_at, last) = self.paced_from, self.paced_to
        return (last - first) / (last_at - first_at) if last_at > first_at and last > first else self.pace

    def on_attempt_started(self, event: ev.AttemptStarted) -> None:
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

    def _roll_back(self, event: ev.AttemptStarted) -> None:
        """Forget the checkpoints after the one that an attempt goes on from: they were damaged, or never whole."""
        base = next((made for made in self.checkpoints if made.name == event.checkpoint), None)
        until = base.at if base is not None else event.checkpoint_at
        if event.checkpoint and not until:
            return
        self.checkpoints = [made for made in self.checkpoints if event.checkpoint and made.at <= until]
        self.bests = [made for made in self.bests if event.checkpoint and made.at <= until]

    def _inherit(self, event: ev.AttemptStarted) -> None:
        """Take in that the run has a checkpoint of another one, which its own have to beat to be the best."""
        inherited = self._checkpoint(event.checkpoint, event.checkpoint_at, 0, 0, event.inherited)
        if is_better(inherited, self.best, self.score_order):
            self.bests = [*self.bests[-_MAX_BESTS + 1 :], inherited]

    def _checkpoint(self, name: str, at: float, attempt: int, size_bytes: int, metrics: dict[str, Any]) -> Checkpoint:
        score = number(metrics.get(self.score_attribute)) if self.score_attribute else None
        return Checkpoint(
            name=name[:200],
            at=at,
            attempt=attempt,
            size_bytes=size_bytes,
            metrics=bounded(metrics, MAX_METRICS),
            score=score if score is not None and not math.isnan(score) else None,
        )

    def _settle_best(self, event: ev.AttemptEnded) -> None:
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

    def on_storage_waited(self, event: ev.StorageWaited) -> None:
        """Tell of a wait; those that follow each other are one incident."""
        if event.seconds < WORTH_TELLING_SECONDS:
            return
        what = f"the {event.who} waited {event.seconds:.1f} s for the storage"
        why = f"{event.tries} requests failed and were repeated; last: {event.last}"
        if self.incidents and self.incidents[-1].kind == "storage":
            self.incidents.pop()
            what += f", {self.tally.storage_wait_seconds:.0f} s in all so far"
        self._tell(event.at, "storage", what, why)

    def on_state_changed(self, event: ev.StateChanged) -> None:
        if event.state == "SCHEDULING":
            self._set_state("starting workers")
        elif event.state == "PREEMPTING":
            self._set_state("draining", "a node is about to go")
        elif event.state == "SHUTTING_DOWN" and self.state == "training":
            self._set_state("winding up")

    def on_waiting_for_capacity(self, event: ev.WaitingForCapacity) -> None:
        lacking = f"{event.possible_workers} of at least {event.min_workers} workers fit"
        why = f"{lacking}; lacking: {event.missing}" if event.missing else lacking
        self.waits_anew = self.state != "waiting for capacity"
        if self.waits_anew:
            self._tell(event.since or event.at, "capacity", "waiting for capacity", why)
        self._set_state("waiting for capacity", why)

    def on_worker_group_started(self, event: ev.WorkerGroupStarted) -> None:
        self.pace = self._known_pace()
        self.paced_from = self.paced_to = self.axis_at = None
        self.segment += 1
        self._set_world(event.at, event.world_size)
        self._set_state("training")

    def on_report(self, event: ev.Report) -> None:
        self.reports += 1
        self.metrics = bounded(event.metrics, 4 * MAX_METRICS)
        if self.state != "training" and self.state != "draining":
            self._set_state("training")
        if (found := fraction(self.metrics)) is not None:
            self.done = found
            self.paced_to = (event.at, found[0])
            self.paced_from = self.paced_from or self.paced_to
        x = self._place_on_axis()
        if x is None:
            return
        for name, value in self.metrics.items():
            y = None if name in _NO_CURVE else number(value)
            if y is None or (name not in self.curves and len(self.curves) >= MAX_CURVES):
                continue
            if name not in self.curves and not math.isfinite(y):
                continue
            self.curves.setdefault(name, Curve()).add(self.segment, x, y)

    def _place_on_axis(self) -> float | None:
        """Return where a report stands on the axis; one that does not say stands where the one before it does."""
        if not self.axis and not self.curves and not self.by_position:
            self.axis = next((name for name in COUNTERS if number(self.metrics.get(name)) is not None), "")
        x = number(self.metrics.get(self.axis)) if self.axis else None
        if x is not None and self.axis_at is not None and x < self.axis_at:
            self.axis, self.by_position, self.curves = "", True, {}
        if not self.axis:
            return float(self.tally.position)
        self.axis_at = self.axis_at if x is None else x
        return self.axis_at

    def on_checkpoint_committed(self, event: ev.CheckpointCommitted) -> None:
        self.on_report(event)
        made = self._checkpoint(event.checkpoint, event.at, event.attempt, event.size_bytes, event.metrics)
        self.checkpoints_made += 1
        self.checkpoints = [*self.checkpoints[-MAX_CHECKPOINTS + 1 :], made]
        if is_better(made, self.best, self.score_order):
            self.bests = [*self.bests[-_MAX_BESTS + 1 :], made]

    def on_group_failed(self, event: ev.GroupFailed) -> None:
        preempted = isinstance(event, ev.WorkersPreempted)
        what = "preemption" if preempted else "worker failure"
        then = "the workers are restarted" if event.retried else event.gives_up
        lost = f"; {event.reports_lost} reports are done again" if event.reports_lost else ""
        why = "; ".join(causes(event.errors, event.also)) or ("a node was drained or reclaimed" if preempted else "")
        self._tell(event.at, "preemption" if preempted else "failure", f"{what}: {then}{lost}", why)
        self._set_world(event.at, 0)
        self._set_state("restarting workers", first_line(why))

    def on_loop_warned(self, event: ev.LoopWarned) -> None:
        what = {
            "checkpoint-ignored": f"the loop ignores checkpoint {event.checkpoint}",
            "no-checkpoint": "the loop saves no checkpoint",
            "ranks-missing": f"{ranks_in_words(event.ranks)} did not report",
        }[event.problem]
        self._tell(event.at, "loop", what, event.message)

    def on_worker_group_resized(self, event: ev.WorkerGroupResized) -> None:
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


def _is_old_end(event: ev.Event) -> bool:
    """Return whether the run had ended before this attempt, which is no news."""
    return isinstance(event, ev.AttemptEnded) and event.already_finished


_STATES = {Outcome.CANCELLED: "cancelled", Outcome.TIMED_OUT: "timed out"}
#: How a training ended that the flow has seen end so, unless its driver knows better.
_OUTCOMES = {
    "failed": Outcome.DRIVER_LOST,
    "cancelled": Outcome.CANCELLED,
    "timed out": Outcome.TIMED_OUT,
    "interrupted": Outcome.CANCELLED,
}


def is_better(made: Checkpoint, best: Checkpoint | None, order: str) -> bool:
    """Return whether a checkpoint is the best so far; one without a score never is.

    Of two with the same score the later is: it is the one that Ray Train keeps.
    """
    if made.score is None:
        return False
    if best is None or best.score is None:
        return True
    return made.score >= best.score if order == "max" else made.score <= best.score


def first_line(text: str) -> str:
    """Return the first line of a text that has something to say."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "").removesuffix(" Its last output:")
