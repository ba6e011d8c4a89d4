"""Ray Train's trainers with our policies and callbacks in their controller.

Uses ``ray.train.v2._internal``: ``fit()`` hands policies and callbacks to its controller through
``_initialize_and_run_controller``, and has no public parameter for either, nor for the controller's class.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ray.train.v2._internal.callbacks import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2.api import data_parallel_trainer
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from prefect_elastic_train.core.settings import ScalingSettings
from prefect_elastic_train.elastic.callbacks import RunCallback
from prefect_elastic_train.elastic.loop_callback import LoopCallback, NoDatasetsCallback
from prefect_elastic_train.elastic.policy import RunFailurePolicy, RunScalingPolicy
from prefect_elastic_train.elastic.worker_group import TrainController
from prefect_elastic_train.loop.context import RunContext


class ControllerSetup(NamedTuple):
    """What goes into the controller besides Ray's own parts; the run reserves resources under ``requester_id``."""

    requester_id: str
    scaling: ScalingSettings
    callback: RunCallback
    context: RunContext


class _ElasticTrainerMixin:
    """Puts our parts into the controller of a Ray Train trainer."""

    _elastic_setup: ControllerSetup
    scaling_config: Any
    run_config: Any
    datasets: Any

    def _initialize_and_run_controller(self, **controller_arguments: Any) -> Any:
        setup = self._elastic_setup
        policies = {
            "scaling_policy": RunScalingPolicy(self.scaling_config, setup.requester_id, setup.scaling),
            "failure_policy": RunFailurePolicy(self.run_config.failure_config),
        }
        data_parallel_trainer.TrainController = TrainController
        return super()._initialize_and_run_controller(**controller_arguments | policies)  # type: ignore[misc]

    def _create_default_callbacks(self) -> list[Any]:
        # Placement groups go with the job of their driver; the cleaner may ask another cluster on the same host whether
        # the controller lives, and remove a living group. Without datasets, no start need wait for their manager.
        ours = [self._elastic_setup.callback, LoopCallback(self._elastic_setup.context)]
        unwanted: tuple[type, ...] = (PlacementGroupCleanerCallback,)
        if not self.datasets:
            unwanted, ours = (*unwanted, DatasetsCallback), [*ours, NoDatasetsCallback()]
        rays = super()._create_default_callbacks()  # type: ignore[misc]
        return [*(callback for callback in rays if not isinstance(callback, unwanted)), *ours]


def make_trainer(framework: str, setup: ControllerSetup, **arguments: Any) -> DataParallelTrainer:
    """Return the trainer of a framework (``"torch"``, ``"jax"`` or ``"none"``) with our parts in its controller.

    Of the trainer's own arguments, ``torch_config`` and ``jax_config`` reach the one they belong to.
    """
    torch_config, jax_config = arguments.pop("torch_config", None), arguments.pop("jax_config", None)
    base: type[DataParallelTrainer] = DataParallelTrainer
    if framework == "torch":
        from ray.train.torch import TorchTrainer

        base, arguments["torch_config"] = TorchTrainer, torch_config
    elif framework == "jax":
        from ray.train.v2.jax import JaxTrainer

        from prefect_elastic_train.elastic.jax_backend import run_jax_config

        base, arguments["jax_config"] = JaxTrainer, run_jax_config(jax_config, arguments["scaling_config"])
    trainer_type = type(f"Elastic{base.__name__}", (_ElasticTrainerMixin, base), {"_elastic_setup": setup})
    trainer: DataParallelTrainer = trainer_type(**arguments)
    return trainer
