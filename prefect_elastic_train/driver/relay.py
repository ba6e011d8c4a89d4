"""Carries the events of an attempt: from the controller to the driver, and on to the supervisor and the history.

Nothing here ever blocks training. The controller hands events to a sender thread, which drops progress when it
cannot keep up; lifecycle events wait. The driver writes them to its standard output from another thread.
"""

from __future__ import annotations

import hmac
import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import IO, Any

from prefect_elastic_train.bounds import MAX_LINE_BYTES
from prefect_elastic_train.driver.events import EVENT_TAG, Event, decode_event, encode_event

__all__ = ["EventOutput", "EventReceiver", "EventSender", "Receiving", "whole_lines"]

logger = logging.getLogger(__name__)

_MAX_DROPPABLE = 1000
_MAX_EVENTS = 100_000
_SEND_TIMEOUT_SECONDS = 10.0
#: Characters of a line that is not complete.
_MAX_REST = 100_000
_PIECE_BYTES = 64 * 1024

#: Where a sender reaches a receiver: port on the loopback interface and a key.
Receiving = tuple[int, str]


class _Backlog:
    """A queue that drops progress when it is long, and lifecycle events only when it is enormous."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._dropped = 0

    def put(self, event: Event) -> None:
        with self._changed:
            if self._closed:
                return
            limit = _MAX_DROPPABLE if event.droppable else _MAX_EVENTS
            if len(self._events) >= limit:
                self._dropped += 1
                if self._dropped == 1 or not event.droppable:
                    logger.warning("events of kind %s are dropped: %d wait to be sent", event.kind, len(self._events))
                return
            self._events.append(event)
            self._changed.notify_all()

    def peek(self, timeout_seconds: float) -> Event | None:
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._closed, timeout_seconds)
            return self._events[0] if self._events else None

    def pop(self) -> None:
        with self._changed:
            self._events.popleft()
            self._changed.notify_all()

    def close(self, timeout_seconds: float) -> bool:
        """Take no more events; return whether all were taken out in time."""
        with self._changed:
            if self._dropped and not self._closed:
                logger.warning("%d events were dropped", self._dropped)
            self._closed = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._events, timeout_seconds)

    @property
    def drained(self) -> bool:
        with self._changed:
            return self._closed and not self._events


def _encoded(event: Event) -> bytes:
    """Give an event as one line, nothing for one that has no form as text: it may not hold up the others."""
    try:
        return f"{encode_event(event)}\n".encode(errors="replace")
    except Exception:
        logger.warning("an event of kind %s could not be sent", event.kind, exc_info=True)
        return b"\n"


class EventSender:
    """Sends events from the controller's process to the driver. Never raises and never blocks.

    Args:
        receiving: Where the driver listens.
    """

    def __init__(self, receiving: Receiving) -> None:
        self._port, self._key = receiving
        self._backlog = _Backlog()
        self._thread = threading.Thread(target=self._run, name="elastic-train-sender", daemon=True)
        self._thread.start()

    def send(self, event: Event) -> None:
        """Hand an event over."""
        self._backlog.put(event)

    def close(self, timeout_seconds: float = 3.0) -> None:
        """Wait, for a while, until everything is sent."""
        self._backlog.close(timeout_seconds)

    def _run(self) -> None:
        connection: socket.socket | None = None
        while not self._backlog.drained:
            event = self._backlog.peek(timeout_seconds=1.0)
            if event is None:
                continue
            line = _encoded(event)
            try:
                if connection is None:
                    connection = socket.create_connection(("127.0.0.1", self._port), timeout=_SEND_TIMEOUT_SECONDS)
                    connection.sendall(f"{self._key}\n".encode())
                connection.sendall(line)
            except OSError:
                if connection is not None:
                    connection.close()
                connection = None
                time.sleep(0.2)
                continue
            self._backlog.pop()
        if connection is not None:
            connection.close()


class EventReceiver:
    """Listens in the driver for the events of its controller.

    Args:
        handle: Called with each event, from a thread.
    """

    def __init__(self, handle: Callable[[Event], None]) -> None:
        self._handle = handle
        self._key = secrets.token_hex(16)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._reading: list[threading.Thread] = []
        threading.Thread(target=self._accept, name="elastic-train-receiver", daemon=True).start()

    @property
    def receiving(self) -> Receiving:
        """Where a sender reaches this receiver."""
        return self._listener.getsockname()[1], self._key

    def finish(self, timeout_seconds: float) -> None:
        """Wait, for a while, until the senders have said all and left."""
        deadline = time.monotonic() + timeout_seconds
        for thread in self._reading:
            thread.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._read, args=(connection,), daemon=True)
            thread.start()
            self._reading.append(thread)

    def _read(self, connection: socket.socket) -> None:
        with connection:
            # What a broken connection has cut in two is sent again.
            lines = whole_lines(iter(partial(connection.recv, _PIECE_BYTES), b""), with_rest=False)
            try:
                if not hmac.compare_digest(next(lines, b""), self._key.encode()):
                    return
                for line in filter(None, lines):
                    event = decode_event(line)
                    if event is not None:
                        self._handle(event)
                    else:
                        logger.warning("an event of %d bytes cannot be read and is lost: %r", len(line), line[:200])
            except OSError:
                return


class EventOutput:
    """Writes events as tagged lines to the driver's standard output, in whole lines.

    Everything that Python prints in this process goes through it too, since Ray prints the workers' output
    from threads of its own.
    """

    def __init__(self, stream: IO[str]) -> None:
        #: Others write into the same file, and perhaps no whole lines.
        self.is_shared = False
        self._descriptor = os.dup(stream.fileno())
        self._lock = threading.Lock()
        self._backlog = _Backlog()
        self._thread = threading.Thread(target=self._run, name="elastic-train-output", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Hand an event over."""
        self._backlog.put(event)

    def close(self, timeout_seconds: float = 10.0) -> None:
        """Wait, for a while, until everything is written."""
        self._backlog.close(timeout_seconds)

    def write_text(self, text: str) -> None:
        """Write whole lines of anything else."""
        data = text.encode(errors="replace")
        with self._lock:
            while data:
                data = data[os.write(self._descriptor, data) :]

    def _run(self) -> None:
        while not self._backlog.drained:
            event = self._backlog.peek(timeout_seconds=1.0)
            if event is None:
                continue
            try:
                begin = "\n" if self.is_shared else ""
                self.write_text(f"{begin}{EVENT_TAG}{_encoded(event).decode()}")
            except OSError:  # the supervisor is gone, and with it soon this process
                pass
            self._backlog.pop()


