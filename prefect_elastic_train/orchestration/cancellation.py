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
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING
from uuid import UUID

from typing_extensions import Self

from prefect_elastic_train.orchestration.prefect_api import ask_prefect

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import State
    from prefect.context import FlowRunContext

logger = logging.getLogger(__name__)


class StopReason(enum.Enum):
    """What the state of a flow run says about its trainings."""

    CANCELLING = "the flow run is being cancelled"
    OVER = "the flow run has ended"
    TAKEN_OVER = "another process executes the flow run"


class Stop(BaseException):
    """The coroutine that awaits the training was cancelled, or the flow process or the flow run was told to end.

    Attributes:
        reason: What the flow run's state said; None for a signal or a cancelled coroutine.
        flow_run_id: Which flow run's state that was.
    """

    def __init__(self, reason: StopReason | None = None, flow_run_id: str = "") -> None:
        super().__init__(reason.value if reason else "told to end")
        self.reason = reason
        self.flow_run_id = flow_run_id


def wants_an_end(flow_run_ids: Sequence[str], seconds: float) -> bool:
    """Ask whether one of some flow runs is cancelled or has failed; an API that does not answer in time says no."""
    reasons = ask_prefect(
        lambda client: [_reason(client.read_flow_run(UUID(one)).state) for one in flow_run_ids], seconds
    )
    if reasons is None:
        logger.warning("cannot ask whether flow run %s is cancelled", flow_run_ids[0])
    return any(reasons or [])


def mark_cancelled(flow_run_ids: Sequence[str]) -> None:
    """Say of flow runs that their cancellation is carried out, unless they have ended."""
    from prefect.client.orchestration import get_client
    from prefect.states import Cancelled

    try:
        with get_client(sync_client=True) as client:
            for flow_run_id in map(UUID, flow_run_ids):
                state = client.read_flow_run(flow_run_id).state
                if state is None or not state.is_final():
                    client.set_flow_run_state(flow_run_id, Cancelled(message="The training was cancelled."), force=True)
    except Exception as error:  # noqa: BLE001 - the training has ended; the state is for people
        logger.warning("cannot mark the flow run as cancelled: %s", error)


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
        """Whether one of them ends, or has ended, otherwise than completed."""
        return any(map(_is_ending, self._contexts))


def _is_ending(context: FlowRunContext) -> bool:
    state = context.flow_run.state if context.flow_run is not None else None
    if state is not None and state.is_final():
        return not state.is_completed()
    return context._token is None


def watched_by_runner() -> bool:
    """Whether a runner has started this process: it then signals a cancellation and sets the final state."""
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
    return StopReason.OVER if state.is_cancelled() or state.is_failed() else None


class FlowRunWatch:
    """Looks at the states of a flow run and those that it is called from now and then, in a thread of its own.

    It looks for as long as it is entered. An API that is away is no news: the last answer stands.

    Args:
        flow_run_ids: The flow run, and those that it is called from up to the root; without any nothing is watched.
        interval_seconds: Time between two looks.

    Attributes:
        stop: Why the training shall end, by the outermost flow run that says so; None as long as it shall not.
        is_executed_again: The outermost was begun once more since the first look, by another process.
    """

    def __init__(self, flow_run_ids: Sequence[str], interval_seconds: float) -> None:
        self.stop: Stop | None = None
        self.is_executed_again = False
        self._executions: int | None = None
        self._flow_run_ids = tuple(flow_run_ids)
        self._interval = interval_seconds
        self._left = threading.Event()

    def __enter__(self) -> Self:
        if self._flow_run_ids:
            # Prefect's settings and client live in context variables.
            context = contextvars.copy_context()
            threading.Thread(target=context.run, args=(self._run,), name="elastic-train-flow-run", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._left.set()  # a look that is under way is not waited for

    def look_once_more(self, seconds: float) -> None:
        """Look now, for at most so long; without an answer the last one stands."""
        if self._flow_run_ids:
            ask_prefect(self._look, seconds)

    def _run(self) -> None:
        from prefect.client.orchestration import get_client

        failing = False
        while not self._left.wait(self._interval):
            try:
                with get_client(sync_client=True) as client:
                    while not self._left.is_set():
                        self._look(client)
                        failing = False
                        self._left.wait(self._interval)
            except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
                if not failing:
                    logger.debug("cannot read the state of flow run %s: %s", self._flow_run_ids[0], error)
                failing = True

    def _look(self, client: SyncPrefectClient) -> None:
        flow_runs = [client.read_flow_run(UUID(one)) for one in reversed(self._flow_run_ids)]
        stops = (Stop(reason, str(one.id)) for one in flow_runs if (reason := _reason(one.state)))
        self.stop = next(stops, None)
        executions = flow_runs[0].run_count or 0
        if self._executions is None:
            self._executions = executions
        self.is_executed_again = executions > self._executions
