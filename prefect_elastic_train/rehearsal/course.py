"""What a training has reported that counts, from its events."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

from pydantic import BaseModel

from prefect_elastic_train.core import events as ev

#: What a loop counts its way with, finest first.
COUNTERS = ("global_step", "step", "iteration", "epoch")


class Seen(NamedTuple):
    """A report of rank 0: its numbers, when it came, how many workers there were, the checkpoint with it."""

    metrics: dict[str, float]
    at: float
    world: int
    checkpoint: str


class Course(BaseModel, ev.EventHandler):
    """One training: its reports that count, in order, for those after a checkpoint that was gone back to do not."""

    reports: list[Seen] = []
    news: list[float] = []  # when each report came that was further than any before
    resumes: list[tuple[int, int]] = []  # of groups but the first: reports that count, size
    redone: int = 0  # reports that were done again
    groups: int = 0
    ranks: dict[str, int] = {}  # of the group that trains, by address and process id
    started_at: float = 0.0
    stalled: float = 0.0  # seconds that the loop has stood still for its checkpoints
    ignored: str = ""  # how a group has ignored its checkpoint, in words
    failures: list[ev.WorkerFailed] = []
    is_complete: bool = False

    def on_worker_group_started(self, event: ev.WorkerGroupStarted) -> None:
        names = [one.checkpoint for one in self.reports]
        kept = 0
        if event.checkpoint:  # one that is not known was committed as its driver died
            kept = names.index(event.checkpoint) + 1 if event.checkpoint in names else len(names)
        self.redone += len(self.reports) - kept
        del self.reports[kept:]
        if self.groups:
            self.resumes.append((kept, event.world_size))
        self.groups, self.ranks, self.started_at = self.groups + 1, event.ranks, event.at

    def on_report(self, event: ev.Report) -> None:
        name = event.checkpoint if isinstance(event, ev.CheckpointCommitted) else ""
        numbers = {key: one for key, one in event.metrics.items() if type(one) in (int, float)}
        self.reports.append(Seen(numbers, event.at, event.world_size, name))
        if len(self.reports) > len(self.news):
            self.news.append(event.at)

    def on_checkpoint_stalled(self, event: ev.CheckpointStalled) -> None:
        self.stalled += event.seconds

    def on_loop_warned(self, event: ev.LoopWarned) -> None:
        if event.problem == "checkpoint-ignored":
            self.ignored = event.message

    def on_worker_failed(self, event: ev.WorkerFailed) -> None:
        self.failures.append(event)

    @property
    def commits(self) -> list[int]:
        """The places of the reports with a checkpoint."""
        return [place for place, one in enumerate(self.reports) if one.checkpoint]

    def save_seconds(self) -> float:
        """Return the seconds between two checkpoints on average; there must be one."""
        return (self.reports[self.commits[-1]].at - self.started_at) / len(self.commits)

    def counter(self) -> str:
        """Return the metric that tells how far the loop is; empty if none does, and reports are counted."""
        for name in COUNTERS:
            values = [one.metrics.get(name, math.nan) for one in self.reports]
            if values and all(after > before for before, after in pairwise([-math.inf, *values])):
                return name
        return ""

    def progress(self, place: int, counter: str) -> float:
        """Return how far the loop was at a report."""
        return self.reports[place].metrics.get(counter, place + 1)
