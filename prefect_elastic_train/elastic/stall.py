"""A loop that reports nothing for too long is a failure of the worker group, like a worker that died.

Uses ``ray.train.v2._internal``: Ray's own hang detector raises from the same hook, but watches NCCL only.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from typing import Any

import ray
from ray.train import WorkerGroupError
from ray.train.v2._internal.execution.callback import WorkerGroupCallback

from prefect_elastic_train.elastic.callbacks import remember_errors

__all__ = ["StallCallback", "StalledError"]

_STACKS_TIMEOUT_SECONDS = 10.0


class StalledError(Exception):
    """A rank reported nothing for longer than ``stall_timeout_seconds``; carries the stacks of its threads."""


class StallCallback(WorkerGroupCallback):  # type: ignore[misc]
    """Fails the worker group when no rank has reported for too long.

    Args:
        timeout_seconds: How long is too long, counted from the start of training and from each report.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._worker_group: Any = None
        self._last_report = 0.0

    def after_worker_group_training_start(self, worker_group: Any) -> None:
        """Begin to watch."""
        self._worker_group = worker_group
        self._last_report = time.monotonic()

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        """Stop watching."""
        self._worker_group = None

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Look whether anybody has reported since the last poll.

        Raises:
            WorkerGroupError: Nobody has for too long; Ray restarts the worker group and charges ``max_failures``.
        """
        statuses = worker_group_status.worker_statuses.values()
        now = time.monotonic()
        if any(status.training_report is not None for status in statuses):
            self._last_report = now
        watching = self._worker_group is not None and not worker_group_status.errors
        if not watching or worker_group_status.finished or now - self._last_report <= self._timeout_seconds:
            return
        failures = {
            rank: StalledError(f"no report for {self._timeout_seconds:g} s; the rank was here:\n{stacks}")
            for rank, stacks in enumerate(_stacks_of(self._worker_group))
        }
        remember_errors(failures)
        message = "\n".join(f"[Rank {rank} Error Snippet]:\n{error}" for rank, error in failures.items())
        raise WorkerGroupError(message, failures)


def _stacks_of(worker_group: Any) -> list[str]:
    references = worker_group.execute_async(_stacks)
    done, _ = ray.wait(references, num_returns=len(references), timeout=_STACKS_TIMEOUT_SECONDS)
    finished = set(done)
    return [_stacks_behind(reference) if reference in finished else "(no answer)" for reference in references]


def _stacks_behind(reference: Any) -> str:
    try:
        return str(ray.get(reference, timeout=1))
    except Exception as error:  # noqa: BLE001 - a rank that cannot even answer is part of the finding
        return f"(no stacks: {error})"


def _stacks() -> str:
    """Give the stacks of all threads but this one. Runs in a worker."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )
