"""Finding and ending what a run has started, in real process trees; and the guard that does it after a crash."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from prefect_elastic_train.core.spec import MARK_VARIABLE
from prefect_elastic_train.supervisor.guard import DISMISSED
from prefect_elastic_train.supervisor.processes import end_marked, end_process, marked_processes
from tests.support.processes import of_cluster, wait_for
from tests.unit.support import REPOSITORY

#: Starts a child that starts a grandchild in a session of its own; the child ends, so the grandchild is nobody's.
_IN_BETWEEN = (
    "import subprocess, sys; "
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)"
)
_FAMILY = f"""
import subprocess, sys, time
orphan = {_IN_BETWEEN!r}
subprocess.run([sys.executable, "-c", orphan])
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
time.sleep(60)
"""

#: Starts a child without the mark.
_UNMARKED_CHILD = """
import os, subprocess, sys, time
environment = {name: value for name, value in os.environ.items() if name != sys.argv[1]}
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=environment)
time.sleep(60)
"""

_STUBBORN = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; time.sleep(60)"


@pytest.fixture
def mark() -> Iterator[str]:
    """A mark of this test, none of whose processes survives it."""
    mark = secrets.token_hex(8)
    yield mark
    assert not marked_processes(mark) or end_marked(mark, 10) == []


def _start(mark: str, *command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", *command], env={**os.environ, MARK_VARIABLE: mark})


def _count(mark: str, count: int) -> list[psutil.Process]:
    def look() -> list[psutil.Process]:
        found = marked_processes(mark)
        settled = not any(_IN_BETWEEN in process.cmdline() for process in found)
        return found if settled and len(found) == count else []

    return wait_for(look, 15, f"{count} marked processes")


def test_a_whole_family_is_found_also_grandchildren_whose_parents_are_gone(mark: str) -> None:
    parent = _start(mark, _FAMILY)
    family = _count(mark, 3)
    orphans = [process for process in family if process.pid != parent.pid and process.ppid() != parent.pid]
    assert len(orphans) == 1
    assert os.getpgid(orphans[0].pid) == orphans[0].pid
    assert end_marked(mark, 10) == []
    assert not any(_lives(process) for process in family)
    parent.wait(5)


def test_a_child_that_threw_the_mark_away_is_found_by_its_parent(mark: str) -> None:
    parent = _start(mark, _UNMARKED_CHILD, MARK_VARIABLE)
    found = _count(mark, 2)
    child = next(process for process in found if process.pid != parent.pid)
    assert MARK_VARIABLE not in child.environ()
    assert end_marked(mark, 10) == []
    assert not _lives(child)
    parent.wait(5)


def test_other_marks_and_this_process_are_left_alone(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = _start(f"{mark}0", "import time; time.sleep(60)")
    ended = _start(mark, "import time; time.sleep(60)")
    try:
        _count(mark, 1)
        monkeypatch.setenv(MARK_VARIABLE, mark)
        assert os.getpid() not in [process.pid for process in marked_processes(mark)]
        assert end_marked(mark, 10) == []
        assert ended.poll() is not None
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_dead_processes_that_nobody_waited_for_are_not_found(mark: str) -> None:
    zombie = _start(mark, "")
    wait_for(lambda: psutil.Process(zombie.pid).status() == psutil.STATUS_ZOMBIE, 10, "its end")
    assert marked_processes(mark) == []
    zombie.wait()


def test_an_agent_of_ray_without_its_mark_is_found_by_title_and_folder_and_a_shell_in_there_is_not(
    tmp_path: Path,
) -> None:
    inside, mark = tmp_path / "a" / "r0", str(tmp_path / "a")
    inside.mkdir(parents=True)
    beside = tmp_path / "ab"
    beside.mkdir()
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


def test_an_agent_of_ray_without_its_mark_belongs_to_the_cluster_of_a_test_that_it_logs_to(tmp_path: Path) -> None:
    folder, beside = tmp_path / "head", tmp_path / "head-of-another"
    started = []
    try:
        for title, place in [("ray::DashboardAgent", folder), ("sleep", folder), ("ray::DashboardAgent", beside)]:
            place.mkdir(exist_ok=True)
            with (place / "agent.log").open("wb") as log:
                started.append(subprocess.Popen([title, "60"], executable=shutil.which("sleep"), stderr=log))
        wait_for(lambda: all(psutil.Process(process.pid).cmdline() for process in started), 10, "their titles")
        assert [process.pid for process in of_cluster("TEST_HEAD_MARK=none", folder)] == [started[0].pid]
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_processes_that_ignore_every_signal_they_can_are_ended(mark: str) -> None:
    process = _start(mark, _STUBBORN)
    wait_for(lambda: _ignores(process.pid, signal.SIGTERM), 10, "readiness")
    assert end_marked(mark, 10) == []
    assert process.poll() is not None


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


def test_ending_nothing_is_quick_and_fine() -> None:
    started = time.monotonic()
    assert end_marked(secrets.token_hex(8), 10) == []
    assert time.monotonic() - started < 5


def test_a_process_that_heeds_sigint_ends_by_itself(tmp_path: Path) -> None:
    code = """
