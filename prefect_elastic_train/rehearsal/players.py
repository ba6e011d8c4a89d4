"""What happens to a training while it runs: nothing until it has gone far enough, or one fault after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise

import psutil

from prefect_elastic_train.rehearsal.certificate import Played
from prefect_elastic_train.rehearsal.course import Course
from prefect_elastic_train.rehearsal.schedule import DRAIN, DRIVER, FREEZE, GROWTH, STORAGE, WORKER, Fault
from prefect_elastic_train.rehearsal.stage import Enough, Stage

_DRAIN_SECONDS, _OUTAGE_SECONDS = 20.0, 6.0
_PATIENCE_SECONDS = 120.0  # for a fault, or for the checkpoint before it, besides what the loop takes for a report


def undisturbed(seconds: float) -> Callable[[Course], None]:
    """End a training that has trained for so long and has a checkpoint; one without after twice that."""

    def look(course: Course) -> None:
        trained = time.time() - course.started_at if course.groups else 0.0
        if course.failures or trained > (seconds if course.commits else 2 * seconds):
            raise Enough

    return look


class Disturber:
    """Plays faults, each after a checkpoint since the one before; ends a training that is as far as it need go.

    Args:
        faults: Those to play; what is played is taken out.
        enough: Whether the training is far enough.
        gap_seconds: The longest time between two reports, undisturbed.
        tell: Called with a line of progress.
    """

    def __init__(
        self,
        stage: Stage,
        faults: list[Fault],
        enough: Callable[[Course], bool],
        gap_seconds: float,
        tell: Callable[[str], None],
    ) -> None:
        self.played: list[Played] = []
        self._stage, self._faults, self._enough, self._tell = stage, faults, enough, tell
        self._patience = _PATIENCE_SECONDS + 3 * gap_seconds
        self._now: _Fault | None = None
        self._since, self._due, self._calm_at = time.monotonic(), 0.0, 0  # the last after so many reports

    def __call__(self, course: Course) -> None:
        now = time.monotonic()
        if self._now is not None:
            self._now.go_on()
            if self._now.is_over(course):
                self.end(course, recovered=True)
        elif self._enough(course):
            raise Enough
        elif self._faults and course.commits and course.commits[-1] >= self._calm_at:
            self._due = self._due or now + self._faults[0].wait
            if now >= self._due:
                with suppress(psutil.Error):  # it went by itself: the next time
                    self._now = _Fault(self._stage, self._faults[0], course)
                    self._tell(f"{self._faults.pop(0).kind}: {self._now.what}")
                self._since, self._due = now, 0.0
        if now - self._since > self._patience:
            raise Enough

    def end(self, course: Course, recovered: bool) -> None:
        """Take in what a fault has come to, if one is played."""
        if self._now is not None:
            played, self._now = self._now.end(course, recovered), None
            self.played.append(played)
            self._since, self._calm_at = time.monotonic(), len(course.reports) + 1
            self._tell(f"{played.kind}: {played.words}")


class _Fault:
    """A fault from when it is played until the training has done a step that it had not done before."""

    def __init__(self, stage: Stage, fault: Fault, course: Course) -> None:
        self._stage, self._kind = stage, fault.kind
        self._reports, self._groups, self._redone = len(course.news), course.groups, course.redone
        self._world, self._node, self._at = len(course.ranks), "", time.time()
        self.what = self._play(fault, course)

    def _play(self, fault: Fault, course: Course) -> str:
        nodes = self._stage.nodes
        if fault.kind in (WORKER, FREEZE):
            ranks = sorted(course.ranks.items(), key=lambda one: one[1])
            where, rank = ranks[fault.of(ranks)]
            process = psutil.Process(int(where.rpartition(":")[2]))
            (process.kill if fault.kind == WORKER else process.suspend)()
            return f"rank {rank} is {'killed' if fault.kind == WORKER else 'stopped, and answers no more'}"
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

    def go_on(self) -> None:
        """Do what comes later."""
        seconds = time.time() - self._at
        if self._kind == STORAGE and seconds > _OUTAGE_SECONDS:
            self._stage.outage.unlink(missing_ok=True)
        if self._kind == DRAIN and self._node and seconds > _DRAIN_SECONDS:
            self._lose_node()

    def is_over(self, course: Course) -> bool:
        """Whether a step is done that was not, and by a new worker group if there must be one."""
        if self._kind == STORAGE:
            return not self._stage.outage.exists() and course.commits[-1] >= self._reports
        if course.groups == self._groups or course.news[-1] < course.started_at:
            return False
        return len(course.ranks) > self._world if self._kind == GROWTH else not self._node

    def end(self, course: Course, recovered: bool) -> Played:
        """Leave nothing of it, and return what it has come to."""
        self._stage.outage.unlink(missing_ok=True)
        times = [self._at, *(at for at in course.news if at > self._at)]
        pause = max((after - before for before, after in pairwise(times)), default=time.time() - self._at)
        counts = {"redone": course.redone - self._redone, "workers": len(course.ranks)}
        return Played(kind=self._kind, what=self.what, recovered=recovered, seconds=round(pause, 1), **counts)

    def _lose_node(self) -> None:
        self._stage.nodes.remove(self._node)
        self._node = ""
        if not self._stage.can_shrink:
            self._stage.add_node()


def _driver() -> psutil.Process:
    """The driver that works: the oldest of this process's, others are spare."""
    drivers = [one for one in psutil.Process().children() if "prefect_elastic_train.driver" in one.cmdline()]
    if not drivers:
        raise psutil.NoSuchProcess(0)
    return min(drivers, key=psutil.Process.create_time)
