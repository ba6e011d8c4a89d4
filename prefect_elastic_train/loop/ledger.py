"""Digests of the samples that each step of a run has seen, to verify that each sample was seen exactly once."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from prefect_elastic_train.loop.order import Indices, mix

#: Count, sum and xor of the hashes of some samples, each modulo 2**64: an array of 3, or of one row a step.
Digest = np.ndarray[Any, np.dtype[np.uint64]]
_CHUNK_STEPS = 64  # steps of one numpy call, which takes about as long for a few samples


def digests(samples: Sequence[Indices], first: int) -> Digest:
    """Return a digest of the samples of each step from ``first`` on, as an array of shape ``(len(samples), 3)``.

    The hash of a sample depends on the sample and on its step. Digests of the parts of a step combine to the digest of
    the step, whichever rank has seen which part and in which order (:func:`combine`). The digest changes if a sample is
    missing, is seen twice, or is seen in another step.

    Args:
        samples: Indices of the samples of each step.
        first: First step.
    """
    rows = np.zeros((len(samples), 3), dtype=np.uint64)
    rows[:, 0] = [len(indices) for indices in samples]
    row_of_sample = np.repeat(np.arange(len(samples)), rows[:, 0].astype(np.int64))
    steps = (first + row_of_sample).astype(np.uint64)
    indices = np.concatenate([np.zeros(0, dtype=np.int64), *samples]).astype(np.uint64)
    hashes = mix(mix(indices) + steps * np.uint64(0x9E3779B97F4A7C15))
    np.add.at(rows[:, 1], row_of_sample, hashes)
    np.bitwise_xor.at(rows[:, 2], row_of_sample, hashes)
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

    def add(self, samples: Indices, step: int) -> None:
        """Record the indices of the samples that this rank has loaded in ``step``. Call it for each step, in order."""
        self._pending.append(samples)
        if len(self._pending) == _CHUNK_STEPS:
            self._digest_pending(step + 1)

    def _digest_pending(self, done: int) -> None:
        """Compute the digests of the steps that have none yet. ``done``: number of steps that are done."""
        self._blocks.append(digests(self._pending, done - len(self._pending)))
        self._pending = []

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
