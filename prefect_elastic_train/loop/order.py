"""The samples of each optimizer step: a function of the seed, the step and the number of samples alone.

So the position in the data is the number of the step. A restart continues there with any number of workers, whatever a
data loader has prefetched. No list of all indices is made: the order of an epoch is a keyed permutation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
MAX_LENGTH = 2**48
#: Rounds of the permutation. Four make it pseudorandom (Luby and Rackoff 1988); small datasets need more.
_ROUNDS = 8
_CHUNK_SAMPLES = 8192  # samples of one numpy call, which takes about as long for a few


def permute(positions: Indices, length: int, *key: int) -> Indices:
    """Return the images of positions under a pseudorandom permutation of ``range(length)``.

    The permutation is a Feistel network over as many bits as ``length`` needs. A value of ``length`` or above is mapped
    again until it is below ("cycle walking", Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). On
    average that takes fewer than two passes. Time and memory depend on the number of positions alone.

    Args:
        positions: Integers from 0 to ``length - 1``, of any shape.
        length: Size of the permuted range, from 1 to 2**48.
        key: Integers that choose the permutation, such as seed and epoch.
    """
    bits = max(8, (length - 1).bit_length())
    low_bits = bits // 2
    right = np.uint64(low_bits)
    high_mask = np.uint64(2 ** (bits - low_bits) - 1)
    low_mask = np.uint64(2**low_bits - 1)
    keys: Any = np.random.SeedSequence([part & (2**64 - 1) for part in key]).generate_state(_ROUNDS, np.uint64)
    indices = np.array(positions, np.uint64)
    outside = np.ones(indices.shape, dtype=bool)
    while outside.any():
        high = indices[outside] >> right
        low = indices[outside] & low_mask
        for first, second in zip(keys[::2], keys[1::2], strict=True):
            high ^= mix(low ^ first) & high_mask
            low ^= mix(high ^ second) & low_mask
        indices[outside] = (high << right) | low
        outside = indices >= np.uint64(length)
    return indices.astype(np.int64)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each value (the finaliser of SplitMix64, Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@dataclass(frozen=True)
class SampleOrder:
    """Sample order of a training: the indices of the samples of each optimizer step, and the share of each rank.

    Steps, epochs and indices count from 0. The samples of a step do not depend on the number of workers.

    Attributes:
        length: Number of samples in the dataset, from 1 to 2**48.
        global_batch: Samples of an optimizer step, over all workers.
        seed: Seed of the shuffled order. Each epoch has another order.
        shuffle: If False, each epoch has the order of the dataset.
        drop_last: Leave out the last step of an epoch if it has fewer samples than ``global_batch``.

    Raises:
        ValueError: ``length`` or ``global_batch`` is out of range.

    Example::

        order = loop.SampleOrder(length=10, global_batch=4, seed=0)
        order.indices(0)                        # 4 of range(10)
        order.share(0, rank=1, world_size=2)    # the last 2 of these
    """

    length: int
    global_batch: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.length <= MAX_LENGTH:
            raise ValueError(f"length={self.length}: a dataset has from 1 to {MAX_LENGTH} samples")
        limit = self.length if self.drop_last else MAX_LENGTH
        if not 1 <= self.global_batch <= limit:
            reason = " with drop_last=True, which would leave no step in an epoch" if self.drop_last else ""
            raise ValueError(f"global_batch={self.global_batch}: must be from 1 to {limit}{reason}")

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps of an epoch."""
        return self.length // self.global_batch if self.drop_last else math.ceil(self.length / self.global_batch)

    def epoch(self, step: int) -> int:
        """Return the number of the epoch that contains a step, from 0."""
        return step // self.steps_per_epoch

    def size(self, step: int) -> int:
        """Return the number of samples of a step: ``global_batch``, or the rest of the epoch in its last step."""
        return min(self.global_batch, self.length - step % self.steps_per_epoch * self.global_batch)

    def indices(self, step: int) -> Indices:
        """Return the indices, in the dataset, of the samples of a step over all workers."""
        return self.share(step, 0, 1)

    def share(self, step: int, rank: int, world_size: int, part: int = 0, parts: int = 1) -> Indices:
        """Return the indices, in the dataset, of the samples that one rank trains on in a step or micro batch.

        The shares of two ranks in a step differ by at most one sample.

        Args:
            step: Number of the step.
            rank: Rank of the worker.
            world_size: Number of workers.
            part: Number of the micro batch, from 0.
            parts: Number of micro batches of the step.
        """
        return self.samples(self.epoch(step), np.arange(*self.bounds(step, rank, world_size, part, parts)))

    def weight(self, step: int, rank: int, world_size: int, part: int = 0, parts: int = 1) -> float:
        """Return the weight of the mean over a rank's share, such that weighted means give the mean over the step.

        Sum the weighted means over the micro batches, and average the sums over the ranks. Arguments as in
        :meth:`share`.
        """
        begin, end = self.bounds(step, rank, world_size, part, parts)
        return (end - begin) * world_size / self.size(step)

    def bounds(self, step: int, rank: int, world_size: int, part: int = 0, parts: int = 1) -> tuple[int, int]:
        """Return the begin and the end of a rank's share of a step, as positions in the sample order of its epoch.

        The end is exclusive. Arguments as in :meth:`share`.
        """
        offset = step % self.steps_per_epoch * self.global_batch
        size = self.size(step)
        begin = offset + size * rank // world_size
        length = offset + size * (rank + 1) // world_size - begin
        return begin + length * part // parts, begin + length * (part + 1) // parts

    def samples(self, epoch: int, positions: Indices) -> Indices:
        """Return the indices, in the dataset, of the samples at some positions of an epoch's sample order."""
        return permute(positions, self.length, self.seed, epoch) if self.shuffle else positions


