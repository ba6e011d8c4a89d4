"""Why a training ends although nothing of it failed: a signal to the flow process, or the state of its flow run.

Python shows signals to the main thread only, and nobody signals a flow that runs without a runner. Without this, a
cancelled flow would wait for its submitted training, perhaps for weeks.
"""

from __future__ import annotations

import contextvars
import enum
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

__all__ = ["FlowRunWatch", "StopReason", "interruptions", "notice_interruptions", "watched_by_runner", "watching"]

logger = logging.getLogger(__name__)

_count = 0


class StopReason(enum.Enum):
    """What the state of a flow run says about its trainings."""

    CANCELLING = "the flow run is being cancelled"
    OVER = "the flow run has ended"


def interruptions() -> int:
    """Give how many times this process was told to end, as far as that was noticed."""
    return _count


def notice_interruptions() -> None:
    """Notice SIGTERM and SIGINT from now on; does nothing outside of the main thread.

    Python itself writes the number of each signal that it handles into a pipe. The handlers stay as they are, since
    Prefect takes a cancellation only while SIGTERM is handled by its own. A pipe that somebody else has set up, as
    an event loop does, is left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    taken = signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    if taken != -1:
        signal.set_wakeup_fd(taken)
        os.close(readable)
        os.close(writable)
        return
    threading.Thread(target=_count_signals, args=(readable,), name="elastic-train-signals", daemon=True).start()


def _count_signals(readable: int) -> None:
    global _count
    while numbers := os.read(readable, 64):
        _count += sum(number in (signal.SIGTERM, signal.SIGINT) for number in numbers)


def watched_by_runner() -> bool:
    """Tell whether a runner has started this process: it then signals a cancellation and sets the final state."""
    return os.environ.get("PREFECT__ENABLE_CANCELLATION_AND_CRASHED_HOOKS", "true").lower() == "false"


def _reason(state: State | None) -> StopReason | None:
    """Decide what a state means for the trainings of its flow run.

    Crashed does not count: a watchdog sets it when Prefect has not heard of a flow run, and that may be living.
    Nor does Completed, since a flow may end before what it has submitted.
    """
    if state is None:
        return None
    if state.is_cancelling():
        return StopReason.CANCELLING
    if state.is_cancelled() or state.is_failed():
        return StopReason.OVER
    return None


class FlowRunWatch:
    """Looks at the state of a flow run now and then, in a thread of its own.

    An API that is away is no news: the last answer stands.

    Args:
        flow_run_id: The flow run.
        interval_seconds: Time between two looks.
    """

    def __init__(self, flow_run_id: str, interval_seconds: float) -> None:
        self.reason: StopReason | None = None
        self._flow_run_id = flow_run_id
        self._interval = interval_seconds
        self._stopped = threading.Event()
        self._failing = False
        # Prefect's settings and client live in context variables.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._run,), name="elastic-train-flow-run", daemon=True
        )

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more; a look that is under way is not waited for."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            try:
                self._look()
                self._failing = False
            except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
                if not self._failing:
                    logger.debug("cannot read the state of flow run %s: %s", self._flow_run_id, error)
                self._failing = True

    def _look(self) -> None:
        from uuid import UUID

        from prefect.client.orchestration import get_client

        with get_client(sync_client=True) as client:
            while not self._stopped.is_set():
                self.reason = _reason(client.read_flow_run(UUID(self._flow_run_id)).state)
                self._stopped.wait(self._interval)


@contextmanager
def watching(flow_run_id: str | None, interval_seconds: float) -> Iterator[FlowRunWatch | None]:
    """Watch a flow run for as long as the block runs; without one, watch nothing."""
    if flow_run_id is None:
        yield None
        return
    watch = FlowRunWatch(flow_run_id, interval_seconds)
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()