import sys, time
try:
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    open(sys.argv[1], "w").write("in order")
"""
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "end")], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    end_process(psutil.Process(process.pid), 10)
    assert (tmp_path / "end").read_text() == "in order"
    process.wait()
    process.stdout.close()


def test_a_process_that_does_not_is_killed_after_its_grace() -> None:
    process = subprocess.Popen([sys.executable, "-c", _STUBBORN])
    wait_for(lambda: _ignores(process.pid, signal.SIGTERM), 10, "readiness")
    started = time.monotonic()
    end_process(psutil.Process(process.pid), 0.5)
    assert time.monotonic() - started >= 0.4
    assert process.wait(5) == -signal.SIGKILL


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _ignores(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(mask.split()[1], 16) & (1 << (number - 1)))


#: A flow process: starts the guard as the supervisor does, then processes with the mark, then waits for a word.
_FLOW = """
import os, subprocess, sys
guard = subprocess.Popen(
    [sys.executable, "-m", "prefect_elastic_train.supervisor.guard", f"--mark={sys.argv[1]}", f"--parent={os.getpid()}",
     f"--folder={sys.argv[2]}"],
    stdin=subprocess.PIPE, start_new_session=True,
)
environment = {**os.environ, sys.argv[3]: sys.argv[1]}
# Whoever runs the tests in the background may have SIGINT ignored, which a driver does not.
driver = "import pathlib, signal, sys, time; signal.signal(signal.SIGINT, signal.default_int_handler); "
driver += "pathlib.Path(sys.argv[2]).touch(); time.sleep(60)"
for command in ([driver, "prefect_elastic_train.driver", f"{sys.argv[2]}/ready"], [sys.argv[4]], [sys.argv[5]]):
    subprocess.Popen([sys.executable, "-c", *command], env=environment, start_new_session=True)
print(guard.pid, flush=True)
sys.stdin.readline()
guard.stdin.write(sys.argv[6].encode())
guard.stdin.close()
guard.wait(20)
"""


class Flow:
    """A flow process with a guard and a tree of marked processes."""

    def __init__(self, mark: str, folder: Path) -> None:
        folder.mkdir()
        (folder / "token").write_text("hush")
        self.process = subprocess.Popen(
            [sys.executable, "-c", _FLOW, mark, str(folder), MARK_VARIABLE, _FAMILY, _STUBBORN, DISMISSED.decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            text=True,
        )
        assert self.process.stdout is not None
        self.guard = psutil.Process(int(self.process.stdout.readline()))
        # driver, family of three, stubborn one
        self.marked = _count(mark, 5)
        wait_for(lambda: _ignores(self.guard.pid, signal.SIGHUP), 10, "the guard to be on watch")
        # A signal while Python starts may be lost, and then the driver gets all of its grace.
        wait_for((folder / "ready").exists, 10, "the driver to be up")

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        self.process.kill()
        self.process.wait()
        try:
            self.guard.kill()
        except psutil.Error:
            pass


@pytest.fixture
def flow(mark: str, tmp_path: Path) -> Iterator[Flow]:
    """A flow process whose guard is on watch."""
    flow = Flow(mark, tmp_path / "private")
    yield flow
    flow.close()


def test_a_flow_process_that_is_killed_leaves_nothing_running(flow: Flow, mark: str, tmp_path: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        flow.guard.send_signal(number)  # what ends a flow must not end its guard
    flow.process.kill()
    started = time.monotonic()
    wait_for(lambda: not marked_processes(mark), 10, "the end of all marked processes")
    wait_for(lambda: not (tmp_path / "private").exists(), 10 - (time.monotonic() - started), "the end of the folder")
    wait_for(lambda: not _lives(flow.guard), 5, "the guard to go")


def test_a_guard_that_is_dismissed_goes_and_touches_nothing(flow: Flow, mark: str, tmp_path: Path) -> None:
    assert flow.process.stdin is not None
    flow.process.stdin.write("\n")
    flow.process.stdin.flush()
    assert flow.process.wait(10) == 0
    assert not _lives(flow.guard)
    assert {process.pid for process in marked_processes(mark)} == {process.pid for process in flow.marked}
    assert (tmp_path / "private" / "token").read_text() == "hush"
