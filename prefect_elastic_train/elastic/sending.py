"""Sends the events of the controller's process to the driver; nothing here ever blocks training.

A sender thread drops progress when it cannot keep up; lifecycle events wait.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque

from prefect_elastic_train.core.events import Event, encode_event

__all__ = ["Backlog", "EventSender", "Receiving", "encoded_line"]

logger = logging.getLogger(__name__)

_MAX_DROPPABLE = 1000
_MAX_EVENTS = 100_000
_SEND_TIMEOUT_SECONDS = 10.0

#: Where a sender reaches a receiver: port on the loopback interface and a key.
Receiving = tuple[int, str]


class Backlog:
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


def encoded_line(event: Event) -> bytes:
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
        self._backlog = Backlog()
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
            line = encoded_line(event)
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
