"""The driver's work with Ray Train: the user's objects, and ``fit()``."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
import operator
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

from prefect_elastic_train.core.outcomes import AttemptFailedError, ConfigurationError, Outcome
from prefect_elastic_train.core.request import DriverSpec, Payload
from prefect_elastic_train.elastic.sending import Receiving
from prefect_elastic_train.loop.context import RunContext
from prefect_elastic_train.storage.store import RunStore

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
    from ray.train.backend import BackendConfig

    from prefect_elastic_train.elastic.cluster import resources_per_worker

    try:
        resources_per_worker(spec.scaling)
        RuntimeEnv(**request.worker_runtime_env)
        for config in (payload.torch_config, payload.jax_config):
            if not isinstance(config, BackendConfig | None):
                raise TypeError(f"torch_config and jax_config are Ray's TorchConfig and JaxConfig, got {config!r}")
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"Ray does not accept the configuration: {error}") from error
    return payload


def resolve_loop(path: str) -> Callable[..., Any]:
    """Import a train loop given as ``"package.module:function"``.

    Raises:
        ConfigurationError: The module cannot be imported, or has no such function.
    """
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
    """Refuse a loop that requires more than the config, or that by name: Ray Train passes it by position.

    Raises:
        ConfigurationError: It does.
    """
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
    datasets = payload.datasets
    try:
        if callable(datasets):
            datasets = datasets()
        return {name: made() if inspect.isfunction(made) else made for name, made in (datasets or {}).items()}
    except Exception as error:
        logger.error("the datasets could not be made", exc_info=True)
        message = f"the datasets could not be made: {type(error).__name__}: {error}"
        raise AttemptFailedError(message, outcome=Outcome.USER_ERROR) from error


def fit(
    spec: DriverSpec,
    payload: Payload,
    datasets: dict[str, Any],
    store: RunStore,
    context: RunContext,
    receiving: Receiving,
) -> None:
    """Train until the loop has returned on all ranks; raises what Ray Train raises, or that it refuses to begin."""
    from ray.train import DataConfig

    from prefect_elastic_train.elastic.callbacks import RunCallback
    from prefect_elastic_train.elastic.checkpoints import run_filesystem
    from prefect_elastic_train.elastic.cluster import run_config, scaling_config
    from prefect_elastic_train.elastic.trainers import ControllerSetup, make_trainer

    attempt = context.attempt
    callback = RunCallback(receiving, store, attempt, spec.failures, spec.checkpoints.score_attribute)
    setup = ControllerSetup(requester_id(store), spec.scaling, callback, context)
    try:
        trainer = make_trainer(
            spec.request.framework,
            setup,
            train_loop_per_worker=payload.train_loop,
            train_loop_config=payload.train_loop_config,
            scaling_config=scaling_config(spec.scaling),
            run_config=run_config(
                name=spec.request.run_name,
                storage_path=store.path.rpartition("/")[0],
                storage_filesystem=run_filesystem(store, attempt),
                failures=spec.failures,
                checkpoints=spec.checkpoints,
                worker_runtime_env=spec.request.worker_runtime_env,
            ),
            datasets=datasets,
            dataset_config=payload.dataset_config or DataConfig(),
            validation_config=payload.validation_config,
            torch_config=payload.torch_config,
            jax_config=payload.jax_config,
        )
    except (TypeError, ValueError, DeprecationWarning) as error:
        raise ConfigurationError(f"Ray Train does not accept the configuration: {error}") from error
    trainer.fit()


def requester_id(store: RunStore) -> str:
    """Return the id that every attempt of a run reserves resources under."""
    digest = hashlib.sha256(store.uri.encode()).hexdigest()[:12]
    name = store.path.rpartition("/")[2]
    return f"elastic-train-{name}-{digest}"
