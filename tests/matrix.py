"""Run tests with other versions of Python, Ray, Prefect, torch and JAX, and write ``docs/compatibility.md``.

``python -m tests.matrix`` (``make matrix``) runs all combinations, with names as arguments only those. Each has a
virtual environment of its own under ``.matrix/``. The table keeps the rows of combinations that did not run.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

from tests.support.processes import ROOT

FOLDER = ROOT / ".matrix"
PAGE = ROOT / "docs" / "compatibility.md"
#: Packages whose versions the table shows.
SHOWN = ("ray", "prefect", "torch", "jax")
#: Real faults, one test of each kind.
FAULTS = {
    "worker, driver, cluster killed": "test_driver.py::test_killed_worker_driver_and_local_cluster_are_told_in_a_few_"
    "lines_and_rays_own_words_are_in_a_file",
    "growth, drain, lost node": "test_elastic.py::test_workers_wait_for_nodes_grow_with_them_and_give_way_to_drained_"
    "and_lost_ones",
    "flow process killed": "test_kills.py::test_flow_process_killed_in_mid_training_leaves_nothing_and_its_flow_run_"
    "goes_on",
    "S3 outage": "test_storage.py::test_requests_that_fail_and_an_outage_cost_time_and_nothing_else",
    "cancel": "test_cancellation.py::test_cancel_under_a_process_worker",
    "resume": "test_resume.py::test_flow_process_of_a_deployment_is_resumed_by_the_automation_when_killed_and_after_"
    "ctrl_c_by_the_command_only",
    "job": "test_jobs.py::test_the_job_of_a_flow_process_that_is_killed_or_evicted_goes_on_and_is_followed_by_the_"
    "resumed_flow_run",
    "FSDP2 and JAX": "test_loop_session.py::test_shards_of_two_workers_go_on_with_one_and_with_two_again",
    "frozen driver": "test_fence.py::test_frozen_holder_that_wakes_up_commits_nothing_that_counts_and_stops_by_itself",
}
UPGRADE = "test_upgrade.py"
STEP_SECONDS = 2700
#: Comments of the page around its table.
_BEGIN = "<!-- matrix -->"
_END = "<!-- end -->"


@dataclass(frozen=True)
class Combination:
    """Versions that are installed together.

    Attributes:
        name: Name of the row and of the environment's folder.
        packages: Requirements that differ from ``constraints.txt``.
        python: Version of Python.
        upgrade_from: Name of the combination whose environment begins a run that this one resumes; empty: none.
    """

    name: str
    packages: tuple[str, ...] = ()
    python: str = "3.11"
    upgrade_from: str = ""

    @property
    def interpreter(self) -> Path:
        return FOLDER / self.name / "bin" / "python"


def _ray(version: str, prefect: str, upgrade_from: str = "") -> Combination:
    name = f"ray-{version}-prefect-{prefect}"
    return Combination(name, (f"ray=={version}", f"prefect=={prefect}"), upgrade_from=upgrade_from)


COMBINATIONS = [
    _ray("2.58.1", "3.8.8"),
    _ray("2.58.1", "3.9.1"),
    _ray("2.59.0", "3.8.8"),
    _ray("2.59.0", "3.9.1", "ray-2.58.1-prefect-3.9.1"),
    _ray("2.60.0", "3.8.8"),
    _ray("2.60.0", "3.9.1", "ray-2.59.0-prefect-3.9.1"),
    Combination("oldest-frameworks", ("torch==2.9.*", "jax==0.7.1", "jaxlib==0.7.1")),
    Combination("newest-frameworks", ("torch>=2.15", "jax>=0.10.2")),
    Combination("python-3.10", python="3.10"),
    Combination("python-3.12", python="3.12"),
    Combination("python-3.13", python="3.13"),
]


def main(names: list[str]) -> None:
    """Run the combinations of these names, or all; exit with an error if one of them fails."""
    if unknown := set(names) - {each.name for each in COMBINATIONS}:
        sys.exit(f"no combinations: {unknown}; there are {[each.name for each in COMBINATIONS]}")
    FOLDER.mkdir(exist_ok=True)
    failed: list[str] = []
    for combination in COMBINATIONS:
        if names and combination.name not in names:
            continue
        cells = [combination.name, *_run(combination), str(date.today())]
        _write_row(cells)
        print(*cells, sep=" | ", flush=True)
        failed += [combination.name] if any("failed" in cell for cell in cells) else []
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; the output is in {FOLDER}")


def _write_row(cells: list[str]) -> None:
    """Write a row of the table, in place of an older one of its combination."""
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    table, _, after = rest.partition(_END)
    rows = {row.split(" | ")[0].strip("| "): row for row in table.splitlines()}
    rows[cells[0]] = f"| {' | '.join(cells)} |"
    heads = ["combination", "Python", *SHOWN, "unit", "contract", "demo", *FAULTS, "upgrade", "date"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    lines += [rows[each.name] for each in COMBINATIONS if each.name in rows]
    before = before.replace(" No row has been recorded yet.", "")
    PAGE.write_text("\n".join([before + _BEGIN, *lines, _END + after]))


def _run(combination: Combination) -> Iterator[str]:
    """Install a combination and run its tests; yield the cells of its row."""
    if not _install(combination):
        yield from [combination.python, "**not installed, failed**", *["–"] * (len(SHOWN) + 3 + len(FAULTS))]
        return
    versions = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
    command = [combination.interpreter, "-c", versions, *SHOWN]
    yield combination.python
    yield from subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    unit = _test(combination, "unit", "-n", "4", "tests/unit")
    yield _cell(unit)
    yield _cell({name: outcome for name, outcome in unit.items() if "test_ray_contract" in name})
    yield _call(combination, "demo", "-m", "flows.digits")
    faults = _test(combination, "faults", "-n", "2", *(f"tests/faults/{test}" for test in FAULTS.values()))
    for test in FAULTS.values():
        name = test.partition("::")[2]
        yield _cell({each: outcome for each, outcome in faults.items() if name in each})
    before = [each for each in COMBINATIONS if each.name == combination.upgrade_from and _install(each)]
    other = {"UPGRADE_FROM_PYTHON": str(before[0].interpreter)} if before else {}
    yield _cell(_test(combination, "upgrade", f"tests/faults/{UPGRADE}", **other))


def _install(combination: Combination) -> bool:
    """Install a combination into its environment if it is not there; return True if it is."""
    done = FOLDER / combination.name / "installed"
    if done.exists():
        return True
    # With other versions of these packages, the resolver chooses what goes with them.
    replaced = {re.split("[=><]", package)[0] for package in combination.packages}
    if "prefect" in replaced:
        replaced |= {"apprise", "certifi", "whenever"}
    if "jax" in replaced:
        replaced |= {"orbax-checkpoint", "torchvision", "ml_dtypes"}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = FOLDER / f"{combination.name}.txt"
    constraints.write_text("\n".join(line for line in lines if line.split("==")[0] not in replaced))
    install = ["uv", "pip", "install", "--python", combination.interpreter, "-c", constraints]
    for command in (
        ["uv", "venv", "--clear", "--python", combination.python, FOLDER / combination.name],
        [*install, "-e", f"{ROOT}[dev]", *combination.packages],
    ):
        if subprocess.run(command).returncode:
            return False
    done.touch()
    return True


def _test(combination: Combination, name: str, *arguments: str, **environment: str) -> dict[str, float | None]:
    """Run tests; return the seconds of each that was not skipped by its name, None for one that failed."""
    report = FOLDER / f"{combination.name}-{name}.xml"
    report.unlink(missing_ok=True)
    _call(combination, name, "-m", "pytest", "-q", f"--junitxml={report}", *arguments, **environment)
    if not report.exists():
        return {name: None}
    tests: dict[str, float | None] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is not None:
            continue
        has_failed = case.find("failure") is not None or case.find("error") is not None
        tests[f"{case.get('classname')}::{case.get('name')}"] = None if has_failed else float(case.get("time", 0))
    return tests


def _call(combination: Combination, name: str, *arguments: str, **environment: str) -> str:
    """Run Python in an environment; return the cell of the table. The output is in a file."""
    start = time.monotonic()
    own = ("PREFECT_", "RAY_")  # settings of whoever runs this
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(own)}
    with (FOLDER / f"{combination.name}-{name}.log").open("w") as log, tempfile.TemporaryDirectory() as home:
        prefect = {"PREFECT_HOME": home, "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120"}
        process = subprocess.Popen(
            [combination.interpreter, *arguments],
            cwd=ROOT,
            env={**inherited, **prefect, **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait(STEP_SECONDS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # pytest ends what its tests have started
            code = process.wait(120)
    return "**failed**" if code else f"{time.monotonic() - start:.0f} s"


def _cell(tests: dict[str, float | None]) -> str:
    """Return the cell of some tests: the sum of their seconds, or the number of those that failed."""
    failed = sum(seconds is None for seconds in tests.values())
    if failed or not tests:
        return f"**{failed or 'none ran,'} failed**"
    return f"{sum(seconds or 0 for seconds in tests.values()):.0f} s"


if __name__ == "__main__":
    main(sys.argv[1:])
