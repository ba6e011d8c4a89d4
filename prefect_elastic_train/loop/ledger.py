"""Digests of the samples that each step of a run has seen, to verify that each sample was seen exactly once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from prefect_elastic_train.loop.order import CHUNK_SAMPLES, Indices, mix

#: Count, sum and xor of the hashes of some samples, each modulo 2**64: an array of 3, or of one row a step.
Digest = np.ndarray[Any, np.dtype[np.uint64]]


def digests(samples: Indices, steps: Indices, first: int, count: int) -> Digest:
    """Return a digest of the samples of each step from ``first`` on, as an array of shape ``(count, 3)``.

    The hash of a sample depends on the sample and on its step. Digests of the parts of a step combine to the digest of
    the step, whichever rank has seen which part and in which order (:func:`combine`). The digest changes if a sample is
    missing, is seen twice, or is seen in another step.

    Args:
        samples: Indices of samples.
        steps: Step of each sample, in ascending order.
        first: First step.
        count: Number of steps.
    """
    rows = np.zeros((count, 3), dtype=np.uint64)
    hashes = mix(mix(samples.astype(np.uint64)) + steps.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    begins = np.flatnonzero(np.diff(steps, prepend=-1))
    seen = steps[begins] - first
    rows[seen, 0] = np.diff(begins, append=len(steps))
    rows[seen, 1] = np.add.reduceat(hashes, begins)
    rows[seen, 2] = np.bitwise_xor.reduceat(hashes, begins)
    return rows


def combine(parts: Iterable[Digest]) -> Digest:
    """Return one digest of all samples that several digests cover.

    Counts and sums are added, the last column is combined by xor.
    """
    rows: Digest = np.array([*parts] or np.zeros((1, 3)), dtype=np.uint64)
    whole: Digest = np.concatenate([rows[..., :2].sum(axis=0), np.bitwise_xor.reduce(rows[..., 2:])], axis=-1)
    return whole


class Ledger:
    """Ledger of one rank: a digest of the samples that it has loaded, for each step since the last checkpoint.

    Attributes:
        since: Number of steps that were done at the last checkpoint.
        total: Digest of the samples that this rank has loaded in this worker group before that checkpoint. On rank 0 it
            also covers the samples of all ranks of earlier worker groups.
    """

    def __init__(self, since: int = 0) -> None:
        self.since = since
        self.total = combine([])
        self._blocks: list[Digest] = []
        self._pending: list[Indices] = []  # samples of the steps without a digest yet
        self._pending_count = 0

    def add(self, samples: Indices, step: int) -> None:
        """Record the indices of the samples that this rank has loaded in ``step``. Call it for each step, in order."""
        self._pending.append(samples)
        self._pending_count += 1 + len(samples)
        if self._pending_count > CHUNK_SAMPLES:
            self._digest_pending(step + 1)

    def _digest_pending(self, done: int) -> None:
        """Compute the digests of the steps that have none yet. ``done``: number of steps that are done."""
        lengths = [len(samples) for samples in self._pending]
        first = done - len(lengths)
        samples = np.concatenate([np.zeros(0, dtype=np.int64), *self._pending])
        self._blocks.append(digests(samples, np.repeat(np.arange(first, done), lengths), first, len(lengths)))
        self._pending = []
        self._pending_count = 0

    def flush(self, done: int) -> dict[str, Any]:
        """Return the ledger's arrays for a checkpoint after ``done`` steps, and start to record the steps after it.

        Returns:
            ``since`` and ``total`` before this call, and ``steps``, a digest for each step since the last checkpoint.
        """
        self._digest_pending(done)
        arrays = {"since": np.array(self.since), "total": self.total, "steps": np.concatenate(self._blocks)}
        self.since = done
        self.total = combine([self.total, *arrays["steps"]])
        self._blocks = []
        return arrays
