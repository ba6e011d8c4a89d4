"""What a TPU slice holds, and which numbers of workers fill whole slices: Ray reserves all hosts of a slice or none.

Uses ``ray._private.accelerators.tpu``, where Ray itself looks when it places workers: the public module does not tell
which types and topologies there are (``VALID_TPU_TYPES``, ``VALID_TPU_TOPOLOGY``), how many chips a process may take
(``TPU_VALID_CHIP_OPTIONS``), nor how a pod type is spelt in the labels of nodes (``infer_tpu_pod_type_from_topology``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ray._private.accelerators import tpu
from ray.util.tpu import get_tpu_version_from_type, get_tpu_worker_resources


@dataclass(frozen=True)
class SliceShape:
    """A TPU slice, and how many workers fill it, 1 or more.

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
    """Return the shape of a slice whose workers hold what ``resources_per_worker`` says, by default a host's chips."""
    accelerator_type, topology = tpu_accelerator_type(accelerator_type), topology.strip().lower()
    # Ray refuses a topology that is not in its table only when it reserves a slice, in the middle of a run.
    known = tpu.VALID_TPU_TOPOLOGY[get_tpu_version_from_type(accelerator_type)]
    if topology not in known:
        shown = ", ".join(sorted(known, key=lambda name: (len(name), name)))
        raise ValueError(f"topology {topology!r} does not exist for {accelerator_type}; use one of {shown}")
    hosts, resources_of_host = get_tpu_worker_resources(topology, accelerator_type)
    host = int(resources_of_host["TPU"])
    chips_per_worker = resources_per_worker.get("TPU", host)
    check_chips(chips_per_worker)
    if host % chips_per_worker:
        raise ValueError(
            f"resources_per_worker asks for TPU {chips_per_worker:g}, and a host of {accelerator_type} {topology} has "
            f"{host}; use a number that fills it evenly, or leave TPU out for all of them"
        )
    return SliceShape(
        topology=topology,
        accelerator_type=accelerator_type,
        pod_type=str(tpu.infer_tpu_pod_type_from_topology(topology, accelerator_type)),
        chips=hosts * host,
        workers=int(hosts * host // chips_per_worker),
        chips_per_worker=int(chips_per_worker),
    )


def tpu_accelerator_type(accelerator_type: str) -> str:
    """Return a TPU type as Ray's nodes spell it, or raise a ValueError: Ray waits forever for a node with ``v6e``."""
    try:
        return f"TPU-{get_tpu_version_from_type(accelerator_type.strip()).upper()}"
    except ValueError:
        known = ", ".join(f"TPU-{version.upper()}" for version in tpu.VALID_TPU_TYPES)
        raise ValueError(
            f"accelerator_type {accelerator_type!r} is no TPU type that Ray knows; use one of {known} "
            "(TPU-V5LITEPOD is Google's v5e)"
        ) from None


def check_chips(chips_per_worker: float) -> None:
    """Raise a ValueError if a process cannot hold so many chips."""
    if chips_per_worker not in tpu.TPU_VALID_CHIP_OPTIONS:
        options = ", ".join(map(str, tpu.TPU_VALID_CHIP_OPTIONS))
        raise ValueError(f"resources_per_worker asks for TPU {chips_per_worker:g}; Ray gives a worker one of {options}")
