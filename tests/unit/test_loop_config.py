"""The config of a loop from files and from `--set`."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefect_elastic_train.cli.running import loop_config
from prefect_elastic_train.core.outcomes import ConfigurationError

SAME = {
    "config.json": '{"steps": 3, "optimizer": {"lr": 1e-3, "betas": [0.9, 0.95]}, "name": "no"}',
    "config.yaml": "steps: 3\noptimizer: {lr: 1e-3, betas: [0.9, 0.95]}\nname: no  # no boolean in YAML 1.2\n",
}


@pytest.mark.parametrize("name", SAME)
def test_a_config_is_the_same_in_each_format(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(SAME[name])
    expected = {"steps": 3, "optimizer": {"lr": 0.001, "betas": [0.9, 0.95]}, "name": "no"}
    assert loop_config([tmp_path / name], []) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-3", 0.001),
        ("true", True),
        ("", None),
        ("yes", "yes"),
        ("s3://bucket/data", "s3://bucket/data"),
        ("a=b", "a=b"),
        ("'2026-01-01'", "2026-01-01"),
        ("[1, 2e-4, x]", [1, 0.0002, "x"]),
        ('{"lr": 0.1, "betas": [0.9]}', {"lr": 0.1, "betas": [0.9]}),
    ],
)
def test_a_value_of_a_setting_is_what_yaml_takes_it_for(text: str, value: object) -> None:
    found = loop_config([], [f"key={text}"])["key"]
    assert (found, type(found)) == (value, type(value))


def test_what_comes_later_counts_and_dots_nest(tmp_path: Path) -> None:
    first, second, empty = tmp_path / "first.yaml", tmp_path / "second.json", tmp_path / "empty.yaml"
    first.write_text("steps: 3\noptimizer: &same {lr: 0.1, name: sgd}\nlike: *same\ndata: {path: a}\n")
    second.write_text('{"optimizer": {"lr": 0.2}, "data": "b"}')
    empty.write_text("# nothing yet\n")
    settings = ["optimizer.lr=0.3", "new.table.key=1", "steps=4", "steps=5"]
    assert loop_config([first, second, empty], settings) == {
        "steps": 5,
        "optimizer": {"lr": 0.3, "name": "sgd"},
        "like": {"lr": 0.1, "name": "sgd"},
        "data": "b",
        "new": {"table": {"key": 1}},
    }


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("steps", "expected key=value"),
        ("=3", "expected key=value"),
        ("a..b=3", "key.key=value"),
        ("a=[1", "no YAML"),
        ("a=2024-02-30", "no YAML.*day is out of range"),
        ("a=12e3456", "no YAML that JSON can hold"),
        ("a=2026-01-01", "write dates and the like in quotes, as text.*date is not JSON"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused_with_what_is_allowed(setting: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"(?s)^--set .*{says}") as refused:
        loop_config([], [setting])
    assert str(refused.value).startswith(f"--set {setting}")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("none.yaml", None, "is no YAML.*No such file"),
        ("config.json", "{", "is no YAML.*line 1"),
        ("config.yaml", "- 1", "a table of keys and values, got a list"),
        ("config.yaml", "begin: {at: 2026-01-01}", "is no YAML.*date is not JSON"),
        ("config.yaml", "!!python/object/apply:os.system [exit]", "is no YAML"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_why(tmp_path: Path, name: str, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigurationError, match=rf"(?s)^config {tmp_path}/{name} .*{says}"):
        loop_config([tmp_path / name], [])
