"""How many workers a cluster holds: pure functions over plain values.

Ray's elastic policy counts what its coordinator reserves, from the nodes' total resources: what another job holds
counts as free, a node that is being drained counts, and fractions are rounded down by binary floating point. Here a
worker counts where it fits now, beside what others hold, and a TPU slice counts whole or not at all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefect_elastic_train.core.slices import SliceShape

#: Ray counts resources in ten-thousandths.
_UNITS = 10_000
_HAIR = 1e-9

#: A share of these comes from one of a node's devices, never from two.
_DEVICES = ("GPU", "TPU", "neuron_cores", "NPU", "HPU")

_SLICE_NAME = "ray.io/tpu-slice-name"
_WORKER_ID = "ray.io/tpu-worker-id"
_POD_TYPE = "ray.io/tpu-pod-type"


@dataclass(frozen=True)
class Node:
    """A living node of the cluster.

    Attributes:
        id: Ray's node id.
        total: Its resources.
        available: What of them nobody holds now.
        labels: Its labels.
        draining: Whether it has been told to go.
    """

    id: str
    total: Mapping[str, float]
    available: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    draining: bool = False


@dataclass(frozen=True)
class Demand:
    """What the workers of a run ask for.

    Attributes:
        resources: Of each worker.
        min_workers: Fewest workers to train with.
        max_workers: Most workers.
        labels: Ray's label selector that the node of a worker must satisfy.
        strategy: Ray's placement strategy.
        shape: Shape of the TPU slices that the workers fill, None for anything else.
    """

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
    problem: str = ""


def head_resource(pod_type: str) -> str:
    """Give the resource of a slice's host 0 that Ray and its users take to reserve the slice."""
    return f"TPU-{pod_type}-head"


def could_serve(node: Node, demand: Demand) -> bool:
    """Tell whether workers could be placed on a node, if nobody held anything of it."""
    if demand.shape is not None:
        return node.labels.get(_POD_TYPE) == demand.shape.pod_type
    empty = Node(node.id, node.total, node.total, node.labels)
    return not any(demand.resources.values()) or _workers_on(empty, demand, {}) > 0


