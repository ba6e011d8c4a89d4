"""A worker group that waits only for nodes that are there, on TPU slices that were looked at first.

Uses ``ray.train.v2._internal``: where a rank notices the end of another sooner than Ray that of its node, the next
group is asked for on a node that is gone, and Ray's worker group waits a minute for it. And Ray's takes any slice
whose host 0 is free, also one whose other hosts are dead or busy. This one gives up when a node has gone meanwhile,
names the slices, and reserves the head of each, as Ray does, so that others who look for a slice pass it over.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

from ray.exceptions import RayActorError
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.train.v2._internal.execution.worker_group.placement_group_handle import (
    PlacementGroupHandle,
    SlicePlacementGroupHandle,
)
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.tpu import SlicePlacementGroup, get_tpu_version_from_type

from prefect_elastic_train.elastic import callbacks
from prefect_elastic_train.elastic.capacity import Demand, Node, Slice, free_slices, head_resource
from prefect_elastic_train.elastic.cluster import cluster_nodes, demand_of

_SLICE_NAME = "ray.io/tpu-slice-name"
_NODE_ID = "ray.io/node-id"
_WORKER_ID = "ray.io/tpu-worker-id"
#: Seconds for slices that the group before has just given back to become free.
_RELEASE_SECONDS = 15.0
#: Seconds for the head of a slice that was free a moment ago.
_HEAD_SECONDS = 10.0
_LOOK_SECONDS = 0.25
#: Seconds of waiting for a placement group between two looks at the nodes.
_WAIT_SECONDS = 1.0

logger = logging.getLogger(__name__)


#: Why the last worker group of this process did not start, until somebody asks.
_failure: Exception | None = None
#: The nodes that the decision about the next worker group counted on. Ray hands a worker group nothing of a policy.
_counted_on: frozenset[str] = frozenset()


def use_run_worker_group() -> None:
    """Make the controller of this process start worker groups of this module."""
    TrainController.worker_group_cls = RunWorkerGroup


def count_on(nodes: Iterable[Node]) -> None:
    """Say from which nodes the size of the next worker group was decided: without one of them it may not fit."""
    global _counted_on
    _counted_on = frozenset(node.id for node in nodes if not node.draining)


def counted_nodes() -> frozenset[str]:
    """Return the nodes that the last decision counted on."""
    return _counted_on


def take_failure() -> tuple[str, bool]:
    """Return once why the last worker group did not start, and whether that was for want of room; empty if it did."""
    global _failure
    failure, _failure = _failure, None
    return ("" if failure is None else str(failure)), isinstance(failure, WorkerGroupStartupTimeoutError)


class _WatchedHandle(PlacementGroupHandle):  # type: ignore[misc]
    """A placement group that is waited for only as long as the nodes are there that it was decided from."""

    def __init__(self, handle: PlacementGroupHandle) -> None:
        self._handle = handle
        self._nodes = _counted_on

    @property
    def placement_group(self) -> PlacementGroup:
        return self._handle.placement_group

    def ready(self) -> Any:
        return self._handle.ready()

    def wait(self, timeout_seconds: float = 30) -> bool:
        deadline = time.monotonic() + timeout_seconds
        while True:
            looked_at = time.monotonic()
            left = deadline - looked_at
            if self._handle.wait(max(0.0, min(left, _WAIT_SECONDS))):
                return True
            if left <= _WAIT_SECONDS:
                return False
            try:
                gone = self._nodes - {node.id for node in cluster_nodes() if not node.draining}
            except Exception:
                logger.warning("The nodes cannot be seen; the placement is waited for", exc_info=True)
                gone = frozenset()
            if gone:
                logger.info("Nodes went while workers were to be placed: %s", ", ".join(sorted(gone)))
                return False
            time.sleep(max(0.0, looked_at + _LOOK_SECONDS - time.monotonic()))

    def shutdown(self) -> None:
        self._handle.shutdown()


class _SliceHandle(SlicePlacementGroupHandle):  # type: ignore[misc]
    """The placement group of the workers, and those that hold the heads of its slices."""

    def __init__(self, group: SlicePlacementGroup, heads: list[PlacementGroup]) -> None:
        super().__init__(group)
        self._heads = heads

    def shutdown(self) -> None:
        super().shutdown()
        for head in self._heads:
            remove_placement_group(head)


def _reserve_head(found: Slice, pod_type: str) -> PlacementGroup:
    """Take the head of a slice, by which Ray's users tell whether a slice is taken.

    Ray's own function then asks a task on that host for the slice's name, without a bound.

    Raises:
        TimeoutError: Somebody else has taken it meanwhile.
    """
    head = placement_group(
        bundles=[{head_resource(pod_type): 1}], bundle_label_selector=[{_SLICE_NAME: found.name, _WORKER_ID: "0"}]
    )
    if not head.wait(_HEAD_SECONDS):
        remove_placement_group(head)
        raise TimeoutError(f"the head of slice {found.name} was not free within {_HEAD_SECONDS:g} s")
    return head


class RunWorkerGroup(WorkerGroup):  # type: ignore[misc]
    """Starts on nodes that are there, and on slices that are whole and free, or not at all.

    It may be shut down before the controller does: a group that is lost gives back what it holds while the next one
    is waited for. From then on it has no workers, and to end it again does nothing.
    """

    def shutdown(self) -> None:
        """End the workers and give back what they hold, once."""
        if self.has_started():
            super().shutdown()

    def abort(self) -> None:
        """End the workers without ceremony, once."""
        if self.has_started():
            super().abort()

    def get_workers(self) -> list[Any]:
        """Return the workers, none after the end."""
        workers: list[Any] = super().get_workers() if self.has_started() else []
        return workers

    def __len__(self) -> int:
        """Return the number of workers; the controller takes a group of none for no group."""
        return len(self.get_workers())

    def _poll_workers_and_collect_errors(self, timeout: float | None) -> list[Any]:
        """Poll the workers, and look at what they report before any callback handles it."""
        statuses: list[Any] = super()._poll_workers_and_collect_errors(timeout)
        callback = callbacks.current()
        if callback is not None:
            callback.look_at_reports(statuses)
        return statuses

    def get_latest_poll_status(self) -> Any:
        """Return what the last poll found, also after the end."""
        return self._latest_poll_status

    def _start(self) -> None:
        """Start; what fails at any moment leaves nothing behind, and the death of a worker is a failed start."""
        global _failure
        try:
            super()._start()
        except Exception as error:
            _failure = error
            if self.has_started():
                self._give_back()
            if isinstance(error, RayActorError):
                raise WorkerGroupStartupFailedError("A worker died while its group started.") from error
            raise

    def _give_back(self) -> None:
        # Ray's own shuts down only what has not got as far as this.
        try:
            self._worker_group_state.shutdown()
        except Exception:
            logger.warning("A worker group that did not start was not ended cleanly", exc_info=True)
        self._clear_state()

    def _create_placement_group(self, scaling_config: Any, worker_group_context: Any) -> PlacementGroupHandle:
        try:
            demand = demand_of(scaling_config)
            if demand.shape is None:
                return _WatchedHandle(super()._create_placement_group(scaling_config, worker_group_context))
            return _WatchedHandle(self._create_on_slices(demand, worker_group_context))
        except (WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError):
            raise
        except Exception as error:
            raise WorkerGroupStartupFailedError(f"No placement group for the workers: {error}") from error

    def _create_on_slices(self, demand: Demand, worker_group_context: Any) -> PlacementGroupHandle:
        shape = demand.shape
        assert shape is not None
        chosen = self._choose(demand, worker_group_context.num_slices)
        if len(chosen) < worker_group_context.num_slices:
            raise WorkerGroupStartupTimeoutError(num_workers=worker_group_context.num_workers)
        # A single host is no slice by name, and one of a larger slice would do for Ray.
        selectors = [
            {_SLICE_NAME: found.name} if len(found.nodes) > 1 else {_NODE_ID: found.nodes[0].id} for found in chosen
        ]
        heads: list[PlacementGroup] = []
        try:
            for found in chosen:
                if len(found.nodes) > 1:
                    heads.append(_reserve_head(found, shape.pod_type))
            group = SlicePlacementGroup(
                topology=shape.topology,
                accelerator_version=get_tpu_version_from_type(shape.accelerator_type),
                num_slices=len(chosen),
                resources_per_bundle=worker_group_context.resources_per_worker,
                strategy=worker_group_context.placement_strategy,
                head_reservation_timeout_s=_HEAD_SECONDS,
                bundle_label_selector=[selector for selector in selectors for _ in range(shape.workers)],
            )
        except Exception as error:
            for head in heads:
                remove_placement_group(head)
            if isinstance(error, TimeoutError):
                raise WorkerGroupStartupTimeoutError(num_workers=worker_group_context.num_workers) from error
            raise WorkerGroupStartupFailedError(f"Failed to reserve TPU slice(s): {error}") from error
        return _SliceHandle(group, heads)

    @staticmethod
    def _choose(demand: Demand, slices: int) -> list[Slice]:
        """Return so many free slices, or fewer if they do not become free."""
        deadline = time.monotonic() + _RELEASE_SECONDS
        while True:
            free = free_slices(cluster_nodes(), demand)
            if len(free) >= slices or time.monotonic() > deadline:
                return free[:slices]
            time.sleep(_LOOK_SECONDS)
