"""Schedules of faults without end, for the soak test and the benchmarks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from prefect_elastic_train.rehearsal.schedule import PlannedFault


def poisson(kinds: Sequence[str], seed: int, mean: float) -> Iterator[PlannedFault]:
    """Yield faults of any kind, as of a Poisson process: ``mean`` seconds between two on average."""
    chance = random.Random(seed)
    while True:
        yield PlannedFault(chance.choice(kinds), chance.expovariate(1 / mean), chance.random())
