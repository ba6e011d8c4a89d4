"""Replays of a session: each rank computes a batch again, so that wrong results of damaged hardware are found.

In a step with replays, each rank first computes the gradients of its first batch. With shards it then computes those of
the next rank's first shard, else those of its own batch again. All ranks exchange checksums of these gradients and of
the weights. If the gradients differ, with shards, a third rank computes them, too.
"""

import platform
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .shard_gradients import environment
from .state import random_state, restore_random_state


class WrongResultError(ArithmeticError):
    """A rank has other weights than the others, or computes other gradients of the same samples."""

    is_of_node = True


class Replays:
    """Computes the gradients of batches without effects on the training, and compares them.

    Args:
        modules: The modules of the state.
        rank: Rank of this worker.
        world_size: Number of workers.
        shards: Number of shards of a step. 0: no shards.

    Attributes:
        is_supported: False if the ranks have different hardware, versions or settings, and thus different rounding.

    Raises:
        TypeError: The parameters are sharded, or of the type complex128.
    """

    _must_vote = False

    def __init__(self, modules: Iterable[torch.nn.Module], rank: int, world_size: int, shards: int) -> None:
        self._modules = [*modules]
        self._rank = rank
        self._world_size = world_size
        self._shards = shards
        self._wrappers = [each for each in self._modules if isinstance(each, torch.nn.parallel.DistributedDataParallel)]
        #: With neither, the ranks may have different weights.
        self._is_replicated = shards or len(self._wrappers) == len(self._modules)
        self._checksums: list[int] = []  # of the weights, and of the gradients of each replay
        if any(isinstance(each, DTensor) or each.itemsize > 8 for each in self._parameters()):
            raise TypeError("replay_every does not support sharded parameters, such as of FSDP2, and complex128")
        environments = self._gather(environment())
        self.is_supported = environments.count(environments[0]) == len(environments)

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for module in self._modules for parameter in module.parameters()]

    def _gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        values = [value] * self._world_size
        if self._world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def begin(self, number: int) -> bool:
        """Begin a replay, before its forward pass. Return False if it is the third one, and not needed.

        Args:
            number: Number of the replay in its step, from 1.
        """
        if number == 1:
            self._checksums = [_checksum(each.detach() for each in self._parameters()) if self._is_replicated else 0]
        elif number == 3 and not self._must_vote:
            return False
        self._buffers = [(buffer, buffer.clone()) for module in self._modules for buffer in module.buffers()]
        self._random = random_state()
        self._clear(syncs=False)
        return True

    def _clear(self, syncs: bool) -> None:
        for parameter in self._parameters():
            parameter.grad = None
        for wrapper in self._wrappers:
            wrapper.require_backward_grad_sync = syncs

    def end(self, step: int) -> None:
        """Undo the effects of a replay, and compare the results of all ranks if there are enough.

        Raises:
            WrongResultError: This rank has a wrong result, or one of several that differ.
        """
        self._checksums.append(_checksum(each.grad for each in self._parameters() if each.grad is not None))
        self._clear(syncs=True)
        restore_random_state(self._random)
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        if len(self._checksums) < 3:
            return
        weights, *gradients = zip(*self._gather(self._checksums), strict=True)
        wrong = find_wrong_ranks(enumerate(weights))
        problem = "has other weights than the others"
        self._must_vote = False
        if not wrong:
            problem = "computes other gradients of the same samples"
            for first in range(self._world_size):
                # Those that computed the first batch of this rank, each in one replay.
                ranks = [(first - bool(self._shards) * number) % self._world_size for number in range(len(gradients))]
                wrong |= find_wrong_ranks((rank, gradients[number][rank]) for number, rank in enumerate(ranks))
            self._must_vote = bool(self._shards and wrong) and len(gradients) < 3
        if self._rank in wrong and not self._must_vote:
            raise WrongResultError(f"step {step}: rank {self._rank} on {platform.node()} {problem} ({sorted(wrong)})")


def find_wrong_ranks(results: Iterable[tuple[int, int]]) -> set[int]:
    """Return the ranks with another result than most ranks; all of them if no two ranks have the same.

    Args:
        results: Pairs of a rank and its result. A rank may have several.
    """
    each = {*results}
    [(usual, count)] = Counter(result for _, result in each).most_common(1)
    return {rank for rank, result in each if result != usual or count == 1 < len(each)}


def _checksum(tensors: Iterable[torch.Tensor]) -> int:
    """Return the sum of the values, taken as integers. Any flipped bit changes it."""
    return sum(int(each.to_dense().view(getattr(torch, f"int{8 * each.itemsize}")).sum()) for each in tensors)
