"""Which samples the steps of a run have seen, in a few bytes a step: proof that each was seen once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from prefect_elastic_train.loop.order import AT_ONCE, Indices, mix

Digest = np.ndarray[Any, np.dtype[np.uint64]]


def digests(samples: Indices, steps: Indices, first: int, number: int) -> Digest:
    """Return count, sum and xor of the hashes of samples with the step that has seen them, each modulo 2**64.

    A row for each of so many steps from the first; ``steps`` has that of each sample, and rises. Digests of parts of a
    step add up to that of the whole, whoever saw which part and in which order: counts and sums by addition, the last
    by xor. A sample that is left out, or seen twice, or in another step, changes it.
    """
    found = np.zeros((number, 3), dtype=np.uint64)
    hashes = mix(mix(samples.astype(np.uint64)) + steps.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    begins = np.flatnonzero(np.diff(steps, prepend=-1))
    rows = steps[begins] - first
    found[rows, 0] = np.diff(begins, append=len(steps))
    found[rows, 1], found[rows, 2] = np.add.reduceat(hashes, begins), np.bitwise_xor.reduceat(hashes, begins)
    return found


def combine(parts: Iterable[Digest]) -> Digest:
    """Return the digest of parts together; of none, that of no samples."""
    rows: Digest = np.array([*parts] or np.zeros((1, 3)), dtype=np.uint64)
    whole: Digest = np.concatenate([rows[..., :2].sum(axis=0), np.bitwise_xor.reduce(rows[..., 2:])], axis=-1)
    return whole


class Ledger:
    """What this rank has seen in each step since the last checkpoint; ``total``: and on rank 0 all ranks until then."""

    def __init__(self, since: int = 0) -> None:
        self.since, self.total, self._blocks = since, combine([]), list[Digest]()
        self._waiting, self._number = list[Indices](), 0

    def add(self, samples: Indices, step: int) -> None:
        """Note the samples of a step that this rank has taken in, which is the next one."""
        self._waiting.append(samples)
        self._number += 1 + len(samples)
        if self._number > AT_ONCE:
            self._take_in(step + 1)

    def _take_in(self, until: int) -> None:
        lengths = [len(samples) for samples in self._waiting]
        first = until - len(lengths)
        samples = np.concatenate([np.zeros(0, dtype=np.int64), *self._waiting])
        self._blocks.append(digests(samples, np.repeat(np.arange(first, until), lengths), first, len(lengths)))
        self._waiting, self._number = [], 0

    def close(self, done: int) -> dict[str, Any]:
        """Return what a checkpoint after so many steps keeps, and begin anew."""
        self._take_in(done)
        kept = {"since": np.array(self.since), "total": self.total, "steps": np.concatenate(self._blocks)}
        self.since, self.total, self._blocks = done, combine([self.total, *kept["steps"]]), []
        return kept
