"""Publishes the report, the progress and the events of a training to Prefect.

A thread does all the writing, so nothing waits for the Prefect API. After an error training continues.
"""

import math
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.context import TaskRunContext
from prefect.events import RelatedResource
from pydantic import ValidationError
from slugify import slugify

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.threads import start_thread
from prefect_elastic_train.core.time_limits import PUBLISHER_CLOSE_SECONDS
from prefect_elastic_train.report.markdown import render, summary_line
from prefect_elastic_train.report.overview import TrainingRow, make_row, render_page, sort_rows
from prefect_elastic_train.report.run_report import RunReport

from .client_metrics import update_metrics
from .prefect_events import FREQUENT_EVENTS, RunEvent, end_event, translate

#: Seconds between two updates of the artifacts.
ARTIFACT_SECONDS = 5.0
_POLL_SECONDS = 0.5
#: Seconds between two updates while there is no event.
_IDLE_SECONDS = 60.0
#: Seconds between two updates of the progress.
_PROGRESS_SECONDS = 30.0
#: Key of the artifact with all trainings.
PAGE_KEY = "elastic-trainings"
#: Least seconds between two updates of a row. With more live trainings than that, it is their number, so that all of
#: them together write about once a second.
_PAGE_SECONDS = 20
#: Tries to write a row a last time.
_PAGE_TRIES = 5
#: Seconds between two plots, each of which may take a second, and longest time that one may take.
_PLOT_SECONDS = 60.0
_MAX_UNSENT_EVENTS = 1000
_MAX_KEY = 100
#: Seconds between two frequent events of the same name; only the newest is sent.
_FREQUENT_SECONDS = 30.0


def prefect_key(prefix: str, name: str) -> str:
    """Return a key for an artifact or a variable of Prefect: prefix and name, in characters that Prefect allows."""
    slug = slugify(name, max_length=_MAX_KEY)
    if slug != name:  # names that differ only in the removed characters must get different keys
        slug = f"{slug}-{uuid.uuid5(uuid.NAMESPACE_URL, name).hex[:6]}"
    return f"{prefix}-{slug}"


def read_page(client: SyncPrefectClient) -> tuple[str, dict[str, TrainingRow]]:
    """Return the id of the artifact with all trainings, empty if there is none yet, and its rows by their keys."""
    query = {"artifacts": {"key": {"any_": [PAGE_KEY]}}}
    for page in client.request("POST", "/artifacts/latest/filter", json=query).json():
        rows = {}
        for key, row in (page["metadata_"] or {}).items():
            with suppress(ValidationError):  # cut by Prefect, which keeps 500 characters, or of another version
                rows[key] = TrainingRow.model_validate_json(row)
        return page["latest_id"], rows
    return "", {}


