"""What is wrong with a loop, by its undisturbed training and a disturbed one."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from prefect_elastic_train.core.ray_output import cause
from prefect_elastic_train.loop.cadence import best_interval
from prefect_elastic_train.rehearsal.certificate import Comparison, Finding
from prefect_elastic_train.rehearsal.checker import distance, numbers_in
from prefect_elastic_train.rehearsal.course import Course

#: How far apart, relative to the largest number of an array, is noise of the order in which floats are added: with as
#: many workers as undisturbed, and with fewer or more.
_NOISE, _NOISE_OF_RESIZES = 1e-5, 1e-3
#: How much longer than best an interval between saves may be, if one failure comes in so many seconds.
_RARELY, _FAILURES_EACH_SECONDS, _LEAST_SECONDS = 4.0, 3600.0, 10.0
_fail = partial(Finding, level="fail")
_A_SESSION = "a session of prefect_elastic_train.loop does"


def of_undisturbed(course: Course, seconds: float) -> list[Finding]:
    """Return what an undisturbed training shows already."""
    if course.failures:
        return [_stuck(course.failures[0].errors)]
    if not course.commits:
        told = f"{len(course.reports)} reports in {seconds:.0f} s, none with a checkpoint: whatever dies, all is lost"
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
    findings = [_fail(about="ignores its checkpoint", message=other.ignored)] if other.ignored else []
    if not common:
        words = "no report of the one is as far as one of the other's, so there is nothing to compare"
        remedy = "report a counter that only grows, such as step, and save checkpoints at the same steps each time"
        warned = Finding(level="warn", about="not comparable", message=words, remedy=remedy)
        return Comparison(compared=words, findings=findings or [warned])
    points = _by_state(one, other, of_one, of_other, common)
    difference = max((gap for _, gap, _ in points), default=None)
    if difference is None:
        gaps = [distance(one.reports[here].metrics, other.reports[there].metrics) for here, there in common]
        points = [(there, gap, f"metric {where}") for (_, there), (gap, where) in zip(common, gaps, strict=True)]
    words, wrong = _verdict(one, other, points, common)
    if difference is None:
        words = f"no checkpoint of both could be read, so what was reported was compared: {words}"
    return Comparison(
        compared=words,
        findings=findings or wrong,
        difference=difference,
        metrics=other.reports[common[-1][1]].metrics,
        undisturbed_metrics=one.reports[common[-1][0]].metrics,
    )


#: Reports of the disturbed training up to where the two are compared, how far apart they are, and in what.
_Points = list[tuple[int, float, str]]


def _by_state(one: Course, other: Course, of_one: Path, of_other: Path, common: list[tuple[int, int]]) -> _Points:
    """Compare the checkpoints that both have kept of the same progress: the last, and if that differs, all."""
    points: _Points = []
    for here, there in reversed(common):
        names = one.reports[here].checkpoint, other.reports[there].checkpoint
        folders = of_one / names[0], of_other / names[1]
        if all(names) and all(folder.is_dir() for folder in folders):
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
            about, message = "depends on the world size", f"it had trained with {others[-1]} instead of {world} workers"
            remedy = "keep the global batch, and with it the learning rate, the same at any number of workers, and the "
            remedy += f"order of samples a function of seed and step: {_A_SESSION}"
        elif not before:
            about, message = "not deterministic", "nothing had happened to either: two undisturbed trainings differ"
            remedy = "seed the model, the order of the data and every random generator, with the same seed each time"
        else:
            about = "forgets a part of its state"
            resume = next(one for one in [*before, place] if one > well or one == before[-1])
            message = _forgotten(one, other, next((pair for pair in common if pair[1] >= resume), common[-1]))
            remedy = "save and restore model, optimizer, schedule, random states and the place in the data: "
            remedy += _A_SESSION
        return words, [_fail(about=about, message=f"{words}; {message}", remedy=remedy)]
    worst = max(gap for _, gap, _ in points)
    same = f"the same within {worst:.1g} (relative)" if worst else "bit for bit the same"
    return f"after {points[-1][0] + 1} reports it is {same}", []


def _forgotten(one: Course, other: Course, resumed: tuple[int, int]) -> str:
    """Say what a loop forgets, as far as its first report after a resume tells."""
    mine, its = one.reports[resumed[0]].metrics, other.reports[resumed[1]].metrics
    gap, name = distance(mine, its)
    if gap <= _NOISE:
        told = "the first report after a resume is right and later ones are not, so what makes the update is not "
        return f"{told}restored: the optimizer's state, or the schedule of its learning rate"
    told = f"the first report after a resume has {name} {its[name]:.6g} instead of {mine[name]:.6g}, so the random "
    told += "state, the place in the data or a part of the model is not restored, or, where a report stands for "
    return f"{told}several steps, what makes the update"


def _stuck(errors: dict[str, str]) -> Finding:
    """Say which ranks wait in a report for others that do not, or what else has gone wrong."""
    waiting = [rank for rank, error in errors.items() if "HungLoopError" in error and "in report\n" in error]
    if not waiting:
        return _fail(about="fails undisturbed", message=cause(next(iter(errors.values()), "no reason was told")))
    message = f"rank {', '.join(waiting)} waited in report() for the others, which did not come to theirs"
    remedy = "have all ranks call ray.train.report() equally often"
    return _fail(about="reports unequally", message=message, remedy=remedy)
