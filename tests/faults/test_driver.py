"""A driver or its cluster dies; the training does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.clusters import RayHead
from tests.support.loops import CHECKPOINT_EVERY, STEPS, is_right, train_config
from tests.support.processes import (
    FlowProcess,
    Start,
    alive,
    assert_each_rank_knew_its_run,
    attempts,
    commits,
    read_ledger,
    repeated,
    steps_of,
    titled,
    wait_for,
)

TWO = {"min_workers": 2, "max_workers": 2}


def _wait_for_mid_training(flow: FlowProcess, ledger: str) -> None:
    flow.wait_for(lambda: len(commits(flow.run)) >= 2 and max(steps_of(ledger)) >= 13, 120, "two commits")


def _assert_resumed_once(flow: FlowProcess, result: dict[str, Any], ledger: str) -> None:
    last = max((c for c in commits(flow.run) if c["attempt"] == 1), key=lambda commit: commit["sequence"])
    assert attempts(flow.run)[1]["base"] == [1, last["sequence"]], "the last commit of the killed driver"
    assert (result["attempts"], result["worker_failures"]) == (2, 0)
    resumed = next(line for line in read_ledger(ledger) if line["rank"] == 0 and line["resumed_from"] > 0)
    assert resumed["step"] == resumed["resumed_from"] + 1
    assert resumed["resumed_from"] == last["snapshot"]["latest_checkpoint_result"]["metrics"]["step"]
    assert repeated(steps_of(ledger)) <= 2 * CHECKPOINT_EVERY
    assert sorted(set(steps_of(ledger))) == list(range(1, STEPS + 1))
    assert_each_rank_knew_its_run(ledger, flow.run, flow.flow_run_id)


@pytest.mark.full
def test_killed_driver_resumes_at_the_last_commit_with_the_weights_of_an_undisturbed_run(
    start: Start, ledger: str, head: RayHead
) -> None:
    """Once on the run's own cluster, which is the supervisor's and survives, and once on one that was joined."""
    for name, more in (("local", {"scaling": TWO}), ("joined", {"cluster": head.block, "scaling": {"max_workers": 2}})):
        its_ledger = f"{ledger}.{name}"
        flow = start(name, framework="torch", config=train_config(its_ledger), **more)
        _wait_for_mid_training(flow, its_ledger)
        before = [flow.living_driver(), *flow.marked()]
        before[0].kill()
        result = flow.completed(180)
        _assert_resumed_once(flow, result, its_ledger)
        # The reservation of the killed driver did not hold the new one up: both workers came back.
        assert [size["size"] for size in result["world_sizes"]] == [2, 2]
        assert is_right(result["checkpoint_uri"])
        assert flow.marked() == alive(before) == [], "by their own ids, too"
        assert not flow.private_folder.exists()
    wait_for(lambda: not head.train_processes(), 20, "the workers to leave the cluster")
    assert head.processes(), "a joined cluster is left alone"


def test_killed_head_is_waited_for_and_the_run_resumes_on_the_new_one(
    start: Start, ledger: str, own_head: RayHead
) -> None:
    flow = start(
        config=train_config(ledger),
        scaling=TWO,
        cluster=own_head.block,
        failures={"driver_restarts": 5, "driver_restart_delay_seconds": 2},
        environment={"RAY_gcs_rpc_server_reconnect_timeout_s": 6},
    )
    flow.wait_for_commits()
    first = flow.living_driver()
    own_head.kill()
    wait_for(lambda: not alive([first]), 60, "the driver to notice")
    assert flow.process.poll() is None, "the flow process outlives its driver"
    own_head.start()
    result = flow.completed(240)
    _assert_resumed_once(flow, result, ledger)
    assert is_right(result["checkpoint_uri"])
    assert flow.marked() == []
    wait_for(lambda: not own_head.train_processes(), 20, "the workers to leave the new cluster")


@pytest.mark.full
def test_local_cluster_that_dies_is_replaced_and_the_run_resumes(start: Start, ledger: str) -> None:
    flow = start(config=train_config(ledger, sleep=0.1))
    flow.wait_for_commits()
    flow.living_driver()
    [gcs] = titled(flow.marked(), "gcs_server")
    gcs.kill()
    result = flow.completed(240)
    assert result["attempts"] == 2
    assert is_right(result["checkpoint_uri"])
    assert set(steps_of(ledger)) == set(range(1, STEPS + 1))
    assert flow.marked() == alive([gcs]) == []


def _lines_until_others_train(flow: FlowProcess, ledger: str, victim: psutil.Process) -> list[str]:
    """Kill a process of a training, and return what its log says until two others take a step."""
    known, told = {line["pid"] for line in read_ledger(ledger)}, len(flow.log.splitlines())
    victim.kill()
    two = lambda: len({line["pid"] for line in read_ledger(ledger)} - known) >= 2  # noqa: E731 - both ranks are new
    wait_for(two, 120, "a step of two other processes")
    return flow.log.splitlines()[told:]


def test_killed_worker_and_then_driver_are_told_in_a_few_lines_and_rays_own_words_are_in_a_file(
    start: Start, ledger: str
) -> None:
    flow = start(config=train_config(ledger, sleep=0.25), scaling=TWO)
    _wait_for_mid_training(flow, ledger)
    worker = next(line["pid"] for line in read_ledger(ledger) if line["rank"] == 1)
    of_worker = _lines_until_others_train(flow, ledger, psutil.Process(worker))
    failure = next(line for line in of_worker if "Worker failure" in line)
    details = Path(failure.rpartition("details: ")[2])
    flow.wait_for(details.exists, 30, "what Ray said of the worker")
    driver = flow.living_driver()
    before = flow.marked()
    assert len(before) > 5, "driver, head, controller and workers: the cluster survives its driver"
    of_driver = _lines_until_others_train(flow, ledger, driver)
    result = flow.completed(180)
    assert (result["attempts"], result["worker_failures"]) == (2, 1)
    assert repeated(steps_of(ledger)) <= 3 * CHECKPOINT_EVERY
    assert is_right(result["checkpoint_uri"])
    assert_each_rank_knew_its_run(ledger, flow.run, flow.flow_run_id)
    assert flow.marked() == alive(before) == []

    assert len(of_worker) <= 12, of_worker
    assert len(of_driver) <= 12, of_driver
    assert f"rank 1 (pid {worker}, node " in failure
    [follows] = [line for line in of_driver if "A new driver follows" in line]
    assert "WARNING" in follows
    assert f"(pid {driver.pid}) was ended by signal 9 (SIGKILL)" in follows
    assert "Traceback" not in flow.log
    assert details.parent.parent.parent == flow.run
    assert "The actor is dead because" in details.read_text()
    assert "[rank 1] WorkerHealthCheckFailedError" in details.read_text()


@pytest.mark.full
def test_driver_that_dies_before_its_first_checkpoint_each_time_is_given_up(start: Start, ledger: str) -> None:
    flow = start(
        config=train_config(ledger, steps=10_000, checkpoint_every=10_000),
        failures={"driver_restarts": 5, "max_attempts_without_progress": 2},
    )
    for attempt in (1, 2):
        two = lambda attempt=attempt: len({line["pid"] for line in read_ledger(ledger)}) == attempt  # noqa: E731
        wait_for(two, 120, f"attempt {attempt}")
        flow.living_driver().kill()
    outcome = flow.wait(120)
    assert (outcome["state"], outcome["outcome"]) == ("FAILED", "no_progress")
    assert "2 attempts in a row ended without a new checkpoint" in outcome["error"]
    assert "max_attempts_without_progress" in outcome["error"]
    assert len(attempts(flow.run)) == 2
    assert flow.marked() == []


@pytest.mark.full
def test_any_number_of_drivers_may_die_if_each_has_taken_the_run_further(
    start: Start, ledger: str, tmp_path: Path
) -> None:
    kills, until = 10, tmp_path / "until"
    flow = start(
        config=train_config(ledger, steps=100_000, until=str(until)),
        failures={"driver_restarts": 3, "driver_restart_delay_seconds": 300, "forgive_after_seconds": 0.5},
    )
    for attempt in range(1, kills + 1):
        has_committed = lambda attempt=attempt: attempt in {c["attempt"] for c in commits(flow.run)}  # noqa: E731
        flow.wait_for(has_committed, 60, f"a commit of attempt {attempt}, without a delay before it")
        flow.living_driver().kill()
    until.touch()
    result = flow.completed(120)
    assert result["attempts"] == kills + 1
    assert is_right(result["checkpoint_uri"], result["metrics"]["step"])
    assert repeated(steps_of(ledger)) <= 2 * CHECKPOINT_EVERY * kills
    assert flow.marked() == []
