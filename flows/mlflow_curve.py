"""A training that is one run in MLflow, with each step once, also after failures.

- Only rank 0 writes. It writes to the MLflow run that is tagged with the `run_id` of the training, which stays the same
  over restarts.
- Steps are logged after their checkpoint is committed, never before. So a step that is done again after a failure is
  logged with its second result.
- A checkpoint contains the points since the checkpoint before. If rank 0 dies between commit and logging, they are
  logged after the restart.

MLflow's file store, its databases and its server all work (`tracking_uri`). The file store is the default because it
works on any shared directory, also on NFS, on which SQLite does not. MLflow has it in maintenance mode, so it must be
enabled explicitly.
"""

import json
import os
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from prefect import flow
from pydantic import Field

from flows.digits import (
    DEFAULT_CLUSTER,
    DEFAULT_FAILURES,
    DEFAULT_SCALING,
    DEFAULT_STORAGE,
    DEMO_DIRECTORY,
    Storage,
)
from prefect_elastic_train import ElasticScaling, FailureBudget, RayCluster, elastic_train
from prefect_elastic_train.loop import RunContext, run_context

if TYPE_CHECKING:
    import numpy as np
    from mlflow import MlflowClient

DEFAULT_TRACKING_URI = str(DEMO_DIRECTORY / "mlflow")

WEIGHTS = 4  # size of the linear model
BATCH_SIZE = 32
RUN_ID_TAG = "elastic_train.run_id"
STATE_FILE = "state.json"  # the only file of a checkpoint
METRICS_OF_A_CALL = 1000  # MLflow's limit


class Point(NamedTuple):
    """The metrics of one step.

    Attributes:
        step: Number of the step, from 1.
        at: Time of the step, in milliseconds since the epoch.
        metrics: Metrics by name.
    """

    step: int
    at: int
    metrics: dict[str, float]


# ------------------------------------------------------------------------------------------ tracking


def open_client(tracking_uri: str) -> "MlflowClient":
    """Return a client of an MLflow store.

    Args:
        tracking_uri: A directory, `file:///…`, `sqlite:///…` or the `https://…` of a server. MLflow reads a server's
            credentials from `MLFLOW_TRACKING_USERNAME` and `…_PASSWORD` or `…_TOKEN` of the workers.
    """
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when MLflow is imported
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri)


class TrackedRun:
    """The MLflow run of a training, created if it does not exist. Use it on rank 0 only.

    Args:
        client: Client of the MLflow store.
        experiment: Name of the experiment; created if missing.
        run: The training.
        parameters: Parameters to log once.
    """

    def __init__(self, client: "MlflowClient", experiment: str, run: RunContext, parameters: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        self._client = client
        experiment_id = _experiment_id(client, experiment)
        tags = {
            RUN_ID_TAG: run.run_id,
            "elastic_train.run_uri": run.run_uri,
            "prefect.flow_run_id": run.flow_run_id,
            "prefect.flow_name": run.flow_name,
            "prefect.deployment_name": run.deployment_name,
        }
        runs = client.search_runs([experiment_id], filter_string=f"tags.`{RUN_ID_TAG}` = '{run.run_id}'")
        mlflow_run = runs[0] if runs else client.create_run(experiment_id, tags=tags, run_name=run.run_name)
        self.mlflow_run_id: str = mlflow_run.info.run_id
        # The process that created the run may have died before it logged the parameters.
        missing = [Param(name, str(value)) for name, value in parameters.items() if name not in mlflow_run.data.params]
        client.log_batch(self.mlflow_run_id, params=missing)
        client.update_run(self.mlflow_run_id, status="RUNNING")
        self._logged = {name: self._last_step(name) for name in mlflow_run.data.metrics}

    def log(self, points: Iterable[Point]) -> None:
        """Log steps, except those that were logged before a restart.

        Args:
            points: Steps of a committed checkpoint, in ascending order.
        """
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, point.at, point.step)
            for point in points
            for name, value in point.metrics.items()
            if point.step > self._logged.get(name, 0)
        ]
        for first in range(0, len(metrics), METRICS_OF_A_CALL):
            self._client.log_batch(self.mlflow_run_id, metrics=metrics[first : first + METRICS_OF_A_CALL])
        self._logged |= {metric.key: metric.step for metric in metrics}

    def finish(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self.mlflow_run_id, "FINISHED")

    def _last_step(self, name: str) -> int:
        return max(metric.step for metric in self._client.get_metric_history(self.mlflow_run_id, name))


def _experiment_id(client: "MlflowClient", name: str) -> str:
    from mlflow.exceptions import MlflowException

    try:
        return str(client.create_experiment(name))
    except MlflowException:
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            raise
        return str(experiment.experiment_id)  # it exists


# ------------------------------------------------------------------------------------------ training


