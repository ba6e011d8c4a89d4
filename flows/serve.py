"""Serve the example flows as deployments: `python -m flows.serve` needs a Prefect server and stays running.

It needs no work pool; `prefect.yaml` deploys the same flows to one. The deployments start with the blocks of a profile
in `blocks.profiles`. The blocks are saved on the server, so that they can be changed in the UI.
"""

import argparse
import os
import sys
from collections.abc import Mapping

from prefect import serve
from prefect.types.entrypoint import EntrypointType

from blocks.profiles import PROFILES, AnyBlock
from flows.chained import pipeline, pipeline_in_one, prepare
from flows.digits import digits
from flows.digits_jax import digits_jax
from flows.evaluate import evaluate
from flows.mlflow_curve import mlflow_curve
from prefect_elastic_train import (
    CheckpointPolicy,
    ConfigurationError,
    ElasticScaling,
    FailureBudget,
    FsspecStorage,
    LocalStorage,
    RayCluster,
    S3Storage,
)
from prefect_elastic_train.blocks.lookup import STORAGE_TYPES, find_saved, load_saved
from prefect_elastic_train.train_flow import train

#: Flow parameter of each block type.
PARAMETERS: dict[type[AnyBlock], str] = {
    ElasticScaling: "scaling",
    FailureBudget: "failures",
    CheckpointPolicy: "checkpoints",
    RayCluster: "cluster",
    LocalStorage: "storage",
    S3Storage: "storage",
    FsspecStorage: "storage",
}


def block_parameters(name: str, storage: str, environment: Mapping[str, str]) -> dict[str, AnyBlock]:
    """Load the blocks that the deployments start with, and save those that the server does not have.

    Args:
        name: Name of the block documents, the same for each block type. Missing ones are saved with the values of the
            profile of this name, or of `laptop` if there is no such profile. Existing ones are not changed.
        storage: Name of another saved storage block to use. Empty: the one of that name.
        environment: Environment variables for the profile, needed only if a block is missing.

    Returns:
        Flow parameters. Prefect stores them as references, so that changes of a block apply to the deployment.

    Raises:
        ConfigurationError: A variable of the profile is not set, there is no storage, or a block has an invalid value.
    """
    parameters = {key: block for kind, key in PARAMETERS.items() if (block := find_saved([kind], name)) is not None}
    if storage:
        parameters["storage"] = load_saved(STORAGE_TYPES, storage)
    if set(parameters) == set(PARAMETERS.values()):
        return parameters
    profile = PROFILES.get(name, PROFILES["laptop"])
    missing = {PARAMETERS[type(block)]: block for block in profile.blocks(environment)}
    if "storage" not in {*parameters, *missing}:
        raise ConfigurationError(f"the profile {profile.name} has no storage: give a saved one with --storage")
    for key in set(missing) - set(parameters):
        missing[key].save(name)
        parameters[key] = load_saved([type(missing[key])], name)
    return parameters


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line.

    Args:
        arguments: Arguments to parse; by default those of the process.

    Returns:
        `cron` (None or a cron expression), `blocks` and `storage` (names of block documents).
    """
    parser = argparse.ArgumentParser(prog="python -m flows.serve", description="Serve the example flows.")
    parser.add_argument("--cron", help='schedule of the digits flow, such as "0 3 * * *"; by default none')
    parser.add_argument(
        "--blocks",
        default="laptop",
        metavar="NAME",
        help="name of the blocks to start with; missing ones are saved with the values of the profile of that name, or "
        "of the profile laptop (default: %(default)s)",
    )
    parser.add_argument(
        "--storage",
        default="",
        metavar="NAME",
        help="a saved storage block to keep runs in, such as training-storage-s3/s3; by default that of --blocks",
    )
    return parser.parse_args(arguments)


def main() -> None:
    """Serve the deployments until the process is terminated."""
    options = parse_arguments()
    try:
        parameters = block_parameters(options.blocks, options.storage, os.environ)
    except ConfigurationError as error:
        sys.exit(f"error: {error}")
    without_policy = {key: block for key, block in parameters.items() if key != "checkpoints"}
    tags = ["elastic-train", options.blocks]
    serve(
        digits.to_deployment("digits", cron=options.cron, parameters=without_policy, tags=tags),
        digits_jax.to_deployment("digits-jax", parameters=without_policy, tags=tags),
        evaluate.to_deployment("digits", tags=tags),
        mlflow_curve.to_deployment("mlflow-curve", parameters=without_policy, tags=tags),
        prepare.to_deployment("digits", tags=tags),
        pipeline.to_deployment("digits", tags=tags),
        pipeline_in_one.to_deployment("digits", parameters=without_policy, tags=tags),
        train.to_deployment("train", parameters=parameters, tags=tags, entrypoint_type=EntrypointType.MODULE_PATH),
    )


if __name__ == "__main__":
    main()
