"""What a block that was chosen on the command line becomes: changed, shown, or a parameter of a flow run."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from prefect_elastic_train.blocks import ElasticScaling
from prefect_elastic_train.blocks._common import TrainingBlock
from prefect_elastic_train.blocks.lookup import saved_name
from prefect_elastic_train.core.outcomes import ConfigurationError

__all__ = ["as_parameter", "with_workers", "without_secrets"]


def with_workers(scaling: TrainingBlock, workers: str) -> ElasticScaling:
    """Give a scaling with another number of workers, ``"4"`` or ``"1:8"``.

    Raises:
        ConfigurationError: It is no number or range of workers, or does not fit the rest of the scaling.
    """
    least, colon, most = workers.partition(":")
    try:
        numbers = {"min_workers": int(least), "max_workers": int(most if colon else least)}
    except ValueError:
        raise ConfigurationError(f"--workers {workers}: expected a number (4) or a range (1:8)") from None
    values = {name: getattr(scaling, name) for name in type(scaling).model_fields}
    try:
        return ElasticScaling(**{**values, **numbers})
    except ValidationError as error:
        problems = "; ".join(one["msg"].removeprefix("Value error, ") for one in error.errors())
        raise ConfigurationError(f"--workers {workers}: {problems}") from error


def as_parameter(block: TrainingBlock) -> Any:
    """Give what stands for a block in the parameters of a flow run, which the server keeps and shows.

    For a saved block that is a reference, as the UI makes it: nothing of what the block holds is kept with the flow
    run, and a retry finds its secrets. The others have none.
    """
    if saved_name(block):
        return {"$ref": {"block_document_id": str(block._block_document_id)}}
    return block


def without_secrets(block: TrainingBlock) -> dict[str, Any]:
    """Give what may be shown of a block: which one it is, and its values, secrets as asterisks."""
    values = block.model_dump(mode="json")
    fields = {name: values[name] for name in type(block).model_fields}
    return {"block": saved_name(block) or f"{block.get_block_type_slug()} (not saved)", **fields}
