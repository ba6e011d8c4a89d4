"""Functions that run in the process of a standby worker, and a worker's wait for its devices.

Uses ``ray.train.v2._internal`` and ``ray._private.worker``: a worker group reads the metadata of each worker's process,
and that process asks Ray for its own devices.
"""

import os
import sys
from typing import Any, NamedTuple

import psutil
import ray
from ray.train.v2._internal.execution.worker_group.worker import ActorMetadata, RayTrainWorker

from .preimports import WORKER_MODULES, import_ahead, memory_left, run_torch_step

_EXIT_SECONDS = 10.0  # for which a worker waits for the exit of those that used its devices


class ProcessState(NamedTuple):
    """The memory and Ray Train's metadata of a standby worker's process, once it is warm."""

    size_bytes: int
    metadata: ActorMetadata


def memory_and_threads() -> tuple[float, str]:
    """Return the memory in bytes that standby workers may use on this worker's node, and its ``OMP_NUM_THREADS``."""
    return memory_left(), os.environ.get("OMP_NUM_THREADS", "1")


def warm_up(visible_devices: str, framework: str, threads: str) -> ProcessState:
    """Import in this standby worker what a train loop needs, run a torch step, and return the state of the process.

    The train loop itself is not imported: its module may do something that depends on the rank, or that needs the
    process group.

    Args:
        visible_devices: Value of ``CUDA_VISIBLE_DEVICES``; empty to leave it as it is.
        framework: Framework of the train loop, such as ``"torch"``, or ``"none"``.
        threads: ``OMP_NUM_THREADS`` of a worker. Ray sets one thread for an actor without CPUs.
    """
    os.environ["OMP_NUM_THREADS"] = threads
    if visible_devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices
    if framework == "jax":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # read when JAX is imported; there are no JAX standbys on GPUs
    import_ahead(WORKER_MODULES.get(framework, ()))
    if framework == "torch":
        run_torch_step()
    return process_state()


def process_state() -> ProcessState:
    """Return the resident memory of this process and its metadata for Ray Train."""
    return ProcessState(psutil.Process().memory_info().rss, RayTrainWorker().get_metadata())


def assigned_devices() -> dict[str, list[Any]]:
    """Return the ids of the devices that Ray has assigned to this process, by resource name."""
    return {name: ids for name, ids in ray.get_runtime_context().get_accelerator_ids().items() if ids}


def wait_for_devices(previous: list[tuple[str, int]]) -> None:
    """Wait until the processes of the previous worker group on this node have exited, if this worker has devices.

    A GPU's memory is free only then, which may take the driver of the GPU some seconds.

    Args:
        previous: Node id and process id of each worker of the previous worker group.
    """
    if previous and assigned_devices():
        node_id = ray.get_runtime_context().get_node_id()
        psutil.wait_procs([other for other in psutil.process_iter() if (node_id, other.pid) in previous], _EXIT_SECONDS)


def set_assigned_devices(devices: dict[str, list[Any]]) -> None:
    """Make Ray report these devices as assigned to this process.

    Args:
        devices: Ids of the devices, by resource name.

    Raises:
        RuntimeError: torch sees fewer devices than ``CUDA_VISIBLE_DEVICES`` has.
    """
    if devices:
        torch: Any = sys.modules.get("torch")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        has_gpus = torch and (torch.version.cuda or torch.version.hip)  # tests pretend GPUs
        if has_gpus and torch.cuda.device_count() < len(visible):
            raise RuntimeError(f"torch sees {torch.cuda.device_count()} of the devices {', '.join(visible)}")
        worker = ray._private.worker.global_worker
        worker.get_accelerator_ids_for_accelerator_resource = lambda name, regex: list(devices.get(name, []))
