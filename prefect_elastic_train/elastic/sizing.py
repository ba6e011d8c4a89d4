"""With how many workers a group starts, and when a healthy one grows: pure decisions over plain values."""

from __future__ import annotations

import enum
from collections.abc import Collection

#: Seconds for what a lost group held to be seen as free, and for a node that went with it to be seen as gone.
_SETTLING_SECONDS = 2.0
#: Seconds for which a size that could not be placed is not tried again, nor a larger one.
_REFUSED_SECONDS = 600.0
#: Most seconds between two tries that nothing speaks for but time.
_MAX_PAUSE_SECONDS = 30.0


class Reason(enum.Enum):
    """Why a decided growth is carried out now."""

    #: All work up to now has just been committed.
    COMMIT = "commit"
    #: It has waited long enough for a commit.
    PATIENCE = "patience"


class Stability:
    """Which nodes have been there for long enough to be relied on; those of the first look are from the start.

    Args:
        delay_seconds: How long a node must have been there.
    """

    def __init__(self, delay_seconds: float) -> None:
        self._delay_seconds = delay_seconds
        self._since: dict[str, float] | None = None

    def observe(self, now: float, node_ids: Collection[str]) -> frozenset[str]:
        """Take in the nodes that are there, and return those that can be relied on."""
        known, new = ({}, float("-inf")) if self._since is None else (self._since, now)
        self._since = {node: known.get(node, new) for node in node_ids}
        return frozenset(node for node, since in self._since.items() if now - since >= self._delay_seconds)


class Growth:
    """A decided growth of the worker group, from the decision until it is carried out or called off.

    Args:
        patience_seconds: How long it waits for a commit before it is carried out without one; 0 for ever.

    Attributes:
        target: Workers to grow to, 0 while no growth is decided.
    """

    def __init__(self, patience_seconds: float) -> None:
        self._patience_seconds = patience_seconds
        self._decided_at = 0.0
        self.target = 0

    def look(self, now: float, current: int, possible: int) -> bool:
        """Take in how many workers fit beside ``current``; return whether that begins or ends the wait for a commit."""
        before, self.target = self.target, possible if possible > current else 0
        if self.target and not before:
            self._decided_at = now
        return bool(self.target) != bool(before)

    def waited_seconds(self, now: float) -> float:
        """Return how long the growth has waited."""
        return now - self._decided_at if self.target else 0.0

    def due(self, now: float, committed: bool, has_checkpoint: bool) -> Reason | None:
        """Return why the growth is carried out now, None if it is not: without a checkpoint it would lose all work."""
        if self.target and committed:
            return Reason.COMMIT
        is_late = 0 < self._patience_seconds <= self.waited_seconds(now)
        return Reason.PATIENCE if is_late and has_checkpoint else None


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
        self._step = step
        self._wait_for_max_seconds = wait_for_max_seconds
        self._lost: int | None = None
        self._since: float | None = None
        self._limit = max_workers
        self._limited_until = self._not_before = float("-inf")
        self._failures = 0

    def waited(self, now: float) -> float:
        """Return for how many seconds no group has trained; counted from the first call."""
        if self._since is None:
            self._since = now
        return now - self._since

    def limit(self, now: float) -> int:
        """Return the most workers that may be tried, after a larger group could not be placed."""
        return self._limit if now < self._limited_until else self._max_workers

    def started(self, size: int) -> None:
        """Take in that a group of that size trains."""
        self._lost, self._since, self._failures = size, None, 0

    def failed(self, now: float, refused: int = 0) -> None:
        """Take in that a group did not start; one of size ``refused`` was counted to fit and could not be placed."""
        self._failures += 1
        if refused:
            fewer = refused - self._step * 2 ** (self._failures - 1)
            self._limit = max(self._min_workers, fewer // self._step * self._step)
            self._limited_until = now + _REFUSED_SECONDS
        if refused <= self._min_workers:
            self._not_before = now + min(2.0 ** min(self._failures - 1, 10), _MAX_PAUSE_SECONDS)

    def size(self, now: float, possible: int, stable: int) -> int:
        """Return how many workers to start of those that fit now, on any or on stable nodes; 0 to go on waiting."""
        waited, limit = self.waited(now), self.limit(now)
        possible, stable = min(possible, limit), min(stable, limit)
        if possible < self._min_workers or now < self._not_before:
            return 0
        if self._lost is None:
            return 0 if possible < limit and waited < self._wait_for_max_seconds else possible
        if possible < self._lost and waited < _SETTLING_SECONDS:
            return 0
        # What has only just come may go as quickly; without it, if that is enough, nothing is lost when it does.
        return stable if stable >= self._min_workers else possible
