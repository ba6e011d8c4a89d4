"""The metrics of a session: means and last values since the last report, and the score."""

import logging
from collections.abc import Collection, Mapping
from typing import Any

from prefect_elastic_train.trackers.tracker import scalar

logger = logging.getLogger(__name__)

#: Largest number of consecutive steps that are saved for their scores. With more, the loop scores every step.
_MAX_SCORES_IN_A_ROW = 2


class StepMetrics:
    """Metrics that a train loop has passed to its session since the last report.

    Args:
        means: Name or names of metrics that are reported as their mean. Others are reported by their last value.
        score: Name of the metric that ranks checkpoints; empty: none.
        warn: If True, log a warning about a score that is None at each step.
    """

    _scored_at = 0  # the last step with a score
    _scores_in_a_row = 0  # number of consecutive steps with a score, up to that step
    _reported_at = 0

    def __init__(self, means: Collection[str], score: str, warn: bool) -> None:
        self._score = score
        self._warn = warn
        self._means = frozenset([means] if isinstance(means, str) else means) - {score}
        self._values: dict[str, tuple[Any, int]] = {}  # sum (or last value) and count; a count of 0: not a number
        self._reported: dict[str, Any] = {}  # metrics of the last report

    def add(self, metrics: Mapping[str, Any], step: int) -> bool:
        """Add metrics of a step to the next report. Several calls for the same step are allowed.

        Return True if they have the first score of the step, and the loop does not score every step.
        """
        has_score = False
        for name, value in metrics.items():
            if self._is_score(name, value) and self._scored_at < step:
                self._scores_in_a_row = self._scores_in_a_row + 1 if self._scored_at == step - 1 else 1
                self._scored_at = step
                has_score = self._scores_in_a_row <= _MAX_SCORES_IN_A_ROW
                if self._warn and value is None and self._scores_in_a_row == _MAX_SCORES_IN_A_ROW + 1:
                    logger.warning("%s is None at each step: leave it out where nothing is evaluated", name)
            self._values[name] = self._accumulate(name, value)
        return has_score

    def _accumulate(self, name: str, value: Any) -> tuple[Any, int]:
        """Return the new sum or last value of a metric, and its count; the count is 0 if it is not a number."""
        number = scalar(value)
        if number is None:
            return value, 0
        value = number
        if getattr(value, "itemsize", 8) < 4:  # half precision cannot hold the sum of many values
            value = value.float() if hasattr(value, "float") else value.astype("float32")
        total, count = self._values.get(name, (0.0, 0)) if name in self._means else (0.0, 0)
        return total + value if count else value, count + 1

    def _is_score(self, name: str, value: Any) -> bool:
        """Return True if a metric is the score, or a mapping that contains it; Ray names it ``outer/inner``."""
        is_outer = name == self._score.partition("/")[0] and isinstance(value, Mapping | None)
        return name == self._score or is_outer

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, for a recovery point: with numbers in place of tensors."""
        values = {name: (float(total) if count else total, count) for name, (total, count) in self._values.items()}
        return vars(self) | {"_values": values}

    def collect(self, step: int) -> dict[str, Any]:
        """Return the metrics to report for a step. Metrics that are added later belong to the next report.

        A score of an earlier step is left out, since it was computed with other weights. A second report of the same
        step repeats the metrics of the first.
        """
        metrics = {name: float(total / count) if count else total for name, (total, count) in self._values.items()}
        if self._reported_at == step:
            metrics = self._reported | metrics
        if self._scored_at != step:
            metrics = {name: value for name, value in metrics.items() if not self._is_score(name, value)}
        self._values = {}
        self._reported = metrics
        self._reported_at = step
        return metrics
