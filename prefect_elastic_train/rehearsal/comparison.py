"""Comparison of a training under faults with the undisturbed one, to find problems of the loop."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from prefect_elastic_train.loop.training_session import SESSION_FILE

from .certificate import Comparison, Problem
from .checker import Arrays, largest_difference, norm_difference, read_arrays
from .trace import COUNTERS, Trace, TracedReport

#: Limit of the relative difference of each array while the number of workers is that of the undisturbed training.
_SAME_SIZE_TOLERANCE = 1e-5
#: Limit for the norm of the state at the first checkpoint after the number of workers has changed.
RESIZE_TOLERANCE = 1e-3
#: Least limit for metrics at the first reports after the number of workers has changed.
_METRIC_TOLERANCE = 1e-2
#: Limit relative to the difference at the end of the worker group before: rounding differences grow with time.
_MAX_GROWTH = 30.0
_SESSION_REMEDY = "a session of prefect_elastic_train.loop does this"


class _ReportPair(NamedTuple):
    """Two reports of the same progress, of the undisturbed training and of the training under faults."""

    undisturbed: TracedReport
    disturbed: TracedReport

    @property
    def is_saved(self) -> bool:
        """True if both reports have a checkpoint."""
        return bool(self.undisturbed.checkpoint and self.disturbed.checkpoint)

    def states(self) -> tuple[Arrays, Arrays]:
        """Return the arrays in the checkpoints of both reports."""
        return read_arrays(self.undisturbed.checkpoint), read_arrays(self.disturbed.checkpoint)


class _Gap(NamedTuple):
    """Difference of two trainings at one report: of the state in their checkpoints, or of their metrics."""

    report: TracedReport  # in the training under faults
    size: float
    location: str


def diagnose_undisturbed(trace: Trace, is_time_up: bool = False) -> Problem | None:
    """Return the problem of a loop that its undisturbed training shows: a failed worker, or no checkpoint.

    Return None if there is no problem. If the training was stopped because the rehearsal's time is up (``is_time_up``),
    a loop without a checkpoint may just have been too slow.
    """
    if trace.worker_failures:
        causes = trace.worker_failures[0].causes
        if any("HungLoopError" in cause.message and "in report\n" in cause.traceback for cause in causes):
            waiting = trace.warnings.get("ranks-wait", "ranks waited in report() for others, which did not call it")
            return Problem("reports unequally", waiting, "call ray.train.report() on all ranks alike")
        return Problem("fails undisturbed", causes[0].message)
    if trace.saves:
        return None
    seconds = max(trace.progress_times, default=trace.started_at) - trace.started_at
    return Problem(
        "rehearsal incomplete" if is_time_up else "never saves",
        f"{len(trace.reports)} reports in {seconds:.0f} s, none with a checkpoint: a fault loses all progress",
        "save by ray.train.report(metrics, checkpoint=...) or in a session; if it does, give more minutes",
    )


def compare_trainings(
    undisturbed: Trace, disturbed: Trace, tolerance: float = RESIZE_TOLERANCE
) -> tuple[Comparison, Problem | None]:
    """Compare a training under faults with the undisturbed one, at reports of the same progress.

    Return the comparison, and the first problem of the loop that it shows or None.

    Args:
        undisturbed: Trace of the undisturbed training.
        disturbed: Trace of the training under faults.
        tolerance: Limit of the difference at the first checkpoint after the number of workers has changed.
    """
    comparer = _Comparer(undisturbed, disturbed, tolerance)
    problem = comparer.find_problem()
    comparison = Comparison(compared=problem.message if problem else comparer.summary())
    if comparer.has_state:
        comparison.difference = max((gap.size for gap in comparer.gaps), default=None)
    elif comparer.gaps:
        comparison.compared = f"the metrics, since no checkpoint could be read of both trainings: {comparison.compared}"
    if "checkpoint-ignored" in disturbed.warnings:
        problem = Problem("ignores its checkpoint", disturbed.warnings["checkpoint-ignored"])
    return comparison, problem


class _Comparer:
    """Comparison of a training under faults with the undisturbed one, one worker group after the other.

    The two must be the same at each report until the number of workers changes. From then on floats are added in
    another order, and the rounding differences may grow without limit. So only the first checkpoint after each change
    is compared.

    Attributes:
        pairs: The reports of the same progress.
        has_state: True if states in checkpoints are compared; False if they cannot be read, and metrics are compared.
        gaps: The differences that were compared with a limit.
    """

    def __init__(self, undisturbed: Trace, disturbed: Trace, tolerance: float) -> None:
        self._undisturbed = undisturbed
        self._disturbed = disturbed
        counter = undisturbed.counter()
        reports = {report.progress(counter): report for report in undisturbed.reports}
        self.pairs = [
            _ReportPair(reports[progress], report)
            for report in disturbed.reports
            if (progress := report.progress(counter)) in reports
        ]
        saved = [pair for pair in self.pairs if pair.is_saved]
        self.has_state = any(left.keys() & right.keys() for left, right in map(_ReportPair.states, saved))
        self._compared = saved if self.has_state else self.pairs
        self._tolerance = tolerance if self.has_state else max(tolerance, _METRIC_TOLERANCE)
        # Only a session with shards records its environment.
        self._session_files = [*undisturbed.folder.glob(f"*/{SESSION_FILE}")]
        self._has_shards = any("environment" in json.loads(file.read_text()) for file in self._session_files)
        self.gaps: list[_Gap] = []

    def find_problem(self) -> Problem | None:
        """Compare the two trainings, and return the first problem or None."""
        # A session reports means over the steps since its last report, whose number varies between checkpoints.
        if not self.has_state and self._session_files:
            return self._missing()
        sizes = [self._undisturbed.reports[0].world_size]
        previous = 0.0
        for group, size in self._disturbed.group_sizes.items():
            sizes.append(size)
            is_same_size = self._has_shards or len({*sizes}) == 1
            limit = max(_SAME_SIZE_TOLERANCE if is_same_size else self._tolerance, _MAX_GROWTH * previous)
            if self._has_shards:
                limit = 0.0
            pairs = [pair for pair in self._compared if pair.disturbed.group == group]
            gaps = self._gaps(pairs, is_same_size)
            limited = gaps
            if not is_same_size:
                saved = (number for number, pair in enumerate(pairs, 1) if pair.is_saved)
                limited = gaps[: 1 if self.has_state else max(next(saved, 2), 2)]
            for gap in limited:
                self.gaps.append(gap)
                if gap.size > limit:
                    return self._explain(gap, sizes)
            if gaps:
                previous = gaps[-1].size
        return self._missing()

    def _gaps(self, pairs: Sequence[_ReportPair], is_same_size: bool) -> list[_Gap]:
        """Return the differences of the two trainings in one worker group.

        States are compared at the first and at the last checkpoint that can be read, since reading them takes long;
        metrics at all reports. If the states at the last checkpoint are equal, the first one is not read.
        """
        if not self.has_state:
            return [*self._differences(pairs, is_same_size)]
        last = next(self._differences(reversed(pairs), is_same_size), None)
        if last is None:
            return []
        if is_same_size and not last.size:
            return [last]
        return [next(self._differences(pairs, is_same_size)), last]

    def _differences(self, pairs: Iterable[_ReportPair], is_same_size: bool) -> Iterator[_Gap]:
        """Yield the difference at each pair of reports whose metrics, or readable states, have a name in common."""
        for pair in pairs:
            left, right = pair.states() if self.has_state else (pair.undisturbed.metrics, pair.disturbed.metrics)
            if not left.keys() & right.keys():
                continue
            if self.has_state and not is_same_size:
                # A parameter without a real gradient moves by rounding noise alone, so only the norm is compared.
                yield _Gap(pair.disturbed, norm_difference(left, right), "the state")
            else:
                difference = largest_difference(left, right)
                yield _Gap(pair.disturbed, difference.size, f"{'' if self.has_state else 'metric '}{difference.name}")

    def _missing(self) -> Problem | None:
        """Return a problem if nothing was compared after a fault, or only counters; else None."""
        resumed = [*self._disturbed.group_sizes][1:]
        if not self.gaps or (resumed and self.gaps[-1].report.group < resumed[0]):
            return Problem(
                "not comparable",
                "no report or readable checkpoint after a fault has the same progress as an undisturbed one",
                "report a counter that only grows, such as step; save often, at the same steps each time: "
                "save_every=<steps>",
            )
        if not self.has_state and all(
            pair.undisturbed.metrics.keys() & pair.disturbed.metrics.keys() <= {*COUNTERS} for pair in self.pairs
        ):
            return Problem(
                "not comparable",
                "no array of both checkpoints could be read, and the only metrics are counters",
                "report the loss, too",
            )
        return None

    def summary(self) -> str:
        """Return a summary of a comparison that has found no problem."""
        largest = max(gap.size for gap in self.gaps)
        same = f"the same within {largest:.1g} (relative)" if largest else "bit for bit the same"
        summary = f"{same} after {self.gaps[-1].report.number} of {len(self._disturbed.reports)} reports"
        if largest > RESIZE_TOLERANCE:
            summary += "; rounding differences from adding floats in another order had grown by then"
        return summary

    def _explain(self, gap: _Gap, sizes: Sequence[int]) -> Problem:
        """Return the problem for a difference of the two trainings that is too large.

        Args:
            gap: The difference.
            sizes: Number of workers of the undisturbed training, and then of each worker group up to this one.
        """
        summary = (
            f"after {gap.report.number} reports {gap.location} differs by {gap.size:.2g} (relative) from the "
            "undisturbed training"
        )
        if self._has_shards:
            return Problem(
                "not bitwise identical",
                f"{summary}; with shards the weights must be bitwise identical",
                "look for the session's warning about this in the log; use only the global random generators, and only "
                "between getting a batch and session.backward(); pass all state to the session",
            )
        if sizes[-1] != sizes[-2]:
            history = ", then ".join(map(str, sizes[1:]))
            return Problem(
                "depends on the world size",
                f"{summary}; it had trained with {history} workers, not {sizes[0]} throughout",
                "keep the global batch, and with it the learning rate, the same at any number of workers, and the "
                f"order of samples a function of seed and step: {_SESSION_REMEDY}; if each rank computes statistics of "
                "its own samples, as torch's BatchNorm does, use statistics of all ranks, such as SyncBatchNorm",
            )
        if len(sizes) == 2:
            return Problem(
                "not deterministic",
                f"{summary}; no fault had been injected yet: two undisturbed trainings differ",
                "seed the model, the order of the data and every random generator, with the same seed each time; "
                "synchronize the model of several workers (torch: prepare_model); and let GPUs add in a fixed order: "
                "torch.use_deterministic_algorithms(True), XLA_FLAGS=--xla_gpu_deterministic_ops=true",
            )
        first = next(pair for pair in self.pairs if pair.disturbed.group == gap.report.group)
        return Problem(
            "does not restore all state",
            f"{summary}; {_explain_lost_state(first)}",
            "save and restore model, optimizer, schedule, random states and the position in the data: "
            f"{_SESSION_REMEDY}",
        )


def _explain_lost_state(first: _ReportPair) -> str:
    """Return a message about the part of a loop's state that is probably not restored.

    It is derived from the first pair of reports after a restart.
    """
    difference, name = largest_difference(first.undisturbed.metrics, first.disturbed.metrics)
    if difference <= _SAME_SIZE_TOLERANCE:
        return (
            "the first report after a resume is right, so state that it does not depend on is not restored: the "
            "optimizer's state, the schedule of its learning rate, or averaged weights"
        )
    return (
        f"the first report after a resume has {name} {first.disturbed.metrics[name]:.6g} instead of "
        f"{first.undisturbed.metrics[name]:.6g}, so the random state, the position in the data or a part of the model "
        "is not restored; if a report covers several steps, it may also be the optimizer's state or its schedule"
    )
