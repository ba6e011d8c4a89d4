"""The Ray cluster of one run on Kubernetes: create, wait until it is ready, delete. Runs in the flow process.

The pod of the flow run owns the cluster, so Kubernetes deletes it with that pod, however the pod has ended. The name
depends on flow run and run only: a resumed flow run finds the cluster, and its new pod becomes the owner.
"""

import hashlib
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from prefect_elastic_train.core.outcomes import AttemptFailedError, ConfigurationError, Outcome
from prefect_elastic_train.core.request import DriverSpec
from prefect_elastic_train.core.settings import KubeRaySettings

from .manifests import run_manifest

#: ``<namespace>/<name>/<uid>`` of this pod. The rendered work pool sets it.
POD_VARIABLE = "ELASTIC_TRAIN_POD"
#: HTTP statuses of answers that may be different the next time; 0: no answer.
_TRANSIENT = (0, 429, 500, 502, 503, 504)
_RESOURCE = {"group": "ray.io", "version": "v1", "plural": "rayclusters", "_request_timeout": 10}


class RunCluster(NamedTuple):
    """The RayCluster of a run."""

    namespace: str
    name: str

    def wait_until_ready(self, limit_seconds: float, wait: Callable[[float], None]) -> str:
        """Wait until the head runs, and return the address of its dashboard within the Kubernetes cluster.

        While Kubernetes does not answer, or is overloaded, the wait continues.

        Args:
            limit_seconds: Limit of the wait.
            wait: Waits for some seconds, and raises if the training has to stop.

        Raises:
            AttemptFailedError: The head does not run within the limit, Kubernetes refuses, or the cluster was deleted.
        """
        deadline = time.monotonic() + limit_seconds
        while True:
            is_late = time.monotonic() > deadline
            with _requests(f"read {self}", ignored=() if is_late else _TRANSIENT) as api:
                status = api.get_namespaced_custom_object(**self._asdict(), **_RESOURCE).get("status", {})
                for condition in status.get("conditions", []):
                    if condition["type"] == "HeadPodReady" and condition["status"] == "True":
                        return f"http://{self.name}-head-svc.{self.namespace}.svc:8265"
            if is_late:
                raise AttemptFailedError(
                    f"the head of {self} did not run within start_timeout_seconds ({limit_seconds:g} s): see `kubectl "
                    f"--namespace {self.namespace} describe raycluster {self.name}`",
                    outcome=Outcome.CLUSTER_LOST,
                )
            wait(1.0)

    def delete(self) -> None:
        """Delete the cluster, unless it was deleted. Kubernetes then deletes its pods."""
        with _requests(f"delete {self}", ignored=[404]) as api:
            api.delete_namespaced_custom_object(**self._asdict(), **_RESOURCE)

    def __str__(self) -> str:
        return f"RayCluster {self.namespace}/{self.name}"


def create(spec: DriverSpec, kuberay: KubeRaySettings) -> RunCluster:
    """Create the cluster of a run, unless it exists, and make this pod its owner.

    Raises:
        ConfigurationError: This process is not in a pod of the namespace, so nothing would delete the cluster after it
            was killed.
        AttemptFailedError: Kubernetes does not answer, or refuses.
    """
    [namespace, pod_name, pod_uid] = os.environ.get(POD_VARIABLE, "//").split("/")
    if namespace != kuberay.namespace:
        raise ConfigurationError(
            f"RayCluster(kuberay=...) works in a pod of namespace {kuberay.namespace}, with {POD_VARIABLE} as the work "
            f"pool of `elastic-train kubernetes render` sets it; got {namespace!r}. Elsewhere, give the address of a "
            "cluster"
        )
    run = spec.request
    digest = hashlib.sha256(f"{run.owner.flow_run_id}/{run.run_name}".encode()).hexdigest()[:12]
    cluster = RunCluster(namespace, f"{kuberay.name}-{digest}")
    manifest = run_manifest(spec.scaling, spec.failures, kuberay)
    manifest["metadata"] = {
        "name": cluster.name,
        "labels": {"elastic-train/flow-run": run.owner.flow_run_id},
        "annotations": {"elastic-train/run": run.run_name},
        "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": pod_name, "uid": pod_uid}],
    }
    with _requests(f"create {cluster}", ignored=[409]) as api:
        api.create_namespaced_custom_object(namespace=namespace, body=manifest, **_RESOURCE)
    # An earlier process of the flow run may have created it. Its replicas are the autoscaler's, so it stays as it is.
    with _requests(f"own {cluster}") as api:
        api.patch_namespaced_custom_object(**cluster._asdict(), body={"metadata": manifest["metadata"]}, **_RESOURCE)
    return cluster


@contextmanager
def _requests(action: str, ignored: Collection[int] = ()) -> Iterator[Any]:
    """Yield Kubernetes' API of custom objects, and describe its errors as those of an action.

    An answer with one of the HTTP statuses ``ignored`` (0: no answer) ends the ``with`` block without an error.
    """
    try:
        from kubernetes import client, config
        from urllib3.exceptions import HTTPError  # no answer
    except ImportError as error:
        raise ConfigurationError(f"{error}: pip install 'prefect-elastic-train[kubernetes]'") from error
    try:
        config.load_incluster_config()  # type: ignore[no-untyped-call]
        yield client.CustomObjectsApi()
    except config.ConfigException as error:
        raise ConfigurationError(
            f"cannot {action}: this pod has no service account for the API of Kubernetes ({error}). Start the flow run "
            "from the work pool of `elastic-train kubernetes render`, which gives it one"
        ) from error
    except (HTTPError, client.ApiException) as error:
        status = getattr(error, "status", 0)
        if status not in ignored:
            outcome = Outcome.INVALID if status in (400, 401, 403, 422) else Outcome.CLUSTER_LOST
            reason = " ".join(str(getattr(error, "body", error)).split())[-500:]
            raise AttemptFailedError(f"cannot {action}: {reason}", outcome=outcome) from error
