"""What a worker notes of its loop, for the controller to ask: its checkpoint, its reports, and what holds it up.

Uses ``ray.train.v2._internal``: what a loop asks for goes through the private context of its worker.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from prefect_elastic_train.storage.retries import Waits, take_waits


@dataclass
class LoopState:
    """What the loop of this worker process has done with the checkpoint that it was offered."""

    asked: bool = False
    opened: bool = False
    #: Seconds that it has stood still for its own checkpoints since that was asked last.
    stalled: float = 0.0


#: Of this worker process, which Ray starts for one loop.
_state = LoopState()
#: Whether this thread is the loop's, in a report.
_thread = threading.local()


def note_checkpoints(context: Any) -> None:
    """Note from now on whether the loop of this worker asks Ray's ``TrainContext`` for a checkpoint."""
    get_checkpoint, get_all = context.get_checkpoint, context.get_all_reported_checkpoints

    def noted_checkpoint() -> Any:
        _state.asked = True
        return get_checkpoint()

    def noted_all(*arguments: Any, **more: Any) -> Any:
        _state.asked = _state.opened = True
        return get_all(*arguments, **more)

    context.get_checkpoint, context.get_all_reported_checkpoints = noted_checkpoint, noted_all


def note_opened() -> None:
    """Note that the loop has looked into its checkpoint."""
    _state.opened = True


@contextmanager
def in_report() -> Iterator[None]:
    """Note for as long as the ``with`` lasts that the loop reports; an upload in this thread then holds it up."""
    _thread.reports = True
    try:
        yield
    finally:
        _thread.reports = False


@contextmanager
def stalling() -> Iterator[None]:
    """Count the time of the ``with`` as standing still, if this is the loop's own thread in a report."""
    began = time.monotonic()
    try:
        yield
    finally:
        if getattr(_thread, "reports", False):
            _state.stalled += time.monotonic() - began


# What the controller runs in a worker.


def loop_state() -> LoopState:
    """Return the state of this worker's loop."""
    return _state


def take_waits_and_stall() -> tuple[Waits, float]:
    """Return what this worker has waited for since this was asked last: for the storage, and for checkpoints."""
    stalled, _state.stalled = _state.stalled, 0.0
    return take_waits(), stalled


def stacks() -> str:
    """Return the stacks of all threads but this one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )
