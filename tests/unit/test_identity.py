"""What a run is called, and what makes it the same training."""

import cmath
import dataclasses
import datetime
import enum
import functools
import logging
import math
import operator
import re
import threading
import types
import uuid
from collections import OrderedDict, UserDict, defaultdict
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from pydantic import BaseModel, SecretStr

from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.core.records import Fingerprint
from prefect_elastic_train.runs.fingerprints import Call, check_run_name, fingerprint, train_loop_name, training_name
from tests.unit.support import python


def _shown(value: Any) -> str:
    """Return a value as the id of a case, the same in all processes."""
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))


@pytest.mark.parametrize(
    "name", ["", ".hidden", "-dash", " a", "a/b", "a..b", "a ", "a\n", "a\0b", "naïve", "٣", "x" * 129, 7]
)
def test_a_name_that_is_no_folder_everywhere_is_refused_with_the_rule(name: Any) -> None:
    with pytest.raises(ConfigurationError) as refused:
        check_run_name(name)
    assert repr(name) in str(refused.value)
    assert "letters, digits, spaces and '._-=,'" in str(refused.value)


ID = "0123456789abcdef"
TIMED_ID = "019a1fd3-8b1c-7a6e-9f00-1234567890ab"  # of a scheduled run: it begins with the time


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("nightly", ID, 1), "nightly-01234567"),
        (("nightly", ID, 2), "nightly-01234567-2"),
        (("nightly", TIMED_ID, 1), "nightly-567890ab"),
        (("My Flow!", ID, 1), "My-Flow-01234567"),
        (("../v1.2", ID, 1), "v1-2-01234567"),
        (("训练", ID, 1), "training-01234567"),
        (("f" * 300, ID, 1), f"{'f' * 100}-01234567"),
        (("child", ID, 1, [Call("child", "1")]), "child-01234567.1"),
        (("child", ID, 2, [Call("child", "12")]), "child-01234567.12-2"),
        (("child", ID, 1, [Call("a", "2"), Call("child", "1")]), "child-01234567.ec1b11.1"),
        (("child", "", 2, [Call("child", "12")]), "child.12-2"),  # of the training in each flow run
    ],
)
def test_the_default_name_is_of_the_flow_eight_characters_of_the_root_and_the_call_of_the_subflow(
    arguments: tuple[Any, ...], name: str
) -> None:
    assert check_run_name(training_name(*arguments)) == name


def test_a_name_of_a_sweep_is_allowed() -> None:
    assert check_run_name("lr=0.1,layers=2 wide")


def _loop(config: dict[str, Any]) -> None:
    """A train loop."""


def test_a_loop_keeps_its_name_when_its_module_is_loaded_under_another() -> None:
    def inner(config: dict[str, Any]) -> None:
        """A loop in a function."""

    assert train_loop_name(_loop) == "_loop"
    assert train_loop_name("package.module:_loop") == "_loop"
    assert train_loop_name(inner).endswith(".inner")
    assert "<locals>" not in train_loop_name(inner)
    assert train_loop_name(functools.partial(_loop, {})) == "partial"


def test_the_same_training_has_the_same_fingerprint_in_any_process() -> None:
    config = {"b": [1, 2.5, None, True], "a": {"y": 1, "x": "é"}}
    reordered = {"a": {"x": "é", "y": 1}, "b": [1, 2.5, None, True]}
    mine, same = fingerprint(_loop, "torch", config), fingerprint("m:_loop", "torch", reordered)
    assert mine.differences(same) == []
    assert mine.config == same.config
    assert fingerprint(_loop, "torch", {"b": 1}).config == {"b": "6b86b273ff34fce1"}


@dataclasses.dataclass
class Hyper:
    lr: float
    layers: set[str] = dataclasses.field(default_factory=set)


class Optimizer(enum.Enum):
    SGD = 1
    ADAM = 2


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Size(enum.IntEnum):
    SMALL = 1


class Warmup(NamedTuple):
    steps: float
    total: float


class Decay(NamedTuple):
    total: float
    steps: float


class Model(BaseModel):
    width: int
    key: SecretStr = SecretStr("")


class Plain:
    """A class that nothing is known of."""


def _with_key(number: int) -> Model:
    return Model(width=1, key=SecretStr(str(number)))


#: Types, or functions that make a value of a type from a number.
KINDS = [
    np.float32,
    np.int64,
    np.zeros,
    lambda number: np.array([str(number), None]),
    torch.zeros,
    Hyper,
    lambda number: Hyper(0.1, {str(number)}),
    lambda number: Model(width=number),
    _with_key,
    Decimal,
    datetime.date.fromordinal,
    lambda number: uuid.UUID(int=number),
    bytes,
    range,
    lambda number: frozenset({str(number)}),
    lambda number: {1: number, "b": 1},
    lambda number: {(1, number): "a"},
    lambda number: UserDict(a=Path(str(number))),
    lambda number: [1, {"deep": (np.float32(number),)}],
]

DIFFERENT = [
    *(make(number) for make in KINDS for number in (2, 3)),
    np.ones(3),
    np.zeros((3, 1)),
    np.dtype("f4"),
    np.dtype("f8"),
    torch.bfloat16,
    torch.float16,
    Hyper,
    Model,
    *Optimizer,
    *Level,
    *Size,
    operator.add,
    operator.mul,
    math.sqrt,
    cmath.sqrt,
    Warmup(10, 100),
    Decay(10, 100),
    Warmup(10, 200),
    "/data",
    "data",
    1,
    1.0,
    True,
    0.0,
    -0.0,
    math.nan,
    None,
]


