"""What runs in the process of a standby worker, or in a task that looks for what one needs.

Uses ``ray.train.v2._internal`` and ``ray._private.worker``: a worker group asks a worker's process about itself, and
that process asks Ray for the devices that are its own.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

import psutil
import ray
from ray.train.v2._internal.execution.worker_group.worker import ActorMetadata, RayTrainWorker

from prefect_elastic_train.elastic.warming import WORKER_MODULES, import_ahead, step_of_torch

_GONE_SECONDS = 10.0  # for which a worker waits for the exit of those that had its devices


def warm_up(visible: str, framework: str, cpus: float) -> tuple[int, ActorMetadata]:
    """Do what comes before the first step of a loop, and return what :func:`about` does.

    The loop itself is left alone: what its module does when it is imported may depend on the rank, or be meant for a
    process that has joined the others.
    """
    # Ray tells an actor without CPUs to use one thread; this one is told what Ray tells one with so many CPUs.
    variables = dict(ray.get_runtime_context().runtime_env.get("env_vars", {}))
    with suppress(psutil.Error):  # the raylet's
        variables = {**psutil.Process(os.getppid()).environ(), **variables}
    os.environ["OMP_NUM_THREADS"] = variables.get("OMP_NUM_THREADS") or str(max(1, int(cpus)))
    if visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    if framework == "jax":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # read when JAX is imported; on GPUs there is no standby
    import_ahead(WORKER_MODULES.get(framework, ()))
    if framework == "torch":
        step_of_torch()
    return about()


def about() -> tuple[int, ActorMetadata]:
    return psutil.Process().memory_info().rss, RayTrainWorker().get_metadata()


def own_devices() -> dict[str, list[Any]]:
    return {name: ids for name, ids in ray.get_runtime_context().get_accelerator_ids().items() if ids}


def wait_for_devices(before: list[tuple[str, int]]) -> None:
    """Wait for the exit of the processes that had this one's devices ``before``, given as node and process id.

    That frees the devices' memory, which may take a GPU driver seconds.
    """
    if own_devices():
        node_id = ray.get_runtime_context().get_node_id()
        psutil.wait_procs([other for other in psutil.process_iter() if (node_id, other.pid) in before], _GONE_SECONDS)


def use_devices(devices: dict[str, list[Any]]) -> None:
    """Have Ray report these devices as this process's own; raise if the process does not see them."""
    if devices:
        torch: Any = sys.modules.get("torch")
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        is_real = torch is not None and (torch.version.cuda or torch.version.hip)  # else they are pretended ones
        if is_real and torch.cuda.device_count() < len(seen):
            raise RuntimeError(f"of the devices {', '.join(seen)} it sees {torch.cuda.device_count()}")
        worker = ray._private.worker.global_worker
        worker.get_accelerator_ids_for_accelerator_resource = lambda name, regex: list(devices.get(name, []))
