"""The state of a torch loop in a checkpoint: each rank writes its shards, and any number of ranks reads them.

Uses the private modules ``_state_dict_stager`` and ``_nested_dict`` of ``torch.distributed.checkpoint``,
``torch.distributed._shard._utils``, and ``torch.utils._pytree``. Tested with torch 2.9, 2.13, 2.14 and 2.15.
"""

from __future__ import annotations

import io
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import state_dict as sharded
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.utils._pytree import tree_map_only

from .recovery_points import ByteArray, RankState, RecoveryPointError, threads
from .replays import Replays
from .shard_gradients import ShardGradients
from .state import State, StateMismatchError

# torch warns at each save and load of a single worker.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

_LENIENT = sharded.StateDictOptions(strict=False)
_WRITE_TIMEOUT = timedelta(hours=1)  # timeout of collectives while a checkpoint is written


class _DeviceTime:
    """A time of the current stream of a GPU. Differences are seconds; RuntimeError: the GPU has not come so far."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def __sub__(self, earlier: _DeviceTime) -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1000


class TorchState(State):
    """The state of a torch loop: modules, optimizers, schedulers and anything else with a ``state_dict``.

    Modules may be plain, in DistributedDataParallel, or sharded (FSDP2). Each rank writes its shards with
    ``torch.distributed.checkpoint``, and a checkpoint can be read with any number of workers. The state of an optimizer
    is saved by the names of its module's parameters.

    Args:
        parts: Objects with ``state_dict()`` and ``load_state_dict()``, by their names in checkpoints.

    Raises:
        ValueError: A part has no state, or an optimizer's parameters do not belong to one of the modules.

    Example::

        state = loop.TorchState(model=model, optimizer=optimizer, schedule=schedule, ema=ema)
        with loop.session(state, steps=1000, global_batch=256) as session:
            ...

        # To evaluate a checkpoint:
        loop.TorchState(model=model).read(directory, only_these=True)
    """

    _group: Any = None

    def __init__(self, **parts: Any) -> None:
        for name, part in parts.items():
            if not hasattr(part, "load_state_dict"):
                raise ValueError(
                    f"TorchState({name}=...): a {type(part).__name__} has no load_state_dict(); "
                    "give modules, optimizers, schedulers and the like"
                )
        self._modules = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}
        # Optimizers with the modules that they train.
        self._optimizers = {
            name: (self._find_module(name, part), part)
            for name, part in parts.items()
            if isinstance(part, torch.optim.Optimizer)
        }
        self._others = {name: part for name, part in parts.items() if name not in self._modules | self._optimizers}
        if self._modules and not self._optimizers:
            self.warning = "the state has no optimizer: each restart begins with an empty one. Pass it: optimizer=..."
        # Keeps one copy of the state in memory, and overwrites it at each save. The public stager closes its copy after
        # the first save, in torch 2.11 and 2.12.
        self._stager = StateDictStager()

    def _find_module(self, name: str, optimizer: torch.optim.Optimizer) -> torch.nn.Module:
        """Return the module that an optimizer trains. Raise ValueError if no module has its parameters."""
        optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for module in self._modules.values():
            if optimized <= {id(parameter) for parameter in module.parameters()}:
                return module
        raise ValueError(
            f"TorchState({name}=...): the optimizer's parameters are of none of the modules given "
            f"({', '.join(self._modules) or 'none'}); pass the module that it optimizes, too"
        )

    def prepare(self) -> None:
        """Create the process group with which the ranks write checkpoints in the background.

        Call it on all ranks together.
        """
        if self._group is None and dist.is_initialized():
            # A group of its own, so that collectives of writing and of training do not mix.
            self._group = dist.new_group(backend="gloo", timeout=_WRITE_TIMEOUT)

    def is_finite(self) -> bool:
        """Return True if this rank's floating-point parameters of all modules are finite numbers."""
        parameters = [parameter.detach() for module in self._modules.values() for parameter in module.parameters()]
        local = [each.to_local() if isinstance(each, DTensor) else each for each in parameters]
        floats = [each for each in local if each.is_floating_point() and each.numel()]
        # Types of 8 bits have no norm.
        norm = torch.nn.utils.get_total_norm([each if each.itemsize > 1 else each.float() for each in floats], math.inf)
        return bool(norm.isfinite())

    def watch_gradients(self, on_gradients: Callable[[], None]) -> Callable[[], Any]:
        """Call a function when the first parameter, whose gradient usually is the last, has its gradient.

        DDP exchanges that gradient after the call. The function is called only for a single module without buffers in
        DDP: otherwise, ranks wait for each other before that.
        """
        [module, *others] = self._modules.values() or [None]
        if others or not isinstance(module, torch.nn.parallel.DistributedDataParallel) or [*module.buffers()]:
            return time.monotonic
        first = next(parameter for parameter in module.parameters() if parameter.requires_grad)
        first.register_post_accumulate_grad_hook(lambda _: on_gradients())
        return _DeviceTime if first.is_cuda else time.monotonic

    def shard_gradients(self, rank: int, world_size: int, shards: int) -> ShardGradients:
        """Create the ``ShardGradients`` of the modules. Call it on all ranks together."""
        return ShardGradients(self._modules.values(), rank, world_size, shards)

    def replays(self, rank: int, world_size: int, shards: int) -> Replays:
        """Create the ``Replays`` of the modules. Call it on all ranks together."""
        return Replays(self._modules.values(), rank, world_size, shards)

    def stage(self, directory: str) -> Callable[[], None]:
        """Copy the state into main memory, and return a function that writes this rank's shards to ``directory``.

        Call it on all ranks.
        """
        return partial(
            dcp.save,
            self._stager.stage(self._state_dict(to_save=True)),
            # The files need not be synced, since Ray Train copies them to the storage. Nor need tensors be copied ahead
            # of the writes, for which CUDA would use half a gigabyte of a GPU: all of them are in main memory.
            storage_writer=dcp.FileSystemWriter(directory, sync_files=False, per_thread_copy_ahead=0),
            # A value that is the same on all ranks is saved from the lowest rank.
            planner=dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True),
            process_group=self._group,
            no_dist=self._group is None,
        )

    def capture(self) -> RankState:
        """Return this rank's shards: torch's plan for writing them, and their bytes."""
        if any(FullyShardedDataParallel.fsdp_modules(module) for module in self._modules.values()):
            raise TypeError("FullyShardedDataParallel.state_dict() runs collectives; use fully_shard (FSDP2)")
        planner = dcp.DefaultSavePlanner()
        planner.set_up_planner(self._state_dict(to_save=True), is_coordinator=True)
        plan = planner.create_local_plan()
        return plan, [_bytes_of(planner.resolve_data(item)) for item in plan.items]

    def restore(self, states: list[RankState], own: int) -> None:
        """Restore the state from the shards of any number of ranks. Without collectives."""
        self._load(_MemoryReader(states, own), no_dist=True)

    def read(self, directory: str | Path, only_these: bool = False) -> None:
        """Restore the modules, optimizers and other parts from a checkpoint that any number of ranks has written.

        Call it on all ranks.

        Args:
            directory: Folder of the checkpoint.
            only_these: Ignore further parts of the checkpoint, such as the optimizer when a model is evaluated. If
                False, these raise an error.

        Raises:
            StateMismatchError: The parts or shapes of the checkpoint differ from those of the state.
        """
        self.prepare()
        self._load(dcp.FileSystemReader(directory), only_these, process_group=self._group)

    def _load(self, reader: dcp.StorageReader, only_these: bool = False, **options: Any) -> None:
        """Restore the state with torch's reader of checkpoints."""
        current = self._state_dict()
        metadata = reader.read_metadata()
        with_state = {path[:3] for path in metadata.planner_data.values()}
        created = {name: current[name]["state"] for name in self._optimizers}
        for name, states in created.items():  # a parameter that had no gradient yet has no state
            current[name]["state"] = {key: states[key] for key in states if (name, "state", key) in with_state}
        StateMismatchError.check(
            flatten_state_dict(current)[0], metadata.state_dict_metadata, current if only_these else None
        )
        dcp.load(current, storage_reader=reader, **options)
        for name, module in self._modules.items():
            sharded.set_model_state_dict(module, current[name])
        for name, (module, optimizer) in self._optimizers.items():
            names = set(current[name]["state"])
            current[name]["state"] = created[name] | current[name]["state"]  # torch 2.9 requires all of them
            sharded.set_optimizer_state_dict(module, optimizer, current[name], options=_LENIENT)
            for parameter_name, parameter in module.named_parameters():
                if not sharded._get_fqns(module, parameter_name) & names:
                    optimizer.state.pop(parameter, None)
        for name, part in self._others.items():
            part.load_state_dict(current[name][0] if isinstance(current[name], tuple) else current[name])

    def _state_dict(self, to_save: bool = False) -> dict[str, Any]:
        state = {name: sharded.get_model_state_dict(module) for name, module in self._modules.items()}
        for name, (module, optimizer) in self._optimizers.items():
            has_state = bool(optimizer.state)
            if not to_save:
                optimizer.zero_grad()  # with gradients, torch would not create the state to read into
            state[name] = sharded.get_optimizer_state_dict(module, optimizer)
            if to_save and not has_state:  # remove the state that torch has created by a step
                optimizer.state.clear()
                state[name]["state"] = {}
        for name, part in self._others.items():
            values = part.state_dict()
            is_sharded = any(isinstance(value, DTensor) for value in flatten_state_dict({name: values})[0].values())
            # torch saves a tuple as it is. In a dict it would change keys to strings, and require equal None and lists.
            state[name] = values if is_sharded else (tree_map_only(torch.Tensor, torch.Tensor.cpu, values),)
        return state


