"""What the ranks have waited for checkpoints and for their storage, asked after each checkpoint.

Uses ``ray.train.v2._internal``: the callbacks of worker groups have no public base.
"""

from __future__ import annotations

import logging
from typing import Any

import ray
from ray.train.v2._internal.execution.callback import ReportCallback, WorkerGroupCallback

from prefect_elastic_train.elastic import callbacks
from prefect_elastic_train.elastic.stalls import take_stall
from prefect_elastic_train.storage.retries import Waits, take_waits

__all__ = ["StorageWaitsCallback"]

logger = logging.getLogger(__name__)

#: How long the last answers of a worker group that ends are waited for.
_LAST_SECONDS = 1.0


def _take() -> tuple[Waits, float]:
    """Give, in a worker, what it has waited for since this was asked last: for the storage, and for checkpoints."""
    return take_waits(), take_stall()


class StorageWaitsCallback(WorkerGroupCallback, ReportCallback):  # type: ignore[misc]
    """Asks each rank without waiting for its answer; whatever goes wrong, training goes on."""

    def __init__(self) -> None:
        self._workers: list[Any] = []
        self._asked: list[Any] = []

    def after_worker_group_start(self, worker_group: Any) -> None:
        """Remember whom to ask."""
        self._workers, self._asked = worker_group.get_workers(), []

    def after_report(self, training_report: Any, metrics: list[dict[str, Any]]) -> None:
        """Ask, now that the ranks have written a checkpoint."""
        try:
            if training_report.checkpoint and not self._asked:
                self._asked = [worker.execute_async(_take) for worker in self._workers]
        except Exception:
            logger.debug("cannot ask the ranks what they waited for", exc_info=True)

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Take answers that have come."""
        self._collect(0)

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        """Take the last answers."""
        self._collect(_LAST_SECONDS)

    def _collect(self, timeout_seconds: float) -> None:
        if not self._asked:
            return
        try:
            done, _ = ray.wait(self._asked, num_returns=len(self._asked), timeout=timeout_seconds)
            if len(done) < len(self._asked) and not timeout_seconds:
                return
            self._asked = []
            current = callbacks.current()
            if current is not None:
                answers = ray.get(done)
                current.tell_waits("ranks", [waits for waits, _ in answers])
                current.tell_stall(max((stall for _, stall in answers), default=0.0))
        except Exception:
            self._asked = []
            logger.debug("a rank does not say what it waited for", exc_info=True)
