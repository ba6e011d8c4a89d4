"""Seeded schedules: which fault comes when, and whom it hits. The same seed gives the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

#: What can be played, in the order in which it is told; the last three change the number of workers.
WORKER, DRIVER, FREEZE, STORAGE = "worker", "driver", "freeze", "storage"
NODE, DRAIN, GROWTH = "node", "drain", "growth"
KINDS = (WORKER, DRIVER, FREEZE, STORAGE, NODE, DRAIN, GROWTH)


class Fault(NamedTuple):
    """Something to be done to a training: what, how many seconds after the last, and to whom (from 0 to below 1)."""

    kind: str
    wait: float
    chance: float

    def of(self, those: Sequence[object]) -> int:
        """Return the place of the one that it hits."""
        return int(self.chance * len(those))


def every_kind(kinds: Sequence[str], seed: int, longest: float, can_shrink: bool = True) -> list[Fault]:
    """Each kind once, those first that leave the number of workers as it is, with waits up to ``longest`` seconds.

    A node comes after one has gone: where the training goes on without it, growth follows.
    """
    chance = random.Random(seed)
    keep = [kind for kind in kinds if kind not in (NODE, DRAIN, GROWTH)]
    leave = [kind for kind in kinds if kind in (NODE, DRAIN)] or [NODE] * (GROWTH in kinds)
    chance.shuffle(keep)
    chance.shuffle(leave)
    resize = [one for kind in leave for one in ((kind, GROWTH) if can_shrink else (kind,))]
    return [Fault(kind, chance.uniform(0, longest), chance.random()) for kind in [*keep, *resize]]
