"""How often something may be done."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["TokenBucket"]


class TokenBucket:
    """Lets through a burst, and a rate on average. For one thread.

    Args:
        per_second: The rate.
        burst: How many at once, at least 1.
        clock: Gives the time in seconds.
    """

    def __init__(self, per_second: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = per_second
        self._burst = max(1.0, burst)
        self._tokens = self._burst
        self._clock = clock
        self._filled_at = clock()

    def take(self) -> bool:
        """Take one if there is one."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._rate)
        self._filled_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
