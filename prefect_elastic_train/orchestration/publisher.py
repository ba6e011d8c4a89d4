"""Keeps the report, the progress and the events of a training up to date in Prefect, at a bounded cost.

All writing is done by a thread of its own, so that nothing waits for the Prefect API; what it cannot write is
counted, and training goes on. The events are for automations; `docs/events.md` has their payloads.
"""

from __future__ import annotations

import contextvars
import math
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import chain
from typing import Any

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.context import TaskRunContext
from prefect.events import emit_event
from prefect.exceptions import PrefectHTTPStatusError

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.checkpoint_names import loop_name
from prefect_elastic_train.core.ray_output import causes
from prefect_elastic_train.core.result import Counts
from prefect_elastic_train.report.markdown import render, summary_line
from prefect_elastic_train.report.run_report import WORTH_TELLING_SECONDS, RunReport

PREFIX = "elastic-train.run."
CHECKPOINT = f"{PREFIX}checkpoint"
BEST_CHECKPOINT = f"{PREFIX}best-checkpoint"
COMPLETED = f"{PREFIX}completed"
WORKER_FAILED = f"{PREFIX}worker-failed"
DRIVER_RESTARTED = f"{PREFIX}driver-restarted"
OF_ATTEMPTS = [f"{PREFIX}started", DRIVER_RESTARTED, f"{PREFIX}workers-started", CHECKPOINT]  # that have begun

#: Between two updates of the artifacts.
ARTIFACT_SECONDS = 5.0
_TURN_SECONDS = 0.5
#: Between updates in which nothing but the time has changed, and between drawings (up to a second each) of a long run.
_IDLE_SECONDS = 60.0
#: Between updates of the progress.
_PROGRESS_SECONDS = 30.0
#: How long the last update may take.
_CLOSE_SECONDS = 5.0
_DRAWING_SECONDS = 60.0
_MAX_WAITING_EVENTS = 1000
_MAX_KEY = 100
#: Events that may come often: of each name at most one is told in so long, the newest.
_FREQUENT = (CHECKPOINT, BEST_CHECKPOINT, f"{PREFIX}storage-waited")
_FREQUENT_SECONDS = 30.0
_NAMESPACE = uuid.UUID("5a1d4a8e-7d0c-4a9d-8a55-3c4f1c1f7e11")
_MAX_TEXT = 2000
_MAX_METRICS = 50
_MAX_RANKS = 1000

