"""A training's run in MLflow, which is found by its tag ``elastic_train.run_id``."""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from .tracked_run import Row

_METRICS_OF_A_CALL = 1000  # MLflow's limit
#: Settings of MLflow that the environment may override. By default MLflow repeats requests, also those that were
#: carried out but not answered, so that steps would be there twice.
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_ALLOW_FILE_STORE": "true",
}


class Backend:
    """A run in MLflow. See :attr:`TrackedRun.backend`."""

    def __init__(
        self,
        ids: Mapping[str, str],
        parameters: Mapping[str, Any],
        tracking_uri: str,
        experiment: str = "elastic-train",
    ) -> None:
        os.environ.update(_ENVIRONMENT | os.environ)
        from mlflow import MlflowClient

        client = self._client = MlflowClient(tracking_uri)
        found = client.get_experiment_by_name(experiment)
        experiment_id = found.experiment_id if found else client.create_experiment(experiment)
        runs = client.search_runs([experiment_id], f"tags.`elastic_train.run_id` = '{ids['run_id']}'")
        tags = {f"elastic_train.{name}": value for name, value in ids.items()}
        run = runs[0] if runs else client.create_run(experiment_id, tags=tags, run_name=ids["run_name"])
        self._id = run.info.run_id
        # The process that created the run may have died before it logged the parameters.
        for name in parameters.keys() - run.data.params:
            client.log_param(self._id, name, parameters[name])
        client.update_run(self._id, "RUNNING")
        self.link = f"{tracking_uri}/#/experiments/{experiment_id}/runs/{self._id}"
        # The run's data have the newest value of each metric. Only their protobuf form has its step.
        self.last = defaultdict(int, {metric.key: metric.step for metric in run.data.to_proto().metrics})

    def log(self, rows: Sequence[Row], checkpoint: str) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(name, value, int(at * 1000), step) for step, at, row in rows for name, value in row.items()]
        for first in range(0, len(metrics), _METRICS_OF_A_CALL):
            self._client.log_batch(self._id, metrics[first : first + _METRICS_OF_A_CALL])
        self._client.set_tag(self._id, "elastic_train.checkpoint", checkpoint)

    def finish(self, status: str, checkpoint: str) -> None:
        self._client.set_terminated(self._id, status)
