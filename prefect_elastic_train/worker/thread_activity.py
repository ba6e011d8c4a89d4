"""Observes the threads of loops from outside of their processes, which may be stopped and not answer.

Runs in a Ray task on the node of the workers.
"""

import json
import subprocess
import sysconfig
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from .loop_inspection import describe_stack

_SECONDS = 1.5  # for which threads are observed
_DUMP_SECONDS = 5.0  # timeout of py-spy


class ThreadActivity(NamedTuple):
    """The activity of a loop's thread while it was observed.

    Attributes:
        is_stopped: True if the process is stopped, as by SIGSTOP.
        has_run: True if the kernel has run the thread. False: it waited all the time.
        is_busy: True if any thread of the process has used the CPU.
        waits: True if the stack shows that the loop waits for other ranks or for Ray, or if it cannot be read.
        stack: The stack as text, as of :func:`.loop_inspection.thread_stacks`; empty if py-spy may not read it.
    """

    is_stopped: bool
    has_run: bool
    is_busy: bool
    waits: bool
    stack: str


def observe_threads(threads: Mapping[int, tuple[int, int]]) -> dict[int, ThreadActivity]:
    """Observe the loops' threads of ranks on this node for a time.

    Args:
        threads: By rank, the process and the thread, as the kernel numbers them.

    Returns:
        The activity by rank. A rank whose process has exited is missing.
    """
    stacks = {rank: _read_stack(*thread) for rank, thread in threads.items()}
    before = {rank: _read_use(*thread) for rank, thread in threads.items()}
    time.sleep(_SECONDS)
    activities = {}
    for rank, thread in threads.items():
        use_before = before[rank]
        use = _read_use(*thread)
        if use and use_before:
            is_busy = use.seconds - use_before.seconds > 0.2 * _SECONDS
            activities[rank] = ThreadActivity(use.is_stopped, use.runs != use_before.runs, is_busy, *stacks[rank])
    return activities


class _Use(NamedTuple):
    """Use of the CPU: the kernel's record of a thread's runs, the seconds of its process, whether that is stopped."""

    runs: str
    seconds: float
    is_stopped: bool


def _read_use(process_id: int, thread_id: int) -> _Use | None:
    try:
        process = psutil.Process(process_id)
        times = process.cpu_times()
        return _Use(
            Path(f"/proc/{process_id}/task/{thread_id}/schedstat").read_text(),
            times.user + times.system,
            process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP),
        )
    except (OSError, psutil.Error):
        return None


def _read_stack(process_id: int, thread_id: int) -> tuple[bool, str]:
    """Return whether a thread waits for other ranks or for Ray, and its stack as text."""
    py_spy = Path(sysconfig.get_path("scripts"), "py-spy")
    command = [str(py_spy), "dump", "--nonblocking", "--json", "--pid", str(process_id)]
    try:
        output = subprocess.run(command, capture_output=True, timeout=_DUMP_SECONDS, check=False).stdout
        [frames] = [thread["frames"] for thread in json.loads(output) if thread["os_thread_id"] == thread_id]
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return True, ""
    lines = [(frame["filename"], frame["line"], frame["name"], None) for frame in reversed(frames)]
    return describe_stack(traceback.StackSummary.from_list(lines))
