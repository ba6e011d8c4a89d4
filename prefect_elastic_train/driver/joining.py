"""How the driver joins its cluster: nothing is asked of Ray before something answers there as a head."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from typing import Any

from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.request import DriverSpec
from prefect_elastic_train.core.settings import ScalingSettings


def connect(spec: DriverSpec) -> tuple[str, str, dict[str, float]]:
    """Join the cluster, and return its address, the URL of its dashboard (empty without one) and its resources.

    Raises:
        AttemptFailedError: Nothing answers, or it does not let us in.
    """
    address = _cluster_address(spec)
    _check_head(address, spec.cluster.connect_timeout_seconds)
    import ray

    from prefect_elastic_train.elastic.cluster import job_config

    user_env: dict[str, Any] = {}
    if not spec.cluster.is_submitted:  # a job has its environment by now
        user_env = dict(spec.cluster.runtime_env)
        if spec.cluster.working_dir:
            user_env["working_dir"] = os.path.expanduser(spec.cluster.working_dir)
    # Ray's tools in the workers would otherwise look for any cluster on their host.
    user_env["env_vars"] = {"RAY_ADDRESS": address, **user_env.get("env_vars", {})}
    on_termination = signal.getsignal(signal.SIGTERM)
    own_path = [folder for folder in spec.sys_path if folder and os.path.isdir(folder) and not _is_installed(folder)]
    try:
        context = ray.init(
            address=address,
            runtime_env=user_env,
            job_config=job_config(own_path),
            log_to_driver=True,
            logging_level=logging.WARNING,
        )
    except (TypeError, ValueError) as error:
        raise AttemptFailedError(f"Ray does not accept the configuration: {error}", outcome=Outcome.INVALID) from error
    except Exception as error:
        raise _lost(f"cannot join the Ray cluster at {address}: {type(error).__name__}: {str(error)[:1000]}") from error
    # ray.init takes SIGTERM over; keep ours, which ends the attempt in order.
    signal.signal(signal.SIGTERM, on_termination)
    return address, context.dashboard_url or "", ray.cluster_resources()


def fit_local_cluster(spec: DriverSpec, resources: dict[str, float]) -> ScalingSettings:
    """Refuse what a local cluster can never hold, since nothing will join it later, and return the scaling.

    Beside datasets its ``max_workers`` are those that fit: more would starve them.
    """
    scaling, problem, fitting = spec.scaling, "", spec.scaling.max_workers
    if not spec.cluster.is_local:
        return scaling
    from prefect_elastic_train.elastic.cluster import resources_per_worker

    if scaling.label_selector or (scaling.placement_strategy == "STRICT_SPREAD" and scaling.max_workers > 1):
        problem = "label_selector and placement_strategy 'STRICT_SPREAD' want nodes that others join"
        problem += ", and the local cluster is one node without labels; leave them at their defaults"
    for_datasets = {"CPU": int(spec.request.has_datasets)}
    for name, amount in resources_per_worker(scaling).items():
        there = resources.get(name, 0) - for_datasets.get(name, 0)
        if amount * scaling.min_workers > there:
            problem = f"min_workers={scaling.min_workers} need {amount * scaling.min_workers:g} {name}"
            problem += f", and the local cluster on this machine has {there:g} for them; lower min_workers or "
            problem += "resources_per_worker, set num_cpus or num_gpus"
        elif amount:
            fitting = min(fitting, int(there / amount))
    if problem:
        raise AttemptFailedError(f"{problem}, or join a larger cluster", outcome=Outcome.INVALID)
    return scaling.model_copy(update={"max_workers": fitting}) if spec.request.has_datasets else scaling


def _cluster_address(spec: DriverSpec) -> str:
    if spec.cluster.is_submitted:
        return os.environ["RAY_ADDRESS"]  # Ray tells it its jobs
    if spec.cluster.address != "auto":
        return spec.local_address or spec.cluster.address
    from prefect_elastic_train.elastic.cluster import find_address

    try:
        return find_address()
    except (ConnectionError, ValueError, OSError) as error:
        raise _lost(
            f"address 'auto' finds no single Ray cluster on this machine ({error}); give its address in the RayCluster"
        ) from error


def _check_head(address: str, timeout: float) -> None:
    """Find out what answers at an address: Ray's client cannot say, and ends the process if nothing listens."""
    from ray.exceptions import AuthenticationError

    from prefect_elastic_train.elastic.cluster import ask_head

    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2.0).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise _lost(
                    f"no Ray cluster answers at {address} ({error}; tried for {timeout:g} s). Start one there with "
                    "`ray start --head`, or correct the address of the RayCluster"
                ) from error
            time.sleep(0.1)
    problem = ask_head(address, timeout)
    if isinstance(problem, AuthenticationError):
        message = f"the Ray cluster at {address} refused the token; give its token as auth_token of the RayCluster"
        raise AttemptFailedError(message, outcome=Outcome.INVALID)
    if problem is not None:
        raise _lost(
            f"something listens at {address} but does not answer as a Ray head within {timeout:g} s; give the port "
            "of the head's GCS (`ray start --head --port=…`) as address of the RayCluster"
        ) from problem


def _lost(message: str) -> AttemptFailedError:
    return AttemptFailedError(message, outcome=Outcome.CLUSTER_LOST)


def _is_installed(path: str) -> bool:
    return path.startswith((sys.prefix + os.sep, sys.base_prefix + os.sep)) or path.endswith(".zip")
