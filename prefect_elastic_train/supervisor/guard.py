"""A small process that outlives the flow process by seconds and ends whatever that leaves behind.

``python -m prefect_elastic_train.supervisor.guard <private folder> <process id of the flow>``: the supervisor starts it
before anything else and holds the other end of a pipe to its standard input. When the pipe closes without a word, or
the flow process is no longer its parent, the flow process is gone: the guard ends the driver, then every process that
carries the training's mark, which is the path of its private folder, and removes that folder.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
from contextlib import suppress

import psutil

from prefect_elastic_train.supervisor.processes import end_marked, marked_processes

#: Written by the supervisor when it has cleaned up itself.
DISMISSED = b"dismissed\n"
_POLL_SECONDS = 0.25
_DRIVER_GRACE_SECONDS = 8.0
_KILL_SECONDS = 10.0


def main(folder: str, parent: int) -> None:
    """Wait for the end of the flow process, then clean up."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    received = b""
    while os.getppid() == parent:
        if select.select([0], [], [], _POLL_SECONDS)[0]:
            data = os.read(0, 1024)
            received += data
            if DISMISSED in received:
                return
            if not data:
                break
    drivers = [process for process in marked_processes(folder) if _is_driver(process)]
    for driver in drivers:
        with suppress(psutil.Error):
            driver.send_signal(signal.SIGINT)
    psutil.wait_procs(drivers, timeout=_DRIVER_GRACE_SECONDS)
    end_marked(folder, _KILL_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)


def _is_driver(process: psutil.Process) -> bool:
    try:
        return "prefect_elastic_train.driver" in process.cmdline()
    except psutil.Error:
        return False


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
