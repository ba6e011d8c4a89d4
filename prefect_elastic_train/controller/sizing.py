"""Decisions about the size of a worker group, as pure functions and values: how many workers fit, and when to grow.

Ray's elastic policy counts what its coordinator reserves, from the nodes' total resources: resources held by another
job count as free, a draining node counts, and fractions are rounded down by binary floating point. Here a worker counts
where it fits now, beside what others hold, and a TPU slice counts as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from prefect_elastic_train.core.tpu_slices import SliceShape

_UNITS = 10_000  # Ray counts resources in ten-thousandths
#: Resources of which a share comes from one device of a node, never from two.
DEVICES = ("GPU", "TPU", "neuron_cores", "NPU", "HPU")
#: Seconds until the resources of a lost group are seen as free, and a node lost with it is seen as lost.
_SETTLING_SECONDS = 2.0
_REFUSED_SECONDS = 600.0  # for which a size that could not be placed is not tried again, nor a larger one
_MAX_PAUSE_SECONDS = 30.0  # between two tries with the smallest size


@dataclass(frozen=True)
class Node:
    """A living node of the Ray cluster.

    Attributes:
        id: Ray's node id.
        total, available: All its resources, and those that are free.
        labels: Ray's node labels.
        draining: True if Ray has announced that the node will be removed.
    """

    id: str
    total: Mapping[str, float]
    available: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    draining: bool = False


@dataclass(frozen=True)
class Demand:
    """The resources that the workers of a run need.

    Attributes:
        resources: Resources of each worker.
        min_workers, max_workers: Limits of the number of workers.
        labels: Ray's label selector.
        strategy: Ray's placement strategy.
        shape: The shape of a TPU slice if the workers fill TPU slices, else None.
    """

    resources: Mapping[str, float]
    min_workers: int
    max_workers: int
    labels: Mapping[str, str] = field(default_factory=dict)
    strategy: str = "PACK"
    shape: SliceShape | None = None


class Slice(NamedTuple):
    """The living nodes of a TPU slice, and the problem that prevents its use; ``problem`` is empty if there is none."""

    name: str
    nodes: tuple[Node, ...]
    problem: str


def head_resource(pod_type: str) -> str:
    """Return the name of the Ray resource on host 0 of a TPU slice by which Ray and its users reserve the slice."""
    return f"TPU-{pod_type}-head"


def possible_workers(
    nodes: Collection[Node],
    demand: Demand,
    held: Mapping[str, int] | None = None,
    reserved: Collection[Mapping[str, float]] | None = None,
) -> int:
    """Return the number of workers of a run that could be placed now.

    Args:
        nodes: Nodes to place the workers on.
        demand: Resources that the workers need.
        held: Number of workers that the run itself has on each node, which the new worker group replaces.
        reserved: Resources on each node that Ray's coordinator reserves for the run; None for no coordinator.
    """
    most = demand.max_workers
    if not any(demand.resources.values()):
        return most
    if reserved is not None:
        most = min(most, sum(_fitting(on_node, demand.resources) for on_node in reserved))
    if demand.shape is not None:
        free = sum(not tpu_slice.problem for tpu_slice in slices_of(nodes, demand, held))
        return min(most // demand.shape.workers, free) * demand.shape.workers
    counts = [_workers_on(node, demand, held or {}) for node in nodes]
    if demand.strategy == "STRICT_SPREAD":
        return min(most, sum(count > 0 for count in counts))
    return min(most, max(counts, default=0) if demand.strategy == "STRICT_PACK" else sum(counts))


def slices_of(nodes: Collection[Node], demand: Demand, held: Mapping[str, int] | None = None) -> list[Slice]:
    """Return the TPU slices of the demanded shape among the nodes, sorted by name, usable or not.

    ``held`` is the number of workers that the run itself has on each node; their resources count as free.
    """
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
        Slice(name, tuple(hosts), _slice_problem(hosts, demand, shape, held or {}))
        for name, hosts in sorted(members.items())
    ]


def describe_missing(nodes: Collection[Node], demand: Demand, possible: int) -> str:
    """Return one line of text about the resources that a worker group of ``min_workers`` waits for.

    Args:
        nodes: Nodes of the cluster.
        demand: Resources that the workers need.
        possible: Number of workers that fit now.
    """
    missing = demand.min_workers - possible
    shape = demand.shape
    if possible_workers(nodes, demand) >= demand.min_workers:
        return "a reservation by Ray's coordinator, which reserves the free resources for another training"
    if shape is None:
        conditions = f" on nodes with {dict(demand.labels)}" if demand.labels else ""
        conditions += f", {demand.strategy}" if demand.strategy.startswith("STRICT") else ""
        return f"{missing} more worker(s) with {_format(demand.resources)} each{conditions}"
    problems = [f"{tpu_slice.name}: {tpu_slice.problem}" for tpu_slice in slices_of(nodes, demand) if tpu_slice.problem]
    return (
        f"{-(-missing // shape.workers)} more whole slice(s) {shape.accelerator_type} {shape.topology} of "
        f"{shape.workers} worker(s) each ({'; '.join(problems[:10]) or 'there are no others'})"
    )


def _slice_problem(hosts: Collection[Node], demand: Demand, shape: SliceShape, held: Mapping[str, int]) -> str:
    """Return the problem that prevents the use of a TPU slice, such as a draining host; empty if it can be used."""
    chips = sum(host.total.get("TPU", 0) for host in hosts)
    if chips != shape.chips:
        return f"{chips:g} of {shape.chips} chips exist"
    if any(host.draining for host in hosts):
        return "one of its hosts is draining"
    head = head_resource(shape.pod_type)
    has_head = any(held.get(host.id) or host.available.get(head) for host in hosts if host.total.get(head))
    if sum(_workers_on(host, demand, held) for host in hosts) < shape.workers or (len(hosts) > 1 and not has_head):
        return f"held by another job, or without {_format(demand.resources)} for each worker"
    return ""


def _workers_on(node: Node, demand: Demand, held: Mapping[str, int]) -> int:
    """Return the number of workers that fit on a node; resources that workers of the same run hold count as free."""
    if node.draining or not _satisfies(node.labels, demand.labels):
        return 0
    free = {
        name: min(node.available.get(name, 0) + held.get(node.id, 0) * amount, node.total.get(name, 0))
        for name, amount in demand.resources.items()
    }
    return _fitting(free, demand.resources, devices=DEVICES)


def _fitting(free: Mapping[str, float], resources: Mapping[str, float], devices: Collection[str] = ()) -> int:
    """Return the number of workers that fit into free resources. A share of a device comes from one device only."""
    counts = []
    for name, amount in resources.items():
        units = round(amount * _UNITS)
        free_units = round(free.get(name, 0) * _UNITS)
        if units and units < _UNITS and name in devices:
            counts.append(free_units // _UNITS * (_UNITS // units) + free_units % _UNITS // units)
        elif units:
            counts.append(free_units // units)
    return max(0, min(counts, default=0))


def _satisfies(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Return True if labels satisfy Ray's label selector: ``value``, ``!value``, ``in(a, b)`` or ``!in(a, b)``."""
    for name, condition in selector.items():
        listed = condition.removeprefix("!").removeprefix("in(").removesuffix(")")
        if (labels.get(name) in [value.strip() for value in listed.split(",")]) == condition.startswith("!"):
            return False
    return True


