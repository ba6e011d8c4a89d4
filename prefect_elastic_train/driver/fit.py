"""The driver's work with Ray Train: the user's objects, ``fit()``, and how it ended."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from prefect_elastic_train.core.outcomes import AttemptFailedError, ConfigurationError, Outcome
from prefect_elastic_train.core.request import Payload
from prefect_elastic_train.core.spec import DriverSpec
from prefect_elastic_train.driver.endings import classify
from prefect_elastic_train.elastic.sending import Receiving
from prefect_elastic_train.loop.context import RunContext
from prefect_elastic_train.storage.store import RunStore

logger = logging.getLogger("prefect_elastic_train.driver")


@dataclass(frozen=True)
class Prepared:
    """The user's objects, resolved and checked."""

    train_loop: Callable[..., Any]
    payload: Payload


def prepare(spec: DriverSpec) -> Prepared:
    """Import the framework and unpickle the user's objects.

    Raises:
        AttemptFailedError: Something of it does not work out; outcome ``invalid``.
    """
    sys.path[:] = list(dict.fromkeys([*sys.path, *spec.sys_path]))
    try:
        if spec.request.framework == "torch":
            import ray.train.torch  # noqa: F401
        elif spec.request.framework == "jax":
            import jax  # noqa: F401
    except ImportError as error:
        raise AttemptFailedError(
            f"framework {spec.request.framework!r} is not installed where the driver runs ({error}); install it with "
            f"`pip install 'prefect-elastic-train[{spec.request.framework}]'`",
            outcome=Outcome.INVALID,
        ) from error
    try:
        payload = pickle.loads(spec.request.payload)
        loop = resolve_loop(payload.train_loop) if isinstance(payload.train_loop, str) else payload.train_loop
        check_loop(loop)
    except ConfigurationError as error:
        raise AttemptFailedError(str(error), outcome=Outcome.INVALID) from error
    except Exception as error:
        raise AttemptFailedError(
            f"the driver cannot load train loop {spec.request.fingerprint.loop!r} and its configuration: "
            f"{type(error).__name__}: {error}. What it refers to must be {_where_importable(spec)}, or defined in the "
            "flow's own script",
            outcome=Outcome.INVALID,
        ) from error
    _check_configuration(spec, payload)
    return Prepared(loop, payload)


def _where_importable(spec: DriverSpec) -> str:
    if spec.cluster.is_submitted:
        return "importable in the cluster (send it with working_dir of the RayCluster, or install it there)"
    return "importable by another process of this Python environment"


def _check_configuration(spec: DriverSpec, payload: Payload) -> None:
    """Let Ray judge what it is configured with, before anything of it starts.

    Raises:
        AttemptFailedError: Ray would refuse it later, in words of its own; outcome ``invalid``.
    """
    from ray.runtime_env import RuntimeEnv

    from prefect_elastic_train.elastic.translate import resources_per_worker

    try:
        resources_per_worker(spec.scaling)
        environments = [spec.request.worker_runtime_env]
        if not spec.cluster.is_submitted:  # a job has its environment by now
            environments.append(spec.cluster.runtime_env)
            _check_folder(spec.cluster.working_dir)
        for environment in environments:
            _check_folder(str(environment.get("working_dir") or ""))
            RuntimeEnv(**environment)
        if spec.request.framework == "torch" and payload.torch_config is not None:
            from ray.train.torch import TorchConfig

            if not isinstance(payload.torch_config, TorchConfig):
                raise TypeError(f"torch_config must be a ray.train.torch.TorchConfig, got {payload.torch_config!r}")
        if spec.request.framework == "jax" and payload.jax_config is not None:
            from ray.train.v2.jax import JaxConfig

            if not isinstance(payload.jax_config, JaxConfig):
                raise TypeError(f"jax_config must be a ray.train.v2.jax.JaxConfig, got {payload.jax_config!r}")
    except (TypeError, ValueError) as error:
        raise AttemptFailedError(f"Ray does not accept the configuration: {error}", outcome=Outcome.INVALID) from error


def _check_folder(working_dir: str) -> None:
    local = working_dir and "://" not in working_dir
    if local and not os.path.exists(os.path.expanduser(working_dir)):
        raise ValueError(f"working_dir {working_dir!r} does not exist on this machine")


