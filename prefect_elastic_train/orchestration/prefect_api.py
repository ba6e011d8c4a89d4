"""Questions to the Prefect API that a training shall not wait long for: Prefect's client repeats them for a minute."""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, TypeVar
from uuid import UUID

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


def ask_prefect(question: Callable[[SyncPrefectClient], _T], seconds: float) -> _T | None:
    """Ask in a thread.

    Args:
        question: What is asked of the client.
        seconds: How long the answer is waited for.

    Returns:
        The answer, None if there is none in time or at all.
    """
    answers: list[_T] = []

    def ask() -> None:
        from prefect.client.orchestration import get_client

        try:
            with get_client(sync_client=True) as client:
                answers.append(question(client))
        except Exception as error:  # noqa: BLE001 - no answer, whatever the reason
            logger.debug("the Prefect API gave no answer: %s", error)

    # Prefect's settings and client live in context variables.
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(ask,), name="elastic-train-question", daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def last_told_at(flow_run_id: str, called_at: datetime, seconds: float) -> float | None:
    """Ask when a flow run last logged something in an earlier process, in seconds since the epoch.

    Args:
        flow_run_id: The flow run.
        called_at: When this process called for the training.
        seconds: How long the answer is waited for.

    Returns:
        None without an answer, or if it has logged nothing.
    """
    from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId, LogFilterTimestamp
    from prefect.client.schemas.sorting import LogSort

    def ask(client: SyncPrefectClient) -> float | None:
        states = sorted(client.read_flow_run_states(UUID(flow_run_id)), key=lambda state: state.timestamp)
        running = [number for number, state in enumerate(states) if state.is_running()]
        # What is logged after the end of the last execution is of this one: its runner's, its other tasks'. Where
        # nobody has noticed that end, there is no runner either.
        before = states[running[-2] + 1].timestamp if len(running) > 1 else called_at
        newest = client.read_logs(
            LogFilter(
                flow_run_id=LogFilterFlowRunId(any_=[UUID(flow_run_id)]), timestamp=LogFilterTimestamp(before_=before)
            ),
            limit=1,
            sort=LogSort.TIMESTAMP_DESC,
        )
        return newest[0].timestamp.timestamp() if newest else None

    return ask_prefect(ask, seconds)
