"""Signals that the flow process gets, for trainings in its threads: Python interrupts the main thread only.

Without this, a flow that is told to end would wait for its submitted training, perhaps for weeks.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

__all__ = ["interruptions", "notice_interruptions"]

_count = 0


class _Noticing:
    """A signal handler that counts, then does what was done before."""

    def __init__(self, previous: signal.Handlers | object) -> None:
        self._previous = previous

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        global _count
        _count += 1
        if callable(self._previous):
            self._previous(signum, frame)


def interruptions() -> int:
    """Give how many times this process was told to end, as far as that was noticed."""
    return _count


def notice_interruptions() -> None:
    """Notice SIGTERM and SIGINT from now on; does nothing outside of the main thread.

    Where the default action ends the process at once there is nothing to notice. Prefect handles both signals
    while a flow runs, and puts its own handlers back when it ends.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        previous = signal.getsignal(number)
        if callable(previous) and not isinstance(previous, _Noticing):
            signal.signal(number, _Noticing(previous))
