"""What a run is called, and what makes it the same training."""

from __future__ import annotations

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
from collections import OrderedDict, UserDict
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from pydantic import BaseModel, SecretStr

from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.core.records import Fingerprint
from prefect_elastic_train.runs.fingerprints import Call, check_run_name, default_run_name, fingerprint, train_loop_name
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


def test_a_name_that_a_sweep_makes_is_taken() -> None:
    assert check_run_name("lr=0.1,layers=2 wide") == "lr=0.1,layers=2 wide"


def test_the_default_name_is_flow_and_eight_characters_that_tell_the_flow_run() -> None:
    assert default_run_name("nightly", "0123456789abcdef", 1) == "nightly-01234567"
    assert default_run_name("nightly", "0123456789abcdef", 2) == "nightly-01234567-2"
    # Scheduled runs that were made at the same moment have ids that begin with the time.
    nights = [f"019a1fd3-8b1c-7a6e-9f00-{random:012x}" for random in (0x1234567890AB, 0x234567890ABC)]
    names = [default_run_name("nightly", night, 1) for night in nights]
    assert names == ["nightly-567890ab", "nightly-67890abc"]


def test_the_default_name_in_a_subflow_is_of_the_root_and_the_calls_that_lead_there() -> None:
    def name(*calls: tuple[str, str], ordinal: int = 1) -> str:
        return default_run_name("child", "0123456789abcdef", ordinal, [Call(*call) for call in calls])

    assert name(("child", "1")) == "child-01234567.1"
    assert name(("child", "12"), ordinal=2) == "child-01234567.12-2"
    deep = [name((outer, number), ("child", "1")) for outer in ("a", "b") for number in ("1", "2")]
    assert len({*deep, name(("child", "1")), default_run_name("child", "0123456789abcdef", 1)}) == 6
    assert name(("a", "1"), ("child", "1")) == deep[0]


@pytest.mark.parametrize(
    ("flow", "slug"), [("My Flow!", "My-Flow"), ("../v1.2", "v1-2"), ("训练", "training"), ("f" * 300, "f" * 100)]
)
def test_the_default_name_of_any_flow_is_a_good_one(flow: str, slug: str) -> None:
    assert check_run_name(default_run_name(flow, "0123456789abcdef", 1)) == f"{slug}-01234567"


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


def _differences(before: Any, after: Any) -> list[str]:
    return fingerprint(_loop, "torch", {"x": before}).differences(fingerprint(_loop, "torch", {"x": after}))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Path("/data/a"), Path("/data/b")),
        (np.float32(0.1), np.float32(0.9)),
        (np.int64(8), np.int64(9)),
        (np.zeros(3), np.ones(3)),
        (np.zeros(3), np.zeros((3, 1))),
        (np.array(["a", None]), np.array(["b", None])),
        (torch.zeros(2), torch.ones(2)),
        (torch.bfloat16, torch.float16),
        (np.dtype("f4"), np.dtype("f8")),
        (Hyper(0.1), Hyper(0.9)),
        (Hyper(0.1, {"a"}), Hyper(0.1, {"b"})),
        (Optimizer.SGD, Optimizer.ADAM),
        (Model(width=1), Model(width=2)),
        (Model(width=1, key=SecretStr("a")), Model(width=1, key=SecretStr("b"))),
        (Decimal("0.1"), Decimal("0.9")),
        (Fraction(1, 2), Fraction(1, 3)),
        (datetime.date(2026, 1, 1), datetime.date(2026, 1, 2)),
        (datetime.timedelta(1), datetime.timedelta(2)),
        (uuid.UUID(int=1), uuid.UUID(int=2)),
        (b"a", b"b"),
        (range(3), range(4)),
        ({1}, {2}),
        (frozenset("a"), frozenset("b")),
        ({1: "a", "b": 1}, {1: "z", "b": 1}),
        ({(1, 2): "a"}, {(1, 3): "a"}),
        (UserDict(a=Path("/a")), UserDict(a=Path("/b"))),
        ([1, {"deep": (np.float32(0.1),)}], [1, {"deep": (np.float32(0.9),)}]),
        (operator.add, operator.mul),
        (math.sqrt, cmath.sqrt),
        (Warmup(10, 100), Decay(10, 100)),
        (Warmup(10, 100), Warmup(10, 200)),
        (Level.LOW, Level.HIGH),
        (Level.LOW, Size.SMALL),
        (Hyper, Model),
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        (math.nan, None),
    ],
    ids=_shown,
)
def test_a_changed_value_is_seen_whatever_its_type(before: Any, after: Any) -> None:
    assert _differences(before, after) == ["train_loop_config['x'] changed"]
    mine = fingerprint(_loop, "torch", {"x": before})
    assert mine.opaque == {}, "it is compared by value"


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
    assert _differences(before, after) == []


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