_Told = list[tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class RunEvent:
    """An event of a run as Prefect gets it, under its name with the prefix."""

    name: str
    at: float
    payload: dict[str, Any]
    #: Tells it from every other event of the run; the same when it is told again.
    key: str

    def send(self, flow_run_id: str, related: Sequence[Mapping[str, str]] = ()) -> None:
        """Hand it to Prefect's own queue. Prefect adds flow run and task run, and what these relate to, itself."""
        name, run_uri = self.payload["run_name"], self.payload["run_uri"]
        emit_event(
            event=self.name,
            resource={
                "prefect.resource.id": f"elastic-train.run.{name}",
                "prefect.resource.name": name,
                "elastic-train.run-uri": run_uri[:500],
            },
            occurred=datetime.fromtimestamp(self.at, timezone.utc),
            related=[dict(resource) for resource in related],
            payload=self.payload,
            # Whose run it is tells runs of one name in different storages apart.
            id=uuid.uuid5(_NAMESPACE, f"{flow_run_id}|{run_uri}|{self.name}|{self.key}"),
        )


def translate(event: ev.Event, report: RunReport, storage_block: str) -> list[RunEvent]:
    """Return what Prefect is told of an event that the report has taken in."""
    told: _Told = _Payloads(report).handle(event) or []
    base, key = _base(report, storage_block), f"{event.attempt}-{event.sequence}"
    return [RunEvent(f"{PREFIX}{name}", event.at, base | payload, key) for name, payload in told]


def _base(report: RunReport, storage_block: str) -> dict[str, Any]:
    return {**report.model_dump(include={"run_name", "run_uri", "attempt"}), "storage_block": storage_block}


@dataclass
class _Payloads(ev.EventHandler):
    """Names and payloads of what Prefect is told of an event."""

    _report: RunReport

    def on_attempt_started(self, event: ev.AttemptStarted) -> _Told:
        report, told = self._report, {"checkpoint": loop_name(event.checkpoint)}
        if event.attempt <= 1:
            return [("started", {**told, "started_from": event.started_from[:_MAX_TEXT]})]
        why = next((incident.why for incident in reversed(report.incidents) if incident.kind == "driver"), "")
        counts = {"driver_restarts": report.driver_restarts, "counted": event.counted}
        return [("driver-restarted", {**told, "reason": why[:_MAX_TEXT], **counts})]

    def on_worker_group_started(self, event: ev.WorkerGroupStarted) -> _Told:
        return [("workers-started", {"world_size": event.world_size, "checkpoint": loop_name(event.checkpoint)})]

    def on_worker_group_resized(self, event: ev.WorkerGroupResized) -> _Told:
        told = event.model_dump(include={"old_size", "new_size", "reason", "reports_lost"})
        return [("resized", {**told, "waited_seconds": round(event.waited_seconds, 3)})]

    def on_group_failed(self, event: ev.GroupFailed) -> _Told:
        told = {
            "ranks": sorted({*map(int, event.errors), *chain.from_iterable(event.also.values())})[:_MAX_RANKS],
            "reasons": causes(event.errors, event.also),
            **event.model_dump(include={"retried", "reports_lost"}),
            "gives_up": "" if event.retried else event.gives_up,
            **self._report.tally.model_dump(include={"worker_failures", "preemptions"}),
        }
        return [("preempted" if isinstance(event, ev.WorkersPreempted) else "worker-failed", told)]

    def on_loop_warned(self, event: ev.LoopWarned) -> _Told:
        return [(event.problem, {"message": event.message[:_MAX_TEXT], "checkpoint": loop_name(event.checkpoint)})]

    def on_waiting_for_capacity(self, event: ev.WaitingForCapacity) -> _Told:
        told = event.model_dump(include={"possible_workers", "min_workers", "resources_per_worker"})
        missing = {"missing": event.missing[:_MAX_TEXT]}
        return [("waiting-for-capacity", {**told, **missing})] if self._report.waits_anew else []

    def on_storage_waited(self, event: ev.StorageWaited) -> _Told:
        told = {**event.model_dump(include={"who", "seconds", "tries"}), "last": event.last[:_MAX_TEXT]}
        return [("storage-waited", told)] if event.seconds >= WORTH_TELLING_SECONDS else []

    def on_checkpoint_committed(self, event: ev.CheckpointCommitted) -> _Told:
        report, made = self._report, self._report.checkpoints[-1]
        payload = {
            "checkpoint": loop_name(made.name),
            "checkpoint_uri": f"{report.run_uri}/{made.name}",
            "size_bytes": made.size_bytes,
            "metrics": _plain(made.metrics),
            "checkpoints_made": report.checkpoints_made,
        }
        if report.best is not made:
            return [("checkpoint", payload)]
        score = {"score_attribute": report.score_attribute, **_plain({"score": made.score})}
        return [("checkpoint", payload), ("best-checkpoint", {**payload, **score})]


def ending(report: RunReport, name: str, at: float, message: str, storage_block: str) -> RunEvent:
    """Return what Prefect is told of the end of a training by its last state, such as ``timed-out``, and why."""
    payload = _base(report, storage_block) | {"outcome": report.outcome or name, "message": message[:_MAX_TEXT]}
    if report.attempt:  # else no driver has told what the run has
        account = report.tally.account()
        newest = report.checkpoints[-1] if report.checkpoints else None
        payload |= {
            "checkpoint_uri": f"{report.run_uri}/{newest.name}" if newest else "",
            "best_checkpoint_uri": f"{report.run_uri}/{report.best.name}" if report.best else "",
            "metrics": _plain(report.metrics),
            **report.tally.model_dump(include={*Counts.model_fields} - {"storage_wait_seconds"}),
            "driver_restarts": report.driver_restarts,
            "goodput": account.goodput,
            "time": account.model_dump(),
        }
    return RunEvent(f"{PREFIX}{name}", at, payload, f"{report.attempt}-end-{at}")


def _plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as JSON that every reader takes: what is no finite number becomes text."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in list(metrics.items())[:_MAX_METRICS]
    }


