"""With how many workers a group starts, and when: pure decisions over plain values."""

from __future__ import annotations

__all__ = ["Start"]

#: Seconds for what a lost group held to be seen as free, and for a node that went with it to be seen as gone.
_SETTLING_SECONDS = 2.0
#: Seconds for which a size that could not be placed is not tried again, nor a larger one.
_REFUSED_SECONDS = 600.0
#: Most seconds between two tries that nothing speaks for but time.
_MAX_PAUSE_SECONDS = 30.0


class Start:
    """The starts of the worker groups of a run, one after the other.

    Args:
        min_workers: Fewest workers to train with.
        max_workers: Most workers.
        step: What the number of workers is a multiple of: those of a TPU slice, otherwise 1.
        wait_for_max_seconds: How long ``max_workers`` have to come before the first group starts smaller.
    """

    def __init__(self, min_workers: int, max_workers: int, step: int = 1, wait_for_max_seconds: float = 0.0) -> None:
        self._min_workers = min_workers
        self._max_workers = max_workers
        self._step = max(1, step)
        self._wait_for_max_seconds = wait_for_max_seconds
        self._is_first = True
        self._since: float | None = None
        self._wanted = 0
        self._limit = max_workers
        self._limited_until = float("-inf")
        self._not_before = float("-inf")
        self._failures = 0

    def waited(self, now: float) -> float:
        """Give for how many seconds no group has trained."""
        return 0.0 if self._since is None else now - self._since

    def limit(self, now: float) -> int:
        """Give the most workers that may be tried, after a larger group could not be placed."""
        return self._limit if now < self._limited_until else self._max_workers

    def begin(self, now: float, lost: int = 0) -> None:
        """Begin to wait for a group.

        Args:
            now: Seconds on any clock that only goes forward.
            lost: Workers of the group that has just given back what it held, 0 if there was none.
        """
        if self._since is None:
            self._since = now
            self._wanted = lost

    def started(self) -> None:
        """Take in that a group trains."""
        self._is_first = False
        self._since = None
        self._failures = 0

    def refused(self, now: float, size: int) -> None:
        """Take in that a group could not be placed, though it was counted to fit: the next one is smaller."""
        self._failures += 1
        fewer = size - self._step * 2 ** (self._failures - 1)
        self._limit = max(self._min_workers, fewer // self._step * self._step)
        self._limited_until = now + _REFUSED_SECONDS
        if size <= self._min_workers:
            self._pause(now)

    def failed(self, now: float) -> None:
        """Take in that a group was placed and did not start."""
        self._failures += 1
        self._pause(now)

    def _pause(self, now: float) -> None:
        self._not_before = now + min(2.0 ** min(self._failures - 1, 10), _MAX_PAUSE_SECONDS)

    def size(self, now: float, possible: int, stable: int) -> int:
        """Give how many workers to start, 0 to go on waiting.

        Args:
            now: Seconds on the same clock.
            possible: Workers that fit now.
            stable: Workers that fit on nodes to be relied on.
        """
        possible, stable = min(possible, self.limit(now)), min(stable, self.limit(now))
        if possible < self._min_workers or now < self._not_before:
            return 0
        waited = self.waited(now)
        if self._is_first:
            may_be_more = possible < self.limit(now) and waited < self._wait_for_max_seconds
            return 0 if may_be_more else possible
        if possible < self._wanted and waited < _SETTLING_SECONDS:
            return 0
        # What has only just come may go as quickly; without it, if that is enough, nothing is lost when it does.
        return stable if stable >= self._min_workers else possible
