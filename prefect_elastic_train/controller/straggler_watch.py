"""Finds stragglers: ranks that take longer than the others for their own work of a step, for which all others wait."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from prefect_elastic_train.core.events import Event, StragglerFound

_FACTOR = 1.2  # of the usual time
_WINDOWS = 3  # in a row
_INTERVAL_SECONDS = 1.0  # between two windows that are compared: those of fast steps are short


class StragglerWatch:
    """Finds the stragglers of worker groups, in the controller, by the median times of windows of steps.

    Args:
        publish: Function that publishes an event.

    Attributes:
        found: The stragglers of the current worker group, by rank.
    """

    def __init__(self, publish: Callable[[Event], None]) -> None:
        self._publish = publish

    def begin_group(self, workers: Sequence[Any]) -> None:
        """Begin to watch a new worker group."""
        self._workers = workers
        self._slow: Counter[int] = Counter()  # windows in a row, by rank
        self._compared_step = 0
        self._next_at = 0.0
        self.found: dict[int, StragglerFound] = {}

    def check(self, statuses: Sequence[Any]) -> None:
        """Compare the ranks by the newest window that all of them have sent, and publish a new straggler."""
        phases = [status.phase for status in statuses if getattr(status, "phase", None)]
        now = time.monotonic()
        if not 1 < len(phases) == len(statuses) or now < self._next_at:
            return
        windows = [dict(phase.own_times) for phase in phases]
        step = max(set.intersection(*map(set, windows)), default=0)
        if step <= self._compared_step:
            return
        self._compared_step = step
        self._next_at = now + _INTERVAL_SECONDS
        times = [window[step] for window in windows]
        usual = statistics.median_low(times)
        self._slow = Counter({rank: self._slow[rank] + 1 for rank, time in enumerate(times) if time > _FACTOR * usual})
        for rank, count in self._slow.items():
            if count >= _WINDOWS and rank not in self.found:
                node_id = self._workers[rank].metadata.node_id
                self.found[rank] = StragglerFound(rank=rank, node_id=node_id, seconds=times[rank], usual_seconds=usual)
                self._publish(self.found[rank])
