"""The failures of worker groups that still count against the budget."""

import time
from collections import defaultdict


class FailureWindow:
    """Counts the failures of worker groups. A failure stops counting once enough training after it has been committed.

    Args:
        after_seconds: Seconds of committed training after which a failure stops counting; 0: it counts forever.
    """

    committed = 0.0  # seconds of training up to the newest commit
    _zero: float | None = None  # time at which trained_seconds() would be 0; None while no worker group trains

    def __init__(self, after_seconds: float) -> None:
        self._after_seconds = after_seconds
        self._failed_at = defaultdict[bool, list[float]](list)

    def begin_group(self) -> None:
        """Record that a worker group begins to train now."""
        self._zero = time.monotonic() - self.committed

    def end_group(self) -> None:
        """Record that the worker group has ended. Its uncommitted training does not count, as it will be redone."""
        self._zero = None

    def commit(self) -> None:
        """Record that all training up to now is committed in a checkpoint."""
        self.committed = self.trained_seconds()

    def record_failure(self, is_preemption: bool) -> int:
        """Record a failure of a worker group; return the number of earlier ones that still count.

        Preemptions and other failures are counted apart.
        """
        counting = [at for at in self._failed_at[is_preemption] if not 0 < self._after_seconds <= self.committed - at]
        self._failed_at[is_preemption] = [*counting, self.trained_seconds()]
        return len(counting)

    def trained_seconds(self) -> float:
        """Return the seconds for which worker groups have trained, without the uncommitted training of ended groups."""
        return self.committed if self._zero is None else time.monotonic() - self._zero
