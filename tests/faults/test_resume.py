"""The flow process, its host or the run directory suffers; the same flow run goes on from the last whole commit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType

from tests.faults.conftest import CHECKPOINT_EVERY, STEPS, hash_training, is_right
from tests.support.deployments import SERVED, DeployedRun, Program, serve_flows
from tests.support.processes import (
    FlowProcess,
    RayHead,
    alive,
    assert_each_rank_knew_its_run,
    assert_every_step_counts_once,
    attempts,
    commits,
    free_port,
    generations,
    prefect_server,
    read_ledger,
    run_folder,
    steps_of,
    titled,
    wait_for,
)

Start = Callable[..., FlowProcess]
Deploy = Callable[..., DeployedRun]

DEPLOYMENT = f"fault test/{SERVED}"


def _resumed(start: Start, first: FlowProcess, name: str, **arguments: object) -> FlowProcess:
    """Go on with the same flow run in a new process, as Prefect does after a retry in its UI."""
    return start(name, flow_run_id=first.flow_run_id, **{"storage": str(first.storage), **arguments})


def _command(*arguments: str, api_url: str) -> subprocess.CompletedProcess[str]:
    """Run `elastic-train` as its user does."""
    return subprocess.run(
        [str(Path(sys.executable).parent / "elastic-train"), *arguments],
        env={**os.environ, "PREFECT_API_URL": api_url},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def resuming(api_url: str, served: Program, client: SyncPrefectClient) -> Iterator[Callable[[int], None]]:
    """Creates the automations for the served deployment, and deletes them."""

    used = {DEPLOYMENT}

    def create(max_resumes: int, heartbeat_timeout: int = 600, deployment: str = DEPLOYMENT) -> None:
        used.add(deployment)
        wait_for(lambda: _exists(client, deployment), 60, "the deployment")
        done = _command(
            "automations",
            "create",
            deployment,
            f"--max-resumes={max_resumes}",
            f"--heartbeat-timeout={heartbeat_timeout}",
            api_url=api_url,
        )
        assert done.returncode == 0, done.stderr
        # A server takes up to a second to load them.
        time.sleep(2)

    yield create
    _command("automations", "delete", *used, api_url=api_url)


def _exists(client: SyncPrefectClient, deployment: str = DEPLOYMENT) -> bool:
    from prefect.exceptions import ObjectNotFound

    try:
        return bool(client.read_deployment_by_name(deployment))
    except ObjectNotFound:
        return False


def _cut_snapshot(run: Path) -> None:
    file = run / "checkpoint_manager_snapshot.json"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _empty_newest_commit(run: Path) -> None:
    sorted((run / ".elastic_train" / "commits").glob("0*.json"))[-1].write_bytes(b"")


def _empty_newest_commit_and_cut_snapshot(run: Path) -> None:
    _empty_newest_commit(run)
    _cut_snapshot(run)


def _cut_file_of_newest_checkpoint(run: Path) -> None:
    # Folders that are newer by name may be of uploads that were interrupted.
    file = run / commits(run)[-1]["snapshot"]["latest_checkpoint_result"]["checkpoint_dir_name"] / "state.json"
    file.write_bytes(file.read_bytes()[:5])


def _remove_oldest_checkpoint(run: Path) -> None:
    kept = [result["checkpoint_dir_name"] for result in commits(run)[-1]["snapshot"]["checkpoint_results"]]
    shutil.rmtree(run / min(kept))


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(("cut file",), id="one case"),
        pytest.param(
            ("cut snapshot", "empty commit", "both", "cut file", "lost checkpoint"),
            id="all cases",
            marks=pytest.mark.full,
        ),
    ],
)
def test_torn_run_state_is_repaired_told_and_trained_on_from(
    start: Start, ledger: str, head: RayHead, cases: tuple[str, ...]
) -> None:
    first = start("first", **hash_training(ledger, cluster=head.block, checkpoints={"keep": 3}))
    first.wait_for(lambda: len(commits(first.run)) >= 4, 120, "four commits")
    flow_run_id = first.flow_run_id
    first.process.kill()
    first.process.wait(10)
    wait_for(lambda: not head.train_processes(), 20, "the training to end")
    newest = commits(first.run)[-1]["snapshot"]["latest_checkpoint_result"]["metrics"]["step"]
    before = newest - CHECKPOINT_EVERY
    known: dict[str, tuple[Callable[[Path], None], int, str]] = {
        "cut snapshot": (_cut_snapshot, newest, "snapshot was torn"),
        "empty commit": (_empty_newest_commit, newest, "was torn and was written anew from Ray's snapshot"),
        "both": (_empty_newest_commit_and_cut_snapshot, before, "is torn and was passed over"),
        "cut file": (_cut_file_of_newest_checkpoint, before, "state.json has 5 bytes instead of"),
        "lost checkpoint": (_remove_oldest_checkpoint, newest, "was dropped: its folder is missing"),
    }
    lines_before = Path(ledger).read_text()
    for name in cases:
        damage, resumes_at, told = known[name]
        storage = first.folder / name.replace(" ", "-")
        shutil.copytree(first.storage, storage)
        run = run_folder(storage)
        assert run is not None
        damage(run)
        Path(ledger).write_text(lines_before)
        second = _resumed(
            start,
            first,
            name,
            storage=str(storage),
            **{
                key: value
                for key, value in hash_training(ledger, cluster=head.block, checkpoints={"keep": 3}).items()
                if key != "storage"
            },
        )
        outcome = second.wait(120)
        assert outcome["state"] == "COMPLETED", name
        assert generations(ledger)[-1] == (resumes_at, STEPS), name
        assert is_right(outcome["result"]["checkpoint_uri"]), name
        assert told in second.log, name
        assert any(told in repair for repair in _repairs(run)) or name == "cut snapshot", name
    assert flow_run_id == first.flow_run_id


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_trainings_of_subflows_go_on_when_the_flow_run_that_called_them_does(
    start: Start, ledger: str, head: RayHead, number: signal.Signals
) -> None:
    arguments = hash_training(ledger, cluster=head.block, within="subflows", short_ledger=ledger + ".short")
    first = start("first", **arguments)
    wait_for(lambda: len(read_ledger(ledger)) > 2 * CHECKPOINT_EVERY, 120, "the second subflow to train")
    os.kill(first.pid, number)
    first.process.wait(60)
    wait_for(lambda: not head.train_processes(), 20, "it to end")
    outcome = _resumed(start, first, "again", **arguments).wait(120)
    assert outcome["state"] == "COMPLETED"
    assert is_right(outcome["result"]["checkpoint_uri"])
    assert outcome["result"]["attempts"] == 2
    assert_every_step_counts_once(ledger, STEPS, CHECKPOINT_EVERY)
    assert steps_of(ledger + ".short") == [1, 2, 3], "the first subflow's result was there"
    short = f"fault-test-subflow-{first.flow_run_id[:8]}"
    assert sorted(run.name for run in first.storage.iterdir()) == [f"{short}.1", f"{short}.2"]


def _repairs(run: Path) -> list[str]:
    return [repair for attempt in attempts(run) for repair in attempt["repairs"]]


@pytest.mark.full
def test_budget_of_attempts_holds_over_all_resumes_and_says_which_it_was(
    start: Start, ledger: str, head: RayHead
) -> None:
    arguments = hash_training(
        ledger, cluster=head.block, failures={"driver_restarts": 2, "max_attempts_without_progress": 9}
    )
    arguments["config"]["steps"] = 100_000
    first = start("first", **arguments)
    process = first
    for resume in (1, 2, 3):
        process.wait_for(lambda number=resume: len(attempts(first.run)) == number, 120, f"attempt {resume}")
        wait_for(lambda: len(head.train_processes()) >= 2, 60, "it to train")
        process.process.kill()
        wait_for(lambda: not head.train_processes(), 20, "it to end")
        process = _resumed(start, first, f"resume-{resume}", **arguments)
    outcome = process.wait(60)
    assert outcome["state"] == "FAILED"
    assert outcome["outcome"] == "driver_lost"
    assert len(attempts(first.run)) == 3, "1 + driver_restarts"
    assert "3 attempts began, 1 + driver_restarts (2) are allowed over all its resumes" in outcome["error"]
    assert "raise driver_restarts of the FailureBudget" in outcome["error"]


def test_controller_that_gives_no_sign_of_life_is_replaced_and_one_that_computes_is_not(
    start: Start, ledger: str, head: RayHead
) -> None:
    bound = 8
    arguments = hash_training(
        ledger,
        cluster=head.block,
        environment={"PREFECT_ELASTIC_TRAIN_LIVENESS_TIMEOUT_SECONDS": bound},
    )
    arguments["config"].update(steps=10, sleep_once=bound + 6)
    flow = start(**arguments)
    wait_for(lambda: len(read_ledger(ledger)) >= 7, 120, "the long step to be over")
    assert len(attempts(flow.run)) == 1, "a long step is no death"
    controller = titled(head.processes(), "TrainController")[0]
    controller.suspend()
    outcome = flow.wait(120)
    assert outcome["state"] == "COMPLETED"
    assert outcome["result"]["attempts"] == 2
    assert "gave no sign of life" in flow.log
    assert is_right(outcome["result"]["checkpoint_uri"], steps=10)
    assert not alive([controller]), "the stopped controller is not left behind"


def test_killed_flow_process_of_a_deployment_is_resumed_by_the_automation(
    deployed: Deploy, resuming: Callable[[int], None], ledger: str, head: RayHead
) -> None:
    resuming(3)
    run = deployed(DEPLOYMENT, **hash_training(ledger, cluster=head.block))
    wait_for(lambda: len(commits(run.folder)) >= 2, 120, "two commits")
    processes = run.processes()
    os.kill(run.flow_processes[0], signal.SIGKILL)
    wait_for(lambda: not alive(processes), 15, "all processes of the first one to end")
    wait_for(lambda: len(run.flow_processes) == 2, 60, "the same flow run to begin again")
    assert run.wait_for_end(120).type == StateType.COMPLETED
    assert len(attempts(run.folder)) == 2
    assert_every_step_counts_once(ledger, STEPS, CHECKPOINT_EVERY)
    assert_each_rank_knew_its_run(ledger, run.folder, str(run.id), DEPLOYMENT)


@pytest.mark.full
def test_flow_that_dies_at_once_each_time_is_resumed_as_often_as_the_automation_says(
    deployed: Deploy, resuming: Callable[[int], None]
) -> None:
    resuming(2)
    run = deployed(DEPLOYMENT, die_at_once=True)
    wait_for(lambda: len(run.flow_processes) == 3, 90, "two resumes")
    assert run.wait_for_end(30).type == StateType.CRASHED
    time.sleep(8)
    assert len(run.flow_processes) == 3
    assert run.state.type == StateType.CRASHED


@pytest.mark.full
@pytest.mark.parametrize("flow_name", ["fault test", "async fault test"])
def test_deployment_that_got_ctrl_c_is_not_resumed(
    deployed: Deploy, resuming: Callable[..., None], ledger: str, head: RayHead, flow_name: str
) -> None:
    resuming(3, deployment=f"{flow_name}/{SERVED}")
    run = deployed(f"{flow_name}/{SERVED}", **hash_training(ledger, cluster=head.block))
    wait_for(lambda: commits(run.folder), 120, "a commit")
    os.kill(run.flow_processes[0], signal.SIGINT)
    assert run.wait_for_end(45).type == StateType.CRASHED
    time.sleep(8)
    assert (run.state.type, len(run.flow_processes)) == (StateType.CRASHED, 1)


def test_flow_run_that_nobody_executes_is_resumed_by_the_command_and_one_that_lives_is_not(
    deployed: Deploy, client: SyncPrefectClient, api_url: str, served: Program, ledger: str, head: RayHead
) -> None:
    def resume(*arguments: str) -> tuple[int, str]:
        done = _command("resume", str(run.id), *arguments, api_url=api_url)
        return done.returncode, done.stdout + done.stderr

    arguments = hash_training(ledger, cluster=head.block)
    arguments["config"]["sleep"] = 0.3
    run = deployed(DEPLOYMENT, lost=True, **arguments)
    assert run.state.type == StateType.RUNNING
    code, said = resume()
    assert code == 0, said
    assert run.state.type in (StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING), "a runner may have it already"
    assert "is Lost (Crashed) now" in said
    wait_for(lambda: commits(run.folder), 120, "a commit")
    code, said = resume("--storage", str(run.storage))
    assert (code, run.state.type) == (1, StateType.RUNNING), said
    assert "may be alive: process " in said
    assert run.wait_for_end(120).type == StateType.COMPLETED
    assert len(run.flow_processes) == 1
    code, said = resume("--force")
    assert (code, "there is nothing left to resume" in said) == (1, True)


def test_automations_are_created_once_updated_and_deleted(
    api_url: str, served: Program, client: SyncPrefectClient
) -> None:
    wait_for(lambda: _exists(client), 60, "the deployment")

    def lines(*arguments: str) -> list[str]:
        done = _command("automations", *arguments, api_url=api_url)
        assert done.returncode == 0, done.stderr
        return [line.split()[0] for line in done.stdout.splitlines()]

    assert lines("create", DEPLOYMENT) == ["created", "created"]
    assert lines("create", DEPLOYMENT) == ["unchanged", "unchanged"]
    assert lines("create", DEPLOYMENT, "--max-resumes=4") == ["updated", "unchanged"]
    ours = [a for a in client.read_automations() if a.name.startswith("elastic-train")]
    assert len(ours) == 2
    assert lines("delete", DEPLOYMENT) == ["deleted", "deleted"]
    for arguments, message in (
        (("create", "no/such"), "there is no deployment 'no/such'"),
        (("create",), "name at least one deployment"),
        (("create", DEPLOYMENT, "--max-resumes=0"), "max_resumes=0: must be at least 1"),
        (("delete", DEPLOYMENT), "there are no such automations"),
    ):
        done = _command("automations", *arguments, api_url=api_url)
        assert done.returncode == 1
        assert message in done.stderr


@pytest.mark.full
@pytest.mark.parametrize("automated", [True, False], ids=["by the automation", "by the command"])
def test_runner_and_flow_process_killed_together_are_resumed(
    deployed: Deploy,
    api_url: str,
    ledger: str,
    head: RayHead,
    tmp_path: Path,
    resuming: Callable[..., None],
    served: Program,
    automated: bool,
) -> None:
    # A deployment's runs are spread over its runners, and there shall be one.
    served.close()
    runner = serve_flows(tmp_path / "runner", api_url, PREFECT_FLOWS_HEARTBEAT_FREQUENCY="30")
    other = None
    try:
        if automated:
            resuming(3, 60)
        arguments = hash_training(ledger, cluster=head.block)
        arguments["config"]["sleep"] = 1.5
        run = deployed(DEPLOYMENT, **arguments)
        wait_for(lambda: len(read_ledger(ledger)) >= 22, 120, "33 s of training, with two heartbeats")
        processes = run.processes()
        for victim in (runner.process.pid, run.flow_processes[0]):
            os.kill(victim, signal.SIGKILL)
        wait_for(lambda: not alive(processes), 15, "all processes of the run to end")
        other = serve_flows(tmp_path / "other", api_url, PREFECT_FLOWS_HEARTBEAT_FREQUENCY="30")
        if not automated:

            def resumed() -> bool:
                done = _command("resume", str(run.id), "--storage", str(run.storage), api_url=api_url)
                return done.returncode == 0

            assert run.state.type == StateType.RUNNING, "nobody knows yet"
            assert not resumed(), "the last heartbeat is too young to tell"
            wait_for(resumed, 90, "the run to have missed two heartbeats")
        wait_for(lambda: len(run.flow_processes) == 2, 240, "the same flow run to begin again")
        assert run.wait_for_end(240).type == StateType.COMPLETED
        assert_every_step_counts_once(ledger, STEPS, CHECKPOINT_EVERY)
    finally:
        runner.close()
        if other is not None:
            other.close()


@pytest.mark.parametrize(
    ("seconds", "at"),
    [
        pytest.param(15, "middle", id="15 s in mid-training"),
        pytest.param(180, "middle", id="180 s in mid-training", marks=pytest.mark.full),
        pytest.param(180, "end", id="180 s around the end", marks=pytest.mark.full),
    ],
)
def test_outage_of_the_prefect_api_does_not_disturb_training(
    tmp_path: Path, ledger: str, head: RayHead, seconds: int, at: str
) -> None:
    port = free_port()
    arguments = hash_training(ledger, cluster=head.block)
    if at == "middle":
        arguments["config"]["sleep"] = (seconds + 20) / STEPS
    with prefect_server(tmp_path / "server", port) as url:
        flow = FlowProcess(tmp_path / "flow", url, **arguments)
        flow.wait_for(lambda: len(commits(flow.run)) >= 2, 120, "two commits")
        flow_run_id = flow.flow_run_id
    try:
        steps = len(read_ledger(ledger))
        time.sleep(seconds)
        assert len(read_ledger(ledger)) > steps, "training goes on"
        with prefect_server(tmp_path / "server", port) as url:
            flow.process.wait(240)
            assert len(attempts(flow.run)) == 1, "no second driver"
            assert [last for _, last in generations(ledger)] == [STEPS], "in one go"
            ended = json.loads(flow.result_file.read_text()) if flow.result_file.exists() else {"state": "CRASHED"}
            if at == "middle":
                assert ended["state"] == "COMPLETED"
                return
            again = FlowProcess(
                tmp_path / "again", url, flow_run_id=flow_run_id, **{**arguments, "storage": str(flow.storage)}
            )
            outcome = again.wait(60)
            assert outcome["state"] == "COMPLETED"
            assert is_right(outcome["result"]["checkpoint_uri"])
            assert len(attempts(flow.run)) == 1, "a finished training is not trained again"
    finally:
        flow.close()
