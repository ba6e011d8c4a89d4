"""TPU slices: their size, and the numbers of workers that fill whole slices. Ray reserves all hosts of a slice or none.

Belongs to all processes; the flow process loads it for TPUs only.

Uses ``ray._private.accelerators.tpu``, as Ray does when it places workers. The public module lacks the valid types and
topologies (``VALID_TPU_TYPES``, ``VALID_TPU_TOPOLOGY``), the numbers of chips that a process may hold
(``TPU_VALID_CHIP_OPTIONS``), and the spelling of a pod type in node labels (``infer_tpu_pod_type_from_topology``).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ray._private.accelerators import tpu as ray_tpu
from ray.util.tpu import get_tpu_version_from_type, get_tpu_worker_resources


@dataclass(frozen=True)
class SliceShape:
    """A TPU slice and the number of workers that fill it, at least 1.

    ``pod_type`` is the label ``ray.io/tpu-pod-type`` of its nodes, such as ``"v6e-16"``. Chips are counted as Ray's
    resource ``TPU``: physical ones times ``RAY_TPU_RESOURCE_PER_CHIP``, if that is set.
    """

    topology: str
    accelerator_type: str
    pod_type: str
    chips: int
    workers: int
    chips_per_worker: int


def slice_shape(topology: str, accelerator_type: str, resources_per_worker: Mapping[str, float]) -> SliceShape:
    """Return the shape of a TPU slice and the number of workers that fill it, for workers with these resources.

    Without TPU among the resources, a worker gets all chips of a host.

    Raises:
        ValueError: Ray has no such slice, or workers with these resources do not fill its hosts.
    """
    accelerator_type = tpu_accelerator_type(accelerator_type)
    topology = topology.lower()
    # Ray refuses an unknown topology only when it reserves a slice, in the middle of a run.
    known = ray_tpu.VALID_TPU_TOPOLOGY[get_tpu_version_from_type(accelerator_type)]
    if topology not in known:
        options = ", ".join(sorted(known, key=lambda name: (len(name), name)))
        raise ValueError(f"topology {topology!r} does not exist for {accelerator_type}; use one of {options}")
    hosts, host_resources = get_tpu_worker_resources(topology, accelerator_type)
    chips_per_host = int(host_resources["TPU"])
    chips_per_worker = resources_per_worker.get("TPU", chips_per_host)
    check_chips(chips_per_worker)
    if chips_per_host % chips_per_worker:
        raise ValueError(
            f"resources_per_worker requests TPU {chips_per_worker:g}, and a host of {accelerator_type} {topology} has "
            f"{chips_per_host}; use a number that divides it, or leave TPU out to use all of them"
        )
    return SliceShape(
        topology=topology,
        accelerator_type=accelerator_type,
        pod_type=str(ray_tpu.infer_tpu_pod_type_from_topology(topology, accelerator_type)),
        chips=hosts * chips_per_host,
        workers=int(hosts * chips_per_host // chips_per_worker),
        chips_per_worker=int(chips_per_worker),
    )


def tpu_accelerator_type(accelerator_type: str) -> str:
    """Return a TPU type such as ``v6e`` in the spelling of Ray's nodes, such as ``TPU-V6E``.

    With another spelling, Ray would wait forever for a node.

    Raises:
        ValueError: Ray does not know the type.
    """
    try:
        return f"TPU-{get_tpu_version_from_type(accelerator_type).upper()}"
    except ValueError:
        known = ", ".join(f"TPU-{version.upper()}" for version in ray_tpu.VALID_TPU_TYPES)
        raise ValueError(
            f"accelerator_type {accelerator_type!r} is not a TPU type of Ray; use one of {known} "
            "(TPU-V5LITEPOD is Google's v5e)"
        ) from None


def check_chips(chips_per_worker: float) -> None:
    """Raise a ValueError if Ray cannot give a worker this number of TPU chips."""
    if chips_per_worker not in ray_tpu.TPU_VALID_CHIP_OPTIONS:
        options = ", ".join(map(str, ray_tpu.TPU_VALID_CHIP_OPTIONS))
        raise ValueError(f"resources_per_worker requests TPU {chips_per_worker:g}; Ray gives a worker one of {options}")
