"""Hooks of Ray Train around the train loop in each worker.

Uses ``ray.train.v2._internal``: Ray's public callbacks run in the controller.
"""

import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psutil
import ray
from ray.train.v2._internal.execution import context as ray_context
from ray.train.v2._internal.execution.callback import TrainContextCallback, WorkerCallback, WorkerGroupCallback

from prefect_elastic_train.loop import context as run_context
from prefect_elastic_train.loop import recovery_points, restart_notice
from prefect_elastic_train.storage.retries import operation

from . import loop_inspection
from .checkpoints import RunStorageContext, TrackedCheckpoint, to_json_values, use_unique_folders
from .recovery_memory import WorkerMemory
from .standby_process import wait_for_devices

logger = logging.getLogger(__name__)

_MAX_PENDING_REPORTS = 2  # pending reports of a rank; a further report waits
_UPLOAD_SECONDS = 3600.0  # that a report waits for earlier uploads
_HOLD_SECONDS = 60.0  # that a rank waits for an announced restart
_POLL_SECONDS = 0.02  # between two checks for the end of that wait


class WorkerHooks(WorkerCallback, TrainContextCallback):  # type: ignore[misc]
    """Callbacks of Ray Train in each worker, which bring the run context to the train loop and wrap its reports.

    Metrics are reported as JSON values, since they are stored with a checkpoint. Checkpoints are written and read
    through the run filesystem, into folders with unique names. A report that an announced restart waits for does not
    return: the worker would do its next steps twice. A loop that reports faster than its checkpoints are uploaded has
    to wait: otherwise they would fill the disk.
    """

    group = 0  # number of worker groups that the attempt has started
    restored_states: Any = ()  # the recovery point that the worker group restores, by rank
    _reporting = 0  # identifier of the loop's thread while it reports

    def __init__(self, context: run_context.RunContext) -> None:
        self._context = context
        self.previous: list[tuple[str, int]] = []  # node and process id of each worker of the previous group

    def begin_group(self, failures: int, skipped_steps: Iterable[int] = ()) -> None:
        """Prepare these hooks, in the controller, for the next worker group, whose workers get copies of the hooks.

        Args:
            failures: Failures of the run so far.
            skipped_steps: Steps whose batches a session skips.
        """
        self.group += 1
        self.restored_states = ()
        self._context = replace(self._context, failures=failures, skipped_steps=tuple(sorted(skipped_steps)))

    def after_init_train_context(self) -> None:
        """Prepare the worker process for the train loop. Ray Train calls this in each worker before the loop begins."""
        wait_for_devices(self.previous)
        set_gloo_interface()
        run_context.current = self._context
        context = ray_context.get_train_context()
        use_unique_folders(context, self._context.attempt, self.group)
        group_id = (self._context.run_id, self._context.attempt, self.group)
        recovery_points.memory = WorkerMemory(group_id, context.get_world_rank(), self.restored_states)
        silence_ray_train()
        loop_inspection.track_checkpoint_reads(context)
        report = context.report
        context.report = lambda metrics, *more, **options: report(to_json_values(metrics), *more, **options)
        context.checkpoint = context.checkpoint and TrackedCheckpoint(context.checkpoint)
        context.storage_context = RunStorageContext(context.storage_context)

    @contextmanager
    def on_report(self) -> Iterator[None]:
        """Wait for earlier uploads before a report of the train loop, and for an announced restart after it.

        Before it, at most one earlier report of this rank may wait for its upload, besides the one that is being
        uploaded.
        """
        context = ray_context.get_train_context()
        condition = context.report_order_condition
        self._reporting = threading.get_ident()
        with self._count_stall(), condition:
            is_in_time = condition.wait_for(
                lambda: context.report_call_index - context.current_report_index < _MAX_PENDING_REPORTS,
                _UPLOAD_SECONDS,
            )
        if not is_in_time:
            logger.warning("An upload takes more than %g s; training goes on", _UPLOAD_SECONDS)
        yield
        self._reporting = 0
        _wait_for_restart(context)

    @contextmanager
    def on_checkpoint_transfer(self) -> Iterator[None]:
        """Record the upload of a reported checkpoint and its duration, also if the user's own function uploads it."""
        if self._reporting == threading.get_ident():
            restart_notice.state.restart_waits = True
        with self._count_stall(), operation():
            yield

    @contextmanager
    def _count_stall(self) -> Iterator[None]:
        """Count the time of the ``with`` as a stall of the loop if it runs in the loop's thread during a report."""
        began = time.monotonic()
        yield
        if self._reporting == threading.get_ident():
            loop_inspection.state.stalled += time.monotonic() - began


class NoDatasets(WorkerGroupCallback):  # type: ignore[misc]
    """Replaces Ray's callback for datasets in a training without datasets, so that no worker group waits for it."""

    def before_init_train_context(self, workers: list[Any]) -> dict[str, list[Any]]:
        return {"dataset_shard_provider": [self] * len(workers)}

    def get_dataset_shard(self, dataset_info: Any) -> Any:
        raise KeyError(
            f"Dataset shard for '{dataset_info.dataset_name}' not found: pass it to elastic_train in `datasets`"
        )


def silence_ray_train() -> None:
    """Let Ray Train log only warnings in this worker, to its files, and print the loop's log records with their level.

    By default it logs each report and the loop's exceptions, and prints log records without their level.
    """
    logger = logging.getLogger("ray.train")
    logger.setLevel(logging.WARNING)
    ray_context.logger.parent = logger  # named by its file, not its module, so its records would reach the root logger
    for handler in logging.root.handlers:
        if hasattr(handler, "plain_handler"):  # the console, which the loop keeps
            handler.plain_handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
            logger.removeHandler(handler)


def set_gloo_interface() -> None:
    """Make gloo use the network interface of the node's address: the host name may resolve to an unreachable one."""
    address = ray.util.get_node_ip_address()
    for name, addresses in psutil.net_if_addrs().items():
        if address in [entry.address for entry in addresses]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _wait_for_restart(context: Any) -> None:
    """Hold the train loop after its report until the announced restart comes or is withdrawn, or the time is up.

    Only a report that the restart waits for is held: one that uploads its checkpoint synchronously, or the first one
    after the loop was notified of the restart.
    """
    coming = restart_notice.announced_restart(context) if restart_notice.state.restart_waits else None
    restart_notice.state.restart_waits = False
    deadline = time.monotonic() + _HOLD_SECONDS
    while coming is not None and restart_notice.announced_restart(context) == coming:
        if time.monotonic() > deadline:
            logger.warning("The restart that was announced did not come within %g s; training goes on", _HOLD_SECONDS)
            return
        time.sleep(_POLL_SECONDS)
