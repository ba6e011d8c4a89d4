"""The phases of a train loop and their durations, from which the controller learns when a loop hangs."""

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

WINDOW = 12  # steps
_WINDOWS = 8  # that are kept


class Window(NamedTuple):
    """The time of a rank's own work in `WINDOW` steps: from a batch to its gradients, without waits for other ranks.

    Attributes:
        step: The last step.
        seconds: Median of the time for a step.
        spread: Median of the absolute deviations from it, in seconds.
    """

    step: int
    seconds: float
    spread: float


class PhaseReport(NamedTuple):
    """The current phase of a loop, and the durations of its phases so far.

    Attributes:
        name: The current phase: ``"first step"``, ``"step"``, ``"loading"``, ``"evaluation"`` or ``"save"``.
        seconds: Seconds since it began.
        steps: Optimizer steps that this worker's session has done.
        longest: Longest duration of each phase that has ended, in seconds.
        thread_id: The loop's thread, by the id that the kernel has for it.
        windows: The newest windows, in which this rank has measured its own work.
    """

    name: str
    seconds: float
    steps: int
    longest: dict[str, float]
    thread_id: int
    windows: Sequence[Window] = ()


class Phases:
    """Measures the phases of a session's loop, in the loop's thread. One phase begins where the other ends.

    Attributes:
        clock: Function that returns a time. The difference of two is in seconds, and known a step later at the latest.
    """

    clock: Callable[[], Any] = staticmethod(time.monotonic)
    name = ""  # before the first batch, and after the session

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._longest: dict[str, float] = {}
        self._thread_id = threading.get_native_id()
        self._work: list[list[Any]] = []  # begin and end of the rank's own work on each batch of the step
        self._work_before: list[list[Any]] = []  # the same of the step before
        self._times: list[float] = []  # seconds for each step of the current window
        self._windows: deque[Window] = deque(maxlen=_WINDOWS)

    def begin_work(self) -> None:
        """Record that the loop begins to work on a batch."""
        now = self.clock()
        self._work.append([now, now])

    def end_work(self) -> None:
        """Record that the gradients of the batch are there, before the ranks exchange them."""
        if self._work:
            self._work[-1][1] = self.clock()

    def end_step(self, step: int) -> None:
        """Record the end of a step."""
        with suppress(RuntimeError):  # a GPU is more than a step behind
            if seconds := sum(end - begin for begin, end in self._work_before):
                self._times.append(seconds)
        self._work_before = self._work
        self._work = []
        if step % WINDOW == 0:  # the same on all ranks
            if len(self._times) > WINDOW // 2:
                usual = statistics.median(self._times)
                spread = statistics.median(abs(seconds - usual) for seconds in self._times)
                self._windows.append(Window(step, usual, spread))
            self._times = []

    def begin(self, name: str) -> str:
        """End the current phase, and begin another one. Return the name of the one that ended."""
        now = time.monotonic()
        ended = self.name
        self._longest[ended] = max(self._longest.get(ended, 0.0), now - self._began)
        self.name = name
        self._began = now
        return ended

    def report(self, steps: int) -> PhaseReport | None:
        """Return the current phase and the durations so far; None outside of all phases. Any thread may call it."""
        if not self.name:
            return None
        seconds = time.monotonic() - self._began
        return PhaseReport(self.name, seconds, steps, dict(self._longest), self._thread_id, [*self._windows])
