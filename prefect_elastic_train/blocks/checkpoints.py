"""Which checkpoints of a training are kept."""

from __future__ import annotations

from prefect_elastic_train.blocks._common import TrainingBlock
from prefect_elastic_train.core.settings import CheckpointSettings


class CheckpointPolicy(TrainingBlock, CheckpointSettings):
    """Which checkpoints of a training are kept.

    Attributes:
        keep: Number of checkpoints to keep, 1 or more; None keeps all. Default None. The newest one is always
            kept besides, since a restart resumes from it.
        score_attribute: Reported metric that ranks checkpoints. Default: the newest are the best.
        score_order: ``"max"`` or ``"min"``. Default ``"max"``.

    Example:
        Keep the three checkpoints with the lowest validation loss::

            from prefect_elastic_train import CheckpointPolicy

            checkpoints = CheckpointPolicy(keep=3, score_attribute="val_loss", score_order="min")
            checkpoints.save("BLOCK_NAME")
            checkpoints = CheckpointPolicy.load("BLOCK_NAME")
    """

    _block_type_name = "Checkpoint Policy"
    _block_type_slug = "checkpoint-policy"
    _description = "Which checkpoints of a training are kept."
