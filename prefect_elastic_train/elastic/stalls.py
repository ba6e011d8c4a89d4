"""How long a worker's loop stands still for its checkpoints, counted in that worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["reporting", "stalling", "take_stall"]

_lock = threading.Lock()
_stalled = 0.0
#: Whether this thread is the loop's, in a report.
_thread = threading.local()


@contextmanager
def reporting() -> Iterator[None]:
    """Mark the loop's report, so that an upload within it is known for what holds the loop up."""
    _thread.reports = True
    try:
        yield
    finally:
        _thread.reports = False


@contextmanager
def stalling(only_in_report: bool = False) -> Iterator[None]:
    """Count the time of the ``with``.

    Args:
        only_in_report: Not if this is another thread's work, which the loop does not wait for.
    """
    global _stalled
    if only_in_report and not getattr(_thread, "reports", False):
        yield
        return
    began = time.monotonic()
    try:
        yield
    finally:
        with _lock:
            _stalled += time.monotonic() - began


def take_stall() -> float:
    """Give the seconds since this was asked last."""
    global _stalled
    with _lock:
        taken, _stalled = _stalled, 0.0
    return taken
