"""Seeded fault schedules: when each fault is injected, and which worker or node it hits."""

import random
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

Target = TypeVar("Target")

WORKER = "worker"
DRIVER = "driver"
FREEZE = "freeze"
STORAGE = "storage"
NODE = "node"
DRAIN = "drain"
GROWTH = "growth"
#: All kinds, in the order of the documentation. The last three change the number of workers.
KINDS = (WORKER, DRIVER, FREEZE, STORAGE, NODE, DRAIN, GROWTH)
_MAX_WAIT_SECONDS = 5.0


class PlannedFault(NamedTuple):
    """Fault that a rehearsal will inject.

    Attributes:
        kind: The kind of fault.
        wait_seconds: Least time since the recovery from the previous fault.
        chance: A random number from 0 to below 1, which selects the target.
    """

    kind: str
    wait_seconds: float
    chance: float

    def choose(self, candidates: Sequence[Target]) -> Target:
        """Return the candidate that the fault hits, such as one of the ranks or nodes, selected by ``chance``."""
        return candidates[int(self.chance * len(candidates))]


def schedule_faults(kinds: Sequence[str], seed: int, can_shrink: bool = True) -> list[PlannedFault]:
    """Return a random schedule with one fault of each kind. Faults that change the number of workers come last.

    If the training can shrink, a growth follows each lost node. Otherwise the lost node is replaced at once. If
    ``kinds`` has a growth but no loss of a node, such a loss is added before it.

    Args:
        kinds: Kinds of faults, some of :data:`KINDS`.
        seed: Random seed of the schedule.
        can_shrink: True if the training continues while a node is missing.
    """
    generator = random.Random(seed)
    planned = [kind for kind in kinds if kind not in (NODE, DRAIN, GROWTH)]
    losses = [kind for kind in kinds if kind in (NODE, DRAIN)]
    if GROWTH in kinds and not losses:
        losses = [NODE]
    generator.shuffle(planned)
    generator.shuffle(losses)
    for loss in losses:
        planned += [loss, GROWTH] if can_shrink else [loss]
    return [PlannedFault(kind, generator.uniform(0, _MAX_WAIT_SECONDS), generator.random()) for kind in planned]
