"""The user's code in the driver: loads and checks the train loop, its configuration and its datasets."""

import importlib
import inspect
import logging
import operator
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import ModuleType
from typing import Any

from prefect_elastic_train.core.outcomes import AttemptFailedError, ConfigurationError, Outcome
from prefect_elastic_train.core.payload import Payload
from prefect_elastic_train.core.request import DriverSpec

from .prestarted import FRAMEWORK_MODULES

logger = logging.getLogger("prefect_elastic_train.driver")


def load_payload(spec: DriverSpec) -> Payload:
    """Import the framework, unpickle the user's objects with their train loop, and check the configuration with Ray.

    Raises:
        ConfigurationError: The objects cannot be loaded, or Ray does not accept the configuration.
        ImportError: The framework is not installed where the driver runs.
    """
    request = spec.request
    sys.path[:] = list(dict.fromkeys([*sys.path, *spec.sys_path]))
    importlib.import_module(FRAMEWORK_MODULES[request.framework])
    try:
        payload: Payload = pickle.loads(request.payload)
        if isinstance(payload.train_loop, str):
            payload = replace(payload, train_loop=import_loop(payload.train_loop))
        check_loop(payload.train_loop)
    except ConfigurationError:
        raise
    except Exception as error:
        location = "by another process of this Python environment"
        if spec.cluster.is_submitted:
            location = "in the cluster (send it with working_dir of the RayCluster, or install it there)"
        raise ConfigurationError(
            f"the driver cannot load train loop {request.fingerprint.loop!r} and its configuration: "
            f"{type(error).__name__}: {error}. What it refers to must be importable {location}, or defined in the "
            "flow's own script"
        ) from error
    try:
        _check_configuration(spec, payload)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"Ray does not accept the configuration: {error}") from error
    return payload


def _check_configuration(spec: DriverSpec, payload: Payload) -> None:
    from ray.runtime_env import RuntimeEnv
    from ray.train import DataConfig, ValidationConfig
    from ray.train.backend import BackendConfig

    from .ray_configs import resources_per_worker

    types = {
        "torch_config": BackendConfig,
        "jax_config": BackendConfig,
        "dataset_config": DataConfig,
        "validation_config": ValidationConfig,
    }
    resources_per_worker(spec.scaling)
    RuntimeEnv(**spec.request.worker_runtime_env)
    for name, expected in types.items():
        if not isinstance(getattr(payload, name), expected | None):
            raise TypeError(f"{name} must be Ray's {expected.__name__}, got {getattr(payload, name)!r:.100}")
    if getattr(getattr(payload.torch_config, "backend_cls", None), "has_replica_groups", False):
        raise TypeError(
            f"torch_config is a {type(payload.torch_config).__name__}: replica groups are not supported, since all "
            "workers are restarted together. Give a TorchConfig"
        )


def import_loop(path: str) -> Callable[..., Any]:
    """Import a train loop by its path, ``"package.module:function"``.

    Raises:
        ConfigurationError: There is no such function, or its module cannot be imported.
    """
    module_name, _, function_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"train loop {path!r}: module {module_name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    return loop_in_module(module, function_name, path)


def loop_in_module(module: ModuleType, function_name: str, path: str) -> Callable[..., Any]:
    """Return the train loop of a module by its name, which may be dotted: the loop may be an attribute of a class.

    Error messages show the user's `path`.

    Raises:
        ConfigurationError: There is no such object.
    """
    try:
        loop: Callable[..., Any] = operator.attrgetter(function_name)(module)
    except AttributeError as error:
        raise ConfigurationError(f"train loop {path!r}: {module.__name__!r} has no {function_name!r}") from error
    return loop


def check_loop(loop: Any) -> None:
    """Check that a train loop is a plain function that requires at most the config, by position.

    Raises:
        ConfigurationError: It is not such a function.
    """
    if not callable(loop):
        raise ConfigurationError(
            f"the train loop must be a function or the import path of one, got {type(loop).__name__}"
        )
    name = getattr(loop, "__name__", loop)
    if inspect.iscoroutinefunction(loop) or inspect.isgeneratorfunction(loop) or inspect.isasyncgenfunction(loop):
        raise ConfigurationError(
            f"train loop {name!r} is async or a generator: calling it runs nothing; make it a plain function, such as "
            "one that calls asyncio.run(...)"
        )
    try:
        signature = inspect.signature(loop)
    except ValueError:  # it is not written in Python
        return
    for arguments in ((), ("config",)):
        with suppress(TypeError):
            signature.bind(*arguments)
            return
    raise ConfigurationError(
        f"train loop {name!r} has the parameters ({', '.join(signature.parameters)}); it may require none, or one by "
        "position: the train_loop_config"
    )


def make_datasets(payload: Payload) -> dict[str, Any]:
    """Return the user's datasets by name. Calls the user's functions that create datasets.

    Raises:
        AttemptFailedError: A function has failed; outcome ``user_error``.
    """
    try:
        if context := payload.data_context:
            vars(context.get_current()).update(vars(context))
        datasets = payload.datasets() if callable(payload.datasets) else payload.datasets
        return {
            name: dataset() if inspect.isfunction(dataset) else dataset for name, dataset in (datasets or {}).items()
        }
    except Exception as error:
        logger.error("the datasets could not be made", exc_info=True)
        raise AttemptFailedError(
            f"the datasets could not be made: {type(error).__name__}: {error}", outcome=Outcome.USER_ERROR
        ) from error
