"""Trainings that nothing disturbs, on a real cluster with a real Prefect server."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.context import FlowRunContext

from prefect_elastic_train import (
    AttemptFailedError,
    CheckpointPolicy,
    ElasticScaling,
    FailureBudget,
    LocalStorage,
    Outcome,
    RayCluster,
    TrainingResult,
    elastic_train,
)
from prefect_elastic_train.core.size_limits import MAX_EVENT_BYTES
from prefect_elastic_train.orchestration.flow_run_state import has_begun
from tests.support.loops import numpy_loop, validate_with_numpy
from tests.support.own_backend import OwnConfig
from tests.support.processes import attempts, commits, read_ledger, steps_of, wait_for

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


def test_a_backend_of_ones_own_prepares_the_workers(where: dict[str, Any]) -> None:
    @flow
    def with_backend() -> TrainingResult:
        return elastic_train("tests.support.own_backend:loop", torch_config=OwnConfig("by the backend"), **where)

    assert with_backend().metrics["variable"] == "by the backend"


def test_numbers_of_numpy_are_metrics_of_reports_and_validations_and_what_a_loop_returns_ends_no_training(
    where: dict[str, Any],
) -> None:
    from ray.train import ValidationConfig

    @flow
    def trains() -> TrainingResult:
        validation = ValidationConfig(validate_with_numpy, ray_remote_kwargs={"num_cpus": 0})
        budget = FailureBudget(max_failures=0, driver_restarts=0)
        return elastic_train(numpy_loop, validation_config=validation, failures=budget, **where)

    assert trains().metrics == {"loss": 0.5, "step": 1, "accuracy": 0.75, "right": 3}


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


def test_checkpoints_that_a_loop_has_put_into_the_run_itself_count_if_its_ranks_agree(where: dict[str, Any]) -> None:
    @flow
    def places(mixed: bool) -> TrainingResult:
        scaling = ElasticScaling(min_workers=2, max_workers=2)
        config = {"mixed": mixed}
        name = f"mixed-{mixed}"
        return elastic_train(
            "tests.support.loops:placing_loop", train_loop_config=config, run_name=name, scaling=scaling, **where
        )

    result = places(False)
    manifest = commits(Path(result.run_uri))[-1]["manifest"]
    assert [name.partition("_")[0] for name in manifest] == ["placed", "checkpoint"]
    assert [sorted(files) for files in manifest.values()] == [["rank-0", "rank-1"]] * 2
    error = places(True, return_state=True).result(raise_on_failure=False)
    assert isinstance(error, AttemptFailedError)
    assert (error.outcome, error.attempt) == (Outcome.USER_ERROR, 1)
    assert "with NO_UPLOAD, all ranks must report the same path" in str(error)


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


def test_where_less_is_better_checkpoints_without_a_score_are_neither_kept_as_the_best_nor_begun_from(
    where: dict[str, Any],
) -> None:
    policy = CheckpointPolicy(keep=2, score_attribute="loss", score_order="min")

    @flow
    def twice() -> tuple[TrainingResult, TrainingResult]:
        more = {"checkpoints": policy, **where}
        scores = [3.0, 1.0, None, math.nan, 2.0, None]
        loop = "tests.support.loops:scored_loop"
        first = elastic_train(loop, train_loop_config={"scores": scores}, run_name="first", **more)
        second = elastic_train(
            loop, train_loop_config={"scores": [None]}, run_name="second", resume_from="first@best", **more
        )
        return first, second

    first, second = twice()
    assert [made.metrics["step"] for made in first.best_checkpoints] == [6, 5, 2], "the best two, and the newest"
    for best, step in ((True, 2), (False, 6)):
        with first.checkpoint_directory(best=best) as folder:
            assert json.loads((folder / "state.json").read_text()) == step
    assert second.metrics == {"step": 3, "begun": 2}
    assert second.best_checkpoint_uri == second.best_checkpoints[-1].uri
    assert second.best_checkpoints[-1].metrics["loss"] == 1.0, "what it began from, which has a score"


def test_a_flow_run_that_had_trained_does_not_begin_again_where_its_storage_is_missing(
    where: dict[str, Any], tmp_path: Path, client: SyncPrefectClient
) -> None:
    mount = tmp_path / "mnt"
    more = {**where, "storage": LocalStorage(path=str(mount / "runs")), "run_name": "mounted"}
    executions: list[int] = []

    @flow(retries=1)
    def nightly() -> None:
        executions.append(1)
        context = FlowRunContext.get()
        assert context is not None
        assert context.flow_run is not None
        if len(executions) > 1:
            elastic_train(LOOP, train_loop_config={"steps": 2}, **more)
        flow_run_id = str(context.flow_run.id)
        assert not has_begun(client, "mounted", flow_run_id)
        elastic_train(LOOP, train_loop_config={"steps": 2}, **more)
        wait_for(lambda: has_begun(client, "mounted", flow_run_id), 30)
        mount.rename(tmp_path / "unmounted")
        raise RuntimeError("the machine is lost")

    with pytest.raises(AttemptFailedError, match="the storage is not mounted here") as refused:
        nightly()
    assert (refused.value.outcome, len(executions)) == (Outcome.STORAGE_ERROR, 2)
    assert not mount.exists()


def test_a_new_flow_run_does_not_begin_where_the_storage_of_a_saved_block_is_missing(
    where: dict[str, Any], tmp_path: Path, client: SyncPrefectClient
) -> None:
    mount = tmp_path / "mnt"
    LocalStorage(path=str(mount / "runs")).save("mounted")
    more = {**where, "storage": "training-storage-directory/mounted", "train_loop_config": {"steps": 2}}

    @flow
    def nightly() -> str:
        return elastic_train(LOOP, **more).run_uri

    first = Path(nightly())
    assert Path(nightly()).parent == first.parent
    mount.rename(tmp_path / "unmounted")
    with pytest.raises(AttemptFailedError, match="it is empty: its mount is missing here") as refused:
        nightly()
    assert (refused.value.outcome, mount.exists()) == (Outcome.STORAGE_ERROR, False)
    (tmp_path / "unmounted").rename(mount)
    assert Path(nightly()).parent == first.parent, "it is mounted again"
    mount.rename(tmp_path / "unmounted")
    client.delete_variable_by_name(str(refused.value).rpartition("delete ")[2].partition("`")[0])
    assert Path(nightly()).parent == first.parent, "it may be empty"
