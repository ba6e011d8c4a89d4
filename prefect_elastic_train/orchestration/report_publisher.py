"""Publishes the report, the progress and the events of a training to Prefect.

A thread does all the writing, so nothing waits for the Prefect API. Errors are counted and training continues.
"""

import enum
import math
import re
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.context import TaskRunContext

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.time_limits import PUBLISHER_CLOSE_SECONDS
from prefect_elastic_train.orchestration.flow_run_state import start_thread
from prefect_elastic_train.orchestration.prefect_events import FREQUENT_EVENTS, RunEvent, end_event, translate
from prefect_elastic_train.report.markdown import render, summary_line
from prefect_elastic_train.report.run_report import RunReport

#: Seconds between two updates of the artifacts.
ARTIFACT_SECONDS = 5.0
_POLL_SECONDS = 0.5
#: Seconds between two updates while only time passes, and between two plots of a long run, which may take a second.
_IDLE_SECONDS = 60.0
#: Seconds between two updates of the progress.
_PROGRESS_SECONDS = 30.0
_PLOT_SECONDS = 60.0
_MAX_UNSENT_EVENTS = 1000
_MAX_KEY = 100
#: Seconds between two frequent events of the same name; only the newest is sent.
_FREQUENT_SECONDS = 30.0


def prefect_key(run_name: str, kind: str = "") -> str:
    """Return the key of a run's Prefect artifact: its kind and the run's name, in characters that Prefect allows."""
    name = re.sub(r"[^a-z0-9]+", "-", run_name.lower()).strip("-")[:_MAX_KEY]
    if name != run_name:  # names that differ only in the removed characters must get different keys
        name = f"{name}-{uuid.uuid5(uuid.NAMESPACE_URL, run_name).hex[:6]}"
    return "-".join(part for part in ("elastic-train", kind, name) if part)


class PublisherState(enum.Enum):
    """The states of a publisher.

    ::

        PUBLISHING ──► CLOSING ──► CLOSED   close()
             └───────► ABANDONED            abandon()
    """

    PUBLISHING = "publishing"
    #: The last update is being written.
    CLOSING = "closing"
    #: The flow process no longer waits for updates. No plot may begin: matplotlib's native code aborts a process that
    #: exits during a plot.
    CLOSED = "closed"
    #: Nothing is written any more.
    ABANDONED = "abandoned"


