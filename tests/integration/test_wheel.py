"""Wheel and sdist of this tree, and the quickstart done with the wheel alone, in an empty folder."""

from __future__ import annotations

import re
import secrets
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.distribution import (
    TAG,
    VERSION,
    bare_environment,
    build,
    call,
    commit_tree,
    export_tree,
    files_of_tree,
)
from tests.support.processes import ROOT, end_carrying, free_port, wait_for
from tests.support.quickstart import reader, steps

pytestmark = pytest.mark.full

#: How long one step of the quickstart may take.
STEP_SECONDS = 120.0

MARK = "QUICKSTART_OF_A_TEST"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with wheel and sdist of this tree, built from a tagged copy of it."""
    tree, folder = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    export_tree(tree)
    commit_tree(tree, TAG)
    said = build(tree, folder)
    assert not re.findall(r"(?i).*(?:warning|deprecat).*", said)
    return folder


def _wheel(built: Path) -> Path:
    return built / f"prefect_elastic_train-{VERSION}-py3-none-any.whl"


def _sdist(built: Path) -> Path:
    return built / f"prefect_elastic_train-{VERSION}.tar.gz"


def test_an_index_would_take_wheel_and_sdist_and_their_version_is_the_tag(built: Path) -> None:
    assert sorted(built.iterdir()) == sorted([_wheel(built), _sdist(built)])
    said = call(sys.executable, "-m", "twine", "check", "--strict", _wheel(built), _sdist(built), folder=built)
    assert said.count("PASSED") == 2


def test_the_wheel_holds_the_package_its_types_and_its_license_and_nothing_else(built: Path) -> None:
    info = f"prefect_elastic_train-{VERSION}.dist-info"
    with zipfile.ZipFile(_wheel(built)) as wheel:
        names = set(wheel.namelist())
    package = {name for name in files_of_tree() if name.startswith("prefect_elastic_train/")}
    metadata = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}
    assert names == package | {f"{info}/{name}" for name in metadata}
    assert "prefect_elastic_train/py.typed" in names


def test_the_sdist_holds_the_tree_and_nothing_that_was_made_in_it(built: Path) -> None:
    top = f"prefect_elastic_train-{VERSION}/"
    with tarfile.open(_sdist(built)) as sdist:
        names = {member.name.removeprefix(top) for member in sdist if member.isfile()}
    made = {name for name in names if name.startswith("prefect_elastic_train.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert names - made == set(files_of_tree())


@pytest.fixture
def environment(built: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    """What somebody's terminals start with who can install the wheel; nothing that carries it is left behind."""
    mark = secrets.token_hex(8)
    yield {
        **bare_environment(tmp_path / "home"),
        MARK: mark,
        "UV_FIND_LINKS": str(built),
        "UV_CONSTRAINT": str(ROOT / "constraints.txt"),
    }
    left = end_carrying(f"{MARK}={mark}")
    assert left == [], "the quickstart left processes behind"


def test_quickstart_takes_an_empty_folder_to_nightly_trainings_with_alerts_from_the_wheel_alone(
    environment: dict[str, str], tmp_path: Path
) -> None:
    port, inbox = free_port(), free_port()
    environment["PREFECT_SERVER_API_PORT"] = str(port)
    (folder := tmp_path / "empty").mkdir()
    began = time.monotonic()
    with reader(folder, environment, tmp_path) as somebody:
        said: dict[str, str] = {}
        for step in steps():
            here = replace(step, code=_elsewhere(step.code, port, inbox), until=_elsewhere(step.until, port, inbox))
            said[step.code] = somebody.do(here, STEP_SECONDS)
            print(f"{time.monotonic() - began:6.1f} s: done, line {step.line}")
            if "pip install" in step.code:
                _assert_alone(somebody.first.type(ASK_WHAT_IS_THERE, STEP_SECONDS), folder)

        [listed] = [answer for code, answer in said.items() if "runs list" in code]
        assert "completed" in listed
        assert "trainings can run here" in said["elastic-train doctor\n"]

        wait_for(lambda: "this is only a test" in somebody["inbox"].log, 30, "the alert")
        made = _ask(port, "automations/filter")
        assert sum(one["name"].startswith("alert: ") for one in made) == 4
        assert sum(one["name"].startswith("elastic-train: ") for one in made) == 2

        triggered = re.search(r"^(\S+) is scheduled$", said["python trigger.py\n"], re.MULTILINE)
        assert triggered
        _wait_until_completed(port, lambda run: run["name"] == triggered[1])
        print(f"{time.monotonic() - began:6.1f} s: the run that the API was asked for is Completed")
        _wait_until_completed(port, lambda run: run["auto_scheduled"])
        print(f"{time.monotonic() - began:6.1f} s: a run that the schedule made is Completed")


#: Where the package comes from, and what of this repository and of its extras is there besides.
ASK_WHAT_IS_THERE = """
python -c '
from importlib.util import find_spec
import prefect_elastic_train
print("there:", prefect_elastic_train.__version__, prefect_elastic_train.__file__)
print("found:", [name for name in ("tests", "flows", "benchmarks", "torch", "jax", "s3fs") if find_spec(name)])
'
"""


def _assert_alone(said: str, folder: Path) -> None:
    """Check that the package comes from the environment in the folder, and nothing of the checkout can be imported."""
    assert f"there: {VERSION} {folder / '.venv'}" in said
    assert "found: []" in said


def _elsewhere(code: str, port: int, inbox: int) -> str:
    """Give what the page says with all that differs for a test: free ports, and uv in place of pip, for its speed."""
    return code.replace("4200", str(port)).replace("8765", str(inbox)).replace("pip install", "uv pip install")


def _ask(port: int, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = httpx.post(f"http://127.0.0.1:{port}/api/{path}", json=body, timeout=30)
    answer.raise_for_status()
    found: list[dict[str, Any]] = answer.json()
    return found


def _wait_until_completed(port: int, is_it: Callable[[dict[str, Any]], bool]) -> None:
    """Wait until a flow run is Completed, with its evaluation, which is a flow run of its own."""

    def completed() -> list[dict[str, Any]]:
        return [run for run in _ask(port, "flow_runs/filter") if is_it(run) and run["state_type"] == "COMPLETED"]

    run = wait_for(completed, STEP_SECONDS, "a flow run that is Completed")[0]
    its_tasks = [task["id"] for task in _ask(port, "task_runs/filter", flow_runs={"id": {"any_": [run["id"]]}})]
    subflows = {"parent_task_run_id": {"any_": its_tasks}}
    [evaluation] = _ask(port, "flow_runs/filter", flow_runs=subflows)
    assert evaluation["state_type"] == "COMPLETED"
