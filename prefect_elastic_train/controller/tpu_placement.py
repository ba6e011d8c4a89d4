"""Placement of worker groups on TPU slices. Experimental: it has been tested with pretended TPUs only.

Ray takes any slice whose host 0 is free, also one with dead or busy hosts. This module chooses slices that are whole
and free, places the group on them by name, and reserves the head of each, as Ray does, so that others skip it.

Uses ``ray.train.v2._internal``: Ray has no public way to place a worker group.
"""

import time
from collections.abc import Container
from typing import Any

from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.worker_group import placement_group_handle as handles
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.tpu import SlicePlacementGroup, get_tpu_version_from_type

from .nodes import cluster_nodes
from .sizing import Demand, free_slices, head_resource

_RELEASE_SECONDS = 15.0  # for the slices of the previous group to become free
_HEAD_SECONDS = 10.0  # to reserve the head of a free slice
_POLL_SECONDS = 0.5
_SLICE_NAME = "ray.io/tpu-slice-name"  # label of a node


def place_on_slices(demand: Demand, context: Any, left_out: Container[str]) -> handles.PlacementGroupHandle:
    """Reserve whole and free TPU slices for a worker group, and return the handle of its placement group.

    The slices have none of the nodes in `left_out`.

    Raises:
        WorkerGroupStartupTimeoutError: Too few slices are free, or a slice was not reserved in time.
    """
    shape = demand.shape
    assert shape
    deadline = time.monotonic() + _RELEASE_SECONDS
    while (
        len(slices := free_slices([node for node in cluster_nodes() if node.id not in left_out], demand))
        < context.num_slices
    ):
        if time.monotonic() > deadline:
            raise WorkerGroupStartupTimeoutError(context.num_workers)
        time.sleep(_POLL_SECONDS)
    heads = []
    selectors: list[dict[str, str]] = []
    try:
        for hosts in slices[: context.num_slices]:
            # A single host has no slice name. Without a node id, Ray would accept a host of a larger slice.
            selector = {"ray.io/node-id": hosts[0].id}
            if len(hosts) > 1:
                selector = {_SLICE_NAME: hosts[0].labels[_SLICE_NAME]}
                # Ray's own function to reserve a head runs a task on its host first, without a time limit.
                head = placement_group(
                    [{head_resource(shape.pod_type): 1}],
                    bundle_label_selector=[selector | {"ray.io/tpu-worker-id": "0"}],
                )
                heads.append(head)
                if not head.wait(_HEAD_SECONDS):
                    raise WorkerGroupStartupTimeoutError(context.num_workers)
            selectors += [selector] * shape.workers
        group = SlicePlacementGroup(
            topology=shape.topology,
            accelerator_version=get_tpu_version_from_type(shape.accelerator_type),
            num_slices=context.num_slices,
            resources_per_bundle=context.resources_per_worker,
            strategy=context.placement_strategy,
            bundle_label_selector=selectors,
        )
    except Exception:
        for head in heads:
            remove_placement_group(head)
        raise
    group._head_pgs += heads  # so that it removes them with its placement group
    return handles.SlicePlacementGroupHandle(group)
