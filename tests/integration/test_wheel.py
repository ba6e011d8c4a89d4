"""Wheel and sdist of this tree, and the quickstart done with the wheel alone, in an empty folder, as its reader does.

On that page, a block of Python whose first line is a comment with a file's name is that file. A block of a shell is
typed into the first terminal and runs to its end; with ``terminal=<name> until="<text or URL>"`` behind the language it
goes on in a terminal of its own, and what follows on the page waits until that text is said or that URL answers.
"""

import contextlib
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import distribution
from tests.support.doc_blocks import blocks_of
from tests.support.processes import ROOT, call, carrying, end_tree, free_port, kill_all, spawn, wait_for

pytestmark = pytest.mark.full

PAGE = ROOT / "docs" / "quickstart.md"
INSTALL = ROOT / "docs" / "guide" / "install.md"
#: How long one step of the quickstart may take.
STEP_SECONDS = 120.0
MARK = "QUICKSTART_OF_A_TEST"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with wheel and sdist of this tree, built from a tagged copy of it."""
    tree, folder = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    distribution.export_tree(tree)
    distribution.commit_tree(tree, distribution.TAG)
    said = distribution.build(tree, folder)
    assert not re.findall(r"(?i).*(?:warning|deprecat).*", said)
    return folder


def test_wheel_and_sdist_would_be_taken_by_an_index_and_hold_what_belongs_there_and_nothing_else(built: Path) -> None:
    name = f"prefect_elastic_train-{distribution.VERSION}"
    wheel, sdist = built / f"{name}-py3-none-any.whl", built / f"{name}.tar.gz"
    assert set(built.iterdir()) == {wheel, sdist}
    said = call(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, folder=built)
    assert said.count("PASSED") == 2
    package = {file for file in distribution.files_of_tree() if file.startswith("prefect_elastic_train/")}
    assert "prefect_elastic_train/py.typed" in package
    metadata = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}
    assert set(zipfile.ZipFile(wheel).namelist()) == package | {f"{name}.dist-info/{file}" for file in metadata}
    with tarfile.open(sdist) as archive:
        names = {member.name.removeprefix(f"{name}/") for member in archive if member.isfile()}
    made = {file for file in names if file.startswith("prefect_elastic_train.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert names - made == set(distribution.files_of_tree())


@pytest.fixture
def environment(built: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    """What somebody's terminals start with who can install the wheel; nothing that carries it is left behind."""
    mark = secrets.token_hex(8)
    mine = {MARK: mark, "UV_FIND_LINKS": str(built), "UV_CONSTRAINT": str(ROOT / "constraints.txt")}
    yield {**distribution.bare_environment(tmp_path / "home"), **mine}
    assert kill_all(lambda: carrying(f"{MARK}={mark}")) == [], "the quickstart left processes behind"


