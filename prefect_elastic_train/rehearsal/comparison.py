"""Comparison of a training under faults with the undisturbed one, to find problems of the loop."""

from collections.abc import Sequence
from typing import NamedTuple

from prefect_elastic_train.core.causes import Cause, format_ranks
from prefect_elastic_train.loop.cadence import best_interval
from prefect_elastic_train.loop.training_session import SESSION_FILE
from prefect_elastic_train.rehearsal.certificate import Problem
from prefect_elastic_train.rehearsal.checker import (
    Arrays,
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


class _Gap(NamedTuple):
    """Difference of two trainings at one pair of reports: of the state in their checkpoints, or of their metrics."""

    pair: _ReportPair
    size: float
    location: str


def diagnose_undisturbed(trace: Trace) -> list[Problem]:
    """Return the problem of a loop that its undisturbed training shows; an empty list if there is none.

    The problem is a failed worker, no checkpoint, or a long time between two checkpoints.
    """
    if trace.worker_failures:
        return [_diagnose_failure(trace.worker_failures[0].causes)]
    if not trace.saves:
        seconds = max(trace.progress_times, default=trace.started_at) - trace.started_at
        return [
            Problem(
                "never saves",
                f"{len(trace.reports)} reports in {seconds:.0f} s, none with a checkpoint: a fault loses all progress",
                "save by ray.train.report(metrics, checkpoint=...) or in a session; if it does, give more minutes",
            )
        ]
    interval = (trace.reports[trace.saves[-1]].at - trace.started_at) / len(trace.saves)
    save_seconds = max(trace.stall_seconds / len(trace.saves), _MIN_SAVE_SECONDS)
    best = max(best_interval(save_seconds, _SECONDS_BETWEEN_FAILURES), _MIN_BEST_INTERVAL_SECONDS)
    if interval < _RARE_FACTOR * best:
        return []
    return [
        Problem(
            "saves rarely",
            f"it saves each {interval:.0f} s, and a save blocks the loop for {save_seconds:.2g} s",
            f"with one failure an hour, a save each {best:.0f} s loses least; a session's save_every='auto' finds it",
            "warn",
        )
    ]


def compare_trainings(undisturbed: Trace, disturbed: Trace, tolerance: float = RESIZE_TOLERANCE) -> Comparison:
    """Compare a training under faults with the undisturbed one, at reports of the same progress.

    Args:
        undisturbed: Trace of the undisturbed training.
        disturbed: Trace of the training under faults.
        tolerance: Limit of the difference at the first checkpoint after the number of workers has changed.
    """
    comparer = _Comparer(undisturbed, disturbed, tolerance)
    pairs = comparer.pairs
    ignored = disturbed.ignored_checkpoint
    problems = [Problem("ignores its checkpoint", ignored)] if ignored else []
    # A session reports means over the steps since its last report, whose number varies between checkpoints.
    has_session = any(undisturbed.folder.glob(f"*/{SESSION_FILE}"))
    if not pairs or (has_session and not comparer.has_state):
        message = "the two trainings have no report of the same progress that can be compared"
        not_comparable = Problem(_NOT_COMPARABLE, message, _SAME_PROGRESS_REMEDY)
        return Comparison(message, problems or [not_comparable], None, {}, {})
    summary, problem = comparer.compare()
    if not comparer.has_state:
        summary = f"no checkpoint could be read of both trainings, so the metrics were compared: {summary}"
        names = {name for pair in pairs for name in pair.undisturbed.metrics.keys() & pair.disturbed.metrics.keys()}
        if not problem and all(name in COUNTERS or is_performance_metric(name) for name in names):
            message = "no array of both checkpoints could be read, and the only metrics are counters"
            problem = Problem(_NOT_COMPARABLE, message, "report the loss, too")
    if problem and not problems:
        problems = [problem]
    difference = max(gap.size for gap in comparer.gaps) if comparer.has_state else None
    return Comparison(summary, problems, difference, pairs[-1].disturbed.metrics, pairs[-1].undisturbed.metrics)


def _pair_reports(undisturbed: Trace, disturbed: Trace) -> list[_ReportPair]:
    """Return the pairs of reports of two trainings that have the same progress."""
    counter = undisturbed.counter()
    reports = {undisturbed.progress(index, counter): report for index, report in enumerate(undisturbed.reports)}
    return [
        _ReportPair(index, reports[progress], report)
        for index, report in enumerate(disturbed.reports)
        if (progress := disturbed.progress(index, counter)) in reports
    ]


class _Comparer:
    """Comparison of a training under faults with the undisturbed one, one worker group after the other.

    The two must be the same at each report until the number of workers changes. From then on floats are added in
    another order, and the rounding differences may grow without limit. So only the first checkpoint after each change
    is compared.

    Attributes:
        pairs: The reports of the same progress.
        has_state: True if states in checkpoints are compared; False if they cannot be read, and metrics are compared.
        gaps: The differences that were computed.
    """

    def __init__(self, undisturbed: Trace, disturbed: Trace, tolerance: float) -> None:
        self._undisturbed = undisturbed
        self._disturbed = disturbed
        self.pairs = _pair_reports(undisturbed, disturbed)
        states = (self._states(pair) for pair in self.pairs if pair.is_saved)
        self.has_state = any(left.keys() & right.keys() for left, right in states)
        self._tolerance = tolerance if self.has_state else max(tolerance, _METRIC_TOLERANCE)
        self.gaps: list[_Gap] = []

    def compare(self) -> tuple[str, Problem | None]:
        """Compare the two trainings. Return a summary of the comparison, and the first problem or None."""
        sizes = [self._undisturbed.reports[0].world_size]
        previous = 0.0
        for group, size in self._disturbed.group_sizes.items():
            sizes.append(size)
            is_same_size = len({*sizes}) == 1
            limit = max(_SAME_SIZE_TOLERANCE if is_same_size else self._tolerance, _MAX_GROWTH * previous)
            of_group = [pair for pair in self.pairs if pair.disturbed.group == group]
            pairs = [pair for pair in of_group if pair.is_saved or not self.has_state]
            for gap in self._gaps(pairs, is_same_size):
                self.gaps.append(gap)
                if gap.size > limit:
                    return self._explain(gap, of_group[0], sizes)
            if pairs and (last := self._gap(pairs[-1], is_same_size)):
                previous = last.size
        return self._summarize()

    def _gaps(self, pairs: Sequence[_ReportPair], is_same_size: bool) -> list[_Gap]:
        """Return the differences of the two trainings in one worker group.

        With as many workers as in the undisturbed training, states are compared from the last pair of reports with
        equal states on, and metrics at all pairs. With another number of workers, states are compared at the first pair
        with checkpoints, and metrics at all pairs up to that one, at least at two.
        """
        if not (is_same_size or self.has_state):
            first_saved = next((number for number, pair in enumerate(pairs, 1) if pair.is_saved), 2)
            pairs = pairs[: max(first_saved, 2)]
        gaps: list[_Gap] = []
        for pair in pairs if self.has_state and not is_same_size else reversed(pairs):
            if gap := self._gap(pair, is_same_size):
                gaps.insert(0, gap)
                if self.has_state and not (is_same_size and gap.size):
                    break
        return gaps

    def _gap(self, pair: _ReportPair, is_same_size: bool) -> _Gap | None:
        """Return the difference of the two trainings at a pair of reports: in checkpoints, or else in metrics.

        Return None for checkpoints without a common array.
        """
        if not self.has_state:
            difference = largest_difference(pair.undisturbed.metrics, pair.disturbed.metrics)
            return _Gap(pair, difference.size, f"metric {difference.name}")
        left, right = self._states(pair)
        if not left.keys() & right.keys():
            return None
        if is_same_size:
            return _Gap(pair, *largest_difference(left, right))
        # A parameter without a real gradient moves by rounding noise alone, so only the norm is compared.
        return _Gap(pair, norm_difference(left, right), "the state")

    def _states(self, pair: _ReportPair) -> tuple[Arrays, Arrays]:
        """Return the arrays of floats in the two checkpoints of a pair of reports."""
        undisturbed = read_arrays(self._undisturbed.folder / pair.undisturbed.checkpoint)
        disturbed = read_arrays(self._disturbed.folder / pair.disturbed.checkpoint)
        return float_arrays(undisturbed), float_arrays(disturbed)

    def _summarize(self) -> tuple[str, Problem | None]:
        """Return a summary if no difference is too large, and a problem if no report after a fault was compared."""
        last = self.gaps[-1].pair
        resumed = [*self._disturbed.group_sizes][1:]
        beyond = [group for group in resumed if group > last.disturbed.group]
        if resumed and resumed == beyond:
            message = "no report or checkpoint after a fault has the same progress as an undisturbed one"
            return message, Problem(_NOT_COMPARABLE, message, _SAME_PROGRESS_REMEDY)
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
            history = ", then ".join(map(str, sizes[1:]))
            problem = Problem(
                "depends on the world size",
                f"{summary}; it had trained with {history} workers, not {sizes[0]} throughout",
                "keep the global batch, and with it the learning rate, the same at any number of workers, and the "
                f"order of samples a function of seed and step: {_SESSION_REMEDY}; if each rank computes statistics of "
                "its own samples, as torch's BatchNorm does, use statistics of all ranks, such as SyncBatchNorm",
            )
        elif len(sizes) == 2:
            problem = Problem(
                "not deterministic",
                f"{summary}; no fault had been injected yet: two undisturbed trainings differ",
                "seed the model, the order of the data and every random generator, with the same seed each time; "
                "synchronize the model of several workers (torch: prepare_model); and let GPUs add in a fixed order: "
                "torch.use_deterministic_algorithms(True), XLA_FLAGS=--xla_gpu_deterministic_ops=true",
            )
        else:
            problem = Problem(
                "does not restore all state",
                f"{summary}; {_explain_lost_state(first)}",
                "save and restore model, optimizer, schedule, random states and the position in the data: "
                f"{_SESSION_REMEDY}",
            )
        return summary, problem


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


def _diagnose_failure(causes: Sequence[Cause]) -> Problem:
    """Return the problem of a loop that fails undisturbed: ranks that wait in ``report()``, or another error.

    Args:
        causes: The causes of the failure.
    """
    hung = [cause for cause in causes if "HungLoopError" in cause.message and "in report\n" in cause.traceback]
    if hung:
        waiting = format_ranks(rank for cause in hung for rank in cause.ranks)
        message = f"{waiting} waited in report() for the other ranks, which did not call it"
        return Problem("reports unequally", message, "call ray.train.report() on all ranks alike")
    message = causes[0].message if causes else "no error was reported"
    return Problem("fails undisturbed", message)
