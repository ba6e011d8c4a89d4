"""Gradients that are bitwise identical with any number of workers: sums over shards of the batch, in a fixed order.

The gradients of the shards of a step are added along a binary tree. A partial sum covers 2^k consecutive shards,
starting at a multiple of 2^k. Each rank adds the gradients of its shards to as few partial sums as possible, then the
ranks exchange them: each adds up one chunk of all partial sums, in the order of the tree, and gathers the chunks of the
others. With one partial sum for each rank, the traffic is that of an all-reduce.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from .order import shards_of

_BUCKET_BYTES = 25 * 2**20  # the default of DistributedDataParallel
_UNSUPPORTED = (torch.nn.parallel.DistributedDataParallel, FullyShardedDataParallel, torch.nn.SyncBatchNorm)


class PartialSum(NamedTuple):
    """A sum over consecutive shards: the index of the first shard, the number of shards, and the values."""

    first: int
    size: int
    values: Any


def add_partial_sum(sums: list[PartialSum], new: PartialSum) -> list[Any]:
    """Append a partial sum to those of the shards before, and merge pairs that are halves of a larger one.

    The sums are computed in place. Returns the values that are no longer used.
    """
    unused = []
    while sums and sums[-1].size == new.size and sums[-1].first % (2 * new.size) == 0:
        first, size, values = sums.pop()
        values += new.values
        unused.append(new.values)
        new = PartialSum(first, 2 * size, values)
    sums.append(new)
    return unused


def partial_sums_of(shards: Iterable[int]) -> list[PartialSum]:
    """Return the partial sums of some consecutive shards, with 0 as values."""
    sums: list[PartialSum] = []
    for shard in shards:
        add_partial_sum(sums, PartialSum(shard, 1, 0))
    return sums


class _Bucket:
    """Tensors of one data type and device, whose values are summed over the shards.

    Args:
        tensors: The tensors.
        sums: The partial sums of each rank, in the order of the ranks.
        rank: This rank.
    """

    _current: torch.Tensor | None = None  # the sum to which values are added

    def __init__(self, tensors: Sequence[torch.Tensor], sums: Sequence[Sequence[PartialSum]], rank: int) -> None:
        self.tensors = tensors
        self._sums = sums
        self._rank = rank
        self.own: list[PartialSum] = []
        self._unused: list[torch.Tensor] = []
        self._sizes = [tensor.numel() for tensor in tensors]
        self._length = -(-sum(self._sizes) // len(sums)) * len(sums)
        self._known: dict[torch.Tensor, Any] = {}  # results of _views

    def begin(self) -> None:
        """Begin a shard."""
        self.waiting = {*self.tensors}  # those that have no values of the shard yet
        if self._current is None:
            self._current = self._unused.pop() if self._unused else self.tensors[0].new_zeros(self._length)
            self._totals = self._views(self._current)
            self._empty = {*self.tensors}  # those that have no values in the current sum yet

    def _views(self, values: torch.Tensor) -> Any:
        if values not in self._known:
            parts = values[: sum(self._sizes)].split(self._sizes)
            self._known[values] = {
                tensor: part.as_strided(tensor.shape, torch.empty_like(tensor.detach(), device="meta").stride())
                for tensor, part in zip(self.tensors, parts, strict=True)
            }
        return self._known[values]

    def add(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Add the values of a tensor to the current sum."""
        self.waiting.remove(tensor)
        total = self._totals[tensor]
        if tensor in self._empty:
            self._empty.remove(tensor)
            total.copy_(values)
        else:
            total += values

    def end(self, first: int, size: int) -> None:
        """Add the current sum, which covers ``size`` shards from ``first`` on, to the partial sums."""
        for tensor in self._empty:
            self._totals[tensor].fill_(-0.0)  # changes no bits of what it is added to; 0.0 changes -0.0
        self._unused += add_partial_sum(self.own, PartialSum(first, size, self._current))
        self._current = None

    def clear(self) -> None:
        """Drop all sums. Their memory is used again from the next step on."""
        self._unused += [each.values for each in self.own]
        self.own = []
        self._empty = {*self.tensors}

    def start_exchange(self) -> None:
        """Start to exchange the partial sums with the other ranks: each gets one chunk of all of them."""
        own = [each.values.view(len(self._sums), -1) for each in self.own]
        self._sum = self.own[0].values
        self._chunks = own[0]
        self.clear()
        self._parts = []  # this rank's chunk of all partial sums
        operations = []
        for peer, sums in enumerate(self._sums):
            if peer == self._rank:
                rows = [chunks[peer] for chunks in own]
            else:
                rows = [torch.empty_like(own[0][0]) for _ in sums]
                operations += [dist.P2POp(dist.irecv, row, peer) for row in rows]
                operations += [dist.P2POp(dist.isend, chunks[peer], peer) for chunks in own]
            self._parts += [each._replace(values=row) for each, row in zip(sums, rows, strict=True)]
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def start_gather(self) -> None:
        """Add up this rank's chunk of all partial sums, and start to gather the chunks of all ranks."""
        self.wait()
        sums: list[PartialSum] = []
        for part in self._parts:
            add_partial_sum(sums, part)
        self._parts = []  # free the memory
        own = self._chunks[self._rank].copy_(sums[0].values)
        operations = []
        for peer, chunk in enumerate(self._chunks):
            if peer != self._rank:
                operations += [dist.P2POp(dist.irecv, chunk, peer), dist.P2POp(dist.isend, own, peer)]
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> Any:
        """Wait for what was started. After the gather, return the sums by tensor, valid until the next step."""
        for work in self._works:
            work.wait()
        return self._views(self._sum)


