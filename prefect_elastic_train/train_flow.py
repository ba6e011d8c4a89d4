"""A deployable flow that trains with any Ray Train loop, for users who do not want to write a flow of their own.

``elastic-train run`` runs it from a shell. As a deployment::

    from prefect.types.entrypoint import EntrypointType
    from prefect_elastic_train.train_flow import train

    train.serve("train", entrypoint_type=EntrypointType.MODULE_PATH)
"""

from typing import Annotated, Any, Literal

from prefect import flow
from pydantic import Field, NonNegativeFloat

from prefect_elastic_train.blocks import CheckpointPolicy, ElasticScaling, FailureBudget, RayCluster
from prefect_elastic_train.blocks._common import TrainingBlock
from prefect_elastic_train.blocks.lookup import StorageBlock, load_saved, saved_name, values_of
from prefect_elastic_train.orchestration.task import elastic_train
from prefect_elastic_train.orchestration.train_loops import LOOP_PATTERN, load_named_loop

DEFAULT_CONFIG: dict[str, Any] = {}
DEFAULT_SCALING = ElasticScaling()
DEFAULT_FAILURES = FailureBudget()
DEFAULT_CHECKPOINTS = CheckpointPolicy()
DEFAULT_CLUSTER = RayCluster()


# The result is persisted, so that other processes can read it from the flow run of a deployment.
@flow(name="train", persist_result=True, result_serializer="json")
def train(
    train_loop: Annotated[str, Field(pattern=LOOP_PATTERN)],
    storage: StorageBlock,
    train_loop_config: dict[str, Any] = DEFAULT_CONFIG,
    framework: Literal["torch", "jax", "xgboost", "lightgbm", "none"] = "torch",
    scaling: ElasticScaling = DEFAULT_SCALING,
    failures: FailureBudget = DEFAULT_FAILURES,
    checkpoints: CheckpointPolicy = DEFAULT_CHECKPOINTS,
    cluster: RayCluster = DEFAULT_CLUSTER,
    run_name: str = "",
    resume: bool = False,
    resume_from: str = "",
    timeout_seconds: NonNegativeFloat = 0.0,
) -> dict[str, Any]:
    """Run a Ray Train loop elastically. After a failure, training resumes from the last checkpoint.

    Each driver of the training loads saved blocks again, so corrections take effect. Save a block with a secret, a
    token or a key: of a secret that is typed into the form, Prefect keeps only asterisks.

    Args:
        train_loop: The loop, as "package.module:function", which the workers must be able to import, or as
            "path/to/file.py:function" on the machine that runs the flow.
        storage: Storage of the run and its checkpoints; with several nodes, one that all can reach.
        train_loop_config: Passed to the loop. Shown in the UI: no secrets.
        framework: The framework to set up the workers for; "none" for a plain Python loop.
        scaling: The workers and their resources. If left unchanged here, as with the next three, the default block of
            the settings is used, if there is one.
        failures: The failures that the training tolerates.
        checkpoints: The checkpoints to keep.
        cluster: The Ray cluster; by default a local one.
        run_name: Name of the run; by default it is derived from the flow run.
        resume: Take over the run of this name from another flow run.
        resume_from: Start from the latest checkpoint of another run: its name; with "@best" appended from the best
            one, with "@" and a folder from that one. "latest" for the best checkpoint of the newest run that this
            deployment (without one: this flow) has completed with this loop, if there is one.
        timeout_seconds: Stop the training after this time, all driver restarts included. 0: no limit.

    Returns:
        The fields of `TrainingResult`, JSON-safe.
    """
    result = elastic_train(
        load_named_loop(train_loop),
        train_loop_config=train_loop_config,
        framework=framework,
        scaling=_argument(scaling),
        failures=_argument(failures),
        checkpoints=_argument(checkpoints),
        storage=_argument(storage),
        cluster=_argument(cluster),
        run_name=run_name or None,
        resume=resume,
        resume_from=resume_from,
        timeout_seconds=timeout_seconds or None,
    )
    return result.model_dump(mode="json")


def _argument(block: TrainingBlock) -> Any:
    """Return the argument to pass to ``elastic_train`` for a block parameter of the flow ``train``.

    It is None for a block with default values only, and the name of a saved block, which each attempt loads again. A
    saved block with changed values is passed as it is, because the user has changed it for this flow run.
    """
    name = saved_name(block)
    if name:
        return name if dict(block) == dict(load_saved([type(block)], name)) else block
    return block if values_of(block, exclude_defaults=True) else None
