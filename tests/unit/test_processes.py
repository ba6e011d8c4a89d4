"""Finding and ending what a run has started, in real process trees; and the guard that does it after a crash."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from prefect_elastic_train.core.request import MARK_VARIABLE, write_spec
from prefect_elastic_train.core.settings import ClusterSettings
from prefect_elastic_train.supervisor.guard import end_marked, marked_processes
from tests.support.processes import wait_for
from tests.unit.support import REPOSITORY, spec

#: Starts a child that starts a grandchild in a session of its own; the child ends, so the grandchild is nobody's.
_IN_BETWEEN = (
    "import subprocess, sys; "
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)"
)
#: An orphan, a child without the mark, and one that ignores every signal that it can.
_FAMILY = f"""
import os, subprocess, sys, time
subprocess.run([sys.executable, "-c", {_IN_BETWEEN!r}])
stubborn = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; time.sleep(60)"
subprocess.Popen([sys.executable, "-c", stubborn])
unmarked = {{name: value for name, value in os.environ.items() if name != {MARK_VARIABLE!r}}}
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=unmarked)
time.sleep(60)
"""


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    """A mark of this test, the path of a private folder, none of whose processes survives it."""
    mark = tmp_path / "private"
    mark.mkdir()
    yield str(mark)
    assert not marked_processes(str(mark)) or end_marked(str(mark), 10) == []


def _start(mark: str, *command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", *command], env={**os.environ, MARK_VARIABLE: mark})


def _count(mark: str, count: int) -> list[psutil.Process]:
    def look() -> list[psutil.Process]:
        found = marked_processes(mark)
        settled = not any(_IN_BETWEEN in process.cmdline() for process in found)
        return found if settled and len(found) == count else []

    return wait_for(look, 15, f"{count} marked processes")


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_a_whole_family_is_found_and_ended_whatever_it_has_thrown_away_and_nothing_else(
    mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = _start(f"{mark}0", "import time; time.sleep(60)")
    zombie = _start(mark, "")
    parent = _start(mark, _FAMILY)
    try:
        monkeypatch.setenv(MARK_VARIABLE, mark)
        family = _count(mark, 4)
        assert len([one for one in family if one.pid != parent.pid and one.ppid() != parent.pid]) == 1, "the orphan"
        assert not {os.getpid(), other.pid, zombie.pid} & {process.pid for process in family}
        assert end_marked(mark, 10) == []
        assert not any(map(_lives, family))
        assert other.poll() is None
    finally:
        for process in (other, parent, zombie):
            process.kill()
            process.wait()


def test_an_agent_of_ray_without_its_mark_is_found_by_title_and_folder_and_a_shell_in_there_is_not(
    mark: str, tmp_path: Path
) -> None:
    inside, beside = Path(mark) / "r0", tmp_path / "private-too"
    for folder in (inside, beside):
        folder.mkdir()
    started = [
        subprocess.Popen([title, "60"], executable=shutil.which("sleep"), cwd=folder)
        for title, folder in [("ray::DashboardAgent", inside), ("sleep", inside), ("ray::DashboardAgent", beside)]
    ]
    try:
        wait_for(lambda: all(psutil.Process(process.pid).cmdline() for process in started), 10, "their titles")
        assert [process.pid for process in marked_processes(mark)] == [started[0].pid]
        # Between two attempts the folder of the session that has died is removed.
        shutil.rmtree(inside)
        assert end_marked(mark, 10) == []
        assert [process.poll() is None for process in started] == [False, True, True]
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_a_process_that_appears_while_the_others_are_ended_is_ended_too(mark: str) -> None:
    # Each process starts the next one, as a supervisor of daemons does that restarts them.
    chain = """
import subprocess, sys, time
left, code = int(sys.argv[1]), sys.argv[2]
if left:
    subprocess.Popen([sys.executable, "-c", code, str(left - 1), code])
time.sleep(60)
"""
    first = _start(mark, chain, "5", chain)
    assert end_marked(mark, 15) == []
    assert marked_processes(mark) == []
    first.wait(5)


#: A flow process that is in the middle of an attempt; its driver ends in order when it is asked to.
_FLOW = """
import pathlib, sys
from prefect_elastic_train.core.operator_settings import ElasticTrainSettings
from prefect_elastic_train.core.request import read_spec
from prefect_elastic_train.supervisor.runtime import Runtime
told = lambda source, text: print(text, flush=True)
runtime = Runtime(ElasticTrainSettings(), print, told, check_stop=lambda: None)
runtime.driver_command = (sys.executable, "-c", *sys.argv[1:], "prefect_elastic_train.driver")
try:
    runtime.run_attempt(read_spec(pathlib.Path(sys.argv[3]).with_name("spec")))
finally:
    runtime.close()
"""
_DRIVER = """
import os, pathlib, signal, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
# Whoever runs the tests in the background may have SIGINT ignored, which a driver does not.
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    print(sys.argv[-1], flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    pathlib.Path(sys.argv[2]).touch()
"""


def _ignores_hangup(pid: int) -> bool:
    _, _, mask = Path(f"/proc/{pid}/status").read_text().partition("SigIgn:")
    return bool(int(mask.split()[0], 16) & (1 << (signal.SIGHUP - 1)))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_flow_process_that_is_ended_leaves_nothing_running(tmp_path: Path, number: signal.Signals) -> None:
    in_order = tmp_path / "in-order"
    write_spec(spec(cluster=ClusterSettings(address="auto")), tmp_path / "spec")
    with subprocess.Popen(
        [sys.executable, "-c", _FLOW, _DRIVER, _FAMILY, str(in_order)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        text=True,
    ) as flow:
        assert flow.stdout is not None
        private = Path(flow.stdout.readline().strip()).parent
        try:
            _count(str(private), 5)
            [guard] = [one for one in psutil.Process(flow.pid).children() if str(flow.pid) in one.cmdline()]
            wait_for(lambda: _ignores_hangup(guard.pid), 10, "the guard to be on watch")
            for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                guard.send_signal(other)  # what ends a flow must not end its guard
            flow.send_signal(number)
            wait_for(lambda: not marked_processes(str(private)), 20, "the end of all marked processes")
            wait_for(lambda: not private.exists(), 5, "the end of the folder")
            wait_for(lambda: not guard.is_running() or not _lives(guard), 5, "the guard to go")
            assert in_order.exists(), "the driver was asked first"
        finally:
            flow.kill()
            end_marked(str(private), 10)
