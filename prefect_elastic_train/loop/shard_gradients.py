"""Gradients that are bit-equal at any number of workers: sums over fixed shards of the batch, in a fixed order.

The gradients of the shards of a step are added along a binary tree. A block is a subtree: the sum over 1, 2, 4, ...
shards, the first of which is a multiple of that. Each rank adds the gradients of its shards to as few blocks as
possible, then the ranks exchange their blocks. A rank adds up one chunk of them, in the order of the tree, and gathers
the others' chunks. With one block a rank, that is the traffic of an all-reduce.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .order import shards_of

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
_BUCKET_BYTES = 25 * 2**20  # as of DistributedDataParallel
_BUCKETS_IN_FLIGHT = 2  # buckets whose exchange goes on while the next one is computed
_UNSUPPORTED = (DistributedDataParallel, FullyShardedDataParallel, torch.nn.SyncBatchNorm)


class Block(NamedTuple):
    """A sum over shards: the number of the first one, the number of shards, and the values."""

    first: int
    size: int
    values: Any


def add_block(blocks: list[Block], block: Block) -> Iterator[Any]:
    """Append a block to those of the shards before, and add up each two that are the halves of a larger block.

    The sums are computed in place. Yields the values of the blocks that are no longer used.
    """
    while blocks and blocks[-1].size == block.size and blocks[-1].first % (2 * block.size) == 0:
        first, size, values = blocks.pop()
        yield block.values
        values += block.values
        block = Block(first, 2 * size, values)
    blocks.append(block)


def blocks_of(shards: Iterable[int]) -> list[Block]:
    """Return the blocks of some shards, with 0 as values."""
    blocks: list[Block] = []
    for shard in shards:
        list(add_block(blocks, Block(shard, 1, 0)))
    return blocks


class _Bucket:
    """Some tensors of one data type and device, whose values for each shard are added up.

    Args:
        tensors: The tensors.
        blocks: The blocks of each rank, in the order of the ranks.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], blocks: Sequence[Sequence[Block]]) -> None:
        self.tensors = tensors
        self.waiting: set[torch.Tensor] = set()  # those that have no gradient of the current shard yet
        self._counts = [*map(len, blocks)]
        self._shape_of_all = [block[:2] for block in chain(*blocks)]
        self._blocks: list[Block] = []
        self._unused: list[torch.Tensor] = []
        self._padding = tensors[0].new_zeros(-sum(tensor.numel() for tensor in tensors) % len(blocks))

    def add(self, shard: int, values: Sequence[torch.Tensor | None]) -> None:
        """Add the values of a shard; None: zeros."""
        pairs = zip(self.tensors, values, strict=True)
        flat = [(torch.zeros_like(tensor) if value is None else value).reshape(-1) for tensor, value in pairs]
        if self._blocks and self._blocks[-1].size == 1 and shard % 2:  # add to the other half without a copy
            block = Block(shard - 1, 2, self._blocks.pop().values)
            for total, part in zip(block.values.split([*map(len, flat), len(self._padding)]), flat, strict=False):
                total += part
        else:
            unused = self._unused.pop() if self._unused else None
            block = Block(shard, 1, torch.cat([*flat, self._padding], out=unused))
        self._unused += add_block(self._blocks, block)

    def start(self) -> None:
        """Start to exchange the blocks with the other ranks."""
        own = [block.values for block in self._blocks]
        self._blocks = []
        self._unused += own
        self._sum = own[0]
        if (ranks := len(self._counts)) == 1:
            return
        self._sent = own[0] if len(own) == 1 else torch.stack(own).view(len(own), ranks, -1).transpose(0, 1).flatten()
        chunk = len(own[0]) // ranks
        self._received = self._sent.new_empty(len(self._shape_of_all), chunk)
        size = chunk * self._sent.element_size()
        self._work = dist.all_to_all_single(
            _bytes(self._received),
            _bytes(self._sent),
            [size * count for count in self._counts],
            [size * len(own)] * ranks,
            async_op=True,
        )

    def add_up(self) -> None:
        """Add up this rank's chunk of all blocks, and start to gather the chunks of all ranks."""
        if len(self._counts) > 1:
            self._work.wait()
            blocks: list[Block] = []
            for shape, row in zip(self._shape_of_all, self._received, strict=True):
                list(add_block(blocks, Block(*shape, row)))
            self._work = _all_gather(_bytes(self._sum), _bytes(blocks[0].values), async_op=True)

    def sums(self) -> list[torch.Tensor]:
        """Wait for the exchange, and return the sum of each tensor's values, valid until the next step."""
        if len(self._counts) > 1:
            self._work.wait()
            self._sent = self._received = self._padding  # free the memory
        sizes = [tensor.numel() for tensor in self.tensors]
        parts = self._sum[: sum(sizes)].split(sizes)
        return [part.view(tensor.shape) for part, tensor in zip(parts, self.tensors, strict=True)]


