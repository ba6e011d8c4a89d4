"""The state of a loop in a checkpoint: the protocol of states, numpy arrays, and random states."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any, Protocol

import numpy as np

from .recovery_points import ByteArray, RankState


class StateMismatchError(ValueError):
    """A checkpoint has other parts or shapes than the state it is read into, such as another version of the model."""

    @classmethod
    def check(cls, current: Mapping[str, Any], saved: Mapping[str, Any], parts: Collection[str] | None) -> None:
        """Raise StateMismatchError if names or shapes of a loop's current state differ from those in a checkpoint.

        A name is that of a part of the state, or begins with it and a dot.

        Args:
            current: Values of the loop's state by name.
            saved: Values in the checkpoint by name, or their metadata.
            parts: Parts of the state; further parts of the checkpoint are ignored. None: they raise an error.
        """
        saved = _shapes(saved)
        current = _shapes(current)
        differing = [
            f"{name}: {saved.get(name, 'missing')} in the checkpoint, {current.get(name, 'missing')} in the state"
            for name in sorted(current.keys() | saved.keys())
            if current.get(name) != saved.get(name)
            and (parts is None or name in current or name.partition(".")[0] in parts)
        ]
        if differing:
            raise cls(
                f"{shorten('; '.join(differing), 1500)}. Is it the checkpoint of another version of the model? "
                "Train under a new run_name, or give the state the parts of the checkpoint"
            )


def _shapes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shape of each value by its name: of an array, or of its metadata in a checkpoint; () for others."""
    return {name: tuple(getattr(value, "shape", getattr(value, "size", ()))) for name, value in values.items()}


class State(Protocol):
    """The interface between a session and the state that it saves and restores.

    Attributes:
        warning: Message about missing parts, which the session logs when it is created; empty: none.
    """

    warning: str = ""

    def prepare(self) -> None:
        """Prepare to write checkpoints in the background. Default: do nothing.

        The session calls it when it is created, on all ranks at the same time.
        """

    def is_finite(self) -> bool:
        """Return True if all weights of this rank are finite numbers. Default: True.

        A session with a guard calls it after each step.
        """
        return True

    def shard_gradients(self, rank: int, world_size: int, shards: int) -> Any:
        """Create the ``ShardGradients`` of the modules. The session calls it on all ranks. Default: raise TypeError."""
        raise TypeError(f"{type(self).__name__} supports neither shards nor replay_every; use a TorchState")

    #: Creates the ``Replays`` of the modules, in the same way.
    replays: Any = shard_gradients

    def stage(self, directory: str) -> Callable[[], None]:
        """Copy the loop's state at a save, so that the loop can go on, and return a function that writes the copy.

        The session calls it on all ranks. It calls the returned function in another thread, before the next ``stage``.

        Args:
            directory: Folder for this rank's files. The folders of all ranks become one checkpoint.
        """

    def read(self, directory: str) -> None:
        """Restore the loop's state from a checkpoint. The session calls it on all ranks.

        Args:
            directory: Folder of the checkpoint, with files of all ranks of the worker group that wrote it. That group
                may have had another number of workers.
        """

    def capture(self) -> RankState:
        """Return this rank's share of the loop's state, which the session copies for a recovery point in memory.

        The session calls it on all ranks, but not for the same steps, so it must not run collectives. There are
        recovery points only if one class defines this method, :meth:`restore`, :meth:`stage` and :meth:`read`.
        """

    def restore(self, states: list[RankState], own: int) -> None:
        """Restore the loop's state from a recovery point in memory. The session calls it on all ranks.

        Args:
            states: The values that :meth:`capture` returned: that of this rank if the number of ranks is the same, else
                those of all ranks. Copy the arrays.
            own: Index in ``states`` to use for values that several of them have.
        """


def random_state() -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's global random generators in this process.

    The list of GPU states begins with the current device, because its index may be different after a restart.
    Generators that the loop creates (``numpy.random.default_rng``, ``random.Random``, ``torch.Generator``) are not
    included: seed them with the seed, the rank and ``session.done``.
    """
    state: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}
    if torch := sys.modules.get("torch"):
        gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # the call would initialize CUDA
        current = torch.cuda.current_device() if gpus else 0
        state |= {"torch": torch.get_rng_state().numpy(), "cuda": gpus[current:] + gpus[:current]}
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Restore the global random generators of this process to what :func:`random_state` returned.

    Arrays may be lists. The states of GPUs are assigned from the current device on.
    """
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(state["numpy"])
    torch = sys.modules.get("torch")
    if torch and "torch" in state:
        torch.set_rng_state(torch.as_tensor(state["torch"], dtype=torch.uint8))
        count = torch.cuda.device_count()
        current = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
        for offset, gpu in enumerate(state["cuda"][:count]):
            torch.cuda.set_rng_state(torch.as_tensor(gpu, dtype=torch.uint8), (current + offset) % count)


