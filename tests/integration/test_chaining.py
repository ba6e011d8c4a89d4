"""The project's pipelines as their users run them: chained by deployments, by events and as subflows."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType

from flows.chained import TRAIN_LOOP, pipeline_in_one, run_to_end
from flows.digits import REQUIRED_ACCURACY, DigitsSummary
from flows.digits_jax import digits_jax
from prefect_elastic_train import CheckpointPolicy, ElasticScaling, LocalStorage, RayCluster, TrainingResult
from prefect_elastic_train.orchestration import automations
from tests.support.deployments import delete_automations, deployment_id, end_of, flow_run_log, project_served, runs_of
from tests.support.processes import wait_for
from tests.support.reports import artifacts_of, report_of, run_events

pytestmark = [pytest.mark.usefixtures("api"), pytest.mark.full]


@pytest.fixture
def served(api_url: str, client: SyncPrefectClient, joined: RayCluster, tmp_path: Path) -> Iterator[Path]:
    """`python -m flows.serve` with blocks of its own; the directory of the runs."""
    policy = CheckpointPolicy(keep=3, score_attribute="train_accuracy")
    for block in (LocalStorage(path=str(tmp_path / "runs")), ElasticScaling(), policy, joined.model_copy()):
        block.save("chaining", overwrite=True)
    with project_served(tmp_path, api_url, "chaining"):
        yield tmp_path / "runs"


def _completed(client: SyncPrefectClient, flow_run_id: UUID, timeout: float) -> Any:
    """Wait for the end of a flow run; returns its result, as a program on any machine does."""
    state = end_of(client, flow_run_id, timeout)
    assert state.is_completed(), f"{state.name}: {state.message}"
    return state.result()


def _automate(client: SyncPrefectClient, deployment: str, at: str) -> None:
    """Have an automation start the evaluation of a deployment's trainings."""
    automations.save_automations(client, [deployment], [], 10, 600.0, "evaluate/digits", at, alert="")
    time.sleep(2)  # a server takes up to a second to load them


def test_nights_are_chained_by_deployments_and_each_goes_on_from_the_best_checkpoint_of_the_one_before(
    client: SyncPrefectClient, served: Path
) -> None:
    train, evaluate = deployment_id(client, "train/train"), deployment_id(client, "evaluate/digits")
    parameters: dict[str, Any] = {"epochs": 2, "data_dir": str(served.parent / "data"), "timeout_seconds": 120}
    run = client.create_flow_run_from_deployment(deployment_id(client, "pipeline/digits"), parameters=parameters)
    result = _completed(client, run.id, 200)
    first = TrainingResult.model_validate(result["trained"])
    best = first.best_checkpoints[-1]
    assert (first.metrics["epoch"], first.started_from) == (2, ""), "there was no night before"
    assert result["evaluation"]["epoch"] == best.metrics["epoch"]
    [evaluated] = runs_of(client, evaluate)
    assert evaluated.parameters["checkpoint_uri"] == best.uri
    [trained] = runs_of(client, train)
    assert "holds no completed run with a checkpoint of training 'train'" in "\n".join(flow_run_log(client, trained.id))

    _automate(client, "train/train", "completed")
    config = {"train_path": str(served.parent / "data" / "train.parquet"), "epochs": 1, "seed": 0}
    config |= {"batch_size": 64, "learning_rate": 1e-3}
    parameters = {"train_loop": TRAIN_LOOP, "train_loop_config": config, "resume_from": "latest"}
    run = client.create_flow_run_from_deployment(train, parameters=parameters)
    second = TrainingResult.model_validate(_completed(client, run.id, 120))
    assert second.started_from == best.uri
    done = best.metrics["epoch"]
    assert {row["epoch"] for row in second.history} == {done, done + 1}, "not the first epoch again"
    assert f"- started from `{best.uri}`" in report_of(client, str(run.id))
    assert f"started from checkpoint {best.uri}" in "\n".join(flow_run_log(client, run.id))

    told = run_events(client, str(run.id))[-1]
    assert told["event"] == "elastic-train.run.completed"
    [evaluation] = wait_for(lambda: [r for r in runs_of(client, evaluate) if r.id != evaluated.id], 30, "an evaluation")
    delete_automations(client, "train/train")
    best = second.best_checkpoints[-1]
    assert evaluation.parameters["checkpoint_uri"] == told["payload"]["best_checkpoint_uri"] == best.uri
    assert _completed(client, evaluation.id, 60)["epoch"] == best.metrics["epoch"]

    # A retry of the flow that waits finds the run that it has started.
    before, prepared = len(runs_of(client, deployment_id(client, "prepare/digits"))), []

    @flow(retries=1)
    def waiting() -> None:
        prepared.append(run_to_end("prepare/digits", {"data_dir": str(served.parent / "data")}, 60))
        if len(prepared) == 1:
            raise ConnectionError("of the first try, after the child has ended")

    waiting()
    assert prepared[0] == prepared[1]
    assert len(runs_of(client, deployment_id(client, "prepare/digits"))) == before + 1


def test_digits_deployment_learns_to_read_and_its_best_checkpoints_are_evaluated(
    client: SyncPrefectClient, served: Path
) -> None:
    _automate(client, "digits/digits", "best-checkpoint")
    run = client.create_flow_run_from_deployment(
        deployment_id(client, "digits/digits"), parameters={"epochs": 4, "shards": 8}
    )
    assert end_of(client, run.id, 240).is_completed()
    [matrix] = [one for one in artifacts_of(client, str(run.id), "markdown") if one.key == "digits-confusion-matrix"]
    assert "data:image/svg+xml;base64," in str(matrix.data)
    told = run_events(client, str(run.id))
    bests = [event for event in told if event["event"] == "elastic-train.run.best-checkpoint"]
    uris = [event["payload"]["checkpoint_uri"] for event in bests]
    assert uris[-1] == told[-1]["payload"]["best_checkpoint_uri"]
    evaluate = deployment_id(client, "evaluate/digits")
    wait_for(lambda: len(runs_of(client, evaluate)) == len(bests), 30, "an evaluation of each")
    delete_automations(client, "digits/digits")
    for made in runs_of(client, evaluate):
        assert made.parameters["checkpoint_uri"] in uris
        # A checkpoint that is not kept may be gone before its evaluation starts.
        kept = made.parameters["checkpoint_uri"] == uris[-1]
        assert end_of(client, made.id, 120).type in (StateType.COMPLETED, *([] if kept else [StateType.CANCELLED]))


def test_subflows_are_chained_in_one_process(tmp_path: Path, joined: RayCluster) -> None:
    result = pipeline_in_one(
        epochs=1,
        data_dir=str(tmp_path / "data"),
        storage=LocalStorage(path=str(tmp_path / "runs")),
        scaling=ElasticScaling(),
        cluster=joined,
    )
    trained = TrainingResult.model_validate(result["trained"])
    assert trained.history[-1]["epoch"] == result["evaluation"]["epoch"] == 1


def test_digits_are_learned_by_two_processes_in_jax(tmp_path: Path, joined: RayCluster) -> None:
    summary = digits_jax(
        epochs=30,
        data_dir=str(tmp_path / "data"),
        scaling=ElasticScaling(min_workers=2, max_workers=2),
        storage=LocalStorage(path=str(tmp_path / "runs")),
        cluster=joined,
    )
    found = DigitsSummary.model_validate(summary)
    assert found.accuracy > REQUIRED_ACCURACY
    assert (found.epochs, found.world_sizes) == (30, [2])
    assert {file.name for file in Path(found.checkpoint_uri).iterdir()} >= {"jax", "loop.json"}