@dataclass(eq=False)
class Publisher:
    """Adds the events of a training to its report, and publishes both to Prefect.

    Attributes:
        report: The report; the publisher updates it.
        on_error: Called with a message at the first error of publishing.
        interval_seconds: Seconds between two updates of the report while training only makes progress.
        flow_run_id: The flow run of the training; empty outside of flows.
        related: Resources that the Prefect events relate to, besides those that Prefect adds.
    """

    report: RunReport
    on_error: Callable[[str], None]
    interval_seconds: float = 10.0
    flow_run_id: str = ""
    related: Sequence[RelatedResource] = ()
    #: Held while one of the trainings of this process reads and writes the page of all trainings.
    _page_lock = threading.Lock()

    def __post_init__(self) -> None:
        #: Set when the last update has to be written.
        self._stopping = threading.Event()
        #: True once the flow process no longer waits for updates. No plot may begin then: matplotlib's native code
        #: aborts a process that exits during a plot.
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._plot_lock = threading.Lock()
        #: Unsent events. Of those with a frequent name, only the newest is kept, by its name.
        self._unsent: dict[str, RunEvent] = {}
        #: Attempt and sequence number of the newest event, because the log of a Ray job may be read twice.
        self._newest = (0, 0)
        #: Seconds from one update of the artifacts to the next, as the events since then require.
        self._update_seconds = ARTIFACT_SECONDS
        self._written_at = 0.0
        #: Times before which the progress, a plot or a frequent event is not written again.
        self._due_at: dict[str, float] = {}
        self._artifacts: dict[str, str] = {}
        self._picture = ""
        #: True if the last update could not be written.
        self._has_failed = False

    def start(self) -> None:
        """Start the thread that publishes. Without this call, the report is updated but not published."""
        self._thread = start_thread(self._run)

    def add(self, event: ev.Event, replayed: bool = False) -> None:
        """Add an event of the training to the report, and queue its Prefect events.

        A replayed event is only added to the report, because an earlier process has published it.
        """
        with self._catch_errors(), self._lock:
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
            for run_event in translate(event, self.report):
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
        with self._catch_errors(), self._lock:
            now = time.time()
            self.report.end(now, state, reason)
            if not is_published:
                self._unsent["end"] = end_event(self.report, state.replace(" ", "-"), now, reason)
        self.close()

    def close(self) -> None:
        """Send the queued Prefect events, update the run's artifacts a last time, and stop publishing.

        Returns within some seconds even if the Prefect API does not answer, but waits for a plot that is being drawn.
        """
        self._stopping.set()
        if self._thread:
            self._thread.join(timeout=1.0 if self._has_failed else PUBLISHER_CLOSE_SECONDS)
        self._is_closed = True
        if self._plot_lock.acquire(timeout=_PLOT_SECONDS):
            self._plot_lock.release()

    @contextmanager
    def _catch_errors(self, problem: str = "the run's report cannot be written to Prefect now") -> Iterator[None]:
        """Catch the errors of a ``with`` block, and pass a message about the first one to ``on_error``.

        An error of publishing must not end the training.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever the API does
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
            with self._catch_errors(), get_client(sync_client=True) as client:
                self._publish(client)
                return
            self._update_seconds = ARTIFACT_SECONDS
            self._artifacts.clear()  # they may have been deleted
            self._stopping.wait(ARTIFACT_SECONDS)

    def _publish(self, client: SyncPrefectClient) -> None:
        is_closing = False
        while not is_closing:
            is_closing = self._stopping.wait(_POLL_SECONDS)
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
        is_due = self._stopping.is_set() or now >= self._due_at.get(name, 0.0)
        if is_due:
            self._due_at[name] = now + seconds
        return is_due

    def _write(self, client: SyncPrefectClient) -> None:
        with self._lock:
            report = self.report.model_copy(deep=True)
            self._update_seconds = _IDLE_SECONDS
        self._written_at = time.monotonic()
        now = time.time()
        with self._catch_errors("the metrics for Prometheus cannot be updated"):
            update_metrics(report, now)
        summary = summary_line(report, now)
        if report.progress and self._is_due("progress", _PROGRESS_SECONDS):
            self._put(client, "progress", round(100 * report.progress.fraction, 2), summary)
        if report.position and self._is_due("plot", math.inf):
            if self._stopping.is_set():  # text first: a plot may take longer than the time that is left
                self._put(client, "markdown", render(report, now, self._picture), summary)
            # No further plot if this one fails: matplotlib may be missing.
            with self._catch_errors("the run's report has no new plots"), self._plot_lock:
                from prefect_elastic_train.report.pictures import draw

                if not self._is_closed:
                    self._picture = draw(report, now)
                    self._due_at["plot"] = time.monotonic() + _PLOT_SECONDS
        self._put(client, "markdown", render(report, now, self._picture), summary)
        if report.state != "taken over" and self._is_due("page", _PAGE_SECONDS):
            with self._catch_errors("the page of all trainings cannot be written"):
                self._update_page(client, report, now)

    def _update_page(self, client: SyncPrefectClient, report: RunReport, now: float) -> None:
        """Replace the row of the training on the page of all trainings, which other processes write, too.

        Another process that writes at the same moment may overwrite the row. The next update brings it back. Only the
        last update is repeated until the row is there.
        """
        base = report.flow_run_url.partition("/runs/")[0]
        own = make_row(report, now, self._artifacts["markdown"])
        for _ in range(_PAGE_TRIES):
            with self._page_lock:
                page, rows = read_page(client)
                if rows.get(own.key) == own:
                    return
                newest = sort_rows({**rows, own.key: own}.values(), now)
                metadata = {row.key: row.model_dump_json() for row in newest}
                content = {"data": render_page(newest, now, f"{base}/artifacts/artifact/"), "metadata_": metadata}
                _save_artifact(client, page, content, key=PAGE_KEY, type="markdown")
            if not self._stopping.is_set():
                live = sum(row.rank in (1, 2) for row in newest)
                self._due_at["page"] = time.monotonic() + max(_PAGE_SECONDS, live) * random.uniform(1.0, 1.5)
                return
            time.sleep(random.random() / 3)  # processes that have collided try again one after the other

    def _put(self, client: SyncPrefectClient, kind: str, data: Any, description: str) -> None:
        """Create the run's Prefect artifact of this kind, or update the one that this object has created.

        An artifact of an earlier process stays in Prefect as the previous version.
        """
        artifact = self._artifacts.get(kind, "")
        if not artifact and self.report.state == "taken over":  # a new one would hide that of the other process
            return
        prefix = "elastic-train-progress" if kind == "progress" else "elastic-train"
        context = TaskRunContext.get()
        self._artifacts[kind] = _save_artifact(
            client,
            artifact,
            {"data": data, "description": description},
            key=prefect_key(prefix, self.report.run_name),
            type=kind,
            flow_run_id=self.flow_run_id or None,
            task_run_id=str(context.task_run.id) if context else None,
        )


def _save_artifact(client: SyncPrefectClient, artifact: str, content: dict[str, Any], **created: Any) -> str:
    """Update an artifact, or create it if its id is empty, with the additional fields ``created``. Return its id."""
    if not artifact:
        return str(client.request("POST", "/artifacts/", json=content | created).json()["id"])
    # The client's own method emits an event with the whole data at each update.
    client.request("PATCH", "/artifacts/{id}", path_params={"id": artifact}, json=content)
    return artifact
