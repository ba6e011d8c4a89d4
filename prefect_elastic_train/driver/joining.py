"""Joining the Ray cluster from the driver.

Uses ``_py_driver_sys_path`` of Ray's ``JobConfig``, which Ray fills from the driver's own ``sys.path``, and that is not
the path of the user's script. Uses ``ray._raylet`` and ``ray._private.services``: ``ray.init`` reports a refused token
as "Failed to connect", like a dead head. It waits without a limit for a port that accepts connections and does not
answer. And it does not return the address that ``"auto"`` means.
"""

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable

from prefect_elastic_train.core.events import ClusterConnected
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.request import DriverSpec
from prefect_elastic_train.core.settings import ScalingSettings
from prefect_elastic_train.core.threads import start_thread


def join_cluster(spec: DriverSpec) -> ClusterConnected:
    """Connect this driver to the Ray cluster of a spec, and return the event with its address and resources.

    Raises:
        AttemptFailedError: No cluster answers, or it refuses this process.
    """
    address = _cluster_address(spec)
    _check_head(address, spec.cluster.connect_timeout_seconds)
    import ray
    from ray.job_config import JobConfig

    # A job has its runtime environment already.
    runtime_env = {} if spec.cluster.is_submitted else spec.cluster.full_runtime_env
    if not spec.cluster.is_local:  # else the head's environment has the variable
        # Without it, Ray's tools in the workers look for any cluster on their host.
        runtime_env["env_vars"] = {"RAY_ADDRESS": address, **runtime_env.get("env_vars", {})}
    sigterm_handler = signal.getsignal(signal.SIGTERM)
    installed = (sys.prefix + os.sep, sys.base_prefix + os.sep)
    user_path = [folder for folder in spec.sys_path if os.path.isdir(folder) and not folder.startswith(installed)]
    try:
        context = ray.init(
            address=address,
            runtime_env=runtime_env,
            job_config=JobConfig(_py_driver_sys_path=user_path),
            logging_level=logging.WARNING,
        )
    except (TypeError, ValueError) as error:
        raise AttemptFailedError(f"Ray does not accept the configuration: {error}") from error
    except Exception as error:
        raise _lost(f"cannot join the Ray cluster at {address}: {type(error).__name__}: {str(error)[:1000]}") from error
    # ray.init replaces the handler of SIGTERM; the previous one ends the attempt in order.
    signal.signal(signal.SIGTERM, sigterm_handler)
    return ClusterConnected(
        address=address, dashboard_url=context.dashboard_url or "", resources=ray.cluster_resources()
    )


def limit_to_local_cluster(spec: DriverSpec, resources: dict[str, float]) -> ScalingSettings:
    """Return the scaling settings of a training, limited to its local cluster, which is one node.

    With datasets or validations, ``max_workers`` is lowered to the number that fits besides them. Without a local
    cluster, the settings are returned as they are.

    Args:
        spec: The input of the driver.
        resources: Resources of the local cluster.

    Raises:
        AttemptFailedError: ``min_workers`` do not fit, or the scaling requires other nodes; outcome ``invalid``.
    """
    scaling = spec.scaling
    if not spec.cluster.is_local:
        return scaling
    from .ray_configs import resources_per_worker

    if scaling.label_selector or (scaling.placement_strategy == "STRICT_SPREAD" and scaling.max_workers > 1):
        raise AttemptFailedError(
            "label_selector and placement_strategy 'STRICT_SPREAD' require several nodes or labels, and the local "
            "cluster is one node without labels; leave them at their defaults, or join another cluster"
        )
    max_workers = scaling.max_workers
    for name, amount in resources_per_worker(scaling).items():
        available = resources.get(name, 0) - (name == "CPU" and spec.request.extra_cpus)
        if amount * scaling.min_workers > available:
            raise AttemptFailedError(
                f"min_workers={scaling.min_workers} need {amount * scaling.min_workers:g} {name}, and the local "
                f"cluster on this machine has {available:g} for them; lower min_workers or resources_per_worker, set "
                "num_cpus or num_gpus, or join a larger cluster"
            )
        if amount:
            max_workers = min(max_workers, int(available / amount))
    return scaling.model_copy(update={"max_workers": max_workers}) if spec.request.extra_cpus else scaling


def error_within(seconds: float, action: Callable[[], object]) -> BaseException | None:
    """Run an action in a thread, and return its error; None if it succeeds, a TimeoutError if it takes too long.

    The thread of an action that takes too long is left to itself.
    """
    results: list[BaseException | None] = [TimeoutError("no answer")]

    def run() -> None:
        try:
            action()
            results.append(None)
        except BaseException as error:  # noqa: BLE001 - the caller decides
            results.append(error)

    start_thread(run).join(seconds)
    return results[-1]


def _cluster_address(spec: DriverSpec) -> str:
    if spec.cluster.is_submitted:
        return os.environ["RAY_ADDRESS"]  # set by Ray for its jobs
    if spec.cluster.address != "auto":
        return spec.local_address or spec.cluster.address
    from ray._private.services import canonicalize_bootstrap_address_or_die

    try:
        return str(canonicalize_bootstrap_address_or_die("auto"))
    except (ValueError, OSError) as error:
        raise _lost(
            f"address 'auto' finds no single Ray cluster on this machine ({error}); give its address in the RayCluster"
        ) from error


def _check_head(address: str, timeout: float) -> None:
    """Check that a Ray head answers at an address: without one, ``ray.init`` ends the process or gives no reason.

    Raises:
        AttemptFailedError: No Ray head answers within the time limit, or it refuses the token.
    """
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.exceptions import AuthenticationError

    host, _, port = address.rpartition(":")

    def request() -> None:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2.0).close()
        GcsClient(address=address).internal_kv_keys(b"session_name", timeout=5)

    deadline = time.monotonic() + timeout
    while isinstance(problem := error_within(timeout, request), OSError) and time.monotonic() < deadline:
        time.sleep(0.1)
    if isinstance(problem, AuthenticationError):
        raise AttemptFailedError(
            f"the Ray cluster at {address} refused the token; give its token as auth_token of the RayCluster"
        )
    if problem:
        raise _lost(
            f"no Ray cluster answers at {address} ({problem}; tried for {timeout:g} s). Start one there with "
            "`ray start --head`, or correct the address of the RayCluster, or RAY_ADDRESS if that is 'auto': give "
            "that of the head's GCS, not of its dashboard"
        ) from problem


def _lost(message: str) -> AttemptFailedError:
    return AttemptFailedError(message, outcome=Outcome.CLUSTER_LOST)
