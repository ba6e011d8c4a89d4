"""The whole state of a torch loop as one checkpoint: each rank writes its shards, any number of ranks reads them.

Uses ``_state_dict_stager`` and ``_nested_dict`` of ``torch.distributed.checkpoint``, tried with torch 2.11 and 2.13.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as sharded
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.tensor import DTensor

from prefect_elastic_train.loop.state import State, StateMismatchError

# Said at each save and load of a single worker.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

_LENIENT = sharded.StateDictOptions(strict=False)
_WRITE_TIMEOUT = timedelta(hours=1)  # for the other ranks, while a checkpoint is written in the background


class TorchState(State):
    """What a torch loop needs to go on: ``TorchState(model=model, optimizer=optimizer, schedule=schedule, ema=ema)``.

    Whatever has ``state_dict`` and ``load_state_dict``, by its name in checkpoints. Modules may be plain, in
    DistributedDataParallel or sharded (FSDP2); each rank writes what is its own by `torch.distributed.checkpoint`, and
    a checkpoint is read at any number of workers. An optimizer's state is kept by its module's parameters' names.

    Raises:
        ValueError: A part has no state, or an optimizer's parameters are of none of the modules.
    """

    def __init__(self, **parts: Any) -> None:
        for name, part in parts.items():
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise ValueError(
                    f"TorchState({name}=...): a {type(part).__name__} has no state_dict() and load_state_dict(); "
                    "give modules, optimizers, schedulers and the like"
                )
        self._modules = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}
        self._optimizers = {name: part for name, part in parts.items() if isinstance(part, torch.optim.Optimizer)}
        self._others = {name: part for name, part in parts.items() if name not in self._modules | self._optimizers}
        self._module_of = {name: self._owner(name, part) for name, part in self._optimizers.items()}
        trained = [name for name, part in self._modules.items() if any(one.requires_grad for one in part.parameters())]
        lacking = f"the state has no optimizer beside {', '.join(trained)}: each restart begins with an empty one"
        self.warning = f"{lacking}. Give it too: optimizer=..." if trained and not self._optimizers else ""
        # One copy of the state in memory, into which each stage copies anew. In torch 2.11 and 2.12 the public stager
        # closes it after the first.
        self._stager = StateDictStager(pin_memory=False, share_memory=False)
        self._group: Any = None

    def _owner(self, name: str, optimizer: torch.optim.Optimizer) -> torch.nn.Module:
        wanted = {id(one) for group in optimizer.param_groups for one in group["params"]}
        for module in self._modules.values():
            if wanted <= {id(one) for one in module.parameters()}:
                return module
        raise ValueError(
            f"TorchState({name}=...): the optimizer's parameters are of none of the modules given "
            f"({', '.join(self._modules) or 'none'}); give the module that it optimizes too"
        )

    def prepare(self) -> None:
        """Make what writing in the background needs; on all ranks at the same time."""
        if self._group is None and dist.is_available() and dist.is_initialized():
            # Of its own and in main memory, so that writing and training do not meet.
            self._group = dist.new_group(backend="gloo", timeout=_WRITE_TIMEOUT)

    def stage(self, directory: str) -> Callable[[], None]:
        """Copy the state into main memory, and return what writes this rank's part into its folder; all ranks must."""
        # Ray Train copies the files to the storage, which syncs them: here they need not be. Nor is anything to be
        # copied ahead, for which CUDA would take half a gigabyte of a GPU: all of it is in main memory.
        writer = dcp.FileSystemWriter(directory, sync_files=False, per_thread_copy_ahead=0)
        staged = self._stager.stage(self._current(to_save=True))
        # What is the same on all ranks is that of the first, also where it is not quite the same.
        planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        return partial(
            dcp.save,
            staged,
            storage_writer=writer,
            planner=planner,
            process_group=self._group,
            no_dist=self._group is None,
        )

    def read(self, directory: str | Path, only_these: bool = False) -> None:
        """Put a state back that was written by all ranks of a worker group, of any size.

        With ``only_these`` it may have parts that are not here, such as the optimizer's when a model is evaluated.

        Raises:
            StateMismatchError: The checkpoint is of another model; names what is missing, too much or of another shape.
        """
        self.prepare()
        for optimizer in self._optimizers.values():
            optimizer.zero_grad()  # with gradients torch would not make the state that is read into
        current, metadata = self._current(), dcp.FileSystemReader(directory).read_metadata()
        saved = metadata.state_dict_metadata.items()
        there = {name: one for name, one in saved if not only_these or name.partition(".")[0] in current}
        begun = {path[:3] for path in metadata.planner_data.values()}
        for name in self._module_of:  # a parameter that has had no gradient yet has no state
            states = current[name]["state"].items()
            current[name]["state"] = {of: state for of, state in states if (name, "state", of) in begun}
        StateMismatchError.check(_shapes(flatten_state_dict(current)[0]), _shapes(there))
        dcp.load(current, checkpoint_id=directory, process_group=self._group, no_dist=self._group is None)
        for name, module in self._modules.items():
            sharded.set_model_state_dict(module, current[name])
        for name, optimizer in self._optimizers.items():
            module, known = self._module_of[name], set(current[name]["state"])
            sharded.set_optimizer_state_dict(module, optimizer, current[name], options=_LENIENT)
            for own, parameter in module.named_parameters():
                if not sharded._get_fqns(module, own) & known:
                    optimizer.state.pop(parameter, None)
        for name, part in self._others.items():
            part.load_state_dict(current[name][0] if isinstance(current[name], tuple) else current[name])

    def _current(self, to_save: bool = False) -> dict[str, Any]:
        state = {name: sharded.get_model_state_dict(module) for name, module in self._modules.items()}
        for name, optimizer in self._optimizers.items():
            has_begun = bool(optimizer.state)
            state[name] = sharded.get_optimizer_state_dict(self._module_of[name], optimizer)
            if to_save and not has_begun:  # torch has made a state for it, by a step that counts
                optimizer.state.clear()
                state[name]["state"] = {}
        for name, part in self._others.items():
            of_part = part.state_dict()
            is_sharded = any(isinstance(one, DTensor) for one in flatten_state_dict({name: of_part})[0].values())
            # What is in a tuple is kept as it is: else keys become texts, and None and lists must be as in the file.
            state[name] = of_part if is_sharded else (of_part,)
        return state


def _shapes(values: dict[str, Any]) -> dict[str, Any]:
    """Return the shapes of tensors, and of what describes saved ones; of what is none, ()."""
    return {name: tuple(getattr(one, "shape", getattr(one, "size", ()))) for name, one in values.items()}
