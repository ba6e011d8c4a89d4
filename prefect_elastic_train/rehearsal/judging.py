"""What is wrong with a loop, by its undisturbed training and a disturbed one."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from prefect_elastic_train.core.ray_output import cause
from prefect_elastic_train.loop.cadence import best_interval
from prefect_elastic_train.rehearsal.certificate import Finding
from prefect_elastic_train.rehearsal.checker import distance, numbers_in
from prefect_elastic_train.rehearsal.course import Course

#: How far apart, relative to the largest number of an array, is noise of the order in which floats are added: with as
#: many workers as undisturbed, and with fewer or more.
_NOISE, _NOISE_OF_RESIZES = 1e-5, 1e-3
#: How much longer than best an interval between saves may be, if one failure comes in so many seconds.
_RARELY, _FAILURES_EACH_SECONDS, _LEAST_SECONDS = 4.0, 3600.0, 10.0
_fail = partial(Finding, level="fail")
_A_SESSION = "a session of prefect_elastic_train.loop does"


@dataclass
class Comparison:
    """How a disturbed training stands to the undisturbed one; ``metrics`` are the last of both."""

    words: str
    findings: list[Finding] = field(default_factory=list)
    difference: float | None = None
    metrics: tuple[dict[str, float], dict[str, float]] = field(default_factory=lambda: ({}, {}))


def of_undisturbed(course: Course, seconds: float) -> list[Finding]:
    """Return what an undisturbed training shows already."""
    if course.failures:
        return [_stuck(course)]
    if not course.commits:
        told = (
            f"{len(course.reports)} reports in {seconds:.0f} s, and none with a checkpoint: whatever dies, all is lost"
        )
        remedy = "save with ray.train.report(metrics, checkpoint=...), or train in a prefect_elastic_train.loop.session"
        return [_fail(about="never saves", message=told, remedy=remedy)]
    every = (course.reports[course.commits[-1]].at - course.started_at) / len(course.commits)
    cost = max(course.stalled / len(course.commits), 0.01)
    best = max(best_interval(cost, _FAILURES_EACH_SECONDS), _LEAST_SECONDS)
    if every < _RARELY * best:
        return []
    message = f"it saves each {every:.0f} s, and a save keeps the steps waiting for {cost:.2g} s"
    remedy = f"with one failure an hour, a save each {best:.0f} s loses least; a session's save_every='auto' finds it"
    return [Finding(level="warn", about="saves rarely", message=message, remedy=remedy)]


def compare(one: Course, other: Course, of_one: Path, of_other: Path) -> Comparison:
    """Hold a disturbed training against the undisturbed ``one``; their run directories are those."""
    counter = one.counter()
    here = {one.progress(place, counter): place for place in range(len(one.reports))}
    there = {other.progress(place, counter): place for place in range(len(other.reports))}
    common = [(here[at], there[at]) for at in sorted(here.keys() & there.keys())]
    ignored = [warning.message for warning in other.warnings if warning.problem == "checkpoint-ignored"]
    findings = [_fail(about="ignores its checkpoint", message=message) for message in ignored[:1]]
    if not common:
        words = "no report of the one is as far as one of the other's, so there is nothing to compare"
        remedy = "report a counter that only grows, such as step, and save checkpoints at the same steps each time"
        return Comparison(
            words, findings or [Finding(level="warn", about="not comparable", message=words, remedy=remedy)]
        )
    points, difference = _by_state(one, other, of_one, of_other, common), None
    if points:
        difference = max(gap for _, gap, _ in points)
    else:
        gaps = (distance(one.reports[here].metrics, other.reports[there].metrics) for here, there in common)
        points = [(there, gap, f"metric {where}") for (_, there), (gap, where) in zip(common, gaps, strict=True)]
    words, wrong = _verdict(one, other, points, common)
    if difference is None:
        words = f"no checkpoint of both could be read, so what was reported was compared: {words}"
    last = one.reports[common[-1][0]].metrics, other.reports[common[-1][1]].metrics
    return Comparison(words, findings or wrong, difference, last)


#: Reports of the disturbed training up to where the two are compared, how far apart they are, and in what.
_Points = list[tuple[int, float, str]]


def _by_state(one: Course, other: Course, of_one: Path, of_other: Path, common: list[tuple[int, int]]) -> _Points:
    """Compare the checkpoints that both have kept of the same progress: the last, and if that differs, all."""
    points: _Points = []
    for here, there in reversed(common):
        names = one.reports[here].checkpoint, other.reports[there].checkpoint
        folders = of_one / names[0], of_other / names[1]
        if not (all(names) and all(folder.is_dir() for folder in folders)):
            continue
        numbers = [numbers_in(folder) for folder in folders]
        if numbers[0].keys() & numbers[1].keys():
            points.insert(0, (there, *distance(*numbers)))
            if not points[0][1]:
                break
    return points


def _verdict(one: Course, other: Course, points: _Points, common: list[tuple[int, int]]) -> tuple[str, list[Finding]]:
    """Return how the two compare, in words, and what is wrong if something is."""
    world, worlds = one.reports[0].world, [(0, other.reports[0].world), *other.resumes]
    well = -1  # the last place at which they were the same
    for place, gap, where in points:
        before = [resume for resume, _ in other.resumes if resume <= place]
        others = [size for resume, size in worlds if resume <= place and size != world]
        if gap <= (_NOISE_OF_RESIZES if others else _NOISE):
            well = place
            continue
        words = f"after {place + 1} reports {where} is {gap:.2g} (relative) from the undisturbed training's"
        if others:
            message = f"{words}; it had trained with {others[-1]} instead of {world} workers for a while"
            remedy = "keep the global batch, and with it the learning rate, the same at any number of workers, and the "
            remedy += f"order of samples a function of seed and step: {_A_SESSION}"
            return words, [_fail(about="depends on the world size", message=message, remedy=remedy)]
        if not before:
            message = f"{words}, although nothing had happened to either: two undisturbed trainings differ"
            remedy = "seed the model, the order of the data and every random generator, with the same seed each time"
            return words, [_fail(about="not deterministic", message=message, remedy=remedy)]
        resume = next(one for one in [*before, place] if one > well or one == before[-1])
        return words, [_forgotten(one, other, resume, words, common)]
    worst = max(gap for _, gap, _ in points)
    same = f"the same within {worst:.1g} (relative)" if worst else "bit for bit the same"
    return f"after {points[-1][0] + 1} reports it is {same}", []


def _forgotten(one: Course, other: Course, resume: int, words: str, common: list[tuple[int, int]]) -> Finding:
    """Say what a loop forgets, as far as its first report after a resume tells."""
    here, there = next((pair for pair in common if pair[1] >= resume), common[-1])
    mine, its = one.reports[here].metrics, other.reports[there].metrics
    gap, name = distance(mine, its)
    if gap > _NOISE:
        told = f"the first report after a resume has {name} {its[name]:.6g} instead of {mine[name]:.6g}; the random "
        told += "state, the place in the data or a part of the model is not restored, or, where a report stands for "
        told += "several steps, what makes the update"
    else:
        told = "the first report after a resume is right and later ones are not; what makes the update is not "
        told += "restored: the optimizer's state, or the schedule of its learning rate"
    remedy = "save and restore model, optimizer, schedule, random states and the place in the data: "
    about = "forgets a part of its state"
    return _fail(about=about, message=f"{words}: {told}", remedy=f"{remedy}{_A_SESSION}")


def _stuck(course: Course) -> Finding:
    """Say which ranks wait in a report for others that do not, or what else has gone wrong."""
    failure = course.failures[0]
    waiting = [rank for rank, error in failure.errors.items() if "HungLoopError" in error and "in report\n" in error]
    if waiting:
        message = f"rank {', '.join(waiting)} waited in report() for the others, which did not come to theirs"
        remedy = "have all ranks call ray.train.report() equally often"
        return _fail(about="reports unequally", message=message, remedy=remedy)
    return _fail(about="fails undisturbed", message=cause(next(iter(failure.errors.values()), "no reason was told")))
