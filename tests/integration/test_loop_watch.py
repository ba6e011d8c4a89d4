"""What is told of loops that raise, hang, do not go on from their checkpoint or save none."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner

from prefect_elastic_train import (
    CheckpointPolicy,
    ElasticScaling,
    FailureBudget,
    Outcome,
    RayCluster,
    elastic_train,
)
from prefect_elastic_train.core.events import LoopWarned
from tests.support.clusters import RayHead
from tests.support.loops import is_right, train_config
from tests.support.processes import Start, attempts, read_ledger
from tests.support.reports import history

STEPS = 20
#: What a loop does, what is told of it, and how many of its reports are done again.
HABITS: dict[str, tuple[list[str], int]] = {
    "loads": ([], 0),
    "lets rank 0 load for all": ([], 0),
    "never asks": (["checkpoint-ignored"], 8),
    "asks and does not load": (["checkpoint-ignored"], 8),
    "saves no checkpoint": (["no-checkpoint"], 8),
}


@pytest.mark.full
def test_loop_that_raises_each_time_fails_for_good_with_its_traceback(start: Start, ledger: str, head: RayHead) -> None:
    flow = start(
        loop="tests.support.loops:remotely_failing_loop",
        cluster=head.block,
        config={"ledger": ledger},
        failures={"max_failures": 1, "driver_restarts": 3},
    )
    flow.living_driver()
    outcome = flow.wait(120)
    assert (outcome["state"], outcome["outcome"]) == ("FAILED", "user_error")
    assert len(read_ledger(ledger)) == 2, "one try and one retry in the cluster"
    assert len(attempts(flow.run)) == 1, "no driver restart is spent on it"
    assert 'raise ValueError("a row without a number")' in flow.log
    assert flow.log.count("[rank 0] Traceback") == 3, "once a try, and as the cause of the error"
    assert "Error in training function" not in flow.log, "nor does Ray say it again"
    text, _, details = outcome["error"].partition("; details: ")
    assert "rank 0: " in text
    assert "a row without a number" in text
    assert "Traceback" in Path(details).read_text()
    assert flow.marked() == []


def test_loop_that_reports_nothing_is_restarted_in_the_cluster_with_its_stacks_in_the_log(
    start: Start, ledger: str, head: RayHead
) -> None:
    config = train_config(ledger, steps=10, sleep_once=600)
    flow = start(config=config, failures={"stall_timeout_seconds": 4}, cluster=head.block)
    result = flow.completed(120)
    assert (result["attempts"], result["worker_failures"]) == (1, 1)
    assert is_right(result["checkpoint_uri"], steps=10)
    assert "in sleep_once: time.sleep(seconds)" in flow.log, "the error begins with the line of the loop"


@pytest.mark.parametrize(
    "loop", ["loops:leaving_loop", pytest.param("loop_without_import:loop", marks=pytest.mark.full)]
)
def test_a_worker_that_dies_as_its_loop_starts_is_a_failure_that_counts(start: Start, loop: str) -> None:
    failures, scaling = {"max_failures": 1, "driver_restarts": 0}, {"min_workers": 2, "max_workers": 2}
    flow = start(loop=f"tests.support.{loop}", config={}, scaling=scaling, failures=failures)
    flow.living_driver()
    outcome = flow.wait(180)
    assert (outcome["state"], outcome["outcome"]) == ("FAILED", "cluster_lost")
    assert "workers died more often than max_failures allows" in outcome["error"]
    assert flow.log.count("Worker failure: ") == 2, "one try and one retry in the cluster"
    assert len(attempts(flow.run)) == 1
    assert "Waiting for capacity" not in flow.log
    assert flow.marked() == []


@pytest.mark.full
def test_ranks_that_wait_for_others_are_told_within_a_minute_with_their_lines(start: Start, head: RayHead) -> None:
    flow = start(
        loop="tests.support.loops:waiting_loop",
        config={},
        cluster=head.block,
        scaling={"min_workers": 2, "max_workers": 2, "resources_per_worker": {"CPU": 0.1}},
        failures={"stall_timeout_seconds": 60, "max_failures": 0, "driver_restarts": 0},
    )
    assert flow.wait(240)["state"] == "FAILED", "the stall time-out has ended it"
    [warning] = history(flow.run, LoopWarned)
    assert warning.problem == "ranks-wait"
    line = r"at \S+/loops\.py:\d+ in waiting_loop: "
    assert re.search(rf"rank 0 {line}ray\.train\.report.*; rank 1 {line}time\.sleep", warning.message)
    assert "Ranks wait for others: rank 0 at " in flow.log


@pytest.mark.full
@pytest.mark.usefixtures("api")
def test_each_loop_is_told_what_is_wrong_with_it_and_only_that(tmp_path: Path, joined: RayCluster) -> None:
    def submit(habit: str, run_name: str = "", **more: Any) -> Any:
        name, ranks = run_name or habit.replace(" ", "-"), 2 if "rank" in habit else 1
        return elastic_train.submit(
            "tests.support.loops:habitual_loop",
            run_name=name,
            framework="none",
            train_loop_config={"habit": habit, "died": str(tmp_path / name), "steps": STEPS},
            storage=tmp_path / "runs",
            cluster=joined,
            scaling=ElasticScaling(min_workers=ranks, max_workers=ranks, resources_per_worker={"CPU": 0.1}),
            **more,
        )

    # Two at once: more would take all of a small machine from whatever else is tested there.
    @flow(task_runner=ThreadPoolTaskRunner(max_workers=2))
    def trains() -> dict[str, Any]:
        strict = FailureBudget(ignored_checkpoint="fail")
        futures = {habit: submit(habit) for habit in HABITS}
        futures["strict"] = submit("never asks", "strict", failures=strict, checkpoints=CheckpointPolicy(keep=1))
        return {what: future.result(raise_on_failure=False) for what, future in futures.items()}

    results = trains()
    strict = results.pop("strict")
    told = {habit: history(result.run_uri, LoopWarned) for habit, result in results.items()}
    found = {habit: ([one.problem for one in told[habit]], results[habit].reports_lost) for habit in results}
    assert found == HABITS
    assert results["never asks"].metrics["step"] == STEPS
    assert results["never asks"].time.lost_seconds > 8 * 0.05
    for habit in ("never asks", "asks and does not load"):
        message = told[habit][0].message
        assert "started from the beginning at step 1, although the checkpoint of step 8 exists" in message
        assert "it never read what ray.train.get_checkpoint() returns" in message
    assert strict.outcome is Outcome.USER_ERROR
    assert "it never read what ray.train.get_checkpoint() returns" in str(strict)
    kept = json.loads((tmp_path / "runs" / "strict" / "checkpoint_manager_snapshot.json").read_text())
    assert [made["metrics"]["step"] for made in kept["checkpoint_results"]] == [8], "what it ignored is still there"
