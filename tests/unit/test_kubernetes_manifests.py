"""`elastic-train kubernetes render`: the manifests, and the schemas of KubeRay and Kubernetes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from kubernetes import client as kubernetes
from prefect.server.api import collections_data
from typer.testing import CliRunner

from prefect_elastic_train.cli import app
from prefect_elastic_train.core.operator_settings import ElasticTrainSettings
from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.core.settings import FailureSettings, KubeRaySettings, ScalingSettings
from prefect_elastic_train.core.time_limits import RUNNER_GRACE_SECONDS, TERMINATION_GRACE_SECONDS
from prefect_elastic_train.kubernetes.manifests import idle_seconds, render
from tests.unit.support import REPOSITORY

SCHEMAS = REPOSITORY / "tests" / "data" / "kuberay"
IMAGE = "registry.example.com/training:2.60.0"
MODELS = {
    "ServiceAccount": "V1ServiceAccount",
    "Role": "V1Role",
    "RoleBinding": "V1RoleBinding",
    "Deployment": "V1Deployment",
}
TPU = {"accelerator": "tpu", "topology": "4x4", "accelerator_type": "v6e"}
SCALINGS: dict[str, dict[str, Any]] = {
    "cpu": {"max_workers": 2},
    "gpu": {"min_workers": 2, "max_workers": 8, "accelerator": "gpu", "accelerator_type": "A100"},
    "shared-gpu": {"min_workers": 3, "max_workers": 7, "accelerator": "gpu", "resources_per_worker": {"GPU": 0.5}},
    "label": {"label_selector": {"market-type": "spot"}, "resources_per_worker": {"CPU": 2, "licence": 0.5}},
    "tpu": {"min_workers": 4, "max_workers": 16, **TPU},
    "tpu-chips": {"min_workers": 16, "max_workers": 32, "resources_per_worker": {"TPU": 1}, **TPU},
    "one-tpu": {"accelerator": "tpu"},
}


def strict(schema: Any) -> Any:
    """Return a schema of a CRD that allows no unknown field, as `kubectl apply` does."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {key: strict(part) for key, part in schema.items()}
    if "properties" in schema and schema.get("type") == "object":
        changed.setdefault("additionalProperties", False)
    return changed


def validate(document: dict[str, Any]) -> None:
    """Raise an error if Kubernetes or KubeRay's CRD would refuse a manifest, or drop a part of it."""
    kind = document["kind"]
    if kind in MODELS:
        api = kubernetes.ApiClient()
        known = api.deserialize(json.dumps(document), MODELS[kind], "application/json")
        assert api.sanitize_for_serialization(known) == document
        return
    crd = json.loads((SCHEMAS / f"{kind.lower()}s.json").read_text())
    [version] = crd["spec"]["versions"]
    assert document["apiVersion"] == f"{crd['spec']['group']}/{version['name']}"
    Draft202012Validator(strict(version["schema"]["openAPIV3Schema"])).validate(document)


def rendered(command: str = "", kuberay: dict[str, Any] | None = None, **scaling: Any) -> dict[str, Any]:
    """Render the manifests, validate each, and return them by kind and name."""
    texts = render(
        ScalingSettings(**scaling), FailureSettings(), KubeRaySettings(image=IMAGE, **kuberay or {}), command
    )
    documents = [doc for file, text in texts.items() if file.endswith(".yaml") for doc in yaml.safe_load_all(text)]
    for document in documents:
        validate(document)
    return {f"{document['kind']}/{document['metadata']['name']}": document for document in documents}


def worker_group(objects: dict[str, Any]) -> dict[str, Any]:
    [group] = objects["RayCluster/training"]["spec"]["workerGroupSpecs"]
    return group


