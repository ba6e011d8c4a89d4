"""Finds stragglers: ranks that take longer than the others for their own work of a step, for which all others wait."""

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prefect_elastic_train.core.events import Publish, StragglerFound

_FACTOR = 1.2  # smallest time of a straggler, as a multiple of the usual time
_WINDOWS = 3  # in a row, in which a rank is slow
_INTERVAL_SECONDS = 1.0  # between two windows that are compared: those of fast steps are short


@dataclass
class StragglerWatch:
    """Finds the stragglers of worker groups, in the controller, by the times that ranks measure in windows of steps.

    Attributes:
        publish: Function that publishes an event.
    """

    publish: Publish

    def begin_group(self, workers: Sequence[Any]) -> None:
        """Begin to watch a new worker group."""
        self._workers = workers
        self._slow = Counter[int]()  # windows in a row, by rank
        self._published: set[int] = set()
        self._compared_step = 0
        self._next_at = 0.0

    def slow_nodes(self) -> dict[str, str]:
        """Return the ids of the nodes on which ranks are stragglers now, with the reason."""
        return {self._workers[rank].metadata.node_id: "slow" for rank, count in self._slow.items() if count >= _WINDOWS}

    def check(self, statuses: Sequence[Any]) -> None:
        """Compare the ranks by the newest window that all of them have sent, and publish a new straggler."""
        phases = [status.phase for status in statuses if getattr(status, "phase", None)]
        now = time.monotonic()
        if not 1 < len(phases) == len(statuses) or now < self._next_at:
            return
        windows = [{window.step: window for window in phase.windows} for phase in phases]
        step = max(set.intersection(*map(set, windows)), default=0)
        if step <= self._compared_step:
            return
        self._compared_step = step
        self._next_at = now + _INTERVAL_SECONDS
        compared = [of_rank[step] for of_rank in windows]
        usual = statistics.median_low(compared)  # by seconds, as their steps are equal
        slow = Counter[int]()
        for rank, window in enumerate(compared):
            if window.seconds > max(_FACTOR * usual.seconds, usual.seconds + usual.spread + window.spread):
                slow[rank] = self._slow[rank] + 1
            if slow[rank] >= _WINDOWS and rank not in self._published:
                self._published.add(rank)
                self.publish(
                    StragglerFound(
                        rank=rank,
                        node_id=self._workers[rank].metadata.node_id,
                        seconds=window.seconds,
                        usual_seconds=usual.seconds,
                    )
                )
        self._slow = slow
