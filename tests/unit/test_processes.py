"""Finding and ending what a run has started, in real process trees; and the guard that does it after a crash."""

from __future__ import annotations

import os
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
from prefect_elastic_train.supervisor.processes import end_marked, marked_processes
from tests.support.processes import wait_for
from tests.unit.support import REPOSITORY

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


#: A flow process: starts the guard as the supervisor does, then processes with the mark, then waits for a word.
_FLOW = """
import os, subprocess, sys
mark, variable, family, last_word = sys.argv[1:]
guard = subprocess.Popen(
    [sys.executable, "-m", "prefect_elastic_train.supervisor.guard", mark, str(os.getpid())],
    stdin=subprocess.PIPE, start_new_session=True,
)
# Whoever runs the tests in the background may have SIGINT ignored, which a driver does not.
driver = '''
import pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
pathlib.Path(sys.argv[2], "ready").touch()
try:
    time.sleep(60)
except KeyboardInterrupt:
    pathlib.Path(sys.argv[2]).with_name("in-order").touch()
'''
for command in ([driver, "prefect_elastic_train.driver", mark], [family]):
    command, environment = [sys.executable, "-c", *command], {**os.environ, variable: mark}
    subprocess.Popen(command, env=environment, start_new_session=True)
print(guard.pid, flush=True)
sys.stdin.readline()
guard.stdin.write(last_word.encode())
guard.stdin.close()
guard.wait(20)
"""


class Flow:
    """A flow process with a guard and a tree of marked processes."""

    def __init__(self, mark: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _FLOW, mark, MARK_VARIABLE, _FAMILY, DISMISSED.decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            text=True,
        )
        assert self.process.stdout is not None
        self.guard = psutil.Process(int(self.process.stdout.readline()))
        self.marked = _count(mark, 5)
        wait_for(lambda: _ignores_hangup(self.guard.pid), 10, "the guard to be on watch")
        # A signal while Python starts may be lost, and then the driver gets all of its grace.
        wait_for(Path(mark, "ready").exists, 10, "the driver to be up")

    def close(self) -> None:
        """End what is left."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        self.process.kill()
        self.process.wait()


def _ignores_hangup(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(mask.split()[1], 16) & (1 << (signal.SIGHUP - 1)))


@pytest.fixture
def flow(mark: str) -> Iterator[Flow]:
    """A flow process whose guard is on watch."""
    flow = Flow(mark)
    yield flow
    flow.close()


def test_a_flow_process_that_is_killed_leaves_nothing_running(flow: Flow, mark: str, tmp_path: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        flow.guard.send_signal(number)  # what ends a flow must not end its guard
    flow.process.kill()
    started = time.monotonic()
    wait_for(lambda: not marked_processes(mark), 10, "the end of all marked processes")
    wait_for(lambda: not Path(mark).exists(), 10 - (time.monotonic() - started), "the end of the folder")
    assert (tmp_path / "in-order").exists(), "the driver was asked first"
    wait_for(lambda: not flow.guard.is_running() or not _lives(flow.guard), 5, "the guard to go")


def test_a_guard_that_is_dismissed_goes_and_touches_nothing(flow: Flow, mark: str) -> None:
    assert flow.process.stdin is not None
    flow.process.stdin.write("\n")
    flow.process.stdin.flush()
    assert flow.process.wait(10) == 0
    assert {process.pid for process in marked_processes(mark)} == {process.pid for process in flow.marked}
    assert Path(mark, "ready").exists()