def _differ(one: Any, other: Any) -> bool:
    return bool(fingerprint(_loop, "none", {"x": one}).differences(fingerprint(_loop, "none", {"x": other})))


def test_a_changed_value_is_seen_whatever_its_type() -> None:
    seen = defaultdict(list)
    for value in DIFFERENT:
        mine = fingerprint(_loop, "torch", {"x": value})
        assert mine.opaque == {}, "it is compared by value"
        seen[mine.config["x"]].append(value)
    assert [values for values in seen.values() if len(values) > 1] == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1, [2]), [1, (2,)]),
        (Path("/data"), "/data"),
        (PurePosixPath("/data"), Path("/data")),
        (OrderedDict(a=1), {"a": 1}),
        ({1: "a", "b": 1}, {"1": "a", "b": 1}),
        (math.nan, math.nan),
        (np.float64(0.1), 0.1),
        (torch.ones(2), torch.ones(2)),
    ],
    ids=_shown,
)
def test_what_comes_back_from_prefects_server_as_json_is_the_same(before: Any, after: Any) -> None:
    assert not _differ(before, after)


def test_values_have_the_same_digest_in_a_process_with_another_order_of_hashes() -> None:
    code = """
import dataclasses, enum
from prefect_elastic_train.runs.fingerprints import fingerprint

Optimizer = enum.Enum("Optimizer", "SGD ADAM")

@dataclasses.dataclass
class Hyper:
    layers: set

def loop(config): ...

names = {f"layer-{number}" for number in range(50)}
config = {"hyper": Hyper(names), "nested": [{"of": frozenset(names)}, {Optimizer.SGD: loop}], "kind": Hyper}
print(fingerprint(loop, "torch", config).model_dump_json())
"""
    outputs = {python(code, PYTHONHASHSEED=seed).stdout for seed in ("1", "2")}
    assert len(outputs) == 1
    assert Fingerprint.model_validate_json(outputs.pop()).opaque == {}


class Broken(UserDict[str, Any]):
    """A mapping that cannot be read."""

    def __iter__(self) -> Any:
        raise RuntimeError("not set yet")


def _without_stable_forms() -> dict[str, Any]:
    extended = Hyper(0.1)
    extended.schedule = "cosine"  # type: ignore[attr-defined] # as some configurations of libraries hold more
    own = []
    own.append(own)
    module = types.ModuleType("settings")
    module.__file__ = f"/tmp/pull-{uuid.uuid4()}/settings.py"
    return {
        "plain": Plain(),
        "nested": {"lock": [threading.Lock()]},
        "function": lambda: None,
        "weights": torch.ones(1, requires_grad=True),
        "keys": {1: 2, "1": 3},
        "long": {"x": np.arange(9999)}.values(),
        "more": extended,
        "own": own,
        "broken": Broken(a=1),
        "module": module,
        # Their repr may be cut short, or of another order.
        "pattern": re.compile("a" * 300),
        "namespace": types.SimpleNamespace(names={"a", "b"}),
        "bound": functools.partial(print, {"a", "b"}),
        "logger": logging.getLogger("of.a.configuration"),
    }


def test_a_value_without_a_stable_form_counts_by_its_type_and_is_named_as_such() -> None:
    mine, other = (fingerprint(_loop, "torch", {**_without_stable_forms(), "lr": 0.1}) for _ in range(2))
    assert mine.differences(other) == [], "a retry would be refused"
    assert mine.opaque.keys() == _without_stable_forms().keys()
    assert mine.opaque["nested"] == "_thread:lock"
    warning = mine.uncompared(other)
    assert "train_loop_config['plain'] (tests.unit.test_identity:Plain)" in warning
    assert "cannot be compared" in warning
    assert "'lr'" not in warning
    assert _differ(Plain(), [Plain()])


def test_differences_are_told_in_words_and_without_values() -> None:
    before = fingerprint("m:old", "torch", {"lr": 0.1, "gone": 1, "same": 2})
    after = fingerprint("m:new", "jax", {"lr": 0.2, "same": 2, "fresh": 3})
    assert before.differences(after) == [
        "train loop 'old' became 'new'",
        "framework 'torch' became 'jax'",
        "train_loop_config['fresh'] was added",
        "train_loop_config['gone'] was removed",
        "train_loop_config['lr'] changed",
    ]


def test_a_value_without_a_stable_form_hides_no_change_beside_it() -> None:
    opaque = torch.zeros(2, requires_grad=True)
    assert _differ({"rate": 1, "start": opaque}, {"rate": 2, "start": opaque})
    assert _differ([1, torch.zeros(1, dtype=torch.bfloat16)], [2, torch.zeros(1, dtype=torch.bfloat16)])
    assert not _differ({"rate": 1, "start": opaque}, {"rate": 1, "start": torch.ones(2, requires_grad=True)})


def test_what_another_version_has_recorded_besides_is_ignored() -> None:
    recorded = {"loop": "_loop", "framework": "torch", "config": {"lr": "a"}, "values": {"lr": "0.1"}}
    assert Fingerprint.model_validate(recorded).config == {"lr": "a"}
