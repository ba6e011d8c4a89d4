"""What a run is called, and what makes it the same training."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest

from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.runs.identity import Call, check_run_name, default_run_name, fingerprint, loop_name


@pytest.mark.parametrize(
    "name", ["", ".hidden", "-dash", "a/b", "a..b", "a b", "a\n", "a\0b", "naïve", "٣", "x" * 129, 7]
)
def test_a_name_that_is_no_folder_everywhere_is_refused_with_the_rule(name: Any) -> None:
    with pytest.raises(ConfigurationError) as refused:
        check_run_name(name)
    assert repr(name) in str(refused.value)
    assert "letters, digits, '.', '_' and '-'" in str(refused.value)


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

    assert loop_name(_loop) == "_loop"
    assert loop_name("package.module:_loop") == "_loop"
    assert loop_name(inner).endswith(".inner")
    assert "<locals>" not in loop_name(inner)
    assert loop_name(functools.partial(_loop, {})) == "partial"


def test_a_fingerprint_shows_what_is_hardly_secret_and_hides_the_rest() -> None:
    shown = {
        "lr": "0.125",
        "model": "resnet50",
        "data": "/mnt/data/imagenet_1k/train",
        "betas": "(0.9, 0.999)",
        "schedule": "(name=cosine, warmup=(steps=500))",
        "amp": "True",
        "seed": "None",
    }
    config = {
        **shown,
        "lr": 0.125,
        "betas": [0.9, 0.999],
        "schedule": {"name": "cosine", "warmup": {"steps": 500}},
        "amp": True,
        "seed": None,
        "password": "correct-horse",
        "API_KEY": 12345678,
        "nested": {"token": "battery-staple", "of": 1},
        "tracker": "wJalrXUtnFEMIK7MDENGbPxRfiCY",
        "database": "postgresql://ada:lovelace@host/runs",
        "wandb": "4f2c9a1be07d55e8",
        "db_pwd": "sesame",
        "pin_code": 1234,
        "url": "https://x/y?sig=sesame2024",
        "dsn_like": "mysql:host=db;user=root",
        "arguments": ["--password", "hunter2"],
        "entry": {"name": "password", "value": "hunter2"},
        "phrase": "abcd efgh ijkl mnop",
        "number": 10**20,
        "huge": list(range(1000)),
        "object": object(),
    }
    mine = fingerprint(_loop, "torch", config)
    assert mine.values == shown
    assert mine.config.keys() == config.keys()
    text = mine.model_dump_json()
    for secret in (
        "correct-horse",
        "12345678",
        "battery",
        "wJalr",
        "lovelace",
        "4f2c9",
        "sesame",
        "hunter2",
        "efgh",
        "mysql",
        "999, ",
    ):
        assert secret not in text


def test_the_same_training_has_the_same_fingerprint_in_any_process() -> None:
    config = {"b": [1, 2.5, None, True], "a": {"y": 1, "x": "é"}}
    reordered = {"a": {"x": "é", "y": 1}, "b": [1, 2.5, None, True]}
    mine, same = fingerprint(_loop, "torch", config), fingerprint("m:_loop", "torch", reordered)
    assert mine.differences(same) == []
    assert mine.config == same.config
    assert fingerprint(_loop, "torch", {"b": 1}).config == {"b": "6b86b273ff34fce1"}


def test_a_value_without_a_stable_text_counts_by_its_type() -> None:
    def config() -> dict[str, Any]:
        return {"object": object(), "lock": threading.Lock(), "set": {1, 2}, "keys": {1: 2, "a": 3}}

    assert not fingerprint(_loop, "torch", config()).differences(fingerprint(_loop, "torch", config()))
    changed = {**config(), "object": [object()]}
    assert fingerprint(_loop, "torch", config()).differences(fingerprint(_loop, "torch", changed)) == [
        "train_loop_config['object'] changed"
    ]


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