class ShardGradients:
    """Computes the gradients of modules from the shards of each step.

    Buffers are the same at the start of each shard of a step. After the step, those of floats, such as the running
    statistics of BatchNorm, are the weighted mean of their values after each shard.

    Args:
        modules: The modules. Their parameters and buffers are sent from rank 0 to the other ranks.
        rank: Rank of this worker.
        world_size: Number of workers.
        shards: Number of shards of a step over all workers, a power of two.

    Attributes:
        is_computed: True if the current shard has its gradients.
        environments: The :func:`environment` of this rank, and that of rank 0.

    Raises:
        TypeError: The modules cannot be trained with shards.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], rank: int, world_size: int, shards: int) -> None:
        self._modules = [*modules]
        self._check()
        own = shards_of(rank, world_size, shards)
        self._first = own[0]
        self._last = own[-1]
        self._blocks = [blocks_of(shards_of(each, world_size, shards)) for each in range(world_size)]
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[torch.Tensor, _Bucket] = {}
        self._hooks: list[Any] = []
        self._statistics: list[tuple[_Bucket, list[torch.Tensor]]] = []  # float buffers and their values at the start
        self._others: list[tuple[torch.Tensor, torch.Tensor]] = []  # the same of other buffers
        self._collected = -1  # number of buckets that have the gradients of the current shard; -1: outside of backward
        self._shard = 0
        self._weight = 0.0
        self.is_computed = True
        first = [environment()]
        if world_size > 1:
            dist.broadcast_object_list(first, 0)
            for tensor in (*self._tensors("parameters"), *self._tensors("buffers")):
                values = tensor.detach().contiguous().reshape(-1)
                dist.broadcast(_bytes(values), 0)
                tensor.detach().copy_(values.view(tensor.shape))
        self.environments = (environment(), first[0])

    def _check(self) -> None:
        """Raise TypeError if the modules cannot be trained with shards."""
        for name, module in chain(*(module.named_modules() for module in self._modules)):
            if isinstance(module, _UNSUPPORTED) or getattr(module, "sparse", False):
                kind = type(module).__name__
                raise TypeError(
                    f"shards do not support {kind} (module {name!r}): the session sums the gradients itself. Give "
                    "plain modules with dense gradients, without prepare_model, and BatchNorm, not SyncBatchNorm"
                )
        if any(isinstance(parameter, DTensor) for parameter in self._tensors("parameters")):
            raise TypeError("shards do not support sharded parameters, such as of FSDP2 or tensor parallelism")

    def _tensors(self, kind: str) -> list[torch.Tensor]:
        """Return the "parameters" or "buffers" of all modules, each once."""
        return [*dict.fromkeys(chain(*(getattr(module, kind)() for module in self._modules)))]

    def begin(self, shard: int, weight: float) -> None:
        """Begin a shard, before its forward pass.

        Args:
            shard: Number of the shard.
            weight: Its share of the samples of the step. If it is 0, its gradients are zeros.

        Raises:
            RuntimeError: The shard before has no gradients.
        """
        if not self.is_computed:
            raise RuntimeError("a batch had no backward pass: call session.backward(loss) for each")
        self._shard = shard
        self._weight = weight
        self.is_computed = False
        if shard > self._first:
            return
        parameters = [parameter for parameter in self._tensors("parameters") if parameter.requires_grad]
        if {*parameters} != self._bucket_of.keys():
            for hook in self._hooks:
                hook.remove()
            self._buckets = self._group(parameters[::-1])  # about the order in which they get gradients
            self._bucket_of = {tensor: bucket for bucket in self._buckets for tensor in bucket.tensors}
            self._hooks = [each.register_post_accumulate_grad_hook(self._on_gradient) for each in parameters]
        for parameter in parameters:
            parameter.grad = None
        buffers = self._tensors("buffers")
        groups = self._group([buffer for buffer in buffers if buffer.is_floating_point()])
        self._statistics = [(bucket, [buffer.clone() for buffer in bucket.tensors]) for bucket in groups]
        self._others = [(buffer, buffer.clone()) for buffer in buffers if not buffer.is_floating_point()]

    def _group(self, tensors: Sequence[torch.Tensor]) -> list[_Bucket]:
        """Return the tensors in buckets of one data type and device each."""
        groups = defaultdict(list)
        for tensor, begin in zip(tensors, accumulate((each.nbytes for each in tensors), initial=0), strict=False):
            groups[tensor.dtype, tensor.device, begin // _BUCKET_BYTES].append(tensor)
        return [_Bucket(group, self._blocks) for group in groups.values()]

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of the shard. After this rank's last one, the parameters have those of the step.

        Args:
            loss: Loss of the shard, multiplied by its weight.

        Raises:
            RuntimeError: The shard has gradients already.
        """
        if self.is_computed:
            raise RuntimeError("call session.backward() once for a batch, with the sum of its losses")
        for bucket in self._buckets:
            bucket.waiting = {*bucket.tensors}
        self._collected = 0
        if self._weight:
            loss.backward()
        self.is_computed = True
        with torch.no_grad():
            self._collect(are_missing_zero=True)
            self._collected = -1
            for bucket, before in self._statistics:
                pairs = [*zip(bucket.tensors, before, strict=True)]
                changes = [torch.where(new == old, 0, (new - old) * self._weight) for new, old in pairs]
                bucket.add(self._shard, changes if self._weight else [None] * len(pairs))
                for new, old in pairs:
                    new.copy_(old)
            if self._shard == self._last:
                self._finish()
            else:
                for new, old in self._others:
                    new.copy_(old)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """Add the gradients of a bucket to the sums as soon as all of them are computed."""
        if self._collected < 0:
            return
        waiting = self._bucket_of[parameter].waiting
        if parameter not in waiting:
            raise RuntimeError(
                "a parameter got two gradients in one backward pass. Is it used in several segments of "
                "torch.utils.checkpoint? Use use_reentrant=False"
            )
        waiting.remove(parameter)
        with torch.no_grad():
            self._collect()

    def _collect(self, are_missing_zero: bool = False) -> None:
        """Add the gradients of complete buckets to the sums. After the last shard, start to exchange them.

        All ranks do that in the same order.
        """
        for bucket in self._buckets[self._collected :]:
            if bucket.waiting and not are_missing_zero:
                return
            bucket.add(self._shard, [parameter.grad for parameter in bucket.tensors])
            for parameter in bucket.tensors:
                parameter.grad = None
            if self._shard == self._last:
                bucket.start()
                if self._collected >= _BUCKETS_IN_FLIGHT:
                    self._buckets[self._collected - _BUCKETS_IN_FLIGHT].add_up()
            self._collected += 1

    def _finish(self) -> None:
        """Complete the exchange, and set the gradients and the buffers."""
        for bucket in self._buckets[-_BUCKETS_IN_FLIGHT:]:
            bucket.add_up()
        for bucket, _ in self._statistics:
            bucket.start()
            bucket.add_up()
        for bucket in self._buckets:
            for parameter, gradient in zip(bucket.tensors, bucket.sums(), strict=True):
                parameter.grad = gradient
        for bucket, before in self._statistics:
            for buffer, old, change in zip(bucket.tensors, before, bucket.sums(), strict=True):
                buffer.copy_(old + change)


def environment() -> dict[str, Any]:
    """Return what the bits of a result depend on besides the program: the processor, its threads, and settings."""
    on_gpu = torch.cuda.is_initialized()
    return {
        "torch": torch.__version__,
        "processor": torch.cuda.get_device_name() if on_gpu else torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
    }


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as a vector of bytes, which each backend can send."""
    return tensor.view(-1).view(torch.uint8)
