"""What a run's report shows, as plain values of a bounded size, from its events one by one."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.checkpoint_names import loop_name, written_by
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.core.ray_output import causes
from prefect_elastic_train.core.scores import score_of
from prefect_elastic_train.report.accounts import Tally

#: Bounds of what is kept, whatever the run does.
_MAX_CURVES = 8
MAX_POINTS = 400
_MAX_INCIDENTS = 60
_MAX_CHECKPOINTS = 10
_MAX_METRICS = 12
_MAX_WORLD_SIZES = 400
_MAX_TEXT = 500
_MAX_NAME = 60
_MAX_LINKS = 5
_LINK = re.compile(r"https?://[\w.:/?=&%+#~@-]{1,300}", re.ASCII)
WORTH_TELLING_SECONDS = 3.0  # a storage that waits for less says nothing: a request was repeated

#: Metrics that tell how far the training is rather than how good, in the order in which they are asked, with those
#: that tell the whole: a ``step`` beside a ``global_step`` begins anew with each epoch.
COUNTERS: Mapping[str, list[str]] = {
    counter: [f"{whole}_{counter.removeprefix('global_')}s" for whole in ("total", "max", "num")]
    for counter in ("global_step", "iteration", "step", "epoch")
}
TOTALS = frozenset(chain.from_iterable(COUNTERS.values()))
#: What is counted of the way without a total.
PACED = ("samples", *(counter for counter in COUNTERS if counter != "epoch"))
#: All that tells how far the training is.
POSITIONS = frozenset({"progress", "samples", *COUNTERS, *TOTALS})

#: How a training ended that the flow has seen end so, unless its driver knows better.
_OUTCOMES = {
    "failed": Outcome.DRIVER_LOST,
    "cancelled": Outcome.CANCELLED,
    "timed out": Outcome.TIMED_OUT,
    "interrupted": Outcome.CANCELLED,
}
_STATES = {Outcome.CANCELLED: "cancelled", Outcome.TIMED_OUT: "timed out"}

Kind = Literal["begin", "failure", "preemption", "resize", "driver", "capacity", "storage", "repair", "loop", "end"]


class Incident(BaseModel):
    """Something that a person wants to know of: when (seconds since the epoch), what, and why."""

    at: float
    kind: Kind
    what: str
    why: str = ""


class Checkpoint(BaseModel, ser_json_inf_nan="constants"):
    """A checkpoint that was committed, with its score by the checkpoint policy, if there is one."""

    name: str
    at: float
    attempt: int = 0
    size_bytes: int = 0
    metrics: dict[str, Any]
    score: float | None = None


class Progress(BaseModel):
    """How far the training is: from 0 to 1, and in words such as ``step 300 of 1,000``."""

    fraction: float
    words: str
    remaining_seconds: float | None = None  # at the pace since the last restart; None while that is not known


class Curve(BaseModel):
    """A metric by number of report, none twice: the lowest and highest of each `width`, and the newest point."""

    points: list[tuple[float, float]] = []
    width: int = 1

    def add(self, x: float, y: float) -> None:
        """Add a point in place of all that are not before it."""
        while self.points and self.points[-1][0] >= x:
            self.points.pop()
        while len(self.points) >= MAX_POINTS:
            stretches = [list(found) for _, found in groupby(self.points, lambda point: point[0] // self.width)]
            extremes = [sorted({min(found, key=itemgetter(1)), max(found, key=itemgetter(1))}) for found in stretches]
            self.points = list(chain.from_iterable(extremes))
            if len(self.points) > MAX_POINTS // 2:
                self.width *= 2
        self.points.append((x, y))


class RunReport(BaseModel, ev.EventHandler, ser_json_inf_nan="constants"):
    """The state of a run as far as its events tell."""

    run_name: str
    score_attribute: str = ""
    score_order: str = "max"
    totals: dict[str, Any] = {}  # what the loop's configuration says that there is to do
    flow_run_url: str = ""
    run_uri: str = ""
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
    metrics: dict[str, Any] = {}
    links: dict[str, str] = {}  # metrics that are one, such as the page of a tracker's run
    #: How far the training is, if the loop tells; and what it counted, and when, first since the last restart.
    progress: Progress | None = None
    paced_from: tuple[float, dict[str, float]] | None = None
    rates: dict[str, float] = {}  # what the loop counts of its way, a second, since then
    saves: str = ""  # how often the loop saves, and why
    last_event_at: float = 0.0
    tally: Tally = Tally()
    incidents: list[Incident] = []
    broken: tuple[float, Kind] | None = None  # since when no workers train that did, or will again, and why
    checkpoints: list[Checkpoint] = []
    checkpoints_made: int = 0
    best: Checkpoint | None = None
    curves: dict[str, Curve] = {}
    world_sizes: list[tuple[float, int]] = []
    waits_anew: bool = False
    last_end: str = ""

    def take(self, event: ev.Event) -> None:
        """Take the next event in."""
        if not isinstance(event, ev.RunRecalled | ev.ControllerAlive) and not getattr(event, "already_finished", False):
            self.tally.take(event)
            self.last_event_at = max(self.last_event_at, event.at)
        self.handle(event)

    def end(self, at: float, state: str, why: str = "") -> None:
        """Take in how the training ended for the flow, which no event of the driver may tell."""
        if outcome := _OUTCOMES.get(state):
            # What the driver could not say, or nobody has heard: what it trained since its last commit is lost.
            outcome = Outcome(self.outcome) if state == "failed" and self.outcome else outcome
            said_at = (self.last_event_at if state == "failed" else 0.0) or at
            self.tally.take(ev.AttemptEnded(at=said_at, attempt=self.attempt, outcome=outcome, final=True))
            self.outcome = outcome.value
        self._set_state(state, why or (self.detail if state == "completed" else ""))
        self._set_world(self.last_event_at if state == "completed" else at, 0)
        self._tell(at, "end", state, why)

    @property
    def is_live(self) -> bool:
        """Whether the run goes on."""
        return self.state not in ("completed", "left to its job", *_OUTCOMES)

    def on_run_recalled(self, event: ev.RunRecalled) -> None:
        """Take over what was before, bar what this process knows itself."""
        try:
            recalled = RunReport.model_validate(event.report)
        except ValidationError:  # another version's
            return
        own = {"run_name", "score_attribute", "score_order", "totals"}
        own |= {"flow_run_url", "dashboard_url", "state", "detail"}
        for name in RunReport.model_fields.keys() - own:
            setattr(self, name, getattr(recalled, name))

    def on_controller_alive(self, event: ev.ControllerAlive) -> None:
        if event.doing == "waiting for the storage":
            self.detail = f"{event.doing} for {event.seconds:.0f} s"
        elif self.detail.startswith("waiting for the storage"):
            self.detail = ""

    def on_cluster_connected(self, event: ev.ClusterConnected) -> None:
        url = event.dashboard_url
        self.dashboard_url = f"http://{url}" if url and "://" not in url else url or self.dashboard_url

    def on_attempt_started(self, event: ev.AttemptStarted) -> None:
        # With another run's, which no attempt of this one has written, none of its own is left.
        self._roll_back("" if event.inherited or written_by(event.checkpoint) == 0 else event.checkpoint)
        self.run_uri, self.attempt, self.outcome = event.run_uri, event.attempt, ""
        self.started_from = event.started_from
        if event.inherited:  # the run has a checkpoint of another one, which its own have to beat
            self._offer(event.checkpoint, event.checkpoint_at, event.inherited)
        where = f"from checkpoint {loop_name(event.checkpoint)}" if event.checkpoint else "from the beginning"
        if event.attempt > 1:
            self.driver_restarts += 1
            why = event.previous_end or self.last_end or "the driver before it ended without a word"
            self._tell(event.at, "driver", f"attempt {event.attempt}: a new driver goes on {where}", why)
            self.broken = event.driver_started_at or event.at, "driver"
        else:
            self._tell(event.at, "begin", f"attempt {event.attempt} starts {where}")
        self.last_end = ""
        for note in event.notes:
            self._tell(event.at, "repair", note)
        self._set_world(event.at, 0)
        self._set_state("starting")

    def on_attempt_ended(self, event: ev.AttemptEnded) -> None:
        if event.already_finished:  # which is no news
            self._set_state("completed", event.message)
            return
        self._set_world(event.at, 0)
        self.outcome = event.outcome.value
        self.last_end = f"{event.outcome.value}: {_first_line(event.message)}"
        if event.outcome is Outcome.COMPLETED:
            kept = (event.result or {}).get("best_checkpoints")
            if kept:  # an asynchronous validation scores a checkpoint after its commit
                self._offer(kept[-1]["uri"].rpartition("/")[2], event.at, kept[-1]["metrics"], is_best=True)
            self._set_state("completed")
        elif event.outcome.retryable and not event.final:
            self._set_state("restarting the driver", event.message)
        elif event.outcome is not Outcome.SUPERSEDED:
            self._set_state(_STATES.get(event.outcome, "failed"), event.message)

    def on_storage_waited(self, event: ev.StorageWaited) -> None:
        if event.seconds < WORTH_TELLING_SECONDS:
            return
        what = f"the {event.who} waited {event.seconds:.1f} s for the storage"
        if self.incidents and self.incidents[-1].kind == "storage":
            self.incidents.pop()  # those that follow each other are one
            what += f", {self.tally.storage_wait_seconds:.0f} s in all so far"
        self._tell(event.at, "storage", what, f"{event.tries} requests failed and were repeated; last: {event.last}")

    def on_state_changed(self, event: ev.StateChanged) -> None:
        states = {"SCHEDULING": "starting workers", "PREEMPTING": "draining", "SHUTTING_DOWN": "winding up"}
        if event.state in states and (event.state != "SHUTTING_DOWN" or self.state == "training"):
            self._set_state(states[event.state])

    def on_waiting_for_capacity(self, event: ev.WaitingForCapacity) -> None:
        lacking = f"{event.possible_workers} of at least {event.min_workers} workers fit"
        why = f"{lacking}; lacking: {event.missing}" if event.missing else lacking
        self.waits_anew = self.state != "waiting for capacity"
        if self.waits_anew:
            self._tell(event.since or event.at, "capacity", "waiting for capacity", why)
        self._set_state("waiting for capacity", why)

    def on_worker_group_started(self, event: ev.WorkerGroupStarted) -> None:
        self.paced_from, self.rates = None, {}
        self._set_world(event.at, event.world_size)
        self._set_state("training")

    def on_first_step(self, event: ev.FirstStep | ev.Report) -> None:
        """Take in that the worker group trains: by a session's first step, else by its first report."""
        if self.broken is None or not self.world_size:
            return
        since, kind = self.broken
        self.broken = None
        for last in [one for one in self.incidents if one.kind == kind][-1:]:
            last.what += f"; training again after {event.at - since:.1f} s"

    def on_report(self, event: ev.Report) -> None:
        self.on_first_step(event)
        self.reports += 1
        self.metrics = _bounded(event.metrics, 4 * _MAX_METRICS)
        links = self.links | {name[:_MAX_NAME]: one for name, one in event.metrics.items() if is_link(one)}
        self.links = dict(list(links.items())[:_MAX_LINKS])
        if self.state not in ("training", "draining"):
            self._set_state("training")
        self._see_progress(event.at)
        for name, value in self.metrics.items():
            y, has_room = _number(value), name in self.curves or len(self.curves) < _MAX_CURVES
            if has_room and name not in POSITIONS and y is not None:
                self.curves.setdefault(name, Curve()).add(self.tally.position, y)

    def on_checkpoint_committed(self, event: ev.CheckpointCommitted) -> None:
        self.on_report(event)
        made = self._offer(event.checkpoint, event.at, event.metrics)
        made.attempt, made.size_bytes = event.attempt, event.size_bytes
        self.checkpoints_made += 1
        self.checkpoints = [*self.checkpoints, made][-_MAX_CHECKPOINTS:]

    def on_group_failed(self, event: ev.GroupFailed) -> None:
        kind: Kind = "preemption" if isinstance(event, ev.WorkersPreempted) else "failure"
        what = "worker failure" if kind == "failure" else kind
        then = "the workers are restarted" if event.retried else event.gives_up
        lost = f"; reports that are done again: {event.reports_lost}" if event.reports_lost else ""
        why = "; ".join(causes(event.errors, event.also)) or "a node was drained or reclaimed"
        self._tell(event.at, kind, f"{what}: {then}{lost}", why)
        self.broken = event.at, kind
        self._set_world(event.at, 0)
        self._set_state("restarting workers", why)

    def on_loop_warned(self, event: ev.LoopWarned) -> None:
        self._tell(event.at, "loop", f"the loop: {event.problem.replace('-', ' ')}", event.message)

    def on_saves_planned(self, event: ev.SavesPlanned) -> None:
        self.saves = event.words[:_MAX_TEXT]

    def on_worker_group_resized(self, event: ev.WorkerGroupResized) -> None:
        sizes = f"from {event.old_size} to {event.new_size} workers"
        lost = f"; reports that are done again: {event.reports_lost}" if event.reports_lost else ""
        waited = f"waited {event.waited_seconds:.0f} s for a checkpoint"
        why = waited + (", which did not come" if event.reason == "patience" else "")
        self._tell(event.at, "resize", sizes + lost, why)
        self.broken = event.at, "resize"
        self._set_world(event.at, 0)
        self._set_state("resizing", sizes)

    def _see_progress(self, at: float) -> None:
        found = _progress(self.metrics) or _progress(self.totals | self.metrics)
        counts = {name: _number(self.metrics.get(name)) for name in PACED}
        counted = {name: count for name, count in counts.items() if count is not None}
        if found is not None:
            self.progress, counted["progress"] = found, found.fraction
        self.paced_from = self.paced_from or (at, counted)
        since, before = self.paced_from
        gained = {name: count - before[name] for name, count in counted.items() if count > before.get(name, math.inf)}
        self.rates = {name: gain / (at - since) for name, gain in gained.items()} if at > since else {}
        if found is not None and "progress" in self.rates:
            found.remaining_seconds = (1 - found.fraction) / self.rates["progress"]

    def _roll_back(self, checkpoint: str) -> None:
        """Forget the checkpoints after the one that an attempt goes on from: they were damaged, or never whole."""
        names = [made.name for made in self.checkpoints]
        kept = names.index(checkpoint) + 1 if checkpoint in names else len(names) if checkpoint else 0
        del self.checkpoints[kept:]
        if self.best is not None and (self.best.name in names[kept:] or not checkpoint):
            self.best = None
            for made in self.checkpoints:
                self._compare(made)

    def _offer(self, name: str, at: float, metrics: dict[str, Any], is_best: bool = False) -> Checkpoint:
        """Return a checkpoint, which is the best from now on if its score says so, or if it has one and `is_best`."""
        score = score_of(metrics, self.score_attribute)
        made = Checkpoint(name=name[:200], at=at, metrics=_bounded(metrics, _MAX_METRICS), score=score)
        if not is_best:
            self._compare(made)
        elif score is not None and (self.best is None or self.best.name != made.name):
            self.best = made
        return made

    def _compare(self, made: Checkpoint) -> None:
        """Take a checkpoint for the best if it is that: of two with the same score the later, which Ray Train keeps."""
        best = self.best.score if self.best is not None else None
        sign = 1 if self.score_order == "max" else -1
        if made.score is not None and (best is None or sign * made.score >= sign * best):
            self.best = made

    def _set_state(self, state: str, detail: str = "") -> None:
        self.state, self.detail = state, _first_line(detail)
        if state == "completed" and self.progress is not None:  # many loops count from 0
            self.progress = Progress(fraction=1.0, words=self.progress.words)

    def _set_world(self, at: float, size: int) -> None:
        if not self.world_sizes or self.world_sizes[-1][1] != size:
            self.world_sizes = [*self.world_sizes, (at, size)][-_MAX_WORLD_SIZES:]
        self.world_size = size

    def _tell(self, at: float, kind: Kind, what: str, why: str = "") -> None:
        told = Incident(at=at, kind=kind, what=what[:_MAX_TEXT], why=_first_line(why))
        self.incidents = [*self.incidents, told][-_MAX_INCIDENTS:]


