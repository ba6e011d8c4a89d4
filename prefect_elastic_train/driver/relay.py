"""What an attempt tells: takes the events of its controller, and writes them to its supervisor and into the history."""

from __future__ import annotations

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
from functools import partial
from typing import IO, Any

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.bounds import whole_lines
from prefect_elastic_train.core.ray_output import Details, ranks_in_words
from prefect_elastic_train.core.request import DriverSpec
from prefect_elastic_train.elastic.sending import EventQueue, Receiving
from prefect_elastic_train.report.accounts import Tally
from prefect_elastic_train.report.run_report import RunReport
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.history import HistoryWriter, read_history
from prefect_elastic_train.storage.retries import waiting_since
from prefect_elastic_train.storage.store import RunStore

logger = logging.getLogger("prefect_elastic_train.driver")

_MAX_REST = 100_000
_PIECE_BYTES = 64 * 1024
#: How long after a failure what Ray says of it is written: the lines of other processes take a moment to come.
_DETAILS_SECONDS = 2.0
#: Seconds for which reads of the history are repeated before an attempt begins.
_RECALL_SECONDS = 20.0
#: Events after which a summary is written into the history, so that no driver has to read more.
_RECALLED_EVENTS = 5000


class EventReceiver:
    """Listens in the driver for the events of its controller, and hands each to a function, from a thread."""

    def __init__(self, handle: Callable[[ev.Event], None]) -> None:
        self._handle = handle
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._reading: list[threading.Thread] = []
        #: Where a sender reaches this receiver.
        self.receiving: Receiving = self._listener.getsockname()[1], secrets.token_hex(16)
        threading.Thread(target=self._accept, name="elastic-train-receiver", daemon=True).start()

    def finish(self, timeout_seconds: float) -> None:
        """Wait, for a while, until the senders have said all and left."""
        deadline = time.monotonic() + timeout_seconds
        for thread in self._reading:
            thread.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                connection, _ = self._listener.accept()
                thread = threading.Thread(target=self._read, args=(connection,), daemon=True)
                thread.start()
                self._reading.append(thread)

    def _read(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            # What a broken connection has cut in two is sent again.
            lines = whole_lines(iter(partial(connection.recv, _PIECE_BYTES), b""), with_rest=False)
            if not hmac.compare_digest(next(lines, b""), self.receiving[1].encode()):
                return
            for line in filter(None, lines):
                event = ev.decode_event(line)
                if event is not None:
                    self._handle(event)
                else:
                    logger.warning("an event of %d bytes cannot be read and is lost: %r", len(line), line[:200])


class EventOutput(EventQueue):
    """Writes events as tagged lines to the driver's standard output, in whole lines.

    All that Python prints here goes through it too, since Ray prints the workers' output from threads of its own.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._descriptor = os.dup(stream.fileno())
        self._lock = threading.Lock()
        super().__init__(self._write_event, "elastic-train-output")

    def write_text(self, text: str) -> None:
        """Write whole lines of anything else."""
        data = text.encode(errors="replace")
        with self._lock:
            while data:
                data = data[os.write(self._descriptor, data) :]

    def _write_event(self, line: bytes) -> bool:
        with suppress(OSError):  # the supervisor is gone, and with it soon this process
            # A job's errors go into the same file, and perhaps in no whole lines.
            self.write_text(f"\n{ev.EVENT_TAG}{line.decode()}\n")
        return True


class LineStream(io.TextIOBase):
    """A text stream that hands on whole lines, to stand in for ``sys.stdout``."""

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, write_lines: Callable[[str], None], descriptor: int) -> None:
        self._write_lines = write_lines
        #: The real stream's, for faulthandler and the like.
        self._descriptor = descriptor
        self._rest = threading.local()

    def write(self, text: str) -> int:
        """Write text; a line is handed on when it is complete."""
        pending = getattr(self._rest, "text", "") + text
        if len(pending) > _MAX_REST:
            pending += "\n"
        # A text of several lines is handed on as a whole: what its first line is, the others are, too.
        self._rest.text = "" if pending.endswith("\n") else pending
        if not self._rest.text:
            self._write_lines(pending)
        return len(text)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor


class AttemptTeller:
    """Numbers the events of an attempt and sends them on, into the history once the attempt is begun; for any thread.

    The output leads to the supervisor; the details are what Ray has said itself.
    """

    def __init__(self, output: EventOutput, details: Details, store: RunStore, spec: DriverSpec) -> None:
        #: Number of the attempt, 0 until it is begun, and where its events are kept from then on.
        self.attempt = 0
        self.history: HistoryWriter | None = None
        self._output = output
        self.details = details
        self._store = store
        #: Summary of the history.
        self._report = RunReport(
            run_name=spec.request.run_name,
            score_attribute=spec.checkpoints.score_attribute,
            score_order=spec.checkpoints.score_order,
        )
        self._lock = threading.Lock()
        self._sequence = self._reports = 0
        self._doing = ""
        self._since = 0.0
        self._closed = threading.Event()
        threading.Thread(target=self._show_life, name="elastic-train-life", daemon=True).start()

    def emit(self, event: ev.Event) -> None:
        """Number an event and send it to the supervisor and into the history."""
        with self._lock:
            self._sequence += 1
            update: dict[str, Any] = {"sequence": self._sequence, "attempt": self.attempt}
            if isinstance(event, ev.Report):
                self._reports += 1
                update["index"] = self._reports
            event = event.model_copy(update=update)
            self._output.put(event)
            if self.history is not None:
                self._report.take(event)
                self.history.add(event)
                if self._sequence % _RECALLED_EVENTS == 0:
                    self.history.add(ev.RunRecalled(report=self._report.model_dump(mode="json")))
        if isinstance(event, ev.GroupFailed):
            for rank, error in event.errors.items():
                self.details.keep(f"[{ranks_in_words([int(rank), *event.also.get(rank, [])])}] {error}")
            later = threading.Timer(_DETAILS_SECONDS, self.write_details)
            later.daemon = True
            later.start()

    def doing(self, what: str) -> None:
        """Stand in for the controller, which does not live, during what may rightly take its time; "" is nothing."""
        self._doing = what
        self._since = time.time()

    def close(self) -> None:
        """Wait, for a while, until everything is told."""
        self._closed.set()
        if self.history is not None:
            self.history.close()

    def write_details(self) -> None:
        """Write what Ray has said itself beside the run's records."""
        try:
            self._store.impatient(1.0).replace(layout.details_name(self.attempt), self.details.content())
        except OSError as error:
            logger.warning("could not write the details of what failed: %s", error)

    def recall(self) -> Tally:
        """Send a supervisor what it may not have seen: what the history adds up to. Not at any price."""
        self.doing("reading the history")
        try:
            for event in read_history(self._store.impatient(_RECALL_SECONDS), recent=True):
                self._report.take(event)
            self.emit(ev.RunRecalled(report=self._report.model_dump(mode="json")))
        except Exception as error:  # noqa: BLE001 - a report is no reason to end a training
            logger.warning("the history cannot be read; the run's report begins anew: %s", error)
        return self._report.tally

    def _show_life(self) -> None:
        while not self._closed.wait(ev.ALIVE_SECONDS):
            if self._doing:
                self.emit(ev.ControllerAlive(doing=self._doing, seconds=time.time() - self._since))
            elif waiting := waiting_since():
                self.emit(ev.ControllerAlive(doing="waiting for the storage", seconds=time.monotonic() - waiting))
