"""The driver's events: from the controller to the driver, and on to the supervisor and the run's history."""

import hmac
import io
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

from prefect_elastic_train.controller.event_queue import EventQueue, ReceiverAddress
from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.causes import format_ranks
from prefect_elastic_train.core.ray_output import Details
from prefect_elastic_train.core.request import DriverSpec
from prefect_elastic_train.core.threads import start_thread
from prefect_elastic_train.report.measurements import Sample, measure
from prefect_elastic_train.report.run_report import RunReport
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.history import HistoryWriter, read_history
from prefect_elastic_train.storage.retries import waiting_since
from prefect_elastic_train.storage.store import RunStore

logger = logging.getLogger("prefect_elastic_train.driver")

#: Longest incomplete line that a stream keeps.
_MAX_PENDING = 100_000
#: Time from a failure until Ray's output is written: the lines of other processes arrive a moment later.
_DETAILS_SECONDS = 2.0
#: Time for which reads of the history are repeated before an attempt begins.
_HISTORY_SECONDS = 20.0
#: Events after which a summary is written into the history, so that no driver has to read more.
_SUMMARY_EVENTS = 5000


class EventReceiver:
    """Receives the events of the controller over local sockets, and passes each event to a function, in a thread.

    Attributes:
        address: The address for the senders in the controller's process.
    """

    def __init__(self, handle: Callable[[ev.Event], None]) -> None:
        self._handle = handle
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._readers: list[threading.Thread] = []
        self._connections: list[socket.socket] = []
        self.address = ReceiverAddress(self._listener.getsockname()[1], secrets.token_hex(16))
        start_thread(self._accept)

    def finish(self, timeout_seconds: float) -> None:
        """Wait up to a time limit until all senders have closed their connections: then all events are received."""
        deadline = time.monotonic() + timeout_seconds
        for thread in self._readers:
            thread.join(max(0.0, deadline - time.monotonic()))

    def request_save(self) -> bool:
        """Let the controller request a save from the session. Return False if there is no controller."""
        sent = 0
        for connection in self._connections:
            with suppress(OSError):  # an earlier one, which is closed
                sent += connection.send(b".")
        return sent > 0

    def close(self) -> None:
        """Stop listening for connections from the controller."""
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                connection, _ = self._listener.accept()
                self._readers.append(start_thread(self._read, connection))

    def _read(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines, suppress(OSError):
            if not hmac.compare_digest(lines.readline(100).strip(), self.address.key.encode()):
                return
            self._connections.append(connection)
            for line in lines:
                if not line.endswith(b"\n"):  # incomplete: its event is sent again
                    return
                event = ev.decode_event(line)
                if event:
                    self._handle(event)
                else:
                    logger.warning("an event of %d bytes cannot be read and is lost: %r", len(line), line[:200])


class EventOutput(EventQueue):
    """Writes events to the driver's standard output, each as a line with a tag.

    All output of Python goes through this object too, so that lines stay whole: Ray prints the workers' output in its
    own threads.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._descriptor = os.dup(stream.fileno())
        self._lock = threading.Lock()
        super().__init__()

    def write_text(self, text: str) -> None:
        """Write whole lines to the driver's standard output. Lines of several threads do not mix."""
        data = text.encode(errors="replace")
        with self._lock:
            while data:
                data = data[os.write(self._descriptor, data) :]

    def _write(self, line: bytes) -> bool:
        with suppress(OSError):  # the supervisor has exited; its guard stops this process
            # A line break first: in a job's log the standard error may have left an incomplete line.
            self.write_text(f"\n{ev.EVENT_TAG}{line.decode()}\n")
        return True


class LineStream(io.TextIOBase):
    """A text stream that passes whole lines to a function; it replaces ``sys.stdout`` or ``sys.stderr``."""

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, write_lines: Callable[[str], None], descriptor: int) -> None:
        self._write_lines = write_lines
        #: Descriptor of the replaced stream, for faulthandler and the like.
        self._descriptor = descriptor
        self._pending = threading.local()

    def write(self, text: str) -> int:
        """Pass whole lines of text to the function of this stream. Return the number of characters.

        An incomplete line is kept, for each thread, until it is complete.
        """
        pending = getattr(self._pending, "text", "") + text
        if len(pending) > _MAX_PENDING:
            pending += "\n"
        # Lines written together stay together: whether they are Ray's is decided by the first one.
        self._pending.text = "" if pending.endswith("\n") else pending
        if not self._pending.text:
            self._write_lines(pending)
        return len(text)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor


