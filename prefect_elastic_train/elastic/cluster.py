"""What settings are in Ray's words; the cluster as it is now, its nodes' way to the storage, and its head's answer.

Uses ``ray._private.state``, as Ray Train does: there is no public way to see which nodes are being drained, what each
of them has free, or whose a placement group is. Uses ``ray._raylet`` and ``ray._private.services``: ``ray.init``
answers a refused token with the same "Failed to connect" as a dead head, waits without a bound of its own for something
that accepts connections and says nothing, and does not tell what it takes for the address ``"auto"``. And
``ScalingConfig`` alone knows what a worker takes when the user says nothing (``_resources_per_worker_not_none``).
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Mapping
from typing import Any

import ray
from ray.core.generated.gcs_pb2 import PlacementGroupTableData
from ray.train import CheckpointConfig, FailureConfig, LoggingConfig, RunConfig, ScalingConfig
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from prefect_elastic_train.core.request import DRIVER_MODULE, JOB_MODULE, DriverSpec
from prefect_elastic_train.core.settings import ScalingSettings
from prefect_elastic_train.core.slices import slice_shape, tpu_accelerator_type
from prefect_elastic_train.elastic.sizing import Demand, Node
from prefect_elastic_train.storage.preflight import Probe

logger = logging.getLogger("prefect_elastic_train.driver")

_ASK_SECONDS = 5
_TRY_SECONDS = 30.0  # for all nodes together to try the storage: one that says nothing until then may be busy or gone


def ask_head(address: str, timeout_seconds: float) -> Exception | None:
    """Ask the head at ``host:port``, with the token of this process, for so long; return why it does not let us in."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    answers: list[Exception | None] = []

    def ask() -> None:
        try:
            GcsClient(address=address).internal_kv_keys(b"session_name", timeout=_ASK_SECONDS)
            answers.append(None)
        except Exception as error:  # noqa: BLE001 - whatever else it says is no welcome
            answers.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    return answers[0] if answers else TimeoutError("it says nothing")


def find_address() -> str:
    """Return ``host:port`` of the cluster that ``"auto"`` means: ``RAY_ADDRESS``, or the only one on this machine."""
    from ray._private.services import canonicalize_bootstrap_address_or_die

    return str(canonicalize_bootstrap_address_or_die("auto"))


def cluster_nodes() -> list[Node]:
    """Return the living nodes of the cluster as they are now."""
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


def remove_orphaned_groups() -> int:
    """Remove placement groups of our dead drivers; return how many there were.

    Ray does so when driver and controller die. But a controller outlives its driver by some moments, and what it asks
    for in them comes after Ray's look, and would be held for as long as the cluster lives (Ray 2.60).
    """
    state = ray._private.state
    ended = {job["JobID"]: job["Entrypoint"] for job in state.jobs() if job["IsDead"]}
    dead = {job for job, command in ended.items() if DRIVER_MODULE in command or JOB_MODULE in command}
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


def demand_of(scaling_config: ScalingConfig) -> Demand:
    """Return what the workers of a scaling configuration ask for."""
    resources = dict(scaling_config._resources_per_worker_not_none)
    shape = None
    if scaling_config.use_tpu and scaling_config.topology and scaling_config.accelerator_type:
        shape = slice_shape(scaling_config.topology, scaling_config.accelerator_type, resources)
    return Demand(
        resources=resources,
        min_workers=scaling_config.min_workers,
        max_workers=scaling_config.max_workers,
        labels=scaling_config.label_selector or {},
        strategy=scaling_config.placement_strategy,
        shape=shape,
    )


def try_from_nodes(probe: Probe, resources_per_worker: Mapping[str, float]) -> None:
    """Try a storage from each node that can hold a worker, bar the driver's own; raise the fault that one has."""
    own = ray.get_runtime_context().get_node_id()
    # Without CPUs, so that it starts on a node that others fill.
    task = ray.remote(num_cpus=0, max_retries=0)(lambda probe: probe.try_from(socket.gethostname()))
    asked = [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(probe)
        for node in cluster_nodes()
        if node.id != own and all(node.total.get(name, 0) >= amount for name, amount in resources_per_worker.items())
    ]
    done, silent = ray.wait(asked, num_returns=len(asked), timeout=_TRY_SECONDS) if asked else ([], [])
    for answer in done:
        try:
            ray.get(answer)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayError as error:
            logger.warning("A node did not try the storage: %s", error)
    for answer in silent:
        ray.cancel(answer, force=True)
    if silent:
        logger.warning("%d of %d nodes did not try the storage within %g s", len(silent), len(asked), _TRY_SECONDS)


def scaling_config(scaling: ScalingSettings) -> ScalingConfig:
    """Return Ray's ``ScalingConfig``: always elastic, also when min equals max, so that our policy is in charge."""
    resources = dict(scaling.resources_per_worker)
    topology = ""
    accelerator_type = scaling.accelerator_type
    # Of TPUs all in Ray's own spelling: it completes the resources of a worker only if none are given, and not the same
    # where it counts (a worker without CPU takes none) and where it reserves a slice (it takes one).
    if scaling.topology:
        shape = slice_shape(scaling.topology, accelerator_type, resources)
        topology = shape.topology
        accelerator_type = shape.accelerator_type
        resources |= {"CPU": resources.get("CPU") or 1, "TPU": shape.chips_per_worker}
    elif scaling.accelerator == "tpu":
        resources.setdefault("TPU", 1)
        accelerator_type = tpu_accelerator_type(accelerator_type) if accelerator_type else ""
    return ScalingConfig(
        num_workers=(scaling.min_workers, scaling.max_workers),
        use_gpu=scaling.accelerator == "gpu",
        use_tpu=scaling.accelerator == "tpu",
        resources_per_worker=resources or None,
        placement_strategy=scaling.placement_strategy,
        label_selector=dict(scaling.label_selector) or None,
        accelerator_type=accelerator_type or None,
        topology=topology or None,
        elastic_resize_monitor_interval_s=scaling.resize_check_interval_seconds,
    )


def resources_per_worker(scaling: ScalingSettings) -> dict[str, float]:
    """Return what Ray reserves for each worker."""
    return dict(scaling_config(scaling)._resources_per_worker_not_none)


def run_config(spec: DriverSpec, storage_path: str, storage_filesystem: Any) -> RunConfig:
    """Return Ray's ``RunConfig`` for a run directory ``<storage_path>/<run name>`` on our filesystem."""
    return RunConfig(
        name=spec.request.run_name,
        storage_path=storage_path,
        storage_filesystem=storage_filesystem,
        failure_config=FailureConfig(
            max_failures=spec.failures.max_failures,
            max_preemption_failures=spec.failures.max_preemption_failures,
            relax_collectives_on_preemption=spec.failures.relax_collectives_on_preemption,
            preemption_grace_s=spec.failures.preemption_grace_seconds,
        ),
        checkpoint_config=CheckpointConfig(
            num_to_keep=spec.checkpoints.keep,
            checkpoint_score_attribute=spec.checkpoints.score_attribute or None,
            checkpoint_score_order=spec.checkpoints.score_order,
        ),
        worker_runtime_env=spec.request.worker_runtime_env or None,
        # Ray Train logs every report of every rank; our events tell the same once.
        logging_config=LoggingConfig(log_level="WARNING"),
    )
