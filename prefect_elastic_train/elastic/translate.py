"""The one place where settings become Ray's configuration.

Uses ``_resources_per_worker_not_none`` of ``ray.train.ScalingConfig``, which knows what a worker takes when the user
says nothing, and ``_py_driver_sys_path`` of ``ray.job_config.JobConfig``: Ray fills it from its driver's own
``sys.path``, and ours is not the user's script.
"""

from __future__ import annotations

from typing import Any

from ray.job_config import JobConfig
from ray.train import CheckpointConfig, FailureConfig, LoggingConfig, RunConfig, ScalingConfig

from prefect_elastic_train.core.settings import CheckpointSettings, FailureSettings, ScalingSettings
from prefect_elastic_train.core.slices import slice_shape, tpu_accelerator_type


def scaling_config(scaling: ScalingSettings) -> ScalingConfig:
    """Return Ray's ``ScalingConfig``: always elastic, also when min equals max, so that our policy is in charge."""
    of_tpus = _of_tpus(scaling) if scaling.accelerator == "tpu" else {}
    optional = {
        "resources_per_worker": dict(scaling.resources_per_worker) or None,
        "accelerator_type": scaling.accelerator_type or None,
    }
    return ScalingConfig(
        num_workers=(scaling.min_workers, scaling.max_workers),
        use_gpu=scaling.accelerator == "gpu",
        use_tpu=scaling.accelerator == "tpu",
        placement_strategy=scaling.placement_strategy,
        label_selector=dict(scaling.label_selector) or None,
        elastic_resize_monitor_interval_s=scaling.resize_check_interval_seconds,
        **optional | of_tpus,
    )


def _of_tpus(scaling: ScalingSettings) -> dict[str, Any]:
    """Return what Ray reserves TPUs by, in its own spelling and with nothing left out.

    Ray completes the resources of a worker only if none are given, and not the same where it counts (a worker
    without CPU takes none) and where it reserves a slice (it takes one).
    """
    given = dict(scaling.resources_per_worker)
    if scaling.topology:
        shape = slice_shape(scaling.topology, scaling.accelerator_type, given)
        return {
            "topology": shape.topology,
            "accelerator_type": shape.accelerator_type,
            "resources_per_worker": given | {"CPU": given.get("CPU") or 1, "TPU": shape.chips_per_worker},
        }
    found: dict[str, Any] = {"resources_per_worker": {"TPU": 1} | given}
    if scaling.accelerator_type:
        found["accelerator_type"] = tpu_accelerator_type(scaling.accelerator_type)
    return found


def resources_per_worker(scaling: ScalingSettings) -> dict[str, float]:
    """Return what Ray reserves for each worker."""
    return dict(scaling_config(scaling)._resources_per_worker_not_none)


def job_config(import_paths: list[str]) -> JobConfig:
    """Return Ray's ``JobConfig`` whose processes look for modules in ``import_paths`` too."""
    return JobConfig(_py_driver_sys_path=import_paths)


def run_config(
    *,
    name: str,
    storage_path: str,
    storage_filesystem: Any,
    failures: FailureSettings,
    checkpoints: CheckpointSettings,
    worker_runtime_env: dict[str, Any],
) -> RunConfig:
    """Return Ray's ``RunConfig`` for a run directory ``<storage_path>/<name>`` on our filesystem."""
    return RunConfig(
        name=name,
        storage_path=storage_path,
        storage_filesystem=storage_filesystem,
        failure_config=FailureConfig(
            max_failures=failures.max_failures,
            max_preemption_failures=failures.max_preemption_failures,
            relax_collectives_on_preemption=failures.relax_collectives_on_preemption,
            preemption_grace_s=failures.preemption_grace_seconds,
        ),
        checkpoint_config=CheckpointConfig(
            num_to_keep=checkpoints.keep,
            checkpoint_score_attribute=checkpoints.score_attribute or None,
            checkpoint_score_order=checkpoints.score_order,
        ),
        worker_runtime_env=worker_runtime_env or None,
        # Ray Train logs every report of every rank; our events tell the same once.
        logging_config=LoggingConfig(log_level="WARNING"),
    )
