"""Ray's configuration objects, made from the settings of a run.

Uses ``_resources_per_worker_not_none`` of Ray's ``ScalingConfig``, which alone has the resources of a worker when the
user gives none.
"""

from typing import Any

from ray.train import CheckpointConfig, LoggingConfig, RunConfig, ScalingConfig

from prefect_elastic_train.controller.ray_compatibility import failure_config
from prefect_elastic_train.core.request import DriverSpec
from prefect_elastic_train.core.settings import ScalingSettings


def scaling_config(scaling: ScalingSettings) -> ScalingConfig:
    """Return Ray's ``ScalingConfig`` for the scaling settings of a run.

    It is elastic even if ``min_workers`` equals ``max_workers``, so that Ray Train uses our scaling policy.
    """
    resources = dict(scaling.resources_per_worker)
    topology = ""
    accelerator_type = scaling.accelerator_type
    # For TPUs, use Ray's spelling and complete the resources: Ray completes them only if none are given, and
    # differently where it counts (a worker without CPU takes none) and where it reserves a slice (it takes one).
    if scaling.accelerator == "tpu":
        from prefect_elastic_train.core.tpu_slices import slice_shape, tpu_accelerator_type

        if scaling.topology:
            shape = slice_shape(scaling.topology, accelerator_type, resources)
            topology = shape.topology
            accelerator_type = shape.accelerator_type
            resources |= {"CPU": resources.get("CPU") or 1, "TPU": shape.chips_per_worker}
        else:
            resources.setdefault("TPU", 1)
            accelerator_type = tpu_accelerator_type(accelerator_type) if accelerator_type else ""
    return ScalingConfig(
        num_workers=(scaling.min_workers, scaling.max_workers),
        use_gpu=scaling.accelerator == "gpu",
        use_tpu=scaling.accelerator == "tpu",
        resources_per_worker=resources or None,
        placement_strategy=scaling.placement_strategy,
        label_selector=scaling.label_selector or None,
        accelerator_type=accelerator_type or None,
        topology=topology or None,
        elastic_resize_monitor_interval_s=scaling.resize_check_interval_seconds,
    )


def resources_per_worker(scaling: ScalingSettings) -> dict[str, float]:
    """Return the resources that Ray reserves for each worker with these scaling settings."""
    return dict(scaling_config(scaling)._resources_per_worker_not_none)


def run_config(spec: DriverSpec, storage_path: str, storage_filesystem: Any) -> RunConfig:
    """Return Ray's ``RunConfig`` for a spec, with the run directory ``<storage_path>/<run name>`` on a filesystem."""
    return RunConfig(
        name=spec.request.run_name,
        storage_path=storage_path,
        storage_filesystem=storage_filesystem,
        failure_config=failure_config(spec.failures),
        checkpoint_config=CheckpointConfig(
            num_to_keep=spec.checkpoints.keep,
            checkpoint_score_attribute=spec.checkpoints.score_attribute or None,
            checkpoint_score_order=spec.checkpoints.score_order,
        ),
        worker_runtime_env=spec.request.worker_runtime_env or None,
        # Ray Train logs each report of each rank. Our events contain them once.
        logging_config=LoggingConfig(log_level="WARNING"),
    )
