"""A process of a run is killed in start-up, training or commit: nothing is lost, or left."""

from pathlib import Path

import psutil
import pytest

from prefect_elastic_train.core.checkpoint_names import loop_name, written_by
from prefect_elastic_train.supervisor.guard import marked_processes
from tests.support.clusters import RayHead
from tests.support.loops import CHECKPOINT_EVERY, STEPS, is_right, train_config
from tests.support.processes import (
    Start,
    alive,
    assert_every_step_counts_once,
    drivers_of,
    read_ledger,
    steps_of,
    titled,
    wait_for,
)


def test_flow_process_killed_in_mid_training_leaves_nothing_and_its_flow_run_goes_on(start: Start, ledger: str) -> None:
    config = train_config(ledger, sleep=0.1)
    flow = start(config=config)
    flow.wait_for_commits()
    flow.living_driver()
    before = [*flow.marked(), psutil.Process(flow.pid)]
    flow.process.kill()
    flow.process.wait(10)
    wait_for(lambda: not flow.marked() and not alive(before), 15, f"all processes to end: {alive(before)}")
    wait_for(lambda: not flow.private_folder.exists(), 5, "spec and token to be removed")
    same = {"flow_run_id": flow.flow_run_id, "storage": str(flow.storage)}
    again = start("again", config=config, **same)
    again.living_driver()
    assert is_right(again.completed(240)["checkpoint_uri"])
    assert_every_step_counts_once(ledger, STEPS, CHECKPOINT_EVERY)
    wait_for(lambda: not again.marked() and again.guard() is None, 15, "all processes to end")


def test_nothing_is_left_when_the_flow_process_is_killed_while_the_cluster_starts(start: Start, ledger: str) -> None:
    flow = start(config=train_config(ledger))
    flow.wait_for(lambda: flow.driver() is not None and len(flow.marked()) >= 2, 60, "the cluster to begin")
    flow.process.kill()
    wait_for(lambda: flow.marked() == [], 15, "all processes to end")
    assert steps_of(ledger) == []


@pytest.mark.full
def test_nothing_is_left_of_a_process_pool_whose_flow_process_is_killed(start: Start, ledger: str) -> None:
    config = train_config(ledger, steps=100_000)
    flow = start(config=config, process_pool=True, within="a submitted task", cluster={"num_cpus": 1})
    flow.wait_for(lambda: len(steps_of(ledger)) > 5, 120, "some steps")
    pool = psutil.Process(flow.pid).children(recursive=True)
    [(_, mark)] = drivers_of(*(process.pid for process in pool))
    before = [*pool, *marked_processes(mark)]
    flow.process.kill()
    flow.process.wait(10)
    wait_for(lambda: not alive(before) and not marked_processes(mark), 15, f"all processes to end: {alive(before)}")
    wait_for(lambda: not Path(mark).exists(), 5, "spec and token to be removed")


@pytest.mark.full
def test_worker_controller_and_driver_killed_on_a_joined_cluster_leave_nothing_and_each_name_is_there_once(
    start: Start, ledger: str, tmp_path: Path, head: RayHead
) -> None:
    (tmp_path / "staging").mkdir()
    config = train_config(ledger, named=True, checkpoint_every=2, sleep=0.1, staging=str(tmp_path / "staging"))
    flow = start(config=config, cluster=head.block, scaling={"min_workers": 2, "max_workers": 2})
    victims = {
        2: lambda: psutil.Process(read_ledger(ledger)[-1]["pid"]),
        4: lambda: titled(head.processes(), "TrainController")[0],
        6: flow.living_driver,
    }
    for already, victim in victims.items():
        flow.wait_for_commits(already)
        known = {line["pid"] for line in read_ledger(ledger)}
        victim().kill()
        wait_for(lambda known=known: {line["pid"] for line in read_ledger(ledger)} - known, 120, "a new worker")
    result = flow.completed(240)
    assert {size["size"] for size in result["world_sizes"]} == {2}, "what the driver reserved did not hold it up"
    folders = {path.name for path in flow.run.iterdir() if path.name.startswith("step-")}
    assert {written_by(folder) for folder in folders} == {1, 2, 3}
    assert {folder.split(".")[2] for folder in folders if written_by(folder) == 1} == {"g01", "g02"}
    names = sorted(int(loop_name(folder).removeprefix("step-")) for folder in folders)
    assert names == list(range(2, STEPS + 1, 2)), "each name is there once: what was interrupted is gone"
    assert is_right(result["checkpoint_uri"])
    assert result["attempts"] == 3
    wait_for(lambda: not flow.marked() and not head.train_processes(), 15, "all processes to end")
    wait_for(lambda: not head.placement_groups(), 60, "the placement groups to go")
