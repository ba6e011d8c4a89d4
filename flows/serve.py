"""Serve the example flows as deployments: `python -m flows.serve` needs a Prefect server and stays running.

It needs no work pool; `prefect.yaml` deploys the same flows to one. The deployments start with the blocks of a profile
in `blocks.profiles`. The blocks are saved on the server, so that they can be changed in the UI.
"""

import os
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from prefect import serve
from prefect.types.entrypoint import EntrypointType

from blocks.profiles import PROFILES, profile_blocks
from flows.chained import pipeline, pipeline_in_one, prepare
from flows.digits import digits
from flows.digits_jax import digits_jax
from flows.evaluate import evaluate
from flows.tracked import tracked
from prefect_elastic_train import ConfigurationError
from prefect_elastic_train.blocks.lookup import BLOCK_TYPES, STORAGE_TYPES, find_saved, load_saved
from prefect_elastic_train.cli.common import exit_on_error
from prefect_elastic_train.train_flow import train

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def block_parameters(name: str, storage: str, environment: Mapping[str, str]) -> dict[str, Any]:
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
    parameters: dict[str, Any] = {}
    for key, types in BLOCK_TYPES.items():
        if (block := find_saved(types, name)) is not None:
            parameters[key] = block
    if storage:
        parameters["storage"] = load_saved(STORAGE_TYPES, storage)
    if set(parameters) == set(BLOCK_TYPES):
        return parameters
    profile = name if name in PROFILES else "laptop"
    for block in profile_blocks(profile, environment):
        [key] = [key for key, types in BLOCK_TYPES.items() if type(block) in types]
        if key not in parameters:
            block.save(name)
            parameters[key] = load_saved([type(block)], name)
    if "storage" not in parameters:
        raise ConfigurationError(f"the profile {profile} has no storage: give a saved one with --storage")
    return parameters


@app.command()
def main(
    cron: Annotated[
        str | None, typer.Option(help='Schedule of the digits flow, such as "0 3 * * *"; by default none.')
    ] = None,
    blocks: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Name of the blocks to start with. Missing ones are saved with the values of the profile of that "
            "name, or of the profile laptop.",
        ),
    ] = "laptop",
    storage: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="A saved storage block to keep runs in, such as training-storage-s3/s3; by default that of --blocks.",
        ),
    ] = "",
) -> None:
    """Serve the example flows until the process is terminated."""
    with exit_on_error():
        parameters = block_parameters(blocks, storage, os.environ)
    without_policy = {key: block for key, block in parameters.items() if key != "checkpoints"}
    tags = ["elastic-train", blocks]
    serve(
        digits.to_deployment("digits", cron=cron, parameters=without_policy, tags=tags),
        digits_jax.to_deployment("digits-jax", parameters=without_policy, tags=tags),
        evaluate.to_deployment("digits", tags=tags),
        tracked.to_deployment("tracked", parameters=without_policy, tags=tags),
        prepare.to_deployment("digits", tags=tags),
        pipeline.to_deployment("digits", tags=tags),
        pipeline_in_one.to_deployment("digits", parameters=without_policy, tags=tags),
        train.to_deployment("train", parameters=parameters, tags=tags, entrypoint_type=EntrypointType.MODULE_PATH),
    )


if __name__ == "__main__":
    app(prog_name="python -m flows.serve")
