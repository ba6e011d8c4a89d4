"""Questions to the Prefect API that a training shall not wait long for: Prefect's client repeats them for a minute."""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

__all__ = ["ask_prefect"]

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