def possible_workers(
    nodes: Collection[Node],
    demand: Demand,
    held: Mapping[str, int] | None = None,
    granted: int | None = None,
) -> int:
    """Give how many workers of a run could be placed now, at most ``demand.max_workers``.

    Args:
        nodes: The living nodes.
        demand: What the workers ask for.
        held: Workers that the run itself has on each node, which give way to the new group.
        granted: Workers that the arbiter between several trainings allows, None without one.
    """
    held = held or {}
    most = demand.max_workers if granted is None else min(granted, demand.max_workers)
    if demand.shape is not None:
        per_slice = demand.shape.workers
        if per_slice < 1:
            return 0
        return min(most // per_slice, len(free_slices(nodes, demand, held))) * per_slice
    if not any(demand.resources.values()):
        return most
    fitting = [_workers_on(node, demand, held) for node in nodes]
    if demand.strategy == "STRICT_SPREAD":
        total = sum(count > 0 for count in fitting)
    elif demand.strategy == "STRICT_PACK":
        total = max(fitting, default=0)
    else:
        total = sum(fitting)
    return min(total, most)


def granted_workers(reserved: Collection[Mapping[str, float]], resources: Mapping[str, float], max_workers: int) -> int:
    """Give how many workers fit into what is reserved for them on each node, at most ``max_workers``."""
    needed = {name: _units(amount) for name, amount in resources.items() if _units(amount)}
    if not needed:
        return max_workers
    total = sum(min(_units(node.get(name, 0)) // units for name, units in needed.items()) for node in reserved)
    return min(total, max_workers)


def hair_less(resources: Mapping[str, float]) -> dict[str, float]:
    """Lower each amount that is no whole number by too little for Ray, which counts in ten-thousandths.

    Ray's coordinator counts in binary floating point, and cannot take 0.2 twenty times from 4.
    """
    return {name: amount if amount == int(amount) else amount - _HAIR for name, amount in resources.items()}


def slices_of(nodes: Collection[Node], demand: Demand, held: Mapping[str, int] | None = None) -> list[Slice]:
    """Give the TPU slices of the demanded shape, in order of their names, usable or not."""
    shape, held = demand.shape, held or {}
    if shape is None:
        return []
    members: dict[str, list[Node]] = {}
    for node in nodes:
        if node.labels.get(_POD_TYPE) == shape.pod_type:
            single_host = _units(node.total.get("TPU", 0)) >= _units(shape.chips)
            name = node.id if single_host else node.labels.get(_SLICE_NAME, "")
            if name:
                members.setdefault(name, []).append(node)
    return [
        Slice(name, tuple(sorted(hosts, key=_host_order)), _problem(hosts, demand, held))
        for name, hosts in sorted(members.items())
    ]


def free_slices(nodes: Collection[Node], demand: Demand, held: Mapping[str, int] | None = None) -> list[Slice]:
    """Give the slices that are whole, not about to go, and held by nobody but the run itself."""
    return [found for found in slices_of(nodes, demand, held) if not found.problem]


def describe_missing(
    nodes: Collection[Node], demand: Demand, possible: int, held: Mapping[str, int] | None = None
) -> str:
    """Say in one line what a start waits for."""
    lacking = demand.min_workers - possible
    wanted = _listed(demand.resources)
    if demand.shape is None:
        where = f" on nodes with the labels {_listed(demand.labels)}" if demand.labels else ""
        text = f"{lacking} more worker(s) with {wanted} each{where}"
        if demand.strategy.startswith("STRICT"):
            text += f", placed {demand.strategy}"
        draining = sum(node.draining for node in nodes)
        return f"{text} ({len(nodes)} node(s) are there, {draining} of them draining)" if draining else text
    shape = demand.shape
    slices = -(-lacking // shape.workers) if shape.workers else 0
    text = f"{slices} more whole slice(s) {shape.accelerator_type} {shape.topology} of {shape.workers} worker(s) each"
    problems = [f"{found.name}: {found.problem}" for found in slices_of(nodes, demand, held) if found.problem]
    return f"{text} ({'; '.join(problems[:10])})" if problems else f"{text} (none other is there)"


def _problem(hosts: Sequence[Node], demand: Demand, held: Mapping[str, int]) -> str:
    """Say why a slice cannot be used, empty if it can."""
    shape = demand.shape
    assert shape is not None
    chips = sum(_units(host.total.get("TPU", 0)) for host in hosts)
    if chips != _units(shape.chips):
        return f"{chips / _UNITS:g} of {shape.chips:g} chips are there"
    if len(hosts) > 1 and not any(host.labels.get(_WORKER_ID) == "0" for host in hosts):
        return "its host 0 is not there"
    if any(host.draining for host in hosts):
        return "a host of it is being drained"
    if len(hosts) > 1:
        head = head_resource(shape.pod_type)
        holders = [host for host in hosts if host.total.get(head, 0)]
        if not holders:
            return f"its host 0 has no resource {head}"
        if not any(held.get(host.id) or host.available.get(head, 0) for host in holders):
            return "held by another job"
    per_worker = _units(demand.resources.get("TPU", 0)) or _units(shape.chips_per_worker)
    for host in hosts:
        own = held.get(host.id, 0) * per_worker
        if _units(host.available.get("TPU", 0)) + own < _units(host.total.get("TPU", 0)):
            return "held by another job"
    if sum(_workers_on(host, demand, held) for host in hosts) < shape.workers:
        return f"its hosts have not {_listed(demand.resources)} free for each of {shape.workers} worker(s)"
    return ""


def _workers_on(node: Node, demand: Demand, held: Mapping[str, int]) -> int:
    """Give how many workers fit on a node beside what others hold there."""
    if node.draining or not _satisfies(node.labels, demand.labels):
        return 0
    own = held.get(node.id, 0)
    fitting = []
    for name, amount in demand.resources.items():
        units = _units(amount)
        if units:
            free = min(_units(node.available.get(name, 0)) + own * units, _units(node.total.get(name, 0)))
            if name in _DEVICES and units < _UNITS:
                fitting.append(free // _UNITS * (_UNITS // units) + free % _UNITS // units)
            else:
                fitting.append(free // units)
    return max(0, min(fitting)) if fitting else 0


def _units(amount: float) -> int:
    return round(amount * _UNITS)


def _host_order(host: Node) -> tuple[int, str]:
    number = host.labels.get(_WORKER_ID, "")
    return (int(number) if number.isdecimal() else 1_000_000, host.id)


def _satisfies(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Tell whether labels satisfy Ray's label selector: ``value``, ``!value``, ``in(a, b)`` or ``!in(a, b)``."""
    for name, wanted in selector.items():
        negated = wanted.startswith("!")
        text = wanted.removeprefix("!").strip()
        if text.startswith("in(") and text.endswith(")"):
            allowed = [value.strip() for value in text[3:-1].split(",")]
        else:
            allowed = [text]
        if (labels.get(name) in allowed) == negated:
            return False
    return True


def _listed(values: Mapping[str, float] | Mapping[str, str]) -> str:
    texts = {name: value if isinstance(value, str) else f"{value:g}" for name, value in values.items()}
    return ", ".join(f"{name}={text}" for name, text in texts.items())
