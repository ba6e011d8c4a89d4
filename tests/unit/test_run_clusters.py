"""A cluster of KubeRay for a run, against an API server on loopback: see `tests/support/kubernetes_api.py`."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kubernetes.config import incluster_config

from prefect_elastic_train.core.outcomes import AttemptFailedError, ConfigurationError, Outcome
from prefect_elastic_train.core.settings import ClusterSettings, KubeRaySettings
from prefect_elastic_train.kubernetes.run_clusters import RunCluster, create
from tests.support.kubernetes_api import IS_REAL, NAMESPACE, ApiServer, kubernetes_api
from tests.unit.support import FLOW_RUN, OTHER_FLOW_RUN, Stop, claim
from tests.unit.test_following import Supervisor

KUBERAY = KubeRaySettings(image="registry.example.com/training:2.60.0", namespace=NAMESPACE)
POD = {"apiVersion": "v1", "kind": "Pod", "name": "pod-1", "uid": "11111111-0000-0000-0000-000000000001"}
READY = {
    "conditions": [{"type": "HeadPodReady", "status": "True", "reason": "HeadPodRunningAndReady", "message": "running"}]
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with kubernetes_api(tmp_path_factory.mktemp("kubernetes")) as running:
        yield running


@pytest.fixture
def api(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """The API server, for this process as a pod of a flow run. No cluster is left."""
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(server.flows_token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(server.certificate))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
    _be_pod(monkeypatch, POD)
    yield server
    for cluster in server.clusters():
        RunCluster(NAMESPACE, cluster["metadata"]["name"]).delete()


def _be_pod(monkeypatch: pytest.MonkeyPatch, pod: dict[str, str], namespace: str = NAMESPACE) -> None:
    monkeypatch.setenv("ELASTIC_TRAIN_POD", f"{namespace}/{pod['name']}/{pod['uid']}")


def _ready(status: dict[str, Any]) -> dict[str, Any]:
    stamped = [{**part, "lastTransitionTime": "2026-01-01T00:00:00Z"} for part in status["conditions"]]
    return {"status": {"conditions": stamped}}


def _never(seconds: float) -> None:
    raise AssertionError("waited")


def test_the_cluster_belongs_to_the_pod_and_names_its_flow_run(api: ApiServer) -> None:
    cluster = create(claim(FLOW_RUN, name="mnist"), KUBERAY)
    [found] = api.clusters()
    metadata = found["metadata"]
    assert metadata["name"] == cluster.name
    assert metadata["ownerReferences"] == [POD]
    assert metadata["labels"] == {"elastic-train/flow-run": FLOW_RUN}
    assert metadata["annotations"] == {"elastic-train/run": "mnist"}
    [group] = found["spec"]["workerGroupSpecs"]
    assert group["minReplicas"] == 1


def test_a_resumed_flow_run_takes_the_cluster_over_as_it_is(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    first = create(claim(FLOW_RUN), KUBERAY)
    [group] = api.clusters()[0]["spec"]["workerGroupSpecs"]
    api.change(first.name, spec={"workerGroupSpecs": [{**group, "replicas": 3}]})  # as the autoscaler does
    other = POD | {"name": "pod-2", "uid": "11111111-0000-0000-0000-000000000002"}
    _be_pod(monkeypatch, other)
    assert create(claim(FLOW_RUN), KUBERAY) == first
    [found] = api.clusters()
    assert found["metadata"]["ownerReferences"] == [other]
    assert found["spec"]["workerGroupSpecs"][0]["replicas"] == 3


def test_other_runs_have_other_clusters(api: ApiServer) -> None:
    runs = [claim(FLOW_RUN), claim(FLOW_RUN, name="second"), claim(OTHER_FLOW_RUN)]
    assert len({create(run, KUBERAY).name for run in runs}) == len(api.clusters()) == 3


def test_the_head_is_waited_for(api: ApiServer) -> None:
    cluster = create(claim(), KUBERAY)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 1:
            api.change(
                cluster.name, "/status", **_ready({"conditions": [READY["conditions"][0] | {"status": "False"}]})
            )
        else:
            api.change(cluster.name, "/status", **_ready(READY))

    address = cluster.wait_until_ready(60, wait)
    assert address == f"http://{cluster.name}-head-svc.training.svc:8265"
    assert len(waits) == 2
    assert cluster.wait_until_ready(60, _never) == address


def test_the_wait_has_a_limit_and_ends_with_the_training(api: ApiServer) -> None:
    cluster = create(claim(), KUBERAY)
    with pytest.raises(AttemptFailedError, match=r"did not run within start_timeout_seconds \(0 s\)") as late:
        cluster.wait_until_ready(0, lambda seconds: None)
    assert late.value.retryable

    def wait(seconds: float) -> None:
        raise Stop

    with pytest.raises(Stop):
        cluster.wait_until_ready(60, wait)


@pytest.mark.skipif(IS_REAL, reason="a real API server does not fail on request")
def test_a_busy_or_silent_api_server_is_waited_for_within_the_limit(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = create(claim(), KUBERAY)
    api.change(cluster.name, "/status", **_ready(READY))
    api.failures.extend([503, 429])
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1" if len(waits) == 2 else str(api.port))

    assert cluster.wait_until_ready(60, wait).startswith("http://")
    assert len(waits) == 3
    api.failures.append(503)
    with pytest.raises(AttemptFailedError, match=r"cannot read RayCluster .*the server is busy") as late:
        cluster.wait_until_ready(-1, _never)
    assert late.value.retryable


def test_a_pod_without_a_service_account_makes_no_cluster(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", "/nowhere")
    with pytest.raises(ConfigurationError, match="this pod has no service account for the API of Kubernetes"):
        create(claim(), KUBERAY)


def test_a_deleted_cluster_is_lost_and_may_be_deleted_again(api: ApiServer) -> None:
    cluster = create(claim(), KUBERAY)
    cluster.delete()
    assert api.clusters() == []
    cluster.delete()
    with pytest.raises(AttemptFailedError, match=f"cannot read RayCluster training/{cluster.name}: .*not found"):
        cluster.wait_until_ready(60, _never)


def test_a_refusal_is_permanent_and_silence_is_not(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patched:
        (tmp_path / "token").write_text("wrong")
        patched.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
        with pytest.raises(AttemptFailedError, match=r"cannot create RayCluster .*Unauthorized") as refused:
            create(claim(), KUBERAY)
    assert refused.value.outcome is Outcome.INVALID
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    with pytest.raises(AttemptFailedError, match="cannot create RayCluster") as silent:
        create(claim(), KUBERAY)
    assert silent.value.outcome is Outcome.CLUSTER_LOST
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.port))


@pytest.mark.parametrize("namespace", ["", "other"])
def test_a_process_that_no_pod_of_the_namespace_owns_makes_no_cluster(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch, namespace: str
) -> None:
    _be_pod(monkeypatch, POD, namespace)
    with pytest.raises(ConfigurationError, match="works in a pod of namespace training"):
        create(claim(), KUBERAY)
    assert api.clusters() == []


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_training_uses_its_cluster_and_deletes_it_unless_its_job_goes_on(api: ApiServer, is_kept: bool) -> None:
    spec = replace(claim(), cluster=ClusterSettings(kuberay=KUBERAY, connect_timeout_seconds=0.1))
    cluster = create(spec, KUBERAY)
    api.change(cluster.name, "/status", **_ready(READY))
    supervisor = Supervisor()
    with closing(supervisor):
        runtime = supervisor.runtime("")
        # No DNS of Kubernetes answers here.
        with pytest.raises(Exception, match=f"{cluster.name}-head-svc.training.svc"):
            runtime.run_attempt(spec)
        runtime.close(keep_cluster=is_kept)
        assert supervisor.notes[0] == f"Waiting for the head of RayCluster training/{cluster.name}"
    assert len(api.clusters()) == is_kept
