"""Sends the controller's events to the driver without ever blocking training; a thread may drop progress, no more."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable

from prefect_elastic_train.core.events import Event, encode_event

logger = logging.getLogger(__name__)

_MAX_DROPPABLE = 1000
_SEND_TIMEOUT_SECONDS = 10.0
_RETRY_SECONDS = 0.2

Receiving = tuple[int, str]  # where a sender reaches a receiver: port on the loopback interface and a key


class EventQueue:
    """Events that a thread writes one after the other; a long queue drops progress, and says so in the end.

    ``write`` takes an event as a line without its end, and returns False if it is to be tried again.
    """

    def __init__(self, write: Callable[[bytes], bool], name: str) -> None:
        self._write = write
        self._events: queue.Queue[Event | None] = queue.Queue()
        self._dropped = 0
        self.closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Hand an event over, which neither fails nor waits."""
        if event.droppable and self._events.unfinished_tasks >= _MAX_DROPPABLE:
            self._dropped += 1
        elif not self.closed.is_set():
            self._events.put(event)

    def close(self, timeout_seconds: float) -> None:
        """Take no more events, and wait for a while until all are written."""
        if self._dropped and not self.closed.is_set():
            logger.warning("%d events were dropped", self._dropped)
        self.closed.set()
        self._events.put(None)
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        for event in iter(self._events.get, None):
            try:
                line = encode_event(event).encode(errors="replace")
            except Exception:
                logger.warning("an event of kind %s could not be sent", event.kind, exc_info=True)
                line = b""  # it may not hold up the others
            while line and not self._write(line):
                time.sleep(_RETRY_SECONDS)
            self._events.task_done()


class EventSender(EventQueue):
    """Sends events from the controller's process to the driver. Never raises and never blocks."""

    def __init__(self, receiving: Receiving) -> None:
        self._port, self._key = receiving
        self._connection: socket.socket | None = None
        super().__init__(self._write_line, "elastic-train-sender")

    def close(self, timeout_seconds: float = 3.0) -> None:
        super().close(timeout_seconds)
        self._leave()

    def _write_line(self, line: bytes) -> bool:
        try:
            if self._connection is None:
                self._connection = socket.create_connection(("127.0.0.1", self._port), timeout=_SEND_TIMEOUT_SECONDS)
                self._connection.sendall(f"{self._key}\n".encode())
            self._connection.sendall(line + b"\n")
        except OSError:
            self._leave()
            return False
        return True

    def _leave(self) -> None:
        connection = self._connection
        self._connection = None
        if connection is not None:
            connection.close()
