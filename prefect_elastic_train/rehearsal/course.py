"""What a training has reported that counts, from its events, and where that leaves the undisturbed one's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.bounds import plain_metrics
from prefect_elastic_train.rehearsal.checker import CLOCK

#: What a loop counts its way with, finest first.
_COUNTERS = ("global_step", "step", "iteration", "epoch")


@dataclass(frozen=True)
class Seen:
    """A report of rank 0, and how many workers made it."""

    metrics: dict[str, Any]
    at: float
    world: int
    checkpoint: str = ""


@dataclass
class Course(ev.EventHandler):
    """The reports of one training that count, in order: those after a checkpoint that was gone back to do not.

    Attributes:
        resumes: For each worker group but the first, how many reports counted when it began, and its size.
        redone: Reports that were done again.
    """

    reports: list[Seen] = field(default_factory=list)
    resumes: list[tuple[int, int]] = field(default_factory=list)
    redone: int = 0
    groups: int = 0
    ranks: dict[str, int] = field(default_factory=dict)
    started_at: float = 0.0
    stalled: list[float] = field(default_factory=list)
    warnings: list[ev.LoopWarned] = field(default_factory=list)
    failures: list[ev.WorkerFailed] = field(default_factory=list)
    is_complete: bool = False

    def on_worker_group_started(self, event: ev.WorkerGroupStarted) -> None:
        names = [one.checkpoint for one in self.reports]
        kept = names.index(event.checkpoint) + 1 if event.checkpoint in names and event.checkpoint else 0
        self.redone += len(self.reports) - kept
        del self.reports[kept:]
        if self.groups:
            self.resumes.append((kept, event.world_size))
        self.groups, self.ranks, self.started_at = self.groups + 1, event.ranks, event.at

    def on_report(self, event: ev.Report) -> None:
        name = event.checkpoint if isinstance(event, ev.CheckpointCommitted) else ""
        numbers = {key: one for key, one in plain_metrics(event.metrics).items() if type(one) in (int, float)}
        self.reports.append(Seen(numbers, event.at, event.world_size, name))

    def on_checkpoint_stalled(self, event: ev.CheckpointStalled) -> None:
        self.stalled.append(event.seconds)

    def on_loop_warned(self, event: ev.LoopWarned) -> None:
        self.warnings.append(event)

    def on_worker_failed(self, event: ev.WorkerFailed) -> None:
        self.failures.append(event)

    @property
    def world(self) -> int:
        """How many workers train now."""
        return len(self.ranks)

    @property
    def commits(self) -> list[int]:
        """The places of the reports with a checkpoint."""
        return [place for place, one in enumerate(self.reports) if one.checkpoint]

    @property
    def longest_gap(self) -> float:
        """Seconds between two reports, or from the start of the group to its first one, at most."""
        times = [self.started_at, *(one.at for one in self.reports)]
        return max((after - before for before, after in itertools.pairwise(times)), default=0.0)

    def counter(self) -> str:
        """Return the metric that tells how far the loop is; empty if none does, and reports are counted."""
        for name in _COUNTERS:
            values = [one.metrics.get(name, math.nan) for one in self.reports]
            if values and all(after > before for before, after in zip([-math.inf, *values], values, strict=False)):
                return name
        return ""

    def by_progress(self, counter: str) -> dict[float, int]:
        """Return the place of each report by how far the loop was."""
        return {one.metrics.get(counter, place + 1): place for place, one in enumerate(self.reports)}


def differing(one: Mapping[str, float], other: Mapping[str, float], relative: float) -> list[str]:
    """Return the metrics of both that are further apart than that; clocks are not looked at."""
    names = [name for name in one if name in other and not CLOCK.search(name)]
    return [name for name in names if apart(one[name], other[name]) > relative]


def apart(one: float, other: float) -> float:
    """Return how far two numbers are apart, relative to the larger."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other))
