"""Trainings that nothing disturbs, on a real cluster with a real Prefect server."""

import math
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.context import FlowRunContext
from prefect.states import Failed, State
from ray.train import ValidationConfig

from prefect_elastic_train import (
    AttemptFailedError,
    ElasticScaling,
    LocalStorage,
    Outcome,
    RayCluster,
    TrainingResult,
    elastic_train,
)
from tests.support.own_backend import OwnConfig
from tests.support.processes import attempts, read_ledger, steps_of
from tests.support.reports import run_events

pytestmark = pytest.mark.usefixtures("api")

LOOP = "tests.support.loops:hashing_loop"
TWO = ElasticScaling(min_workers=2, max_workers=2)
Train = Callable[..., Any]


@pytest.fixture
def where(tmp_path: Path, joined: RayCluster) -> dict[str, Any]:
    """The arguments that all trainings here have."""
    return {"framework": "none", "storage": tmp_path, "cluster": joined}


@pytest.fixture
def train(where: dict[str, Any]) -> Train:
    """Trains in a flow, and returns the result or the error."""

    def run(loop: Any = LOOP, **arguments: Any) -> Any:
        @flow(name="owner", flow_run_name="first of all")
        def trains() -> TrainingResult:
            return elastic_train(loop, **{**where, **arguments})

        return trains(return_state=True).result(raise_on_failure=False)

    return run


@pytest.mark.full
def test_a_backend_of_ones_own_prepares_the_workers(train: Train) -> None:
    result = train("tests.support.own_backend:loop", torch_config=OwnConfig("by the backend"))
    assert result.metrics["variable"] == "by the backend"


@pytest.mark.full
def test_checkpoints_are_validated_while_the_workers_hold_all_cpus_that_a_local_cluster_was_given(
    train: Train, ledger: str
) -> None:
    train(
        "tests.support.loops:validated_loop",
        train_loop_config={"ledger": ledger},
        scaling=ElasticScaling(min_workers=2, max_workers=3),
        cluster=RayCluster(num_cpus=2),
        validation_config=ValidationConfig(lambda checkpoint: {"score": 1.0}),
    )
    assert [line["validated"] for line in read_ledger(ledger)] == [3, 3], "each of the two workers sees all of them"


#: Before, Prefect does not run a flow again that returns a failed state.
needs_prefect_3_9 = pytest.mark.skipif(version("prefect").startswith("3.8"), reason="for what Prefect does since 3.9")


@pytest.mark.parametrize("returns", [False, pytest.param(True, marks=needs_prefect_3_9)])
def test_flow_that_is_retried_after_its_training_gets_the_result_at_once_and_a_changed_configuration_is_refused(
    where: dict[str, Any], ledger: str, returns: bool
) -> None:
    results: list[TrainingResult] = []

    @flow(retries=2)
    def stumbles_after_training() -> State[Any]:
        config = {"steps": 3 + len(results) // 2, "ledger": ledger}
        results.append(elastic_train(LOOP, train_loop_config=config, **where))
        if returns:
            return Failed(message="the evaluation stumbled")
        raise RuntimeError("the evaluation stumbled")

    error = stumbles_after_training(return_state=True).result(raise_on_failure=False)
    assert results == [results[0]] * 2
    assert steps_of(ledger) == [1, 2, 3]
    assert len(attempts(Path(results[0].run_uri))) == 1
    assert "train_loop_config['steps'] changed" in str(error)
    assert "run_name" in str(error)


@pytest.mark.full
def test_run_of_another_flow_run_is_refused_resumed_on_demand_and_a_source_for_new_runs(
    tmp_path: Path, train: Train, ledger: str
) -> None:
    def train_to(steps: int, run_name: str, **more: Any) -> Any:
        return train(train_loop_config={"steps": steps, "ledger": ledger}, run_name=run_name, **more)

    assert train_to(3, "shared").run_name == "shared"
    error = train_to(5, "shared")
    assert error.outcome is Outcome.INVALID
    [attempt] = attempts(tmp_path / "shared")
    for part in ("'shared'", "'owner'", "'first of all'", attempt["owner"]["flow_run_id"], "resume=True"):
        assert part in str(error)

    resumed = train_to(5, "shared", resume=True)
    assert (resumed.metrics, resumed.attempts) == ({"step": 5}, 2)
    assert steps_of(ledger) == [1, 2, 3, 4, 5], "no step is done again"

    before = _files(tmp_path / "shared")
    assert train_to(7, "continued", resume_from="shared").attempts == 1
    assert steps_of(ledger)[5:] == [6, 7]
    assert _files(tmp_path / "shared") == before, "the other run is left untouched"
    assert "has no checkpoint 'epoch-9'" in str(train_to(7, "orphan", resume_from="shared@epoch-9"))


def _files(folder: Path) -> dict[str, tuple[int, float]]:
    return {str(file): (file.stat().st_size, math.floor(file.stat().st_mtime)) for file in folder.rglob("*")}


def test_a_flow_run_that_had_trained_does_not_begin_again_where_its_storage_is_missing(
    where: dict[str, Any], tmp_path: Path, client: SyncPrefectClient
) -> None:
    mount = tmp_path / "mnt"
    more = {**where, "storage": mount / "runs", "run_name": "mounted"}
    executions: list[int] = []

    @flow(retries=1)
    def nightly() -> None:
        executions.append(1)
        elastic_train(LOOP, train_loop_config={"steps": 2}, **more)
        run_events(client, str(FlowRunContext.get().flow_run.id))  # waits for the last one
        mount.rename(tmp_path / "unmounted")
        raise RuntimeError("the machine is lost")

    with pytest.raises(AttemptFailedError, match="the storage is not mounted here") as refused:
        nightly()
    assert (refused.value.outcome, len(executions)) == (Outcome.STORAGE_ERROR, 2)
    assert not mount.exists()


@pytest.mark.full
def test_a_new_flow_run_does_not_begin_where_the_storage_of_a_saved_block_is_missing(
    train: Train, tmp_path: Path, client: SyncPrefectClient
) -> None:
    mount, unmounted = tmp_path / "mnt", tmp_path / "unmounted"
    LocalStorage(path=str(mount / "runs")).save("mounted")

    def nightly() -> Any:
        return train(train_loop_config={"steps": 2}, storage="training-storage-directory/mounted")

    first = nightly()
    mount.rename(unmounted)
    refused = nightly()
    assert (refused.outcome, mount.exists()) == (Outcome.STORAGE_ERROR, False)
    assert "it is empty: its mount is missing here" in str(refused)
    unmounted.rename(mount)
    assert Path(nightly().run_uri).parent == Path(first.run_uri).parent, "it is mounted again"
    mount.rename(unmounted)
    client.delete_variable_by_name(str(refused).rpartition("delete ")[2].partition("`")[0])
    assert nightly().status == "completed", "it may be empty"
