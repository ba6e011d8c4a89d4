"""What a training gives back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    import pandas as pd
    from ray.train import Checkpoint

__all__ = ["BestCheckpoint", "TrainingResult", "WorldSize"]


class WorldSize(BaseModel):
    """The number of workers from a point in time on."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")

    #: Seconds since the epoch.
    at: float
    size: int


class BestCheckpoint(BaseModel):
    """A checkpoint that was kept, and what was reported with it."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")

    uri: str
    metrics: dict[str, Any] = Field(default_factory=dict)


class TrainingResult(BaseModel):
    """What a finished training gives back: plain JSON, so that the next task needs no Ray to read it.

    Attributes:
        run_name: Name of the run.
        run_uri: The run directory.
        checkpoint_uri: The newest checkpoint, empty if the loop reported none.
        metrics: What was reported with the newest checkpoint, or last if there is none.
        best_checkpoints: The kept checkpoints, best last if they are scored, else newest last.
        status: How the training ended: ``"completed"``.
        attempts: Driver attempts, over all resumes of the run.
        worker_failures: Worker-group failures that were recovered in the cluster.
        preemptions: Preemptions that were recovered in the cluster.
        resizes: Healthy worker groups that were restarted with another size.
        world_sizes: Size of each worker group and when it started.
        steps_lost: Reports that were done again because a fault came before their checkpoint.
        goodput: Share of the wall time, 0 to 1, in which workers trained and their work was kept.
        storage_block: Name of the saved storage block, empty if it was given inline.
        history: What was reported, thinned to at most some thousand rows, with ``_attempt``, ``_at`` (seconds
            since the epoch) and ``_world_size`` beside the metrics.
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")

    run_name: str
    run_uri: str
    checkpoint_uri: str = ""
    metrics: dict[str, Any] = Field(default_factory=dict)
    best_checkpoints: list[BestCheckpoint] = Field(default_factory=list)
    status: str = "completed"
    attempts: int = 1
    worker_failures: int = 0
    preemptions: int = 0
    resizes: int = 0
    world_sizes: list[WorldSize] = Field(default_factory=list)
    steps_lost: int = 0
    goodput: float = 0.0
    storage_block: str = ""
    history: list[dict[str, Any]] = Field(default_factory=list)

    def checkpoint(self) -> Checkpoint:
        """Give the newest checkpoint as Ray's type.

        Raises:
            FileNotFoundError: The loop reported no checkpoint.
        """
        if not self.checkpoint_uri:
            raise FileNotFoundError(f"run {self.run_name!r} has no checkpoint: its loop reported none")
        from ray.train import Checkpoint

        return Checkpoint(self.checkpoint_uri)

    def metrics_dataframe(self) -> pd.DataFrame:
        """Give the history of what was reported, over all attempts, one row a report."""
        import pandas as pd

        return pd.DataFrame(self.history)
