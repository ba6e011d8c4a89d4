"""Lines of a child process's output, read in a thread."""

from __future__ import annotations

import os
import queue
import threading
from functools import partial
from typing import IO, Any

from prefect_elastic_train.core.lines import whole_lines

__all__ = ["read_lines"]

_PIECE_BYTES = 64 * 1024


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
