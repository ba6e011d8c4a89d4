"""Preparation, training and evaluation of the digits as separate flows, chained in three ways.

- `pipeline` runs their deployments one after the other. Each runs in its own work pool, and only training needs Ray.
- `pipeline_in_one` calls them as subflows in one process.
- An automation can start `evaluate` when a training has completed: `elastic-train automations create train/train
  --evaluate-with evaluate/digits --evaluate-at completed`.

`flows.digits` is a fourth way, with tasks of one flow. Each pipeline run trains on from the best checkpoint of the run
before (`resume_from="latest"`).
"""

from typing import Annotated, Any

from prefect import flow
from prefect.deployments import run_deployment
from prefect.runtime import flow_run
from pydantic import Field

from flows.digits import (
    DEFAULT_CLUSTER,
    DEFAULT_DATA_DIRECTORY,
    DEFAULT_FAILURES,
    DEFAULT_SCALING,
    DEFAULT_STORAGE,
    Storage,
    prepare_digits,
)
from flows.evaluate import evaluate
from prefect_elastic_train import CheckpointPolicy, ElasticScaling, FailureBudget, RayCluster, TrainingResult
from prefect_elastic_train.train_flow import train

TRAIN_LOOP = "flows.digits:train_loop"
CHECKPOINTS = CheckpointPolicy(keep=3, score_attribute="train_accuracy")

Epochs = Annotated[int, Field(ge=1, le=1000)]


@flow(name="prepare", persist_result=True, result_serializer="json")
def prepare(data_dir: str = DEFAULT_DATA_DIRECTORY) -> dict[str, Any]:
    """Prepare the digits.

    Args:
        data_dir: Directory for the prepared data. On a cluster, all nodes must mount it.

    Returns:
        The fields of `flows.digits.DigitsData`, JSON-safe.
    """
    return prepare_digits(data_dir).model_dump(mode="json")


def train_loop_config(data: dict[str, Any], epochs: int) -> dict[str, Any]:
    """Return the config of the digits' train loop.

    Args:
        data: Result of `prepare`.
        epochs: Passes over the training images, without those of the run whose checkpoint it starts from.
    """
    return {"train_path": data["train_path"], "epochs": epochs, "seed": 0, "batch_size": 64, "learning_rate": 1e-3}


def run_to_end(deployment: str, parameters: dict[str, Any], timeout_seconds: float) -> Any:
    """Run a deployment, wait for its end, and return its result.

    The flow of the deployment must persist its result (`persist_result=True`) where this process can read it: in
    Prefect's home directory on the same machine, or in the block `PREFECT_RESULTS_DEFAULT_STORAGE_BLOCK`. A retry of
    the calling flow run waits for the run that was started before, and starts no second one.

    Args:
        deployment: Name of the deployment, `flow/deployment`.
        parameters: Parameters of its flow.
        timeout_seconds: Longest time to wait, in seconds.

    Returns:
        Result of its flow.

    Raises:
        TimeoutError: The flow run has not ended in time. It continues.
        Exception: The exception of its flow, or Prefect's for a run that was cancelled or has crashed.
    """
    started = run_deployment(
        deployment,
        parameters=parameters,
        timeout=timeout_seconds,
        poll_interval=2,
        idempotency_key=f"{flow_run.get_id()} {deployment}",
    )
    if started.state is None or not started.state.is_final():
        state = started.state.name if started.state else "without a state"
        raise TimeoutError(
            f"flow run {started.name!r} of {deployment} is {state} after {timeout_seconds:g} s and continues. Retry "
            "this flow run to wait for it again, or cancel it"
        )
    return started.state.result()


@flow(name="pipeline", persist_result=True, result_serializer="json")
def pipeline(
    epochs: Epochs = 5,
    resume_from: str = "latest",
    data_dir: str = DEFAULT_DATA_DIRECTORY,
    prepare_with: str = "prepare/digits",
    train_with: str = "train/train",
    evaluate_with: str = "evaluate/digits",
    timeout_seconds: Annotated[float, Field(gt=0)] = 86400.0,
) -> dict[str, Any]:
    """Prepare, train and evaluate with deployments.

    Storage, scaling and cluster are those of the training's deployment.

    Args:
        epochs: Passes over the training images in this run.
        resume_from: Run or checkpoint that the training starts from. Empty: from scratch.
        data_dir: Directory for the prepared data, which all three deployments can read.
        prepare_with: Deployment of `prepare`.
        train_with: Deployment of `prefect_elastic_train.train_flow.train`.
        evaluate_with: Deployment of `flows.evaluate.evaluate`.
        timeout_seconds: Longest time to wait for each of them, in seconds.

    Returns:
        `trained`, the fields of `TrainingResult`, and `evaluation`, those of `Evaluation`.
    """
    data = run_to_end(prepare_with, {"data_dir": data_dir}, timeout_seconds)
    training = {
        "train_loop": TRAIN_LOOP,
        "train_loop_config": train_loop_config(data, epochs),
        "resume_from": resume_from,
    }
    trained = TrainingResult.model_validate(run_to_end(train_with, training, timeout_seconds))
    parameters = {
        "checkpoint_uri": trained.best_checkpoint_uri,
        "storage": trained.storage_block,
        "data_dir": data_dir,
    }
    evaluation = run_to_end(evaluate_with, parameters, timeout_seconds)
    return {"trained": trained.model_dump(mode="json"), "evaluation": evaluation}


@flow(name="pipeline-in-one", persist_result=True, result_serializer="json")
def pipeline_in_one(
    epochs: Epochs = 5,
    resume_from: str = "latest",
    data_dir: str = DEFAULT_DATA_DIRECTORY,
    storage: Storage = DEFAULT_STORAGE,
    scaling: ElasticScaling = DEFAULT_SCALING,
    failures: FailureBudget = DEFAULT_FAILURES,
    checkpoints: CheckpointPolicy = CHECKPOINTS,
    cluster: RayCluster = DEFAULT_CLUSTER,
) -> dict[str, Any]:
    """Prepare, train and evaluate in subflows.

    Args:
        epochs: Passes over the training images in this run.
        resume_from: Run or checkpoint that the training starts from. Empty: from scratch.
        data_dir: Directory for the prepared data. On a cluster, all nodes must mount it.
        storage: Storage of the run and its checkpoints.
        scaling: Number of workers, and their resources.
        failures: Failures that the training may survive.
        checkpoints: Checkpoints that are kept, and the metric that ranks them.
        cluster: Ray cluster to train on. Default: a local cluster.

    Returns:
        `trained`, the fields of `TrainingResult`, and `evaluation`, those of `Evaluation`.
    """
    data = prepare(data_dir)
    trained = TrainingResult.model_validate(
        train(
            TRAIN_LOOP,
            storage,
            train_loop_config=train_loop_config(data, epochs),
            scaling=scaling,
            failures=failures,
            checkpoints=checkpoints,
            cluster=cluster,
            resume_from=resume_from,
        )
    )
    evaluation = evaluate(trained.best_checkpoint_uri, trained.storage_block, data_dir)
    return {"trained": trained.model_dump(mode="json"), "evaluation": evaluation}
