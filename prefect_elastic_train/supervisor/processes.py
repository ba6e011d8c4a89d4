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
from contextlib import suppress
from pathlib import Path

import psutil

from prefect_elastic_train.core.spec import MARK_VARIABLE


def marked_processes(mark: str) -> list[psutil.Process]:
    """Return the living processes that carry a mark, and their descendants; this process is none of them."""
    entry = f"{MARK_VARIABLE}={mark}".encode()
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        if process.pid in found or process.pid == os.getpid() or not _carries(process, mark, entry):
            continue
        with suppress(psutil.Error):
            found |= {one.pid: one for one in (process, *process.children(recursive=True))}
    found.pop(os.getpid(), None)
    return [process for process in found.values() if _is_alive(process)]


def end_marked(mark: str, timeout_seconds: float) -> list[int]:
    """Kill all processes that carry a mark, also those that appear meanwhile.

    Args:
        mark: The mark.
        timeout_seconds: When to give up.

    Returns:
        The ids of the processes that are still alive; empty unless one cannot be killed.
    """
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
    if entry in _read(process, "environ").split(b"\0"):
        return True
    return mark.startswith("/") and (_writes_into(process, mark) or _works_for_ray_in(process, mark))


def _writes_into(process: psutil.Process, folder: str) -> bool:
    return any(_link(process, f"fd/{descriptor}").startswith(f"{folder}/") for descriptor in (1, 2))


def _works_for_ray_in(process: psutil.Process, folder: str) -> bool:
    """Whether it is one of Ray's agents, whose output goes through pipes, and no shell of somebody who looks there."""
    where = _link(process, "cwd").removesuffix(" (deleted)")
    return f"{where}/".startswith(f"{folder}/") and _read(process, "cmdline").startswith(b"ray::")


def _read(process: psutil.Process, name: str) -> bytes:
    try:
        return Path(f"/proc/{process.pid}/{name}").read_bytes()
    except OSError:  # it is gone, or another user's
        return b""


def _link(process: psutil.Process, name: str) -> str:
    try:
        return os.readlink(f"/proc/{process.pid}/{name}")
    except OSError:
        return ""


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
