"""Which failures of worker groups still count: in weeks there are many, and each is made up for by what is trained."""

from __future__ import annotations

import time
from collections import defaultdict


class Forgiveness:
    """Counts failures, in seconds of training: one counts no more once the run has trained on and committed that.

    Args:
        after_seconds: How long it must have trained since, up to a new checkpoint; 0: each failure counts for ever.
    """

    def __init__(self, after_seconds: float) -> None:
        self._after = after_seconds
        self._trained = 0.0  # by the groups before this one
        #: What was trained up to the newest commit.
        self.kept = 0.0
        self._began: float | None = None
        self._failed_at: defaultdict[str, list[float]] = defaultdict(list)

    def begin(self) -> None:
        """Note that a worker group trains from now on."""
        self.end()
        self._began = time.monotonic()

    def end(self) -> None:
        """Note that it does no more; what it has trained and not committed is done again."""
        self._trained = self.kept
        self._began = None

    def commit(self) -> None:
        """Note a new checkpoint."""
        self.kept = self.seconds()

    def count(self, kind: str) -> int:
        """Return how many failures of a kind before this one still count, and note this one."""
        counting = [at for at in self._failed_at[kind] if not 0 < self._after <= self.kept - at]
        self._failed_at[kind] = [*counting, self.seconds()]
        return len(counting)

    def seconds(self) -> float:
        """Return for how long worker groups have trained, bar what was lost."""
        return self._trained + (time.monotonic() - self._began if self._began is not None else 0.0)