class BatchPosition(NamedTuple):
    """Position of a batch in a training.

    Attributes:
        step: Index of the step.
        part: Index of the micro batch or shard in the step.
        parts: Number of micro batches of each rank, or number of shards of all ranks.
        is_last: True for the rank's last batch of the step.
        replay: Number of the replay in its step, from 1. 0: no replay.
    """

    step: int
    part: int
    parts: int
    is_last: bool
    replay: int = 0


def shards_of(rank: int, world_size: int, shards: int) -> range:
    """Return the indices of the shards of a step that a rank computes."""
    return range(shards * rank // world_size, shards * (rank + 1) // world_size)


@dataclass(frozen=True)
class StepBatches:
    """Batches of one rank in a range of steps, as a ``batch_sampler`` of ``torch.utils.data.DataLoader``.

    Yields a list of indices for each batch. A rank without a sample in a step gets one sample, of weight 0.

    Attributes:
        order: Order of the samples.
        steps: Steps to yield the batches of.
        rank: Rank of the worker.
        world_size: Number of workers.
        micro_batch: Largest number of samples of a batch. A step then has several batches, equally many on each rank.
            0: one batch a step.
        shards: Number of shards of a step, over all ranks. Each shard is a batch. 0: no shards.
        replay_every: Interval, with shards, of the steps that begin with three shards to replay: this rank's first one,
            and those of the next two ranks. 0: none.

    Example::

        order = loop.SampleOrder(len(dataset), global_batch=256)
        batches = loop.StepBatches(order, range(done, steps), rank, world_size)
        loader = torch.utils.data.DataLoader(dataset, batch_sampler=batches, num_workers=4)
    """

    order: SampleOrder
    steps: range
    rank: int = 0
    world_size: int = 1
    micro_batch: int = 0
    shards: int = 0
    replay_every: int = 0

    @property
    def share(self) -> tuple[int, int]:
        """Rank and world size of the share that is divided into batches; with shards (0, 1), all samples of a step."""
        return (0, 1) if self.shards else (self.rank, self.world_size)

    def positions(self) -> Iterator[BatchPosition]:
        """Yield the position of each batch of this rank."""
        for step in self.steps:
            largest_share = math.ceil(self.order.size(step) / self.world_size)
            parts = math.ceil(largest_share / self.micro_batch) if self.micro_batch else self.shards or 1
            own = shards_of(self.rank, self.world_size, self.shards) or range(parts)
            if self.shards and self.replay_every and step % self.replay_every == 0:
                for number in range(3):
                    part = shards_of((self.rank + number) % self.world_size, self.world_size, self.shards)[0]
                    yield BatchPosition(step, part, parts, False, number + 1)
            yield from (BatchPosition(step, part, parts, part == own[-1]) for part in own)

    def arrays(self) -> Iterator[Indices]:
        """Yield, for each batch of this rank, the indices of its samples in the dataset as an array."""
        chunk_batches = 1 + _CHUNK_SAMPLES // (1 + self.order.global_batch // self.world_size)
        for epoch, positions in groupby(self.positions(), key=lambda position: self.order.epoch(position.step)):
            while chunk := list(islice(positions, chunk_batches)):
                bounds = [self.order.bounds(step, *self.share, part, parts) for step, part, parts, *_ in chunk]
                # A rank without a share gets one sample, since it takes part in collective operations.
                ranges = [np.arange(begin, max(end, begin + 1)) for begin, end in bounds]
                samples = self.order.samples(epoch, np.concatenate(ranges))
                yield from np.split(samples, np.cumsum([len(batch) for batch in ranges])[:-1])

    def __iter__(self) -> Iterator[list[int]]:
        return (samples.tolist() for samples in self.arrays())

    def __len__(self) -> int:
        return sum(1 for _ in self.positions())