def test_a_value_without_a_stable_form_counts_by_its_type_and_is_named_as_such() -> None:
    extended = Hyper(0.1)
    extended.schedule = "cosine"  # type: ignore[attr-defined] # as some configurations of libraries hold more

    def config() -> dict[str, Any]:
        return {
            "plain": Plain(),
            "nested": {"lock": [threading.Lock()]},
            "function": lambda: None,
            "weights": torch.ones(1, requires_grad=True),
            "keys": {1: 2, "1": 3},
            "long": {"x": np.arange(9999)}.values(),
            "more": extended,
            "lr": 0.1,
        }

    mine, other = fingerprint(_loop, "torch", config()), fingerprint(_loop, "torch", config())
    assert mine.differences(other) == [], "a retry would be refused"
    assert mine.opaque.keys() == {"plain", "nested", "function", "weights", "keys", "long", "more"}
    assert mine.opaque["nested"] == "_thread:lock"
    warning = mine.uncompared(other)
    assert "train_loop_config['plain'] (tests.unit.test_identity:Plain)" in warning
    assert "cannot be compared" in warning
    assert "'lr'" not in warning
    changed = fingerprint(_loop, "torch", {**config(), "plain": [Plain()]})
    assert mine.differences(changed) == ["train_loop_config['plain'] changed"]


def test_a_value_that_contains_itself_or_cannot_be_read_counts_by_its_type() -> None:
    class Broken(UserDict[str, Any]):
        def __iter__(self) -> Any:
            raise RuntimeError("not set yet")

    own: list[Any] = []
    own.append(own)
    found = fingerprint(_loop, "torch", {"own": own, "broken": Broken(a=1)})
    assert found.opaque.keys() == {"own", "broken"}


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


def _differ(one: Any, other: Any) -> bool:
    of_both = (fingerprint("package:loop", "none", {"x": value}) for value in (one, other))
    return bool(next(of_both).differences(next(of_both)))


def test_a_value_without_a_stable_form_hides_no_change_beside_it() -> None:
    opaque = torch.zeros(2, requires_grad=True)
    assert _differ({"rate": 1, "start": opaque}, {"rate": 2, "start": opaque})
    assert _differ([1, torch.zeros(1, dtype=torch.bfloat16)], [2, torch.zeros(1, dtype=torch.bfloat16)])
    assert not _differ({"rate": 1, "start": opaque}, {"rate": 1, "start": torch.ones(2, requires_grad=True)})


def test_modules_are_compared_by_nothing_that_a_process_may_change() -> None:
    before, after = types.ModuleType("settings"), types.ModuleType("settings")
    before.__file__ = "/tmp/pull-1/settings.py"
    after.__file__ = "/tmp/pull-2/settings.py"
    assert not _differ(before, after)


def test_no_repr_counts_as_the_value_that_may_be_cut_short_or_of_another_order() -> None:
    config = {
        "pattern": re.compile("a" * 300),
        "namespace": types.SimpleNamespace(names={"a", "b"}),
        "bound": functools.partial(print, {"a", "b"}),
        "logger": logging.getLogger("of.a.configuration"),
    }
    assert fingerprint(_loop, "torch", config).opaque.keys() == config.keys()


def test_what_another_version_has_recorded_besides_is_ignored() -> None:
    recorded = {"loop": "_loop", "framework": "torch", "config": {"lr": "a"}, "values": {"lr": "0.1"}}
    assert Fingerprint.model_validate(recorded).config == {"lr": "a"}
