"""The failures of worker groups that still count against the budget."""

import time
from collections import defaultdict


class FailureWindow:
    """Counts the failures of worker groups. A failure stops counting once enough training after it has been committed.

    Args:
        after_seconds: Seconds of committed training after which a failure stops counting; 0: it counts forever.
    """

    def __init__(self, after_seconds: float) -> None:
        self._after_seconds = after_seconds
        #: Seconds of training up to the newest commit.
        self.committed = 0.0
        self._committed_before = 0.0  # seconds of training that earlier groups have committed
        self._began: float | None = None
        self._failed_at: defaultdict[str, list[float]] = defaultdict(list)

    def begin_group(self) -> None:
        """Record that a worker group begins to train now."""
        self._committed_before = self.committed
        self._began = time.monotonic()

    def end_group(self) -> None:
        """Record that the worker group has ended. Its uncommitted training does not count, as it will be redone."""
        self._began = None

    def commit(self) -> None:
        """Record that all training up to now is committed in a checkpoint."""
        self.committed = self.trained_seconds()

    def record_failure(self, kind: str) -> int:
        """Record a worker group failure of a kind; return the number of earlier failures of this kind that still count.

        The kinds are ``worker_group`` and ``preemption``.
        """
        counting = [at for at in self._failed_at[kind] if not 0 < self._after_seconds <= self.committed - at]
        self._failed_at[kind] = [*counting, self.trained_seconds()]
        return len(counting)

    def trained_seconds(self) -> float:
        """Return the seconds for which worker groups have trained, without the uncommitted training of ended groups."""
        if self._began is None:
            return self.committed
        return self._committed_before + time.monotonic() - self._began
