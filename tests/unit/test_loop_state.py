"""Parts of a state come back as what they were; random states come back to where a rank computes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from prefect_elastic_train import loop
from prefect_elastic_train.loop.state import random_state, restore_random_state


def _again(state: type, directory: Path, saved: Any, then: Any) -> Any:
    """A part that was saved, in a state that has another value at its place."""
    state(part=saved).stage(str(directory))()
    after = state(part=then)
    after.read(str(directory))
    return after.part


NUMBERS = [
    True,
    2**63 + 5,
    0.1,
    1 + 2j,
    np.float64(0.1),
    np.bool_(True),
    np.uint64(2**63 + 5),
]


@pytest.mark.parametrize(
    "value",
    [
        *NUMBERS,
        np.longdouble(1) / 3,
        "text",
        np.array(0.1),
        np.array([2**53 + 1]),
        np.array([(1, 0.1)], dtype=[("a", "i8"), ("b", "f4")]),
        np.array([1, 2], dtype=">i4"),
    ],
    ids=repr,
)
def test_values_come_back_as_what_they_were_when_saved(value: Any, tmp_path: Path) -> None:
    then = np.float32(0) if isinstance(value, np.generic) else 0
    if isinstance(value, np.ndarray):
        then = np.zeros(value.shape, np.float32)
    after = _again(loop.ArrayState, tmp_path, value, then)
    assert (type(after), repr(after)) == (type(value), repr(value))


@pytest.mark.parametrize(
    ("dtype", "requires_grad"),
    [(torch.float64, False), (torch.int64, False), (torch.complex64, True)],
)
def test_tensors_are_filled_in_place_and_stay_what_they_were(
    dtype: torch.dtype, requires_grad: bool, tmp_path: Path
) -> None:
    value = torch.tensor([0.1, 2**53 + 1], dtype=torch.float64).to(dtype).requires_grad_(requires_grad)
    then = torch.zeros(2, dtype=dtype if requires_grad else torch.float32, requires_grad=requires_grad)
    after = _again(loop.ArrayState, tmp_path, value, then)
    assert after is then, "which an optimizer may hold"
    assert (after.dtype, after.requires_grad, after.tolist()) == (dtype, requires_grad, value.tolist())
    after.detach().fill_(0)  # is writable
    parameter = _again(loop.ArrayState, tmp_path, value, torch.nn.Parameter(then.detach(), requires_grad))
    assert (type(parameter), parameter.tolist()) == (torch.nn.Parameter, value.tolist())


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (torch.zeros(2, dtype=torch.bfloat16), "part=Tensor.*BFloat16.*TorchState"),
        (torch.eye(2).to_sparse(), "part=Tensor.*[Ss]parse"),
        (b"7\0", "part=bytes"),
        ([[1.0], [1.0, 2.0]], "part=list"),
        ({"a": 1}, "part=dict.*array of object"),
        (2**70, "part=int.*array of object"),
        (np.array(["a", None]), "part=ndarray.*array of object"),
        (np.ma.array([0.1, 2.0], mask=[False, True]), "part=MaskedArray"),
        (pd.Series([1.0, 2.0]), "part=Series"),
    ],
)
def test_what_would_not_come_back_exactly_is_refused_by_type_at_once(part: Any, says: str) -> None:
    with pytest.raises(ValueError, match=rf"ArrayState\({says}"):
        loop.ArrayState(part=part)
    state = loop.ArrayState(part=0)
    state.part = part
    with pytest.raises(ValueError, match=rf"ArrayState\({says}"):
        state.stage("nowhere")


def test_dtypes_of_jax_that_numpy_does_not_keep_are_refused_too() -> None:
    jax = pytest.importorskip("jax")
    for part in (np.zeros(2, jax.numpy.bfloat16), jax.numpy.bfloat16(1), jax.numpy.zeros(2), jax.random.key(0)):
        with pytest.raises(ValueError, match="arrays of JAX to a JaxState"):
            loop.ArrayState(part=part)


def test_a_jax_states_leaves_come_back_as_what_they_were(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")
    half = jax.numpy.bfloat16
    values = [*NUMBERS, np.array([0.1]), np.array([2**53 + 1]), np.array([1.5], half), np.zeros(1, half)[0] + half(1.5)]
    values += [jax.numpy.ones(2, half), jax.numpy.array(True), jax.random.key(3), jax.random.PRNGKey(3)]
    then = [*(value * 0 for value in values[:-2]), jax.random.key(0), jax.random.PRNGKey(0)]
    for one, value in zip(_again(loop.JaxState, tmp_path, values, then), values, strict=True):
        assert (type(one), getattr(one, "dtype", "")) == (type(value), getattr(value, "dtype", ""))
        assert np.all(one == value)


def test_a_jax_states_dtypes_are_those_that_were_trained_with_but_for_another_precision(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    saved = {"count": 2.5, "host": np.array([0.5]), "steps": jnp.array([2.5]), "flag": True, "params": jnp.ones(2)}
    then = {"count": 0, "host": np.array([0]), "steps": jnp.array([0]), "flag": 0, "params": jnp.zeros(2, jnp.bfloat16)}
    after = _again(loop.JaxState, tmp_path, saved, then)
    assert (after["count"], after["host"].tolist(), after["steps"].tolist()) == (2.5, [0.5], [2.5])
    assert (after["flag"], after["params"].dtype, after["params"].tolist()) == (True, jnp.bfloat16, [1, 1])
    with pytest.raises(ValueError, match=r"\(MaskedArray\); give numbers, keys and arrays"):
        loop.JaxState(inner=[np.ma.array([1.0], mask=[True])])


def test_keys_with_dots_come_back_and_are_refused_where_orbax_would_confuse_them(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    assert _again(loop.JaxState, tmp_path, {"a": 1, "a.b": 2}, {"a": 0, "a.b": 0}) == {"a": 1, "a.b": 2}
    with pytest.raises(loop.StateMismatchError, match=r"part.a: \(\) in the checkpoint, missing in the state"):
        loop.JaxState(part={}).read(tmp_path, only_these=True)
    with pytest.raises(ValueError, match="two leaves in one file: rename keys that contain dots"):
        loop.JaxState(part={"a": {"b": 1}, "a.b": 2})


class Gpus:
    """Pretended GPUs of a process, at torch's functions: there is none here."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, states: Sequence[int], current: int, initialized: bool = True
    ) -> None:
        self.states = [torch.full((16,), state, dtype=torch.uint8) for state in states]
        for name, replacement in {
            "is_initialized": lambda: initialized,
            "device_count": lambda: len(states),
            "current_device": lambda: current,
            "get_rng_state_all": lambda: self.states,
            "set_rng_state": lambda state, device=current: self.states.__setitem__(device, state),
        }.items():
            monkeypatch.setattr(torch.cuda, name, replacement)

    def get(self) -> list[int]:
        return [int(state[0]) for state in self.states]


