"""Each process of a run is killed, at any moment of its start-up, training or commit: nothing is lost, or left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from prefect_elastic_train.core.checkpoint_names import loop_name, written_by
from prefect_elastic_train.supervisor.guard import marked_processes
from tests.support.clusters import RayHead
from tests.support.loops import CHECKPOINT_EVERY, STEPS, is_right, train_config
from tests.support.processes import (
    ROOT,
    FlowProcess,
    Start,
    alive,
    assert_every_step_counts_once,
    attempts,
    drivers_of,
    read_ledger,
    steps_of,
    titled,
    wait_for,
)

#: Long enough that every moment below falls before the end.
MANY_STEPS, START_UP_SECONDS, TRAINING_SECONDS = 100, 8.0, 6.0
IN_A_CLUSTER = {"controller": "TrainController", "head": "gcs_server", "raylet": "raylet/raylet"}


def _victim(flow: FlowProcess, kind: str, ledger: str, head: RayHead | None = None) -> psutil.Process | None:
    """The process of a kind, if it lives already."""
    driver = flow.driver()
    if kind in ("driver", "guard", "flow"):
        return {"driver": lambda: driver, "guard": flow.guard, "flow": lambda: psutil.Process(flow.pid)}[kind]()
    if kind == "worker":
        pids = [line["pid"] for line in read_ledger(ledger)[-1:] if psutil.pid_exists(line["pid"])]
        return psutil.Process(pids[0]) if pids else None
    return next(iter(titled(head.processes() if head else flow.marked(), IN_A_CLUSTER[kind])), None)


def _assert_nothing_is_left(flow: FlowProcess, before: list[psutil.Process], head: RayHead | None) -> None:
    wait_for(lambda: not flow.marked() and not alive(before), 15, f"all processes to end: {alive(before)}")
    if head is not None:
        wait_for(lambda: not head.train_processes(), 15, "controller and workers to end")
        wait_for(lambda: not head.placement_groups(), 60, "the placement groups to go")


def _kill_one_and_see_it_end_well(
    start: Start, ledger: str, kind: str, head: RayHead | None, after: float, in_training: bool
) -> None:
    """Kill one process, so many seconds after the driver's start or after the second commit."""
    arguments = {
        "config": train_config(ledger, steps=MANY_STEPS),
        "failures": {"driver_restart_delay_seconds": 0.2, "driver_restarts": 5},
        "cluster": head.block if head is not None else {},
    }
    flow = start(f"{kind}-killed", **arguments)
    flow.living_driver()
    if in_training:
        flow.wait_for_commits()
    time.sleep(after)
    victim = wait_for(lambda: _victim(flow, kind, ledger, head), 120, f"the {kind}")
    before = [*flow.marked(), psutil.Process(flow.pid)]
    assert flow.process.poll() is None, "the training ended before anything was killed"
    victim.kill()  # type: ignore[union-attr]
    if kind == "flow":
        flow.process.wait(10)
        _assert_nothing_is_left(flow, before, head)
        wait_for(lambda: not flow.private_folder.exists(), 5, "spec and token to be removed")
        flow = start("again", flow_run_id=flow.flow_run_id, **{**arguments, "storage": str(flow.storage)})
        flow.living_driver()
    assert is_right(flow.completed(240)["checkpoint_uri"], MANY_STEPS)
    assert_every_step_counts_once(ledger, MANY_STEPS, CHECKPOINT_EVERY)
    _assert_nothing_is_left(flow, before, head)
    assert flow.guard() is None


def test_controller_killed_on_a_joined_cluster_is_survived_and_leaves_nothing(
    start: Start, ledger: str, head: RayHead
) -> None:
    _kill_one_and_see_it_end_well(start, ledger, "controller", head, after=1.0, in_training=True)


def test_flow_process_killed_in_mid_training_leaves_nothing_and_its_flow_run_goes_on(start: Start, ledger: str) -> None:
    _kill_one_and_see_it_end_well(start, ledger, "flow", None, after=0.5, in_training=True)


def test_nothing_is_left_when_the_flow_process_is_killed_while_the_cluster_starts(start: Start, ledger: str) -> None:
    flow = start(config=train_config(ledger))
    flow.wait_for(lambda: flow.driver() is not None and len(flow.marked()) >= 2, 60, "the cluster to begin")
    flow.process.kill()
    wait_for(lambda: flow.marked() == [], 15, "all processes to end")
    assert steps_of(ledger) == []


