"""Each process of a run is killed, at any moment of its start-up or training: nothing is lost, nothing is left."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect.client.schemas.objects import StateType

from prefect_elastic_train.core.checkpoint_names import loop_name, written_by
from tests.faults.conftest import CHECKPOINT_EVERY, ROUNDS, hash_training, is_right, train_config
from tests.support.deployments import DeployedRun, serve_flows
from tests.support.processes import (
    FlowProcess,
    RayHead,
    alive,
    assert_every_step_counts_once,
    commits,
    read_ledger,
    titled,
    wait_for,
)

Start = Callable[..., FlowProcess]
Deploy = Callable[..., DeployedRun]

#: Long enough that every moment below falls before the end.
STEPS = 100
START_UP_SECONDS = 8.0
TRAINING_SECONDS = 6.0


def _victim(flow: FlowProcess, kind: str, ledger: str, head: RayHead | None) -> psutil.Process | None:
    """Find the process of a kind, if it lives already."""
    driver = flow.driver()
    if kind == "driver":
        return driver
    if kind == "guard":
        return flow.guard()
    if kind == "flow":
        return psutil.Process(flow.pid)
    if kind == "worker":
        pids = [line["pid"] for line in read_ledger(ledger)[-1:] if psutil.pid_exists(line["pid"])]
        return psutil.Process(pids[0]) if pids else None
    if kind == "controller" and head is not None:
        return next(iter(titled(head.processes(), "TrainController")), None)
    return flow.process_named({"controller": "TrainController", "head": "gcs_server", "raylet": "raylet/raylet"}[kind])


def _kill_one_and_see_it_end_well(
    start: Start,
    ledger: str,
    kind: str,
    after_start: float | None = None,
    after_commit: float | None = None,
    head: RayHead | None = None,
) -> None:
    """Kill one process, so many seconds after the driver's start or after the second commit."""
    arguments = hash_training(
        ledger,
        config=train_config(ledger, steps=STEPS),
        failures={"driver_restart_delay_seconds": 0.2, "driver_restarts": 5},
        cluster=head.block if head is not None else {},
    )
    flow = start(f"{kind}-killed", **arguments)
    flow.wait_for(lambda: flow.driver(), 60, "a driver")
    if after_commit is not None:
        flow.wait_for(lambda: len(commits(flow.run)) >= 2, 120, "two commits")
    time.sleep(after_start if after_commit is None else after_commit)  # type: ignore[arg-type]
    victim = wait_for(lambda: _victim(flow, kind, ledger, head), 120, f"the {kind}")
    before = [*flow.marked(), psutil.Process(flow.pid)]
    assert flow.process.poll() is None, "the training ended before anything was killed"
    victim.kill()
    if kind == "flow":
        flow.process.wait(10)
        _assert_nothing_is_left(flow, before)
        _assert_nothing_is_held(head)
        flow = start("again", flow_run_id=flow.flow_run_id, **{**arguments, "storage": str(flow.storage)})
        flow.wait_for(flow.driver, 60, "a driver")
    outcome = flow.wait(240)
    assert outcome["state"] == "COMPLETED", outcome
    assert is_right(outcome["result"]["checkpoint_uri"], STEPS)
    assert_every_step_counts_once(ledger, STEPS, CHECKPOINT_EVERY)
    _assert_nothing_is_left(flow, before)
    assert flow.guard() is None
    _assert_nothing_is_held(head)


def _assert_nothing_is_left(flow: FlowProcess, before: list[psutil.Process]) -> None:
    try:
        wait_for(lambda: not flow.marked() and not alive(before), 15, "all processes to end")
    except AssertionError as error:
        left = {
            process.pid: process.as_dict(["cmdline", "ppid", "status"]) for process in flow.marked() + alive(before)
        }
        raise AssertionError(f"{error}: {left}") from None


def _assert_nothing_is_held(head: RayHead | None) -> None:
    if head is not None:
        wait_for(lambda: not head.train_processes(), 15, "controller and workers to end")
        wait_for(lambda: not head.placement_groups(), 60, "the placement groups to go")


