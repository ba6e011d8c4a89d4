"""The driver's work with Ray before ``fit()``: joining the cluster, the user's objects, what they may ask for.

Uses ``_py_driver_sys_path`` of Ray's ``JobConfig``, which fills it from its driver's own ``sys.path``, and ours is not
the user's script.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import operator
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

from prefect_elastic_train.core.outcomes import AttemptFailedError, ConfigurationError, Outcome
from prefect_elastic_train.core.request import DriverSpec, Payload
from prefect_elastic_train.core.settings import ScalingSettings

logger = logging.getLogger("prefect_elastic_train.driver")


def prepare(spec: DriverSpec) -> Payload:
    """Import the framework, unpickle the user's objects with their train loop, and let Ray judge its configuration.

    Raises:
        ConfigurationError: Something of it does not work out.
        ImportError: The framework is not installed where the driver runs.
    """
    request = spec.request
    sys.path[:] = list(dict.fromkeys([*sys.path, *spec.sys_path]))
    if request.framework != "none":
        importlib.import_module({"torch": "ray.train.torch", "jax": "jax"}[request.framework])
    try:
        payload: Payload = pickle.loads(request.payload)
        if isinstance(payload.train_loop, str):
            payload = replace(payload, train_loop=resolve_loop(payload.train_loop))
        check_loop(payload.train_loop)
    except ConfigurationError:
        raise
    except Exception as error:
        where = "in the cluster (send it with working_dir of the RayCluster, or install it there)"
        if not spec.cluster.is_submitted:
            where = "by another process of this Python environment"
        raise ConfigurationError(
            f"the driver cannot load train loop {request.fingerprint.loop!r} and its configuration: "
            f"{type(error).__name__}: {error}. What it refers to must be importable {where}, or defined in the "
            "flow's own script"
        ) from error
    from ray.runtime_env import RuntimeEnv
    from ray.train import DataConfig, ValidationConfig
    from ray.train.backend import BackendConfig

    from prefect_elastic_train.elastic.cluster import resources_per_worker

    kinds = {
        "torch_config": BackendConfig,
        "jax_config": BackendConfig,
        "dataset_config": DataConfig,
        "validation_config": ValidationConfig,
    }
    try:
        resources_per_worker(spec.scaling)
        RuntimeEnv(**request.worker_runtime_env)
        for name, kind in kinds.items():
            if not isinstance(getattr(payload, name), kind | None):
                raise TypeError(f"{name} must be Ray's {kind.__name__}, got {getattr(payload, name)!r:.100}")
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"Ray does not accept the configuration: {error}") from error
    return payload


def resolve_loop(path: str) -> Callable[..., Any]:
    """Import a train loop given as ``"package.module:function"``; refuse one that cannot be imported."""
    module_name, _, function_name = path.partition(":")
    try:
        found = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"train loop {path!r}: module {module_name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    return function_in(found, function_name, path)


def function_in(module: ModuleType, function_name: str, path: str) -> Callable[..., Any]:
    """Return the train loop of a module that the user has named by a path; dots are for one of a class."""
    try:
        found: Callable[..., Any] = operator.attrgetter(function_name)(module)
    except AttributeError as error:
        raise ConfigurationError(f"train loop {path!r}: {module.__name__!r} has no {function_name!r}") from error
    if not callable(found):
        raise ConfigurationError(
            f"train loop {path!r} is a {type(found).__name__}; it must be a function of no argument or of the config"
        )
    return found


def check_loop(loop: Any) -> None:
    """Refuse an async loop, a generator, and a loop that requires more than the config as a positional argument."""
    if inspect.iscoroutinefunction(loop) or inspect.isgeneratorfunction(loop) or inspect.isasyncgenfunction(loop):
        raise ConfigurationError(
            f"train loop {getattr(loop, '__name__', loop)!r} is async or a generator: calling it runs nothing; "
            "make it a plain function, such as one that calls asyncio.run(...)"
        )
    try:
        parameters = inspect.signature(loop).parameters.values()
    except (TypeError, ValueError):
        return
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(required) > 1 or any(parameter.kind is parameter.KEYWORD_ONLY for parameter in required):
        names = ", ".join(parameter.name for parameter in required)
        raise ConfigurationError(
            f"train loop {getattr(loop, '__name__', loop)!r} requires {len(required)} arguments "
            f"({names}); it may take none, or one by position: the train_loop_config"
        )


def make_datasets(payload: Payload) -> dict[str, Any]:
    """Return the datasets, calling the functions that make them; one that fails is a ``user_error``."""
    try:
        if context := payload.data_context:
            vars(context.get_current()).update(vars(context))
        datasets = payload.datasets() if callable(payload.datasets) else payload.datasets
        return {name: made() if inspect.isfunction(made) else made for name, made in (datasets or {}).items()}
    except Exception as error:
        logger.error("the datasets could not be made", exc_info=True)
        raise AttemptFailedError(
            f"the datasets could not be made: {type(error).__name__}: {error}", outcome=Outcome.USER_ERROR
        ) from error


def connect(spec: DriverSpec) -> tuple[str, str, dict[str, float]]:
    """Join the cluster, and return its address, the URL of its dashboard (empty without one) and its resources.

    Raises:
        AttemptFailedError: Nothing answers, or it does not let us in.
    """
    address = _cluster_address(spec)
    _check_head(address, spec.cluster.connect_timeout_seconds)
    import ray
    from ray.job_config import JobConfig

    user_env: dict[str, Any] = {}
    if not spec.cluster.is_submitted:  # a job has its environment by now
        user_env = dict(spec.cluster.runtime_env)
        if spec.cluster.working_dir:
            user_env["working_dir"] = os.path.expanduser(spec.cluster.working_dir)
    if not spec.is_alone:  # else the node has it
        # Ray's tools in the workers would otherwise look for any cluster on their host.
        user_env["env_vars"] = {"RAY_ADDRESS": address, **user_env.get("env_vars", {})}
    on_termination = signal.getsignal(signal.SIGTERM)
    installed = (sys.prefix + os.sep, sys.base_prefix + os.sep)
    own_path = [folder for folder in spec.sys_path if os.path.isdir(folder) and not folder.startswith(installed)]
    try:
        context = ray.init(
            address=address,
            runtime_env=user_env,
            job_config=JobConfig(_py_driver_sys_path=own_path),
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
    """Refuse what a local cluster can never hold, since nothing will join it later, and return the scaling."""
    # With datasets or validations ``max_workers`` is lowered to what fits: more workers would starve them.
    scaling = spec.scaling
    problem = ""
    fitting = spec.scaling.max_workers
    if not spec.cluster.is_local:
        return scaling
    from prefect_elastic_train.elastic.cluster import resources_per_worker

    if scaling.label_selector or (scaling.placement_strategy == "STRICT_SPREAD" and scaling.max_workers > 1):
        problem = (
            "label_selector and placement_strategy 'STRICT_SPREAD' want nodes that others join, and the local cluster "
            "is one node without labels; leave them at their defaults, or join another"
        )
    for name, amount in resources_per_worker(scaling).items():
        there = resources.get(name, 0) - (name == "CPU" and spec.request.cpus_beside)
        if amount * scaling.min_workers > there:
            problem = (
                f"min_workers={scaling.min_workers} need {amount * scaling.min_workers:g} {name}, and the local "
                f"cluster on this machine has {there:g} for them; lower min_workers or resources_per_worker, set "
                "num_cpus or num_gpus, or join a larger cluster"
            )
        elif amount:
            fitting = min(fitting, int(there / amount))
    if problem:
        raise AttemptFailedError(problem, outcome=Outcome.INVALID)
    return scaling.model_copy(update={"max_workers": fitting}) if spec.request.cpus_beside else scaling


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
                    "`ray start --head`, or correct the address of the RayCluster, or RAY_ADDRESS if that is 'auto'"
                ) from error
            time.sleep(0.1)
    problem = ask_head(address, timeout)
    if isinstance(problem, AuthenticationError):
        raise AttemptFailedError(
            f"the Ray cluster at {address} refused the token; give its token as auth_token of the RayCluster",
            outcome=Outcome.INVALID,
        )
    if problem is not None:
        raise _lost(
            f"something listens at {address} but does not answer as a Ray head within {timeout:g} s; give the port "
            "of the head's GCS (`ray start --head --port=…`) as address of the RayCluster"
        ) from problem


def _lost(message: str) -> AttemptFailedError:
    return AttemptFailedError(message, outcome=Outcome.CLUSTER_LOST)
