"""Questions to the Prefect API that a training shall not wait long for: Prefect's client repeats them for a minute."""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TypeVar
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId, LogFilterTimestamp
from prefect.client.schemas.sorting import LogSort
from prefect.states import Cancelled

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


def ask_prefect(question: Callable[[SyncPrefectClient], _T], seconds: float) -> _T | None:
    """Ask in a thread; None without an answer in so many seconds."""
    answers: list[_T] = []

    def ask() -> None:
        try:
            with get_client(sync_client=True) as client:
                answers.append(question(client))
        except Exception as error:  # noqa: BLE001 - no answer, whatever the reason
            logger.warning("the Prefect API gave no answer: %s", error)

    context = contextvars.copy_context()  # Prefect's settings and client
    thread = threading.Thread(target=context.run, args=(ask,), name="elastic-train-question", daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def mark_cancelled(client: SyncPrefectClient, flow_run_ids: Sequence[str]) -> None:
    """Say of flow runs that their cancellation is carried out, unless they have ended."""
    for flow_run_id in map(UUID, flow_run_ids):
        state = client.read_flow_run(flow_run_id).state
        if state is None or not state.is_final():
            client.set_flow_run_state(flow_run_id, Cancelled(message="The training was cancelled."), force=True)


def last_told_at(client: SyncPrefectClient, flow_run_id: str, called_at: datetime) -> float | None:
    """When a flow run last logged something in an earlier process, in seconds since the epoch; None if it has not.

    Args:
        client: The Prefect API.
        flow_run_id: The flow run.
        called_at: When this process called for the training.
    """
    states = sorted(client.read_flow_run_states(UUID(flow_run_id)), key=lambda state: state.timestamp)
    running = [number for number, state in enumerate(states) if state.is_running()]
    # What is logged after the end of the last execution is of this one: its runner's, its other tasks'. Where nobody
    # has noticed that end, there is no runner either.
    before = states[running[-2] + 1].timestamp if len(running) > 1 else called_at
    of_before = LogFilter(
        flow_run_id=LogFilterFlowRunId(any_=[UUID(flow_run_id)]), timestamp=LogFilterTimestamp(before_=before)
    )
    newest = client.read_logs(of_before, limit=1, sort=LogSort.TIMESTAMP_DESC)
    return newest[0].timestamp.timestamp() if newest else None
