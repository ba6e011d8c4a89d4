"""The cluster and what a run asks of it, as the plain values that decisions are made from.

Uses ``ray._private.state``, as Ray Train does: there is no public way to see which nodes are being drained, or what
each of them has free.
"""

from __future__ import annotations

import ray
from ray.train.v2.api.config import ScalingConfig

from prefect_elastic_train.core.slices import slice_shape
from prefect_elastic_train.elastic.capacity import Demand, Node

__all__ = ["cluster_nodes", "demand_of"]


def cluster_nodes() -> list[Node]:
    """Give the living nodes of the cluster as they are now."""
    state = ray._private.state
    available = state.available_resources_per_node()
    draining = state.state.get_draining_nodes() or {}
    return [
        Node(
            id=node["NodeID"],
            total=node["Resources"],
            # A node that has only just come has not said yet what it has free.
            available=available.get(node["NodeID"], node["Resources"]),
            labels=node.get("Labels") or {},
            draining=node["NodeID"] in draining,
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def demand_of(scaling_config: ScalingConfig) -> Demand:
    """Give what the workers of a scaling configuration ask for."""
    resources = dict(scaling_config._resources_per_worker_not_none)
    shape = None
    if scaling_config.use_tpu and scaling_config.topology and scaling_config.accelerator_type:
        shape = slice_shape(scaling_config.topology, scaling_config.accelerator_type, resources)
    return Demand(
        resources=resources,
        min_workers=scaling_config.min_workers,
        max_workers=scaling_config.max_workers,
        labels=scaling_config.label_selector if isinstance(scaling_config.label_selector, dict) else {},
        strategy=scaling_config.placement_strategy,
        shape=shape,
    )
