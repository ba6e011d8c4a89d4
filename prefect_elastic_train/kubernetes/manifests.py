"""Manifests of a Ray cluster for trainings, and of the flow runs that use it, as pure functions of settings.

Their text is in ``templates/``, with the reasons as comments. Values are inserted as JSON, which YAML includes.
"""

import json
import math
from collections.abc import Mapping
from importlib import resources
from importlib.metadata import version
from string import Template
from textwrap import indent
from typing import Any

from ruamel.yaml import YAML

from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.core.settings import (
    MAX_RESTART_DELAY_SECONDS,
    RESTART_JITTER,
    FailureSettings,
    KubeRaySettings,
    ScalingSettings,
)

_FILES = ("access.yaml", "cluster.yaml", "run-clusters.yaml", "worker.yaml", "work-pool.json")
#: Resources that Ray finds in a pod. KubeRay declares others to Ray.
_POD_RESOURCES = ("CPU", "GPU", "TPU", "memory")


def render(
    scaling: ScalingSettings, failures: FailureSettings, kuberay: KubeRaySettings, command: str = ""
) -> dict[str, str]:
    """Return the text of each manifest by its file name.

    Args:
        scaling: The number of workers, and the resources of each.
        failures: The budget whose restart delays the idle time-out exceeds.
        kuberay: Names, image and nodes.
        command: The entrypoint of a RayJob. Empty: there is no RayJob.

    Raises:
        ConfigurationError: The settings cannot be expressed as one group of workers.
    """
    values = _values(scaling, failures, kuberay)
    # Without a training, the cluster has no workers.
    texts = {file: _fill(file, values | {"min_replicas": 0}) for file in _FILES}
    if command:
        values |= {"entrypoint": command, "head_env": [{"secretRef": {"name": f"{kuberay.name}-prefect"}}]}
        spec = _fill("cluster.yaml", values).partition("\nspec:\n")[2]
        texts["job.yaml"] = _fill("job.yaml", values) + indent(spec, "  ")
    return texts


def run_manifest(scaling: ScalingSettings, failures: FailureSettings, kuberay: KubeRaySettings) -> Any:
    """Return the RayCluster of a single run, with pods for ``min_workers`` from the start. Raises as :func:`render`."""
    return YAML(typ="safe").load(_fill("cluster.yaml", _values(scaling, failures, kuberay)))


def idle_seconds(scaling: ScalingSettings, failures: FailureSettings) -> int:
    """Return the seconds without use after which the autoscaler may remove a node.

    While a training runs, it reserves ``max_workers``, and the autoscaler keeps the nodes that this needs, also those
    that a growth has not used yet. Between two drivers nothing is reserved. So the time-out is the longest delay before
    a driver restart, the start of the driver, and the time after which a new node is used for a growth.
    """
    delay = max(MAX_RESTART_DELAY_SECONDS, failures.driver_restart_delay_seconds) * RESTART_JITTER
    growth = scaling.stability_delay_seconds + scaling.resize_check_interval_seconds
    return math.ceil(delay + 60 + growth)  # a driver takes up to 60 s to reserve resources


def _fill(file: str, values: Mapping[str, Any]) -> str:
    """Return the text of a template with values in place of ``$`` variables: names as they are, others as JSON."""
    texts = {key: value if key in KubeRaySettings.model_fields else json.dumps(value) for key, value in values.items()}
    text = (resources.files(__package__) / "templates" / file).read_text()
    return Template(text).substitute(texts)


def _values(scaling: ScalingSettings, failures: FailureSettings, kuberay: KubeRaySettings) -> Any:
    """Return the values of the templates, for a cluster with one group of workers.

    A replica of the group is a pod, or the hosts of a TPU slice, which are created and deleted together.

    Raises:
        ConfigurationError: The workers select different labels.
    """
    if isinstance(scaling.label_selector, list):
        raise ConfigurationError(
            f"label_selector {scaling.label_selector} cannot be rendered: all pods of a worker group have the same "
            'labels. Use a dict such as {"market-type": "spot"}, or write the worker groups by hand'
        )
    nodes = YAML(typ="safe").load(_fill("nodes.yaml", {}))
    place = nodes["spot"][kuberay.spot]
    requested = scaling.resources_per_worker
    hosts = 1
    chips = requested.get("TPU", 1)
    workers = int(1 / min(requested.get("GPU") or 1, 1))  # those that share a GPU
    selector = place["selector"] | kuberay.node_selector
    if scaling.topology:
        from ray.util.tpu import get_tpu_worker_resources

        from prefect_elastic_train.core.tpu_slices import slice_shape

        shape = slice_shape(scaling.topology, scaling.accelerator_type, requested)
        hosts, host = get_tpu_worker_resources(shape.topology, shape.accelerator_type)
        chips = host["TPU"]
        workers = shape.workers
        selector["cloud.google.com/gke-tpu-accelerator"] = nodes["tpu"][shape.accelerator_type]
        selector["cloud.google.com/gke-tpu-topology"] = shape.topology
    on_pod = {name: math.ceil(amount * workers / hosts) for name, amount in requested.items()}
    pod = {"cpu": str(kuberay.cpu or max(1, on_pod.get("CPU", 1))), "memory": kuberay.memory}
    # The autoscaler knows only what is declared.
    declared = {name: str(amount) for name, amount in on_pod.items() if name not in _POD_RESOURCES}
    if scaling.accelerator == "gpu":
        pod["nvidia.com/gpu"] = str(on_pod.get("GPU", 1))
        if scaling.accelerator_type:
            declared[f"accelerator_type:{scaling.accelerator_type}"] = "1"
    elif scaling.accelerator == "tpu":
        pod["google.com/tpu"] = str(int(chips))
    return (
        kuberay.model_dump()
        | place
        | {
            "ray_version": version("ray"),
            "idle_seconds": idle_seconds(scaling, failures),
            "min_replicas": math.ceil(scaling.min_workers / workers),
            "max_replicas": math.ceil(scaling.max_workers / workers),
            "hosts": hosts,
            "labels": scaling.label_selector,
            "declared": declared,
            "pod": pod,
            "selector": selector,
            "tolerations": place["tolerations"] + nodes["tolerations"][scaling.accelerator],
            "head_env": [],
        }
    )
