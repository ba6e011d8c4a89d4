"""When a healthy worker group grows: pure decisions over plain values."""

from __future__ import annotations

import enum
from collections.abc import Collection

__all__ = ["Growth", "Reason", "Stability"]


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
        """Take in the nodes that are there, and give those that can be relied on."""
        if self._since is None:
            self._since = dict.fromkeys(node_ids, float("-inf"))
        else:
            self._since = {node: self._since.get(node, now) for node in node_ids}
        return frozenset(node for node, since in self._since.items() if now - since >= self._delay_seconds)

    def next_change(self, now: float) -> float | None:
        """Give the seconds until the next node can be relied on, None if none is awaited."""
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
        """Take in how many workers fit; give whether that begins or ends the wait for a commit.

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
        """Give how long the growth has waited."""
        return now - self._decided_at if self.decided else 0.0

    def due(self, now: float, committed: bool, has_checkpoint: bool) -> Reason | None:
        """Give why the growth is carried out now, None if it is not.

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
