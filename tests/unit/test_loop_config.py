"""The config of a loop from files and from `--set`."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefect_elastic_train.cli.loop_config import loop_config, read_config
from prefect_elastic_train.core.outcomes import ConfigurationError

SAME = {
    "config.json": '{"steps": 3, "optimizer": {"lr": 1e-3, "betas": [0.9, 0.95]}, "name": "no"}',
    "config.yaml": "steps: 3\noptimizer: {lr: 1e-3, betas: [0.9, 0.95]}\nname: no  # no boolean in YAML 1.2\n",
    "config.YML": "steps: 3\noptimizer:\n  lr: 1e-3\n  betas:\n  - 0.9\n  - 0.95\nname: 'no'\n",
    "config.toml": 'steps = 3\nname = "no"\n[optimizer]\nlr = 1e-3\nbetas = [0.9, 0.95]\n',
}


@pytest.mark.parametrize("name", SAME)
def test_a_config_is_the_same_in_each_format(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(SAME[name])
    expected = {"steps": 3, "optimizer": {"lr": 0.001, "betas": [0.9, 0.95]}, "name": "no"}
    assert read_config(tmp_path / name) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-0.5", -0.5),
        ("1e-3", 0.001),
        ("true", True),
        ("null", None),
        ("", None),
        ("yes", "yes"),
        ("adam", "adam"),
        ("s3://bucket/data", "s3://bucket/data"),
        ("a=b", "a=b"),
        ('"3"', "3"),
        ("'2026-01-01'", "2026-01-01"),
        ("[1, 2e-4, x]", [1, 0.0002, "x"]),
        ('{"lr": 0.1, "betas": [0.9]}', {"lr": 0.1, "betas": [0.9]}),
    ],
)
def test_a_value_of_a_setting_is_what_yaml_takes_it_for(text: str, value: object) -> None:
    found = loop_config([], [f"key={text}"])["key"]
    assert (found, type(found)) == (value, type(value))


def test_what_comes_later_counts_and_dots_nest(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.json"
    first.write_text("steps: 3\noptimizer: {lr: 0.1, name: sgd}\ndata: {path: a}\n")
    second.write_text('{"optimizer": {"lr": 0.2}, "data": "b"}')
    settings = ["optimizer.lr=0.3", "new.table.key=1", "steps=4", "steps=5"]
    assert loop_config([first, second], settings) == {
        "steps": 5,
        "optimizer": {"lr": 0.3, "name": "sgd"},
        "data": "b",
        "new": {"table": {"key": 1}},
    }


def test_tables_that_yaml_shares_are_set_one_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "shared.yaml"
    file.write_text("train: &same {batch: 8}\ntest: *same\n")
    assert loop_config([file], ["test.batch=1"]) == {"train": {"batch": 8}, "test": {"batch": 1}}


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (["steps"], ["--set steps", "key=value"]),
        (["=3"], ["key=value"]),
        (["a..b=3"], ["--set a..b=3", "key.key=value"]),
        (["a=1", "a.b=2"], ["--set a.b=2", "a is no table, but 1"]),
        (["a=[1"], ["--set a=[1", "no YAML or JSON"]),
        (["a=*"], ["--set a=*", "no YAML or JSON", "in quotes"]),
        (["a=2024-02-30"], ["no YAML or JSON", "day is out of range", "in quotes"]),
        (["a=#fff"], ["--set a=#fff", "in quotes"]),
        (["a=12e3456"], ["inf", "JSON has no number", "in quotes"]),
        (["a=2026-01-01"], ["is a date", "in quotes"]),
        (["a={1: 2}"], ["the key 1", "in quotes"]),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused_with_what_is_allowed(settings: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigurationError) as refused:
        loop_config([], settings)
    for part in parts:
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("config.ini", "a=1", ["config.ini", ".json, .yaml, .yml, .toml"]),
        ("config.json", "{", ["cannot be read", "line 1"]),
        ("config.yaml", "a: [", ["cannot be read", "line 1"]),
        ("config.toml", "a = ", ["cannot be read"]),
        ("config.yaml", "- 1", ["a table of keys and values", "list"]),
        ("config.yaml", "begin: {at: 2026-01-01}", ["begin.at is a date", "in quotes"]),
        ("config.yaml", "1: one", ["the key 1"]),
        ("config.json", '{"a": NaN}', ["a is nan"]),
        ("config.yaml", "!!python/object/apply:os.system [exit]", ["cannot be read"]),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_where_and_why(
    tmp_path: Path, name: str, text: str, parts: list[str]
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigurationError) as refused:
        read_config(tmp_path / name)
    for part in [str(tmp_path), *parts]:
        assert part in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.json cannot be read: No such file"):
        read_config(tmp_path / "none.json")


def test_an_empty_yaml_file_is_an_empty_config(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    assert loop_config([tmp_path / "empty.yaml"], []) == {}
