"""A queue that sends events from the controller to the driver. It never blocks training, and drops progress events."""

import logging
import queue
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from prefect_elastic_train.core.events import DROPPABLE, Event, encode_event
from prefect_elastic_train.core.threads import start_thread

logger = logging.getLogger(__name__)

_MAX_DROPPABLE = 1000
_SEND_TIMEOUT_SECONDS = 10.0
_RETRY_SECONDS = 0.2


class ReceiverAddress(NamedTuple):
    """The address of the driver's event receiver: a port on the loopback interface, and the key that it expects."""

    port: int
    key: str


class EventQueue:
    """Writes events one after the other in a thread. Subclasses implement :meth:`_write`.

    While the queue is long, it drops progress events. It logs their number at the end.
    """

    _dropped = 0  # events

    def __init__(self) -> None:
        self._events: queue.Queue[Event | None] = queue.Queue()
        self.closed = threading.Event()
        self._thread = start_thread(self._run)

    def put(self, event: Event) -> None:
        """Add an event to the queue. If the queue is long, a heartbeat or a report without a checkpoint is dropped.

        This method neither fails nor blocks. Events that are added after the close are not written.
        """
        if isinstance(event, DROPPABLE) and self._events.unfinished_tasks >= _MAX_DROPPABLE:
            self._dropped += 1
        else:
            self._events.put(event)

    def close(self, timeout_seconds: float) -> None:
        """Wait up to a time limit until all queued events are written. Events that are added later are lost."""
        if self._dropped:
            logger.warning("%d events were dropped", self._dropped)
        self.closed.set()
        self._events.put(None)
        self._thread.join(timeout_seconds)

    def _write(self, line: bytes) -> bool:
        """Write an encoded event: a line without its line break. Return False to have it written again."""
        raise NotImplementedError

    def _run(self) -> None:
        for event in iter(self._events.get, None):
            try:
                line = encode_event(event).encode(errors="replace")
            except Exception:
                logger.warning("an event of kind %s could not be sent", event.kind, exc_info=True)
                line = b""  # it must not block the others
            while line and not self._write(line):
                time.sleep(_RETRY_SECONDS)
            self._events.task_done()


class EventSender(EventQueue):
    """Sends events from the controller's process to the driver over a socket. It never raises and never blocks.

    Args:
        receiver: The address of the driver.
        on_request: Function that is called, in a thread, when the driver requests a save.
    """

    _connection: socket.socket | None = None

    def __init__(self, receiver: ReceiverAddress, on_request: Callable[[], None]) -> None:
        self._receiver = receiver
        self._on_request = on_request
        super().__init__()

    def close(self, timeout_seconds: float) -> None:
        super().close(timeout_seconds)
        self._disconnect()

    def _write(self, line: bytes) -> bool:
        try:
            if self._connection is None:
                self._connection = socket.create_connection(("127.0.0.1", self._receiver.port), _SEND_TIMEOUT_SECONDS)
                self._connection.sendall(f"{self._receiver.key}\n".encode())
                start_thread(self._await_requests, self._connection)
            self._connection.sendall(line + b"\n")
        except OSError:
            self._disconnect()
            return False
        return True

    def _await_requests(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError):  # it was closed
            while select.select([connection], [], [])[0] and connection.recv(1):
                self._on_request()

    def _disconnect(self) -> None:
        connection = self._connection
        self._connection = None
        if connection:
            with suppress(OSError):  # it is broken
                connection.shutdown(socket.SHUT_RDWR)  # also ends the wait for requests
            connection.close()