class Terminal:
    """A shell in a folder, and what it and its programs say."""

    def __init__(self, name: str, folder: Path, environment: dict[str, str], logs: Path) -> None:
        self._folder, self._log_file, self._commands = logs, logs / f"{name}.log", 0
        streams = {"env": environment, "stdin": subprocess.PIPE}
        self._process = spawn("bash", "--noprofile", "--norc", log=self._log_file, folder=folder, **streams)

    @property
    def log(self) -> str:
        """Everything that was said so far."""
        return self._log_file.read_text(errors="replace")

    def type(self, code: str, until: str = "") -> str:
        """Type commands, of which the first that fails ends the shell; returns what was said since.

        Waits for a text that is said, a URL that answers, or the end of the commands.
        """
        self._commands += 1
        script = self._folder / f"{self._log_file.stem}.{self._commands}.sh"
        script.write_text(code)
        before, ended = len(self.log), f"-- {script.name} is done --"
        self._process.stdin.write(f"set -e; . {shlex.quote(str(script))} </dev/null; echo '{ended}'\n".encode())
        self._process.stdin.flush()

        def may_go_on() -> bool:
            assert self._process.poll() is None, f"this failed:\n{code}\n{self.log[-6000:]}"
            if until.startswith("http://"):
                with contextlib.suppress(httpx.HTTPError):
                    return httpx.get(until, timeout=2).is_success
                return False
            return (until or ended) in self.log[before:]

        wait_for(may_go_on, STEP_SECONDS, f"the end of:\n{code}\n{self.log[-6000:]}")
        return self.log[before:]

    def close(self) -> None:
        """Press Ctrl-C and close it; kill what does not end by that."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGINT)
        end_tree(self._process)


def test_quickstart_takes_an_empty_folder_to_nightly_trainings_with_alerts_from_the_wheel_alone(
    environment: dict[str, str], tmp_path: Path
) -> None:
    port, inbox = free_port(), free_port()
    environment["PREFECT_SERVER_API_PORT"] = str(port)
    (folder := tmp_path / "empty").mkdir()
    terminals: dict[str, Terminal] = {}
    said: dict[str, str] = {}

    def elsewhere(text: str) -> str:
        """What the page says with all that differs for a test: free ports, and uv in place of pip, for its speed."""
        return text.replace("4200", str(port)).replace("8765", str(inbox)).replace("pip install", "uv pip install")

    lines = PAGE.read_text().splitlines()
    try:
        for block in (block for block in blocks_of(PAGE) if block.is_run):
            if block.language == "python":
                named = re.match(r"# ([a-z_]+\.py)\n", block.code)
                (folder / named[1]).write_text(elsewhere(block.code))
                continue
            _, *options = shlex.split(lines[block.line - 1])
            where = dict(option.split("=", 1) for option in options)
            name = where.get("terminal", "first")
            if name not in terminals:
                terminals[name] = Terminal(name, folder, environment, tmp_path)
            said[block.code] = terminals[name].type(elsewhere(block.code), elsewhere(where.get("until", "")))
            if "pip install" in block.code:
                alone = terminals[name].type(ASK_WHAT_IS_THERE)
                assert f"there: {distribution.VERSION} {folder / '.venv'}" in alone
                assert "found: []" in alone, "nothing of the checkout can be imported"

        [listed] = [answer for code, answer in said.items() if "runs list" in code]
        assert "completed" in listed
        assert "trainings can run here" in said["elastic-train doctor\n"]
        alert = wait_for(lambda: re.findall("Failed: .*", terminals["inbox"].log), 60, "the alert")
        assert "min_workers=64 need 64 CPU" in alert[0]
        assert f"http://127.0.0.1:{port}/runs/flow-run/" in alert[0]
        made = _ask(port, "automations/filter")
        assert sum(one["name"].startswith("elastic-train: ") for one in made) == 3
        triggered = re.search(r"^(\S+) is scheduled$", said["python trigger.py\n"], re.MULTILINE)
        _wait_until_completed(port, lambda run: run["name"] == triggered[1])
        _wait_until_completed(port, lambda run: run["auto_scheduled"])
    finally:
        for terminal in reversed(terminals.values()):
            terminal.close()


def test_the_lines_that_install_a_wheel_with_an_extra_do_so(
    environment: dict[str, str], built: Path, tmp_path: Path
) -> None:
    code = [line for block in blocks_of(INSTALL) for line in block.code.splitlines() if "dist/*.whl" in line]
    assert len(code) == 3
    (folder := tmp_path / "checkout").mkdir()
    shutil.copytree(built, folder / "dist")
    for number, line in enumerate(code):
        # s3fs is small, and pip takes minutes for what uv does in seconds: it installs the wheel alone.
        is_pip = line.startswith("pip ")
        line = line.replace("[torch]", "[s3]").replace("pip install", f"pip install{' --no-deps' if is_pip else ''}")
        terminal = Terminal(f"install-{number}", folder, environment, tmp_path)
        try:
            terminal.type(f"python3 -m venv .venv{number}\n. .venv{number}/bin/activate\n{line}")
            alone = terminal.type(ASK_WHAT_IS_THERE)
        finally:
            terminal.close()
        assert f"there: {distribution.VERSION} {folder / f'.venv{number}'}" in alone
        assert f"found: {[] if is_pip else ['s3fs']}" in alone


#: Where the package comes from, and what of this repository and of its extras is there besides.
ASK_WHAT_IS_THERE = """
python -c '
from importlib.util import find_spec
import prefect_elastic_train
print("there:", prefect_elastic_train.__version__, prefect_elastic_train.__file__)
print("found:", [name for name in ("tests", "flows", "benchmarks", "torch", "jax", "s3fs") if find_spec(name)])
'
"""


def _ask(port: int, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = httpx.post(f"http://127.0.0.1:{port}/api/{path}", json=body, timeout=30)
    return answer.raise_for_status().json()


def _wait_until_completed(port: int, is_it: Callable[[dict[str, Any]], bool]) -> None:
    """Wait until a flow run is Completed, with its evaluation, which is a flow run of its own."""

    def completed() -> list[dict[str, Any]]:
        return [run for run in _ask(port, "flow_runs/filter") if is_it(run) and run["state_type"] == "COMPLETED"]

    run = wait_for(completed, STEP_SECONDS, "a flow run that is Completed")[0]
    its_tasks = [task["id"] for task in _ask(port, "task_runs/filter", flow_runs={"id": {"any_": [run["id"]]}})]
    subflows = {"parent_task_run_id": {"any_": its_tasks}}
    [evaluation] = _ask(port, "flow_runs/filter", flow_runs=subflows)
    assert evaluation["state_type"] == "COMPLETED"
