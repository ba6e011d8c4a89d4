"""A deployable flow that runs any Ray Train loop elastically, named by its import path."""

from typing import Annotated, Any, Literal

from prefect import flow
from pydantic import Field

from prefect_elastic_train import (
    CheckpointPolicy,
    ElasticScaling,
    FailureBudget,
    FsspecStorage,
    LocalStorage,
    RayCluster,
    S3Storage,
    elastic_train,
)

DEFAULT_CONFIG: dict[str, Any] = {}
DEFAULT_SCALING = ElasticScaling()
DEFAULT_FAILURES = FailureBudget()
DEFAULT_CHECKPOINTS = CheckpointPolicy()
DEFAULT_CLUSTER = RayCluster()


@flow(name="train")
def train(
    train_loop: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")],
    storage: LocalStorage | S3Storage | FsspecStorage,
    train_loop_config: dict[str, Any] = DEFAULT_CONFIG,
    framework: Literal["torch", "jax", "none"] = "torch",
    scaling: ElasticScaling = DEFAULT_SCALING,
    failures: FailureBudget = DEFAULT_FAILURES,
    checkpoints: CheckpointPolicy = DEFAULT_CHECKPOINTS,
    cluster: RayCluster = DEFAULT_CLUSTER,
    run_name: str = "",
    resume: bool = False,
    resume_from: str = "",
) -> dict[str, Any]:
    """Run a Ray Train loop elastically; it goes on from its last checkpoint after any failure.

    Save a cluster that has a token as a block: of a token typed into the form, Prefect keeps asterisks only.

    Args:
        train_loop: The loop, as "package.module:function". The workers must be able to import it.
        storage: Where the run and its checkpoints are kept; with several nodes, one that all reach.
        train_loop_config: What the loop is called with.
        framework: What the workers are set up for; "none" is a plain Python loop.
        scaling: How many workers train, and on what.
        failures: How many failures the training may survive.
        checkpoints: Which checkpoints are kept.
        cluster: Where the training runs; by default a local cluster.
        run_name: Name of the run; by default it is derived from the flow run.
        resume: Whether to go on with a run of this name that another flow run has begun.
        resume_from: Name of another run, from whose latest checkpoint this one starts.

    Returns:
        The fields of `TrainingResult`, JSON-safe.
    """
    result = elastic_train(
        train_loop,
        train_loop_config=train_loop_config,
        framework=framework,
        scaling=scaling,
        failures=failures,
        checkpoints=checkpoints,
        storage=storage,
        cluster=cluster,
        run_name=run_name or None,
        resume=resume,
        resume_from=resume_from or None,
    )
    return result.model_dump(mode="json")
