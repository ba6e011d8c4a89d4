"""Finding and ending the processes of a run; and the guard, which outlives the flow process by seconds and does that.

Ray's daemons leave their process group and their parent, so neither finds them all. Every process of a run
inherits a mark in its environment instead: the path of the training's private folder. Ray's workers and agents
write their title over their environment, and are known by that title and the folder that they work in.

``python -m prefect_elastic_train.supervisor.guard <private folder> <process id of the flow>``: the supervisor starts it
before anything else and holds the other end of a pipe to its standard input. When the pipe closes without a word, or
the flow process is no longer its parent, that is gone: the guard ends the driver, all that is marked, and the folder.

Until then it updates the timestamps of all files in the folder each hour, since cleaners of /tmp remove files that were
not used for some days, and removes the logs of Ray's workers that have exited.
"""

from __future__ import annotations

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

#: Written by the supervisor when it has cleaned up itself.
DISMISSED = b"dismissed\n"
_POLL_SECONDS = 0.25
_TEND_SECONDS = 3600.0
_DRIVER_GRACE_SECONDS = 8.0
_KILL_SECONDS = 10.0


def main(folder: str, parent: int) -> None:
    """Wait for the end of the flow process, then clean up."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    while os.getppid() == parent:
        if select.select([0], [], [], _POLL_SECONDS)[0]:
            if os.read(0, len(DISMISSED)) == DISMISSED:
                return
            break
        if time.monotonic() % _TEND_SECONDS < _POLL_SECONDS:
            with suppress(OSError):  # a file has vanished meanwhile: the rest is done the next time
                for log in Path(folder).glob("r0/session_*/logs/*worker-*"):  # whose names end in a process id
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
    psutil.wait_procs(drivers, timeout=_DRIVER_GRACE_SECONDS)
    end_marked(folder, _KILL_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)


def marked_processes(mark: str) -> list[psutil.Process]:
    """Return the living processes that carry a mark, and their descendants; this process is none of them."""
    found: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process not in found and process.pid != os.getpid() and _carries(process, mark):
                found |= {process, *process.children(recursive=True)}
    found.discard(psutil.Process())
    alive = []
    for process in found:
        with suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


def end_marked(mark: str, timeout_seconds: float) -> list[int]:
    """Kill all processes that carry a mark, also those that appear meanwhile; return the ids of those still alive."""
    deadline = time.monotonic() + timeout_seconds
    quiet_looks = 0
    while True:
        left = marked_processes(mark)
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        # A process that was between fork and exec at one look shows its mark at the next.
        quiet_looks = 0 if left else quiet_looks + 1
        if quiet_looks >= 3:
            return []
        if time.monotonic() >= deadline:
            return [process.pid for process in left]
        psutil.wait_procs(left, timeout=0.2)
        time.sleep(0.1)


def _carries(process: psutil.Process, mark: str) -> bool:
    if process.environ().get(MARK_VARIABLE) == mark:
        return True
    # One of Ray's, and no shell of somebody who looks there; the folder may be removed by now.
    where = process.cwd().removesuffix(" (deleted)")
    return f"{where}/".startswith(f"{mark}/") and "".join(process.cmdline()[:1]).startswith("ray::")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
