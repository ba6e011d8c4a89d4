"""What happens to a training while it runs: generators that are gone on with several times a second, and end it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import psutil

from prefect_elastic_train.core.request import DRIVER_MODULE
from prefect_elastic_train.rehearsal.certificate import Played
from prefect_elastic_train.rehearsal.course import Course
from prefect_elastic_train.rehearsal.schedule import DRIVER, FREEZE, GROWTH, NODE, STORAGE, WORKER, Fault
from prefect_elastic_train.rehearsal.stage import Looks, Stage

_DRAIN_SECONDS, _OUTAGE_SECONDS = 20.0, 6.0


def undisturbed(course: Course, seconds: float) -> Looks:
    """Let a training go on for so long after its first report, to a checkpoint; or for twice that, without one."""
    while not course.failures:
        trained = course.news[-1] - course.news[0] if course.news else 0.0
        if trained > (seconds if course.commits else 2 * seconds):
            return
        yield


@dataclass
class Disturber:
    """Plays faults, each after a checkpoint since the one before, and takes what is played out of the list."""

    stage: Stage
    faults: list[Fault]
    enough: Callable[[Course], bool]  # whether the training is far enough when no fault is played
    patience: float  # seconds for the recovery from a fault, and from there to the next
    tell: Callable[[str], None]
    played: list[Played] = field(default_factory=list)
    _node: str = ""  # that is to go

    def play(self, course: Course) -> Looks:
        """Play the faults until the training is far enough, or one is not recovered from."""
        calm_at, since = 0, time.monotonic()
        while (calm := time.monotonic() - since) < self.patience and not self.enough(course):
            if self.faults and course.commits and course.commits[-1] >= calm_at and calm > self.faults[0].wait:
                with suppress(psutil.Error):  # it went by itself: the next time
                    yield from self._play(self.faults[0], course)
                    if not self.played[-1].recovered:
                        return
                    calm_at, since = len(course.reports) + 1, time.monotonic()
            yield

    def _play(self, fault: Fault, course: Course) -> Looks:
        """Play a fault, until the training has done a step that it had not done before."""
        at, world, redone, recovered = time.time(), len(course.ranks), course.redone, False
        reports, groups = len(course.news), course.groups
        what = self._begin(fault, course)
        self.tell(f"{fault.kind}: {what}")
        try:
            while not recovered and (seconds := time.time() - at) < self.patience:
                yield
                if fault.kind == STORAGE:
                    if seconds > _OUTAGE_SECONDS:
                        self.stage.outage.unlink(missing_ok=True)
                    recovered = not self.stage.outage.exists() and max(course.commits, default=-1) >= reports
                    continue
                if self._node and seconds > _DRAIN_SECONDS:
                    self._lose_node()
                is_new = course.groups > groups and course.news[-1] >= course.started_at
                recovered = is_new and not self._node and (fault.kind != GROWTH or len(course.ranks) > world)
        finally:
            self.stage.outage.unlink(missing_ok=True)
            self._lose_node()
            if recovered or not course.is_complete:  # what the end of the loop has cut short is played again
                times = [at, *(one for one in course.news if one > at)]
                pause = max((after - before for before, after in pairwise(times)), default=time.time() - at)
                played = Played(
                    kind=fault.kind,
                    what=what,
                    recovered=recovered,
                    seconds=round(pause, 1),
                    redone=course.redone - redone,
                    workers=len(course.ranks),
                )
                self.played.append(played)
                self.faults.remove(fault)
                self.tell(f"{fault.kind}: {played.words}")

    def _begin(self, fault: Fault, course: Course) -> str:
        nodes = self.stage.nodes
        if fault.kind in (WORKER, FREEZE):
            ranks = sorted(course.ranks.items(), key=lambda one: one[1])
            where, rank = ranks[fault.of(ranks)]
            process = psutil.Process(int(where.rpartition(":")[2]))
            (process.kill if fault.kind == WORKER else process.suspend)()
            return f"rank {rank} is {'killed' if fault.kind == WORKER else 'stopped, and answers no more'}"
        if fault.kind == DRIVER:
            drivers = [one for one in psutil.Process().children() if DRIVER_MODULE in one.cmdline()]
            if not drivers:
                raise psutil.NoSuchProcess(0)
            min(drivers, key=psutil.Process.create_time).kill()  # a younger one is spare
            return "the driver is killed"
        if fault.kind == STORAGE:
            self.stage.outage.touch()
            return f"the storage does not answer for {_OUTAGE_SECONDS:g} s"
        if fault.kind == GROWTH:
            self.stage.add_node()
            return "a node comes"
        self._node = nodes.ids[fault.of(nodes.ids)]
        if fault.kind == NODE:
            self._lose_node()
            return "a node is lost"
        nodes.drain(self._node, _DRAIN_SECONDS)
        return f"a node says that it goes in {_DRAIN_SECONDS:g} s"

    def _lose_node(self) -> None:
        if self._node:
            self.stage.nodes.remove(self._node)
            self._node = ""
            if not self.stage.can_shrink:
                self.stage.add_node()