def _format(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={amount:g}" for name, amount in resources.items())


@dataclass
class Stability:
    """Finds the nodes that have existed for ``delay_seconds``. Nodes of the first observation are stable at once."""

    delay_seconds: float
    _since: dict[str, float] | None = None

    def observe(self, now: float, nodes: Collection[Node]) -> list[Node]:
        """Record the nodes that exist now, and return those that are stable."""
        first_seen = self._since or {}
        default = float("-inf") if self._since is None else now
        self._since = {node.id: first_seen.get(node.id, default) for node in nodes}
        return [node for node in nodes if now - self._since[node.id] >= self.delay_seconds]


def growth_reason(committed: bool, has_checkpoint: bool, waited_seconds: float, patience_seconds: float) -> str:
    """Return the reason to carry out a planned growth now: ``commit``, ``patience``, or an empty string for not yet.

    Args:
        committed: True if a checkpoint was committed after the growth was planned.
        has_checkpoint: True if there is any checkpoint. A growth without one would lose all work.
        waited_seconds: Seconds since the growth was planned.
        patience_seconds: Seconds after which the growth is carried out without a commit; 0: no limit.
    """
    if committed:
        return "commit"
    return "patience" if has_checkpoint and 0 < patience_seconds <= waited_seconds else ""


@dataclass
class Start:
    """Decides when the next worker group of an attempt starts, and with how many workers.

    The first worker group waits up to ``wait_for_max_seconds`` for ``max_workers`` before it starts smaller.
    """

    demand: Demand
    wait_for_max_seconds: float = 0.0
    _last_size: int | None = None
    _since: float | None = None
    _failures: int = 0
    _limit: int = 0
    _limited_until: float = 0.0
    _not_before: float = 0.0

    def waited_seconds(self, now: float) -> float:
        """Return for how many seconds no worker group has trained, counted from the first call without one."""
        if self._since is None:
            self._since = now
        return now - self._since

    def limit(self, now: float) -> int:
        """Return the largest number of workers to try; it is reduced for a time if Ray could not place a group."""
        return self._limit if now < self._limited_until else self.demand.max_workers

    def record_start(self, size: int) -> None:
        """Record that a worker group of this size trains."""
        self._last_size = size
        self._since = None
        self._failures = 0

    def record_failure(self, now: float, refused: int = 0) -> None:
        """Record that a worker group did not start, which may limit the size and delay the next try.

        ``refused`` is the size of a worker group that fitted by our count and that Ray did not place; else 0.
        """
        self._failures += 1
        if refused:
            step = self.demand.shape.workers if self.demand.shape is not None else 1
            self._limit = max(self.demand.min_workers, refused - step * 2 ** (self._failures - 1))
            self._limited_until = now + _REFUSED_SECONDS
        if refused <= self.demand.min_workers:
            self._not_before = now + min(2.0 ** min(self._failures - 1, 10), _MAX_PAUSE_SECONDS)

    def size(self, now: float, possible: int, stable: int) -> int:
        """Return the number of workers to start now; 0: wait.

        Args:
            now: Time of the monotonic clock.
            possible: Number of workers that fit on all nodes.
            stable: Number of workers that fit on stable nodes.
        """
        waited = self.waited_seconds(now)
        limit = self.limit(now)
        possible = min(possible, limit)
        stable = min(stable, limit)
        if possible < self.demand.min_workers or now < self._not_before:
            return 0
        if self._last_size is None:
            return 0 if possible < limit and waited < self.wait_for_max_seconds else possible
        if possible < self._last_size and waited < _SETTLING_SECONDS:
            return 0
        # A new node may be lost again soon. Without such nodes, if the others are enough, its loss costs nothing.
        return stable if stable >= self.demand.min_workers else possible
