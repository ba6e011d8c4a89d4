"""What a training gives back."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import Any

from pydantic import BaseModel, Field

from prefect_elastic_train.core.bounds import bounded_metrics, size_of, thinned

#: Parts of a result, which the last event carries: together with its metrics and its message they fit into one.
_MAX_HISTORY_BYTES, _MAX_CHECKPOINTS_BYTES, _MAX_WORLD_SIZES_BYTES = 256 * 1024, 96 * 1024, 16 * 1024


class WorldSize(BaseModel, frozen=True, ser_json_inf_nan="constants"):
    """The number of workers from a point in time on."""

    at: float
    size: int


class TimeAccount(BaseModel, frozen=True):
    """What a run's wall time went into, in seconds; ``docs/goodput.md`` has the definitions.

    The parts add up to ``wall_seconds``.

    Attributes:
        wall_seconds: From the start of the first driver to the end of the run, less ``stopped_seconds``.
        productive_seconds: Training whose results were kept.
        startup_seconds: Setting up at first and after a stop, and winding up.
        waiting_for_capacity_seconds: The cluster could not hold ``min_workers``.
        restart_seconds: Setting up again after a failure or a preemption.
        resize_seconds: Setting up again for another number of workers.
        checkpoint_stall_seconds: The loop stood still while a checkpoint was written.
        lost_seconds: Training that was done again, or that no checkpoint has kept.
        stopped_seconds: Not part of the wall time: the run had ended, and nobody tried to train.
    """

    wall_seconds: float = 0.0
    productive_seconds: float = 0.0
    startup_seconds: float = 0.0
    waiting_for_capacity_seconds: float = 0.0
    restart_seconds: float = 0.0
    resize_seconds: float = 0.0
    checkpoint_stall_seconds: float = 0.0
    lost_seconds: float = 0.0
    stopped_seconds: float = 0.0

    @property
    def goodput(self) -> float:
        """Share of the wall time that was productive, 0 to 1."""
        return round(min(1.0, self.productive_seconds / self.wall_seconds), 4) if self.wall_seconds > 0 else 0.0


class Counts(BaseModel):
    """What is counted of a run. See :class:`RunResult` for the fields."""

    attempts: int = 0
    worker_failures: int = 0
    preemptions: int = 0
    resizes: int = 0
    reports_lost: int = 0
    steps_redone: int = 0
    storage_wait_seconds: float = 0.0


class BestCheckpoint(BaseModel, frozen=True, ser_json_inf_nan="constants"):
    """A checkpoint that was kept, and what was reported with it."""

    uri: str
    metrics: dict[str, Any] = Field(default_factory=dict)


class RunResult(Counts, frozen=True, ser_json_inf_nan="constants"):
    """What a finished training gives back: plain JSON, so that the next task needs no Ray to read it.

    Attributes:
        run_name: Name of the run.
        run_uri: The run directory.
        checkpoint_uri: The newest checkpoint, empty if the loop reported none.
        metrics: What was reported with the newest checkpoint, or last if there is none.
        best_checkpoint_uri: The best of the kept checkpoints by the score of the checkpoint policy, the newest if that
            names none; empty if no kept checkpoint has that score.
        best_checkpoints: The kept checkpoints, best last: those without a score first, of equal ones the newest last.
        status: How the training ended: ``"completed"``.
        attempts: Driver attempts, over all resumes of the run.
        worker_failures: Worker-group failures that were recovered in the cluster.
        preemptions: Preemptions that were recovered in the cluster.
        resizes: Healthy worker groups that were restarted with another size.
        world_sizes: Size of each worker group and when it started.
        reports_lost: Reports that were done again, because a fault came before their checkpoint or the loop ignored it.
        steps_redone: Optimizer steps that were done again, as far as the controller knew of them; 0 without a session.
        goodput: Share of the wall time, 0 to 1, in which workers trained and their work was kept.
        time: What the wall time went into, in seconds.
        storage_wait_seconds: Time in which the controller or a rank waited for a storage that did not answer.
        storage_block: The saved storage block as ``"<block type>/<name>"``, empty if it was given inline.
        started_from: The checkpoint of another run that the run started from (``resume_from``), empty for none. It
            may be gone by now.
        history: What was reported, evenly thinned to at most 2,000 rows and 256 KiB, with ``_attempt``, ``_at``
            (seconds since the epoch) and ``_world_size`` beside the metrics.
        left_out: How many entries of ``history``, ``best_checkpoints`` and ``world_sizes`` are left out, which the run
            directory has; empty if none are.
    """

    run_name: str
    run_uri: str
    checkpoint_uri: str = ""
    metrics: dict[str, Any] = Field(default_factory=dict)
    best_checkpoint_uri: str = ""
    best_checkpoints: list[BestCheckpoint] = Field(default_factory=list)
    status: str = "completed"
    attempts: int = 1
    world_sizes: list[WorldSize] = Field(default_factory=list)
    goodput: float = 0.0
    time: TimeAccount = Field(default_factory=TimeAccount)
    storage_block: str = ""
    started_from: str = ""
    history: list[dict[str, Any]] = Field(default_factory=list)
    left_out: dict[str, int] = Field(default_factory=dict)


def bounded(result: RunResult, score: str = "") -> RunResult:
    """A result in the size that the last event of an attempt has room for; of the checkpoints those that come last."""
    kept = [one.model_copy(update={"metrics": bounded_metrics(one.metrics, score)}) for one in result.best_checkpoints]
    fitting = sum(size <= _MAX_CHECKPOINTS_BYTES for size in accumulate(map(size_of, reversed(kept))))
    parts: dict[str, list[Any]] = {
        "history": thinned([bounded_metrics(row, score) for row in result.history], _MAX_HISTORY_BYTES),
        "best_checkpoints": kept[len(kept) - fitting :],
        "world_sizes": thinned(result.world_sizes, _MAX_WORLD_SIZES_BYTES),
    }
    more = Counter({name: len(getattr(result, name)) - len(kept) for name, kept in parts.items()})
    metrics = bounded_metrics(result.metrics, score)
    return result.model_copy(update={**parts, "metrics": metrics, "left_out": dict(Counter(result.left_out) + more)})
