"""Counts the termination signals of this process without a signal handler of its own."""

import os
import signal
import threading
from collections import Counter
from contextlib import suppress

_TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_received: Counter[int] = Counter()
_pipe: tuple[int, int] | None = None
_pipe_lock = threading.Lock()


def count_signals(*numbers: signal.Signals) -> int:
    """Return the number of signals that this process has received since :func:`watch_signals` was called.

    Args:
        numbers: The signals to count together; by default, SIGTERM and SIGINT.
    """
    with _pipe_lock:
        with suppress(BlockingIOError):
            while _pipe is not None and (data := os.read(_pipe[0], 64)):
                _received.update(data)
        return sum(_received[number] for number in numbers or _TERMINATION_SIGNALS)


def watch_signals() -> None:
    """Begin to count the signals that this process receives. Does nothing outside of the main thread."""
    # Python writes the number of each signal that it handles into the wakeup pipe; the pipe of an event loop is kept.
    # The handlers are not changed: Prefect carries out a cancellation only while its own handler handles SIGTERM.
    global _pipe
    if threading.current_thread() is not threading.main_thread():
        return
    if _pipe is None:
        _pipe = os.pipe()
        for end in _pipe:
            os.set_blocking(end, False)
    previous = signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)
    if previous not in (-1, _pipe[1]):
        signal.set_wakeup_fd(previous)
