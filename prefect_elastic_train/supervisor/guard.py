"""Finding and killing the processes of a run, and the guard, a process that does it when the flow process has died.

Ray's daemons leave their process group and their parent, so neither finds them all. Every process of a run inherits a
mark in its environment instead: the path of the training's private folder. Ray's workers and agents write their title
over their environment. They are found by that title and their working directory.

``python -m prefect_elastic_train.supervisor.guard <private folder> <process id of the flow>``: the supervisor starts
the guard before any other process, with a pipe to its standard input, and kills it after cleaning up. The flow process
has died if the pipe closes or if it is no longer the guard's parent. Then the guard stops the driver, kills all marked
processes, and removes the folder.

Each hour it updates the timestamps of all files in the folder, since cleaners of /tmp remove files that were not used
for some days, and removes the logs of Ray's workers that have exited.
"""

import os
import re
import select
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from prefect_elastic_train.core.request import DRIVER_MODULE, MARK_VARIABLE
from prefect_elastic_train.core.time_limits import KILL_SECONDS, STOP_GRACE_SECONDS

_GUARD_POLL_SECONDS = 0.25
_MAINTENANCE_SECONDS = 3600.0
#: Polls in a row without a marked process before all are taken for dead.
_EMPTY_POLLS = 3


def main(folder: str, parent: int) -> None:
    """Run the guard: wait until the flow process has exited, then stop the driver and clean up.

    Kills all processes with the process mark, and deletes the training's private folder, whose path is the mark.
    """
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    while os.getppid() == parent:
        if select.select([0], [], [], _GUARD_POLL_SECONDS)[0]:
            break
        if time.monotonic() % _MAINTENANCE_SECONDS < _GUARD_POLL_SECONDS:
            with suppress(OSError):  # a file was removed meanwhile: the rest follows an hour later
                for log in Path(folder).glob("r0/session_*/logs/*worker-*"):  # their names end with a process id
                    if not psutil.pid_exists(int(re.findall(r"\d+", log.name)[-1])):
                        log.unlink()
                for path in Path(folder).rglob("*"):
                    os.utime(path, follow_symlinks=False)
    drivers = []
    for process in marked_processes(folder):
        with suppress(psutil.Error):
            if DRIVER_MODULE in process.cmdline():
                process.send_signal(signal.SIGINT)
                drivers.append(process)
    psutil.wait_procs(drivers, timeout=STOP_GRACE_SECONDS)
    kill_marked(folder)
    shutil.rmtree(folder, ignore_errors=True)


def marked_processes(mark: str) -> list[psutil.Process]:
    """Return the living processes with a process mark and their descendants, except this process."""
    marked: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process not in marked and _has_mark(process, mark):
                marked |= {process, *process.children(recursive=True)}
    alive = []
    for process in marked - {psutil.Process()}:
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


def kill_marked(mark: str) -> list[int]:
    """Kill all processes with a process mark, also those that start meanwhile, within `KILL_SECONDS`.

    Returns the process ids of those that still run.
    """
    deadline = time.monotonic() + KILL_SECONDS
    empty_polls = 0
    while True:
        alive = marked_processes(mark)
        for process in alive:
            with suppress(psutil.Error):
                process.kill()
        # A process between fork and exec shows its mark only at the next poll.
        empty_polls = 0 if alive else empty_polls + 1
        if empty_polls >= _EMPTY_POLLS:
            return []
        if time.monotonic() >= deadline:
            return [process.pid for process in alive]
        psutil.wait_procs(alive, timeout=0.2)
        time.sleep(0.1)


def _has_mark(process: psutil.Process, mark: str) -> bool:
    if process.environ().get(MARK_VARIABLE) == mark:
        return True
    # Only Ray's processes: a user's shell may work in the folder, too. The folder may be removed by now.
    is_inside = f"{process.cwd().removesuffix(' (deleted)')}/".startswith(f"{mark}/")
    return is_inside and "".join(process.cmdline()[:1]).startswith("ray::")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
