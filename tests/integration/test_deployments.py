"""Deployments through the API of a real server, and the demo that comes with the project."""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import PrefectHTTPStatusError

from prefect_elastic_train import LocalStorage, RayCluster
from prefect_elastic_train.core.settings import FailureSettings, KubeRaySettings, ScalingSettings
from prefect_elastic_train.kubernetes.manifests import render
from tests.support.deployments import Program, deployment_id, end_of, project_served, runs_of
from tests.support.processes import ROOT, call

pytestmark = pytest.mark.usefixtures("api")

SECRET = "seven sisters"


@pytest.fixture(scope="module")
def served(api_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """The deployments that come with the project."""
    folder = tmp_path_factory.mktemp("served")
    with project_served(folder, api_url, "tests", ELASTIC_TRAIN_RUNS=str(folder / "runs")) as program:
        yield program


def test_secret_that_is_given_inline_is_refused_with_the_way_out(
    client: SyncPrefectClient, served: Program, tmp_path: Path
) -> None:
    parameters = {
        "train_loop": "tests.support.loops:hashing_loop",
        "storage": LocalStorage(path=str(tmp_path / "runs")),
        "cluster": RayCluster(address="127.0.0.1:6379", auth_token=SECRET),
    }
    deployment = deployment_id(client, "train/train")
    run = client.create_flow_run_from_deployment(deployment, parameters=parameters)
    state = end_of(client, run.id, 60)
    assert state.type == StateType.FAILED
    assert "RayCluster.auth_token is masked" in (state.message or "")
    assert "Save the block" in (state.message or "")
    assert SECRET not in served.log
    assert not (tmp_path / "runs").exists(), "nothing was started"


def test_demo_ends_completed_and_says_where_everything_is(api_url: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PREFECT_API_URL": api_url, "PYTHONPATH": str(ROOT)}
    said = call(sys.executable, "-m", "flows.digits", folder=tmp_path, timeout=240, env=environment)
    told = dict(re.findall(r"^(state|UI|test accuracy|run directory) +(\S+)", said, re.MULTILINE))
    assert told["state"] == "Completed"
    assert "/runs/flow-run/" in told["UI"]
    assert float(told["test accuracy"]) >= 0.95
    assert (Path(told["run directory"]) / ".elastic_train" / "run.json").exists()


#: What the profiles take from the environment; nothing answers there, and nothing asks.
PROFILE_VARIABLES = {
    "ELASTIC_TRAIN_SPOT_GPU_ADDRESS": "http://ray.example.com:8265",
    "ELASTIC_TRAIN_SPOT_GPU_TOKEN": SECRET,
    "ELASTIC_TRAIN_TPU_V6E_ADDRESS": "10.0.0.5:6379",
    "ELASTIC_TRAIN_S3_BUCKET_PATH": "bucket/runs",
}
DEPLOYED = {
    *(f"{flow}/laptop" for flow in ("digits", "digits-jax", "evaluate", "pipeline", "pipeline-in-one", "prepare")),
    *("digits-jax/tpu-v6e", "digits/spot-gpu", "train/laptop"),
    *(f"train/{where}{kind}" for where in ("spot-gpu", "tpu-v6e") for kind in ("", "-kubernetes")),
}
#: Parameters that runs need, and some that are refused.
NEEDED = {"train": {"train_loop": "my_project.loops:train_loop"}, "evaluate": {"checkpoint_uri": "/runs/a/b"}}
BAD: list[tuple[str, dict[str, Any]]] = [
    ("train/laptop", {"train_loop": "not a path"}),
    ("train/spot-gpu", {"train_loop": "a:b", "scaling": {"max_workers": 0}}),
    ("train/tpu-v6e-kubernetes", {}),
]


@pytest.mark.full
def test_all_of_prefect_yaml_is_deployed_refers_to_blocks_and_checks_parameters(
    client: SyncPrefectClient, api_url: str, tmp_path: Path
) -> None:
    """`prefect.yaml` and its Kubernetes variant, from a clone: work pools, blocks, deployments."""
    environment = {**os.environ, **PROFILE_VARIABLES, "PREFECT_API_URL": api_url, "ELASTIC_TRAIN_RUNS": str(tmp_path)}
    kuberay = KubeRaySettings(image="registry.example.com/trainings:1")
    template = json.loads(render(ScalingSettings(), FailureSettings(), kuberay)["work-pool.json"])
    pools: dict[str, dict[str, Any]] = {"elastic-train": {"type": "process"}, "training": {"type": "kubernetes"}}
    pools["training"]["base_job_template"] = template
    with httpx.Client(base_url=api_url) as http:
        for name, pool in pools.items():
            http.post("/work_pools/", json={"name": name, **pool}).raise_for_status()
        deploy = ("prefect", "--no-prompt", "deploy", "--all")
        for command in (("blocks.apply",), deploy, (*deploy, "--prefect-file", "prefect-kubernetes.yaml")):
            assert SECRET not in call(sys.executable, "-m", *command, env=environment)
        those = {"work_pools": {"name": {"any_": list(pools)}}}
        found = DeploymentResponse.model_validate_list(http.post("/deployments/filter", json=those).json())
        flows = {flow["id"]: flow["name"] for flow in http.post("/flows/filter", json={}).json()}
    deployed = {f"{flows[str(deployment.flow_id)]}/{deployment.name}": deployment for deployment in found}
    assert set(deployed) == DEPLOYED
    for name, deployment in deployed.items():
        assert deployment.enforce_parameter_schema
        assert not any(schedule.active for schedule in deployment.schedules)
        run = client.create_flow_run_from_deployment(deployment.id, parameters=NEEDED.get(name.split("/")[0]))
        client.delete_flow_run(run.id)
    for name, bad in BAD:
        with pytest.raises(PrefectHTTPStatusError) as refused:
            client.create_flow_run_from_deployment(deployed[name].id, parameters=bad)
        assert 400 <= refused.value.response.status_code < 500
        assert runs_of(client, deployed[name].id) == []

    document = client.read_block_document_by_name("spot-gpu", "ray-cluster-training")
    assert document.data["auth_token"] == SECRET
    for name in ("train/spot-gpu", "digits/spot-gpu", "train/spot-gpu-kubernetes"):
        assert deployed[name].parameters["cluster"] == {"$ref": {"block_document_id": str(document.id)}}
        assert SECRET not in deployed[name].model_dump_json()
