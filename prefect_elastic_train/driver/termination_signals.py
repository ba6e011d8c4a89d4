"""Counts the termination signals of this process without a signal handler of its own."""

import os
import signal
import threading
from collections import Counter
from contextlib import suppress
from functools import cache

TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_received: Counter[int] = Counter()
_lock = threading.Lock()


@cache
def _pipe(pid: int) -> tuple[int, int]:
    """Return the ends of a process's own wakeup pipe: a forked process must not read the signals of its parent."""
    return os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)


def count_signals(*numbers: signal.Signals) -> int:
    """Return the number of signals that this process has received since :func:`watch_signals` was called.

    Args:
        numbers: The signals to count together; by default, SIGTERM and SIGINT.
    """
    with _lock, suppress(BlockingIOError):
        while True:
            _received.update(os.read(_pipe(os.getpid())[0], 64))
    return sum(_received[number] for number in numbers or TERMINATION_SIGNALS)


def watch_signals() -> None:
    """Begin to count the signals that this process receives. Does nothing outside of the main thread."""
    # Python writes the number of each signal that it handles into the wakeup pipe; the pipe of an event loop is kept.
    # The handlers are not changed: Prefect carries out a cancellation only while its own handler handles SIGTERM.
    if threading.current_thread() is threading.main_thread():
        with _lock:
            write_end = _pipe(os.getpid())[1]
        previous = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        if previous not in (-1, write_end):
            signal.set_wakeup_fd(previous)
