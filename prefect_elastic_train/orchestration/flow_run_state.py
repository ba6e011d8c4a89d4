"""The states of the flow runs around a training, and other reads of the Prefect API with a time limit.

Python delivers signals to the main thread only, and a flow that runs without a runner gets none. So a training polls
the states of its flow runs: otherwise a cancelled flow would wait for a training in another thread, perhaps for weeks.
"""

import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.context import FlowRunContext
from prefect.events.filters import EventFilter
from prefect.states import Cancelled

from prefect_elastic_train.core.threads import start_thread
from prefect_elastic_train.core.time_limits import FLOW_RUN_STATE_SECONDS

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Types of states in which a flow run must not train any more. Crashed is not one: a watchdog sets it for a flow run
#: without heartbeats, whose process may be alive. Completed is not one: a flow may end before a training that it has
#: submitted.
_STOPPING_STATES = ("CANCELLING", "CANCELLED", "FAILED")


def query_prefect(
    query: Callable[..., _T], *arguments: Any, timeout_seconds: float = FLOW_RUN_STATE_SECONDS
) -> _T | None:
    """Call ``query`` with a client of the Prefect API and the arguments.

    Return its result; None after an error or the time limit. The call runs in a thread, because the client retries for
    a minute.
    """
    answers: list[_T] = []

    def run() -> None:
        try:
            with get_client(sync_client=True) as client:
                answers.append(query(client, *arguments))
        except Exception as error:  # noqa: BLE001 - no answer, whatever the reason
            logger.warning("the Prefect API gave no answer: %s", error)

    start_thread(run).join(timeout_seconds)
    return answers[0] if answers else None


def last_event_time(client: SyncPrefectClient, event_filter: Mapping[str, Any]) -> float:
    """Return the time of the newest Prefect event that a filter selects, in seconds since the epoch.

    It is 0 if there is none.
    """
    newest = client.read_events(EventFilter.model_validate(event_filter), limit=1).events
    # Prefect rounds the time to microseconds.
    return newest[0].occurred.timestamp() + 1e-6 if newest else 0.0


def outermost_ended_flow_run(client: SyncPrefectClient, flow_run_ids: Sequence[str]) -> str:
    """Return the id of the outermost flow run that is cancelling, cancelled or failed; empty if none is.

    ``flow_run_ids`` are ordered from the innermost to the outermost flow run.
    """
    flow_run_filter = {"id": {"any_": flow_run_ids}, "state": {"type": {"any_": _STOPPING_STATES}}}
    flow_runs = client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(flow_run_filter))
    return max((str(flow_run.id) for flow_run in flow_runs), key=flow_run_ids.index, default="")


def mark_cancelled(client: SyncPrefectClient, flow_run_ids: Sequence[str]) -> None:
    """Set a flow run that is being cancelled, and its subflows that have not ended, to Cancelled.

    ``flow_run_ids`` has the subflows, the innermost first, and at the end the flow run.
    """
    # A flow run that is no longer being cancelled had ended, and may be executed again by now.
    for flow_run_id in map(UUID, flow_run_ids):
        state = client.read_flow_run(flow_run_id).state
        if state is None or state.is_cancelling() or not (state.is_final() or str(flow_run_id) == flow_run_ids[-1]):
            client.set_flow_run_state(flow_run_id, Cancelled(message="The training was cancelled."), force=True)


def enclosing_flows() -> Iterator[FlowRunContext]:
    """Yield the Prefect contexts of the flow runs in this process that the caller runs in, the innermost first."""
    context = FlowRunContext.get()
    while context:
        yield context
        outer = context._token and context._token.old_value
        context = outer if isinstance(outer, FlowRunContext) else None


def is_ending(flow: FlowRunContext) -> bool:
    """Return True if a flow run of this process ends, or has ended, without being completed. Works in any thread."""
    # Prefect's engine leaves the context of a flow run before it waits for the flow's threads. A run that is not
    # completed by then ends by a signal or another exception.
    state = flow.flow_run and flow.flow_run.state
    return flow._token is None and not (state and state.is_completed())


def exit_with_flow_process(flows: Sequence[FlowRunContext]) -> None:
    """Make a process of a flow's process pool exit when its flow process exits. Do nothing in a flow process.

    Otherwise such a process would not notice that its flow process was killed, and would continue the training.
    """
    parent = multiprocessing.parent_process()
    if parent is None or (flows and not any(flow.detached for flow in flows)):
        return

    def wait() -> None:
        parent.join()
        os._exit(1)  # the guard then stops the processes of the training, as after the death of a flow process

    start_thread(wait)


class FlowRunWatch:
    """Polls the states of a training's flow run and its parents in a thread, with one request for all of them.

    While the Prefect API does not answer, the last answer stays valid. Prefect's client waits when the API limits the
    rate. ``read_more`` is called in the same thread after each request.
    """

    #: The outermost flow run whose state ends the training; empty while there is none.
    ended = ""

    def __init__(
        self, flow_run_ids: Sequence[str], interval_seconds: float, read_more: Callable[[SyncPrefectClient], None]
    ) -> None:
        self._flow_run_ids = flow_run_ids
        self._read_more = read_more
        self._interval = interval_seconds
        self._closed = threading.Event()
        if flow_run_ids:
            start_thread(self._run)

    def close(self) -> None:
        """Stop polling the states of the flow runs, without waiting for a request that is under way."""
        self._closed.set()

    def _run(self) -> None:
        with get_client(sync_client=True) as client:
            while not self._closed.wait(self._interval):
                try:
                    self.ended = outermost_ended_flow_run(client, self._flow_run_ids)
                    self._read_more(client)
                except Exception as error:  # noqa: BLE001 - whatever it is, training continues
                    logger.debug("cannot read the state of the flow run, or its blocks: %s", error)
