"""Ray Train's trainers with our controller.

Uses ``ray.train.v2._internal``: ``fit()`` starts its controller in ``_initialize_and_run_controller``, and has no
public parameter for the controller's class, its policies or its internal callbacks.
"""

import logging
import os
from collections.abc import Callable, Coroutine, Generator
from pkgutil import resolve_name
from typing import Any

from ray.train.v2._internal.callbacks import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.context import get_train_context
from ray.train.v2.api import data_parallel_trainer
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from prefect_elastic_train.controller import standby
from prefect_elastic_train.controller.controller import TrainController
from prefect_elastic_train.controller.controller_state import ControllerSettings
from prefect_elastic_train.controller.event_queue import ReceiverAddress
from prefect_elastic_train.controller.scaling_policy import requester_id
from prefect_elastic_train.core.payload import Payload
from prefect_elastic_train.core.request import FORK_SERVER_VARIABLE, DriverSpec
from prefect_elastic_train.loop.context import RunContext
from prefect_elastic_train.runs.run_filesystem import run_filesystem
from prefect_elastic_train.storage.store import RunStore
from prefect_elastic_train.worker.checkpoints import to_json_values
from prefect_elastic_train.worker.worker_callbacks import NoDatasets

from .ray_configs import run_config, scaling_config

logger = logging.getLogger("prefect_elastic_train.driver")

#: Ray Train's trainers by framework.
TRAINERS = {
    "torch": "ray.train.torch:TorchTrainer",
    "jax": "ray.train.v2.jax:JaxTrainer",
    "xgboost": "ray.train.xgboost:XGBoostTrainer",
    "lightgbm": "ray.train.lightgbm:LightGBMTrainer",
    "none": "ray.train.v2.api.data_parallel_trainer:DataParallelTrainer",
}


class _NoVariables(dict[str, str]):
    """The environment of a controller that inherits it from its node: a dict to which Ray Train adds no variable."""

    def setdefault(self, name: str, value: str = "", /) -> str:
        return value


class _ElasticTrainerMixin:
    """Mixin that makes a trainer of Ray Train start this package's controller."""

    _controller_settings: ControllerSettings
    datasets: Any

    def _initialize_and_run_controller(self, **controller_arguments: Any) -> Any:
        data_parallel_trainer.TrainController = TrainController
        if FORK_SERVER_VARIABLE in os.environ:
            data_parallel_trainer.get_env_vars_to_propagate = _NoVariables
        return super()._initialize_and_run_controller(  # type: ignore[misc]
            settings=self._controller_settings, **controller_arguments
        )

    def _get_train_func(self) -> Callable[[], None]:
        """Return a train loop that checks that its node shares the storage, and drops the user loop's return value.

        Ray Train may be unable to send that value.
        """
        loop = super()._get_train_func()  # type: ignore[misc]

        def train() -> None:
            storage = get_train_context().storage_context
            storage.storage_filesystem.create_dir(storage.experiment_fs_path)  # creates nothing, but checks the fence
            value = loop()
            if isinstance(value, Coroutine | Generator):
                raise TypeError(
                    f"the train loop returned a {type(value).__name__}, which has not run; run it in the loop"
                )

        return train

    def _create_default_callbacks(self) -> list[Any]:
        # Ray removes placement groups with the job of their driver. The cleaner may ask another cluster on the same
        # host whether the controller lives, and remove a living group.
        dropped = PlacementGroupCleanerCallback if self.datasets else PlacementGroupCleanerCallback | DatasetsCallback
        callbacks = super()._create_default_callbacks()  # type: ignore[misc]
        callbacks = [callback for callback in callbacks if not isinstance(callback, dropped)]
        return callbacks if self.datasets else [*callbacks, NoDatasets()]


def make_trainer(
    spec: DriverSpec,
    payload: Payload,
    datasets: dict[str, Any],
    store: RunStore,
    context: RunContext,
    receiver: ReceiverAddress,
) -> DataParallelTrainer:
    """Return Ray Train's trainer for the framework of a run. Its ``fit()`` starts this package's controller."""
    framework = spec.request.framework
    scaling = spec.scaling
    if payload.validation_config is not None:
        validate = payload.validation_config.fn
        payload.validation_config.fn = lambda *args, **kwargs: to_json_values(validate(*args, **kwargs))
    arguments: dict[str, Any] = {
        "train_loop_per_worker": payload.train_loop,
        "train_loop_config": payload.train_loop_config,
        "scaling_config": scaling_config(scaling),
        "run_config": run_config(spec, store.path.rpartition("/")[0], run_filesystem(store, context.attempt)),
        "datasets": datasets,
        "dataset_config": payload.dataset_config,
        "validation_config": payload.validation_config,
    }
    if framework == "jax":
        from prefect_elastic_train.controller.jax_backend import run_jax_config

        arguments["jax_config"] = run_jax_config(payload.jax_config, arguments["scaling_config"])
    elif payload.torch_config:
        arguments["torch_config" if framework == "torch" else "backend_config"] = payload.torch_config
    base = resolve_name(TRAINERS[framework])
    trainer: Any = type(f"Elastic{base.__name__}", (_ElasticTrainerMixin, base), {})(**arguments)
    standby_mode = "off" if spec.can_fork else scaling.standby
    if standby_mode != "off" and not standby.can_use_standbys(scaling, framework):
        standby_mode = "off"
        logger.warning("standby workers are disabled: they are supported on CPUs, and on GPUs with torch")
    trainer._controller_settings = ControllerSettings(
        receiver=receiver,
        store=store,
        context=context,
        framework=framework,
        scaling=scaling,
        failures=spec.failures,
        requester_id="" if spec.is_alone else requester_id(store),
        standby=standby_mode,
        recovery_memory_fraction=spec.checkpoints.recovery_memory_fraction,
    )
    return trainer
