"""A flow that evaluates a checkpoint of the digits pipeline, with a deployment of its own.

An automation starts it at each new best checkpoint (`elastic-train automations create digits/digits --evaluate-with
evaluate/digits`), or when a training has completed (`--evaluate-at completed`). `flows.chained.pipeline` starts it,
too. It does not need Ray, so it can run on another machine than the training.
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
    """Evaluate a checkpoint on the held-out images, and publish its confusion matrix as an artifact.

    Args:
        checkpoint_uri: Directory of the checkpoint, a path or a URI.
        storage: Saved storage block of the checkpoint, as `<block type>/<name>`. Empty: the URI with the ambient
            credentials.
        data_dir: Directory for the prepared data.

    Returns:
        The fields of `Evaluation`, JSON-safe. The state Cancelled if the checkpoint was deleted in the meantime.
    """
    data = prepare_digits(data_dir)
    try:
        return evaluate_digits(checkpoint_uri, data.test_path, storage or None).model_dump(mode="json")
    except CheckpointGoneError as error:
        # The training keeps only its best checkpoints, and has deleted this one.
        return Cancelled(message=f"Nothing to evaluate any more: {error}")
