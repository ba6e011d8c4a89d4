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
    """Which nodes have been there for long enough to be relied on.

    Nodes that are there at the first look count from the start: nobody knows how long they have been there.

    Args:
        delay_seconds: How long a node must have been there.
    """

    def __init__(self, delay_seconds: float) -> None:
        self._delay_seconds = delay_seconds
        self._since: dict[str, float] | None = None

    def observe(self, now: float, node_ids: Collection[str]) -> frozenset[str]:
        """Take in the nodes that are there, and return those that can be relied on."""
        if self._since is None:
            self._since = dict.fromkeys(node_ids, float("-inf"))
        else:
            self._since = {node: self._since.get(node, now) for node in node_ids}
        return frozenset(node for node, since in self._since.items() if now - since >= self._delay_seconds)

    def next_change(self, now: float) -> float | None:
        """Return the seconds until the next node can be relied on, None if none is awaited."""
        ages = [now - since for since in (self._since or {}).values()]
        young = [self._delay_seconds - age for age in ages if age < self._delay_seconds]
        return min(young) if young else None


class Growth:
    """A decided growth of the worker group, from the decision until it is carried out or called off.

    Args:
        patience_seconds: How long it waits for a commit before it is carried out without one; 0 for ever.
        settling_seconds: How long a decision waits for more nodes that are about to count, so that nodes which come
            one after the other cost one restart.
    """

    def __init__(self, patience_seconds: float, settling_seconds: float = 0.0) -> None:
        self._patience_seconds = patience_seconds
        self._settling_seconds = settling_seconds
        self.target = 0
        self._possible_since: float | None = None
        self._decided_at = 0.0

    @property
    def decided(self) -> bool:
        """Whether a growth is waiting to be carried out."""
        return self.target > 0

    def look(self, now: float, current: int, possible: int, more_awaited: bool = False) -> bool:
        """Take in how many workers fit; return whether that begins or ends the wait for a commit.

        Args:
            now: Seconds on any clock that only goes forward.
            current: Workers of the group.
            possible: Workers that fit on nodes to be relied on.
            more_awaited: Whether nodes are there that do not count yet.
        """
        before = self.decided
        if possible <= current:
            self._possible_since = None
        elif self._possible_since is None:
            self._possible_since = now
        settled = not more_awaited or (
            self._possible_since is not None and now - self._possible_since >= self._settling_seconds
        )
        self.target = possible if possible > current and (settled or before) else 0
        if self.decided and not before:
            self._decided_at = now
        return self.decided != before

    def waited_seconds(self, now: float) -> float:
        """Return how long the growth has waited."""
        return now - self._decided_at if self.decided else 0.0

    def due(self, now: float, committed: bool, has_checkpoint: bool) -> Reason | None:
        """Return why the growth is carried out now, None if it is not.

        Args:
            now: Seconds on any clock that only goes forward.
            committed: A checkpoint was committed in this turn.
            has_checkpoint: The worker group began with or has committed one: what it restarts from. Without any
                the growth waits, since it would throw away all work there is.
        """
        if not self.decided:
            return None
        if committed:
            return Reason.COMMIT
        late = self._patience_seconds and self.waited_seconds(now) >= self._patience_seconds
        return Reason.PATIENCE if late and has_checkpoint else None


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
        """Return for how many seconds no group has trained."""
        return 0.0 if self._since is None else now - self._since

    def limit(self, now: float) -> int:
        """Return the most workers that may be tried, after a larger group could not be placed."""
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
        """Return how many workers to start, 0 to go on waiting.

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
