"""`flows/chained.py` as its user runs it: chained by deployments, by an event and as subflows, night after night."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId
from prefect.client.schemas.objects import FlowRun
from typer.testing import CliRunner

from flows.chained import TRAIN_LOOP, pipeline_in_one, run_to_end
from prefect_elastic_train import CheckpointPolicy, ElasticScaling, LocalStorage, RayCluster, TrainingResult
from prefect_elastic_train.cli import app
from prefect_elastic_train.orchestration import automations
from tests.support.deployments import api_client, flow_run_log, project_served
from tests.support.processes import wait_for
from tests.support.reports import report_of, run_events

pytestmark = [pytest.mark.usefixtures("api"), pytest.mark.full]

POLICY = CheckpointPolicy(keep=3, score_attribute="train_accuracy")


@pytest.fixture(scope="module")
def client(api_url: str) -> Iterator[SyncPrefectClient]:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: api_url}), api_client() as client:
        yield client


@pytest.fixture(scope="module")
def served(
    api_url: str, client: SyncPrefectClient, joined: RayCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """`python -m flows.serve` with blocks of its own; gives the directory of the runs."""
    folder = tmp_path_factory.mktemp("chaining")
    storage = LocalStorage(path=str(folder / "runs"))
    for block in (storage, ElasticScaling(min_workers=1, max_workers=1), POLICY, joined.model_copy()):
        block.save("chaining", overwrite=True)
    with project_served(folder, api_url, "chaining"):
        yield folder / "runs"


def _deployment(client: SyncPrefectClient, name: str) -> UUID:
    return client.read_deployment_by_name(name).id


def _completed(client: SyncPrefectClient, flow_run_id: UUID, timeout: float) -> dict[str, Any]:
    """Wait for the end of a flow run and give its result, as a program on any machine does."""

    def ended() -> FlowRun | None:
        now = client.read_flow_run(flow_run_id)
        return now if now.state is not None and now.state.is_final() else None

    state = wait_for(ended, timeout, f"the end of flow run {flow_run_id}").state
    assert state is not None
    assert state.is_completed(), f"{state.name}: {state.message}"
    result: dict[str, Any] = state.result()
    return result


def _runs_of(client: SyncPrefectClient, deployment: UUID) -> list[FlowRun]:
    its_runs = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployment]))
    return client.read_flow_runs(flow_run_filter=its_runs)


@pytest.fixture(scope="module")
def first_night(client: SyncPrefectClient, served: Path) -> TrainingResult:
    """Prepared, trained and evaluated by one deployment each, which a fourth one starts one after the other."""
    parameters = {"epochs": 2, "data_dir": str(served.parent / "data"), "timeout_seconds": 120}
    deployment = _deployment(client, "pipeline/digits")
    run = client.create_flow_run_from_deployment(deployment, parameters=parameters)
    result = _completed(client, run.id, 200)
    trained = TrainingResult.model_validate(result["trained"])
    assert result["evaluation"]["epoch"] == trained.best_checkpoints[-1].metrics["epoch"]
    [evaluated] = _runs_of(client, _deployment(client, "evaluate/digits"))
    assert evaluated.parameters["checkpoint_uri"] == trained.best_checkpoints[-1].uri
    assert evaluated.parameters["storage"] == "training-storage-directory/chaining"
    return trained


def test_deployments_are_chained_by_a_flow_that_passes_their_results(
    client: SyncPrefectClient, first_night: TrainingResult
) -> None:
    assert first_night.metrics["epoch"] == 2
    assert first_night.started_from == "", "there was no night before"
    [run] = _runs_of(client, _deployment(client, "train/train"))
    said = "\n".join(flow_run_log(client, run.id))
    assert "holds no completed run with a checkpoint of training 'train'" in said
    assert "it trains from the beginning" in said


@pytest.fixture
def evaluated_when_completed(client: SyncPrefectClient, served: Path) -> Iterator[UUID]:
    """An automation that starts the evaluation when a training has completed."""
    evaluation = _deployment(client, "evaluate/digits")
    wanted = automations.scopes(client, ["train/train"], [])
    changes = automations.apply(client, wanted, 10, 600.0, evaluate_with="evaluate/digits", evaluate_at="completed")
    assert changes[-1].name == "elastic-train: evaluate completed trainings of train/train"
    yield evaluation
    automations.delete(client, ["train/train"])


def test_the_next_night_goes_on_from_the_best_checkpoint_and_its_end_starts_the_evaluation(
    client: SyncPrefectClient, served: Path, first_night: TrainingResult, evaluated_when_completed: UUID
) -> None:
    best = first_night.best_checkpoints[-1]
    evaluations_before = {run.id for run in _runs_of(client, evaluated_when_completed)}
    data = {"train_path": str(served.parent / "data" / "train.parquet")}
    parameters = {
        "train_loop": TRAIN_LOOP,
        "train_loop_config": {**data, "epochs": 1, "seed": 0, "batch_size": 64, "learning_rate": 1e-3},
        "resume_from": "latest",
    }
    run = client.create_flow_run_from_deployment(_deployment(client, "train/train"), parameters=parameters)
    trained = TrainingResult.model_validate(_completed(client, run.id, 120))

    assert trained.started_from == best.uri
    assert [row["epoch"] for row in trained.history] == [best.metrics["epoch"] + 1], "not the first epoch again"
    assert Path(best.uri).is_dir(), "the run of the night before is untouched"
    assert f"- started from `{best.uri}`" in report_of(client, str(run.id))
    assert f"started from checkpoint {best.uri}" in "\n".join(flow_run_log(client, run.id))
    details = json.loads(CliRunner().invoke(app, ["runs", "show", str(served), trained.run_name, "--json"]).stdout)
    assert details["resume_from"] == "latest"
    assert [one["uri"] for one in details["ancestors"]] == [best.uri]
    assert details["result"]["started_from"] == best.uri

    told = run_events(client, str(run.id))
    assert told[-1]["event"] == "elastic-train.run.completed"
    evaluation = wait_for(
        lambda: next((r for r in _runs_of(client, evaluated_when_completed) if r.id not in evaluations_before), None),
        30,
        "the evaluation",
    )
    expected = told[-1]["payload"]["best_checkpoint_uri"]
    best_now = trained.best_checkpoints[-1]
    assert evaluation.parameters["checkpoint_uri"] == expected == best_now.uri
    assert evaluation.parameters["storage"] == "training-storage-directory/chaining"
    assert _completed(client, evaluation.id, 60)["epoch"] == best_now.metrics["epoch"]


def test_a_retry_of_the_flow_that_waits_finds_the_run_that_it_has_started(
    client: SyncPrefectClient, served: Path
) -> None:
    deployment = _deployment(client, "prepare/digits")
    before = {run.id for run in _runs_of(client, deployment)}
    prepared: list[dict[str, Any]] = []

    @flow(retries=1)
    def waiting() -> None:
        prepared.append(run_to_end("prepare/digits", {"data_dir": str(served.parent / "data")}, 60))
        if len(prepared) == 1:
            raise ConnectionError("of the first try, after the child has ended")

    waiting()
    first, second = prepared
    assert first == second
    assert len({run.id for run in _runs_of(client, deployment)} - before) == 1


def test_subflows_are_chained_in_one_process(tmp_path: Path, joined: RayCluster) -> None:
    result = pipeline_in_one(
        epochs=1,
        data_dir=str(tmp_path / "data"),
        storage=LocalStorage(path=str(tmp_path / "runs")),
        scaling=ElasticScaling(),
        cluster=joined,
    )
    trained = TrainingResult.model_validate(result["trained"])
    assert [row["epoch"] for row in trained.history] == [1]
    assert result["evaluation"]["epoch"] == 1
    assert 0 < result["evaluation"]["accuracy"] < 1
