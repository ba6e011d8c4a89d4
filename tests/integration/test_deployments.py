"""Blocks on a real server, deployments through its API, and the flows that come with the project."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import PrefectHTTPStatusError

from prefect_elastic_train import (
    CheckpointPolicy,
    ElasticScaling,
    FailureBudget,
    LocalStorage,
    RayCluster,
    S3Storage,
    checkpoint_directory,
)
from prefect_elastic_train.blocks.lookup import storage_named
from prefect_elastic_train.orchestration import automations
from prefect_elastic_train.runs.commits import newest_commit
from prefect_elastic_train.runs.layout import ended_name
from prefect_elastic_train.runs.snapshots import checkpoint_names
from prefect_elastic_train.storage.opening import open_storage
from tests.support.buckets import BUCKET
from tests.support.deployments import Program, project_served
from tests.support.processes import ROOT, wait_for
from tests.support.reports import run_events
from tests.support.s3 import MotoServer

pytestmark = pytest.mark.usefixtures("api")


@pytest.fixture
def client() -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client


@pytest.fixture(scope="module")
def served(api_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """The deployments that come with the project."""
    folder = tmp_path_factory.mktemp("served")
    with project_served(folder, api_url, "tests", ELASTIC_TRAIN_RUNS=str(folder / "runs")) as program:
        yield program


def _end_of(client: SyncPrefectClient, run: FlowRun, timeout: float) -> FlowRun:
    def ended() -> FlowRun | None:
        now = client.read_flow_run(run.id)
        return now if now.state is not None and now.state.is_final() else None

    return wait_for(ended, timeout, f"the end of {run.name}")


def test_blocks_are_registered_from_the_package_saved_and_loaded(client: SyncPrefectClient, api_url: str) -> None:
    registered = subprocess.run(
        [sys.executable, "-m", "prefect", "block", "register", "-m", "prefect_elastic_train"],
        env={**os.environ, "PREFECT_API_URL": api_url, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "registered 7 blocks" in registered.stdout
    scaling = ElasticScaling(min_workers=1, max_workers=4, resources_per_worker={"CPU": 2})
    cluster = RayCluster(address="10.0.0.5:6379", auth_token="seven sisters")
    scaling.save("round-trip", overwrite=True)
    cluster.save("round-trip", overwrite=True)
    assert ElasticScaling.load("round-trip") == scaling
    loaded = RayCluster.load("round-trip")
    assert loaded.auth_token.get_secret_value() == "seven sisters"
    for block in (FailureBudget(), CheckpointPolicy(keep=3), LocalStorage(path="/tmp/x")):
        block.save("round-trip", overwrite=True)
        assert type(block).load("round-trip") == block


def test_block_data_as_the_ui_stores_dicts_is_read(client: SyncPrefectClient) -> None:
    document_id = ElasticScaling(max_workers=2).save("from-the-ui", overwrite=True)
    from prefect.client.schemas.actions import BlockDocumentUpdate

    wrapped = {"__prefect_kind": "json", "value": '{"CPU": 3}'}
    client.request(
        "PATCH",
        "/block_documents/{id}",
        path_params={"id": document_id},
        json=BlockDocumentUpdate(data={"max_workers": 2, "resources_per_worker": wrapped}).model_dump(mode="json"),
    )
    assert ElasticScaling.load("from-the-ui").resources_per_worker == {"CPU": 3}


def test_bad_block_data_fails_at_load_naming_field_value_and_rule(client: SyncPrefectClient) -> None:
    from prefect.client.schemas.actions import BlockDocumentUpdate

    document_id = ElasticScaling(max_workers=2).save("bad", overwrite=True)
    client.request(
        "PATCH",
        "/block_documents/{id}",
        path_params={"id": document_id},
        json=BlockDocumentUpdate(data={"max_workers": 0}).model_dump(mode="json"),
    )
    with pytest.raises(ValueError, match=r"(?s)max_workers.*greater than or equal to 1.*input_value=0"):
        ElasticScaling.load("bad")


@pytest.mark.full
def test_a_deployment_takes_a_bucket_by_reference_and_its_result_reads_from_it(
    client: SyncPrefectClient, served: Program, tmp_path: Path
) -> None:
    deployment = client.read_deployment_by_name("train/train").id
    with MotoServer() as moto:
        moto.create_bucket(BUCKET)
        storage = S3Storage(
            bucket_path=f"{BUCKET}/runs",
            endpoint_url=moto.endpoint_url,
            region="us-east-1",
            access_key_id="AKIATEST",
            secret_access_key="a-secret",
        )
        storage.save("bucket", overwrite=True)
        run = client.create_flow_run_from_deployment(
            deployment,
            parameters={
                "train_loop": "tests.support.loops:counting_loop",
                "train_loop_config": {"steps": 3},
                "framework": "none",
                "storage": {"$ref": {"block_document_id": str(storage._block_document_id)}},
            },
        )
        ended = _end_of(client, run, 180)
        assert ended.state is not None
        assert ended.state.type == StateType.COMPLETED, served.log[-3000:]
        loaded = storage_named("bucket")
        assert open_storage(loaded).run_names() == [f"train-{str(run.id)[:8]}"]
        commit = newest_commit(open_storage(loaded).run(f"train-{str(run.id)[:8]}"))
        assert commit is not None
        uri = f"s3://{BUCKET}/runs/train-{str(run.id)[:8]}/{checkpoint_names(commit.snapshot)[-1]}"
        ended_record = json.loads(open_storage(loaded).run(f"train-{str(run.id)[:8]}").read(ended_name(1)) or b"")
        assert ended_record["result"]["storage_block"] == "training-storage-s3/bucket"
        with checkpoint_directory(uri, "training-storage-s3/bucket") as directory:
            assert json.loads((directory / "step.json").read_text()) == {"step": 3}


def test_server_refuses_bad_parameters_of_a_deployment(client: SyncPrefectClient, served: Program) -> None:
    deployment = client.read_deployment_by_name("train/train").id
    for parameters in (
        {"train_loop": "not a path"},
        {"train_loop": "a:b", "framework": "tensorflow"},
        {"train_loop": "a:b", "scaling": {"min_workers": 0}},
        {"train_loop": "a:b", "scaling": {"workers": 2}},
    ):
        with pytest.raises(Exception, match="409"):
            client.create_flow_run_from_deployment(deployment, parameters=parameters)


def test_secret_that_is_given_inline_is_refused_with_the_way_out(
    client: SyncPrefectClient, served: Program, tmp_path: Path
) -> None:
    deployment = client.read_deployment_by_name("train/train").id
    run = client.create_flow_run_from_deployment(
        deployment,
        parameters={
            "train_loop": "tests.support.loops:counting_loop",
            "train_loop_config": {"steps": 3},
            "framework": "none",
            "storage": LocalStorage(path=str(tmp_path / "runs")),
            "cluster": RayCluster(address="127.0.0.1:6379", auth_token="seven sisters"),
        },
    )
    ended = _end_of(client, run, 60)
    assert ended.state is not None
    assert ended.state.type == StateType.FAILED
    assert "RayCluster.auth_token is masked" in (ended.state.message or "")
    assert "Save the block" in (ended.state.message or "")
    assert "seven sisters" not in served.log
    assert not (tmp_path / "runs").exists(), "nothing was started"


def test_schedule_of_a_deployment_makes_runs(client: SyncPrefectClient, served: Program) -> None:
    from prefect.client.schemas.schedules import CronSchedule

    deployment = client.read_deployment_by_name("train/train").id
    nightly = CronSchedule(cron="0 3 * * *", timezone="UTC")
    (schedule,) = client.create_deployment_schedules(deployment, [(nightly, True)])
    its_runs = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployment]))

    def scheduled() -> list[FlowRun]:
        runs = client.read_flow_runs(flow_run_filter=its_runs)
        return [run for run in runs if run.state is not None and run.state.is_scheduled()]

    try:
        runs = wait_for(lambda: len(scheduled()) >= 2 and scheduled(), 60, "scheduled runs")
    finally:
        client.delete_deployment_schedule(deployment, schedule.id)
    from prefect_elastic_train.runs.identity import default_run_name

    names = {default_run_name("train", str(run.id), 1) for run in runs}
    assert len(names) == len(runs), "each night is a run of its own"


def test_demo_ends_completed_and_says_where_everything_is(api_url: str, tmp_path: Path) -> None:
    demo = subprocess.run(
        [sys.executable, "-m", "flows.digits"],
        cwd=tmp_path,
        env={**os.environ, "PREFECT_API_URL": api_url, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert demo.returncode == 0, demo.stdout[-3000:] + demo.stderr[-3000:]
    told = dict(line.split(maxsplit=1) for line in demo.stdout.splitlines() if line.startswith(("state ", "UI ")))
    assert told["state"] == "Completed"
    assert "/runs/flow-run/" in told["UI"]
    accuracy = re.search(r"test accuracy +([\d.]+) ", demo.stdout)
    folder = re.search(r"run directory +(.+)", demo.stdout)
    assert accuracy is not None
    assert folder is not None
    assert float(accuracy[1]) >= 0.95
    assert (Path(folder[1]) / ".elastic_train" / "run.json").exists()


@pytest.fixture
def evaluated(client: SyncPrefectClient, served: Program) -> Iterator[Any]:
    """An automation that evaluates the best checkpoints of the digits deployment; gives what deployment it starts."""
    evaluation = client.read_deployment_by_name("evaluate/digits").id
    wanted = automations.scopes(client, ["digits/digits"], [])
    for what in ("created", "unchanged"):
        changes = automations.apply(client, wanted, 10, 600.0, evaluate_with="evaluate/digits")
        assert [change.what for change in changes] == [what] * 3
    time.sleep(2)  # a server takes up to a second to load them
    yield evaluation
    assert len(automations.delete(client, ["digits/digits"])) == 3


@pytest.mark.full
def test_digits_deployment_learns_to_read_and_its_best_checkpoints_are_evaluated(
    client: SyncPrefectClient, served: Program, evaluated: Any
) -> None:
    deployment = client.read_deployment_by_name("digits/digits").id
    run = client.create_flow_run_from_deployment(deployment, parameters={"epochs": 4})
    ended = _end_of(client, run, 240)
    assert ended.state is not None
    assert ended.state.type == StateType.COMPLETED, served.log[-3000:]
    artifacts = client.request("POST", "/artifacts/filter", json={"flow_runs": {"id": {"any_": [str(run.id)]}}}).json()
    matrix = next(artifact for artifact in artifacts if artifact["key"] == "digits-confusion-matrix")
    assert "data:image/svg+xml;base64," in matrix["data"]
    runs = list((served.log_file.parent / "runs").glob("digits-*"))
    assert len(runs) == 1
    accuracy = re.search(r"\*\*([\d.]+)%\*\* of the held-out images are read correctly", matrix["data"])
    assert accuracy is not None
    assert float(accuracy[1]) >= 90
    told = run_events(client, str(run.id))
    best = told[-1]["payload"]["best_checkpoint_uri"]
    bests = [event for event in told if event["event"] == "elastic-train.run.best-checkpoint"]
    assert bests[-1]["payload"]["checkpoint_uri"] == best
    assert {related["prefect.resource.role"] for related in bests[-1]["related"]} >= {"flow-run", "flow", "deployment"}
    its_runs = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[evaluated]))
    evaluations = wait_for(
        lambda: [found for found in [client.read_flow_runs(flow_run_filter=its_runs)] if len(found) == len(bests)],
        30,
        "an evaluation of each",
    )[0]
    parameters = {(made.parameters["checkpoint_uri"], made.parameters["storage"]) for made in evaluations}
    uris = [event["payload"]["checkpoint_uri"] for event in bests]
    assert parameters == {(uri, "training-storage-directory/tests") for uri in uris}
    [of_best] = [made for made in evaluations if made.parameters["checkpoint_uri"] == best]
    assert _end_of(client, of_best, 120).state.type == StateType.COMPLETED
    for made in evaluations:
        # A checkpoint that is not kept may be gone before its evaluation starts.
        assert _end_of(client, made, 120).state.type in (StateType.COMPLETED, StateType.CANCELLED)


#: What the profiles take from the environment; nothing answers there, and nothing asks.
PROFILE_VARIABLES = {
    "ELASTIC_TRAIN_SPOT_GPU_ADDRESS": "http://ray.example.com:8265",
    "ELASTIC_TRAIN_SPOT_GPU_TOKEN": "seven sisters",
    "ELASTIC_TRAIN_TPU_V6E_ADDRESS": "10.0.0.5:6379",
    "ELASTIC_TRAIN_S3_BUCKET_PATH": "bucket/runs",
    "ELASTIC_TRAIN_IMAGE": "registry.example.com/trainings:1",
}


@pytest.fixture(scope="module")
def deployed(api_url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, DeploymentResponse]:
    """All of `prefect.yaml` and its Kubernetes variant, from a clone: work pools, blocks, deployments."""
    environment = {
        **os.environ,
        **PROFILE_VARIABLES,
        "PREFECT_API_URL": api_url,
        "ELASTIC_TRAIN_RUNS": str(tmp_path_factory.mktemp("deployed")),
    }

    def prefect(*command: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert "seven sisters" not in done.stdout + done.stderr

    with httpx.Client(base_url=api_url) as http:
        template = json.loads((ROOT / "kubernetes" / "base-job-template.json").read_text())
        for pool in (
            {"name": "elastic-train", "type": "process"},
            {"name": "elastic-train-kubernetes", "type": "kubernetes", "base_job_template": template},
        ):
            http.post("/work_pools/", json=pool).raise_for_status()
        prefect("blocks.apply")
        prefect("prefect", "--no-prompt", "deploy", "--all")
        prefect("prefect", "--no-prompt", "deploy", "--all", "--prefect-file", "kubernetes/prefect.yaml")
        pools = {"work_pools": {"name": {"any_": ["elastic-train", "elastic-train-kubernetes"]}}}
        found = DeploymentResponse.model_validate_list(http.post("/deployments/filter", json=pools).json())
        flows = {flow["id"]: flow["name"] for flow in http.post("/flows/filter", json={}).json()}
    return {f"{flows[str(deployment.flow_id)]}/{deployment.name}": deployment for deployment in found}


def test_all_of_prefect_yaml_is_deployed_and_runs_are_accepted(
    client: SyncPrefectClient, deployed: dict[str, DeploymentResponse]
) -> None:
    assert sorted(deployed) == [
        "digits-jax/laptop",
        "digits-jax/tpu-v6e",
        "digits/laptop",
        "digits/spot-gpu",
        "evaluate/laptop",
        "pipeline-in-one/laptop",
        "pipeline/laptop",
        "prepare/laptop",
        "train/laptop",
        "train/spot-gpu",
        "train/spot-gpu-kubernetes",
        "train/tpu-v6e",
        "train/tpu-v6e-kubernetes",
    ]
    needed = {"train": {"train_loop": "my_project.loops:train_loop"}, "evaluate": {"checkpoint_uri": "/runs/a/b"}}
    for name, deployment in deployed.items():
        assert deployment.enforce_parameter_schema
        assert not any(schedule.active for schedule in deployment.schedules)
        run = client.create_flow_run_from_deployment(deployment.id, parameters=needed.get(name.split("/")[0]))
        client.delete_flow_run(run.id)


def test_deployments_refer_to_blocks_and_hold_no_copy_of_them(
    client: SyncPrefectClient, deployed: dict[str, DeploymentResponse]
) -> None:
    document = client.read_block_document_by_name("spot-gpu", "ray-cluster-training")
    assert document.data["auth_token"] == "seven sisters"
    for name in ("train/spot-gpu", "digits/spot-gpu", "train/spot-gpu-kubernetes"):
        assert deployed[name].parameters["cluster"] == {"$ref": {"block_document_id": str(document.id)}}
        assert "seven sisters" not in deployed[name].model_dump_json()


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("train/laptop", {"train_loop": "not a path"}),
        ("train/spot-gpu", {"train_loop": "a:b", "scaling": {"max_workers": 0}}),
        ("train/tpu-v6e-kubernetes", {}),
        ("digits/laptop", {"epochs": 0}),
        ("digits-jax/tpu-v6e", {"epochs": "many"}),
        ("evaluate/laptop", {"checkpoint": "/runs/a/b"}),
    ],
)
def test_a_bad_parameter_is_refused_and_no_run_is_made(
    client: SyncPrefectClient, deployed: dict[str, DeploymentResponse], name: str, bad: dict[str, Any]
) -> None:
    with pytest.raises(PrefectHTTPStatusError) as refused:
        client.create_flow_run_from_deployment(deployed[name].id, parameters=bad)
    assert 400 <= refused.value.response.status_code < 500
    its_runs = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployed[name].id]))
    assert client.read_flow_runs(flow_run_filter=its_runs) == []
