"""Checks of the loops of a worker group: that they resume, save and report, and do not wait for other ranks forever.

A loop that starts from the beginning although a checkpoint exists trains as if nothing were wrong, and so does one that
never saves. The controller checks each report before Ray Train handles it, so that it can stop a loop before that loop
replaces a checkpoint that it has ignored. A loop that hangs fails its worker group; Ray's own detector watches only
NCCL.
"""

import math
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ray.train import WorkerGroupError

from prefect_elastic_train.core.causes import format_ranks
from prefect_elastic_train.core.events import FirstStep, LoopWarned, Publish, TrackersOpened
from prefect_elastic_train.core.settings import FailureSettings
from prefect_elastic_train.loop.restart_notice import announce_end
from prefect_elastic_train.worker.loop_inspection import current_line, has_opened_checkpoint, thread_stacks

from .failures import IgnoredCheckpointError
from .hang_watch import HangWatch, hang_error
from .straggler_watch import StragglerWatch
from .worker_queries import query_workers

_STACKS_SECONDS = 10.0  # for the stacks of ranks that hang
#: A loop without any checkpoint is reported after so many reports, if they took so long or its workers exit.
_UNSAVED_REPORTS = 10
_UNSAVED_SECONDS = 30.0
_WAIT_SECONDS = 45.0  # after which a rank that waits for the others is reported
#: A loop without a session is reported if it has not reported for so long: seconds, and times its longest interval.
_UNREPORTED_SECONDS = 120.0
_UNREPORTED_TIMES = 10.0
_COUNTERS = ("global_step", "epoch", "iteration", "step")  # metrics that count progress, most significant first