@dataclass(eq=False)
class Publisher:
    """Adds the events of a training to its report, and publishes both to Prefect.

    Attributes:
        report: The report; the publisher updates it.
        interval_seconds: Seconds between two updates of the report while training only makes progress.
        storage_block: Name of the saved storage block, for the payload of the Prefect events.
        flow_run_id: The flow run of the training; empty outside of flows.
        related: Resources that the Prefect events relate to, besides those that Prefect adds.
        on_error: Called with a message at the first error of publishing.
        errors: Number of errors of publishing.
    """

    report: RunReport
    interval_seconds: float = 10.0
    storage_block: str = ""
    flow_run_id: str = ""
    related: Sequence[Mapping[str, str]] = ()
    on_error: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        self.errors = 0
        self._state = PublisherState.PUBLISHING
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._plot_lock = threading.Lock()
        #: Unsent events. Of those with a frequent name, only the newest is kept, by its name.
        self._unsent: dict[str, RunEvent] = {}
        #: Attempt and sequence number of the newest event, because the log of a Ray job may be read twice.
        self._newest = (0, 0)
        #: Seconds from one update of the artifacts to the next, as the events since then require.
        self._update_seconds = ARTIFACT_SECONDS
        self._written_at = -math.inf
        #: Times before which the progress, a plot or a frequent event is not written again.
        self._due_at: defaultdict[str, float] = defaultdict(lambda: -math.inf)
        self._artifacts: dict[str, uuid.UUID] = {}
        self._picture = ""
        self._plot_interval = ARTIFACT_SECONDS
        #: True if the last update could not be written.
        self._has_failed = False

    def start(self) -> None:
        """Start the thread that publishes. Without this call, the report is updated but not published."""
        self._thread = start_thread(self._run, "report")

    def add(self, event: ev.Event, replayed: bool = False) -> None:
        """Add an event of the training to the report, and queue its Prefect events.

        A replayed event is only added to the report, because an earlier process has published it.
        """
        with self._count_errors(), self._lock:
            if event.sequence and event.attempt:
                if (event.attempt, event.sequence) <= self._newest:
                    return
                self._newest = (event.attempt, event.sequence)
            self.report.add(event)
            if not isinstance(event, ev.ControllerAlive):
                seconds = self.interval_seconds if isinstance(event, ev.ROUTINE) else ARTIFACT_SECONDS
                self._update_seconds = min(self._update_seconds, seconds)
            if replayed:
                return
            for run_event in translate(event, self.report, self.storage_block):
                name = run_event.name
                self._unsent[name if name in FREQUENT_EVENTS else f"{name} {run_event.key}"] = run_event
            while len(self._unsent) > _MAX_UNSENT_EVENTS:
                self._unsent.pop(next(iter(self._unsent)), None)

    def end(self, state: str, reason: str = "", is_published: bool = False) -> None:
        """Add the end of the training to the report, queue the Prefect event for it, and close the publisher.

        Args:
            state: The final state of the training, such as ``timed out``.
            reason: The reason for the end.
            is_published: Queue no Prefect event: another process has sent it, or will send it.
        """
        with self._count_errors(), self._lock:
            now = time.time()
            self.report.end(now, state, reason)
            if not is_published:
                name = state.replace(" ", "-")
                self._unsent[name] = end_event(self.report, name, now, reason, self.storage_block)
        self.close()

    def abandon(self) -> None:
        """Stop publishing at once, without a last update of artifacts: another process publishes the training now."""
        self._enter(PublisherState.ABANDONED)

    def close(self) -> None:
        """Send the queued Prefect events, update the run's artifacts a last time, and stop publishing.

        Returns within some seconds even if the Prefect API does not answer, but waits for a plot that is being drawn.
        """
        self._enter(PublisherState.CLOSING)
        if self._thread is not None:
            self._thread.join(timeout=1.0 if self._has_failed else PUBLISHER_CLOSE_SECONDS)
        self._enter(PublisherState.CLOSED)
        if self._plot_lock.acquire(timeout=_PLOT_SECONDS):
            self._plot_lock.release()

    def _enter(self, state: PublisherState) -> None:
        """Change the state of the publisher, and wake its thread: each state after PUBLISHING ends the publishing."""
        self._state = state
        self._stopping.set()

    @contextmanager
    def _count_errors(self, problem: str = "the run's report cannot be written to Prefect now") -> Iterator[None]:
        """Catch and count the errors of a ``with`` block, and pass a message about the first one to ``on_error``.

        An error of publishing must not end the training.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever the API does
            self.errors += 1
            if not self._has_failed:
                self._has_failed = True
                self.on_error(f"{problem}, training continues: {type(error).__name__}: {error}")

    def _run(self) -> None:
        """Publish the training in a thread until the publisher is closed.

        After an error, connect to the Prefect API again. After an error at the end, try once more.
        """
        is_last = False
        while not is_last:
            is_last = self._stopping.is_set()
            with self._count_errors(), get_client(sync_client=True) as client:
                self._publish(client)
                return
            self._update_seconds = ARTIFACT_SECONDS
            self._artifacts.clear()  # they may have been deleted
            self._stopping.wait(ARTIFACT_SECONDS)

    def _publish(self, client: SyncPrefectClient) -> None:
        is_closing = False
        while not is_closing:
            is_closing = self._stopping.wait(_POLL_SECONDS)
            if self._state is PublisherState.ABANDONED:
                return
            # Events wait here while the API is away: Prefect's own queue is lost with its connection.
            if is_closing or not self._has_failed:
                self._send_events()
            if is_closing or time.monotonic() - self._written_at >= self._update_seconds:
                self._write(client)
                self._has_failed = False

    def _send_events(self) -> None:
        with self._lock:
            unsent = list(self._unsent.items())
        for key, run_event in unsent:
            if run_event.name not in FREQUENT_EVENTS or self._is_due(run_event.name, _FREQUENT_SECONDS):
                self._unsent.pop(key, run_event).send(self.flow_run_id, self.related)

    def _is_due(self, name: str, seconds: float) -> bool:
        """Return True at most once in a number of seconds for each name, and whenever the publisher is closing."""
        now = time.monotonic()
        is_due = self._stopping.is_set() or now >= self._due_at[name]
        if is_due:
            self._due_at[name] = now + seconds
        return is_due

    def _write(self, client: SyncPrefectClient) -> None:
        with self._lock:
            report = self.report.model_copy(deep=True)
            self._update_seconds = _IDLE_SECONDS
        self._written_at = time.monotonic()
        now = time.time()
        summary = summary_line(report, now)
        if report.progress is not None and self._is_due("progress", _PROGRESS_SECONDS):
            self._put(client, "progress", round(100 * report.progress.fraction, 2), summary)
        if report.reports and self._is_due("plot", math.inf):
            if self._stopping.is_set():  # text first: a plot may take longer than the time that is left
                self._put(client, "markdown", render(report, now, self._picture), summary)
            # No further plot if this one fails: matplotlib may be missing.
            with self._count_errors("the run's report has no new plots"), self._plot_lock:
                from prefect_elastic_train.report.pictures import draw

                if self._state is not PublisherState.CLOSED:
                    self._picture = draw(report, now)
                    self._due_at["plot"] = time.monotonic() + self._plot_interval
                    self._plot_interval = min(_IDLE_SECONDS, 2 * self._plot_interval)
        self._put(client, "markdown", render(report, now, self._picture), summary)

    def _put(self, client: SyncPrefectClient, kind: str, data: Any, description: str) -> None:
        """Create the run's Prefect artifact of this kind, or update the one that this object has created.

        An artifact of an earlier process stays in Prefect as the previous version.
        """
        if kind in self._artifacts:
            # The client's own method emits an event with the whole data at each update.
            client.request(
                "PATCH",
                "/artifacts/{id}",
                path_params={"id": self._artifacts[kind]},
                json={"data": data, "description": description},
            )
            return
        context = TaskRunContext.get()
        self._artifacts[kind] = client.create_artifact(
            ArtifactCreate(
                key=prefect_key(self.report.run_name, "progress" if kind == "progress" else ""),
                type=kind,
                data=data,
                description=description,
                flow_run_id=uuid.UUID(self.flow_run_id) if self.flow_run_id else None,
                task_run_id=context.task_run.id if context else None,
            )
        ).id
