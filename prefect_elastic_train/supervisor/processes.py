"""Finding and ending the processes of a run.

Ray's daemons leave their process group and their parent, so neither finds them all. Every process of a run
inherits a mark in its environment instead: the path of the training's private folder. Ray's workers and agents
write their title over their environment, and are known by their output, which goes into that folder, or by that title
and the folder that they work in.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable

import psutil

from prefect_elastic_train.core.spec import MARK_VARIABLE

__all__ = ["end_marked", "end_process", "marked_processes"]


def marked_processes(mark: str, besides: Iterable[int] = ()) -> list[psutil.Process]:
    """Give the living processes that carry a mark, and their descendants.

    Args:
        mark: The mark.
        besides: Process ids to leave out; this process is always left out.
    """
    left_out = {os.getpid(), *besides}
    entry = f"{MARK_VARIABLE}={mark}".encode()
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        if process.pid in left_out or process.pid in found:
            continue
        if not _carries(process, mark, entry):
            continue
        found[process.pid] = process
        try:
            children = process.children(recursive=True)
        except psutil.Error:
            continue
        found.update({child.pid: child for child in children if child.pid not in left_out})
    return [process for process in found.values() if _is_alive(process)]


def end_marked(mark: str, timeout_seconds: float, besides: Iterable[int] = ()) -> list[int]:
    """Kill all processes that carry a mark, also those that appear meanwhile.

    Args:
        mark: The mark.
        timeout_seconds: When to give up.
        besides: Process ids to leave alone.

    Returns:
        The ids of the processes that are still alive; empty unless one cannot be killed.
    """
    deadline = time.monotonic() + timeout_seconds
    quiet_looks = 0
    while True:
        left = marked_processes(mark, besides)
        for process in left:
            try:
                process.kill()
            except psutil.Error:
                continue
        # A process that was between fork and exec at one look shows its mark at the next.
        quiet_looks = 0 if left else quiet_looks + 1
        if quiet_looks >= 3:
            return []
        if time.monotonic() >= deadline:
            return [process.pid for process in left]
        psutil.wait_procs(left, timeout=0.2)
        time.sleep(0.1)


def end_process(process: psutil.Process, grace_seconds: float) -> None:
    """End a process: SIGINT, and SIGKILL when it has not gone after the grace."""
    try:
        process.send_signal(signal.SIGINT)
        process.wait(grace_seconds)
    except psutil.TimeoutExpired:
        try:
            process.kill()
        except psutil.Error:
            return
    except psutil.Error:
        return


def _carries(process: psutil.Process, mark: str, entry: bytes) -> bool:
    if _carries_in_environment(process, mark, entry):
        return True
    return mark.startswith("/") and (_writes_into(process, mark) or _works_for_ray_in(process, mark))


def _writes_into(process: psutil.Process, folder: str) -> bool:
    for descriptor in (1, 2):
        try:
            if os.readlink(f"/proc/{process.pid}/fd/{descriptor}").startswith(f"{folder}/"):
                return True
        except OSError:
            continue
    return False


def _works_for_ray_in(process: psutil.Process, folder: str) -> bool:
    """Tell Ray's agents, whose output goes through pipes, from the shell of somebody who looks around in there."""
    try:
        where = os.readlink(f"/proc/{process.pid}/cwd").removesuffix(" (deleted)")
        if where != folder and not where.startswith(f"{folder}/"):
            return False
        return "".join(process.cmdline()).startswith("ray::")
    except (OSError, psutil.Error):
        return False


def _carries_in_environment(process: psutil.Process, mark: str, entry: bytes) -> bool:
    try:
        with open(f"/proc/{process.pid}/environ", "rb") as file:
            return entry in file.read().split(b"\0")
    except FileNotFoundError:
        pass
    except OSError:
        return False
    try:
        return process.environ().get(MARK_VARIABLE) == mark
    except (psutil.Error, OSError):
        return False


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