def seed_everything(*key: int) -> None:
    """Seed the global random generators of Python, numpy and torch in this process from a key of integers."""
    seed = int(np.random.SeedSequence(key).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    if torch := sys.modules.get("torch"):
        is_cpu_only = torch.accelerator.current_accelerator() is None
        # Equivalent on CPUs, where torch.manual_seed takes a millisecond.
        (torch.default_generator.manual_seed if is_cpu_only else torch.manual_seed)(seed)


class ArrayState(State):
    """The state of a numpy loop: arrays, numbers, strings and tensors that are the same on all ranks.

    Each keyword argument becomes an attribute, which the loop reads and sets. An attribute is restored with the value
    and dtype that were saved. A tensor is restored in place.

    Args:
        parts: Values by name: numpy arrays, numbers, strings and dense torch tensors.

    Raises:
        ValueError: A part is of a type that cannot be restored exactly, or has the name of a method.

    Example::

        state = loop.ArrayState(weights=np.zeros(3))
        with loop.session(state, steps=100, global_batch=8) as session:
            for batch in session.batches(samples):
                state.weights = update(state.weights, batch)
                session.step()
    """

    def __init__(self, **parts: Any) -> None:
        if methods := [name for name in parts if hasattr(type(self), name)]:
            raise ValueError(f"{type(self).__name__}({methods[0]}=...): this is a method's name; rename the part")
        vars(self).update(parts)
        self._copies()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{type(self).__name__} has no {name}, only {', '.join(vars(self))}: pass all parts to the constructor"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)[name] = value if name in vars(self) else self.__getattr__(name)

    def is_finite(self) -> bool:
        """Return True if all elements of arrays are finite numbers. Numbers, such as a best loss, are not checked."""
        arrays = map(_as_array, vars(self).values())
        return all(np.isfinite(array).all() for array in arrays if array.ndim and array.dtype.kind in "fc")

    def stage(self, directory: str) -> Callable[[], None]:
        """Copy all parts of the state, and return a function that writes the copies into the folder ``directory``."""
        copies = self._copies()
        return lambda: np.savez(Path(directory, "arrays.npz"), **copies)

    def _copies(self) -> dict[Any, Any]:
        """Return a copy of each part of the state. Raise ValueError if a part cannot be restored exactly."""
        copies = {}
        for name, part in vars(self).items():
            try:
                copies[name] = _copy(part)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"{type(self).__name__}({name}={type(part).__name__}) would not be restored exactly: {error}. "
                    "Give each numpy array and number as an argument of its own, modules and optimizers to a "
                    "TorchState, and arrays of JAX to a JaxState"
                ) from None
        return copies

    def capture(self) -> RankState:
        """Return the parts of the state: names, dtypes and shapes, and their bytes."""
        arrays = {name: _as_array(part) for name, part in vars(self).items()}
        return [(name, array.dtype, array.shape) for name, array in arrays.items()], [*map(bytes_of, arrays.values())]

    def restore(self, states: list[RankState], own: int) -> None:
        """Restore the parts of the state from that of one rank."""
        description, arrays = states[own]
        saved = {
            name: data.copy().view(dtype).reshape(shape)
            for (name, dtype, shape), data in zip(description, arrays, strict=True)
        }
        self._assign(saved)

    def read(self, directory: str | Path, only_these: bool = False) -> None:
        """Restore the parts of the state from a checkpoint.

        Args:
            directory: Folder of the checkpoint.
            only_these: Ignore further parts of the checkpoint. If False, these raise an error.

        Raises:
            StateMismatchError: The parts or shapes of the checkpoint differ from those of the state.
        """
        with np.load(Path(directory, "arrays.npz")) as file:
            saved = dict(file)
        self._assign(saved, only_these)

    def _assign(self, saved: Mapping[str, Any], only_these: bool = False) -> None:
        StateMismatchError.check(vars(self), saved, vars(self) if only_these else None)
        for name, part in vars(self).items():
            vars(self)[name] = restore_part(part, saved[name])


def _copy(part: Any) -> Any:
    """Return a copy of one part of a loop's state as a numpy array.

    Raise TypeError or ValueError if the part cannot be restored exactly from the array.
    """
    copy = np.array(_as_array(part))
    is_foreign = copy.dtype.hasobject or copy.dtype.isbuiltin == 2  # a dtype of another library, such as bfloat16
    is_cut = isinstance(part, str | bytes) and copy.item() != part  # numpy drops zeros at the end
    if is_foreign or is_cut or type(restore_part(part, copy)) is not type(part):
        raise TypeError(f"numpy stores it as an array of {copy.dtype}")
    return copy


def _as_array(part: Any) -> Any:
    return np.asarray(part.detach().cpu().numpy() if hasattr(part, "detach") else part)


def bytes_of(array: Any) -> ByteArray:
    """Return the bytes of a numpy array, without a copy if they are contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def restore_part(part: Any, saved: Any) -> Any:
    """Return an array from a checkpoint, converted to the type of ``part``, the current value in the loop's state.

    A tensor is overwritten in place, because an optimizer may refer to it.
    """
    if hasattr(part, "detach"):
        part.data = sys.modules["torch"].as_tensor(saved, device=part.device)
        return part
    if isinstance(part, np.ndarray):
        return saved
    return saved[()] if isinstance(part, np.generic) else saved.item()
