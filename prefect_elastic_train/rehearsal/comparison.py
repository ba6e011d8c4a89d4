"""Comparison of a training under faults with the undisturbed one, to find problems of the loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from prefect_elastic_train.core.causes import short_message
from prefect_elastic_train.loop.cadence import best_interval
from prefect_elastic_train.loop.training_session import SESSION_FILE
from prefect_elastic_train.rehearsal.certificate import Problem
from prefect_elastic_train.rehearsal.checker import (
    float_arrays,
    is_performance_metric,
    largest_difference,
    norm_difference,
    read_arrays,
)
from prefect_elastic_train.rehearsal.trace import COUNTERS, Trace, TracedReport

#: Limit of the relative difference of each array while the number of workers is that of the undisturbed training.
_SAME_SIZE_TOLERANCE = 1e-5
#: Limit for the norm of the state at the first checkpoint after the number of workers has changed.
RESIZE_TOLERANCE = 1e-3
#: Least limit for metrics at the first reports after the number of workers has changed.
_METRIC_TOLERANCE = 1e-2
#: Limit relative to the difference at the end of the worker group before: rounding differences grow with time.
_MAX_GROWTH = 30.0
#: A loop saves rarely if its interval is longer than this many times the best one.
_RARE_FACTOR = 4.0
_SECONDS_BETWEEN_FAILURES = 3600.0
_MIN_BEST_INTERVAL_SECONDS = 10.0
_MIN_SAVE_SECONDS = 0.01
_NOT_COMPARABLE = "not comparable"
_SAME_PROGRESS_REMEDY = (
    "report a counter that only grows, such as step; save often, at the same steps each time: save_every=<steps>"
)
_SESSION_REMEDY = "a session of prefect_elastic_train.loop does this"


class Comparison(NamedTuple):
    """Result of the comparison of a training under faults with the undisturbed one, for the certificate's fields."""

    compared: str
    problems: list[Problem]
    difference: float | None
    metrics: dict[str, float]
    undisturbed_metrics: dict[str, float]


class _ReportPair(NamedTuple):
    """Two reports of the same progress, of the undisturbed training and of the training under faults.

    ``report_index`` is the index of the report in the training under faults.
    """

    report_index: int
    undisturbed: TracedReport
    disturbed: TracedReport

    @property
    def is_saved(self) -> bool:
        """True if both reports have a checkpoint."""
        return bool(self.undisturbed.checkpoint and self.disturbed.checkpoint)

    @property
    def has_result(self) -> bool:
        """True if the two reports share a metric that is neither a counter nor about performance."""
        names = self.undisturbed.metrics.keys() & self.disturbed.metrics.keys()
        return not all(name in COUNTERS or is_performance_metric(name) for name in names)


class _Gap(NamedTuple):
    """Difference of two trainings at one pair of reports: of the state in their checkpoints, or of their metrics.

    Metrics are compared if no state can be read.
    """

    pair: _ReportPair
    size: float
    location: str
    is_state: bool


def diagnose_undisturbed(trace: Trace) -> list[Problem]:
    """Return the problem of a loop that its undisturbed training shows; an empty list if there is none.

    The problem is a failed worker, no checkpoint, or a long time between two checkpoints.
    """
    if trace.worker_failures:
        return [_diagnose_failure(trace.worker_failures[0].errors)]
    if not trace.saves:
        seconds = max(trace.progress_times, default=trace.started_at) - trace.started_at
        message = f"{len(trace.reports)} reports in {seconds:.0f} s, none with a checkpoint: a fault loses all progress"
        remedy = "save by ray.train.report(metrics, checkpoint=...) or in a session; if it does, give more minutes"
        return [Problem(about="never saves", message=message, remedy=remedy)]
    interval = trace.save_interval()
    save_seconds = max(trace.stall_seconds / len(trace.saves), _MIN_SAVE_SECONDS)
    best = max(best_interval(save_seconds, _SECONDS_BETWEEN_FAILURES), _MIN_BEST_INTERVAL_SECONDS)
    if interval < _RARE_FACTOR * best:
        return []
    message = f"it saves each {interval:.0f} s, and a save blocks the loop for {save_seconds:.2g} s"
    remedy = f"with one failure an hour, a save each {best:.0f} s loses least; a session's save_every='auto' finds it"
    return [Problem(level="warn", about="saves rarely", message=message, remedy=remedy)]


