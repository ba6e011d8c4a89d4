"""Keeps the report, the progress and the events of a training up to date in Prefect, at a bounded cost.

All writing is done by a thread of its own, so that nothing waits for the Prefect API; what it cannot write is
counted, and training goes on.
"""

from __future__ import annotations

import contextvars
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.orchestration.limits import TokenBucket
from prefect_elastic_train.orchestration.prefect_events import (
    BEST_CHECKPOINT,
    CHECKPOINT,
    STORAGE_WAITED,
    RunEvent,
    ending,
    send,
    translate,
)
from prefect_elastic_train.report.markdown import render, summary_line
from prefect_elastic_train.report.run_report import RunReport

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import Artifact

#: Between two updates of artifacts.
ARTIFACT_SECONDS = 5.0
_TURN_SECONDS = 0.5
#: Between updates of a report in which nothing but the time has changed, and of the progress.
_IDLE_SECONDS = 60.0
_PROGRESS_SECONDS = 30.0
#: Share of the time that drawing may take.
_DRAWING_SHARE = 0.01
_MAX_FAILED_DRAWINGS = 3
#: How long the last update may take.
_CLOSE_SECONDS = 5.0
_MAX_OUTBOX = 1000
_MAX_KEY = 100
#: Between what is new and the report of an earlier process, and how long the new may be.
_SEPARATOR = "\n\n---\n\nBefore that:\n\n"
_MAX_NEWS = 5000

#: Events that may come often: of those that come too fast the newest is told.
_FREQUENT = (CHECKPOINT, BEST_CHECKPOINT, STORAGE_WAITED)
#: What comes in the course of a training, and hurries no report.
_STEADY = (ev.CheckpointCommitted, ev.CheckpointStalled, ev.ControllerAlive, ev.Reported)


@dataclass
class _Artifact:
    """An artifact of the run, and when it was written last."""

    type: str
    key: str
    id: uuid.UUID | None = None
    #: What an earlier process of the flow run has written there.
    before: Any = None
    #: On the monotonic clock.
    written_at: float = float("-inf")


@dataclass
class _Frequent:
    """An event that may come too often: up to two a minute are told after a burst."""

    bucket: TokenBucket = field(default_factory=lambda: TokenBucket(2 / 60, burst=5))
    waiting: RunEvent | None = None
    left_out: int = 0


def artifact_key(run_name: str, what: str = "") -> str:
    """Return the key of a run's artifact, in the letters that Prefect allows."""
    name = re.sub(r"[^a-z0-9]+", "-", run_name.lower()).strip("-")[:_MAX_KEY]
    if name != run_name:  # two names may differ in what is left out only
        name = f"{name}-{uuid.uuid5(uuid.NAMESPACE_URL, run_name).hex[:6]}"
    return "-".join(part for part in ("elastic-train", what, name) if part)