@pytest.mark.parametrize(
    ("states", "current", "after", "then", "restored"),
    [
        ([4, 5, 6, 7], 3, 1, 0, [7]),
        ([4, 5, 6, 7], 2, 4, 1, [5, 6, 7, 4]),
        ([6, 7], 0, 4, 1, [0, 6, 7, 3]),
        ([6, 7], 1, 2, 1, [6, 7]),
        ([6, 7], 1, 0, 0, []),
    ],
)
def test_a_ranks_gpu_has_its_random_state_again_whatever_index_it_has(
    monkeypatch: pytest.MonkeyPatch,
    states: list[int],
    current: int,
    after: int,
    then: int,
    restored: list[int],
) -> None:
    Gpus(monkeypatch, states, current)
    saved = random_state()
    gpus = Gpus(monkeypatch, range(after), then)
    restore_random_state(saved)
    assert gpus.get() == restored


def test_a_process_that_has_not_used_a_gpu_is_not_made_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments):
        raise AssertionError("this would initialize CUDA")

    Gpus(monkeypatch, [6, 7], 0)
    saved = random_state()
    gpus = Gpus(monkeypatch, [0, 0], 0, initialized=False)
    for name in ("current_device", "get_rng_state", "get_rng_state_all"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    assert random_state()["cuda"] == []
    restore_random_state(saved)
    assert gpus.get() == [6, 7], "torch keeps these until it initializes CUDA"
