"""A driver dies; the training does not."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.conftest import (
    CHECKPOINT_EVERY,
    STEPS,
    final_weights,
    hash_training,
    is_right,
    same_weights,
    train_config,
)
from tests.support.processes import (
    FlowProcess,
    RayHead,
    alive,
    assert_each_rank_knew_its_run,
    attempts,
    commits,
    read_ledger,
    repeated,
    steps_of,
    wait_for,
)

Start = Callable[..., FlowProcess]


def _kill_driver_in_mid_training(flow: FlowProcess, ledger_file: str) -> psutil.Process:
    flow.wait_for(lambda: len(commits(flow.run)) >= 2 and max(steps_of(ledger_file)) >= 13, 120, "two commits")
    driver = flow.driver()
    assert driver is not None
    driver.send_signal(signal.SIGKILL)
    return driver


def _assert_resumed_once(flow: FlowProcess, outcome: dict[str, Any], ledger_file: str) -> None:
    assert outcome["state"] == "COMPLETED"
    last = max((c for c in commits(flow.run) if c["attempt"] == 1), key=lambda commit: commit["sequence"])
    assert attempts(flow.run)[1]["base"] == [1, last["sequence"]], "the last commit of the killed driver"
    result = outcome["result"]
    assert result["attempts"] == 2
    assert result["worker_failures"] == 0
    lines = [line for line in read_ledger(ledger_file) if line["rank"] == 0]
    resumed = next(line for line in lines if line["resumed_from"] > 0)
    assert resumed["step"] == resumed["resumed_from"] + 1
    assert resumed["resumed_from"] == last["snapshot"]["latest_checkpoint_result"]["metrics"]["step"]
    assert repeated(steps_of(ledger_file)) <= 2 * CHECKPOINT_EVERY
    assert sorted(set(steps_of(ledger_file))) == list(range(1, STEPS + 1))
    assert_each_rank_knew_its_run(ledger_file, flow.run, flow.flow_run_id)


@pytest.mark.full
def test_killed_driver_of_a_local_cluster_resumes_at_the_last_commit_with_the_same_weights(
    start: Start, ledger: str, undisturbed: dict[str, Any]
) -> None:
    flow = start(config=train_config(ledger))
    _kill_driver_in_mid_training(flow, ledger)
    at_kill = flow.marked()
    assert at_kill, "the local cluster is the supervisor's and survives its driver"
    outcome = flow.wait(180)
    _assert_resumed_once(flow, outcome, ledger)
    assert same_weights(final_weights(outcome["result"]["checkpoint_uri"]), undisturbed)
    assert flow.marked() == []
    assert alive(at_kill) == [], "by their own ids, too"
    assert not flow.private_folder.exists()


@pytest.mark.full
def test_killed_driver_of_a_joined_cluster_resumes_at_once_and_leaves_it_running(
    start: Start, ledger: str, undisturbed: dict[str, Any], head: RayHead
) -> None:
    flow = start(
        config=train_config(ledger),
        scaling={"min_workers": 1, "max_workers": 2},
        cluster=head.block,
    )
    _kill_driver_in_mid_training(flow, ledger)
    outcome = flow.wait(180)
    _assert_resumed_once(flow, outcome, ledger)
    assert same_weights(final_weights(outcome["result"]["checkpoint_uri"]), undisturbed)
    # The reservation of the killed driver did not hold the new one up: both workers came back.
    assert [size["size"] for size in outcome["result"]["world_sizes"]] == [2, 2]
    assert flow.marked() == []
    wait_for(lambda: not head.train_processes(), 20, "the workers to leave the cluster")
    assert head.processes(), "a joined cluster is left alone"


def test_killed_head_is_waited_for_and_the_run_resumes_on_the_new_one(
    start: Start, ledger: str, own_head: RayHead
) -> None:
    head = own_head
    flow = start(
        **hash_training(ledger, scaling={"min_workers": 2, "max_workers": 2}),
        cluster=head.block,
        failures={"driver_restarts": 5, "driver_restart_delay_seconds": 2},
        environment={"RAY_gcs_rpc_server_reconnect_timeout_s": 6},
    )
    flow.wait_for(lambda: len(commits(flow.run)) >= 2, 120, "two commits")
    first = flow.driver()
    assert first is not None
    head.kill()
    wait_for(lambda: not first.is_running() or first.status() == psutil.STATUS_ZOMBIE, 60, "the driver to notice")
    assert flow.process.poll() is None, "the flow process outlives its driver"
    head.start()
    outcome = flow.wait(240)
    _assert_resumed_once(flow, outcome, ledger)
    assert is_right(outcome["result"]["checkpoint_uri"])
    assert flow.marked() == []
    wait_for(lambda: not head.train_processes(), 20, "the workers to leave the new cluster")


def _lines_until_a_new_process_trains(flow: FlowProcess, ledger: str, victim: psutil.Process) -> list[str]:
    """Kill a process of a training, and return what its log says until two others take a step."""
    known, told = {line["pid"] for line in read_ledger(ledger)}, len(flow.log.splitlines())
    victim.kill()
    two = lambda: len({line["pid"] for line in read_ledger(ledger)} - known) >= 2  # noqa: E731 - both ranks are new
    wait_for(two, 120, "a step of two other processes")
    return flow.log.splitlines()[told:]


def test_killed_worker_and_then_driver_are_told_in_a_few_lines_and_rays_own_words_are_in_a_file(
    start: Start, ledger: str
) -> None:
    two = {"min_workers": 2, "max_workers": 2}
    flow = start(**hash_training(ledger, config=train_config(ledger, sleep=0.1), scaling=two))
    flow.wait_for(lambda: len(commits(flow.run)) >= 2 and max(steps_of(ledger)) >= 13, 120, "two commits")
    worker = next(line["pid"] for line in read_ledger(ledger) if line["rank"] == 1)
    of_worker = _lines_until_a_new_process_trains(flow, ledger, psutil.Process(worker))
    driver = flow.driver()
    assert driver is not None
    of_driver = _lines_until_a_new_process_trains(flow, ledger, driver)
    outcome = flow.wait(180)
    assert outcome["state"] == "COMPLETED"
    assert (outcome["result"]["attempts"], outcome["result"]["worker_failures"]) == (2, 1)
    assert repeated(steps_of(ledger)) <= 3 * CHECKPOINT_EVERY
    assert is_right(outcome["result"]["checkpoint_uri"])

    assert len(of_worker) <= 12, of_worker
    assert len(of_driver) <= 12, of_driver
    # The line of a commit may come a moment after its record.
    failure = next(line for line in of_worker if "Worker failure" in line)
    assert f"rank 1 (pid {worker}, node " in failure
    assert f"(pid {driver.pid}) was ended by signal 9 (SIGKILL)" in "".join(of_driver)
    assert "Traceback" not in flow.log
    details = Path(failure.rpartition("details: ")[2])
    assert details.parent.parent.parent == flow.run
    assert "The actor is dead because" in details.read_text()
    assert "[rank 1] WorkerHealthCheckFailedError" in details.read_text()


def test_loop_that_raises_each_time_fails_for_good_with_its_traceback(start: Start, ledger: str, head: RayHead) -> None:
    flow = start(
        loop="tests.support.loops:remotely_failing_loop",
        cluster=head.block,
        framework="none",
        config={"ledger": ledger},
        scaling={"min_workers": 1, "max_workers": 1},
        failures={"max_failures": 1, "driver_restarts": 3},
    )
    flow.wait_for(flow.driver, 60, "the driver")
    outcome = flow.wait(120)
    assert outcome["state"] == "FAILED"
    assert outcome["outcome"] == "user_error"
    assert len(read_ledger(ledger)) == 2, "one try and one retry in the cluster"
    assert len(attempts(flow.run)) == 1, "no driver restart is spent on it"
    assert 'raise ValueError("a row without a number")' in flow.log
    assert flow.log.count("[rank 0] Traceback") == 1, "the second try says the same"
    assert "Error in training function" not in flow.log, "nor does Ray say it again"
    assert flow.marked() == []


@pytest.mark.full
def test_driver_that_dies_before_its_first_checkpoint_each_time_is_given_up(start: Start, ledger: str) -> None:
    flow = start(
        loop="tests.support.loops:sleeping_loop",
        framework="none",
        config={"ledger": ledger},
        scaling={"min_workers": 1, "max_workers": 1},
        failures={"driver_restarts": 5, "max_attempts_without_progress": 2},
    )
    for attempt in (1, 2):
        wait_for(lambda attempt=attempt: len(read_ledger(ledger)) == attempt, 120, f"attempt {attempt}")
        driver = flow.driver()
        assert driver is not None
        driver.kill()
    outcome = flow.wait(120)
    assert outcome["state"] == "FAILED"
    assert outcome["outcome"] == "no_progress"
    assert "2 attempts in a row ended without a new checkpoint" in outcome["error"]
    assert "max_attempts_without_progress" in outcome["error"]
    assert len(attempts(flow.run)) == 2
    assert flow.marked() == []


def test_loop_that_reports_nothing_is_restarted_in_the_cluster_with_its_stacks_in_the_log(
    start: Start, ledger: str, head: RayHead
) -> None:
    flow = start(
        loop="tests.support.loops:stalling_loop",
        framework="none",
        config={"ledger": ledger},
        scaling={"min_workers": 1, "max_workers": 1},
        failures={"stall_timeout_seconds": 4},
        cluster=head.block,
    )
    outcome = flow.wait(120)
    assert outcome["state"] == "COMPLETED"
    assert outcome["result"]["attempts"] == 1
    assert outcome["result"]["worker_failures"] == 1
    assert outcome["result"]["metrics"] == {"step": 2}
    assert "in hang_here" in flow.log
