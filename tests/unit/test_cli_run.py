"""`elastic-train run`: what it refuses before anything starts, and what it says that it would do."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from prefect_elastic_train.cli import app

LOOPS = '''
print("whatever a module prints")


def train_loop(config):
    """Train."""


def two_arguments(config, other):
    """Not a loop."""


NUMBER = 3
'''


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project in the current folder."""
    (tmp_path / "my_loops.py").write_text(LOOPS)
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    (tmp_path / "config.yaml").write_text("steps: 3\noptimizer: {lr: 1e-3, name: sgd}\n")
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("my_loops", "broken"):
        sys.modules.pop(name, None)


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["run", *arguments])


def _planned(*arguments: str) -> dict[str, Any]:
    result = _run(*arguments, "--dry-run")
    assert result.exit_code == 0, result.stderr
    plan: dict[str, Any] = json.loads(result.stdout)
    return plan


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["no path"], ["'no path'", "package.module:function", "path/to/file.py:function"]),
        (["my_loops:no_loop"], ["'my_loops' has no 'no_loop'"]),
        (["my_loops:two_arguments"], ["2 arguments", "config, other"]),
        (["my_loops:NUMBER"], ["NUMBER", "must be a function"]),
        (["no_module:loop"], ["'no_module' cannot be imported"]),
        (["none.py:loop"], ["No such file", "none.py"]),
        (["broken.py:loop"], ["broken.py cannot be imported", "no_such_module"]),
        (["my_loops:train_loop", "--framework", "tensorflow"], ["'tensorflow'", "'torch', 'jax', 'none'"]),
        (["my_loops:train_loop", "--set", "steps"], ["--set steps", "key=value"]),
        (["my_loops:train_loop", "--config", "none.yaml"], ["none.yaml cannot be read"]),
        (["my_loops:train_loop", "--workers", "many"], ["--workers many", "a number (4) or a range (1:8)"]),
        (["my_loops:train_loop", "--workers", "8:1"], ["min_workers (8) must be at most max_workers (1)"]),
        (["my_loops:train_loop", "--workers", "0"], ["--workers 0", "greater than or equal to 1"]),
        (["my_loops:train_loop", "--timeout", "0"], ["timeout_seconds=0", "above 0"]),
        (["my_loops:train_loop", "--run-name", "a/b"], ["'a/b'", "letters, digits"]),
        (["my_loops:train_loop", "--resume"], ["resume=True", "run_name"]),
        (["my_loops:train_loop", "--run-name", "a", "--resume", "--resume-from", "b"], ["one of them"]),
        (["my_loops:train_loop", "--storage", "ftp:/x"], ["block 'ftp:/x'", "a directory is given as ./x"]),
        (["my_loops:train_loop", "--storage", "runs"], ["training-storage-directory/runs", "API"]),
        (["my_loops:train_loop", "--profile", "lab"], ["elastic-scaling/lab", "API"]),
        (["my_loops:train_loop", "--scaling", "lab"], ["elastic-scaling/lab", "API"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], parts: list[str]) -> None:
    result = _run(*arguments, "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr
    assert result.stderr.splitlines()[-1] == errors[0]
    for part in parts:
        assert part in errors[0]


@pytest.mark.parametrize("loop", ["my_loops:train_loop", "my_loops.py:train_loop", "./my_loops.py:train_loop"])
def test_a_dry_run_tells_what_would_run_and_nothing_else(loop: str, project: Path) -> None:
    plan = _planned(loop, "--config", "config.yaml", "--set", "optimizer.lr=0.5", "--storage", "./runs", "--timeout=9")
    in_a_file = loop.endswith(".py:train_loop")
    assert plan["train_loop"] == (f"{project}/my_loops.py:train_loop" if in_a_file else loop)
    assert plan["train_loop_config"] == {"steps": 3, "optimizer": {"lr": 0.5, "name": "sgd"}}
    assert (plan["framework"], plan["timeout_seconds"], plan["resume"]) == ("torch", 9.0, False)
    assert plan["storage"]["path"] == str(project / "runs")
    assert plan["scaling"]["block"] == "elastic-scaling (not saved)"
    assert (plan["scaling"]["min_workers"], plan["scaling"]["max_workers"]) == (1, 1)
    assert list((project / "runs").iterdir()) == []


@pytest.mark.parametrize(("workers", "numbers"), [("4", (4, 4)), ("1:8", (1, 8))])
def test_workers_stand_in_for_those_of_the_scaling(workers: str, numbers: tuple[int, int]) -> None:
    scaling = _planned("my_loops:train_loop", "--workers", workers)["scaling"]
    assert (scaling["min_workers"], scaling["max_workers"]) == numbers


def test_a_bucket_is_planned_with_the_ambient_credentials() -> None:
    storage = _planned("my_loops:train_loop", "--storage", "s3://bucket/runs")["storage"]
    assert (storage["bucket_path"], storage["access_key_id"]) == ("bucket/runs", "")


def test_wrong_usage_of_the_command_is_exit_code_2_too() -> None:
    assert _run().exit_code == 2
    assert _run("my_loops:train_loop", "--no-such-option").exit_code == 2
