"""What is wrong with a loop, by its undisturbed training and a disturbed one."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from prefect_elastic_train.loop.cadence import best_interval
from prefect_elastic_train.rehearsal.certificate import Finding
from prefect_elastic_train.rehearsal.checker import distance, numbers_in
from prefect_elastic_train.rehearsal.course import Course, apart, differing

#: How far apart, relative to the largest number of an array, is noise of the order in which floats are added: with as
#: many workers as undisturbed, and with fewer or more.
NOISE, NOISE_OF_RESIZES = 1e-5, 1e-3
_FAILURES_EACH_SECONDS, _RARELY, _LEAST_SECONDS = 3600.0, 4.0, 10.0
_SEED = "seed model, data order and every random generator from the config, and have no other source of chance"


@dataclass
class Comparison:
    """How a disturbed training stands to the undisturbed one."""

    words: str
    findings: list[Finding] = field(default_factory=list)
    difference: float | None = None
    metrics: tuple[dict[str, float], dict[str, float]] = field(default_factory=lambda: ({}, {}))


@dataclass(frozen=True)
class _Point:
    """Where both have been: after how many reports of the disturbed one, how far apart, and in what."""

    place: int
    gap: float
    where: str


def of_undisturbed(course: Course, seconds: float) -> list[Finding]:
    """Return what an undisturbed training shows already."""
    if course.failures:
        return [_stuck(course)]
    reports = course.reports
    if not course.commits:
        told = f"the loop reported {len(reports)} times in {seconds:.0f} s, and never with a checkpoint"
        told += ": whatever dies, all is lost"
        remedy = "save with ray.train.report(metrics, checkpoint=...), or train in a prefect_elastic_train.loop.session"
        return [Finding(level="fail", about="never saves", message=told, remedy=remedy)]
    times = [course.started_at, *(reports[place].at for place in course.commits)]
    every = statistics.median(after - before for before, after in itertools.pairwise(times))
    cost = max(sum(course.stalled) / len(course.commits), 0.01)
    best = max(best_interval(cost, _FAILURES_EACH_SECONDS), _LEAST_SECONDS)
    if every < _RARELY * best:
        return []
    message = f"it saves each {every:.0f} s, and a save keeps the steps waiting for {cost:.2g} s"
    remedy = f"with one failure an hour, a save each {best:.0f} s loses least; a session's save_every='auto' finds it"
    return [Finding(level="warn", about="saves rarely", message=message, remedy=remedy)]


def compare(a: Course, d: Course, of_a: Path, of_d: Path) -> Comparison:
    """Hold a disturbed training against the undisturbed one; their run directories are those."""
    findings = [
        Finding(level="fail", about="ignores its checkpoint", message=one.message)
        for one in d.warnings
        if one.problem == "checkpoint-ignored"
    ][:1]
    counter = a.counter()
    there, here = a.by_progress(counter), d.by_progress(counter)
    common = [(there[at], here[at]) for at in sorted(there.keys() & here.keys())]
    if not common:
        words = "no report of the one is one of the other's, so there is nothing to compare"
        return Comparison(words, findings or [_unknown(words)])
    last = [course.reports[place].metrics for course, place in ((a, common[-1][0]), (d, common[-1][1]))]
    points, kind = _by_state(a, d, of_a, of_d, common), "state"
    if not points:
        points, kind = list(_by_metrics(a, d, common)), "metrics"
    words, finding = _verdict(a, d, points, kind, common)
    if finding is not None and not findings:
        findings.append(finding)
    difference = max((point.gap for point in points), default=0.0) if kind == "state" else None
    return Comparison(words, findings, difference, (last[0], last[1]))


def _by_state(a: Course, d: Course, of_a: Path, of_d: Path, common: list[tuple[int, int]]) -> list[_Point]:
    """Compare the checkpoints that both have kept of the same progress: the last, and if that differs, all."""
    found: list[_Point] = []
    for there, here in reversed(common):
        folders = [of_a / a.reports[there].checkpoint, of_d / d.reports[here].checkpoint]
        if not (a.reports[there].checkpoint and d.reports[here].checkpoint and all(one.is_dir() for one in folders)):
            continue
        one, other = map(numbers_in, folders)
        if one.keys() & other.keys():
            found.insert(0, _Point(here, *distance(one, other)))
            if not found[0].gap:
                break
    return found


def _by_metrics(a: Course, d: Course, common: list[tuple[int, int]]) -> Iterator[_Point]:
    for there, here in common:
        one, other = a.reports[there].metrics, d.reports[here].metrics
        gaps = {name: apart(one[name], other[name]) for name in differing(one, other, 0.0)}
        where = max(gaps, key=lambda name: gaps[name], default="")
        yield _Point(here, gaps.get(where, 0.0), where)


def _verdict(
    a: Course, d: Course, points: list[_Point], kind: str, common: list[tuple[int, int]]
) -> tuple[str, Finding | None]:
    """Return how the two compare, in words, and what is wrong if something is."""
    first = d.resumes[0][0] if d.resumes else len(d.reports)
    worlds = [(0, d.reports[0].world), *d.resumes]
    before = -1  # the last point at which all was well
    for point in points:
        others = [size for place, size in worlds if place <= point.place and size != a.reports[0].world]
        if point.gap <= (NOISE_OF_RESIZES if others else NOISE):
            before = point.place
            continue
        told = f"{_what(kind, point)} is {point.gap:.2g} (relative) from the undisturbed training's"
        at = f"after {point.place + 1} reports {told}"
        if point.place < first and not others:
            message = f"{at}, although nothing had happened to either: two undisturbed trainings differ"
            return at, Finding(level="fail", about="not deterministic", message=message, remedy=_SEED)
        resumes = [place for place, _ in d.resumes if before < place <= point.place] or [first]
        if others:
            message = f"{at}; it had trained with {others[-1]} workers for a while instead of {a.reports[0].world}"
            remedy = "keep the global batch, and with it the learning rate, the same at any number of workers, and the "
            remedy += "order of samples a function of seed and step: a session of prefect_elastic_train.loop does"
            return at, Finding(level="fail", about="depends on the world size", message=message, remedy=remedy)
        return at, _forgotten(a, d, resumes[0], at, common)
    worst = max(point.gap for point in points)
    same = "bit for bit the same" if not worst else f"the same within {worst:.1g} (relative)"
    last = points[-1].place + 1
    if kind == "state":
        return f"the state in the checkpoint after {last} reports is {same}", None
    return f"no checkpoint of both could be read; what was reported is {same} in {last} reports", None


def _what(kind: str, point: _Point) -> str:
    return f"{point.where} of the checkpoint" if kind == "state" else f"the metric {point.where}"


def _forgotten(a: Course, d: Course, resume: int, at: str, common: list[tuple[int, int]]) -> Finding:
    """Say what a loop forgets, as far as its first report after a resume tells."""
    after = next(((there, here) for there, here in common if here >= resume), common[-1])
    one, other = a.reports[after[0]].metrics, d.reports[after[1]].metrics
    jumps = differing(one, other, NOISE)
    if jumps:
        name = jumps[0]
        told = f"the first report after a resume has {name} {other[name]:.6g} instead of {one[name]:.6g}"
        lacking = "the random state, the place in the data, or part of the model is not restored"
        lacking += "; or, if a report stands for several steps, the optimizer's state"
    else:
        told = "the first report after a resume is right, and later ones are not"
        lacking = "what makes the update is not restored: the optimizer's state or the schedule of its learning rate"
    remedy = "save and restore model, optimizer, schedule, random states and the place in the data: a session of "
    remedy += "prefect_elastic_train.loop does"
    return Finding(level="fail", about="forgets a part of its state", message=f"{at}: {told}; {lacking}", remedy=remedy)


def _stuck(course: Course) -> Finding:
    """Say which ranks wait in a report, and which do not."""
    errors = course.failures[0].errors
    waiting = [rank for rank, error in errors.items() if "in report\n" in error]
    text = next(iter(errors.values()), "")
    if "HungLoopError" in text and waiting:
        message = f"rank {', '.join(waiting)} waits in report() for the others, which have no more to report"
        remedy = "have all ranks call ray.train.report() equally often"
        return Finding(level="fail", about="reports unequally", message=message, remedy=remedy)
    return Finding(level="fail", about="fails undisturbed", message=text.strip().splitlines()[-1] if text else "?")


def _unknown(words: str) -> Finding:
    remedy = "report a counter that only grows, such as step, and save checkpoints at the same steps each time"
    return Finding(level="warn", about="not comparable", message=words, remedy=remedy)
