"""How many workers a cluster holds, with how many a group starts, and when a healthy one grows: over plain values.

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

_UNITS = 10_000  # Ray counts resources in ten-thousandths
#: A share of these comes from one of a node's devices, never from two.
DEVICES = ("GPU", "TPU", "neuron_cores", "NPU", "HPU")
#: Seconds for what a lost group held to be seen as free, and for a node that went with it to be seen as gone.
_SETTLING_SECONDS = 2.0
_REFUSED_SECONDS = 600.0  # seconds for which a size that could not be placed is not tried again, nor a larger one
_MAX_PAUSE_SECONDS = 30.0  # most seconds between two tries that nothing speaks for but time


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
    """Return how many workers of a run could be placed on nodes now.

    ``held`` are those that the run itself has on each node, which give way to the new group, and ``reserved`` is what
    the arbiter between several trainings reserves for the run on each node.
    """
    most = demand.max_workers
    if not any(demand.resources.values()):
        return most
    if reserved is not None:
        most = min(most, sum(_fitting(of_node, demand.resources) for of_node in reserved))
    if demand.shape is not None:
        free = sum(not found.problem for found in slices_of(nodes, demand, held))
        return min(most // demand.shape.workers, free) * demand.shape.workers
    on_nodes = [_workers_on(node, demand, held or {}) for node in nodes]
    if demand.strategy == "STRICT_SPREAD":
        return min(most, sum(count > 0 for count in on_nodes))
    return min(most, max(on_nodes, default=0) if demand.strategy == "STRICT_PACK" else sum(on_nodes))


def places_beyond(nodes: Collection[Node], demand: Demand, held: Mapping[str, int], more: int) -> dict[str, int]:
    """Return where so many more workers of a run fit, beside those that it has on each node."""
    found: dict[str, int] = {}
    for node in nodes if demand.shape is None else ():
        room = _workers_on(node, demand, held) - held.get(node.id, 0)
        if demand.strategy == "STRICT_SPREAD":
            room = min(room, 1 - held.get(node.id, 0))
        found[node.id] = max(0, min(room, more - sum(found.values())))
    return {node_id: number for node_id, number in found.items() if number}


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
    return [
        Slice(name, tuple(hosts), _problem(hosts, demand, shape, held or {})) for name, hosts in sorted(members.items())
    ]


def describe_missing(nodes: Collection[Node], demand: Demand, possible: int) -> str:
    """Say in one line what a start waits for."""
    lacking = demand.min_workers - possible
    shape = demand.shape
    if possible_workers(nodes, demand) >= demand.min_workers:
        return "a reservation of Ray's coordinator, which keeps what is free for another training"
    if shape is None:
        where = f" on nodes with {dict(demand.labels)}" if demand.labels else ""
        where += f", {demand.strategy}" if demand.strategy.startswith("STRICT") else ""
        return f"{lacking} more worker(s) with {_listed(demand.resources)} each{where}"
    problems = [f"{found.name}: {found.problem}" for found in slices_of(nodes, demand) if found.problem]
    return (
        f"{-(-lacking // shape.workers)} more whole slice(s) {shape.accelerator_type} {shape.topology} of "
        f"{shape.workers} worker(s) each ({'; '.join(problems[:10]) or 'none other is there'})"
    )


def _problem(hosts: Collection[Node], demand: Demand, shape: SliceShape, held: Mapping[str, int]) -> str:
    """Say why a slice cannot be used, empty if it can."""
    chips = sum(host.total.get("TPU", 0) for host in hosts)
    if chips != shape.chips:
        return f"{chips:g} of {shape.chips} chips are there"
    if any(host.draining for host in hosts):
        return "a host of it is being drained"
    head = head_resource(shape.pod_type)
    has_head = any(held.get(host.id) or host.available.get(head) for host in hosts if host.total.get(head))
    if sum(_workers_on(host, demand, held) for host in hosts) < shape.workers or (len(hosts) > 1 and not has_head):
        return f"held by another job, or without {_listed(demand.resources)} for each worker"
    return ""


def _workers_on(node: Node, demand: Demand, held: Mapping[str, int]) -> int:
    """Return how many workers fit on a node beside what others hold there."""
    if node.draining or not _satisfies(node.labels, demand.labels):
        return 0
    free = {
        name: min(node.available.get(name, 0) + held.get(node.id, 0) * amount, node.total.get(name, 0))
        for name, amount in demand.resources.items()
    }
    return _fitting(free, demand.resources, devices=DEVICES)


def _fitting(free: Mapping[str, float], resources: Mapping[str, float], devices: Collection[str] = ()) -> int:
    """Return how many workers fit into what is free; of a device that is shared, each takes part of one."""
    counts = []
    for name, amount in resources.items():
        units = round(amount * _UNITS)
        there = round(free.get(name, 0) * _UNITS)
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


@dataclass
class Stability:
    """Which nodes have been there for ``delay_seconds``, to be relied on; those of the first look are at once."""

    delay_seconds: float
    _since: dict[str, float] | None = None

    def observe(self, now: float, node_ids: Collection[str]) -> frozenset[str]:
        """Take in the nodes that are there, and return those that can be relied on."""
        known, new = ({}, float("-inf")) if self._since is None else (self._since, now)
        self._since = {node: known.get(node, new) for node in node_ids}
        return frozenset(node for node, since in self._since.items() if now - since >= self.delay_seconds)


@dataclass
class Growth:
    """A growth of the worker group to ``target``, 0 while none is decided.

    It waits ``patience_seconds`` for a commit before it is carried out without one; with 0, however long it takes.
    """

    patience_seconds: float
    target: int = 0
    _decided_at: float = 0.0

    def look(self, now: float, current: int, possible: int) -> bool:
        """Take in how many workers fit beside ``current``; return whether that begins or ends the wait for a commit."""
        before = self.target
        self.target = possible if possible > current else 0
        if self.target and not before:
            self._decided_at = now
        return bool(self.target) != bool(before)

    def waited_seconds(self, now: float) -> float:
        """Return how long the growth has waited."""
        return now - self._decided_at if self.target else 0.0

    def due(self, now: float, committed: bool, has_checkpoint: bool) -> str:
        """Return why it is carried out now: ``commit``, ``patience`` (never without a checkpoint), or nothing."""
        if self.target and committed:
            return "commit"
        is_late = 0 < self.patience_seconds <= self.waited_seconds(now)
        return "patience" if is_late and has_checkpoint else ""


@dataclass
class Start:
    """The starts of the worker groups of a run, one after the other.

    ``max_workers`` have ``wait_for_max_seconds`` to come before the first group starts smaller.
    """

    demand: Demand
    wait_for_max_seconds: float = 0.0
    _lost: int | None = None
    _since: float | None = None
    _failures: int = 0
    _limit: int = 0
    _limited_until: float = float("-inf")
    _not_before: float = float("-inf")

    def waited(self, now: float) -> float:
        """Return for how many seconds no group has trained; counted from the first call."""
        if self._since is None:
            self._since = now
        return now - self._since

    def limit(self, now: float) -> int:
        """Return the most workers that may be tried, after a larger group could not be placed."""
        return self._limit if now < self._limited_until else self.demand.max_workers

    def started(self, size: int) -> None:
        """Take in that a group of that size trains."""
        self._lost = size
        self._since = None
        self._failures = 0

    def failed(self, now: float, refused: int = 0) -> None:
        """Take in that a group did not start; one of size ``refused`` was counted to fit and could not be placed."""
        self._failures += 1
        if refused:
            step = self.demand.shape.workers if self.demand.shape is not None else 1
            self._limit = max(self.demand.min_workers, refused - step * 2 ** (self._failures - 1))
            self._limited_until = now + _REFUSED_SECONDS
        if refused <= self.demand.min_workers:
            self._not_before = now + min(2.0 ** min(self._failures - 1, 10), _MAX_PAUSE_SECONDS)

    def size(self, now: float, possible: int, stable: int) -> int:
        """Return how many workers to start of those that fit now, on any or on stable nodes; 0 to go on waiting."""
        waited = self.waited(now)
        limit = self.limit(now)
        possible = min(possible, limit)
        stable = min(stable, limit)
        if possible < self.demand.min_workers or now < self._not_before:
            return 0
        if self._lost is None:
            return 0 if possible < limit and waited < self.wait_for_max_seconds else possible
        if possible < self._lost and waited < _SETTLING_SECONDS:
            return 0
        # What has only just come may go as quickly; without it, if that is enough, nothing is lost when it does.
        return stable if stable >= self.demand.min_workers else possible