def take_step(weights: "np.ndarray", step: int, learning_rate: float) -> "tuple[np.ndarray, float]":
    """Take a step of gradient descent. The examples depend on the step alone, and the best weights are all 1.

    Args:
        weights: Weights of a linear model.
        step: Number of the step, from 1.
        learning_rate: Learning rate.

    Returns:
        The new weights, and the loss of the old ones.
    """
    import numpy as np

    random = np.random.default_rng(step)
    inputs = random.standard_normal((BATCH_SIZE, len(weights)))
    errors = inputs @ weights - inputs.sum(axis=1) + 0.1 * random.standard_normal(BATCH_SIZE)
    return weights - learning_rate * 2 * inputs.T @ errors / BATCH_SIZE, float((errors**2).mean())


def train_loop(config: dict[str, Any]) -> None:
    """Fit a linear model, and log its loss to MLflow (a Ray Train loop).

    The model is so small that each rank computes all of it. The example is about logging.

    Args:
        config: `steps`, `checkpoint_every` (steps), `learning_rate`, `step_seconds` (shortest duration of a step),
            `tracking_uri` and `experiment`.
    """
    import numpy as np
    import ray.train

    context = ray.train.get_context()
    run = run_context()
    rank = context.get_world_rank()
    done = 0
    weights = np.zeros(WEIGHTS)
    points: list[Point] = []  # since the last checkpoint; after a restart, those in the checkpoint
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = json.loads((Path(folder) / STATE_FILE).read_text())
        done = saved["step"]
        weights = np.array(saved["weights"])
        # The points of another run's checkpoint belong to that run.
        points = [Point(*point) for point in saved["points"]] if saved["run_id"] == run.run_id else []
    print(
        f"rank {rank} of {context.get_world_size()} continues after step {done} in attempt {run.attempt} of "
        f"{run.run_id}, for flow run {run.flow_run_id}"
    )

    tracked = None
    if rank == 0:
        parameters = {name: config[name] for name in ("steps", "checkpoint_every", "learning_rate")}
        tracked = TrackedRun(open_client(config["tracking_uri"]), config["experiment"], run, parameters)
        tracked.log(points)
    points = []
    for step in range(done + 1, config["steps"] + 1):
        time.sleep(config["step_seconds"])
        weights, loss = take_step(weights, step, config["learning_rate"])
        points.append(Point(step, int(time.time() * 1000), {"loss": loss}))
        if step % config["checkpoint_every"] and step < config["steps"]:
            continue
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if rank == 0:
                state = {"step": step, "weights": weights.tolist(), "points": points, "run_id": run.run_id}
                (Path(folder) / STATE_FILE).write_text(json.dumps(state))
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"step": step, "total_steps": config["steps"], "loss": loss}, checkpoint=checkpoint)
        if tracked is not None:
            # Returns when the controller has committed the report.
            ray.train.get_all_reported_checkpoints(ray.train.CheckpointConsistencyMode.COMMITTED)
            tracked.log(points)
        points = []
    if tracked is not None:
        tracked.finish()


# ---------------------------------------------------------------------------------------------- flow


@flow(name="mlflow-curve")
def mlflow_curve(
    steps: Annotated[int, Field(ge=1)] = 200,
    checkpoint_every: Annotated[int, Field(ge=1)] = 20,
    learning_rate: Annotated[float, Field(gt=0)] = 0.05,
    step_seconds: Annotated[float, Field(ge=0)] = 0.05,
    tracking_uri: str = DEFAULT_TRACKING_URI,
    experiment: str = "elastic-train",
    storage: Storage = DEFAULT_STORAGE,
    scaling: ElasticScaling = DEFAULT_SCALING,
    failures: FailureBudget = DEFAULT_FAILURES,
    cluster: RayCluster = DEFAULT_CLUSTER,
) -> dict[str, Any]:
    """Train a small model, and follow it in MLflow as one curve over all restarts.

    Args:
        steps: Steps to train.
        checkpoint_every: Steps between two checkpoints, and between two updates of MLflow.
        learning_rate: Learning rate of the gradient descent.
        step_seconds: Shortest duration of a step, in seconds, so that there is time to kill a process.
        tracking_uri: MLflow's store: a directory that all nodes mount, or a tracking URI without credentials.
        experiment: MLflow experiment of the run; created if missing.
        storage: Storage of the run and its checkpoints.
        scaling: Number of workers, and their resources.
        failures: Failures that the training may survive.
        cluster: Ray cluster to train on. Default: a local cluster.

    Returns:
        The fields of `TrainingResult`, JSON-safe.
    """
    # Workers have another working directory, so a path must be absolute.
    is_uri = ":" in tracking_uri or tracking_uri in ("databricks", "databricks-uc", "uc")
    result = elastic_train(
        train_loop,
        train_loop_config={
            "steps": steps,
            "checkpoint_every": checkpoint_every,
            "learning_rate": learning_rate,
            "step_seconds": step_seconds,
            "tracking_uri": tracking_uri if is_uri else Path(tracking_uri).resolve().as_uri(),
            "experiment": experiment,
        },
        framework="none",
        scaling=scaling,
        failures=failures,
        storage=storage,
        cluster=cluster,
    )
    return result.model_dump(mode="json")


if __name__ == "__main__":
    mlflow_curve()