class LoopWatch:
    """Checks the train loops of the worker groups, in the controller: that they restore, save, report, and do not hang.

    Args:
        settings: ``ignored_checkpoint`` and ``stall_timeout_seconds`` apply here.
        publish: Function that publishes an event.

    Attributes:
        ignored: True if the current worker group's loop has ignored its checkpoint.
        step: Optimizer steps of the current worker group's session at the last poll; 0 without a session.
        has_stepped: True once all ranks of the session have begun their first step.
        stragglers: The ranks that are slower than the others.
        most_workers: Number of workers for which a step of the session has samples; ``sys.maxsize`` if unknown.
    """

    step = 0
    most_workers = sys.maxsize
    has_stepped = False
    _has_saved = False
    _workers: Sequence[Any] = ()
    _tracked: Sequence[Any] = ()

    def __init__(self, settings: FailureSettings, publish: Publish) -> None:
        self._settings = settings
        self._publish = publish
        self._hangs = HangWatch(publish)
        self.stragglers = StragglerWatch(publish)

    def begin_group(self, workers: Sequence[Any], checkpoint: str, metrics: Mapping[str, Any]) -> None:
        """Begin to watch the train loops of a new worker group.

        Args:
            workers: Ray Train's workers.
            checkpoint: The checkpoint that the loop may restore, empty for none.
            metrics: The metrics that were reported with that checkpoint.
        """
        self._hangs.begin_group(workers)
        self.stragglers.begin_group(workers)
        self._workers = workers
        self._checkpoint = checkpoint
        self._counters_before = _counters(metrics)
        self._is_decided = not checkpoint  # True once it is known if the loop restored the checkpoint
        self._has_saved |= bool(checkpoint)
        self._began = time.monotonic()
        self._reported_at = math.inf  # until the first poll
        self._longest_gap = 0.0  # seconds between two reports
        self._published: set[str] = set()  # problems of the worker group, and its end
        self._reports = 0
        self.ignored = False
        self.step = 0
        self.has_stepped = False
        #: For each rank, the start of its current wait for other ranks; the time of the poll if it does not wait.
        self._waiting_since: dict[int, float] = {}

    def announce_end(self) -> None:
        """Announce to all ranks that their worker group is about to end, so that their sessions save."""
        for worker in self._workers:
            worker.execute_async(announce_end)

    def check(self, statuses: Sequence[Any]) -> None:
        """Check the train loops by the status that a poll returned for each rank, and publish warnings.

        Raises:
            WorkerGroupError: The worker group has to fail, since its loop hangs or has ignored its checkpoint.
        """
        now = time.monotonic()
        self._update_step(statuses)
        if any(getattr(status, "is_ending", False) for status in statuses) and "end" not in self._published:
            self._published.add("end")
            self.announce_end()
        reports = [status.training_report for status in statuses if status.training_report]
        if reports or self._reported_at > now:
            self._longest_gap = max(self._longest_gap, now - self._reported_at)
            self._reported_at = now
        has_checkpoint = any(report.checkpoint for report in reports)
        self._has_saved |= has_checkpoint
        has_ended = any(status.error for status in statuses) or not any(status.running for status in statuses)
        if statuses and statuses[0].training_report:
            self._reports += 1
            self._check_restored(statuses[0].training_report.metrics, has_checkpoint)
        is_late = self._reports >= _UNSAVED_REPORTS and (has_ended or now - self._began >= _UNSAVED_SECONDS)
        if is_late and not self._has_saved:
            self._has_saved = True  # warn once
            self._publish(
                LoopWarned(
                    problem="no-checkpoint",
                    message=f"the loop has reported {self._reports} times in {now - self._began:.0f} s and never with "
                    "a checkpoint: a restart would begin at step 0. Pass a checkpoint to ray.train.report(metrics, "
                    "checkpoint=...), or use prefect_elastic_train.loop.session()",
                )
            )
        for rank, status in enumerate(statuses):
            if hasattr(status, "waited"):
                self._waiting_since[rank] = now - status.waited
        if now - min(self._waiting_since.values(), default=now) > _WAIT_SECONDS:
            self._warn(
                "ranks-wait",
                "ranks wait for others: {}. All must call ray.train.report() and collectives equally often",
            )
        self.stragglers.check(statuses)
        limit = self._settings.stall_timeout_seconds
        if limit == "auto":
            self._hangs.check(statuses)
            most = max(_UNREPORTED_SECONDS, _UNREPORTED_TIMES * self._longest_gap)
            has_session = any(getattr(status, "phase", None) for status in statuses)
            if not has_session and self._reports >= _UNSAVED_REPORTS and now - self._reported_at > most:
                self._warn(
                    "no-report",
                    f"the loop has not reported for {most:.0f} s, {self._longest_gap:.3g} s at most before: {{}}",
                )
        elif limit and not has_ended and now - self._reported_at > limit:
            stacks = query_workers(self._workers, thread_stacks, _STACKS_SECONDS)
            ranks = range(len(self._workers))
            raise hang_error(f"no report for {limit:g} s", stacks, ranks, len(ranks))

    def _update_step(self, statuses: Sequence[Any]) -> None:
        """Update the optimizer step of the session from a poll. Publish the first step once all ranks have begun it.

        Also publish the training's runs in trackers.
        """
        positions = [status.position for status in statuses if getattr(status, "position", None)]
        if positions and len(positions) == len(statuses) and not self.has_stepped:
            self.has_stepped = True
            self.step = positions[0].began_from
            self.most_workers = positions[0].most_workers
            age = min(position.age for position in positions)
            self._publish(FirstStep(at=time.time() - age, world_size=len(statuses)))
        self.step = max([self.step, *(position.done for position in positions)])
        tracked = [run for position in positions for run in position.tracked]
        if tracked and tracked != self._tracked:
            self._tracked = tracked
            self._publish(TrackersOpened(runs=tracked))

    def _check_restored(self, metrics: Mapping[str, Any], has_checkpoint: bool) -> None:
        """Decide once for a worker group if its loop has restored the checkpoint, and publish a warning if it has not.

        It has if a counter in its metrics is above the one reported with the checkpoint, or if a rank has read the
        checkpoint.

        Raises:
            WorkerGroupError: It has not, and the worker group has to fail then.
        """
        if self._is_decided:
            return
        counters = {name: value for name, value in _counters(metrics).items() if name in self._counters_before}
        has_resumed = any(value > self._counters_before[name] for name, value in counters.items())
        if not has_resumed:
            opened = query_workers(self._workers, has_opened_checkpoint)
            has_resumed = len(opened) < len(self._workers) or any(opened.values())  # a rank without an answer may have
        if not (has_resumed or counters or has_checkpoint) and self._reports == 1:
            return  # a loop may report something before it reads the checkpoint
        self._is_decided = True
        self.ignored = not has_resumed
        if has_resumed:
            return
        message = (
            f"the loop started from the beginning{f' at {_format(counters)}' if counters else ''}, although the "
            f"checkpoint{f' of {_format(self._counters_before)}' if self._counters_before else ''} exists "
            f"({self._checkpoint}): it never read what ray.train.get_checkpoint() returns. Restore model, optimizer "
            "and step before the first step"
        )
        self._publish(LoopWarned(problem="checkpoint-ignored", message=message, checkpoint=self._checkpoint))
        if self._settings.ignored_checkpoint == "fail":
            raise WorkerGroupError(message, {0: IgnoredCheckpointError(message)})

    def _warn(self, problem: Any, message: str) -> None:
        """Publish a problem once for each worker group, with the ranks' current lines for ``{}`` in its message."""
        if problem in self._published:
            return
        self._published.add(problem)
        answers = query_workers(self._workers, current_line)
        ranks = defaultdict[str, list[int]](list)
        for rank in range(len(self._workers)):
            ranks[answers.get(rank, "does not answer")].append(rank)
        lines = "; ".join(f"{format_ranks(ranks[line])} {line}" for line in ranks)
        self._publish(LoopWarned(problem=problem, message=message.format(lines)))


def _counters(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return those of a report's metrics that count progress, such as ``global_step``, and are finite numbers."""
    return {
        name: metrics[name]
        for name in _COUNTERS
        if type(metrics.get(name)) in (int, float) and abs(metrics[name]) < math.inf
    }


def _format(counters: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:,.10g}" for name, value in counters.items())