def test_controller_killed_on_a_joined_cluster_is_survived_and_leaves_nothing(
    start: Start, ledger: str, head: RayHead
) -> None:
    _kill_one_and_see_it_end_well(start, ledger, "controller", after_commit=1.0, head=head)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(2 * ROUNDS))
@pytest.mark.parametrize("kind", ["flow", "driver", "controller", "worker", "head", "raylet", "guard"])
def test_any_process_killed_at_any_moment_is_survived_and_leaves_nothing(
    start: Start, ledger: str, kind: str, number: int, request: pytest.FixtureRequest
) -> None:
    chance = random.Random(f"{kind} {number}")
    joined = kind in ("flow", "driver", "controller", "worker") and number % 4 == 3
    _kill_one_and_see_it_end_well(
        start,
        ledger,
        kind,
        after_start=chance.uniform(0, START_UP_SECONDS),
        after_commit=chance.uniform(0, TRAINING_SECONDS) if number % 2 else None,
        head=request.getfixturevalue("head") if joined else None,
    )


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", range(ROUNDS))
def test_runner_killed_at_any_moment_leaves_its_flow_to_end_or_to_be_resumed(
    deployed: Deploy, api_url: str, ledger: str, tmp_path: Path, number: int
) -> None:
    runner = serve_flows(tmp_path / "runner", api_url, "doomed")
    try:
        run = deployed("fault test/doomed", **hash_training(ledger, config=train_config(ledger, steps=STEPS)))
        wait_for(lambda: run.flow_processes, 60, "the flow to run")
        time.sleep(random.Random(number).uniform(0, 2 * START_UP_SECONDS))
        assert not run.state.is_final(), "the training ended before anything was killed"
        runner.process.kill()
        # The flow process is nobody's child now, and goes on.
        ended = run.wait_for_end(240)
        assert ended.type == StateType.COMPLETED, ended
        assert_every_step_counts_once(ledger, STEPS, CHECKPOINT_EVERY)
        wait_for(lambda: not run.processes(), 15, "all processes of the run to end")
    finally:
        runner.close()


@pytest.mark.parametrize("way", ["background", "own function"])
def test_names_that_a_loop_gives_again_after_a_killed_worker_and_a_killed_driver_are_those_of_new_folders(
    start: Start, ledger: str, way: str, tmp_path: Path
) -> None:
    config = train_config(ledger, named=True, checkpoint_every=2, sleep=0.1)
    more: dict[str, Any] = {"config": {**config, "upload_seconds": 0.3}}
    if way == "background":
        (tmp_path / "staging").mkdir()
        more = {"config": {**config, "staging": str(tmp_path / "staging")}, "loop": "tests.support.loops:async_loop"}
    flow = start(**hash_training(ledger, **more))
    for kind, already in (("worker", 2), ("driver", 4)):
        flow.wait_for(lambda already=already: len(commits(flow.run)) >= already, 120, f"{already} commits")
        victim = _victim(flow, kind, ledger, None)
        assert victim is not None
        known = {line["pid"] for line in read_ledger(ledger)}
        victim.kill()
        wait_for(lambda known=known: {line["pid"] for line in read_ledger(ledger)} - known, 120, "a new worker")
    outcome = flow.wait(240)
    assert outcome["state"] == "COMPLETED", outcome
    folders = {path.name for path in flow.run.iterdir() if path.name.startswith("step-")}
    assert {written_by(folder) for folder in folders} == {1, 2}
    assert {folder.split(".")[2] for folder in folders if written_by(folder) == 1} == {"g01", "g02"}
    names = sorted(int(loop_name(folder).removeprefix("step-")) for folder in folders)
    assert names == list(range(2, 41, 2)), "each name is there once: what was interrupted is gone"
    assert "checkpoint step-40 is committed" in flow.log.lower()
    assert is_right(outcome["result"]["checkpoint_uri"])
    assert loop_name(Path(outcome["result"]["checkpoint_uri"]).name) == "step-40"
