"""How the driver joins its cluster: nothing is asked of Ray before something answers there as a head."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import tenacity

from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.settings import ScalingSettings
from prefect_elastic_train.core.spec import DriverSpec

_ADDRESS_FILE_SECONDS = 600.0


def connect(spec: DriverSpec) -> tuple[str, str, dict[str, float]]:
    """Join the cluster.

    Returns:
        Its address, the URL of its dashboard (empty without one) and its resources.

    Raises:
        AttemptFailedError: Nothing answers, or it does not let us in.
    """
    address = _cluster_address(spec)
    _wait_for_listener(spec, address)
    _check_head(spec, address)
    import ray

    from prefect_elastic_train.elastic.translate import job_config

    user_env: dict[str, Any] = {}
    if not spec.cluster.is_submitted:  # a job has its environment by now
        user_env = dict(spec.cluster.runtime_env)
        if spec.cluster.working_dir:
            user_env["working_dir"] = os.path.expanduser(spec.cluster.working_dir)
    # Ray's tools in the workers would otherwise look for any cluster on their host.
    user_env["env_vars"] = {"RAY_ADDRESS": address, **user_env.get("env_vars", {})}
    on_termination = signal.getsignal(signal.SIGTERM)
    own_path = [p for p in spec.sys_path if p and os.path.isdir(p) and not _is_installed(p)]
    try:
        context = ray.init(
            address=address,
            runtime_env=user_env,
            job_config=job_config(own_path),
            log_to_driver=True,
            logging_level=logging.WARNING,
        )
    except Exception as error:
        raise _connection_failure(address, error) from error
    # ray.init takes SIGTERM over; keep ours, which ends the attempt in order.
    signal.signal(signal.SIGTERM, on_termination)
    return address, context.dashboard_url or "", ray.cluster_resources()


def fit_local_cluster(spec: DriverSpec, resources: dict[str, float]) -> ScalingSettings:
    """Refuse what a local cluster can never hold, since nothing will join it later.

    Args:
        spec: What the driver is told.
        resources: What the cluster has.

    Returns:
        The scaling to train with. Beside datasets, ``max_workers`` is what fits: more would starve them.

    Raises:
        AttemptFailedError: ``min_workers`` do not fit, or the node is not what they ask for; outcome ``invalid``.
    """
    if not spec.cluster.is_local:
        return spec.scaling
    from prefect_elastic_train.elastic.translate import resources_per_worker

    _check_local_placement(spec.scaling)
    cpus_for_datasets = 1 if spec.request.has_datasets else 0
    fitting = spec.scaling.max_workers
    for name, amount in resources_per_worker(spec.scaling).items():
        there = resources.get(name, 0) - (cpus_for_datasets if name == "CPU" else 0)
        needed = amount * spec.scaling.min_workers
        if needed > there:
            beside = f" beside the {cpus_for_datasets} for the datasets" if name == "CPU" and cpus_for_datasets else ""
            raise AttemptFailedError(
                f"min_workers={spec.scaling.min_workers} need {needed:g} {name}, and the local cluster on this "
                f"machine has {there:g}{beside}; lower min_workers or resources_per_worker, set num_cpus or "
                "num_gpus of the RayCluster, or join a larger cluster",
                outcome=Outcome.INVALID,
            )
        if amount:
            fitting = min(fitting, int(there / amount))
    return spec.scaling.model_copy(update={"max_workers": fitting}) if cpus_for_datasets else spec.scaling


def _check_local_placement(scaling: ScalingSettings) -> None:
    problem = ""
    if scaling.placement_strategy == "STRICT_SPREAD" and scaling.max_workers > 1:
        problem = "placement_strategy 'STRICT_SPREAD' wants a node for each worker"
    elif scaling.label_selector:
        problem = f"label_selector {scaling.label_selector} wants labelled nodes"
    if problem:
        raise AttemptFailedError(
            f"{problem}, and the local cluster is one node without labels; leave the field at its default, or join a "
            "cluster that has such nodes",
            outcome=Outcome.INVALID,
        )


def _cluster_address(spec: DriverSpec) -> str:
    if spec.cluster.is_submitted:
        return os.environ["RAY_ADDRESS"]  # Ray tells it its jobs
    if not spec.address_file:
        return spec.cluster.address if spec.cluster.address != "auto" else _address_of_this_host()
    deadline = time.monotonic() + _ADDRESS_FILE_SECONDS
    path = Path(spec.address_file)
    while time.monotonic() < deadline:
        if path.exists() and (address := path.read_text().strip()):
            if address.startswith("!"):
                raise AttemptFailedError(address[1:], outcome=Outcome.CLUSTER_LOST)
            return address
        time.sleep(0.05)
    raise AttemptFailedError("the local cluster gave no address", outcome=Outcome.CLUSTER_LOST)


def _address_of_this_host() -> str:
    from prefect_elastic_train.elastic.cluster import find_address

    try:
        return find_address()
    except (ConnectionError, ValueError, OSError) as error:
        raise AttemptFailedError(
            f"address 'auto' finds no single Ray cluster on this machine ({error}); start one with "
            "`ray start --head`, set RAY_ADDRESS, or give host:port as address of the RayCluster",
            outcome=Outcome.CLUSTER_LOST,
        ) from error


def _wait_for_listener(spec: DriverSpec, address: str) -> None:
    """Wait until something listens at the address, since Ray itself ends the process if nothing does."""
    host, _, port = address.rpartition(":")
    try:
        for attempt in tenacity.Retrying(
            stop=tenacity.stop_after_delay(spec.cluster.connect_timeout_seconds),
            wait=tenacity.wait_exponential(multiplier=0.1, max=2.0),
            retry=tenacity.retry_if_exception_type(OSError),
            reraise=True,
        ):
            with attempt:
                socket.create_connection((host.strip("[]"), int(port)), timeout=2.0).close()
    except OSError as error:
        raise AttemptFailedError(
            f"no Ray cluster answers at {address} ({error}; tried for {spec.cluster.connect_timeout_seconds:g} s). "
            "Start one there with `ray start --head`, or correct the address of the RayCluster",
            outcome=Outcome.CLUSTER_LOST,
        ) from error


def _check_head(spec: DriverSpec, address: str) -> None:
    """Find out what answers at the address before Ray's client tries, which cannot say why it fails."""
    from prefect_elastic_train.elastic.cluster import HeadAnswer, ask_head

    timeout = spec.cluster.connect_timeout_seconds
    answer = ask_head(address, timeout)
    if answer is HeadAnswer.REFUSED:
        raise AttemptFailedError(
            f"the Ray cluster at {address} refused the token; give its token as auth_token of the RayCluster",
            outcome=Outcome.INVALID,
        )
    if answer is HeadAnswer.SILENT:
        raise AttemptFailedError(
            f"something listens at {address} but does not answer as a Ray head within {timeout:g} s; give the port "
            "of the head's GCS (`ray start --head --port=…`) as address of the RayCluster",
            outcome=Outcome.CLUSTER_LOST,
        )


def _connection_failure(address: str, error: Exception) -> AttemptFailedError:
    return AttemptFailedError(
        f"cannot join the Ray cluster at {address}: {type(error).__name__}: {str(error)[:1000]}",
        outcome=Outcome.CLUSTER_LOST,
    )


def _is_installed(path: str) -> bool:
    return path.startswith((sys.prefix + os.sep, sys.base_prefix + os.sep)) or path.endswith(".zip")
