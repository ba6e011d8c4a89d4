"""How many workers fit: pure functions over plain values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_elastic_train.core.slices import SliceShape
from prefect_elastic_train.elastic.capacity import (
    Demand,
    Node,
    could_serve,
    describe_missing,
    granted_workers,
    hair_less,
    head_resource,
    possible_workers,
    slices_of,
)

PAIR = SliceShape("2x4", "TPU-V6E", "v6e-8", chips=8, workers=2, chips_per_worker=4)
SINGLE = SliceShape("2x2", "TPU-V6E", "v6e-4", chips=4, workers=1, chips_per_worker=4)


def node(name: str, free: float = 1.0, total: float = 1.0, draining: bool = False, **labels: str) -> Node:
    return Node(name, {"GPU": total}, {"GPU": free}, labels, draining)


def host(
    slice_name: str,
    number: int,
    free: float = 4.0,
    shape: SliceShape = PAIR,
    draining: bool = False,
    head_free: float = 1.0,
) -> Node:
    labels = {
        "ray.io/tpu-slice-name": slice_name,
        "ray.io/tpu-worker-id": str(number),
        "ray.io/tpu-pod-type": shape.pod_type,
    }
    total, available = {"TPU": 4.0, "CPU": 8.0}, {"TPU": free, "CPU": 8.0}
    if number == 0:
        total[head_resource(shape.pod_type)] = 1.0
        available[head_resource(shape.pod_type)] = head_free
    return Node(f"{slice_name}-{number}", total, available, labels, draining)


def gpus(resources: float = 1.0, low: int = 1, high: int = 100, strategy: str = "PACK", **labels: str) -> Demand:
    return Demand({"GPU": resources}, low, high, labels, strategy)


def tpus(low: int = 2, high: int = 8, shape: SliceShape = PAIR) -> Demand:
    return Demand({"TPU": 4.0, "CPU": 1.0}, low, high, shape=shape)


def test_what_others_hold_does_not_count_and_what_the_run_itself_holds_does() -> None:
    nodes = [node("a", free=1, total=4), node("b", free=0, total=4)]
    assert possible_workers(nodes, gpus()) == 1
    assert possible_workers(nodes, gpus(), held={"a": 2, "b": 4}) == 7
    assert possible_workers(nodes, gpus(), held={"gone": 4}) == 1


def test_a_node_that_is_drained_does_not_count() -> None:
    assert possible_workers([node("a"), node("b", draining=True)], gpus(), held={"b": 1}) == 1


@pytest.mark.parametrize(("resources", "fitting"), [(0.1, 10), (0.3, 3), (0.25, 4), (0.7, 1), (2.0, 0)])
def test_fractions_of_a_resource_are_counted_exactly(resources: float, fitting: int) -> None:
    assert possible_workers([node("a")], gpus(resources)) == fitting
    assert granted_workers([{"GPU": 1.0}], {"GPU": resources}, 100) == fitting


@pytest.mark.parametrize(
    ("selector", "fitting"),
    [
        ("spot", 1),
        ("!spot", 2),
        ("in(spot, on-demand)", 2),
        ("!in(spot,on-demand)", 1),
    ],
)
def test_only_nodes_with_the_wanted_labels_count(selector: str, fitting: int) -> None:
    nodes = [node("a", market="spot"), node("b", market="on-demand"), node("c")]
    assert possible_workers(nodes, gpus(market=selector)) == fitting


def test_strict_strategies_count_what_can_be_placed() -> None:
    nodes = [node("a", 3, 4), node("b", 2, 4), node("c", 0, 4)]
    assert possible_workers(nodes, gpus(strategy="PACK")) == 5
    assert possible_workers(nodes, gpus(strategy="STRICT_SPREAD")) == 2
    assert possible_workers(nodes, gpus(strategy="STRICT_PACK")) == 3


def test_several_resources_are_all_needed() -> None:
    nodes = [Node("a", {"GPU": 4, "CPU": 8}, {"GPU": 4, "CPU": 3}), Node("b", {"GPU": 4}, {"GPU": 4})]
    assert possible_workers(nodes, Demand({"GPU": 1, "CPU": 1.5}, 1, 100)) == 2


def test_the_arbiter_between_trainings_has_the_last_word() -> None:
    nodes = [node("a", 4, 4)]
    assert possible_workers(nodes, gpus(), granted=3) == 3
    assert possible_workers(nodes, gpus(high=2), granted=3) == 2


def test_workers_that_need_nothing_always_fit() -> None:
    assert possible_workers([], Demand({"CPU": 0.0}, 1, 7)) == 7
    assert granted_workers([], {"CPU": 0.0}, 7) == 7


def test_a_whole_slice_counts_and_part_of_one_does_not() -> None:
    whole, half = [host("s1", 0), host("s1", 1)], [host("s2", 0)]
    assert possible_workers(half, tpus()) == 0
    assert possible_workers([*whole, *half], tpus()) == 2
    assert possible_workers([*whole, host("s2", 0), host("s2", 1)], tpus()) == 4


def test_a_slice_without_its_host_0_does_not_count() -> None:
    assert possible_workers([host("s1", 1), host("s1", 2)], tpus()) == 0


def test_a_slice_that_another_job_holds_in_part_does_not_count() -> None:
    busy = [host("s1", 0, free=4), host("s1", 1, free=0)]
    assert possible_workers(busy, tpus()) == 0
    assert possible_workers(busy, tpus(), held={"s1-1": 1}) == 2, "the run itself gives way"
    assert possible_workers([host("s1", 0, free=2), host("s1", 1)], tpus()) == 0


def test_a_slice_that_another_job_has_reserved_by_its_head_does_not_count() -> None:
    reserved = [host("s1", 0, head_free=0.0), host("s1", 1)]
    assert possible_workers(reserved, tpus()) == 0
    assert "s1: held by another job" in describe_missing(reserved, tpus(), 0)
    own = [host("s1", 0, free=0, head_free=0.0), host("s1", 1, free=0)]
    assert possible_workers(own, tpus(), held={"s1-0": 1, "s1-1": 1}) == 2, "the run itself has reserved it"


@pytest.mark.parametrize(
    ("each", "total", "workers"),
    [(0.4, 2, 4), (0.7, 4, 4), (0.3, 4, 12), (0.6, 2, 2), (0.5, 2, 4), (0.1, 1, 10), (1.0, 4, 4), (2.0, 5, 2)],
)
def test_a_share_of_a_gpu_comes_from_one_gpu(each: float, total: float, workers: int) -> None:
    assert possible_workers([node("n", total, total)], gpus(each)) == workers
    assert possible_workers([Node("n", {"CPU": total}, {"CPU": total})], Demand({"CPU": each}, 1, 100)) == int(
        round(total * 10) // round(each * 10)
    ), "of a CPU it may come from two"


@pytest.mark.parametrize(("each", "total"), [(0.2, 4), (0.1, 4), (0.6, 3), (0.4, 8), (0.8, 16), (1.0, 3)])
def test_as_many_are_granted_as_fit_also_by_a_coordinator_that_counts_in_floating_point(
    each: float, total: float
) -> None:
    left, reserved = total, 0.0
    asked = hair_less({"CPU": each})["CPU"]
    while left >= asked:
        left, reserved = left - asked, reserved + asked
    assert granted_workers([{"CPU": reserved}], {"CPU": each}, 100) == int(round(total * 10) // round(each * 10))


def test_only_nodes_that_could_serve_are_of_interest() -> None:
    assert could_serve(node("busy", free=0.0), gpus())
    assert not could_serve(node("small", total=0.5), gpus())
    assert not could_serve(Node("other", {"CPU": 8.0}, {"CPU": 8.0}), gpus())
    assert not could_serve(node("elsewhere", zone="b"), gpus(zone="a"))
    assert could_serve(host("s1", 0), tpus())
    assert not could_serve(host("s1", 0, shape=SINGLE), tpus())


def test_a_slice_of_another_kind_does_not_count() -> None:
    other = SliceShape("4x4", "TPU-V6E", "v6e-16", chips=16, workers=4, chips_per_worker=4)
    assert possible_workers([host("s1", n, shape=other) for n in range(4)], tpus()) == 0


def test_slices_of_a_single_host_count_one_by_one() -> None:
    nodes = [host(f"s{n}", 0, shape=SINGLE) for n in range(3)]
    assert possible_workers(nodes, tpus(1, 8, SINGLE)) == 3
    nodes[0] = host("s0", 0, free=0, shape=SINGLE)
    assert possible_workers(nodes, tpus(1, 8, SINGLE)) == 2


def test_a_shape_without_workers_gives_none() -> None:
    nothing = SliceShape("2x4", "TPU-V6E", "v6e-8", chips=8, workers=0, chips_per_worker=4)
    assert possible_workers([host("s1", 0), host("s1", 1)], tpus(shape=nothing)) == 0


def test_a_slice_whose_hosts_lack_another_resource_does_not_count() -> None:
    hungry = Demand({"TPU": 4.0, "CPU": 9.0}, 2, 8, shape=PAIR)
    nodes = [host("s1", 0), host("s1", 1)]
    assert possible_workers(nodes, hungry) == 0
    assert "CPU=9" in slices_of(nodes, hungry)[0].problem


def test_what_is_missing_is_said_in_one_line() -> None:
    text = describe_missing([node("a")], gpus(low=4, market="spot"), 1)
    assert text == "3 more worker(s) with GPU=1 each on nodes with the labels market=spot"
    nodes = [host("s1", 0), host("s2", 0), host("s2", 1, free=0), host("s3", 0), host("s3", 1, draining=True)]
    text = describe_missing(nodes, tpus(low=4), 0)
    assert text.startswith("2 more whole slice(s) TPU-V6E 2x4 of 2 worker(s) each")
    assert "s1: 4 of 8 chips are there" in text
    assert "s2: held by another job" in text
    assert "s3: a host of it is being drained" in text


nodes_of_gpus = st.lists(
    st.builds(
        lambda number, total, share, draining: (number, total, round(total * share, 4), draining),
        st.integers(0, 10**6),
        st.sampled_from([1.0, 2.0, 4.0, 8.0, 0.5]),
        st.sampled_from([0.0, 0.25, 0.5, 1.0]),
        st.booleans(),
    ),
    max_size=12,
    unique_by=lambda made: made[0],
)


@given(nodes_of_gpus, st.sampled_from([0.1, 0.3, 0.5, 1.0, 2.0]), st.integers(1, 20), st.integers(0, 30))
def test_what_is_counted_can_be_placed(
    made: list[tuple[int, float, float, bool]], each: float, most: int, granted: int
) -> None:
    nodes = [node(str(number), free, total, draining) for number, total, free, draining in made]
    count = possible_workers(nodes, gpus(each, 1, most), granted=granted)
    assert 0 <= count <= min(most, granted)
    # Of each node, whole devices and one that is used in part.
    left = {n.id: [1.0] * int(n.available["GPU"]) + [n.available["GPU"] % 1] for n in nodes if not n.draining}
    for _ in range(count):
        if each >= 1:
            devices = next(found for found in left.values() if found.count(1.0) >= each)
            for _ in range(int(each)):
                devices.remove(1.0)
        else:
            devices = next(found for found in left.values() if max(found) >= each - 1e-6)
            devices[devices.index(max(devices))] -= each


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1), st.booleans(), st.booleans()), max_size=10),
    st.integers(1, 5),
    st.none() | st.integers(0, 12),
)
def test_tpu_workers_always_fill_whole_slices(
    made: list[tuple[int, int, bool, bool]], most: int, granted: int | None
) -> None:
    hosts = {
        (name, number): host(f"s{name}", number, 4.0 * free, draining=drained) for name, number, free, drained in made
    }
    count = possible_workers(list(hosts.values()), tpus(2, 2 * most), granted=granted)
    assert count % 2 == 0
    assert 0 <= count <= 2 * most
    whole = sum(
        all((name, n) in hosts and hosts[name, n].available["TPU"] and not hosts[name, n].draining for n in (0, 1))
        for name in range(5)
    )
    assert count == min(whole, most, (granted if granted is not None else 99) // 2) * 2
