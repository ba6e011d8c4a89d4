"""Recovery points in memory: what dies costs a step, and the weights are those of an undisturbed training."""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from tests.support.clusters import ElasticCluster
from tests.support.processes import Start, read_ledger, titled, wait_for
from tests.support.session_loops import same_weights
from tests.support.session_training import STEPS, SessionTraining

GPUS = {"accelerator": "gpu", "resources_per_worker": {"GPU": 1}, "max_workers": 2}
OFTEN = {"resize_check_interval_seconds": 1, "stability_delay_seconds": 1}
NEVER = 10 * STEPS


def _redone(training: SessionTraining) -> list[int]:
    """The steps that some rank has taken more than once, once for each time more."""
    groups: defaultdict[int, set[str]] = defaultdict(set)
    for line in read_ledger(training.ledger):
        groups[line["step"]].add(line["group"])
    return [step for step, found in groups.items() for _ in [*found][1:]]


@pytest.mark.parametrize(("framework", "fsdp"), [("torch", True), pytest.param("jax", False, marks=pytest.mark.full)])
def test_a_killed_worker_driver_and_node_cost_a_step_each_and_nothing_is_left(
    start: Start, cluster: ElasticCluster, tmp_path: Path, framework: str, fsdp: bool
) -> None:
    cluster.add_gpu(), cluster.add_gpu()
    points = {"recovery_points": 1, "save_every": NEVER}
    training = SessionTraining(start, tmp_path, framework, GPUS, fsdp, cluster=cluster.block, **points)
    two = training.group(2, steps=30)  # the keepers have started
    two = training.group(2, dead=[two[1]["pid"]])
    two = training.group(2, dead=[training.flow.living_driver().pid])
    cluster.remove(two[1]["node"])  # its shards are on the other node, too
    training.group(1)
    assert training.end(attempts=2, worker_failures=2) == [2, 2, 2, 1]
    assert len(_redone(training)) <= 3, _redone(training)
    wait_for(lambda: not titled(cluster.processes(), "ray::Keeper"), 30, "the keepers to end")


@pytest.mark.full
def test_deaths_in_a_copy_a_seal_a_transfer_or_a_restore_cost_a_step_and_leave_the_bits_as_they_would_be(
    start: Start, cluster: ElasticCluster, tmp_path: Path
) -> None:
    cluster.add_gpu(), cluster.add_gpu()
    deaths = {"copy": 40, "seal": 80, "transfer": 120, "restore": 0}
    points = {"recovery_points": 1, "save_every": NEVER, "dies_within": deaths}
    training = SessionTraining(start, tmp_path, "torch", GPUS, True, cluster=cluster.block, **points)
    marks = [training.ledger.with_name(f"{training.ledger.name}.{place}") for place in deaths]
    training.flow.wait_for(lambda: all(mark.exists() for mark in marks), 240, "all deaths")
    training.group(2)
    cluster.add_gpu()  # a spare node
    two = training.group(2, dead=[training.flow.living_driver().pid], steps=40)  # a new node has a keeper by then
    cluster.remove(two[1]["node"])
    training.group(2)
    assert training.end(attempts=2, worker_failures=5) == [2] * 7
    assert len(_redone(training)) <= 6, _redone(training)
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    undisturbed = SessionTraining(start, folder, "torch", GPUS, True, cluster=cluster.block, name="undisturbed")
    undisturbed.end(attempts=1, worker_failures=0)
    assert same_weights(training.weights, undisturbed.weights)


@pytest.mark.full
def test_a_killed_keeper_is_replaced_and_until_then_the_checkpoint_counts(
    start: Start, cluster: ElasticCluster, tmp_path: Path
) -> None:
    cluster.add_gpu()
    training = SessionTraining(start, tmp_path, "torch", GPUS, cluster=cluster.block, recovery_points=1)
    one = training.group(1, steps=30)
    [keeper] = titled(cluster.processes(), "ray::Keeper")
    keeper.kill()
    one = training.group(1, dead=[one[0]["pid"]])
    training.flow.wait_for(lambda: titled(cluster.processes(), "ray::Keeper"), 60, "another keeper")
    began = one[0]["step"]
    training.flow.wait_for(lambda: read_ledger(training.ledger)[-1]["step"] > began + 20, 60, "a recovery point")
    training.group(1, dead=[one[0]["pid"]])
    assert training.end(attempts=1, worker_failures=2) == [1, 1, 1]
    assert 1 <= len(_redone(training)) <= 15 + 1


@pytest.mark.full
def test_a_growth_continues_from_memory_without_a_checkpoint_before_it(
    start: Start, cluster: ElasticCluster, tmp_path: Path
) -> None:
    cluster.add_gpu()
    points = {"recovery_points": 1, "save_every": NEVER}
    training = SessionTraining(start, tmp_path, "torch", GPUS | OFTEN, cluster=cluster.block, **points)
    training.group(1, steps=60)  # there is memory by then
    cluster.add_gpu()
    training.group(2)
    assert training.end(attempts=1, worker_failures=0) == [1, 2]
    assert _redone(training) == []
    files = sorted((training.flow.run / ".elastic_train" / "events").iterdir())
    events = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    kinds = [event["kind"] for event in events]
    [grown] = [number for number, kind in enumerate(kinds) if kind == "worker_group_resized"]
    assert events[grown]["reason"] == "memory"
    assert "checkpoint_committed" not in kinds[:grown]
