"""Run a training in the flow process with Ray Train's local mode, for debugging."""

import threading
from pkgutil import resolve_name

from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.driver.user_code import load_payload, make_datasets
from prefect_elastic_train.loop.context import RunContext, use_run_context

from .arguments import driver_spec
from .supervision import Training
from .training_result import TrainingResult


class LocalTraining(Training):
    """A training that runs the train loop in the flow process and saves no checkpoint."""

    def attempt(self) -> TrainingResult:
        """Run the train loop once, in this process. Return a result with the metrics of its last report.

        Raises:
            ConfigurationError: The training was called outside the main thread, or with ``resume_from``.
        """
        request = self.request
        if request.resume_from or threading.current_thread() is not threading.main_thread():
            raise ConfigurationError(
                "local=True runs from step 0 in the main thread: without submit, aelastic_train and resume_from"
            )
        payload = load_payload(driver_spec(request, self.blocks))
        from ray.train import RunConfig, ScalingConfig

        from prefect_elastic_train.driver.trainer import TRAINERS
        from prefect_elastic_train.worker.checkpoints import to_json_values

        trainer = resolve_name(TRAINERS[request.framework])(
            payload.train_loop,
            train_loop_config=payload.train_loop_config,
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(name=request.run_name),
            datasets=make_datasets(payload),
        )
        with use_run_context(RunContext(request.run_name, request.owner.supervisor, 1, "", "")):
            result = trainer.fit()
        return TrainingResult(run_name=request.run_name, run_uri="", metrics=to_json_values(result.metrics or {}))
