"""Trainings that nothing disturbs, on a real cluster with a real Prefect server."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from prefect import flow

from prefect_elastic_train import (
    AttemptFailedError,
    ElasticScaling,
    FailureBudget,
    LocalStorage,
    Outcome,
    RayCluster,
    TrainingResult,
    elastic_train,
)
from prefect_elastic_train.core.bounds import MAX_EVENT_BYTES
from tests.support.processes import attempts, read_ledger, steps_of

pytestmark = pytest.mark.usefixtures("api")

LOOP = "tests.support.loops:hashing_loop"


@pytest.fixture
def where(tmp_path: Path, joined: RayCluster) -> dict[str, Any]:
    """The arguments that all trainings here have."""
    return {"framework": "none", "storage": LocalStorage(path=str(tmp_path)), "cluster": joined}


def test_training_that_reports_more_than_any_message_holds_ends_with_its_result(where: dict[str, Any]) -> None:
    metrics = {**{f"layer_{number}": number / 7 for number in range(30_000)}, "text": "x" * 1_000_000}

    @flow
    def reports_much() -> TrainingResult:
        budget = FailureBudget(driver_restarts=0)
        return elastic_train(LOOP, train_loop_config={"steps": 3, "metrics": metrics}, failures=budget, **where)

    result = reports_much()
    assert len(attempts(Path(result.run_uri))) == 1
    assert result.metrics["step"] == 3
    assert "of 30,002 metrics left out" in result.metrics["…"]
    assert list(result.metrics_dataframe()["step"]) == [1, 2, 3]
    assert [made.metrics["step"] for made in result.best_checkpoints] == [2, 3]
    assert result.left_out == {"best_checkpoints": 1}
    assert len(result.model_dump_json()) < MAX_EVENT_BYTES


def test_ray_data_shards_reach_the_workers(where: dict[str, Any], ledger: str) -> None:
    def make_numbers() -> Any:
        import ray

        return ray.data.range(100)

    @flow
    def with_data() -> TrainingResult:
        return elastic_train(
            "tests.support.loops:dataset_loop",
            train_loop_config={"ledger": ledger},
            datasets={"numbers": make_numbers},
            scaling=ElasticScaling(min_workers=2, max_workers=2),
            **where,
        )

    with_data()
    lines = read_ledger(ledger)
    assert sorted(line["rank"] for line in lines) == [0, 1]
    assert sorted(row for line in lines for row in line["rows"]) == list(range(100))


def test_flow_that_is_retried_after_its_training_succeeded_gets_the_result_at_once(
    where: dict[str, Any], ledger: str
) -> None:
    results: list[TrainingResult] = []

    @flow(retries=1)
    def stumbles_after_training() -> None:
        results.append(elastic_train(LOOP, train_loop_config={"steps": 3, "ledger": ledger}, **where))
        if len(results) == 1:
            raise RuntimeError("the evaluation stumbled")

    stumbles_after_training()
    assert results[0] == results[1]
    assert steps_of(ledger) == [1, 2, 3]
    assert len(attempts(Path(results[0].run_uri))) == 1


def test_run_of_another_flow_run_is_refused_resumed_on_demand_and_a_source_for_new_runs(
    tmp_path: Path, where: dict[str, Any], ledger: str
) -> None:
    @flow(name="owner", flow_run_name="first of all")
    def train(steps: int, run_name: str, **more: Any) -> TrainingResult:
        config = {"steps": steps, "ledger": ledger}
        return elastic_train(LOOP, train_loop_config=config, run_name=run_name, **where, **more)

    assert train(3, "shared").run_name == "shared"
    error = train(5, "shared", return_state=True).result(raise_on_failure=False)
    assert isinstance(error, AttemptFailedError)
    assert error.outcome is Outcome.INVALID
    owner = json.loads((tmp_path / "shared/.elastic_train/attempts/0001.json").read_text())["owner"]
    for part in ("'shared'", "'owner'", "'first of all'", owner["flow_run_id"], "resume=True"):
        assert part in str(error)
    assert len(attempts(tmp_path / "shared")) == 1

    resumed = train(5, "shared", resume=True)
    assert (resumed.metrics, resumed.attempts) == ({"step": 5}, 2)
    assert steps_of(ledger) == [1, 2, 3, 4, 5], "no step is done again"

    before = _files(tmp_path / "shared")
    assert train(7, "continued", resume_from="shared").attempts == 1
    assert steps_of(ledger)[5:] == [6, 7]
    assert _files(tmp_path / "shared") == before, "the other run is left untouched"
    missing = train(7, "orphan", resume_from="shared@epoch-9", return_state=True).result(raise_on_failure=False)
    assert "has no checkpoint 'epoch-9'" in str(missing)


def test_changed_configuration_of_a_default_name_is_refused_with_the_difference(
    where: dict[str, Any], ledger: str
) -> None:
    steps = [2, 3]

    @flow(retries=1)
    def changes_its_mind() -> None:
        elastic_train(LOOP, train_loop_config={"steps": steps.pop(0), "ledger": ledger}, **where)
        raise RuntimeError("again")

    error = changes_its_mind(return_state=True).result(raise_on_failure=False)
    assert isinstance(error, AttemptFailedError)
    assert "train_loop_config['steps'] changed" in str(error)
    assert "run_name" in str(error)


def _files(folder: Path) -> dict[str, tuple[int, float]]:
    return {str(file): (file.stat().st_size, math.floor(file.stat().st_mtime)) for file in folder.rglob("*")}
