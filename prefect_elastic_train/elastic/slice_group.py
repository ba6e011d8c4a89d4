"""A worker group on TPU slices that were looked at first.

Uses ``ray.train.v2._internal``: Ray's worker group takes any slice whose host 0 is free, also one whose other hosts
are dead or busy, and then waits a minute for hosts that do not come. This one names the slices, and reserves the
head of each, as Ray does, so that others who look for a slice pass it over.
"""

from __future__ import annotations

import time
from typing import Any

from ray._private.accelerators.tpu import reserve_tpu_slice
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.train.v2._internal.execution.worker_group.placement_group_handle import (
    PlacementGroupHandle,
    SlicePlacementGroupHandle,
)
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.tpu import SlicePlacementGroup, get_tpu_version_from_type

from prefect_elastic_train.elastic.capacity import Slice, free_slices
from prefect_elastic_train.elastic.cluster_view import cluster_nodes, demand_of

__all__ = ["SliceWorkerGroup", "use_chosen_slices"]

_SLICE_NAME = "ray.io/tpu-slice-name"
_NODE_ID = "ray.io/node-id"
#: Seconds for slices that the group before has just given back to become free.
_RELEASE_SECONDS = 15.0
#: Seconds for the head of a slice that was free a moment ago.
_HEAD_SECONDS = 10.0
_LOOK_SECONDS = 0.25


def use_chosen_slices() -> None:
    """Make the controller of this process start its worker groups on slices that are whole and free."""
    TrainController.worker_group_cls = SliceWorkerGroup


class _Handle(SlicePlacementGroupHandle):  # type: ignore[misc]
    """The placement group of the workers, and those that hold the heads of its slices."""

    def __init__(self, group: SlicePlacementGroup, heads: list[PlacementGroup]) -> None:
        super().__init__(group)
        self._heads = heads

    def shutdown(self) -> None:
        super().shutdown()
        for head in self._heads:
            remove_placement_group(head)


class SliceWorkerGroup(WorkerGroup):  # type: ignore[misc]
    """Starts on slices that are whole and free, or not at all."""

    def _create_placement_group(self, scaling_config: Any, worker_group_context: Any) -> PlacementGroupHandle:
        demand = demand_of(scaling_config)
        if demand.shape is None:
            return super()._create_placement_group(scaling_config, worker_group_context)
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
                if len(found.nodes) == 1:
                    continue
                reserved = reserve_tpu_slice(
                    demand.shape.topology, demand.shape.accelerator_type, timeout_s=_HEAD_SECONDS, slice_name=found.name
                )
                if reserved is not None:
                    heads.append(reserved[1])
            group = SlicePlacementGroup(
                topology=demand.shape.topology,
                accelerator_version=get_tpu_version_from_type(demand.shape.accelerator_type),
                num_slices=len(chosen),
                resources_per_bundle=worker_group_context.resources_per_worker,
                strategy=worker_group_context.placement_strategy,
                head_reservation_timeout_s=_HEAD_SECONDS,
                bundle_label_selector=[selector for selector in selectors for _ in range(demand.shape.workers)],
            )
        except Exception as error:
            for head in heads:
                remove_placement_group(head)
            if isinstance(error, TimeoutError):
                raise WorkerGroupStartupTimeoutError(num_workers=worker_group_context.num_workers) from error
            raise WorkerGroupStartupFailedError(f"Failed to reserve TPU slice(s): {error}") from error
        return _Handle(group, heads)

    @staticmethod
    def _choose(demand: Any, slices: int) -> list[Slice]:
        """Give so many free slices, or fewer if they do not become free."""
        deadline = time.monotonic() + _RELEASE_SECONDS
        while True:
            free = free_slices(cluster_nodes(), demand)
            if len(free) >= slices or time.monotonic() > deadline:
                return free[:slices]
            time.sleep(_LOOK_SECONDS)
