"""Serve the example flows as deployments: `python -m flows.serve` needs a Prefect server and stays running.

The blocks that the deployments start with are saved on the server, so that they can be changed in the UI.
"""

import argparse
from typing import Any, TypeVar

from prefect import serve
from prefect.blocks.core import Block
from prefect.exceptions import ObjectNotFound

from flows.digits import DEFAULT_STORAGE as DIGITS_STORAGE
from flows.digits import digits
from flows.digits_jax import digits_jax
from flows.train import train
from prefect_elastic_train import CheckpointPolicy, ElasticScaling, FailureBudget, RayCluster

AnyBlock = TypeVar("AnyBlock", bound=Block)


def saved_block(name: str, default: AnyBlock) -> AnyBlock:
    """Load a block, or save one under that name if the server has none.

    Args:
        name: Name of the block document.
        default: What to save if there is no such block; it gives the type, too.

    Returns:
        The saved block. One that exists is never changed.
    """
    try:
        return type(default).load(name)
    except ValueError as error:
        if not isinstance(error.__cause__, ObjectNotFound):
            raise  # it exists but does not load, such as one with a bad value
    default.model_copy().save(name)
    return type(default).load(name)


def block_parameters(name: str) -> dict[str, Any]:
    """Load or save the blocks that all deployments start with.

    Args:
        name: Name of the block documents, the same for each type of block.

    Returns:
        Flow parameters; Prefect stores them as references, so a deployment follows changes of its blocks.
    """
    return {
        "storage": saved_block(name, DIGITS_STORAGE),
        "scaling": saved_block(name, ElasticScaling(min_workers=1, max_workers=2)),
        "failures": saved_block(name, FailureBudget()),
        "cluster": saved_block(name, RayCluster()),
    }


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line.

    Args:
        arguments: Arguments to parse; by default those of the process.

    Returns:
        `cron` (None or a cron expression) and `blocks` (name of the block documents).
    """
    parser = argparse.ArgumentParser(prog="python -m flows.serve", description="Serve the example flows.")
    parser.add_argument("--cron", help='schedule of the digits flow, such as "0 3 * * *"; by default none')
    parser.add_argument(
        "--blocks",
        default="laptop",
        metavar="NAME",
        help="name of the blocks to start with; missing ones are saved (default: %(default)s)",
    )
    return parser.parse_args(arguments)


def main() -> None:
    """Serve the deployments until the process is told to end."""
    options = parse_arguments()
    parameters = block_parameters(options.blocks)
    checkpoints = saved_block(options.blocks, CheckpointPolicy(keep=3))
    serve(
        digits.to_deployment("digits", cron=options.cron, parameters=parameters),
        digits_jax.to_deployment("digits-jax", parameters=parameters),
        train.to_deployment("train", parameters={**parameters, "checkpoints": checkpoints}),
    )


if __name__ == "__main__":
    main()
