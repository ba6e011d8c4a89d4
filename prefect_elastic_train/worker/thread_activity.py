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

#: Durations of two parts of the observation. The second one is left out if a process is stopped. A thread that waits
#: for a DataLoader runs every 5 s.
_SECONDS = (1.0, 9.0)
_BUSY = 0.1  # share of a processor that a process uses if it computes
_DUMP_SECONDS = 2.0  # timeout of py-spy


class ThreadActivity(NamedTuple):
    """The activity of a loop's thread while it was observed.

    Attributes:
        is_stopped: True if the process is stopped, as by SIGSTOP.
        is_still: True if the kernel has not run the thread, and the process and its children have not used the CPU.
        stack: The stack, as of :func:`.loop_inspection.describe_stack`; empty if py-spy may not read it.
    """

    is_stopped: bool
    is_still: bool
    stack: str


def observe_threads(threads: Mapping[int, tuple[int, int]]) -> dict[int, ThreadActivity]:
    """Observe the loops' threads of ranks on this node for a time.

    Args:
        threads: By rank, the process and the thread, as the kernel numbers them.

    Returns:
        The activity by rank. A rank whose process has exited is missing.
    """
    before = {rank: _read_use(*thread) for rank, thread in threads.items()}
    began = time.monotonic()
    for seconds in _SECONDS:
        time.sleep(seconds)
        activities = {}
        for rank, thread in threads.items():
            runs_before, used_before, was_stopped = before[rank]
            runs, used, is_stopped = _read_use(*thread)
            if runs:
                is_still = runs == runs_before and used - used_before < _BUSY * (time.monotonic() - began)
                is_stopped &= was_stopped
                stack = "is stopped (SIGSTOP) and " * is_stopped + _read_stack(*thread)
                activities[rank] = ThreadActivity(is_stopped, is_still, stack)
        if any(activity.is_stopped for activity in activities.values()):
            break
    return activities


def _read_use(process_id: int, thread_id: int) -> tuple[str, float, bool]:
    """Return the kernel's record of a thread's runs, the CPU seconds of its process, and whether that is stopped.

    The seconds include those of child processes, also of those that have exited. The record is empty if there is no
    such thread.
    """
    try:
        process = psutil.Process(process_id)
        seconds = sum(sum(each.cpu_times()[:4]) for each in [process, *process.children(recursive=True)])
        runs = Path(f"/proc/{process_id}/task/{thread_id}/schedstat").read_text()
        return runs, seconds, process.status() == psutil.STATUS_STOPPED
    except (OSError, psutil.Error):
        return "", 0.0, False


def _read_stack(process_id: int, thread_id: int) -> str:
    command = [f"{sysconfig.get_path('scripts')}/py-spy", "dump", "--nonblocking", "--json", "--pid", str(process_id)]
    try:
        output = subprocess.run(command, capture_output=True, timeout=_DUMP_SECONDS, check=False).stdout
        [frames] = [thread["frames"] for thread in json.loads(output) if thread["os_thread_id"] == thread_id]
        lines = [(frame["filename"], frame["line"], frame["name"], None) for frame in reversed(frames)]
        return describe_stack(traceback.StackSummary.from_list(lines))
    except (OSError, LookupError, TypeError, ValueError, subprocess.TimeoutExpired):
        return ""