def _bytes_of(data: Any) -> ByteArray:
    """Return the bytes of a tensor or of a buffer, without a copy if they are contiguous in main memory."""
    if isinstance(data, io.BytesIO):
        return np.frombuffer(data.getbuffer(), np.uint8)
    return data.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()  # type: ignore[no-any-return]


class _MemoryReader(dcp.FileSystemReader):  # type: ignore[misc]
    """torch's reader of checkpoints for a recovery point in memory.

    Args:
        states: The plan and the bytes of each rank.
        own: Index of the state to use for values that several states have.
    """

    def __init__(self, states: list[RankState], own: int) -> None:
        super().__init__("")
        self._paths = {name: path for plan, _ in states for name, path in plan.planner_data.items()}
        self._values = {
            item.index: (item, arrays, number)
            for plan, arrays in (*states, states[own])
            for number, item in enumerate(plan.items)
        }

    def read_metadata(self, *_: Any, **__: Any) -> Any:
        plan = dcp.SavePlan([item for item, _, _ in self._values.values()])
        return replace(
            dcp.default_planner.create_default_global_save_plan([plan])[1], planner_data=self._paths, storage_data={}
        )

    def read_data(self, plan: Any, planner: Any) -> Any:
        wanted = sum(
            (value.to_local() if isinstance(value, DTensor) else value).numel()
            for value in planner.state_dict.values()
            if isinstance(value, torch.Tensor)
        )
        if sum(math.prod(item.lengths) for item in plan.items if item.type is dcp.planner.LoadItemType.TENSOR) < wanted:
            raise RecoveryPointError(
                "the sharding has changed since the recovery point: this rank needs shards of others"
            )

        def read_item(item: Any) -> None:
            written, arrays, number = self._values[item.storage_index]
            data = arrays[number]
            form = written.tensor_data
            if form is None:
                planner.load_bytes(item, io.BytesIO(data.tobytes()))
                return
            saved = torch.from_numpy(data).view(form.properties.dtype).view(form.chunk.sizes)
            part = narrow_tensor_by_index(saved, item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item).detach()
            if target.is_cpu and target.is_contiguous() and target.dtype == part.dtype:
                np.copyto(_bytes_of(target), _bytes_of(part))  # faster than torch's copy by one thread
            else:
                target.copy_(part)

        list(threads.map(read_item, plan.items))
        done: Future[None] = Future()
        done.set_result(None)
        return done
