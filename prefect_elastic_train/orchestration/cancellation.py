"""Why a training ends although nothing of it failed: a signal to the flow process, or the state of its flow run.

Python shows signals to the main thread only, and nobody signals a flow that runs without a runner. Without this, a
cancelled flow would wait for a training in another thread, perhaps for weeks.
"""

from __future__ import annotations

import contextvars
import enum
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from uuid import UUID

from prefect_elastic_train.orchestration.prefect_api import ask_prefect

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import State
    from prefect.context import FlowRunContext

__all__ = [
    "FlowRunWatch",
    "FlowsAround",
    "StopReason",
    "wants_an_end",
    "watched_by_runner",
    "watching",
]

logger = logging.getLogger(__name__)


class StopReason(enum.Enum):
    """What the state of a flow run says about its trainings."""

    CANCELLING = "the flow run is being cancelled"
    OVER = "the flow run has ended"
    TAKEN_OVER = "another process executes the flow run"


def wants_an_end(flow_run_ids: Sequence[str], seconds: float) -> bool:
    """Ask whether one of some flow runs is cancelled or has failed; an API that does not answer in time says no."""
    reasons = ask_prefect(
        lambda client: [_reason(client.read_flow_run(UUID(one)).state) for one in flow_run_ids], seconds
    )
    if reasons is None:
        logger.warning("cannot ask whether flow run %s is cancelled", flow_run_ids[0])
    return any(reasons or [])


class FlowsAround:
    """The flows of this process that a training runs in, as far as their ending shows in any thread.

    Prefect's engine leaves the context of a flow run before it waits for the flow's threads. If the run is not
    completed by then, it ends by a signal or another exception, and nobody wants the training to go on.
    """

    def __init__(self) -> None:
        from prefect.context import FlowRunContext

        self._contexts: list[FlowRunContext] = []
        context = FlowRunContext.get()
        while context is not None:
            self._contexts.append(context)
            outer = context._token.old_value if context._token is not None else None
            context = outer if isinstance(outer, FlowRunContext) else None

    def are_ending(self) -> bool:
        """Tell whether one of them ends, or has ended, otherwise than completed."""
        return any(map(_is_ending, self._contexts))


def _is_ending(context: FlowRunContext) -> bool:
    state = context.flow_run.state if context.flow_run is not None else None
    if state is not None and state.is_final():
        return not state.is_completed()
    return context._token is None


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
    """Looks at the states of a flow run and those that it is called from now and then, in a thread of its own.

    An API that is away is no news: the last answer stands.

    Args:
        flow_run_ids: The flow run, and those that it is called from up to the root.
        interval_seconds: Time between two looks.

    Attributes:
        reason: Why the training shall end, None as long as it shall not.
        flow_run_id: The flow run that says so, the outermost if there are several.
        is_executed_again: The outermost was begun once more since the first look, by another process.
    """

    def __init__(self, flow_run_ids: Sequence[str], interval_seconds: float) -> None:
        self.reason: StopReason | None = None
        self.flow_run_id = ""
        self.is_executed_again = False
        self._executions: int | None = None
        self._flow_run_ids = tuple(flow_run_ids)
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
                    logger.debug("cannot read the state of flow run %s: %s", self._flow_run_ids[0], error)
                self._failing = True

    def _look(self) -> None:
        from prefect.client.orchestration import get_client

        with get_client(sync_client=True) as client:
            while not self._stopped.is_set():
                self._look_with(client)
                self._stopped.wait(self._interval)

    def look_once_more(self, seconds: float) -> None:
        """Look now, for at most so long; without an answer the last one stands."""
        ask_prefect(self._look_with, seconds)

    def _look_with(self, client: SyncPrefectClient) -> None:
        flow_runs = [client.read_flow_run(UUID(one)) for one in reversed(self._flow_run_ids)]
        found = [(_reason(one.state), str(one.id)) for one in flow_runs]
        self.reason, self.flow_run_id = next((answer for answer in found if answer[0]), (None, ""))
        executions = flow_runs[0].run_count or 0
        if self._executions is None:
            self._executions = executions
        self.is_executed_again = executions > self._executions


@contextmanager
def watching(flow_run_ids: Sequence[str], interval_seconds: float) -> Iterator[FlowRunWatch | None]:
    """Watch flow runs for as long as the block runs; without any, watch nothing."""
    if not flow_run_ids:
        yield None
        return
    watch = FlowRunWatch(flow_run_ids, interval_seconds)
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()
