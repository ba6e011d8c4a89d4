"""Trace of one training: its reports that count, collected from its events."""

import math
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

from prefect_elastic_train.core import events as ev

from .checker import is_performance_metric

#: Names of metrics by which loops count their progress, the finest first.
COUNTERS = ("global_step", "step", "iteration", "epoch")


class TracedReport(NamedTuple):
    """Report of rank 0 in the trace of a training.

    Attributes:
        number: Number of the report, from 1, without the reports that a restart undid.
        metrics: The metrics that are numbers and not about performance, which differs in each training.
        world_size: Number of workers.
        group: Number of the worker group, from 1.
        checkpoint: Path of the checkpoint; empty if the report has none.
    """

    number: int
    metrics: dict[str, float]
    world_size: int
    group: int
    checkpoint: str

    def progress(self, counter: str) -> float:
        """Return the progress of the loop at this report: the value of a counter, or the number of reports up to it.

        ``counter`` is the name of the metric that counts the progress, from :meth:`Trace.counter`; empty: none.
        """
        return self.metrics.get(counter, self.number)


class Trace(BaseModel):
    """Trace of one training in a rehearsal: its reports that count, in order, collected from its events.

    A new worker group drops the reports after the checkpoint that it starts from; all reports without a checkpoint.

    Attributes:
        folder: The run directory of the training.
        progress_times: Time of each report that was further than all earlier reports, in seconds since the epoch.
        redone: Number of reports that were dropped, and so are repeated.
        group_count: Number of worker groups that were started.
        ranks: The ranks of the current worker group, by address and process id of their workers.
        started_at: Start of the current worker group, in seconds since the epoch.
        warnings: The last warning about the loop of each kind, such as "checkpoint-ignored".
        failure: Reason for a final failure of the training.
    """

    folder: Path = Path()
    reports: list[TracedReport] = []
    progress_times: list[float] = []
    redone: int = 0
    group_count: int = 0
    ranks: dict[str, int] = {}
    started_at: float = 0.0
    warnings: dict[str, str] = {}
    worker_failures: list[ev.WorkerFailed] = []
    is_complete: bool = False
    failure: str = ""

    def handle(self, event: ev.Event) -> None:
        """Record an event of the training."""
        match event:
            case ev.WorkerGroupStarted():
                # A checkpoint that was committed while its driver died has no event. It is newer than all reports.
                count = len(self.reports) if event.checkpoint else 0
                for report in self.saves:
                    if report.checkpoint == str(self.folder / event.checkpoint):
                        count = report.number
                if event.restored_step:
                    count = sum(report.metrics["step"] <= event.restored_step for report in self.reports)
                self.redone += len(self.reports) - count
                del self.reports[count:]
                self.group_count += 1
                self.ranks = event.ranks
                self.started_at = event.at
            case ev.Report():
                checkpoint = str(self.folder / event.checkpoint) if isinstance(event, ev.CheckpointCommitted) else ""
                numbers = {
                    name: value
                    for name, value in event.metrics.items()
                    if type(value) in (int, float) and not is_performance_metric(name)
                }
                number = len(self.reports) + 1
                self.reports.append(TracedReport(number, numbers, event.world_size, self.group_count, checkpoint))
                if number > len(self.progress_times):
                    self.progress_times.append(event.at)
            case ev.LoopWarned():
                self.warnings[event.problem] = event.message
            case ev.WorkerFailed():
                self.worker_failures.append(event)

    @property
    def saves(self) -> list[TracedReport]:
        """The reports with a checkpoint."""
        return [report for report in self.reports if report.checkpoint]

    @property
    def group_sizes(self) -> dict[int, int]:
        """Number of workers of each worker group that has reports that count, by the number of the group."""
        return {report.group: report.world_size for report in self.reports}

    def counter(self) -> str:
        """Return the name of the metric by which the loop counts its progress; empty if there is none.

        It is the first of :data:`COUNTERS` that grows with each report.
        """
        for name in COUNTERS:
            values = [report.metrics.get(name, math.nan) for report in self.reports]
            if values and all(after > before for before, after in pairwise([-math.inf, *values])):
                return name
        return ""