def artifact_key(run_name: str, what: str = "") -> str:
    """Return the key of a run's artifact, in the letters that Prefect allows."""
    name = re.sub(r"[^a-z0-9]+", "-", run_name.lower()).strip("-")[:_MAX_KEY]
    if name != run_name:  # two names may differ in what is left out only
        name = f"{name}-{uuid.uuid5(uuid.NAMESPACE_URL, run_name).hex[:6]}"
    return "-".join(part for part in ("elastic-train", what, name) if part)


@dataclass(eq=False)
class Publisher:
    """Takes a training's events into its report, and shows what they add up to in Prefect, at most every 5 s.

    The events relate to ``related`` besides what Prefect finds itself. ``on_trouble`` is told why nothing can be
    written, when that begins; ``errors`` counts what went wrong.
    """

    report: RunReport
    interval_seconds: float = 10.0
    storage_block: str = ""
    flow_run_id: str = ""
    related: Sequence[Mapping[str, str]] = ()
    on_trouble: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        self.errors = 0
        self._task = TaskRunContext.get()
        self._lock, self._drawing = threading.Lock(), threading.Lock()
        self._events: deque[RunEvent] = deque(maxlen=_MAX_WAITING_EVENTS)
        #: By name: the newest of those that may come often and wait, and when one was told.
        self._frequent: dict[str, RunEvent] = {}
        self._told_at: dict[str, float] = {}
        #: Attempt and number of the newest event, since a job's log may be read once more.
        self._newest = (0, 0)
        self._changed = self._urgent = True
        self._artifacts: dict[str, uuid.UUID] = {}
        self._pictures: dict[str, str] = {}
        self._next_drawing = self._next_progress = self._written_at = float("-inf")
        self._drawing_seconds = ARTIFACT_SECONDS
        self._in_trouble = self._abandoned = False
        self._may_draw = True
        self._closing = threading.Event()
        context = contextvars.copy_context()  # Prefect's settings and the run that events relate to
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="elastic-train-report", daemon=True)
        self._thread.start()

    def take(self, event: ev.Event, told: bool = False) -> None:
        """Take an event in, and tell of it unless Prefect was told before."""
        with self._harmless(), self._lock:
            if event.sequence and event.attempt:
                if (event.attempt, event.sequence) <= self._newest:
                    return
                self._newest = (event.attempt, event.sequence)
            self.report.take(event)
            self._changed |= not isinstance(event, ev.ControllerAlive)
            self._urgent |= not isinstance(event, ev.STEADY)
            for said in [] if told else translate(event, self.report, self.storage_block):
                if said.name in _FREQUENT:
                    self._frequent[said.name] = said
                else:
                    self._events.append(said)

    def end(self, state: str, why: str = "", told: bool = False) -> None:
        """Take in how the training ended, such as ``timed out``, tell of it unless ``told``, and close."""
        with self._harmless(), self._lock:
            now = time.time()
            self.report.end(now, state, why)
            self._events.extend(self._frequent.values())
            self._frequent.clear()
            if not told:
                self._events.append(ending(self.report, state.replace(" ", "-"), now, why, self.storage_block))
        self.close()

    def abandon(self) -> None:
        """Write nothing more."""
        self._abandoned = True
        self._closing.set()

    def close(self) -> None:
        """Write the last state; returns within some seconds whatever the API does, or when a drawing is done."""
        self._closing.set()
        self._thread.join(timeout=1.0 if self._in_trouble else _CLOSE_SECONDS)
        # A process that exits while a thread draws is aborted by matplotlib's native code.
        self._may_draw = False
        if self._drawing.acquire(timeout=_DRAWING_SECONDS):
            self._drawing.release()

    @contextmanager
    def _harmless(self, what: str = "the run's report cannot be written to Prefect now") -> Iterator[None]:
        """Count what goes wrong, say so when that begins, and go on: a report is no reason to end a training."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever the API does
            self.errors += 1
            if not self._in_trouble:
                self._in_trouble = True
                self.on_trouble(f"{what}, training goes on: {type(error).__name__}: {error}")

    def _run(self) -> None:
        """Write until the end; after an error from anew, and then once more if that was at the end."""
        last = False
        while not (last or self._abandoned):
            last = self._closing.is_set()
            with self._harmless(), get_client(sync_client=True) as client:
                self._publish(client)
                return
            self._urgent = True
            self._closing.wait(ARTIFACT_SECONDS)

    def _publish(self, client: SyncPrefectClient) -> None:
        ended = False
        while not ended:
            ended = self._closing.wait(_TURN_SECONDS)
            if self._abandoned:
                return
            # Events of an outage wait here: Prefect's own queue would be lost with its connection.
            if ended or not self._in_trouble:
                self._send_events()
            due = ARTIFACT_SECONDS if self._urgent else self.interval_seconds if self._changed else _IDLE_SECONDS
            if ended or time.monotonic() - self._written_at >= due:
                self._write(client, ended)
                self._in_trouble = False

    def _send_events(self) -> None:
        now = time.monotonic()
        with self._lock:
            due = [one for one in self._frequent if now - self._told_at.get(one, -now) >= _FREQUENT_SECONDS]
            self._told_at.update(dict.fromkeys(due, now))
            self._events.extend(map(self._frequent.pop, due))
        while self._events:
            self._events.popleft().send(self.flow_run_id, self.related)

    def _write(self, client: SyncPrefectClient, ended: bool) -> None:
        with self._lock:
            report = self.report.model_copy(deep=True)
            self._changed = self._urgent = False
        self._written_at, now = time.monotonic(), time.time()
        summary = summary_line(report, now)
        if report.progress is not None and (ended or self._written_at >= self._next_progress):
            self._next_progress = self._written_at + _PROGRESS_SECONDS
            self._put(client, "progress", round(100 * report.progress.fraction, 2), summary)
        if report.reports and (ended or self._written_at >= self._next_drawing):
            if ended:  # the words first: drawing may take longer than there is time
                self._put(client, "markdown", render(report, now, self._pictures), summary)
            self._next_drawing = float("inf")  # unless it can: without matplotlib, or of some value, it cannot
            with self._harmless("the run's report has no new pictures"), self._drawing:
                from prefect_elastic_train.report.pictures import draw

                if self._may_draw:
                    self._pictures = draw(report, now)
                    self._next_drawing = time.monotonic() + self._drawing_seconds
                    self._drawing_seconds = min(_IDLE_SECONDS, 2 * self._drawing_seconds)
        self._put(client, "markdown", render(report, now, self._pictures), summary)

    def _put(self, client: SyncPrefectClient, kind: str, data: Any, description: str) -> None:
        """Write an artifact of this process; of an earlier one Prefect keeps its own, as the version before."""
        if kind in self._artifacts:
            try:
                # Not by the client's own method, which emits an event with the whole data at each update.
                where, content = {"id": self._artifacts[kind]}, {"data": data, "description": description}
                client.request("PATCH", "/artifacts/{id}", path_params=where, json=content)
                return
            except PrefectHTTPStatusError as error:
                if error.response.status_code != 404:  # else somebody has deleted it
                    raise
        self._artifacts[kind] = client.create_artifact(
            ArtifactCreate(
                key=artifact_key(self.report.run_name, "progress" if kind == "progress" else ""),
                type=kind,
                data=data,
                description=description,
                flow_run_id=uuid.UUID(self.flow_run_id) if self.flow_run_id else None,
                task_run_id=self._task.task_run.id if self._task else None,
            )
        ).id
