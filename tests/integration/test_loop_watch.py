"""What is told of loops that go on from their checkpoint, that do not, and that save none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner

from prefect_elastic_train import (
    AttemptFailedError,
    CheckpointPolicy,
    ElasticScaling,
    FailureBudget,
    LocalStorage,
    Outcome,
    RayCluster,
    elastic_train,
)

pytestmark = pytest.mark.usefixtures("api")

LOOP = "tests.support.loops:habitual_loop"
STEPS = 20
#: What a loop does, what is told of it, and how many of its reports are done again.
HABITS: dict[str, tuple[list[str], int]] = {
    "loads": ([], 0),
    "lets rank 0 load for all": ([], 0),
    "counts steps of an epoch": ([], 0),
    "counts nothing": ([], 0),
    "never asks": (["checkpoint-ignored"], 8),
    "asks and does not load": (["checkpoint-ignored"], 8),
    "saves no checkpoint": (["no-checkpoint"], 8),
}


def _warnings(run_uri: str) -> list[dict[str, Any]]:
    segments = sorted((Path(run_uri) / ".elastic_train" / "events").glob("*.jsonl"))
    events = [json.loads(line) for segment in segments for line in segment.read_text().splitlines()]
    return [event for event in events if event["kind"] == "loop_warned"]


@pytest.mark.full
def test_each_loop_is_told_what_is_wrong_with_it_and_only_that(tmp_path: Path, joined: RayCluster) -> None:
    def arguments(habit: str, run_name: str = "") -> dict[str, Any]:
        name, ranks = run_name or habit.replace(" ", "-"), 2 if "rank" in habit else 1
        return {
            "run_name": name,
            "framework": "none",
            "train_loop_config": {"habit": habit, "died": str(tmp_path / name), "steps": STEPS},
            "storage": LocalStorage(path=str(tmp_path / "runs")),
            "cluster": joined,
            "scaling": ElasticScaling(min_workers=ranks, max_workers=ranks, resources_per_worker={"CPU": 0.1}),
        }

    # Two at once: more would take all of a small machine from whatever else is tested there.
    @flow(task_runner=ThreadPoolTaskRunner(max_workers=2))
    def trains() -> dict[str, Any]:
        futures = {habit: elastic_train.submit(LOOP, **arguments(habit)) for habit in HABITS}
        strict = elastic_train.submit(
            LOOP,
            **arguments("never asks", "strict"),
            failures=FailureBudget(ignored_checkpoint="fail"),
            checkpoints=CheckpointPolicy(keep=1),
        )
        results = {habit: future.result() for habit, future in futures.items()}
        return {**results, "strict": strict.result(raise_on_failure=False)}

    results = trains()
    strict = results.pop("strict")
    found = {
        habit: ([warned["problem"] for warned in _warnings(result.run_uri)], result.steps_lost)
        for habit, result in results.items()
    }
    assert found == HABITS
    assert [result.metrics.get("step") for habit, result in results.items() if habit == "never asks"] == [STEPS]
    assert results["never asks"].time.lost_seconds > 8 * 0.05
    told = {habit: warned[0] for habit, result in results.items() if (warned := _warnings(result.run_uri))}
    never, asked = told["never asks"], told["asks and does not load"]
    assert "began again at step 1 although the checkpoint of step 8 is there" in never["message"]
    assert "it never called ray.train.get_checkpoint()" in never["message"]
    assert "never read what it got" in asked["message"]
    assert isinstance(strict, AttemptFailedError)
    assert strict.outcome is Outcome.USER_ERROR
    assert "it never called ray.train.get_checkpoint()" in str(strict)
    kept = json.loads((tmp_path / "runs" / "strict" / "checkpoint_manager_snapshot.json").read_text())
    assert [made["metrics"]["step"] for made in kept["checkpoint_results"]] == [8], "what it ignored is still there"
