"""What a TPU slice holds, and which numbers of workers fill whole slices.

A slice is atomic: Ray reserves all of its hosts or none. What it holds is told by ``ray.util.tpu``.

Uses ``ray._private.accelerators.tpu``, where Ray itself looks when it places workers: the public module does not tell
which types and topologies there are (``VALID_TPU_TYPES``, ``VALID_TPU_TOPOLOGY``), how many chips a process may take
(``TPU_VALID_CHIP_OPTIONS``), how many the smaller host has (``DEFAULT_TPU_NUM_CHIPS_PER_HOST``), nor how a pod type is
spelt in the labels of nodes (``infer_tpu_pod_type_from_topology``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

#: What Google calls a type that Ray knows by another name.
_OTHER_NAMES = {"v5litepod": " (v5e)"}

_TOPOLOGIES_SHOWN = 12


@dataclass(frozen=True)
class SliceShape:
    """A TPU slice, and how workers fill it.

    Attributes:
        topology: As Ray spells it, such as ``"4x4"``.
        accelerator_type: As Ray's nodes spell it, such as ``"TPU-V6E"``.
        pod_type: The label ``ray.io/tpu-pod-type`` of the slice's nodes, such as ``"v6e-16"``.
        chips: Chips of a slice, as Ray counts its resource ``TPU``: physical chips times
            ``RAY_TPU_RESOURCE_PER_CHIP``, if that is set.
        workers: Workers that fill a slice, 1 or more.
        chips_per_worker: Chips of each worker, counted as ``chips``.
    """

    topology: str
    accelerator_type: str
    pod_type: str
    chips: int
    workers: int
    chips_per_worker: int

    def __str__(self) -> str:
        return f"{self.accelerator_type} {self.topology}"


def slice_shape(topology: str, accelerator_type: str, resources_per_worker: Mapping[str, float]) -> SliceShape:
    """Give the shape of a slice whose workers hold what ``resources_per_worker`` says.

    Args:
        topology: TPU topology, such as ``"4x4"``.
        accelerator_type: TPU type, such as ``"TPU-V6E"`` or ``"v6e"``.
        resources_per_worker: Ray resources of a worker. Without ``TPU``: the chips of a host.

    Raises:
        ValueError: There is no such type or topology, or workers with so many chips do not fill a slice.
    """
    from ray._private.accelerators.tpu import infer_tpu_pod_type_from_topology
    from ray.util.tpu import get_tpu_worker_resources

    accelerator_type = tpu_accelerator_type(accelerator_type)
    topology = _known_topology(topology, accelerator_type)
    hosts, host = _hosts(topology, accelerator_type)
    chips = hosts * host
    chips_per_worker = resources_per_worker.get("TPU", host)
    _check_fits(chips_per_worker, host, chips, f"{accelerator_type} {topology}")
    workers, _ = get_tpu_worker_resources(topology, accelerator_type, {"TPU": chips_per_worker})
    return SliceShape(
        topology=topology,
        accelerator_type=accelerator_type,
        pod_type=str(infer_tpu_pod_type_from_topology(topology, accelerator_type)),
        chips=chips,
        workers=workers,
        chips_per_worker=int(chips_per_worker),
    )


def tpu_accelerator_type(accelerator_type: str) -> str:
    """Give a TPU type as Ray's nodes spell it.

    Ray itself takes ``v6e`` too, and then waits forever for a node with the resource ``accelerator_type:v6e``.

    Raises:
        ValueError: Ray knows no such TPU type.
    """
    from ray._private.accelerators.tpu import VALID_TPU_TYPES
    from ray.util.tpu import get_tpu_version_from_type

    try:
        return f"TPU-{get_tpu_version_from_type(accelerator_type.strip()).upper()}"
    except ValueError:
        known = ", ".join(f"TPU-{version.upper()}{_OTHER_NAMES.get(version, '')}" for version in VALID_TPU_TYPES)
        raise ValueError(
            f"accelerator_type {accelerator_type!r} is no TPU type that Ray knows; use one of {known}"
        ) from None


def check_chips(chips_per_worker: float) -> None:
    """Check that a process may hold so many chips.

    Raises:
        ValueError: Ray gives a process 1, 2, 4 or 8 of them.
    """
    from ray._private.accelerators.tpu import TPU_VALID_CHIP_OPTIONS

    if chips_per_worker not in TPU_VALID_CHIP_OPTIONS:
        raise ValueError(
            f"resources_per_worker asks for TPU {chips_per_worker:g}; Ray gives a worker "
            f"{_one_of(TPU_VALID_CHIP_OPTIONS)} TPUs: ask for one of these"
        )


def check_worker_counts(shape: SliceShape, min_workers: int, max_workers: int) -> None:
    """Check that the fewest and the most workers fill whole slices.

    Raises:
        ValueError: One of them, or both, would leave a slice partly filled.
    """
    counts = {"min_workers": min_workers, "max_workers": max_workers}
    wrong = {name: count for name, count in counts.items() if count % shape.workers}
    if not wrong:
        return
    names = " and ".join(f"{name} ({count})" for name, count in wrong.items())
    allowed = ", ".join(f"{_multiples_around(count, shape.workers)} for {name}" for name, count in wrong.items())
    raise ValueError(
        f"{names} must be {'multiples' if len(wrong) > 1 else 'a multiple'} of {shape.workers}, the workers with TPU "
        f"{shape.chips_per_worker} that fill a slice of {shape} ({shape.chips} TPUs): use {allowed}"
    )


def check_placement(shape: SliceShape, max_workers: int, placement_strategy: str) -> None:
    """Check that Ray can place the workers of slices as it is asked to.

    Raises:
        ValueError: All workers are to be on one host, and do not fit; or each on a host of its own, and they share
            their hosts.
    """
    from ray._private.accelerators.tpu import DEFAULT_TPU_NUM_CHIPS_PER_HOST

    _, host = _hosts(shape.topology, shape.accelerator_type)
    if placement_strategy == "STRICT_PACK" and max_workers * shape.chips_per_worker > host:
        raise ValueError(
            f"placement_strategy 'STRICT_PACK' puts all workers on one host, and {max_workers} workers with TPU "
            f"{shape.chips_per_worker} need more than a host of {shape} has ({host} TPUs): use 'PACK'"
        )
    # Slices 2x4 of v5e and v6e are made of one host with 8 chips or of two with 4; Ray counts with the one.
    smallest = min(host, DEFAULT_TPU_NUM_CHIPS_PER_HOST * shape.chips // _size(shape.topology)[0])
    if placement_strategy == "STRICT_SPREAD" and shape.chips_per_worker < smallest:
        raise ValueError(
            f"placement_strategy 'STRICT_SPREAD' gives each worker a host of its own, and workers with TPU "
            f"{shape.chips_per_worker} share the hosts of {shape} ({smallest} TPUs): use 'SPREAD', or "
            f"TPU {smallest} in resources_per_worker"
        )


def _known_topology(topology: str, accelerator_type: str) -> str:
    # Ray refuses a topology that is not in its table only when it reserves a slice, in the middle of a run.
    from ray._private.accelerators.tpu import VALID_TPU_TOPOLOGY
    from ray.util.tpu import get_tpu_version_from_type

    known = sorted(VALID_TPU_TOPOLOGY[get_tpu_version_from_type(accelerator_type)], key=_size)
    found = topology.strip().lower()
    if found in known:
        return found
    try:
        turned = [other for other in known if sorted(_size(other)[1]) == sorted(_size(found)[1])]
    except ValueError:
        turned = []
    shown = turned or known[:_TOPOLOGIES_SHOWN]
    more = "" if turned or len(known) <= len(shown) else f" or one of {len(known) - len(shown)} larger ones"
    raise ValueError(
        f"topology {topology!r} does not exist for {accelerator_type}; it is the number of chips along each side: "
        f"use {', '.join(shown)}{more}"
    )


def _size(topology: str) -> tuple[int, tuple[int, ...]]:
    sides = tuple(int(side) for side in topology.split("x"))
    return math.prod(sides), sides


def _hosts(topology: str, accelerator_type: str) -> tuple[int, int]:
    """Give how many hosts a slice has, and how many chips each of them has, as Ray counts them."""
    from ray.util.tpu import get_tpu_worker_resources

    hosts, resources = get_tpu_worker_resources(topology, accelerator_type)
    return hosts, int(resources["TPU"])


def _check_fits(chips_per_worker: float, host: int, chips: int, name: str) -> None:
    from ray._private.accelerators.tpu import TPU_VALID_CHIP_OPTIONS

    allowed = [amount for amount in TPU_VALID_CHIP_OPTIONS if host % amount == 0]
    if chips_per_worker in allowed:
        return
    if chips_per_worker > chips:
        problem = f"which is more than a whole slice has ({chips})"
    elif chips_per_worker > host:
        problem = f"which is more than a host of the slice has ({host})"
    elif chips_per_worker <= 0 or chips % chips_per_worker:
        problem = f"which does not divide the {chips} of a slice evenly"
    else:
        problem = f"which Ray does not give to a worker on a host with {host}"
    raise ValueError(
        f"resources_per_worker asks for TPU {chips_per_worker:g} on slices of {name}, {problem}; "
        f"use {_one_of(allowed)}, or leave TPU out for the {host} of a host"
    )


def _multiples_around(count: int, step: int) -> str:
    return _one_of([multiple for multiple in (count // step * step, (count // step + 1) * step) if multiple])


def _one_of(values: tuple[int, ...] | list[int]) -> str:
    texts = [str(value) for value in values]
    return " or ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
