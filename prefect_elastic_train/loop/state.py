"""What a checkpoint of a loop holds: the state that is saved, the random states, and what makes it unfit for a loop."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any, Protocol

import numpy as np


class StateMismatchError(ValueError):
    """A checkpoint does not fit to the state that it is to be put into, such as that of another version of a model."""

    @classmethod
    def check(cls, here: Mapping[str, Any], there: Mapping[str, Any]) -> None:
        """Compare the names and shapes that a loop has and those that a checkpoint has."""
        problems = {"in the checkpoint is no": here.keys() - there.keys(), "here is no": there.keys() - here.keys()}
        changed = [name for name in here.keys() & there.keys() if here[name] != there[name]]
        problems["in the checkpoint of another shape are"] = {
            f"{name} {there[name]} and {here[name]} here" for name in changed
        }
        found = [f"{what} {shorten(', '.join(sorted(names)), 500)}" for what, names in problems.items() if names]
        if found:
            raise cls(
                f"{'; '.join(found)}. Is it the checkpoint of another version of the model? "
                "Train under a new run_name, or give the state what the checkpoint has"
            )


class State(Protocol):
    """What a session saves and restores; ``warning`` is what it lacks to go on as it was, empty if that is unknown."""

    warning: str = ""

    def prepare(self) -> None:
        """Make what writing in the background needs, nothing by default; on all ranks at the same time."""

    def stage(self, directory: str) -> Callable[[], None]:
        """Copy the state, and return what writes this rank's part of it, maybe in a thread, before the next call."""

    def read(self, directory: str) -> None:
        """Put a state back from the directory that has the parts of all ranks, of however many there were."""


def random_state() -> str:
    """Return the states of python's, numpy's and torch's global random generators in this process, as JSON.

    The list of GPU states begins with the current device, whose index may be different after a restart. Generators that
    the loop creates (``numpy.random.default_rng``, ``random.Random``, ``torch.Generator``) are not included: seed them
    with the seed, the rank and ``session.done``. A part of the session's state is saved once for all ranks.
    """
    state = {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}
    if (torch := sys.modules.get("torch")) is not None:
        of_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # else it would be by that
        current = torch.cuda.current_device() if of_devices else 0
        state |= {"torch": torch.get_rng_state(), "cuda": of_devices[current:] + of_devices[:current]}
    return json.dumps(state, default=lambda array: array.tolist())


def restore_random_state(saved: str) -> None:
    """Put random states back that :func:`random_state` returned; those of GPUs from the current device on."""
    state = json.loads(saved)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(state["numpy"])
    torch = sys.modules.get("torch")
    if torch is not None and "torch" in state:
        torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
        count = torch.cuda.device_count()
        current = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
        for distance, one in enumerate(state["cuda"][:count]):
            torch.cuda.set_rng_state(torch.tensor(one, dtype=torch.uint8), (current + distance) % count)


def seed_everything(*key: int) -> None:
    """Seed python's, numpy's and torch's random generators, differently for each key."""
    python, numpy, torch_seed = np.random.SeedSequence(key).generate_state(3, np.uint64).tolist()
    random.seed(python)
    np.random.seed(numpy % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(torch_seed % 2**63)


class ArrayState(State):
    """The state of a numpy loop: arrays, numbers, strings and tensors that are the same on all ranks.

    Each is an attribute that the loop reads and sets: ``ArrayState(weights=np.zeros(3))`` has ``weights``. It is
    restored with the saved values and dtype, a tensor in place.

    Raises:
        ValueError: A part is of a type that would not be restored exactly, or has a method's name.
    """

    def __init__(self, **parts: Any) -> None:
        if taken := [name for name in parts if hasattr(type(self), name)]:
            raise ValueError(f"{type(self).__name__}({taken[0]}=...): this is a method's name; give the part another")
        vars(self).update(parts)
        self._copies()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self).__name__} has no {name}, only {', '.join(vars(self))}: give all at first")

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)[name] = value if name in vars(self) else self.__getattr__(name)

    def stage(self, directory: str) -> Callable[[], None]:
        """Copy the arrays, and return what writes them into a directory."""
        copies = self._copies()
        return lambda: np.savez(Path(directory, "arrays.npz"), **copies)

    def _copies(self) -> dict[Any, Any]:
        """Return a copy of each part; a ValueError if one cannot be restored exactly."""
        copies: dict[Any, Any] = {}
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

    def read(self, directory: str | Path, only_these: bool = False) -> None:
        """Put the arrays back, or raise a :class:`StateMismatchError`; there may be others too if ``only_these``."""
        with np.load(Path(directory, "arrays.npz"), allow_pickle=False) as saved:
            there = {name: saved[name] for name in saved if not only_these or name in vars(self)}
        StateMismatchError.check(shapes(vars(self)), shapes(there))
        for name, one in vars(self).items():
            vars(self)[name] = restored(one, there[name])


def _copy(part: Any) -> Any:
    """Return a copy as an array. Raise a TypeError or ValueError if the part cannot be restored from it exactly."""
    part = part.detach().cpu().numpy() if hasattr(part, "detach") else part
    copy = np.array(part)
    is_foreign = copy.dtype.hasobject or copy.dtype.isbuiltin == 2  # registered by another library, such as bfloat16
    is_cut = isinstance(part, str | bytes) and copy.item() != part  # by zeros at its end
    if is_foreign or is_cut or type(restored(part, copy)) is not type(part):
        raise TypeError(f"numpy keeps it as an array of {copy.dtype}")
    return copy


def restored(part: Any, saved: Any) -> Any:
    """Return a saved array in the type of the part. A tensor is overwritten in place: an optimizer may refer to it."""
    if hasattr(part, "detach"):
        part.data = sys.modules["torch"].as_tensor(saved, device=part.device)
        return part
    if isinstance(part, np.ndarray):
        return saved
    return saved[()] if isinstance(part, np.generic) else saved.item()


def shapes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shapes of arrays and numbers."""
    return {name: np.shape(value) for name, value in values.items()}
