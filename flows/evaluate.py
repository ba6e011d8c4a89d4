"""Evaluate a checkpoint of the digits pipeline, as a deployment of its own.

An automation starts it at each new best checkpoint (`elastic-train automations create digits/digits --evaluate-with
evaluate/digits`) or, with `--evaluate-at completed`, when a training has; `flows.chained.pipeline` and people start it,
too. It needs no Ray, and runs where the training does not.
"""

from typing import Any

from prefect import State, flow
from prefect.states import Cancelled

from flows.digits import DEFAULT_DATA_DIRECTORY, evaluate_digits, prepare_digits
from prefect_elastic_train import CheckpointGoneError


@flow(name="evaluate", persist_result=True, result_serializer="json")
def evaluate(
    checkpoint_uri: str, storage: str = "", data_dir: str = DEFAULT_DATA_DIRECTORY
) -> dict[str, Any] | State[Any]:
    """Let a checkpoint read the held-out images, and publish what it took for what as an artifact.

    Args:
        checkpoint_uri: The checkpoint, a path or a URI.
        storage: Saved storage block that it is in, as `<block type>/<name>`; empty for the URI with the ambient
            credentials.
        data_dir: Directory for the prepared data.

    Returns:
        The fields of `Evaluation`, JSON-safe; the state Cancelled if the checkpoint was deleted meanwhile.
    """
    data = prepare_digits(data_dir)
    try:
        return evaluate_digits(checkpoint_uri, data.test_path, storage or None).model_dump(mode="json")
    except CheckpointGoneError as error:
        # The training keeps only its best checkpoints, and was faster.
        return Cancelled(message=f"Nothing to evaluate any more: {error}")