class LineStream:
    """A text stream that hands on whole lines, to stand in for ``sys.stdout``."""

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, write_lines: Callable[[str], None], descriptor: int) -> None:
        self._write_lines = write_lines
        self._descriptor = descriptor
        self._rest = threading.local()

    def write(self, text: str) -> int:
        """Write text; a line is handed on when it is complete."""
        pending = getattr(self._rest, "text", "") + text
        # A text of several lines is handed on as a whole: what its first line is, the others are, too.
        is_whole, too_long = pending.endswith("\n"), len(pending) > _MAX_REST
        self._rest.text = "" if is_whole or too_long else pending
        if is_whole or too_long:
            self._write_lines(pending if is_whole else f"{pending}\n")
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for text in lines:
            self.write(text)

    def flush(self) -> None:
        """Do nothing: lines are handed on as they are completed."""

    def isatty(self) -> bool:
        """Nobody reads this at a terminal."""
        return False

    def writable(self) -> bool:
        """Text can be written."""
        return True

    def fileno(self) -> int:
        """Descriptor of the real stream, for faulthandler and the like."""
        return self._descriptor


def read_lines(stream: IO[bytes], source: str, into: queue.Queue[Any]) -> threading.Thread:
    """Read a child's stream in a thread, line by line, and put ``(source, line)`` into a queue; None at its end."""

    def run() -> None:
        with stream:
            for line in whole_lines(iter(partial(os.read, stream.fileno(), _PIECE_BYTES), b"")):
                into.put((source, line))
        into.put((source, None))

    thread = threading.Thread(target=run, name=f"elastic-train-{source}", daemon=True)
    thread.start()
    return thread


def whole_lines(pieces: Iterable[bytes], *, with_rest: bool = True) -> Iterator[bytes]:
    """Lines without their ends; of one that is too long for any event the beginning, and how much of it is left out.

    Args:
        pieces: What comes, cut anywhere.
        with_rest: Whether what comes after the last newline is a line.
    """
    line, left_out = bytearray(), 0
    for piece in pieces:
        for number, part in enumerate(piece.split(b"\n")):
            if number:
                yield _noted(line, left_out)
                line, left_out = bytearray(), 0
            room = MAX_LINE_BYTES - len(line)
            line += part[:room]
            left_out += max(0, len(part) - room)
    if line and with_rest:
        yield _noted(line, left_out)


def _noted(line: bytearray, left_out: int) -> bytes:
    return bytes(line) + (f" [… {left_out:,} bytes left out …]".encode() if left_out else b"")
