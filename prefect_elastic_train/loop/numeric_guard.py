"""The numeric guard of a session: finds losses and weights that are not finite numbers, and outliers of the loss."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from .state import State

_WINDOW = 100  # losses whose median and spread are computed
_MIN_LOSSES = 20  # before an outlier is recognized
_NORMAL = 1.4826  # standard deviation of a normal distribution as a multiple of its median absolute deviation
_MIN_SPREAD = 0.01  # smallest spread as a share of the median
_Reaction = Literal["rollback", "raise", "warn"]


class NumericError(ArithmeticError):
    """The loss or a weight is not a finite number, or the loss is an outlier.

    Attributes:
        skipped_step: Index of the step whose batch the next worker group skips; -1: the training ends.
    """

    def __init__(self, message: str, skipped_step: int = -1) -> None:
        super().__init__(message)
        self.skipped_step = skipped_step


@dataclass
class Guard:
    """What a session does if the loss or a weight is not a finite number, or if the loss is an outlier.

    The session checks each step, before the step is saved. It checks the loss of each rank that gives one to
    :meth:`Session.step`, and the weights of each rank: the parameters of modules, or the arrays of an ``ArrayState`` or
    ``JaxState``.

    Args:
        nan: ``"rollback"``: the worker group restarts from its newest checkpoint or recovery point, and skips the
            batch of this step. It counts as a failure (``FailureBudget.max_failures``). ``"raise"``: the training ends
            without a restart. ``"warn"``: a warning is logged, and training goes on.
        spike: The loss is an outlier if it is above the median of the last 100 by more than this number of standard
            deviations, which are estimated from the median absolute deviation and are at least 1 % of the median.
            There are no outliers among the first 20 losses after a restart. 0: none at all.
        loss: Name of the loss in the metrics.

    Raises:
        ValueError: An argument is out of range.

    Example::

        with loop.session(state, steps=1000, global_batch=256, guard=loop.Guard(spike=8.0)) as session:
            ...
    """

    nan: _Reaction = "rollback"
    spike: float = 0.0
    loss: str = "loss"

    def __post_init__(self) -> None:
        if self.nan not in get_args(_Reaction):
            raise ValueError(f"nan={self.nan!r}: must be one of {', '.join(get_args(_Reaction))}")
        if not 0 <= self.spike < math.inf:
            raise ValueError(f"spike={self.spike}: must be a number of standard deviations, or 0 for no outliers")
        self._losses: deque[float] = deque(maxlen=_WINDOW)

    def find(self, metrics: Mapping[str, Any], state: State) -> str:
        """Return what is wrong with a step; empty: nothing.

        Args:
            metrics: Metrics of the step.
            state: State after the step.
        """
        found = metrics.get(self.loss)
        loss = 0.0 if found is None else float(found)
        if not math.isfinite(loss):
            return f"{self.loss} is {loss}"
        if not state.is_finite():
            return "a weight is not a finite number"
        if found is None:
            return ""
        problem = ""
        if self.spike and len(self._losses) >= _MIN_LOSSES:
            median = statistics.median(self._losses)
            deviation = _NORMAL * statistics.median(abs(each - median) for each in self._losses)
            if loss > median + self.spike * max(deviation, _MIN_SPREAD * abs(median)):
                problem = f"{self.loss} is {loss:.4g}, an outlier: the median of the steps before is {median:.4g}"
        self._losses.append(loss)
        return problem
