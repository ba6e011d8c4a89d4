"""Why a training ends although nothing of it failed, and what it is then shown as.

Python shows signals to the main thread only, and nobody signals a flow that runs without a runner. Without this, a
cancelled flow would wait for a training in another thread, perhaps for weeks.
"""

from __future__ import annotations

import asyncio
import contextvars
import enum
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.exceptions import Abort
from prefect.states import Cancelled

from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome

logger = logging.getLogger(__name__)


class Stop(BaseException):
    """The training shall end: a signal came, its coroutine was cancelled, or its flow run has come to an end.

    Attributes:
        flow_run_id: Which flow run's state said so; empty for a signal or a cancelled coroutine.
    """

    def __init__(self, flow_run_id: str = "") -> None:
        super().__init__("the flow run was cancelled or has ended" if flow_run_id else "told to end")
        self.flow_run_id = flow_run_id


class SilentEndError(AttemptFailedError):
    """The flow run has its state already, or another process speaks for it: the flow must end without a word.

    Prefect's ``Abort`` does that. Raised in a task it would leave the task run Running for ever, so a task fails with
    this, and whoever has called it raises the other.
    """


class End(str, enum.Enum):
    """What a training that goes on no more is shown as."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed out"
    INTERRUPTED = "interrupted"
    LEFT = "left to its job"


def ending_of(error: BaseException, detached: bool, is_wanted: Callable[[], bool]) -> tuple[End, str] | None:
    """What a training that raised an error is shown as, and why; None if another process shows it now.

    A machine that is taken away sends the same signal as a cancellation: it is asked whether the end was wanted.
    """
    if isinstance(error, SilentEndError | Abort):
        return None
    if detached:
        return End.LEFT, "the flow process was told to end; the job goes on"
    if isinstance(error, TimeoutError):
        return End.TIMED_OUT, str(error)
    if isinstance(error, AttemptFailedError):
        return End.CANCELLED if error.outcome is Outcome.CANCELLED else End.FAILED, str(error)
    if isinstance(error, Exception):
        return End.FAILED, f"{type(error).__name__}: {error}"
    by_state = isinstance(error, Stop) and error.flow_run_id
    if by_state or isinstance(error, KeyboardInterrupt | asyncio.CancelledError) or is_wanted():
        return End.CANCELLED, str(error)
    return End.INTERRUPTED, "the flow process was told to end; what is committed stays"


def wants_an_end(state: State | None) -> bool:
    """Whether a flow run's state is an end for its trainings.

    Crashed is none: a watchdog sets it when Prefect has not heard of a flow run, and that may be living. Nor is
    Completed, since a flow may end before what it has submitted.
    """
    return state is not None and (state.is_cancelling() or state.is_cancelled() or state.is_failed())


def mark_cancelled(client: SyncPrefectClient, flow_run_ids: Sequence[str]) -> None:
    """Say of flow runs that their cancellation is carried out, unless they have ended."""
    for flow_run_id in map(UUID, flow_run_ids):
        state = client.read_flow_run(flow_run_id).state
        if state is None or not state.is_final():
            client.set_flow_run_state(flow_run_id, Cancelled(message="The training was cancelled."), force=True)


def watched_by_runner() -> bool:
    """Whether a runner has started this process: it then signals a cancellation and sets the final state."""
    return os.environ.get("PREFECT__ENABLE_CANCELLATION_AND_CRASHED_HOOKS", "true").lower() == "false"


def flows_around() -> Iterator[FlowRunContext]:
    """The flows of this process that the caller runs in, the innermost first."""
    context = FlowRunContext.get()
    while context is not None:
        yield context
        outer = context._token.old_value if context._token is not None else None
        context = outer if isinstance(outer, FlowRunContext) else None


def is_ending(flow: FlowRunContext) -> bool:
    """Whether a flow ends, or has ended, otherwise than completed; this shows in any thread.

    Prefect's engine leaves the context of a flow run before it waits for the flow's threads. If the run is not
    completed by then, it ends by a signal or another exception, and nobody wants the training to go on.
    """
    state = flow.flow_run.state if flow.flow_run is not None else None
    return not state.is_completed() if state is not None and state.is_final() else flow._token is None


class FlowRunWatch:
    """Looks at the states of a flow run and those that it is called from now and then, in a thread of its own.

    An API that is away is no news: the last answer stands.

    Attributes:
        stop: Why the training shall end, by the outermost flow run that says so; None as long as it shall not.
    """

    stop: Stop | None = None

    def __init__(self, flow_run_ids: Sequence[str], interval_seconds: float) -> None:
        self._flow_run_ids, self._interval = flow_run_ids, interval_seconds
        self._closed = threading.Event()
        context = contextvars.copy_context()  # Prefect's settings and client
        if flow_run_ids:
            threading.Thread(target=context.run, args=(self._run,), name="elastic-train-flow-run", daemon=True).start()

    def close(self) -> None:
        """Look no more; a look that is under way is not waited for."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(self._interval):
            try:
                with get_client(sync_client=True) as client:
                    flow_runs = [client.read_flow_run(UUID(one)) for one in reversed(self._flow_run_ids)]
                self.stop = next((Stop(str(one.id)) for one in flow_runs if wants_an_end(one.state)), None)
            except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
                logger.debug("cannot read the state of the flow run: %s", error)
