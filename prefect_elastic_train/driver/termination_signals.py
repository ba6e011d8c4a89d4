"""Counts the termination signals of this process without a signal handler of its own."""

import os
import signal
import threading
from collections import Counter
from contextlib import suppress

_TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_received: Counter[int] = Counter()
_lock = threading.Lock()
_read_end, _write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)


def count_signals(*numbers: signal.Signals) -> int:
    """Return the number of signals that this process has received since :func:`watch_signals` was called.

    Args:
        numbers: The signals to count together; by default, SIGTERM and SIGINT.
    """
    with _lock, suppress(BlockingIOError):
        while True:
            _received.update(os.read(_read_end, 64))
    return sum(_received[number] for number in numbers or _TERMINATION_SIGNALS)


def watch_signals() -> None:
    """Begin to count the signals that this process receives. Does nothing outside of the main thread."""
    # Python writes the number of each signal that it handles into the wakeup pipe; the pipe of an event loop is kept.
    # The handlers are not changed: Prefect carries out a cancellation only while its own handler handles SIGTERM.
    if threading.current_thread() is threading.main_thread():
        previous = signal.set_wakeup_fd(_write_end, warn_on_full_buffer=False)
        if previous not in (-1, _write_end):
            signal.set_wakeup_fd(previous)
