"""When a loop saves: each so many steps or seconds, or as often as its failures and the cost of a save ask for."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

#: What is assumed of a run that has not failed yet: one failure in so many seconds. It weighs as this many of its own,
#: so that a run that fails each five minutes is known for that within the hour.
PRIOR_SECONDS, PRIOR_WEIGHT = 6 * 3600.0, 0.1
BACKGROUND_COST = 0.1  # is assumed: what a second of writing in the background takes from the steps beside it
#: Before the end of its time a loop saves once more: so many times what a save takes, and so many seconds.
_LAST_SAVES, _LAST_SECONDS = 2.0, 15.0


def best_interval(cost_seconds: float, between_failures_seconds: float) -> float:
    """Return from which interval on saving more often costs more than it spares, in seconds between two saves.

    Young's ``sqrt(2 * cost * MTBF)`` with the two further terms of Daly (2006, "A higher order estimate of the optimum
    checkpoint interval for restart dumps", equation 37); for a cost of at least half the MTBF, that.
    """
    ratio = cost_seconds / (2 * between_failures_seconds)
    if ratio >= 0.25:
        return between_failures_seconds
    root = math.sqrt(2 * cost_seconds * between_failures_seconds)
    return root * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_seconds


@dataclass
class Cadence:
    """Decides when to save. It works alone, too: save when :meth:`due` says so, and tell it by :meth:`saved`.

    Attributes:
        every: Steps if a whole number, seconds as a text such as ``"90s"``, or ``"auto"``.
        within: The shortest and the longest interval that ``"auto"`` may choose, in seconds.
        failures, trained_seconds: How often this run has failed so far, and how long it has trained.
        ends_at: When the training's time is over, in seconds since the epoch; 0: never.
    """

    every: int | str = "auto"
    within: tuple[float, float] = (10.0, 3600.0)
    failures: int = 0
    trained_seconds: float = 0.0
    ends_at: float = 0.0
    clock: Callable[[], float] = time.monotonic  # seconds that never go back

    def __post_init__(self) -> None:
        text = str(self.every)
        self.steps = self.every if isinstance(self.every, int) else 0
        self.seconds = float(text[:-1]) if re.fullmatch(r"\d+(\.\d+)?s", text) else 0.0
        if isinstance(self.every, bool) or not (self.steps >= 1 or self.seconds > 0 or text == "auto"):
            raise ValueError(f'save_every={self.every!r}: give a number of steps, seconds such as "90s", or "auto"')
        if not 0 < self.within[0] <= self.within[1]:
            raise ValueError(f"save_within={self.within!r}: give the shortest and the longest interval, in seconds")
        #: What the newest save has blocked, and what it took in the background.
        self.blocked, self.background = 0.0, 0.0
        self._began = self._saved_at = self._asked_at = self.clock()
        #: Longest between questions since the last save, and before it; whether the save before the end is due.
        self._gap, self._gap_before, self._is_last = 0.0, 0.0, False

    def due(self, step: int) -> bool:
        """Return whether it is time to save after so many steps."""
        now = self.clock()
        self._gap, self._asked_at = max(now - self._asked_at, self._gap), now
        if self.steps and step % self.steps == 0:
            return True
        needed = _LAST_SECONDS + _LAST_SAVES * (self.blocked + self.background) + max(self._gap, self._gap_before)
        if self.ends_at and time.time() > self.ends_at - needed:
            self._is_last = True
            return True
        return now - self._saved_at >= self.interval()

    def saved(self, blocked: float) -> None:
        """Note that a save was made, and for how many seconds it has kept the loop from its steps."""
        self.blocked, self._saved_at, self._asked_at = blocked, self.clock(), self.clock()
        self._gap_before, self._gap = self._gap, 0.0
        if self._is_last:
            self.ends_at = 0.0

    def interval(self) -> float:
        """Return the seconds from one save to the next; infinity if steps are counted."""
        if self.steps or self.seconds:
            return self.seconds or math.inf
        cost = self.blocked + BACKGROUND_COST * self.background
        best = max(best_interval(cost, self.between_failures()), self.background)  # nothing newer is saved meanwhile
        return min(max(best, self.within[0]), self.within[1])  # the first soon, since nothing is measured yet

    def between_failures(self) -> float:
        """Return the mean time between failures in seconds, by a Gamma prior and what the run has seen."""
        return (self.trained() + PRIOR_WEIGHT * PRIOR_SECONDS) / (self.failures + PRIOR_WEIGHT)

    def trained(self) -> float:
        """Return how many seconds the run has trained."""
        return self.trained_seconds + self.clock() - self._began