class EventRecorder:
    """Numbers the events of an attempt, sends them to the supervisor and records them in the history. Thread-safe.

    Attributes:
        attempt: Number of the attempt; 0 before it has begun.
        history: The writer of the run's history; None before the attempt has begun.
        details: The lines that Ray printed.
        report: Summary of the history.
    """

    attempt = 0
    history: HistoryWriter | None = None
    _sequence = 0
    _reports = 0
    _activity = ""
    _activity_since = 0.0

    def __init__(self, output: EventOutput, details: Details, store: RunStore, spec: DriverSpec) -> None:
        self.details = details
        self._output = output
        self._store = store
        self.report = RunReport(
            run_name=spec.request.run_name,
            run_uri=store.uri,
            score_attribute=spec.checkpoints.score_attribute,
            score_order=spec.checkpoints.score_order,
        )
        self._lock = threading.Lock()
        self._closed = threading.Event()
        start_thread(self._send_heartbeats)

    def emit(self, event: ev.Event) -> None:
        """Number an event, send it to the supervisor, and record it in the run's history.

        After the failure of a worker group, also write the lines that Ray printed into the run directory.
        """
        with self._lock:
            self._sequence += 1
            update: dict[str, Any] = {"sequence": self._sequence, "attempt": self.attempt}
            if isinstance(event, ev.Report):
                self._reports += 1
                update["index"] = self._reports
            elif isinstance(event, ev.GroupFailed):
                update["details"] = f"{self._store.uri}/{layout.details_name(self.attempt)}"
            event = event.model_copy(update=update)
            self._output.put(event)
            if self.history:
                self.report.add(event)
                self.history.add(event)
                if self._sequence % _SUMMARY_EVENTS == 0:
                    self.history.add(self._summary())
        if isinstance(event, ev.GroupFailed):
            for cause in event.causes:
                self.details.add(f"[{format_ranks(cause.ranks)}] {cause.traceback}")
            timer = threading.Timer(_DETAILS_SECONDS, self.write_details)
            timer.daemon = True
            timer.start()

    def set_activity(self, activity: str) -> None:
        """Set the driver's activity. While it is not empty, the driver sends heartbeats in place of the controller."""
        self._activity = activity
        self._activity_since = time.time()

    def close(self) -> None:
        """Stop the heartbeats, and write the rest of the run's history."""
        self._closed.set()
        if self.history:
            self.history.close()

    def start_metrics(self) -> None:
        """Start to export metrics of the run through Ray, which must be connected."""
        from .ray_metrics import export_metrics

        start_thread(export_metrics, self._measure, self._closed)

    def _measure(self) -> list[Sample]:
        with self._lock:
            return [*measure(self.report, time.time())]

    def write_details(self) -> None:
        """Write the lines that Ray printed into the run directory."""
        try:
            self._store.with_retry_limit(1.0).replace(layout.details_name(self.attempt), self.details.content())
        except OSError as error:
            logger.warning("could not write the details of what failed: %s", error)

    def recall_history(self) -> None:
        """Read the run's history, and send its summary to the supervisor. Errors are only logged."""
        self.set_activity("reading the history")
        try:
            for event in read_history(self._store.with_retry_limit(_HISTORY_SECONDS), recent=True):
                self.report.add(event)
            self.emit(self._summary())
        except Exception as error:  # noqa: BLE001 - a report is no reason to end a training
            logger.warning("the history cannot be read; the run's report starts from scratch: %s", error)

    def _summary(self) -> ev.RunRecalled:
        return ev.RunRecalled(report=self.report.model_dump(mode="json"))

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(ev.ALIVE_SECONDS):
            if self._activity:
                self.emit(ev.ControllerAlive(doing=self._activity, seconds=time.time() - self._activity_since))
            elif waiting := waiting_since():
                self.emit(ev.ControllerAlive(doing="waiting for the storage", seconds=time.monotonic() - waiting))
