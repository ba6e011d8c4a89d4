"""Decisions about the size of a worker group, as pure functions and values: how many fit, and when a group starts.

Ray's elastic policy counts what its coordinator reserves, from the nodes' total resources: resources held by another
job count as free, a draining node counts, and fractions are rounded down by binary floating point. Here a worker counts
where it fits now, beside what others hold, and a TPU slice counts as a whole or not at all.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

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
    """A living node of the Ray cluster that does not drain.

    Attributes:
        id: Ray's node id.
        total, available: All its resources, and those that are free.
        labels: Ray's node labels.
    """

    id: str
    total: Mapping[str, float]
    available: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Demand:
    """The resources that the workers of a run need, and those that they hold now.

    Attributes:
        resources: Resources of each worker.
        min_workers, max_workers: Limits of the number of workers.
        labels: Ray's label selector.
        strategy: Ray's placement strategy.
        shape: The shape of a TPU slice if the workers fill TPU slices, else None.
        held: Number of workers that the run has on each node now. A new worker group replaces them, so their resources
            count as free.
        labels_by_worker: Ray's label selector for the node of each worker; empty: `labels` for all.
    """

    resources: dict[str, float]
    min_workers: int
    max_workers: int
    labels: Mapping[str, str] = field(default_factory=dict)
    strategy: str = "PACK"
    shape: SliceShape | None = None
    held: Mapping[str, int] = field(default_factory=dict)
    labels_by_worker: Sequence[Mapping[str, str]] = ()


def head_resource(pod_type: str) -> str:
    """Return the name of the Ray resource on host 0 of a TPU slice by which Ray and its users reserve the slice."""
    return f"TPU-{pod_type}-head"


def possible_workers(
    nodes: Collection[Node], demand: Demand, reserved: Collection[Mapping[str, float]] | None = None
) -> int:
    """Return the number of workers of a run that could be placed now.

    Args:
        nodes: Nodes to place the workers on.
        demand: Resources that the workers need.
        reserved: Resources that Ray's coordinator reserves for the run, by node or by worker; None for no coordinator.
    """
    most = demand.max_workers
    if reserved is not None:
        most = min(most, sum(_fitting(part, demand.resources) for part in reserved))
    if demand.shape:
        return min(most // demand.shape.workers, len(free_slices(nodes, demand))) * demand.shape.workers
    most_on_node = 1 if demand.strategy == "STRICT_SPREAD" else most
    room = {node.id: min(_workers_on(node, demand), most_on_node) for node in nodes}
    chosen = [[node] for node in nodes] if demand.strategy == "STRICT_PACK" else [nodes]
    return min(most, max((_count_placed(each, room, demand.labels_by_worker) for each in chosen), default=0))


def _count_placed(
    nodes: Collection[Node], room: Mapping[str, int], labels_by_worker: Sequence[Mapping[str, str]]
) -> int:
    """Return the number of workers that find room, each on a node that satisfies its label selector.

    Those with the fewest such nodes choose first.

    Args:
        nodes: Nodes to place the workers on.
        room: Number of workers that fit on each node.
        labels_by_worker: Label selector of each worker. A group of n workers has the first n. Empty: the workers have
            no selectors of their own.
    """
    if not labels_by_worker:
        return sum(room[node.id] for node in nodes)
    choices = [[node.id for node in nodes if _satisfies(node.labels, labels)] for labels in labels_by_worker]
    for number in range(len(choices), 0, -1):
        left = dict(room)
        for choice in sorted(choices[:number], key=len):
            node = next((node for node in choice if left[node]), None)
            if node is None:
                break
            left[node] -= 1
        else:
            return number
    return 0


def free_slices(nodes: Collection[Node], demand: Demand) -> list[list[Node]]:
    """Return the hosts of each TPU slice of the demanded shape that is whole and free, sorted by the slice's name."""
    shape = demand.shape
    assert shape
    return [hosts for _, hosts in _slices(nodes, shape) if _is_free(hosts, demand, shape)]


