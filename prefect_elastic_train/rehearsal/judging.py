"""What is wrong with a loop, by its undisturbed training and a disturbed one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from prefect_elastic_train.core.ray_output import cause
from prefect_elastic_train.loop.cadence import best_interval
from prefect_elastic_train.loop.training_session import SESSION_FILE
from prefect_elastic_train.rehearsal.certificate import Finding
from prefect_elastic_train.rehearsal.checker import calculated, distance, is_clock, numbers_in, whole_distance
from prefect_elastic_train.rehearsal.course import COUNTERS, Course, Seen

#: How far apart, relative to the largest number of an array, is noise of the order in which floats are added: with as
#: many workers as undisturbed, and soon after there are fewer or more, in a state as a whole and in what is reported.
_NOISE, NOISE_OF_RESIZES, _NOISE_OF_METRICS = 1e-5, 1e-3, 1e-2
_GROWTH = 30.0  # times it may be what it was before
#: How much longer than best an interval between saves may be, if one failure comes in so many seconds.
_RARELY, _FAILURES_EACH_SECONDS, _LEAST_SECONDS = 4.0, 3600.0, 10.0
fail = partial(Finding, level="fail")
_NOTHING = "not comparable"
_ALIKE = "report a counter that only grows, such as step; save often, at the same steps each time: save_every=<steps>"
_A_SESSION = "a session of prefect_elastic_train.loop does"


class Comparison(NamedTuple):
    """How a disturbed training stands to the undisturbed one: as of a certificate."""

    compared: str
    findings: list[Finding]
    difference: float | None
    metrics: dict[str, float]
    undisturbed_metrics: dict[str, float]


def of_undisturbed(course: Course) -> list[Finding]:
    """Return what an undisturbed training shows already."""
    if course.failures:
        return [_stuck(course.failures[0].errors)]
    if not course.commits:
        seconds = max(course.news, default=course.started_at) - course.started_at
        told = f"{len(course.reports)} reports in {seconds:.0f} s, none with a checkpoint: whatever dies, all is lost"
        remedy = "save by ray.train.report(metrics, checkpoint=...) or in a session; if it does, give more minutes"
        return [fail(about="never saves", message=told, remedy=remedy)]
    every = course.save_seconds()
    cost = max(course.stalled / len(course.commits), 0.01)
    best = max(best_interval(cost, _FAILURES_EACH_SECONDS), _LEAST_SECONDS)
    if every < _RARELY * best:
        return []
    message = f"it saves each {every:.0f} s, and a save keeps the steps waiting for {cost:.2g} s"
    remedy = f"with one failure an hour, a save each {best:.0f} s loses least; a session's save_every='auto' finds it"
    return [Finding(level="warn", about="saves rarely", message=message, remedy=remedy)]


def compare(
    one: Course, other: Course, of_one: Path, of_other: Path, tolerance: float = NOISE_OF_RESIZES
) -> Comparison:
    """Hold a disturbed training against the undisturbed ``one``; their run directories are those."""
    counter = one.counter()
    here = {one.progress(place, counter): place for place in range(len(one.reports))}
    there = {other.progress(place, counter): place for place in range(len(other.reports))}
    common = {there[at]: here[at] for at in sorted(here.keys() & there.keys())}
    if any(of_one.glob(f"*/{SESSION_FILE}")):  # a session reports means over different numbers of steps
        is_saved = {its: one.reports[mine].checkpoint and other.reports[its].checkpoint for its, mine in common.items()}
        common = {its: mine for its, mine in common.items() if is_saved[its]}
    findings = [fail(about="ignores its checkpoint", message=other.ignored)] if other.ignored else []
    if not common:
        words = "no report of the one is as far as one of the other's, so there is nothing to compare"
        return Comparison(words, findings or [fail(about=_NOTHING, message=words, remedy=_ALIKE)], None, {}, {})
    pair, last = _Pair(one, other, (of_one, of_other), common, tolerance), max(common)
    words, wrong = pair.verdict()
    states = [point.gap for point in pair.judged if point.is_state]
    words = words if states else f"no checkpoint of both could be read, so what was reported was compared: {words}"
    mine, its = pair.reports(last)
    if not states and not any(_tell(*pair.reports(place)) for place in common):
        told = "no array of both checkpoints could be read, and nothing is reported but how far the loop is"
        wrong = wrong or [fail(about=_NOTHING, message=told, remedy="report the loss, too")]
    return Comparison(words, findings or wrong, max(states, default=None), its.metrics, mine.metrics)


class _Point(NamedTuple):
    """How far two trainings are apart at a place, and in what: in their checkpoints, else in what was reported."""

    place: int
    gap: float
    where: str
    is_state: bool


@dataclass
class _Pair:
    """An undisturbed training and a disturbed one; ``common`` has the places of the latter, and those of the former.

    Until the number of workers changes the two are to be the same at each place. Since then floats are added in
    another order, and what begins as their noise may grow to anything: the first checkpoint after a change is judged.
    """

    one: Course
    other: Course
    folders: tuple[Path, Path]
    common: dict[int, int]
    tolerance: float
    judged: list[_Point] = field(default_factory=list)

    def verdict(self) -> tuple[str, list[Finding]]:
        """Return how the two compare, in words, and what is wrong if something is."""
        sizes, noise, is_same = [self.one.reports[0].world], 0.0, True
        for start, end, size in self._groups():
            inside = [place for place in self.common if start <= place < end]
            sizes, is_same = [*sizes, size], is_same and size == sizes[0]
            for point in self._all_of(inside) if is_same else self._first_of(inside):
                self.judged.append(point)
                limit = self.tolerance if point.is_state else max(self.tolerance, _NOISE_OF_METRICS)
                limit = _NOISE if is_same else limit
                if point.gap > max(limit, _GROWTH * noise):
                    return self._wrong(point, sizes[1:] if size != sizes[-2] else [], inside[0] if start else -1)
            if inside:
                noise = self.judged[-1].gap if is_same else self._point(inside[-1]).gap
        resumes = [start for start, *_ in self._groups() if start]
        beyond = [start for start in resumes if start > self.judged[-1].place]
        if resumes and resumes == beyond:
            words = "nothing that was reported or saved after a fault is as far as something undisturbed"
            return words, [fail(about=_NOTHING, message=words, remedy=_ALIKE)]
        worst = max(point.gap for point in self.judged)
        same = f"the same within {worst:.1g} (relative)" if worst else "bit for bit the same"
        noisy = "; there the noise of floats that are added in another order had grown" * (worst > NOISE_OF_RESIZES)
        further = f"; not compared: what the last {len(beyond)} of {len(resumes)} resumes led to, which is further"
        return f"after {self.judged[-1].place + 1} reports it is {same}{noisy}{further if beyond else ''}", []

    def reports(self, place: int) -> tuple[Seen, Seen]:
        """Return the reports of the two at a place of both."""
        return self.one.reports[self.common[place]], self.other.reports[place]

    def _groups(self) -> Iterator[tuple[int, int, int]]:
        """Yield from which place to which other one the reports of a worker group count, and its size."""
        found = [(0, self.other.reports[0].world)]
        for kept, size in self.other.resumes:
            found = [*(one for one in found if one[0] < kept), (kept, size)]
        for (start, size), (end, _) in pairwise([*found, (len(self.other.reports), 0)]):
            yield start, end, size

    def _all_of(self, places: list[int]) -> list[_Point]:
        """Those with a state that both have kept, back to one that is the same; if there is none, all."""
        points: list[_Point] = []
        for place in reversed(places):
            points.insert(0, self._point(place, is_same=True))
            if points[0].is_state and not points[0].gap:
                break
        return [point for point in points if point.is_state] or points

    def _first_of(self, places: list[int]) -> list[_Point]:
        """The first with a checkpoint in both; if that cannot be read, what was reported until then, twice at least."""
        pairs = enumerate(map(self.reports, places), 1)
        saved = (number for number, pair in pairs if all(seen.checkpoint for seen in pair))
        points = [self._point(place) for place in places[: max(next(saved, 2), 2)]]
        return [point for point in points if point.is_state][:1] or points

    def _point(self, place: int, is_same: bool = False) -> _Point:
        pair = self.reports(place)
        if all(seen.checkpoint for seen in pair):
            folders = [folder / seen.checkpoint for folder, seen in zip(self.folders, pair, strict=True)]
            states = [calculated(numbers_in(folder)) for folder in folders]
            if states[0].keys() & states[1].keys():
                # A number whose gradient is nothing but noise may be anything once the noise is another: see the whole.
                return _Point(place, *(distance(*states) if is_same else (whole_distance(*states), "the state")), True)
        gap, where = distance(pair[0].metrics, pair[1].metrics)
        return _Point(place, gap, f"metric {where}", False)

    def _wrong(self, point: _Point, resized: list[int], resumed: int) -> tuple[str, list[Finding]]:
        words = (
            f"after {point.place + 1} reports {point.where} is {point.gap:.2g} (relative) from the undisturbed "
            "training's"
        )
        if resized:
            about, before = "depends on the world size", ", then ".join(map(str, resized))
            message = f"it had trained with {before} workers, not {self.one.reports[0].world} throughout"
            remedy = (
                "keep the global batch, and with it the learning rate, the same at any number of workers, and the "
                f"order of samples a function of seed and step: {_A_SESSION}; statistics that each rank takes of "
                "its own samples, as torch's BatchNorm does, are others: SyncBatchNorm"
            )
        elif resumed < 0:
            about, message = "not deterministic", "nothing had happened to either: two undisturbed trainings differ"
            remedy = (
                "seed the model, the order of the data and every random generator, with the same seed each time, "
                "let several workers train one model (torch: prepare_model), and GPUs add in one order: "
                "torch.use_deterministic_algorithms(True), XLA_FLAGS=--xla_gpu_deterministic_ops=true"
            )
        else:
            pair, now = self.reports(resumed), self.reports(point.place)
            about, message = "forgets a part of its state", _forgotten(pair[0].metrics, pair[1].metrics)
            gaps = [distance(mine.metrics, its.metrics)[0] for mine, its in (pair, now)]
            if point.is_state and point.place > resumed and _tell(*now) and max(gaps) <= _NOISE:
                message = (
                    "what was reported is right, so what no report shows is not restored, such as averaged weights"
                )
            remedy = (
                f"save and restore model, optimizer, schedule, random states and the place in the data: {_A_SESSION}"
            )
        return words, [fail(about=about, message=f"{words}; {message}", remedy=remedy)]


def _tell(mine: Seen, its: Seen) -> bool:
    """Whether two reports have something in common beside how far they are and what was different each time."""
    return not all(name in COUNTERS or is_clock(name) for name in mine.metrics.keys() & its.metrics.keys())


def _forgotten(mine: dict[str, float], its: dict[str, float]) -> str:
    """Say what a loop forgets, as far as its first report after a resume tells."""
    gap, name = distance(mine, its)
    if gap <= _NOISE:
        return (
            "the first report after a resume is right and later ones are not, so what makes the update is not "
            "restored: the optimizer's state, or the schedule of its learning rate"
        )
    return (
        f"the first report after a resume has {name} {its[name]:.6g} instead of {mine[name]:.6g}, so the random "
        "state, the place in the data or a part of the model is not restored, or, where a report stands for "
        "several steps, what makes the update"
    )


def _stuck(errors: dict[str, str]) -> Finding:
    """Say which ranks wait in a report for others that do not, or what else has gone wrong."""
    waiting = [rank for rank, error in errors.items() if "HungLoopError" in error and "in report\n" in error]
    if not waiting:
        why = cause(next(iter(errors.values()), "no reason was told"))
        remedy = "report more often, or give more minutes" if "HungLoopError" in why else ""
        return fail(about="fails undisturbed", message=why, remedy=remedy)
    message = f"rank {', '.join(waiting)} waited in report() for the others, which did not come to theirs"
    remedy = "have all ranks call ray.train.report() equally often"
    return fail(about="reports unequally", message=message, remedy=remedy)