def compare_trainings(
    undisturbed: Trace,
    disturbed: Trace,
    undisturbed_folder: Path,
    disturbed_folder: Path,
    tolerance: float = RESIZE_TOLERANCE,
) -> Comparison:
    """Compare a training under faults with the undisturbed one, at reports of the same progress.

    Args:
        undisturbed, disturbed: Traces of the undisturbed training and of the training under faults.
        undisturbed_folder, disturbed_folder: Run directories of the two trainings.
        tolerance: Limit of the difference at the first checkpoint after the number of workers has changed.
    """
    pairs = _pair_reports(undisturbed, disturbed)
    if any(undisturbed_folder.glob(f"*/{SESSION_FILE}")):
        # A session reports means over the steps since its last report, whose number varies between checkpoints.
        pairs = [pair for pair in pairs if pair.is_saved]
    ignored = disturbed.ignored_checkpoint
    problems = [Problem(about="ignores its checkpoint", message=ignored)] if ignored else []
    if not pairs:
        message = "the two trainings have no report of the same progress"
        not_comparable = Problem(about=_NOT_COMPARABLE, message=message, remedy=_SAME_PROGRESS_REMEDY)
        return Comparison(message, problems or [not_comparable], None, {}, {})
    comparer = _Comparer(undisturbed, disturbed, undisturbed_folder, disturbed_folder, pairs, tolerance)
    summary, problem = comparer.compare()
    differences = [gap.size for gap in comparer.gaps if gap.is_state]
    if not differences:
        summary = f"no checkpoint of both could be read, so the metrics were compared: {summary}"
    if not (problem or differences or any(pair.has_result for pair in pairs)):
        message = "no array of both checkpoints could be read, and the only metrics are counters"
        problem = Problem(about=_NOT_COMPARABLE, message=message, remedy="report the loss, too")
    if problem and not problems:
        problems = [problem]
    last = max(pairs, key=lambda pair: pair.report_index)
    return Comparison(
        summary, problems, max(differences, default=None), last.disturbed.metrics, last.undisturbed.metrics
    )


def _pair_reports(undisturbed: Trace, disturbed: Trace) -> list[_ReportPair]:
    """Return the pairs of reports of two trainings that have the same progress, in the order of progress."""
    counter = undisturbed.counter()
    reports = {undisturbed.progress(index, counter): report for index, report in enumerate(undisturbed.reports)}
    indices = {disturbed.progress(index, counter): index for index in range(len(disturbed.reports))}
    return [
        _ReportPair(indices[progress], reports[progress], disturbed.reports[indices[progress]])
        for progress in sorted(reports.keys() & indices.keys())
    ]


