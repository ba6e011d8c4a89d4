"""The numeric guard of a session: finds losses and weights that are not finite numbers, and loss spikes."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from .state import State

logger = logging.getLogger(__name__)

_WINDOW = 100  # losses whose median and spread are computed
_MIN_LOSSES = 20  # before a spike is recognized
_NORMAL = 1.4826  # standard deviation of a normal distribution as a multiple of its median absolute deviation
_MIN_SPREAD = 0.01  # smallest spread as a share of the median
_MAX_SKIPPED = 3  # steps in a row whose batches are skipped
_WARN_SECONDS = 60.0  # between two warnings
_Reaction = Literal["rollback", "raise", "warn"]


class NumericError(ArithmeticError):
    """The loss or a weight is not a finite number, or the loss spikes.

    Attributes:
        skipped_step: Index of the step whose batch the next worker group skips; -1: the training ends.
    """

    def __init__(self, message: str, skipped_step: int = -1) -> None:
        super().__init__(message)
        self.skipped_step = skipped_step


@dataclass(frozen=True)
class Guard:
    """Reaction of a session to a loss or a weight that is not a finite number, and to a loss that spikes.

    The session checks each step, before the step is saved: the loss of each rank that gives one to
    :meth:`Session.step`, and the weights of each rank. These are the floating-point parameters of all modules of a
    ``TorchState``, or the floating-point arrays of an ``ArrayState`` or ``JaxState`` (with at least one dimension).

    Args:
        nan: ``"rollback"``: the worker group restarts from its newest checkpoint or recovery point, and skips the
            batch of this step. The restart counts against ``FailureBudget.max_failures``. If the batches of the three
            steps before were skipped, too, the training ends. ``"raise"``: the training ends without a restart.
            ``"warn"``: training goes on, and a warning is logged, at most once a minute.
        spike: The loss spikes if it is above the median of the last 100 by more than this number of standard
            deviations, which are estimated from the median absolute deviation and are at least 1 % of the median. The
            first 20 losses after a restart are not checked for that. 0: none are.
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
            raise ValueError(f"spike={self.spike}: must be a number of standard deviations; 0 turns the check off")


class GuardedSteps:
    """Checks the steps of one session.

    Args:
        guard: What to check, and what to do about a problem.
        state: State of the session.
    """

    _problems = 0  # number of problems since the last warning
    _warned_at = -math.inf

    def __init__(self, guard: Guard, state: State) -> None:
        if type(state).is_finite is State.is_finite:
            raise ValueError(
                f"guard={guard}: a {type(state).__name__} is not supported: it has no is_finite() of its own"
            )
        self._guard = guard
        self._state = state
        self._losses: deque[float] = deque(maxlen=_WINDOW)

    def check(self, metrics: Mapping[str, Any], step: int, skipped: Collection[int]) -> None:
        """Check a step.

        Args:
            metrics: Metrics of the step.
            step: Index of the step.
            skipped: Steps whose batches were skipped.

        Raises:
            NumericError: There is a problem, and the guard does not only warn.
            ValueError: The loss is not a number.
        """
        problem = self._problem(metrics)
        if not problem:
            return
        reaction = self._guard.nan
        if reaction != "warn":
            is_final = reaction == "raise" or {*range(step - _MAX_SKIPPED, step)} <= {*skipped}
            raise NumericError(f"step {step}: {problem} (guard: {reaction})", -1 if is_final else step)
        self._problems += 1
        if time.monotonic() - self._warned_at >= _WARN_SECONDS:
            logger.warning("Step %d: %s (%d such steps since the last warning)", step, problem, self._problems)
            self._problems = 0
            self._warned_at = time.monotonic()

    def _problem(self, metrics: Mapping[str, Any]) -> str:
        """Return the problem of the loss or the weights after a step as text; empty: none."""
        name = self._guard.loss
        value = metrics.get(name)
        try:
            loss = 0.0 if value is None else float(value.reshape(()) if hasattr(value, "reshape") else value)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(f"metric {name!r} is {value!r:.80}: a guard needs a number") from None
        if not math.isfinite(loss):
            return f"{name} is {loss}"
        if not self._state.is_finite():
            return "a weight is not a finite number"
        if value is None:
            return ""
        problem = ""
        if self._guard.spike and len(self._losses) >= _MIN_LOSSES:
            median = statistics.median(self._losses)
            deviation = _NORMAL * statistics.median(abs(each - median) for each in self._losses)
            if loss > median + self._guard.spike * max(deviation, _MIN_SPREAD * abs(median)):
                problem = f"{name} spikes to {loss:.4g} from a median of {median:.4g}"
        self._losses.append(loss)
        return problem
