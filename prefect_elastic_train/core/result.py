"""The result of a training. Belongs to all processes."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import Any

from pydantic import BaseModel

from .size_limits import bounded_metrics, size_of, thinned

#: Limits of the parts of a result. With its metrics and its message they fit into the attempt's final event.
_MAX_HISTORY_BYTES = 256 * 1024
_MAX_CHECKPOINTS_BYTES = 96 * 1024
_MAX_WORLD_SIZES_BYTES = 16 * 1024


class WorldSize(BaseModel, frozen=True):
    """The number of workers from a point in time on."""

    at: float
    size: int


class TimeAccount(BaseModel, frozen=True):
    """Wall time of a run by activity, in seconds; ``docs/goodput.md`` has the definitions.

    The parts add up to ``wall_seconds``.

    Attributes:
        wall_seconds: From the start of the first driver to the end of the run, less ``stopped_seconds``.
        productive_seconds: Training whose results were kept.
        startup_seconds: Start and shutdown, at first and after a stop.
        waiting_for_capacity_seconds: The cluster had no room for ``min_workers``.
        restart_seconds: Restarts after failures and preemptions.
        resize_seconds: Restarts with another number of workers.
        checkpoint_stall_seconds: The loop was blocked while a checkpoint was written.
        lost_seconds: Training that was repeated, or that no checkpoint has kept.
        stopped_seconds: Not part of the wall time: the run had ended, and no attempt was running.
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
        """Share of the wall time in which workers trained and their work was kept, 0 to 1."""
        return round(min(1.0, self.productive_seconds / self.wall_seconds), 4) if self.wall_seconds > 0 else 0.0


class Counts(BaseModel):
    """Counters of a run. See :class:`RunResult` for the fields."""

    attempts: int = 0
    worker_failures: int = 0
    preemptions: int = 0
    resizes: int = 0
    reports_lost: int = 0
    steps_redone: int = 0
    storage_wait_seconds: float = 0.0


class BestCheckpoint(BaseModel, frozen=True, ser_json_inf_nan="constants"):
    """A checkpoint that was kept, and the metrics that were reported with it."""

    uri: str
    metrics: dict[str, Any] = {}


class RunResult(Counts, frozen=True, ser_json_inf_nan="constants"):
    """Result of a finished training: plain JSON, so the next task can read it without Ray.

    Attributes:
        run_name: Name of the run.
        run_uri: The run directory.
        checkpoint_uri: The newest checkpoint, empty if the loop reported none.
        metrics: Metrics of the newest checkpoint, or of the last report if there is none.
        best_checkpoint_uri: The best of the kept checkpoints by the score of the checkpoint policy, the newest if that
            names none; empty if no kept checkpoint has that score.
        best_checkpoints: The kept checkpoints, best last: those without a score first, of equal ones the newest last.
        status: ``"completed"``.
        attempts: Driver attempts, over all resumes of the run.
        worker_failures: Worker-group failures that were recovered in the cluster.
        preemptions: Preemptions that were recovered in the cluster.
        resizes: Healthy worker groups that were restarted with another size.
        world_sizes: Size of each worker group and when it started.
        reports_lost: Reports that were repeated, because of a fault before their checkpoint or a loop that ignored it.
        steps_redone: Optimizer steps that were repeated, as far as the controller knew of them; 0 without a session.
        goodput: Share of the wall time, 0 to 1, in which workers trained and their work was kept.
        time: Wall time by activity, in seconds.
        storage_wait_seconds: Time that the controller or a rank waited for a storage that did not answer.
        storage_block: The saved storage block as ``"<block type>/<name>"``, empty for one that is not saved.
        started_from: The checkpoint of another run that the run started from (``resume_from``), empty for none. It
            may have been deleted since.
        history: Reported metrics, evenly thinned to at most 2,000 rows and 256 KiB, with ``_attempt``, ``_at``
            (seconds since the epoch) and ``_world_size`` beside the metrics.
        left_out: Numbers of entries of ``history``, ``best_checkpoints`` and ``world_sizes`` that are only in the run
            directory; empty if none are left out.
    """

    run_name: str
    run_uri: str
    checkpoint_uri: str = ""
    metrics: dict[str, Any] = {}
    best_checkpoint_uri: str = ""
    best_checkpoints: list[BestCheckpoint] = []
    status: str = "completed"
    attempts: int = 1
    world_sizes: list[WorldSize] = []
    goodput: float = 0.0
    time: TimeAccount = TimeAccount()
    storage_block: str = ""
    started_from: str = ""
    history: list[dict[str, Any]] = []
    left_out: dict[str, int] = {}


def bounded(result: RunResult, score: str) -> RunResult:
    """Return a copy of a training's result that fits into the final event of an attempt.

    History and world sizes are thinned, the worst checkpoints are left out, and metrics are bounded. Of many metrics,
    the one named ``score`` is kept first. ``left_out`` of the copy has the numbers of entries left out.
    """
    checkpoints = [
        checkpoint.model_copy(update={"metrics": bounded_metrics(checkpoint.metrics, score)})
        for checkpoint in result.best_checkpoints
    ]
    fitting = sum(size <= _MAX_CHECKPOINTS_BYTES for size in accumulate(map(size_of, reversed(checkpoints))))
    parts: dict[str, list[Any]] = {
        "history": thinned(result.history, _MAX_HISTORY_BYTES),  # the metrics of reports are bounded already
        "best_checkpoints": checkpoints[len(checkpoints) - fitting :],
        "world_sizes": thinned(result.world_sizes, _MAX_WORLD_SIZES_BYTES),
    }
    left_out = Counter({name: len(getattr(result, name)) - len(part) for name, part in parts.items()})
    metrics = bounded_metrics(result.metrics, score)
    return result.model_copy(
        update={**parts, "metrics": metrics, "left_out": dict(Counter(result.left_out) + left_out)}
    )
