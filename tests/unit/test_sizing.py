"""How many workers fit, with how many a group starts, and when a healthy one grows: over plain values."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_elastic_train.controller import sizing
from prefect_elastic_train.controller.nodes import demand_of
from prefect_elastic_train.controller.sizing import Demand, Node, Stability, Start, describe_missing, possible_workers
from prefect_elastic_train.core.tpu_slices import SliceShape

PAIR = SliceShape("2x4", "TPU-V6E", "v6e-8", chips=8, workers=2, chips_per_worker=4)
SINGLE = SliceShape("2x2", "TPU-V6E", "v6e-4", chips=4, workers=1, chips_per_worker=4)
SLICES = {1: SINGLE, 2: PAIR, 4: SliceShape("4x4", "TPU-V6E", "v6e-16", chips=16, workers=4, chips_per_worker=4)}


def node(name, free=1.0, total=1.0, **labels):
    return Node(name, {"GPU": total}, {"GPU": free}, labels)


def host(slice_name, number, free=4, shape=PAIR, head=1):
    labels = {"ray.io/tpu-slice-name": slice_name, "ray.io/tpu-pod-type": shape.pod_type}
    total, available = {"TPU": 4.0, "CPU": 8.0}, {"TPU": free, "CPU": 8.0}
    if number == 0:
        total[sizing.head_resource(shape.pod_type)], available[sizing.head_resource(shape.pod_type)] = 1.0, head
    return Node(f"{slice_name}-{number}", total, available, labels)


def gpus(each=1.0, low=1, high=100, strategy="PACK", **labels):
    return Demand({"GPU": each}, low, high, labels, strategy)


def cpus(low, high):
    return Demand({"CPU": 1.0}, low, high)


def tpus(low=2, high=8, shape=PAIR):
    return Demand({"TPU": 4.0, "CPU": 1.0}, low, high, shape=shape)


def test_what_others_hold_does_not_count_and_what_the_run_itself_holds_does() -> None:
    nodes = [node("a", free=1, total=4), node("b", free=0, total=4)]
    assert possible_workers(nodes, gpus()) == 1
    assert possible_workers(nodes, replace(gpus(), held={"a": 2, "b": 4, "gone": 4})) == 7


def test_strict_strategies_count_what_can_be_placed() -> None:
    nodes = [node("a", 3, 4), node("b", 2, 4), node("c", 0, 4)]
    found = [possible_workers(nodes, gpus(strategy=name)) for name in ("PACK", "STRICT_SPREAD", "STRICT_PACK")]
    assert found == [5, 2, 3]


def test_several_resources_are_all_needed() -> None:
    nodes = [Node("a", {"GPU": 4, "CPU": 8}, {"GPU": 4, "CPU": 3}), Node("b", {"GPU": 4}, {"GPU": 4})]
    assert possible_workers(nodes, Demand({"GPU": 1, "CPU": 1.5}, 1, 100)) == 2


@pytest.mark.parametrize(
    ("selector", "fitting"), [("spot", 1), ("!spot", 2), ("in(spot, on-demand)", 2), ("!in(spot,on-demand)", 1)]
)
def test_only_nodes_with_the_wanted_labels_count(selector: str, fitting: int) -> None:
    nodes = [node("a", market="spot"), node("b", market="on-demand"), node("c")]
    assert possible_workers(nodes, gpus(market=selector)) == fitting


@pytest.mark.parametrize(
    ("pools", "strategy", "fitting"),
    [
        ("a a b", "PACK", 3),
        ("a b b", "PACK", 2),  # as many as find room from the first on
        ("c a a", "PACK", 0),
        ("* * b", "PACK", 3),  # those that may be anywhere leave the only node of another
        ("a a b", "STRICT_SPREAD", 1),
        ("a a b", "STRICT_PACK", 2),
    ],
)
def test_each_worker_counts_on_nodes_with_its_own_labels(pools: str, strategy: str, fitting: int) -> None:
    nodes = [node("b", 1, 2, pool="b"), node("a", 2, 2, pool="a")]
    selectors = [{"pool": pool} if pool != "*" else {} for pool in pools.split()]
    config = SimpleNamespace(
        _resources_per_worker_not_none={"GPU": 1.0},
        topology=None,
        min_workers=1,
        max_workers=3,
        label_selector=selectors,
        placement_strategy=strategy,
    )
    demand = demand_of(config)
    assert possible_workers(nodes, demand) == fitting
    if fitting < 3:
        assert str(selectors[fitting]) in describe_missing(nodes, replace(demand, min_workers=3), fitting)


@pytest.mark.parametrize(
    ("each", "total", "workers"),
    [(0.1, 1, 10), (0.3, 1, 3), (0.7, 4, 4), (0.4, 2, 4), (2.0, 5, 2)],
)
def test_a_share_of_a_gpu_comes_from_one_gpu_and_is_counted_exactly(each: float, total: float, workers: int) -> None:
    assert possible_workers([node("n", total, total)], gpus(each)) == workers
    of_cpus = possible_workers([Node("n", {"CPU": total}, {"CPU": total})], Demand({"CPU": each}, 1, 100))
    assert of_cpus == round(total * 10) // round(each * 10)  # of a CPU it may come from two


def test_the_arbiter_between_trainings_has_the_last_word() -> None:
    nodes = [node("a", 4, 4)]
    assert possible_workers(nodes, gpus(), reserved=[{"GPU": 3.0}]) == 3
    assert possible_workers(nodes, gpus(high=2), reserved=[{"GPU": 3.0}]) == 2
    assert possible_workers(nodes, gpus(), reserved=[{"GPU": 1.5}, {"GPU": 1.5}, {"CPU": 1.0}]) == 2
    assert "Ray's coordinator" in sizing.describe_missing(nodes, gpus(low=4), 3)
    needs_spot = sizing.describe_missing(nodes, gpus(low=4, strategy="STRICT_PACK", market="spot"), 0)
    assert needs_spot == "4 more worker(s) with GPU=1 each on nodes with {'market': 'spot'}, STRICT_PACK"


@pytest.mark.parametrize(
    ("hosts", "held", "workers"),
    [
        ([host("s1", 0), host("s1", 1)], {}, 2),
        ([host("s1", 0)], {}, 0),
        ([host("s1", 1), host("s1", 2)], {}, 0),  # no host 0
        ([host("s1", 0, free=2), host("s1", 1)], {}, 0),
        ([host("s1", 0), host("s1", 1, free=0)], {"s1-1": 1}, 2),  # the run itself gives way
        ([host("s1", 0, head=0), host("s1", 1)], {}, 0),  # reserved by its head
        ([host("s1", 0, free=0, head=0), host("s1", 1, free=0)], {"s1-0": 1, "s1-1": 1}, 2),
        ([host("s1", number, shape=SINGLE) for number in (0, 1)], {}, 0),  # of another kind
    ],
)
def test_only_a_slice_that_is_whole_and_free_counts(hosts: list[Node], held: dict[str, int], workers: int) -> None:
    demand = replace(tpus(), held=held)
    assert possible_workers(hosts, demand) == workers
    assert possible_workers([*hosts, host("s2", 0), host("s2", 1)], demand) == workers + 2


@pytest.mark.parametrize(
    ("hosts", "problem"),
    [
        ([host("s1", 0)], "s1: 4 of 8 chips live and do not drain, 4 are free"),
        ([host("s1", 0, free=2), host("s1", 1)], "s1: 8 of 8 chips live and do not drain, 6 are free"),
        ([host("s1", number, shape=SINGLE) for number in (0, 1)], "there are no others"),  # of another kind
    ],
)
def test_a_wait_for_slices_is_told_with_what_keeps_each_from_use(hosts: list[Node], problem: str) -> None:
    missing = sizing.describe_missing([*hosts, host("s2", 0), host("s2", 1)], tpus(low=4), 2)
    assert missing == f"1 more whole slice(s) TPU-V6E 2x4 of 2 worker(s) with TPU=4, CPU=1 each ({problem})"


def test_slices_of_a_single_host_count_one_by_one_and_none_without_another_resource() -> None:
    nodes = [host("s0", 0, free=0, shape=SINGLE), *(host(f"s{n}", 0, shape=SINGLE) for n in (1, 2))]
    assert possible_workers(nodes, tpus(1, 8, SINGLE)) == 2
    assert possible_workers(nodes, Demand({"TPU": 4.0, "CPU": 9.0}, 1, 8, shape=SINGLE)) == 0


def test_nodes_of_the_first_look_are_relied_on_at_once_and_later_ones_after_the_delay_without_a_gap() -> None:
    nodes = Stability(30)
    seen = [(100, "a", "a"), (110, "ab", "a"), (139, "ab", "a"), (140, "ab", "ab"), (141, "b", "b"), (142, "ab", "b")]
    for now, existing, stable in seen:
        assert [one.id for one in nodes.observe(now, [node(name) for name in existing])] == [*stable]


happenings = st.lists(
    st.tuples(
        st.sampled_from(["look", "look", "look", "started and lost", "refused", "failed"]),
        st.integers(0, 12),
        st.integers(0, 12),
        st.sampled_from([0.1, 1.0, 30.0, 700.0]),
    ),
    max_size=40,
)


@given(happenings, st.integers(1, 6), st.integers(0, 6), st.sampled_from([1, 2, 4]), st.sampled_from([0.0, 60.0]))
def test_a_start_is_within_bounds_and_capacity_and_of_whole_slices_and_comes_in_the_end(
    story: list[tuple[str, int, int, float]], fewest: int, more: int, step: int, wait_for_max: float
) -> None:
    smallest, largest = fewest * step, (fewest + more) * step
    start, now, asked = Start(tpus(smallest, largest, SLICES[step]), wait_for_max), 0.0, 0
    for what, one, other, seconds in story:
        now += seconds
        possible, stable = max(one, other) * step, min(one, other) * step
        if what == "started and lost":
            start.record_start(asked)
        elif what == "refused" and asked:
            start.record_failure(now, refused=asked)
        elif what == "failed":
            start.record_failure(now)
        size = start.size(now, min(possible, largest), min(stable, largest))
        assert size == 0 or smallest <= size <= min(possible, largest)  # within bounds, and never without capacity
        assert size % step == 0
        assert smallest <= start.limit(now) <= largest
        asked = size or asked
    start.waited_seconds(now)
    assert start.size(now + 61.0, smallest, 0) == smallest
    assert start.size(now + 601.0, largest, largest) == largest  # a size that was refused has its turn again


def test_what_cannot_be_placed_is_asked_for_in_ever_smaller_sizes() -> None:
    start, sizes = Start(cpus(2, 16)), []
    for _ in range(5):
        sizes.append(start.size(0.0, 16, 16))
        start.record_failure(0.0, refused=sizes[-1])
    assert sizes == [16, 15, 13, 9, 2]
    assert start.size(0.0, 16, 16) == 0  # then it pauses


def test_failures_over_days_pause_half_a_minute_each_and_overflow_nothing() -> None:
    start = Start(cpus(1, 4))
    for _ in range(5000):
        start.record_failure(0.0)
    assert start.size(29.9, 4, 4) == 0
    assert start.size(30.0, 4, 4) == 4
