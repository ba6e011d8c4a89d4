"""The state of the Ray cluster: its nodes, the placement groups of dead drivers, and the demand of a scaling config.

Uses ``ray._private.state``, as Ray Train does: no public function returns which nodes are draining, which resources
each has available, or which job owns a placement group. Uses ``_resources_per_worker_not_none`` of ``ScalingConfig``,
which alone has the resources of a worker when the user gives none.
"""

from typing import Any

import ray
from ray.core.generated.gcs_pb2 import PlacementGroupTableData
from ray.util.placement_group import PlacementGroup, remove_placement_group

from prefect_elastic_train.core.request import DRIVER_MODULE, JOB_MODULE
from prefect_elastic_train.core.tpu_slices import slice_shape

from .sizing import Demand, Node


def cluster_nodes() -> list[Node]:
    """Return the living nodes of the Ray cluster that do not drain, with their resources and labels."""
    state = ray._private.state
    available = state.available_resources_per_node()
    draining = state.state.get_draining_nodes()
    return [
        Node(
            id=node["NodeID"],
            total=node["Resources"],
            # A new node has not published its available resources yet.
            available=available.get(node["NodeID"], node["Resources"]),
            labels=node["Labels"],
        )
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in draining
    ]


def remove_orphaned_placement_groups() -> int:
    """Remove the Ray placement groups that dead drivers of this package have left in the cluster; return their number.

    Ray removes them when driver and controller die. But a controller outlives its driver by a moment. A placement group
    that it requests then comes after Ray's check, and would exist for as long as the cluster does (Ray 2.60).
    """
    state = ray._private.state
    dead = {
        job["JobID"]
        for job in state.jobs()
        if job["IsDead"] and any(module in job["Entrypoint"] for module in (DRIVER_MODULE, JOB_MODULE))
    }
    table = state.state._connect_and_get_accessor().get_placement_group_table() if dead else []
    orphans = [
        group
        for group in map(PlacementGroupTableData.FromString, table)
        if group.creator_job_id.hex() in dead
        and group.state != PlacementGroupTableData.REMOVED
        and state.actors(group.creator_actor_id.hex()).get("State") == "DEAD"
    ]
    for group in orphans:
        remove_placement_group(PlacementGroup(ray.PlacementGroupID(group.placement_group_id)))
    return len(orphans)


def demand_of(scaling_config: Any) -> Demand:
    """Return the resources, the number and the placement of a run's workers, taken from Ray's scaling config."""
    resources = scaling_config._resources_per_worker_not_none
    topology = scaling_config.topology
    selector: Any = scaling_config.label_selector or {}
    by_worker = isinstance(selector, list)
    return Demand(
        resources=resources,
        min_workers=scaling_config.min_workers,
        max_workers=scaling_config.max_workers,
        labels={} if by_worker else selector,
        labels_by_worker=selector if by_worker else (),
        strategy=scaling_config.placement_strategy,
        shape=slice_shape(topology, scaling_config.accelerator_type, resources) if topology else None,
    )