def _first_line(text: str) -> str:
    """Return the first line of a text that has something to say, cut."""
    return next((line.strip()[:_MAX_TEXT] for line in text.splitlines() if line.strip()), "")


def _number(value: Any) -> float | None:
    """Return a metric as a finite number, None if it is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= sys.float_info.max else None


def is_link(value: Any) -> bool:
    """Return whether a value is an address that a page may link to."""
    return isinstance(value, str) and _LINK.fullmatch(value) is not None


def _bounded(metrics: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Return so many metrics, their names and texts cut, without those that are links."""
    return {
        name[:_MAX_NAME]: value
        if isinstance(value, float | None) or _number(value) is not None
        else str(value)[:_MAX_NAME]
        for name, value in list(metrics.items())[:most]
        if not is_link(value)
    }


def _progress(metrics: Mapping[str, Any]) -> Progress | None:
    """Find how far a training is: by ``progress``, or by a counter with its total."""
    progress = _number(metrics.get("progress"))
    if progress is not None and 0 <= progress <= 1:
        return Progress(fraction=progress, words=f"{progress:.1%}")
    for counter, totals in COUNTERS.items():
        done = _number(metrics.get(counter))
        total = next((found for name in totals if (found := _number(metrics.get(name)))), 0.0)
        if done is not None and total > 0:
            words = f"{counter.replace('_', ' ')} {done:,.0f} of {total:,.0f}"
            return Progress(fraction=min(1.0, max(0.0, done / total)), words=words)
    return None