@pytest.mark.parametrize("spot", ["", "gke", "karpenter", "eks", "aks"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_all_manifests_are_valid(scaling: str, spot: str) -> None:
    objects = rendered("elastic-train run a:b", {"spot": spot, "namespace": "ml"}, **SCALINGS[scaling])
    assert {document["metadata"]["namespace"] for document in objects.values()} == {"ml"}


def test_the_validation_refuses_unknown_fields_and_wrong_types() -> None:
    cluster = rendered()["RayCluster/training"]
    cluster["spec"]["workerGroupSpecs"][0]["maxReplica"] = 2
    with pytest.raises(Exception, match="maxReplica"):
        validate(cluster)
    account = rendered()["ServiceAccount/training-ray"]
    with pytest.raises(AssertionError):
        validate(account | {"secretz": []})


@pytest.mark.parametrize(
    ("scaling", "replicas", "hosts", "resources"),
    [
        ("cpu", (1, 2), 1, {"cpu": "1"}),
        ("gpu", (2, 8), 1, {"cpu": "1", "nvidia.com/gpu": "1"}),
        ("shared-gpu", (2, 4), 1, {"cpu": "1", "nvidia.com/gpu": "1"}),
        ("label", (1, 1), 1, {"cpu": "2"}),
        ("tpu", (1, 4), 4, {"cpu": "1", "google.com/tpu": "4"}),
        ("tpu-chips", (1, 2), 4, {"cpu": "1", "google.com/tpu": "4"}),
        ("one-tpu", (1, 1), 1, {"cpu": "1", "google.com/tpu": "1"}),
    ],
)
def test_a_group_has_pods_for_all_workers(
    scaling: str, replicas: tuple[int, int], hosts: int, resources: dict[str, str]
) -> None:
    objects = rendered("elastic-train run a:b", **SCALINGS[scaling])
    group = worker_group(objects)
    [own] = objects["RayJob/training"]["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert (own["minReplicas"], own["maxReplicas"]) == replicas
    assert (group["minReplicas"], group["maxReplicas"]) == (0, replicas[1])
    assert group["numOfHosts"] == hosts
    pod = group["template"]["spec"]["containers"][0]["resources"]
    assert pod["requests"] == pod["limits"] == {"memory": "8Gi", **resources}


def test_ray_knows_the_labels_and_resources_that_workers_select() -> None:
    label = worker_group(rendered(**SCALINGS["label"]))
    assert label["labels"] == {"market-type": "spot"}
    assert label["resources"] == {"licence": "1"}
    assert worker_group(rendered(**SCALINGS["gpu"]))["resources"] == {"accelerator_type:A100": "1"}


def test_slices_and_spot_nodes_are_selected() -> None:
    kuberay = {"spot": "gke", "node_selector": {"a": "b"}}
    objects = rendered(kuberay=kuberay, **SCALINGS["tpu"])
    pod = worker_group(objects)["template"]["spec"]
    assert pod["nodeSelector"] == {
        "a": "b",
        "cloud.google.com/gke-spot": "true",
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": "4x4",
    }
    assert {toleration["key"] for toleration in pod["tolerations"]} == {"cloud.google.com/gke-spot", "google.com/tpu"}
    head = objects["RayCluster/training"]["spec"]["headGroupSpec"]
    assert head["template"]["spec"]["nodeSelector"] == {"cloud.google.com/gke-provisioning": "standard"}
    assert head["rayStartParams"] == {"num-cpus": "0"}


@pytest.mark.parametrize("spot", ["", "gke", "karpenter", "eks", "aks"])
def test_the_drain_ends_within_the_grace_period_of_its_pod(spot: str) -> None:
    pod = worker_group(rendered(kuberay={"spot": spot}))["template"]["spec"]
    [*_, script] = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    [deadline, wait] = map(int, re.findall(r"(?:seconds|timeout) (\d+)", script))
    assert 15 <= deadline == wait < pod["terminationGracePeriodSeconds"]


def test_a_node_is_kept_longer_than_any_time_between_two_drivers() -> None:
    assert idle_seconds(ScalingSettings(), FailureSettings()) == 300 * 1.2 + 60 + 30 + 60
    slow = FailureSettings(driver_restart_delay_seconds=3600)
    assert idle_seconds(ScalingSettings(resize_check_interval_seconds=600), slow) == 3600 * 1.2 + 60 + 30 + 600


def test_flow_runs_have_rights_for_ray_clusters_only_and_the_worker_for_jobs() -> None:
    objects = rendered()
    rights = {}
    for name, binding in objects.items():
        if name.startswith("RoleBinding/"):
            [account] = [subject["name"] for subject in binding["subjects"]]
            rules = objects[f"Role/{binding['roleRef']['name']}"]["rules"]
            rights[account] = {(kind, verb) for rule in rules for kind in rule["resources"] for verb in rule["verbs"]}
    assert rights["training-flows"] == {("rayclusters", verb) for verb in ("get", "create", "patch", "delete")}
    writes = {(kind, verb) for kind, verb in rights["training-prefect-worker"] if verb not in ("get", "list", "watch")}
    assert writes == {("jobs", "create"), ("jobs", "delete")}
    assert set(rights) == {"training-flows", "training-prefect-worker"}


def test_a_label_selector_for_each_worker_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"label_selector .* cannot be rendered"):
        rendered(label_selector=[{"a": "b"}])


def test_the_work_pool_is_prefects_but_for_image_account_token_and_grace() -> None:
    known = Path(collections_data.__path__[0]) / "views" / "aggregate-worker-metadata.json"
    prefects = json.loads(known.read_text())["prefect-kubernetes"]["kubernetes"]["default_base_job_configuration"]
    kuberay = KubeRaySettings(image=IMAGE, namespace="ml")
    ours = json.loads(render(ScalingSettings(), FailureSettings(), kuberay)["work-pool.json"])
    properties = ours["variables"]["properties"]
    assert properties["image"].pop("default") == IMAGE
    assert properties["namespace"]["default"] == "ml"
    assert properties["service_account_name"].pop("default") == "training-flows"
    grace = properties.pop("termination_grace_period_seconds")
    assert grace["default"] > grace["minimum"] >= TERMINATION_GRACE_SECONDS + RUNNER_GRACE_SECONDS
    assert ElasticTrainSettings().termination_grace_seconds == TERMINATION_GRACE_SECONDS
    properties["namespace"]["default"] = "default"
    pod = ours["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    assert pod.pop("terminationGracePeriodSeconds") == "{{ termination_grace_period_seconds }}"
    assert properties["finished_job_ttl"].pop("default") == 3600
    [token, *of_pod, together] = pod["containers"][0].pop("env")
    assert together == {"name": "ELASTIC_TRAIN_POD", "value": "$(POD_NAMESPACE)/$(POD_NAME)/$(POD_UID)"}
    assert [variable["name"] for variable in of_pod] == ["POD_NAMESPACE", "POD_NAME", "POD_UID"]
    secret = {"name": "training-token", "key": "auth_token"}
    assert token == {"name": "RAY_AUTH_TOKEN", "valueFrom": {"secretKeyRef": secret}}
    pod["containers"][0]["env"] = "{{ env }}"
    for template in (prefects, ours):
        del template["variables"]["properties"]["image"]
    assert ours == prefects


def test_the_command_writes_all_files_and_values_override_a_document(tmp_path: Path) -> None:
    document = tmp_path / "blocks.yaml"
    document.write_text("scaling: {max_workers: 4, accelerator: gpu}\nkuberay: {spot: eks, memory: 64Gi}\n")
    arguments = [str(tmp_path / "out"), "--image", IMAGE, "--config", str(document)]
    arguments += ["--set", "scaling.max_workers=6", "--job", "elastic-train run a:b --set 'x=\"$y\"'"]
    result = CliRunner().invoke(app, ["kubernetes", "render", *arguments])
    assert result.exit_code == 0, result.output
    files = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert set(files) == {
        "access.yaml",
        "cluster.yaml",
        "job.yaml",
        "run-clusters.yaml",
        "work-pool.json",
        "worker.yaml",
    }
    cluster = yaml.safe_load(files["cluster.yaml"])
    [group] = cluster["spec"]["workerGroupSpecs"]
    assert group["maxReplicas"] == 6
    assert group["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"] == "64Gi"
    assert yaml.safe_load(files["job.yaml"])["spec"]["entrypoint"] == "elastic-train run a:b --set 'x=\"$y\"'"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("scaling.max_workers=0", "max_workers"),
        ("kuberay.spots=gke", "spots"),
        ("cluster.image=a", "cluster Extra inputs are not permitted"),
        ("kuberay.namespace=A", "namespace"),
    ],
)
def test_wrong_values_are_refused_before_anything_is_written(tmp_path: Path, setting: str, message: str) -> None:
    arguments = [str(tmp_path / "out"), "--image", IMAGE, "--set", setting]
    result = CliRunner().invoke(app, ["kubernetes", "render", *arguments])
    assert result.exit_code == 2
    assert message in result.output
    assert not (tmp_path / "out").exists()
