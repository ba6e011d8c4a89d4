"""What happens in each worker around the train loop, in the hooks of Ray Train's workers.

Uses ``ray.train.v2._internal``: the public callbacks run in the controller.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psutil
import ray
from ray.train.v2._internal.execution.callback import TrainContextCallback, WorkerCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.context import get_train_context
from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker as RaysTrainWorker

from prefect_elastic_train.core.ray_output import silence_ray_train
from prefect_elastic_train.elastic import callbacks, loop_watch
from prefect_elastic_train.elastic.checkpoints import RunStorageContext, as_json_values, name_folders, readable
from prefect_elastic_train.elastic.standby_process import wait_for_devices
from prefect_elastic_train.loop import notice
from prefect_elastic_train.loop.context import RunContext, enter_run
from prefect_elastic_train.storage.retries import operation, waiting_since

logger = logging.getLogger(__name__)

#: Reports of a rank that are not through, beyond which another one waits, and for how many seconds at most.
_UPLOADS_AT_ONCE = 2
_UPLOAD_SECONDS = 3600.0
_HOLD_SECONDS = 60.0
_SLOW_SECONDS = 60.0  # of an upload or download, between two warnings
_LOOK_SECONDS = 0.02  # seconds that a rank stands still; and between two looks
_SAMPLE_SECONDS = 0.25  # between two samples of the loop's position; taking one stops all threads of the worker


class LoopCallback(WorkerGroupCallback, WorkerCallback, TrainContextCallback):  # type: ignore[misc]
    """Takes the run's context to each worker, and stands around its reports.

    Metrics are reported as JSON values, since these are stored with a checkpoint. Checkpoints are written and read by
    the run filesystem, into folders that are never used again. The report that a restart waits for does not return:
    what the worker did afterwards would be done twice. A loop that reports faster than its checkpoints are uploaded
    has to wait: Ray would let them pile up on the disk.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._failures_before = context.failures
        self._group = 0
        self._before: list[tuple[str, int]] = []  # node and process id of each worker of the previous group
        self._reporting = 0
        self._saves = False  # the loop's thread while it reports; whether with a checkpoint

    def before_init_train_context(self, workers: list[Any]) -> dict[str, list[Any]]:
        """Count worker groups and failures in the controller; the workers are sent a copy of this callback next."""
        self._group += 1
        self._context = replace(self._context, failures=self._failures_before + callbacks.current().group_failures)
        return {}

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        self._before = [(worker.metadata.node_id, worker.metadata.pid) for worker in worker_group.get_workers()]

    def after_init_train_context(self) -> None:
        """Let checkpoints be read and written by the run filesystem, and note what the loop asks for."""
        wait_for_devices(self._before)
        use_node_address()
        enter_run(self._context)
        context = get_train_context()
        name_folders(context, self._context.attempt, self._group)
        silence_ray_train()
        loop_watch.note_checkpoints(context)
        report = context.report
        context.report = lambda metrics, *more, **options: report(as_json_values(metrics), *more, **options)
        context.checkpoint = readable(context.checkpoint)
        context.storage_context = RunStorageContext(context.storage_context)

    @contextmanager
    def on_report(self) -> Iterator[None]:
        """Wrap a report; an upload in the same thread holds the loop up."""
        self._reporting = threading.get_ident()
        self._saves = False
        try:
            with self._stalling():
                _wait_for_uploads(get_train_context())
        except Exception:
            logger.warning("A report does not wait for earlier uploads; training goes on", exc_info=True)
        yield
        self._reporting = 0
        try:
            _hold(self._saves)
        except Exception:
            logger.warning("A worker does not wait for its restart; training goes on", exc_info=True)

    @contextmanager
    def on_checkpoint_transfer(self) -> Iterator[None]:
        if self._reporting == threading.get_ident():
            self._saves = True
        with self._stalling(), operation():  # also of an upload function of the loop's own
            yield

    @contextmanager
    def _stalling(self) -> Iterator[None]:
        """Count the time of the ``with`` as standing still, if this is the loop's own thread in a report."""
        began = time.monotonic()
        yield
        if self._reporting == threading.get_ident():
            loop_watch.state.stalled += time.monotonic() - began


class RayTrainWorker(RaysTrainWorker):  # type: ignore[misc]
    """Ray's worker; adds the position of the loop's session and the seconds that the loop has waited to each poll.

    It sends the loop's exceptions as text. Named as Ray's, for titles and logs.
    """

    _warned_at = _looked_at = 0.0
    _free_at = 0.0  # time of the last sample in which the loop did not wait for Ray or other ranks; 0: none

    def poll_status(self) -> Any:
        status = super().poll_status()
        status.position = loop_watch.position()
        status.error = loop_watch.portable(status.error)
        now = time.monotonic()
        if now - self._looked_at > _SAMPLE_SECONDS:
            self._looked_at = now
            frame = loop_watch.innermost_frame()
            # The loop waits in Ray, such as in report(), or in a torch collective. DDP's are in the backward pass.
            if not (
                frame
                and self._free_at
                and re.search("-packages/ray/|distributed_c10d|autograd/graph", frame.f_code.co_filename)
            ):
                self._free_at = now
        status.waited = now - self._free_at
        if (began := waiting_since()) and now - max(began, self._warned_at) > _SLOW_SECONDS:
            self._warned_at = now
            logger.warning("The storage has not finished an upload or download for %.0f s", now - began)
        return status


class NoDatasetsCallback(WorkerGroupCallback):  # type: ignore[misc]
    """Stands in for Ray's manager of datasets in a training without datasets."""

    def before_init_train_context(self, workers: list[Any]) -> dict[str, list[Any]]:
        return {"dataset_shard_provider": [self] * len(workers)}

    def get_dataset_shard(self, dataset_info: Any) -> Any:
        raise KeyError(
            f"Dataset shard for '{dataset_info.dataset_name}' not found: pass it to elastic_train in `datasets`"
        )


def use_node_address() -> None:
    """Have gloo use the interface of the node's address: the host name may resolve to an unreachable one."""
    address = ray.util.get_node_ip_address()
    for name, addresses in psutil.net_if_addrs().items():
        if address in [entry.address for entry in addresses]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _wait_for_uploads(context: Any) -> None:
    """Wait until at most one report of this rank waits for its upload, besides the one that is uploaded."""
    condition = context.report_order_condition
    deadline = time.monotonic() + _UPLOAD_SECONDS
    with condition:
        while context.report_call_index - context.current_report_index >= _UPLOADS_AT_ONCE:
            if time.monotonic() > deadline:
                logger.warning("An upload takes more than %g s; training goes on", _UPLOAD_SECONDS)
                return
            condition.wait(timeout=1.0)


def _hold(saved: bool) -> None:
    """Stand still after a report that a restart was waiting for; bounded, and ended by a withdrawal."""
    asked_to_save = notice.known.asked_to_save
    notice.known.asked_to_save = False
    context = notice.train_context() if saved or asked_to_save else None
    coming = notice.coming_restart(context) if context is not None else None
    deadline = time.monotonic() + _HOLD_SECONDS
    while coming is not None and notice.coming_restart(context) == coming:
        if time.monotonic() > deadline:
            logger.warning("The restart that was announced did not come within %g s; training goes on", _HOLD_SECONDS)
            return
        time.sleep(_LOOK_SECONDS)
