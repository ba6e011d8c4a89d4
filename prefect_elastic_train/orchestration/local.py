"""A training in the flow process itself, by Ray Train's local mode: for debugging."""

from __future__ import annotations

from pkgutil import resolve_name

from prefect_elastic_train.driver.fit import make_datasets, prepare
from prefect_elastic_train.loop.context import RunContext, use_run_context
from prefect_elastic_train.orchestration.arguments import driver_spec
from prefect_elastic_train.orchestration.result import TrainingResult
from prefect_elastic_train.orchestration.training import Training


class LocalTraining(Training):
    """Calls the train loop in the process of Prefect's task. Nothing is saved, and no other process is started."""

    def attempt(self) -> TrainingResult:
        """Run the loop, and return what it has reported last."""
        payload = prepare(driver_spec(self.request, self.blocks))
        from ray.train import ScalingConfig

        from prefect_elastic_train.elastic.checkpoints import as_json_values
        from prefect_elastic_train.elastic.controller import TRAINERS

        name = self.request.run_name
        trainer = resolve_name(TRAINERS[self.request.framework])(
            payload.train_loop,
            train_loop_config=payload.train_loop_config,
            scaling_config=ScalingConfig(num_workers=0),
            datasets=make_datasets(payload),
        )
        with use_run_context(RunContext(name, self.request.owner.supervisor, 1, "", "")):
            result = trainer.fit()
        return TrainingResult(run_name=name, run_uri="", metrics=as_json_values(result.metrics or {}))
