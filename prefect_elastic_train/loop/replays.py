"""Replays of a session: each rank computes a batch again, so that wrong results of damaged hardware are found.

Without shards, each rank computes the gradients of its first batch before the step, and compares them with those of the
step. With shards, it computes those of its own first shard and of the next rank's. All ranks exchange checksums of
these gradients and of the weights. If the gradients differ, with shards, a third rank computes them, too.
"""

import platform
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .shard_gradients import broadcast, environment
from .state import random_state, restore_random_state


class WrongResultError(ArithmeticError):
    """The weights or gradients of a rank differ from those that other ranks, or a repetition, computed."""

    is_of_node = True  # counts as a strike against the node of the rank


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
        TypeError: The modules cannot be trained with replays.
    """

    _needs_third: Any = False  # the gradients of two replays differ, so a third one decides

    def __init__(self, modules: Iterable[torch.nn.Module], rank: int, world_size: int, shards: int) -> None:
        self._modules = [*modules]
        self._rank = rank
        self._world_size = world_size
        self._shards = shards
        self._wrappers = [each for each in self._modules if isinstance(each, torch.nn.parallel.DistributedDataParallel)]
        self._parameters = [parameter for module in self._modules for parameter in module.parameters()]
        if any(isinstance(each, DTensor) or each.is_complex() for each in self._parameters) or any(
            wrapper.static_graph for wrapper in self._wrappers
        ):
            raise TypeError(
                "replay_every: FSDP, tensor parallelism, complex weights and static_graph are not supported"
            )
        #: Modules whose weights are equal on all ranks.
        self._replicated = self._modules if shards else self._wrappers
        for wrapper in self._wrappers:  # each rank may have restored its own weights from memory, also wrong ones
            broadcast(wrapper.parameters())
        environments = self._gather(environment())
        self.is_supported = environments.count(environments[0]) == world_size

    def _gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        values = [value] * self._world_size
        if self._world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def begin(self, number: int) -> bool:
        """Begin a replay, before its forward pass. Return False if it is the third one, and not needed.

        Args:
            number: Number of the replay in its step, from 1. -1: the batch of the step that is compared with replay 1.
        """
        if number == 1:
            #: The checksum of the weights, and those of the gradients of each replay.
            self._checksums = [sum(int(_checksum(each)) for module in self._replicated for each in module.parameters())]
        elif number == 3 and not self._needs_third:
            return False
        self._is_replay = number > 0
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}  # checksums of the gradients, by parameter
        self._hooks = [
            each.register_post_accumulate_grad_hook(self._on_gradient)
            for each in self._parameters
            if each.requires_grad
        ]
        if self._is_replay:
            self._buffers = [(buffer, buffer.clone()) for module in self._modules for buffer in module.buffers()]
            self._random = random_state()
            self._clear_gradients(sync=False)
        return True

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """Add the checksum of the first gradient of a parameter, before DDP exchanges it."""
        if parameter not in self._gradients:
            self._gradients[parameter] = _checksum(parameter.grad)

    def _clear_gradients(self, sync: bool) -> None:
        """Delete all gradients, and turn DDP's exchange of gradients on or off. Buffers are exchanged in any case."""
        for parameter in self._parameters:
            parameter.grad = None
        for wrapper in self._wrappers:
            wrapper.require_backward_grad_sync = sync
            wrapper.require_forward_param_sync = True

    def end(self, step: int, are_compared: bool) -> None:
        """End what :meth:`begin` has begun, and undo the effects of a replay. Then compare the checksums of all ranks.

        They are compared after the second pass over a batch, and after a third one.

        Args:
            step: Index of the step.
            are_compared: False in the first step of a process, whose first pass may use other kernels.

        Raises:
            RuntimeError: The loop has computed no gradients.
            WrongResultError: The results of this rank differ from those of most ranks, or there is no majority.
        """
        for hook in self._hooks:
            hook.remove()
        if not self._gradients:
            raise RuntimeError("a replay has no gradients: call backward for each batch, also if session.is_replay")
        self._checksums.append(sum(map(int, self._gradients.values())))
        if self._is_replay:
            self._clear_gradients(sync=True)
            restore_random_state(self._random)
            with torch.no_grad():
                for buffer, before in self._buffers:
                    buffer.copy_(before)
            del self._buffers
        if len(self._checksums) < 3 or not are_compared:
            return
        weights, *replays = zip(*self._gather(self._checksums), strict=True)
        kind = "weights"
        wrong = find_wrong_ranks(enumerate(weights))
        if not wrong:
            kind = "gradients"
            for owner in range(self._world_size):
                wrong |= find_wrong_ranks(  # the ranks that computed the first batch of the owner
                    (rank := (owner - number if self._shards else owner) % self._world_size, results[rank])
                    for number, results in enumerate(replays)
                )
        self._needs_third = self._shards and wrong and len(replays) < 3
        if self._rank in wrong and not self._needs_third:
            raise WrongResultError(
                f"step {step}: the {kind} of rank {self._rank} on {platform.node()} differ from those computed "
                f"elsewhere or before (ranks: {sorted(wrong)}). Check the node's hardware, and that all kernels are "
                "deterministic"
            )


def find_wrong_ranks(results: Iterable[tuple[int, int]]) -> set[int]:
    """Return the ranks with another result than the majority; all ranks if there is none.

    Args:
        results: Pairs of a rank and its result. Equal results of a rank count once.
    """
    each = {*results}
    [(usual, count)] = Counter(result for _, result in each).most_common(1)
    return {rank for rank, result in each if result != usual or 2 * count <= len(each)}


def _checksum(tensor: Any) -> torch.Tensor:
    """Return the sum of the values, read as integers. One flipped bit always changes it; several may cancel out."""
    integer = getattr(torch, f"int{8 * tensor.itemsize}")
    return tensor.detach().to_dense().view(integer).sum(dtype=integer)  # several times faster than an int64 sum