def _slices(nodes: Collection[Node], shape: SliceShape) -> list[tuple[str, list[Node]]]:
    """Return name and hosts of each TPU slice of a shape, sorted by name. Hosts that are lost or drain are missing."""
    members = defaultdict[str, list[Node]](list)
    for node in nodes:
        if node.labels.get("ray.io/tpu-pod-type") == shape.pod_type:
            is_whole = node.total.get("TPU", 0) >= shape.chips
            members[node.id if is_whole else node.labels.get("ray.io/tpu-slice-name", "")].append(node)
    members.pop("", None)
    return sorted(members.items())


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
        labels = demand.labels_by_worker[possible] if demand.labels_by_worker else demand.labels
        conditions = f" on nodes with {dict(labels)}" if labels else ""
        conditions += f", {demand.strategy}" if demand.strategy.startswith("STRICT") else ""
        return f"{missing} more worker(s) with {_format(demand.resources)} each{conditions}"
    problems = [
        f"{name}: {sum(host.total.get('TPU', 0) for host in hosts):g} of {shape.chips} chips live and do not drain, "
        f"{sum(host.available.get('TPU', 0) for host in hosts):g} are free"
        for name, hosts in _slices(nodes, shape)
        if not _is_free(hosts, demand, shape)
    ]
    return (
        f"{-(-missing // shape.workers)} more whole slice(s) {shape.accelerator_type} {shape.topology} of "
        f"{shape.workers} worker(s) with {_format(demand.resources)} each "
        f"({'; '.join(problems[:10]) or 'there are no others'})"
    )


def _is_free(hosts: list[Node], demand: Demand, shape: SliceShape) -> bool:
    """Return True if these hosts are a whole TPU slice, and no other job holds any of it."""
    head = head_resource(shape.pod_type)
    return (
        sum(host.total.get("TPU", 0) for host in hosts) == shape.chips
        and sum(_workers_on(host, demand) for host in hosts) >= shape.workers
        and (
            len(hosts) == 1
            or any(host.total.get(head) and (demand.held.get(host.id) or host.available.get(head)) for host in hosts)
        )
    )


def _workers_on(node: Node, demand: Demand) -> int:
    """Return the number of workers that fit on a node."""
    if not _satisfies(node.labels, demand.labels):
        return 0
    free = {
        name: min(node.available.get(name, 0) + demand.held.get(node.id, 0) * amount, node.total.get(name, 0))
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
    _since: dict[str, float] = field(default_factory=dict)

    def observe(self, now: float, nodes: Collection[Node]) -> list[Node]:
        """Record the nodes that exist now, and return those that are stable."""
        default = now if self._since else float("-inf")
        self._since = {node.id: self._since.get(node.id, default) for node in nodes}
        return [node for node in nodes if now - self._since[node.id] >= self.delay_seconds]


@dataclass
class Start:
    """Decides when the next worker group of an attempt starts, and with how many workers.

    The first worker group waits up to ``wait_for_max_seconds`` for ``max_workers`` before it starts smaller.
    """

    demand: Demand
    wait_for_max_seconds: float = 0.0
    _last_size: int | None = None
    _since: float | None = None
    _failures = 0
    _reduced_size = 0
    _limited_until = 0.0
    _not_before = 0.0

    def waited_seconds(self, now: float) -> float:
        """Return for how many seconds no worker group has trained, counted from the first call without one."""
        if self._since is None:
            self._since = now
        return now - self._since

    def limit(self, now: float) -> int:
        """Return the largest number of workers to try; it is reduced for a time if Ray could not place a group."""
        return self._reduced_size if now < self._limited_until else self.demand.max_workers

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
            step = self.demand.shape.workers if self.demand.shape else 1
            self._reduced_size = max(self.demand.min_workers, refused - step * 2 ** (self._failures - 1))
            self._limited_until = now + _REFUSED_SECONDS
        if refused <= self.demand.min_workers:
            self._not_before = now + min(self._failures**2, _MAX_PAUSE_SECONDS)

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