class ShardGradients:
    """Computes the gradients of modules from the shards of each step.

    Buffers are reset before each shard of a step. After the step, float buffers such as BatchNorm's running statistics
    are the weighted mean over the shards. Others are those of this rank's last shard.

    Args:
        modules: The modules. Their parameters and buffers are sent from rank 0 to the other ranks.
        rank: Rank of this worker.
        world_size: Number of workers.
        shards: Number of shards of a step over all workers, a power of two.

    Attributes:
        has_gradients: True if the current shard has its gradients.
        environments: The :func:`environment` of this rank, and that of rank 0.

    Raises:
        TypeError: The modules cannot be trained with shards.
    """

    has_gradients = True
    _collected = -1  # number of buckets that have the gradients of the current shard; -1: outside of backward

    def __init__(self, modules: Iterable[torch.nn.Module], rank: int, world_size: int, shards: int) -> None:
        self._modules = [*modules]
        self._check()
        own = shards_of(rank, world_size, shards)
        self._rank = rank
        self._first = own[0]
        self._last = own[-1]
        self._sums = [partial_sums_of(shards_of(each, world_size, shards)) for each in range(world_size)]
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[torch.Tensor, _Bucket] = {}
        self._hooks: list[Any] = []
        self._before: dict[torch.Tensor, torch.Tensor] = {}  # values of the buffers before the step
        self._buffer_buckets: list[_Bucket] = []  # buckets for the changes of float buffers
        first = [environment()]
        if world_size > 1:
            dist.broadcast_object_list(first, 0)
            broadcast((*self._tensors("parameters"), *self._tensors("buffers")))
        self.environments = (environment(), first[0])

    def _check(self) -> None:
        """Raise TypeError if the modules cannot be trained with shards."""
        for name, module in chain(*(module.named_modules() for module in self._modules)):
            if isinstance(module, _UNSUPPORTED) or getattr(module, "sparse", False) is True:
                raise TypeError(
                    f"shards do not support {type(module).__name__} (module {name!r}): the session sums the gradients "
                    "itself. Give unwrapped modules (no prepare_model) with dense gradients, and BatchNorm in place of "
                    "SyncBatchNorm"
                )
        parameters = self._tensors("parameters")
        if len({each.device for each in parameters}) != 1 or any(isinstance(each, DTensor) for each in parameters):
            raise TypeError(
                "shards need modules in the state with all parameters on one device, and do not support sharded "
                "parameters, such as of FSDP2 or tensor parallelism"
            )

    def _tensors(self, kind: str) -> list[torch.Tensor]:
        """Return the "parameters" or "buffers" of all modules, each once."""
        return [*dict.fromkeys(chain(*(getattr(module, kind)() for module in self._modules)))]

    def begin(self, shard: int, weight: float) -> None:
        """Begin a shard, before its forward pass.

        Args:
            shard: Index of the shard.
            weight: Its share of the samples of the step. If it is 0, its gradients are zeros.

        Raises:
            RuntimeError: :meth:`backward` was not called for the shard before.
        """
        if not self.has_gradients and shard > self._first:
            raise RuntimeError("session.backward() was not called for the last batch: call it for each")
        self._shard = shard
        self._weight = weight
        self.has_gradients = False
        if shard > self._first:
            return
        for bucket in (*self._buckets, *self._buffer_buckets):
            bucket.clear()
        self._parameters = self._tensors("parameters")
        for parameter in self._parameters:
            parameter.grad = None
        if self._before.keys() != {*(buffers := self._tensors("buffers"))}:
            self._buffer_buckets = self._group([buffer for buffer in buffers if buffer.is_floating_point()])
        self._before = {buffer: buffer.clone() for buffer in buffers}

    def _group(self, tensors: Sequence[torch.Tensor]) -> list[_Bucket]:
        """Return the tensors in buckets of one data type and device each."""
        groups = defaultdict(list)
        for tensor, begin in zip(tensors, accumulate((each.nbytes for each in tensors), initial=0), strict=False):
            groups[tensor.dtype, tensor.device, begin // _BUCKET_BYTES].append(tensor)
        return [_Bucket(group, self._sums, self._rank) for group in groups.values()]

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of the shard. After this rank's last one, the parameters have those of the step.

        Args:
            loss: Loss of the shard, multiplied by its weight.

        Raises:
            RuntimeError: The shard has gradients already.
        """
        if self.has_gradients:
            raise RuntimeError(
                "session.backward() was called twice for a batch: call it once, with the sum of the losses"
            )
        parameters = [parameter for parameter in self._parameters if parameter.requires_grad]
        if self._shard == self._first and {*parameters} != self._bucket_of.keys():
            for hook in self._hooks:
                hook.remove()
            self._buckets = self._group(parameters[::-1])  # about the order in which they get gradients
            self._bucket_of = {tensor: bucket for bucket in self._buckets for tensor in bucket.tensors}
            self._hooks = [each.register_post_accumulate_grad_hook(self._on_gradient) for each in parameters]
        if (
            {*parameters} != self._bucket_of.keys()
            or any(parameter.grad is not None for parameter in self._parameters)
            or (self._shard == self._last and {*self._tensors("buffers")} != self._before.keys())
        ):
            raise RuntimeError(
                "within a step, requires_grad was changed, a buffer was replaced (use buffer.copy_(...)), or gradients "
                "were computed without session.backward(), such as by a wrapper of the module"
            )
        for bucket in self._buckets:
            bucket.begin()
        self._collected = 0
        try:
            if self._weight:
                loss.backward()
            self._collect(are_all_complete=True)
        finally:
            self._collected = -1
        self.has_gradients = True
        with torch.no_grad():
            for bucket in self._buffer_buckets:
                bucket.begin()
                for new in bucket.tensors if self._weight else ():
                    old = self._before[new]
                    bucket.add(new, torch.where(new == old, -0.0, (new - old) * self._weight))
                self._end(bucket)
            for new, old in self._before.items():
                if new.is_floating_point() or self._shard < self._last:
                    new.copy_(old)
            if self._shard == self._last:
                self._finish()

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """Add the gradients of a bucket to the sums as soon as all of them are computed."""
        if self._collected < 0:
            return
        bucket = self._bucket_of[parameter]
        if parameter not in bucket.waiting:
            raise RuntimeError(
                "a parameter got two gradients in one backward pass. Is it used in several segments of "
                "torch.utils.checkpoint? Use use_reentrant=False"
            )
        bucket.add(parameter, parameter.grad)
        parameter.grad = None
        if not bucket.waiting:
            self._collect()

    def _collect(self, are_all_complete: bool = False) -> None:
        """Add the gradients of complete buckets to the sums. After the last shard, start to exchange them.

        All ranks do that in the same order.
        """
        for bucket in self._buckets[self._collected :]:
            if bucket.waiting and not are_all_complete:
                return
            self._end(bucket)
            if self._shard == self._last:
                bucket.start_exchange()
                if self._collected:
                    self._buckets[self._collected - 1].start_gather()
            self._collected += 1

    def _end(self, bucket: _Bucket) -> None:
        """End a shard. After the second one of a pair, or the last one, the current sum becomes a partial sum."""
        if self._shard % 2 or self._shard == self._last:
            first = max(self._first, self._shard - self._shard % 2)
            bucket.end(first, self._shard - first + 1)

    def _finish(self) -> None:
        """Complete the exchange, and set the gradients and the buffers."""
        for bucket in self._buffer_buckets:
            bucket.start_exchange()
        for bucket in (*self._buckets[-1:], *self._buffer_buckets):
            bucket.start_gather()
        for bucket in self._buckets:
            for parameter, gradient in bucket.wait().items():
                parameter.grad = gradient.detach()  # a new view, whose data the loop may replace
        for bucket in self._buffer_buckets:
            for buffer, change in bucket.wait().items():
                buffer += change


def broadcast(tensors: Iterable[torch.Tensor]) -> None:
    """Send tensors from rank 0 to the other ranks."""
    for tensor in tensors:
        values = tensor.detach().contiguous().reshape(-1)
        dist.broadcast(values.view(torch.uint8), 0)  # bytes, which each backend can send
        tensor.detach().copy_(values.view(tensor.shape))


def environment() -> dict[str, Any]:
    """Return the hardware, versions and settings that affect rounding."""
    on_gpu = torch.cuda.is_initialized()
    return {
        "torch": torch.__version__,
        "processor": torch.cuda.get_device_name() if on_gpu else torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
    }
