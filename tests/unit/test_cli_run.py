"""`elastic-train run`: what it refuses before anything starts, and what it would do; and `elastic-train resume`."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from prefect_elastic_train.cli import app
from prefect_elastic_train.cli.running import loop_config
from prefect_elastic_train.core.outcomes import ConfigurationError, StorageFaultError
from prefect_elastic_train.storage.opening import Storage

FILES = {
    "broken.py": "import no_such_module",
    "config.yaml": "steps: 3\noptimizer: {lr: 1e-3, name: sgd}",
    "list.yaml": "- 1",
    "object.yaml": "!!python/object/apply:os.system [exit]",
    "my_loops.py": '''

print("whatever a module prints")


def train_loop(config):
    """Train."""


def two_arguments(config, other):
    """Not a loop."""
''',
}


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project in the current folder."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("my_loops", "broken"):
        sys.modules.pop(name, None)


def _planned(arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, f"run {arguments} --dry-run")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("'no path'", "'no path' … package.module:function … path/to/file.py:function"),
        ("my_loops:no_loop", "'my_loops' has no 'no_loop'"),
        ("my_loops:two_arguments", "config, other"),
        ("no_module:loop", "'no_module' cannot be imported"),
        ("broken.py:loop", "broken.py cannot be imported … no_such_module"),
        ("LOOP --framework tensorflow", "'tensorflow' … 'torch', 'jax', 'xgboost'"),
        ("LOOP --set steps", "--set steps: expected key=value"),
        ("LOOP --set a..b=3", "--set a..b=3 … key.key=value"),
        ("LOOP --set 'a=[1'", "--set a=[1 cannot be read as YAML"),
        ("LOOP --set a=12e3456", "YAML that JSON can represent"),
        ("LOOP --set a=2026-01-01", "write dates in quotes … date is not JSON"),
        ("LOOP --config none.yaml", "config none.yaml cannot be read as YAML … No such file"),
        ("LOOP --config list.yaml", "a table of keys and values, got a list"),
        ("LOOP --config object.yaml", "cannot be read as YAML"),
        ("LOOP --workers many", "--workers many … a number (4) or a range (1:8)"),
        ("LOOP --workers 8:1", "min_workers (8) must be at most max_workers (1)"),
        ("LOOP --timeout 0", "timeout_seconds=0 … above 0"),
        ("LOOP --run-name a/b", "'a/b' … letters, digits"),
        ("LOOP --run-name a --resume --resume-from b", "one of them"),
        ("LOOP --storage ftp:/x", "block 'ftp:/x' … a directory is written as ./x"),
        ("LOOP --storage s3://a//b", "expected bucket/prefix"),
        ("LOOP --profile lab", "elastic-scaling/lab … API"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: str, message: str) -> None:
    result = CliRunner().invoke(app, f"run {arguments} --json".replace("LOOP", "my_loops:train_loop"))
    *_, last = result.stderr.splitlines()
    assert (result.exit_code, result.stdout, result.stderr.count("error: "), last[:7]) == (2, "", 1, "error: ")
    assert [part for part in message.split(" … ") if part not in last] == []


@pytest.mark.parametrize("loop", ["my_loops:train_loop", "my_loops.py:train_loop", "./my_loops.py:train_loop"])
def test_a_dry_run_prints_what_would_run_and_nothing_else(loop: str, project: Path) -> None:
    plan = _planned(f"{loop} --config config.yaml --set optimizer.lr=0.5 --storage ./runs --timeout=9")
    assert plan["train_loop"] == (loop if ".py" not in loop else f"{project}/my_loops.py:train_loop")
    assert plan["train_loop_config"] == {"steps": 3, "optimizer": {"lr": 0.5, "name": "sgd"}}
    assert (plan["framework"], plan["timeout_seconds"], plan["resume"]) == ("torch", 9.0, False)
    assert plan["storage"]["path"] == str(project / "runs")
    assert plan["scaling"].items() >= {"block": "elastic-scaling (not saved)", "max_workers": 1}.items()
    assert not (project / "runs").exists()


def test_workers_stand_in_for_those_of_the_scaling_and_a_bucket_has_ambient_credentials() -> None:
    for workers, numbers in {"4": (4, 4), "1:8": (1, 8)}.items():
        plan = _planned(f"my_loops:train_loop --workers {workers} --storage s3://bucket/runs")
        assert (plan["scaling"]["min_workers"], plan["scaling"]["max_workers"]) == numbers
        assert (plan["storage"]["bucket_path"], plan["storage"]["access_key_id"]) == ("bucket/runs", "")


def test_a_value_of_a_setting_is_what_yaml_takes_it_for() -> None:
    values = {
        "3": 3,
        "1e-3": 0.001,
        "true": True,
        "": None,
        "yes": "yes",
        "s3://bucket/data": "s3://bucket/data",
        "'2026-01-01'": "2026-01-01",
        '{"lr": 0.1, "betas": [0.9]}': {"lr": 0.1, "betas": [0.9]},
    }
    assert repr({text: loop_config([], [f"key={text}"])["key"] for text in values}) == repr(values)


def test_what_comes_later_counts_and_dots_nest(tmp_path: Path) -> None:
    contents = {
        "first.yaml": "steps: 3\nname: no  # in YAML 1.2\noptimizer: &same {lr: 0.1}\nlike: *same\ndata: {path: a}",
        "second.json": '{"optimizer": {"lr": 0.2, "name": "sgd"}, "data": "b"}',
        "empty.yaml": "# nothing yet",
    }
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    settings = ["optimizer.lr=0.3", "new.table.key=1", "steps=4", "steps=5"]
    assert loop_config([tmp_path / name for name in contents], settings) == {
        "steps": 5,
        "name": "no",
        "optimizer": {"lr": 0.3, "name": "sgd"},
        "like": {"lr": 0.1},
        "data": "b",
        "new": {"table": {"key": 1}},
    }


def test_a_config_that_prefect_would_not_keep_is_refused_with_its_size() -> None:
    assert loop_config([], [f"rows={'x' * 400_000}"])
    with pytest.raises(ConfigurationError, match=r"the config has 600,012 bytes, and Prefect keeps at most 512 KiB"):
        loop_config([], [f"rows={'x' * 600_000}"])


def test_a_command_waits_for_a_storage_less_than_trainings_do_and_says_in_one_line_that_it_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []

    def run_names(storage: Storage) -> list[str]:
        waits.append(storage.retries.seconds)
        raise StorageFaultError("s3://bucket/runs is away", kind="away", permanent=False)

    monkeypatch.setattr(Storage, "run_names", run_names)
    done = CliRunner().invoke(app, "runs list s3://bucket/runs")
    assert (done.exit_code, done.output) == (1, "error: s3://bucket/runs is away\n")
    assert waits == [20]
