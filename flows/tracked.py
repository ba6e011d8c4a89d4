"""A training that trackers show as one run, with each step once, also after failures."""

from pathlib import Path
from typing import Annotated, Any

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
from prefect_elastic_train import ElasticScaling, FailureBudget, RayCluster, elastic_train, loop


def train_loop(config: dict[str, Any]) -> None:
    """Fit a linear model whose best weights are all 1 (a Ray Train loop).

    The model is so small that each rank computes all of it. The example is about tracking.

    Args:
        config: `steps`, `learning_rate` and `trackers` (arguments of `loop.track`).
    """
    import numpy as np

    tracker = loop.track(**config["trackers"], parameters={"learning_rate": config["learning_rate"]})
    state = loop.ArrayState(weights=np.zeros(4))
    with loop.session(state, steps=config["steps"], global_batch=32, tracker=tracker) as session:
        for inputs in session.batches(np.random.default_rng(0).standard_normal((1024, 4))):
            errors = inputs @ state.weights - inputs.sum(axis=1)
            state.weights = state.weights - config["learning_rate"] * inputs.T @ errors / len(errors)
            session.step({"loss": float((errors**2).mean())})


@flow(name="tracked")
def tracked(
    steps: Annotated[int, Field(ge=1)] = 200,
    learning_rate: Annotated[float, Field(gt=0)] = 0.05,
    directory: str = str(DEMO_DIRECTORY / "trackers"),
    storage: Storage = DEFAULT_STORAGE,
    scaling: ElasticScaling = DEFAULT_SCALING,
    failures: FailureBudget = DEFAULT_FAILURES,
    cluster: RayCluster = DEFAULT_CLUSTER,
) -> dict[str, Any]:
    """Train a small model, and follow it in MLflow, W&B (offline) and TensorBoard.

    Args:
        steps: Steps to train.
        learning_rate: Learning rate of the gradient descent.
        directory: Directory of the trackers' files, which all nodes mount.
        storage: Storage of the run and its checkpoints.
        scaling: Number of workers, and their resources.
        failures: Failures that the training may survive.
        cluster: Ray cluster to train on. Default: a local cluster.

    Returns:
        The fields of `TrainingResult`, JSON-safe.
    """
    folder = Path(directory).resolve()
    trackers = {
        "mlflow": {"tracking_uri": str(folder / "mlflow")},
        "wandb": {"dir": str(folder), "mode": "offline"},
        "tensorboard": {"log_dir": str(folder / "tensorboard")},
    }
    result = elastic_train(
        train_loop,
        train_loop_config={"steps": steps, "learning_rate": learning_rate, "trackers": trackers},
        framework="none",
        scaling=scaling,
        failures=failures,
        storage=storage,
        cluster=cluster,
    )
    return result.model_dump(mode="json")


if __name__ == "__main__":
    tracked()
