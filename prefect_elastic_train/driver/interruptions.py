"""Signals that tell this process to end, noticed without a handler of our own."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from contextlib import suppress

_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_noticed: Counter[int] = Counter()
_pipe: tuple[int, int] | None = None
_pipe_lock = threading.Lock()


def interruptions(*numbers: signal.Signals) -> int:
    """Return how many times this process was told to end, as far as noticed, by default by SIGTERM and SIGINT."""
    with _pipe_lock:
        with suppress(BlockingIOError):
            while _pipe is not None and (received := os.read(_pipe[0], 64)):
                _noticed.update(received)
        return sum(_noticed[number] for number in numbers or _ENDING_SIGNALS)


def notice_interruptions() -> None:
    """Notice SIGTERM and SIGINT from now on; does nothing outside of the main thread."""
    # Python itself writes the number of each signal that it handles into a pipe; that of an event loop is left alone.
    # The handlers stay as they are: Prefect takes a cancellation only while SIGTERM is handled by its own.
    global _pipe
    if threading.current_thread() is not threading.main_thread():
        return
    if _pipe is None:
        _pipe = os.pipe()
        for end in _pipe:
            os.set_blocking(end, False)
    taken = signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)
    if taken not in (-1, _pipe[1]):
        signal.set_wakeup_fd(taken)
