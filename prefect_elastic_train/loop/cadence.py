"""Decide when a loop saves: at a fixed interval, or at one that is computed from failures and the cost of a save."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

#: Assumed mean time between failures of a run without failures, in seconds.
PRIOR_SECONDS = 6 * 3600.0
#: Weight of that assumption, in failures. With 0.1, a run that fails every 5 minutes is recognized within an hour.
PRIOR_WEIGHT = 0.1
#: Assumed share of training time that is lost while a checkpoint is written in the background.
BACKGROUND_COST = 0.1
#: Time that is reserved for the save before ``ends_at``: this many durations of a save, plus this many seconds.
_LAST_SAVES = 2.0
_LAST_SECONDS = 15.0


def best_interval(cost_seconds: float, between_failures_seconds: float) -> float:
    """Return the interval between saves, in seconds, with which saves and failures cost the least training time.

    The interval counts from the end of a save to the beginning of the next save.

    Uses Young's ``sqrt(2 * cost * MTBF)`` with the next two terms of Daly (2006, "A higher order estimate of the
    optimum checkpoint interval for restart dumps", equation 37).

    Args:
        cost_seconds: Training time that one save costs.
        between_failures_seconds: Mean time between failures (MTBF).
    """
    ratio = cost_seconds / (2 * between_failures_seconds)
    root = math.sqrt(2 * cost_seconds * between_failures_seconds)
    return root * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_seconds


@dataclass
class Cadence:
    """Rule that decides when a train loop saves a checkpoint.

    A session has one as ``session.cadence``; it also works without a session.

    Attributes:
        every: Interval between saves: an int is a number of steps, a string such as ``"90s"`` is a number of seconds.
            ``"auto"`` computes the interval from the failures of the run and the measured cost of a save.
        within: Shortest and longest interval that ``"auto"`` chooses, in seconds.
        failures: Failures of this run so far.
        trained_seconds: Training time of this run so far, in seconds.
        ends_at: End of the training's time limit, in seconds since the epoch. A last save is due shortly before it.
            0: no limit.
        clock: Monotonic clock, in seconds.
        steps: ``every`` in steps; 0 if it is not a number of steps.
        seconds: ``every`` in seconds; 0 if it is not a number of seconds.
        blocked: Seconds for which the last save blocked the loop.
        background: Seconds that the last save took in the background after it had blocked the loop.

    Raises:
        ValueError: ``every`` or ``within`` is not a valid interval.

    Example::

        cadence = loop.Cadence("auto")
        for step in range(1, steps + 1):
            train_step()
            if cadence.due(step):
                began = time.monotonic()
                save()
                cadence.saved(blocked=time.monotonic() - began)
    """

    every: int | str = "auto"
    within: tuple[float, float] = (10.0, 3600.0)
    failures: int = 0
    trained_seconds: float = 0.0
    ends_at: float = 0.0
    clock: Callable[[], float] = time.monotonic

    _longest_step = 0.0  # longest time between two checks since the last save, in seconds
    _longest_before = 0.0  # the same, between the two saves before
    _is_last = False  # the save before ``ends_at`` is due

    def __post_init__(self) -> None:
        text = str(self.every)
        self.steps = self.every if isinstance(self.every, int) else 0
        self.seconds = float(text[:-1]) if re.fullmatch(r"\d+(\.\d+)?s", text) else 0.0
        if not (self.steps >= 1 or self.seconds > 0 or text == "auto"):
            raise ValueError(f'save_every={self.every!r}: give a number of steps, seconds such as "90s", or "auto"')
        if not 0 < self.within[0] <= self.within[1]:
            raise ValueError(f"save_within={self.within!r}: give the shortest and the longest interval, in seconds")
        self.blocked = 0.0
        self.background = 0.0
        self._began = self._saved_at = self._checked_at = self.clock()

    def due(self, step: int) -> bool:
        """Return True if the train loop should save a checkpoint now. Call it after each optimizer step.

        Args:
            step: Number of optimizer steps that are done.
        """
        now = self.clock()
        self._longest_step = max(now - self._checked_at, self._longest_step)
        self._checked_at = now
        if self.steps and step % self.steps == 0:
            return True
        save_seconds = _LAST_SAVES * (self.blocked + self.background)
        reserved = _LAST_SECONDS + save_seconds + max(self._longest_step, self._longest_before)
        if self.ends_at and time.time() > self.ends_at - reserved:
            self._is_last = True
            return True
        return now - self._saved_at >= self.interval()

    def saved(self, blocked: float) -> None:
        """Record that the train loop has saved a checkpoint. The interval to the next save begins now.

        Args:
            blocked: Seconds for which the save blocked the loop. ``"auto"`` computes the next interval from it.
        """
        self.blocked = blocked
        self._saved_at = self._checked_at = self.clock()
        self._longest_before = self._longest_step
        self._longest_step = 0.0
        if self._is_last:
            self.ends_at = 0.0

    def interval(self) -> float:
        """Return the current interval between two saves, in seconds; infinity if ``every`` is a number of steps."""
        if self.steps or self.seconds:
            return self.seconds or math.inf
        cost = self.blocked + BACKGROUND_COST * self.background
        # A save cannot begin before the one before is written.
        best = max(best_interval(cost, self.between_failures()), self.background)
        # Before the first save the cost is 0, so the first interval is the shortest.
        return min(max(best, self.within[0]), self.within[1])

    def between_failures(self) -> float:
        """Return the estimated mean time between failures of the run, in seconds.

        The estimate combines the failures of the run with an assumed :data:`PRIOR_SECONDS` (a Gamma prior).
        """
        return (self.trained() + PRIOR_WEIGHT * PRIOR_SECONDS) / (self.failures + PRIOR_WEIGHT)

    def trained(self) -> float:
        """Return the training time of the run until now, in seconds, with that of earlier attempts."""
        return self.trained_seconds + self.clock() - self._began
