"""Digests of the samples that each step of a run has seen, to verify that each sample was seen exactly once."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from .order import Indices, mix

#: Count, sum and xor of the hashes of some samples, each modulo 2**64: an array of 3, or of one row a step.
Digest = np.ndarray[Any, np.dtype[np.uint64]]


def digest(samples: Indices, step: int) -> Digest:
    """Return a digest of the samples of a step.

    The hash of a sample depends on the sample and on its step. Digests of the parts of a step combine to the digest of
    the step, whichever rank has seen which part and in which order (:func:`combine`). The digest changes if a sample is
    missing, is seen twice, or is seen in another step.
    """
    hashes = mix(mix(samples.astype(np.uint64)) + np.uint64(step * 0x9E3779B97F4A7C15 % 2**64))
    return np.array([len(samples), hashes.sum(), np.bitwise_xor.reduce(hashes)], dtype=np.uint64)


def combine(parts: Iterable[Digest]) -> Digest:
    """Return one digest of all samples that several digests cover.

    Counts and sums are added, the last column is combined by xor.
    """
    rows = np.array([*parts] or np.zeros((1, 3)), dtype=np.uint64)
    return np.concatenate([rows[..., :2].sum(axis=0), np.bitwise_xor.reduce(rows[..., 2:])], axis=-1)


class Ledger:
    """Ledger of one rank: a digest of the samples that it has loaded, for each step since the last checkpoint.

    Attributes:
        total: Digest of the samples that this rank has loaded in this worker group before that checkpoint, and of this
            rank's share of the ledgers of the worker group before.
        seen: The same, with the steps since that checkpoint.
    """

    def __init__(self) -> None:
        self.total = self.seen = combine([])
        self._steps = bytearray()  # digests one after the other, which takes less memory than an array for each

    def add(self, samples: Indices, step: int) -> None:
        """Record the indices of the samples that this rank has loaded in ``step``. Call it for each step, in order."""
        added = digest(samples, step)
        self._steps += added.tobytes()
        self.seen = combine([self.seen, added])

    def continue_from(self, digests: Iterable[Digest]) -> None:
        """Add the samples of the steps before the restored one, as ranks of the worker group before recorded them."""
        self.total = self.seen = combine([self.seen, *digests])

    def flush(self, done: int) -> dict[str, Any]:
        """Return the ledger's arrays for a checkpoint after ``done`` steps, and start to record the steps after it.

        Returns:
            ``steps``, a digest for each step since the last checkpoint, ``since``, the number of steps that were done
            at that checkpoint, and ``total`` before this call.
        """
        steps = np.frombuffer(self._steps, dtype=np.uint64).reshape(-1, 3)
        arrays = {"since": done - len(steps), "total": self.total, "steps": steps}
        self.total = self.seen
        self._steps = bytearray()
        return arrays