@pytest.mark.parametrize("within", ["a submitted training", "a submitted task"])
def test_nothing_is_left_of_a_process_pool_whose_flow_process_is_killed(start: Start, ledger: str, within: str) -> None:
    config = train_config(ledger, steps=100_000)
    flow = start(config=config, process_pool=True, within=within, submit=True, cluster={"num_cpus": 1})
    flow.wait_for(lambda: len(steps_of(ledger)) > 5, 120, "some steps")
    pool = psutil.Process(flow.pid).children(recursive=True)
    [(_, _, mark)] = drivers_of(*(process.pid for process in pool))
    before = [*pool, *marked_processes(mark)]
    flow.process.kill()
    flow.process.wait(10)
    wait_for(lambda: not alive(before) and not marked_processes(mark), 15, f"all processes to end: {alive(before)}")
    wait_for(lambda: not Path(mark).exists(), 5, "spec and token to be removed")


@pytest.mark.parametrize("way", ["background", pytest.param("own function", marks=pytest.mark.full)])
def test_names_that_a_loop_gives_again_after_a_killed_worker_and_a_killed_driver_are_those_of_new_folders(
    start: Start, ledger: str, way: str, tmp_path: Path, head: RayHead
) -> None:
    (tmp_path / "staging").mkdir()
    more: dict[str, Any] = {"upload_seconds": 0.3} if way == "own function" else {"staging": str(tmp_path / "staging")}
    config = train_config(ledger, named=True, checkpoint_every=2, sleep=0.1, **more)
    flow = start(config=config, cluster=head.block)
    for kind, already in (("worker", 2), ("driver", 4)):
        flow.wait_for_commits(already)
        victim = _victim(flow, kind, ledger)
        assert victim is not None
        known = {line["pid"] for line in read_ledger(ledger)}
        victim.kill()
        wait_for(lambda known=known: {line["pid"] for line in read_ledger(ledger)} - known, 120, "a new worker")
    result = flow.completed(240)
    assert flow.run is not None
    folders = {path.name for path in flow.run.iterdir() if path.name.startswith("step-")}
    assert {written_by(folder) for folder in folders} == {1, 2}
    assert {folder.split(".")[2] for folder in folders if written_by(folder) == 1} == {"g01", "g02"}
    names = sorted(int(loop_name(folder).removeprefix("step-")) for folder in folders)
    assert names == list(range(2, STEPS + 1, 2)), "each name is there once: what was interrupted is gone"
    assert f"checkpoint step-{STEPS} is committed" in flow.log.lower()
    assert is_right(result["checkpoint_uri"])
    assert loop_name(Path(result["checkpoint_uri"]).name) == f"step-{STEPS}"


@pytest.fixture(scope="module")
def crash_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Names the step of a commit at which a process of the cluster dies, once."""
    return tmp_path_factory.mktemp("crashing") / "crash"


@pytest.fixture(scope="module")
def crashing_head(crash_file: Path) -> Iterator[RayHead]:
    """A cluster whose processes die where that file says."""
    crashing = ROOT / "tests" / "support" / "crashing"
    cluster = RayHead(cpus=2, CRASH_FILE=str(crash_file), PYTHONPATH=f"{crashing}:{ROOT}")
    yield cluster
    cluster.close()


@pytest.mark.parametrize(
    ("step", "dies"),
    [
        pytest.param("mid-upload", "worker", marks=pytest.mark.full),
        ("in the middle of the commit", "controller"),
        pytest.param("after Ray's file", "controller", marks=pytest.mark.full),
    ],
)
def test_crash_in_a_commit_loses_no_step_and_counts_none_twice(
    start: Start, ledger: str, crash_file: Path, crashing_head: RayHead, step: str, dies: str
) -> None:
    flow = start(config=train_config(ledger), cluster=crashing_head.block)
    flow.wait_for_commits()
    crash_file.with_suffix(".new").write_text(step)
    crash_file.with_suffix(".new").rename(crash_file)
    result = flow.completed(180)
    assert not crash_file.exists(), "a process died there"
    failures, drivers = (1, 1) if dies == "worker" else (0, 2)
    assert (result["worker_failures"], len(attempts(flow.run))) == (failures, drivers)
    assert_every_step_counts_once(ledger, STEPS, CHECKPOINT_EVERY)