class Publisher:
    """Takes a training's events, and shows what they add up to in Prefect.

    Args:
        report: The state to begin with.
        interval_seconds: Between updates of the report, at least 5.
        storage_block: The saved storage block, for whoever reads the checkpoints.
        flow_run_id: Of the flow run that trains; empty outside of flows.
        task_run_id: Of the task run that trains, if there is one.
        related: Resources that the events relate to besides those that Prefect finds itself.
        on_trouble: Called once with why nothing can be written, when that begins.
    """

    def __init__(
        self,
        report: RunReport,
        interval_seconds: float = 10.0,
        storage_block: str = "",
        flow_run_id: str = "",
        task_run_id: str = "",
        related: Sequence[Mapping[str, str]] = (),
        on_trouble: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._report = report
        self._interval = max(ARTIFACT_SECONDS, interval_seconds)
        self._common: Mapping[str, Any] = {"storage_block": storage_block}
        self._flow_run_id = flow_run_id
        self._task_run_id = task_run_id
        self._related = related
        self.on_trouble = on_trouble
        self._lock = threading.Lock()
        self._outbox: deque[RunEvent] = deque(maxlen=_MAX_OUTBOX)
        self._ending: RunEvent | None = None
        #: Attempt and number of the newest event, since a job's log may be read once more.
        self._newest = (0, 0)
        self._frequent = {name: _Frequent() for name in _FREQUENT}
        self._lifecycle = TokenBucket(1.0, burst=100)
        self._changed = False
        self._urgent = True
        self._closing = threading.Event()
        self._written = _Artifact("markdown", artifact_key(report.run_name))
        self._progress = _Artifact("progress", artifact_key(report.run_name, "progress"))
        self._artifact_at = float("-inf")
        self._pictures: dict[str, str] = {}
        self._drawn: object = None
        self._drawn_at = 0.0
        self._failed_drawings = 0
        #: No drawing before, on the monotonic clock.
        self._next_drawing = 0.0
        self._in_trouble = self._abandoned = False
        #: What went wrong and was passed over.
        self.errors = 0
        context = contextvars.copy_context()  # Prefect's settings and the run that events relate to
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="elastic-train-report", daemon=True)
        self._thread.start()

    @property
    def last_end(self) -> str:
        """How the newest attempt ended, as far as is known."""
        return self._report.last_end

    @property
    def last_event_at(self) -> float:
        """When the newest event was, in seconds since the epoch; now without one."""
        return self._report.last_event_at or time.time()

    def take(self, event: ev.Event, told: bool = False) -> None:
        """Take an event in, and tell of it.

        Args:
            event: The event.
            told: Prefect was told of it before.
        """
        try:
            with self._lock:
                if event.sequence and event.attempt:
                    if (event.attempt, event.sequence) <= self._newest:
                        return
                    self._newest = (event.attempt, event.sequence)
                self._report.take(event)
                self._changed = self._changed or not isinstance(event, ev.ControllerAlive)
                self._urgent = self._urgent or not isinstance(event, _STEADY)
                if told or isinstance(event, ev.Reported | ev.ControllerAlive):
                    return
                for said in translate(event, self._report, self._common):
                    self._tell(said)
        except Exception as error:  # noqa: BLE001 - a report is no reason to end a training
            self._trouble(error)

    def _tell(self, event: RunEvent) -> None:
        """Have an event told; one that comes with each checkpoint takes the place of the one before it."""
        frequent = self._frequent.get(event.name)
        if frequent is None:
            self._outbox.append(event)
            return
        frequent.left_out += frequent.waiting is not None
        frequent.waiting = event

    def end(self, state: str, why: str = "", told: bool = False) -> None:
        """Take in how the training ended.

        Args:
            state: ``completed``, ``failed``, ``cancelled``, ``timed out``, ``interrupted`` or ``left to its job``.
            why: What there is to say of that.
            told: Prefect was told of it before, or is not to be told.
        """
        try:
            now = time.time()
            with self._lock:
                self._report.end(now, state, why)
                self._changed = self._urgent = True
                if not told:
                    self._ending = ending(self._report, state.replace(" ", "-"), now, why, self._common)
        except Exception as error:  # noqa: BLE001 - see take()
            self._trouble(error)

    def abandon(self) -> None:
        """Write nothing more."""
        self._abandoned = True
        self._closing.set()

    def close(self) -> None:
        """Write the last state; returns within some seconds whatever the API does."""
        self._closing.set()
        self._thread.join(timeout=1.0 if self._in_trouble else _CLOSE_SECONDS)

    def _run(self) -> None:
        with ExitStack() as stack:
            client: SyncPrefectClient | None = None
            pause = _TURN_SECONDS
            while True:
                closing = self._closing.wait(pause)
                if self._abandoned:
                    return
                pause = _TURN_SECONDS
                try:
                    # Events of an outage wait here: Prefect's own queue would be lost with its connection.
                    if closing or not self._in_trouble:
                        self._send_events(closing)
                    if self._is_due(closing):
                        client = client or _open_client(stack)
                        self._write(client, closing)
                        self._in_trouble = False
                except Exception as error:  # noqa: BLE001 - whatever the API does, training goes on
                    self._trouble(error)
                    with self._lock:
                        self._changed = self._urgent = True
                    client = None
                    stack.close()
                    pause = ARTIFACT_SECONDS
                if closing:
                    return

    def _trouble(self, error: Exception, what: str = "the run's report cannot be written to Prefect now") -> None:
        self.errors += 1
        if not self._in_trouble:
            self._in_trouble = True
            self.on_trouble(f"{what}, training goes on: {type(error).__name__}: {error}")

    def _send_events(self, all_of_them: bool) -> None:
        """Tell Prefect what is due; of what comes often only the newest, now and then."""
        while self._outbox and (all_of_them or self._lifecycle.take()):
            self._send(self._outbox.popleft())
        for frequent in self._frequent.values():
            if frequent.waiting is None or not (frequent.bucket.take() or all_of_them):
                continue
            with self._lock:
                event, left_out = frequent.waiting, frequent.left_out
                frequent.waiting, frequent.left_out = None, 0
            self._send(replace(event, payload={**event.payload, "left_out": left_out}))
        if self._ending is not None and all_of_them:
            self._send(self._ending)

    def _send(self, event: RunEvent) -> None:
        send(event, self._report.run_name, self._flow_run_id, self._related)

    def _is_due(self, closing: bool) -> bool:
        if closing:
            return True
        now = time.monotonic()
        if now - self._artifact_at < ARTIFACT_SECONDS:
            return False
        age = now - self._written.written_at
        if age >= _IDLE_SECONDS or (self._changed and (self._urgent or age >= self._interval)):
            return True
        with self._lock:
            has_progress = self._report.progress is not None
        return has_progress and now - self._progress.written_at >= _PROGRESS_SECONDS

    def _write(self, client: SyncPrefectClient, closing: bool) -> None:
        with self._lock:
            report = self._report.model_copy(deep=True)
            self._changed = self._urgent = False
        now = time.time()
        since_progress = time.monotonic() - self._progress.written_at
        progress = report.progress
        due = closing or (since_progress >= _PROGRESS_SECONDS and self._written.id is not None)
        if progress is not None and due:
            self._put(client, self._progress, round(100 * progress.fraction, 2), summary_line(report, now))
            if not closing:
                self._changed = True
                return
        if closing:
            # The words first: drawing may take longer than there is time.
            self._put_report(client, report, now)
        if self._draw(report, now, closing) or not closing:
            self._put_report(client, report, now)

    def _put_report(self, client: SyncPrefectClient, report: RunReport, now: float) -> None:
        text = render(report, now, self._pictures, self._drawn_at)
        self._put(client, self._written, text, summary_line(report, now))

    def _draw(self, report: RunReport, now: float, closing: bool) -> bool:
        """Draw anew if anything has changed, and if that leaves time for what matters; return whether that was done."""
        basis = (report.reports, report.world_size, len(report.incidents), report.incidents_left_out, report.state)
        wanted = report.reports and basis != self._drawn and self._failed_drawings < _MAX_FAILED_DRAWINGS
        if not wanted or (time.monotonic() < self._next_drawing and not closing):
            return False
        try:
            from prefect_elastic_train.report.pictures import draw

            began = time.thread_time()
            self._pictures = draw(report, now)
            self._next_drawing = time.monotonic() + (time.thread_time() - began) / _DRAWING_SHARE
            self._drawn, self._drawn_at = basis, now
        except Exception as error:  # noqa: BLE001 - without matplotlib, or with a value that it cannot draw
            self._failed_drawings += 1
            self._trouble(error, "the run's report has no new pictures")
            return False
        return True

    def _put(self, client: SyncPrefectClient, artifact: _Artifact, data: Any, description: str) -> None:
        from prefect.client.schemas.actions import ArtifactCreate

        if artifact.id is None and self._flow_run_id:
            found = _find(client, artifact, uuid.UUID(self._flow_run_id))
            artifact.id, artifact.before = (found.id, found.data) if found is not None else (None, None)
        if artifact.before is not None and not self._report.attempt:
            # An earlier process knew more than this one does until its driver has spoken.
            if isinstance(data, str):
                data = f"{data.partition(_SEPARATOR)[0][:_MAX_NEWS]}{_SEPARATOR}{_last_part(artifact.before)}"
            else:
                data = artifact.before
        artifact.written_at = self._artifact_at = time.monotonic()
        if artifact.id is not None and _update(client, artifact.id, data, description):
            return
        created = client.create_artifact(
            ArtifactCreate(
                key=artifact.key,
                type=artifact.type,
                data=data,
                description=description,
                flow_run_id=uuid.UUID(self._flow_run_id) if self._flow_run_id else None,
                task_run_id=uuid.UUID(self._task_run_id) if self._task_run_id else None,
            )
        )
        artifact.id = created.id


def _open_client(stack: ExitStack) -> SyncPrefectClient:
    from prefect.client.orchestration import get_client

    return stack.enter_context(get_client(sync_client=True))


def _update(client: SyncPrefectClient, artifact_id: uuid.UUID, data: Any, description: str) -> bool:
    """Write an artifact anew; False if there is none any more.

    Not by the client's own method, which emits an event with the whole data at each update: a report that is written
    every ten seconds would fill the server's events.
    """
    from httpx import HTTPStatusError

    try:
        client.request(
            "PATCH",
            "/artifacts/{id}",
            path_params={"id": artifact_id},
            json={"data": data, "description": description},
        )
    except HTTPStatusError as error:
        if error.response.status_code == 404:
            return False
        raise
    return True


def _last_part(text: Any) -> str:
    return str(text).rpartition(_SEPARATOR)[2]


def _find(client: SyncPrefectClient, artifact: _Artifact, flow_run_id: uuid.UUID) -> Artifact | None:
    """Find the artifact that an earlier process of the flow run has made."""
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey

    found = client.read_artifacts(
        artifact_filter=ArtifactFilter(
            key=ArtifactFilterKey(any_=[artifact.key]), flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id])
        ),
        limit=1,
    )
    return found[0] if found else None