@dataclass
class _Comparer:
    """Comparison of a training under faults with the undisturbed one, one worker group after the other.

    The two must be the same at each report until the number of workers changes. From then on floats are added in
    another order, and the rounding differences may grow without limit. So only the first checkpoint after each change
    is compared.

    Attributes:
        pairs: The reports to compare.
        gaps: The differences that were computed.
    """

    undisturbed: Trace
    disturbed: Trace
    undisturbed_folder: Path
    disturbed_folder: Path
    pairs: Sequence[_ReportPair]
    tolerance: float
    gaps: list[_Gap] = field(default_factory=list)

    def compare(self) -> tuple[str, Problem | None]:
        """Compare the two trainings. Return a summary of the comparison, and the first problem or None."""
        sizes = [self.undisturbed.reports[0].world_size]
        previous = 0.0
        for group, size in self.disturbed.group_sizes.items():
            sizes.append(size)
            is_same_size = len({*sizes}) == 1
            pairs = [pair for pair in self.pairs if pair.disturbed.group == group]
            for gap in self._gaps_since_equal_state(pairs) if is_same_size else self._first_gaps(pairs):
                self.gaps.append(gap)
                limit = _SAME_SIZE_TOLERANCE if is_same_size else self._resize_tolerance(gap)
                if gap.size > max(limit, _MAX_GROWTH * previous):
                    return self._explain(gap, pairs[0], sizes)
            if pairs:
                previous = (self.gaps[-1] if is_same_size else self._gap(pairs[-1])).size
        return self._summarize()

    def _resize_tolerance(self, gap: _Gap) -> float:
        return self.tolerance if gap.is_state else max(self.tolerance, _METRIC_TOLERANCE)

    def _gaps_since_equal_state(self, pairs: Sequence[_ReportPair]) -> list[_Gap]:
        """Return the differences of the two trainings at pairs of reports, from the last pair with equal states on.

        Only states are compared. If none can be read, the differences of the metrics of all pairs are returned.
        """
        gaps: list[_Gap] = []
        for pair in reversed(pairs):
            gaps.insert(0, self._gap(pair, is_same_size=True))
            if gaps[0].is_state and not gaps[0].size:
                break
        return [gap for gap in gaps if gap.is_state] or gaps

    def _first_gaps(self, pairs: Sequence[_ReportPair]) -> list[_Gap]:
        """Return the difference of the two trainings at the first pair of reports with checkpoints, as a list.

        If the states cannot be read, return the differences of the metrics up to that pair, of two pairs at least.
        """
        first_saved = next((number for number, pair in enumerate(pairs, 1) if pair.is_saved), 2)
        gaps = [self._gap(pair) for pair in pairs[: max(first_saved, 2)]]
        return [gap for gap in gaps if gap.is_state][:1] or gaps

    def _gap(self, pair: _ReportPair, is_same_size: bool = False) -> _Gap:
        """Return the difference of the two trainings at a pair of reports: in checkpoints, or else in metrics."""
        if pair.is_saved:
            left = float_arrays(read_arrays(self.undisturbed_folder / pair.undisturbed.checkpoint))
            right = float_arrays(read_arrays(self.disturbed_folder / pair.disturbed.checkpoint))
            if left.keys() & right.keys():
                if is_same_size:
                    return _Gap(pair, *largest_difference(left, right), is_state=True)
                # A parameter without a real gradient moves by rounding noise alone, so only the norm is compared.
                return _Gap(pair, norm_difference(left, right), "the state", is_state=True)
        difference = largest_difference(pair.undisturbed.metrics, pair.disturbed.metrics)
        return _Gap(pair, difference.size, f"metric {difference.name}", is_state=False)

    def _summarize(self) -> tuple[str, Problem | None]:
        """Return a summary if no difference is too large, and a problem if no report after a fault was compared."""
        last = self.gaps[-1].pair
        resumed = [*self.disturbed.group_sizes][1:]
        beyond = [group for group in resumed if group > last.disturbed.group]
        if resumed and resumed == beyond:
            message = "no report or checkpoint after a fault has the same progress as an undisturbed one"
            return message, Problem(about=_NOT_COMPARABLE, message=message, remedy=_SAME_PROGRESS_REMEDY)
        largest = max(gap.size for gap in self.gaps)
        same = f"the same within {largest:.1g} (relative)" if largest else "bit for bit the same"
        summary = f"{same} after {last.report_index + 1} reports"
        if largest > RESIZE_TOLERANCE:
            summary += "; rounding differences from adding floats in another order had grown by then"
        if beyond:
            summary += f"; not compared: the reports after the last {len(beyond)} of {len(resumed)} resumes, which "
            summary += "are further than the undisturbed training"
        return summary, None

    def _explain(self, gap: _Gap, first: _ReportPair, sizes: Sequence[int]) -> tuple[str, Problem]:
        """Return a summary and a problem for a difference of the two trainings that is too large.

        Args:
            gap: The difference.
            first: First pair of reports of the worker group with the difference.
            sizes: Number of workers of the undisturbed training, and then of each worker group up to this one.
        """
        summary = (
            f"after {gap.pair.report_index + 1} reports {gap.location} differs by {gap.size:.2g} (relative) from the "
            "undisturbed training"
        )
        if sizes[-1] != sizes[-2]:
            about = "depends on the world size"
            history = ", then ".join(map(str, sizes[1:]))
            message = f"it had trained with {history} workers, not {sizes[0]} throughout"
            remedy = (
                "keep the global batch, and with it the learning rate, the same at any number of workers, and the "
                f"order of samples a function of seed and step: {_SESSION_REMEDY}; if each rank computes statistics of "
                "its own samples, as torch's BatchNorm does, use statistics of all ranks, such as SyncBatchNorm"
            )
        elif len(sizes) == 2:
            about = "not deterministic"
            message = "no fault had been injected yet: two undisturbed trainings differ"
            remedy = (
                "seed the model, the order of the data and every random generator, with the same seed each time; "
                "synchronize the model of several workers (torch: prepare_model); and let GPUs add in a fixed order: "
                "torch.use_deterministic_algorithms(True), XLA_FLAGS=--xla_gpu_deterministic_ops=true"
            )
        else:
            about = "does not restore all state"
            message = _explain_lost_state(first)
            remedy = (
                "save and restore model, optimizer, schedule, random states and the position in the data: "
                f"{_SESSION_REMEDY}"
            )
        return summary, Problem(about=about, message=f"{summary}; {message}", remedy=remedy)


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


def _diagnose_failure(errors: dict[str, str]) -> Problem:
    """Return the problem of a loop that fails undisturbed: ranks that wait in ``report()``, or another error.

    Args:
        errors: Error of each failed rank.
    """
    waiting = [rank for rank, error in errors.items() if "HungLoopError" in error and "in report\n" in error]
    if waiting:
        message = f"rank {', '.join(waiting)} waited in report() for the other ranks, which did not call it"
        remedy = "have all ranks call ray.train.report() equally often"
        return Problem(about="reports unequally", message=message, remedy=remedy)
    message = short_message(next(iter(errors.values()), "no error was reported"))
    remedy = "report more often, or give more minutes" if "HungLoopError" in message else ""
    return Problem(about="fails undisturbed", message=message, remedy=remedy)
