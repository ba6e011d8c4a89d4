"""How many workers a cluster holds: pure functions over plain values.

Ray's elastic policy counts what its coordinator reserves, from the nodes' total resources: what another job holds
counts as free, a node that is being drained counts, and fractions are rounded down by binary floating point. Here a
worker counts where it fits now, beside what others hold, and a TPU slice counts whole or not at all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefect_elastic_train.core.slices import SliceShape

#: Ray counts resources in ten-thousandths.
_UNITS = 10_000
#: A share of these comes from one of a node's devices, never from two.
_DEVICES = ("GPU", "TPU", "neuron_cores", "NPU", "HPU")


@dataclass(frozen=True)
class Node:
    """A living node of the cluster: its resources, what of them nobody holds, and whether it has been told to go."""

    id: str
    total: Mapping[str, float]
    available: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    draining: bool = False


@dataclass(frozen=True)
class Demand:
    """What the workers of a run ask for: resources of each, Ray's label selector and placement strategy, TPU slices."""

    resources: Mapping[str, float]
    min_workers: int
    max_workers: int
    labels: Mapping[str, str] = field(default_factory=dict)
    strategy: str = "PACK"
    shape: SliceShape | None = None


@dataclass(frozen=True)
class Slice:
    """The living nodes of a TPU slice, and why they are of no use, if so."""

    name: str
    nodes: tuple[Node, ...]
    problem: str


def head_resource(pod_type: str) -> str:
    """Return the resource of a slice's host 0 that Ray and its users take to reserve the slice."""
    return f"TPU-{pod_type}-head"


def possible_workers(
    nodes: Collection[Node],
    demand: Demand,
    held: Mapping[str, int] | None = None,
    reserved: Collection[Mapping[str, float]] | None = None,
) -> int:
    """Return how many workers of a run could be placed now, at most ``demand.max_workers``.

    Args:
        nodes: The living nodes.
        demand: What the workers ask for.
        held: Workers that the run itself has on each node, which give way to the new group.
        reserved: What the arbiter between several trainings reserves for the run on each node, None without one.
    """
    most = demand.max_workers
    if reserved is not None and any(demand.resources.values()):
        most = min(most, sum(_fitting(of_node, demand.resources) for of_node in reserved))
    if demand.shape is not None:
        free = sum(not found.problem for found in slices_of(nodes, demand, held))
        return min(most // demand.shape.workers, free) * demand.shape.workers
    if not any(demand.resources.values()):
        return most
    on_nodes = [_workers_on(node, demand, held or {}) for node in nodes]
    if demand.strategy == "STRICT_SPREAD":
        return min(most, sum(count > 0 for count in on_nodes))
    return min(most, max(on_nodes, default=0) if demand.strategy == "STRICT_PACK" else sum(on_nodes))


def slices_of(nodes: Collection[Node], demand: Demand, held: Mapping[str, int] | None = None) -> list[Slice]:
    """Return the TPU slices of the demanded shape, in order of their names, usable or not."""
    shape = demand.shape
    assert shape is not None
    members: dict[str, list[Node]] = {}
    for node in nodes:
        if node.labels.get("ray.io/tpu-pod-type") == shape.pod_type:
            is_whole = node.total.get("TPU", 0) >= shape.chips
            name = node.id if is_whole else node.labels.get("ray.io/tpu-slice-name", "")
            if name:
                members.setdefault(name, []).append(node)
    return [Slice(name, tuple(hosts), _problem(hosts, demand, held or {})) for name, hosts in sorted(members.items())]


def describe_missing(nodes: Collection[Node], demand: Demand, possible: int) -> str:
    """Say in one line what a start waits for."""
    lacking, shape = demand.min_workers - possible, demand.shape
    if shape is None:
        return f"{lacking} more worker(s) with {_listed(demand.resources)} each"
    problems = [f"{found.name}: {found.problem}" for found in slices_of(nodes, demand) if found.problem]
    return (
        f"{-(-lacking // shape.workers)} more whole slice(s) {shape.accelerator_type} {shape.topology} of "
        f"{shape.workers} worker(s) each ({'; '.join(problems[:10]) or 'none other is there'})"
    )


def _problem(hosts: Collection[Node], demand: Demand, held: Mapping[str, int]) -> str:
    """Say why a slice cannot be used, empty if it can."""
    shape = demand.shape
    assert shape is not None
    chips = sum(host.total.get("TPU", 0) for host in hosts)
    if chips != shape.chips:
        return f"{chips:g} of {shape.chips} chips are there"
    if any(host.draining for host in hosts):
        return "a host of it is being drained"
    head = head_resource(shape.pod_type)
    has_head = any(held.get(host.id) or host.available.get(head) for host in hosts if host.total.get(head))
    workers = sum(_workers_on(host, demand, held) for host in hosts)
    if workers < shape.workers or (len(hosts) > 1 and not has_head):
        return f"held by another job, or without {_listed(demand.resources)} for each worker"
    return ""


def _workers_on(node: Node, demand: Demand, held: Mapping[str, int]) -> int:
    """Return how many workers fit on a node beside what others hold there."""
    if node.draining or not _satisfies(node.labels, demand.labels):
        return 0
    own = held.get(node.id, 0)
    free = {
        name: min(node.available.get(name, 0) + own * amount, node.total.get(name, 0))
        for name, amount in demand.resources.items()
    }
    return _fitting(free, demand.resources, devices=_DEVICES)


def _fitting(free: Mapping[str, float], resources: Mapping[str, float], devices: Collection[str] = ()) -> int:
    """Return how many workers fit into what is free; of a device that is shared, each takes part of one."""
    counts = []
    for name, amount in resources.items():
        units, there = round(amount * _UNITS), round(free.get(name, 0) * _UNITS)
        if units and units < _UNITS and name in devices:
            counts.append(there // _UNITS * (_UNITS // units) + there % _UNITS // units)
        elif units:
            counts.append(there // units)
    return max(0, min(counts, default=0))


def _satisfies(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Return whether labels satisfy Ray's label selector: ``value``, ``!value``, ``in(a, b)`` or ``!in(a, b)``."""
    for name, wanted in selector.items():
        listed = wanted.removeprefix("!").removeprefix("in(").removesuffix(")")
        if (labels.get(name) in [value.strip() for value in listed.split(",")]) == wanted.startswith("!"):
            return False
    return True


def _listed(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={amount:g}" for name, amount in resources.items())
