"""Which samples each optimizer step sees: a function of the seed, the step and the number of samples alone.

So the position in the data is the number of the step: a restart goes on there, with any number of workers, however far
a loader had read ahead. No list of all indices is made: an epoch's order is a keyed permutation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
MAX_LENGTH = 2**48
#: Of the permutation. Four make some of it look random (Luby and Rackoff 1988); small halves need more to be even.
_ROUNDS = 8
AT_ONCE = 8192  # samples that are looked up, or taken in, at once: numpy takes as long for a few


def permute(positions: Indices, length: int, *key: int) -> Indices:
    """Return where positions of ``range(length)`` go in the permutation that belongs to a key, some integers.

    A Feistel network over as many bits as ``length`` takes, in which each half is changed by a keyed function of the
    other; what it maps beyond ``length`` is mapped again until it is below ("cycle walking", Black and Rogaway 2002,
    "Ciphers with arbitrary finite domains"). On average fewer than two walks.
    """
    bits = max(8, (length - 1).bit_length())
    right = np.uint64(bits // 2)
    masks = np.uint64((1 << (bits - bits // 2)) - 1), np.uint64((1 << (bits // 2)) - 1)
    seeds = np.random.SeedSequence([part & (2**64 - 1) for part in key])
    keys: Any = seeds.generate_state(_ROUNDS, np.uint64)
    indices = np.asarray(positions).astype(np.uint64)
    outside: Any = np.ones(indices.shape, dtype=bool)
    while outside.any():
        walking = indices[outside]
        high, low = walking >> right, walking & masks[1]
        for first, second in zip(keys[::2], keys[1::2], strict=True):
            high ^= mix(low ^ first) & masks[0]
            low ^= mix(high ^ second) & masks[1]
        indices[outside] = (high << right) | low
        outside = indices >= np.uint64(length)
    return indices.astype(np.int64)


def mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return 64 bits of which each depends on all of a word's (the finaliser of SplitMix64, Steele et al. 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


@dataclass(frozen=True)
class SampleOrder:
    """The samples of each global step, and each rank's share of them.

    Attributes:
        length, global_batch: Samples of the dataset, and of an optimizer step over all workers.
        seed, shuffle: Each epoch has an order of its own, others with another seed; or that of the dataset.
        drop_last: Whether the last step of an epoch is left out if it had fewer samples than ``global_batch``.
    """

    length: int
    global_batch: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.length <= MAX_LENGTH:
            raise ValueError(f"length={self.length}: a dataset has from 1 to {MAX_LENGTH} samples")
        most = self.length if self.drop_last else MAX_LENGTH
        if not 1 <= self.global_batch <= most:
            without = " with drop_last=True, which else leaves no step in an epoch" if self.drop_last else ""
            raise ValueError(f"global_batch={self.global_batch}: must be from 1 to {most}{without}")

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch."""
        return self.length // self.global_batch if self.drop_last else math.ceil(self.length / self.global_batch)

    def epoch(self, step: int) -> int:
        """Return the epoch of a step; both from 0."""
        return step // self.steps_per_epoch

    def size(self, step: int) -> int:
        """Return the number of samples of a step: ``global_batch``, or what an epoch has left."""
        return min(self.global_batch, self.length - step % self.steps_per_epoch * self.global_batch)

    def indices(self, step: int) -> Indices:
        """Return the samples of a step, from 0, over all workers."""
        return self.share(step, 0, 1)

    def share(self, step: int, rank: int, world_size: int, part: int = 0, parts: int = 1) -> Indices:
        """Return a rank's part of a step's samples, or a part of that; the sizes of ranks differ by at most one."""
        return self.samples(self.epoch(step), np.arange(*self.bounds(step, rank, world_size, part, parts)))

    def weight(self, step: int, rank: int, world_size: int, part: int = 0, parts: int = 1) -> float:
        """Return what a rank's mean over a share counts: averaged over ranks, summed over parts, it is the step's."""
        begin, end = self.bounds(step, rank, world_size, part, parts)
        return (end - begin) * world_size / self.size(step)

    def bounds(self, step: int, rank: int, world_size: int, part: int = 0, parts: int = 1) -> tuple[int, int]:
        """Return where in the order of its epoch a share begins and ends."""
        before, size = step % self.steps_per_epoch * self.global_batch, self.size(step)
        begin, end = before + size * rank // world_size, before + size * (rank + 1) // world_size
        return begin + (end - begin) * part // parts, begin + (end - begin) * (part + 1) // parts

    def samples(self, epoch: int, positions: Indices) -> Indices:
        """Return the samples at positions of an epoch's order."""
        return permute(positions, self.length, self.seed, epoch) if self.shuffle else positions


@dataclass(frozen=True)
class StepBatches:
    """A rank's share of each of some steps, for ``torch.utils.data.DataLoader(dataset, batch_sampler=...)``.

    A batch has at most ``micro_batch`` samples, and a step several batches, as many on each rank; 0: no bound.
    """

    order: SampleOrder
    steps: range
    rank: int = 0
    world_size: int = 1
    micro_batch: int = 0

    def places(self) -> Iterator[tuple[int, int, int]]:
        """Yield for each batch its step, its number in that and how many that has."""
        for step in self.steps:
            most = math.ceil(self.order.size(step) / self.world_size)
            parts = math.ceil(most / self.micro_batch) if self.micro_batch else 1
            yield from ((step, part, parts) for part in range(parts))

    def arrays(self) -> Iterator[Indices]:
        """Yield the samples of each batch."""
        batches = 1 + AT_ONCE // (1 + self.order.global_batch // self.world_size)
        for epoch, places in groupby(self.places(), key=lambda place: self.order.epoch(place[0])):
            while some := list(islice(places, batches)):
                bounds = [self.order.bounds(step, self.rank, self.world_size, *part) for step, *part in some]
                # A step with fewer samples than there are ranks: each has one to compute with, which counts nothing.
                found = [np.arange(begin, max(end, begin + 1)) for begin, end in bounds]
                samples = self.order.samples(epoch, np.concatenate(found))
                yield from np.split(samples, np.cumsum([len(one) for one in found])[:-1])

    def __iter__(self) -> Iterator[list[int]]:
        return (samples.tolist() for samples in self.arrays())

    def __len__(self) -> int:
        return sum(1 for _ in self.places()) if self.micro_batch else len(self.steps)
