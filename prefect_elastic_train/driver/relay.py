"""Takes the events of an attempt from the controller, and writes them to the driver's standard output."""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import IO

from prefect_elastic_train.core.bounds import whole_lines
from prefect_elastic_train.core.events import EVENT_TAG, Event, decode_event
from prefect_elastic_train.elastic.sending import EventQueue, Receiving

logger = logging.getLogger(__name__)

_MAX_REST = 100_000
_PIECE_BYTES = 64 * 1024


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
        self._queue = EventQueue(self._write, "elastic-train-output")
        self.put = self._queue.put

    def close(self, timeout_seconds: float = 10.0) -> None:
        """Wait, for a while, until everything is written."""
        self._queue.close(timeout_seconds)

    def write_text(self, text: str) -> None:
        """Write whole lines of anything else."""
        data = text.encode(errors="replace")
        with self._lock:
            while data:
                data = data[os.write(self._descriptor, data) :]

    def _write(self, line: bytes) -> bool:
        begin = "\n" if self.is_shared else ""
        try:
            self.write_text(f"{begin}{EVENT_TAG}{line.decode()}\n")
        except OSError:  # the supervisor is gone, and with it soon this process
            pass
        return True


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
