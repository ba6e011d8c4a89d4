"""SIGTERM, as before a machine is lost: a session saves within the grace, and the rest ends as it does without one."""

import os
import signal
import time
from collections import defaultdict
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType

from prefect_elastic_train.runs.run_directory import RunDirectory
from prefect_elastic_train.storage.store import LocalRunStore
from tests.support.clusters import RayHead
from tests.support.deployments import SERVED, WORKED, Deploy, Program, process_worker
from tests.support.processes import FlowProcess, Start, commits, read_ledger, steps_of, wait_for
from tests.support.session_training import STEPS, SessionTraining

NEVER = 10 * STEPS


def _redone(training: SessionTraining) -> int:
    """Steps that were done by more than one worker group."""
    groups: defaultdict[int, set[str]] = defaultdict(set)
    for line in read_ledger(training.ledger):
        groups[line["step"]].add(line["group"])
    return sum(len(found) - 1 for found in groups.values())


def _committed_step(run: Path | None) -> int:
    commit = RunDirectory(LocalRunStore(str(run))).newest_commit
    return int(commit.latest["metrics"]["step"]) if commit else 0


@pytest.mark.parametrize("place", [{}, pytest.param({"submit": True}, marks=pytest.mark.full)])
def test_terminated_workers_drivers_and_flow_processes_save_and_no_step_is_done_again(
    start: Start, head: RayHead, tmp_path: Path, place: dict[str, bool]
) -> None:
    training = SessionTraining(start, tmp_path, save_every=NEVER, cluster=head.block, **place)
    first = training.flow
    two = training.group(2)
    for target in (two[1]["pid"], first.living_driver().pid):
        os.kill(target, signal.SIGTERM)
        training.group(2)
    first.process.send_signal(signal.SIGTERM)
    first.process.wait(30)
    assert _committed_step(first.run) == steps_of(training.ledger)[-1]
    again = {**training.arguments, "storage": str(first.storage), "flow_run_id": first.flow_run_id}
    training.flow = start("again", **again)
    assert training.end(attempts=3, worker_failures=1) == [2] * 4
    assert _redone(training) <= 3, "one for each signal"


@pytest.mark.full
def test_a_second_signal_ends_at_once(start: Start, head: RayHead, tmp_path: Path) -> None:
    training = SessionTraining(
        start, tmp_path, save_every=NEVER, disturbances={"pauses": {"20": 60.0}}, cluster=head.block
    )
    training.group(2, steps=20)
    time.sleep(1)
    flow: FlowProcess = training.flow
    flow.process.send_signal(signal.SIGTERM)
    time.sleep(3)
    assert flow.process.poll() is None, "it waits for the save"
    flow.process.send_signal(signal.SIGTERM)
    flow.process.wait(12)
    assert commits(flow.run) == []


@pytest.mark.full
@pytest.mark.parametrize("deployment", [SERVED, WORKED])
def test_a_terminated_flow_process_of_a_deployment_saves(
    deployed: Deploy, served: Program, client: SyncPrefectClient, api_url: str, tmp_path: Path, deployment: str
) -> None:
    """Of a runner in the program that serves, and of a process worker."""
    ledger = tmp_path / "ledger"
    config = {"steps": 10_000, "length": 200, "global_batch": 20, "save_every": NEVER, "ledger": str(ledger)}
    config |= {"slow": str(tmp_path), "sleep": 0.2, "weights": str(tmp_path / "weights.npz")}
    arguments = {"loop": "tests.support.session_loops:torch_loop", "framework": "torch", "config": config}

    def check() -> None:
        run = deployed(f"fault test/{deployment}", **arguments)
        wait_for(lambda: len(read_ledger(ledger)) > 20, 120, "steps")
        os.kill(run.flow_processes[-1], signal.SIGTERM)
        assert run.wait_for_end(60).type == StateType.CRASHED
        assert _committed_step(run.folder) >= steps_of(ledger)[-1] - 1

    if deployment == SERVED:
        check()
    else:
        with process_worker(tmp_path / "worker", api_url, client):
            check()
