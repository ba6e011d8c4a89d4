"""A small process that outlives the flow process by seconds and ends whatever that leaves behind.

The supervisor starts it before anything else and holds the other end of a pipe to its standard input. When the
pipe closes without a word, or the flow process is no longer its parent, the flow process is gone: the guard
ends the driver, then every process that carries the training's mark, and removes its private folder.
"""

from __future__ import annotations

import argparse
import os
import select
import shutil
import signal
import sys
import time

import psutil

from prefect_elastic_train.supervisor.processes import end_marked, end_process, marked_processes

#: Written by the supervisor when it has cleaned up itself.
DISMISSED = b"dismissed\n"
_POLL_SECONDS = 0.25
_DRIVER_GRACE_SECONDS = 8.0
_KILL_SECONDS = 10.0


def main(arguments: list[str] | None = None) -> int:
    """Wait for the end of the flow process, then clean up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mark", required=True)
    parser.add_argument("--parent", required=True, type=int)
    parser.add_argument("--folder", required=True)
    options = parser.parse_args(arguments)
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    if _flow_process_ended(options.parent):
        _clean_up(options.mark, options.folder)
    return 0


def _flow_process_ended(parent: int) -> bool:
    """Return True once the flow process is gone, False if the guard is dismissed."""
    received = b""
    while True:
        readable, _, _ = select.select([sys.stdin.fileno()], [], [], _POLL_SECONDS)
        if readable:
            data = os.read(sys.stdin.fileno(), 1024)
            received += data
            if DISMISSED in received:
                return False
            if not data:
                return True
        if os.getppid() != parent:
            return True


def _clean_up(mark: str, folder: str) -> None:
    drivers = [process for process in marked_processes(mark) if _is_driver(process)]
    deadline = time.monotonic() + _DRIVER_GRACE_SECONDS
    for driver in drivers:
        end_process(driver, max(0.1, deadline - time.monotonic()))
    end_marked(mark, _KILL_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)


def _is_driver(process: psutil.Process) -> bool:
    try:
        return "prefect_elastic_train.driver" in process.cmdline()
    except psutil.Error:
        return False


if __name__ == "__main__":
    sys.exit(main())