def resolve_loop(path: str) -> Callable[..., Any]:
    """Import a train loop given as ``"package.module:function"``.

    Raises:
        ConfigurationError: The path has another form, the module cannot be imported, or it has no such function.
    """
    module_name, _, function_name = path.partition(":")
    try:
        found = importlib.import_module(module_name)
    except SystemExit as error:
        raise ConfigurationError(f"train loop {path!r}: module {module_name!r} {ends_at_import(error)}") from error
    except Exception as error:
        raise ConfigurationError(
            f"train loop {path!r}: module {module_name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    return function_in(found, function_name, path)


def ends_at_import(error: SystemExit) -> str:
    """Say in words that a script ended the program while its functions were looked for."""
    return (
        f"ends the program while it is imported (exit code {error.code}); put what it does as a program below "
        '`if __name__ == "__main__":`'
    )


def function_in(module: ModuleType, function_name: str, path: str) -> Callable[..., Any]:
    """Give a train loop of a module.

    Args:
        module: The module.
        function_name: Name of the function, with dots for one of a class.
        path: What the user has given, for the error.

    Raises:
        ConfigurationError: It has no such function.
    """
    found: Any = module
    for part in function_name.split("."):
        if not hasattr(found, part):
            raise ConfigurationError(f"train loop {path!r}: {module.__name__!r} has no {function_name!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigurationError(
            f"train loop {path!r} is a {type(found).__name__}; it must be a function of no argument or of the config"
        )
    return found  # type: ignore[no-any-return]


def check_loop(loop: Callable[..., Any]) -> None:
    """Check that a loop takes nothing or the config.

    Raises:
        ConfigurationError: It requires more arguments.
    """
    try:
        parameters = inspect.signature(loop).parameters.values()
    except (TypeError, ValueError):
        return
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    names = ", ".join(parameter.name for parameter in required)
    if any(parameter.kind is parameter.KEYWORD_ONLY for parameter in required) and len(required) == 1:
        raise ConfigurationError(
            f"train loop {getattr(loop, '__name__', loop)!r} takes {names} by name only; Ray Train passes the "
            "train_loop_config by position"
        )
    if len(required) > 1:
        raise ConfigurationError(
            f"train loop {getattr(loop, '__name__', loop)!r} requires {len(required)} arguments "
            f"({names}); it may take none, or one: the train_loop_config"
        )


def make_datasets(prepared: Prepared, attempt: int) -> dict[str, Any]:
    """Give the datasets, calling the functions that make them.

    Raises:
        AttemptFailedError: One of them failed; outcome ``user_error``.
    """
    datasets = prepared.payload.datasets
    try:
        if callable(datasets):
            datasets = datasets()
        return {name: made() if inspect.isfunction(made) else made for name, made in (datasets or {}).items()}
    except Exception as error:
        logger.error("the datasets could not be made", exc_info=True)
        raise AttemptFailedError(
            f"the datasets could not be made: {type(error).__name__}: {error}",
            outcome=Outcome.USER_ERROR,
            attempt=attempt,
        ) from error


def fit(
    spec: DriverSpec,
    prepared: Prepared,
    datasets: dict[str, Any],
    store: RunStore,
    context: RunContext,
    receiving: Receiving,
) -> None:
    """Train until the loop has returned on all ranks.

    Args:
        spec: What the driver was told.
        prepared: The user's objects.
        datasets: The user's datasets.
        store: The run directory.
        context: The run and its attempt, as the loop sees them.
        receiving: Where the driver listens to the controller.

    Raises:
        AttemptFailedError: Training ended otherwise.
    """
    from ray.train import DataConfig

    from prefect_elastic_train.elastic.callbacks import RunCallback
    from prefect_elastic_train.elastic.checkpoints import run_filesystem
    from prefect_elastic_train.elastic.trainers import ControllerSetup, make_trainer
    from prefect_elastic_train.elastic.translate import run_config, scaling_config

    payload, attempt = prepared.payload, context.attempt
    callback = RunCallback(receiving, store, attempt, spec.failures, spec.checkpoints.score_attribute)
    setup = ControllerSetup(requester_id(store), spec.scaling, callback, context)
    try:
        trainer = make_trainer(
            spec.request.framework,
            setup,
            train_loop_per_worker=prepared.train_loop,
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
        raise AttemptFailedError(
            f"Ray Train does not accept the configuration: {error}", outcome=Outcome.INVALID
        ) from error
    except OSError as error:
        raise classify(error, attempt) from error  # Ray tries the storage when it is configured
    try:
        trainer.fit()
    except Exception as error:
        raise classify(error, attempt) from error


def requester_id(store: RunStore) -> str:
    """Give the id that every attempt of a run reserves resources under."""
    digest = hashlib.sha256(store.uri.encode()).hexdigest()[:12]
    name = store.path.rpartition("/")[2]
    return f"elastic-train-{name}-{digest}"
