"""A deployable flow that trains with any Ray Train loop, so that nobody has to write one for that.

``elastic-train run`` runs it from a shell. As a deployment::

    from prefect.types.entrypoint import EntrypointType
    from prefect_elastic_train.train_flow import train

    train.serve("train", entrypoint_type=EntrypointType.MODULE_PATH)
"""

from typing import Annotated, Any, Literal

from prefect import flow
from pydantic import Field

from prefect_elastic_train import blocks
from prefect_elastic_train.blocks._common import TrainingBlock
from prefect_elastic_train.blocks.lookup import load_saved, saved_name
from prefect_elastic_train.orchestration.arguments import LOOP_PATTERN, named_loop
from prefect_elastic_train.orchestration.task import elastic_train

DEFAULT_CONFIG: dict[str, Any] = {}
DEFAULT_SCALING = blocks.ElasticScaling()
DEFAULT_FAILURES = blocks.FailureBudget()
DEFAULT_CHECKPOINTS = blocks.CheckpointPolicy()
DEFAULT_CLUSTER = blocks.RayCluster()


# Whoever runs it as a deployment can ask the flow run for its result.
@flow(name="train", persist_result=True, result_serializer="json")
def train(
    train_loop: Annotated[str, Field(pattern=LOOP_PATTERN)],
    storage: blocks.LocalStorage | blocks.S3Storage | blocks.FsspecStorage,
    train_loop_config: dict[str, Any] = DEFAULT_CONFIG,
    framework: Literal["torch", "jax", "none"] = "torch",
    scaling: blocks.ElasticScaling = DEFAULT_SCALING,
    failures: blocks.FailureBudget = DEFAULT_FAILURES,
    checkpoints: blocks.CheckpointPolicy = DEFAULT_CHECKPOINTS,
    cluster: blocks.RayCluster = DEFAULT_CLUSTER,
    run_name: str = "",
    resume: bool = False,
    resume_from: str = "",
    timeout_seconds: Annotated[float, Field(ge=0)] = 0.0,
) -> dict[str, Any]:
    """Run a Ray Train loop elastically; it goes on from its last checkpoint after any failure.

    A saved block is loaded anew by each driver of the training, so that what is mended in it counts. Save what has a
    secret, a token or a key, as a block: of a secret typed into the form, Prefect keeps asterisks only.

    Args:
        train_loop: The loop, as "package.module:function", which the workers must be able to import, or as
            "path/to/file.py:function" on the machine that runs the flow.
        storage: Where the run and its checkpoints are kept; with several nodes, one that all reach.
        train_loop_config: What the loop is called with. Shown in the UI: no secrets.
        framework: What the workers are set up for; "none" is a plain Python loop.
        scaling: How many workers train, and on what. What is left as it is here, as with the next three, is the
            default block of the settings, if they name one.
        failures: How many failures the training may survive.
        checkpoints: Which checkpoints are kept.
        cluster: Where the training runs; by default a local cluster.
        run_name: Name of the run; by default it is derived from the flow run.
        resume: Whether to go on with a run of this name that another flow run has begun.
        resume_from: Another run, from whose latest checkpoint this one starts: its name; with "@best" behind it from
            the best one, with "@" and a folder from that one. "latest" for the best checkpoint of the newest run that
            this deployment (without one: this flow) has completed with this loop, if there is one.
        timeout_seconds: Ends the training after so many seconds, all driver restarts included. 0: no bound.

    Returns:
        The fields of `TrainingResult`, JSON-safe.
    """
    result = elastic_train(
        named_loop(train_loop),
        train_loop_config=train_loop_config,
        framework=framework,
        scaling=_given(scaling, DEFAULT_SCALING),
        failures=_given(failures, DEFAULT_FAILURES),
        checkpoints=_given(checkpoints, DEFAULT_CHECKPOINTS),
        storage=_given(storage),
        cluster=_given(cluster, DEFAULT_CLUSTER),
        run_name=run_name or None,
        resume=resume,
        resume_from=resume_from or None,
        timeout_seconds=timeout_seconds or None,
    )
    return result.model_dump(mode="json")


def _given(block: TrainingBlock, default: TrainingBlock | None = None) -> Any:
    """Return a saved block by its name, which each attempt loads anew, so that a mended token is used; else the block.

    The flow's own default is nothing. A block whose values are no longer those that are saved is given as it is:
    whoever changed it means the change.
    """
    name = saved_name(block)
    if not name:
        return None if default is not None and dict(block) == dict(default) else block
    return name if dict(block) == dict(load_saved([type(block)], name)) else block
