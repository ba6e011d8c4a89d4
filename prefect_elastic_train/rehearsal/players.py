"""What happens to a training while it runs: nothing until it has gone far enough, or one fault after the other."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from prefect_elastic_train.rehearsal.certificate import Played
from prefect_elastic_train.rehearsal.course import Course
from prefect_elastic_train.rehearsal.schedule import DRAIN, DRIVER, FREEZE, GROWTH, STORAGE, WORKER, Fault
from prefect_elastic_train.rehearsal.stage import Enough, Stage

_DRAIN_SECONDS, _OUTAGE_SECONDS = 20.0, 6.0
_RECOVERY_SECONDS = 120.0  # that a fault may take, besides what the loop takes from report to report


class Undisturbed:
    """Ends a training once it has trained for so long and has a checkpoint, or without one after twice that."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, course: Course) -> None:
        trained = time.time() - course.started_at if course.groups else 0.0
        if trained > (self._seconds if course.commits and course.commits[-1] > 0 else 2 * self._seconds):
            raise Enough


class Disturber:
    """Plays faults, each after a checkpoint since the one before; ends a training that is as far as it need go.

    Args:
        faults: Those to play; what is played is taken out.
        enough: Whether the training is far enough, and past what the faults have done.
        until: When all must end, on the monotonic clock.
        tell: Called with a line of progress.
    """

    def __init__(
        self,
        stage: Stage,
        faults: list[Fault],
        enough: Callable[[Course], bool],
        gap_seconds: float,
        until: float,
        tell: Callable[[str], None],
    ) -> None:
        self.played: list[Played] = []
        self._stage, self._faults, self._enough, self._tell = stage, faults, enough, tell
        self._limit, self._until = _RECOVERY_SECONDS + 3 * gap_seconds, until
        self._now: _Going | None = None
        self._due, self._calm_at = 0.0, 0  # when the next one comes, after how many reports

    def __call__(self, course: Course) -> None:
        now = time.monotonic()
        if self._now is not None:
            self._now.go_on(now)
            if self._now.is_over(course):
                self._done(course, recovered=True)
            elif now - self._now.began > self._limit:
                self._done(course, recovered=False)
                raise Enough
        elif now > self._until or self._enough(course):
            raise Enough
        elif self._faults and course.commits and course.commits[-1] >= self._calm_at:
            self._due = self._due or now + self._faults[0].wait
            if now >= self._due:
                fault = self._faults.pop(0)
                self._now, self._due = _Going(self._stage, fault, course), 0.0
                self._tell(f"{fault.kind}: {self._now.what}")

    def end(self, course: Course) -> None:
        """The training is over."""
        if self._now is not None:
            self._done(course, recovered=course.is_complete)

    def _done(self, course: Course, recovered: bool) -> None:
        assert self._now is not None
        played = self._now.end(course, recovered)
        self.played.append(played)
        self._now, self._calm_at = None, len(course.reports) + 1
        self._tell(f"{played.kind}: {played.words}")


class _Going:
    """A fault from when it is played until the training has done a step that it had not done before."""

    def __init__(self, stage: Stage, fault: Fault, course: Course) -> None:
        self._stage, self._fault = stage, fault
        self._reports, self._groups, self._redone = len(course.reports), course.groups, course.redone
        self._world = course.world
        self._stopped: psutil.Process | None = None
        self._node = ""
        self.began, self._at = time.monotonic(), time.time()
        self.what = self._play(fault, course)

    def _play(self, fault: Fault, course: Course) -> str:
        nodes = self._stage.nodes
        if fault.kind in (WORKER, FREEZE):
            ranks = sorted(course.ranks.items(), key=lambda one: one[1])
            where, rank = ranks[fault.of(ranks)]
            process = psutil.Process(int(where.rpartition(":")[2]))
            if fault.kind == WORKER:
                process.kill()
                return f"rank {rank} is killed"
            process.suspend()
            self._stopped = process
            return f"rank {rank} is stopped, and answers no more"
        if fault.kind == DRIVER:
            _driver().kill()
            return "the driver is killed"
        if fault.kind == STORAGE:
            self._stage.outage.touch()
            return f"the storage does not answer for {_OUTAGE_SECONDS:g} s"
        if fault.kind == GROWTH:
            self._stage.add_node()
            return "a node comes"
        self._node = nodes.ids[fault.of(nodes.ids)]
        if fault.kind == DRAIN:
            nodes.drain(self._node, _DRAIN_SECONDS)
            return f"a node says that it goes in {_DRAIN_SECONDS:g} s"
        self._lose_node()
        return "a node is lost"

    def go_on(self, now: float) -> None:
        """Do what comes later."""
        if self._fault.kind == STORAGE and now - self.began > _OUTAGE_SECONDS:
            self._stage.outage.unlink(missing_ok=True)
        if self._fault.kind == DRAIN and self._node and now - self.began > _DRAIN_SECONDS:
            self._lose_node()

    def is_over(self, course: Course) -> bool:
        """Whether a step is done that was not, and by a new worker group if there must be one."""
        if len(course.reports) <= self._reports:
            return False
        if self._fault.kind == STORAGE:
            return not self._stage.outage.exists() and course.commits[-1] >= self._reports
        if self._fault.kind == GROWTH:
            return course.world > self._world
        return course.groups > self._groups and not (self._fault.kind == DRAIN and self._node)

    def end(self, course: Course, recovered: bool) -> Played:
        """Leave nothing of it, and return what it has come to."""
        self._stage.outage.unlink(missing_ok=True)
        with suppress(psutil.Error):
            if self._stopped is not None:
                self._stopped.send_signal(signal.SIGCONT)
        new = [one.at for one in course.reports[self._reports :]]
        return Played(
            kind=self._fault.kind,
            what=self.what,
            recovered=recovered,
            seconds=round(new[0] - self._at, 1) if new else 0.0,
            redone=course.redone - self._redone,
            workers=course.world,
            at_report=self._reports,
        )

    def _lose_node(self) -> None:
        self._stage.nodes.remove(self._node)
        self._node = ""
        if not self._stage.can_shrink:
            self._stage.add_node()


def _driver() -> psutil.Process:
    """The driver that works: the oldest of this process's."""
    those = psutil.Process().children()
    drivers = [one for one in those if "prefect_elastic_train.driver" in one.cmdline()]
    return min(drivers, key=lambda one: one.create_time())
