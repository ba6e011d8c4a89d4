"""Ray Train's trainers with our policies and callbacks in their controller.

Uses ``ray.train.v2._internal``: ``fit()`` hands policies and callbacks to its controller through
``_initialize_and_run_controller``, and has no public parameter for either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray.train.v2._internal.callbacks import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from prefect_elastic_train.elastic.callbacks import LoopCallback, NoDatasetsCallback, RunCallback
from prefect_elastic_train.elastic.failures import RunFailurePolicy
from prefect_elastic_train.elastic.policy import Patience, RunScalingPolicy
from prefect_elastic_train.elastic.run_contexts import RunContextCallback
from prefect_elastic_train.elastic.stall import StallCallback
from prefect_elastic_train.elastic.storage_waits import StorageWaitsCallback
from prefect_elastic_train.loop.context import RunContext

__all__ = ["ControllerSetup", "make_trainer"]


@dataclass(frozen=True)
class ControllerSetup:
    """What goes into the controller besides Ray's own parts.

    Attributes:
        requester_id: Under which the run reserves resources.
        patience: What the scaling policy waits for.
        callback: Reports to the driver.
        context: What the loop may know of the run.
        stall_timeout_seconds: How long the loop may report nothing, 0 for ever.
    """

    requester_id: str
    patience: Patience
    callback: RunCallback
    context: RunContext
    stall_timeout_seconds: float = 0.0


class _ElasticTrainerMixin:
    """Puts our parts into the controller of a Ray Train trainer."""

    _elastic_setup: ControllerSetup

    def _initialize_and_run_controller(self, **controller_arguments: Any) -> Any:
        setup = self._elastic_setup
        controller_arguments["scaling_policy"] = RunScalingPolicy(
            self.scaling_config,  # type: ignore[attr-defined]
            requester_id=setup.requester_id,
            patience=setup.patience,
        )
        controller_arguments["failure_policy"] = RunFailurePolicy(
            self.run_config.failure_config,  # type: ignore[attr-defined]
        )
        return super()._initialize_and_run_controller(**controller_arguments)  # type: ignore[misc]

    def _create_default_callbacks(self) -> list[Any]:
        """Ray's callbacks and ours, without two of Ray's that cost more than they give here.

        Placement groups go with the job of their driver, which ends when its controller does. The cleaner of
        placement groups may ask another cluster on the same host whether the controller lives, and remove a
        living group. And without datasets, nobody needs an actor that manages them, which every start of a
        worker group would wait for.
        """
        callbacks = super()._create_default_callbacks()  # type: ignore[misc]
        unwanted: tuple[type, ...] = (PlacementGroupCleanerCallback,)
        setup = self._elastic_setup
        in_workers = [LoopCallback(setup.context.attempt), RunContextCallback(setup.context), StorageWaitsCallback()]
        ours: list[Any] = [setup.callback, *in_workers]
        if setup.stall_timeout_seconds:
            ours.append(StallCallback(setup.stall_timeout_seconds))
        if not self.datasets:  # type: ignore[attr-defined]
            unwanted = (*unwanted, DatasetsCallback)
            ours.append(NoDatasetsCallback())
        return [*(callback for callback in callbacks if not isinstance(callback, unwanted)), *ours]


def make_trainer(framework: str, setup: ControllerSetup, **arguments: Any) -> DataParallelTrainer:
    """Make the trainer of a framework with our parts in its controller.

    Args:
        framework: ``"torch"``, ``"jax"`` or ``"none"``.
        setup: Our parts.
        **arguments: The trainer's own; ``torch_config`` and ``jax_config`` reach the one they belong to.

    Raises:
        ImportError: The framework is not installed.
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
