"""Starts and kills child processes of the flow process."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from prefect_elastic_train.core.time_limits import KILL_SECONDS

ChildProcess = subprocess.Popen[bytes]


def import_path() -> list[str]:
    """Return the absolute paths of the folders from which this process imports modules."""
    return list(dict.fromkeys(os.path.abspath(folder) for folder in sys.path if not folder.endswith(".zip")))


def start_process(
    command: Sequence[str], environment: Mapping[str, str], stdin: int, output: int | IO[bytes], **options: Any
) -> ChildProcess:
    """Start a process in a new session. Its standard output and standard error are both `output` by default.

    Args:
        options: Further arguments of :class:`subprocess.Popen`.
    """
    options = {"stdin": stdin, "stdout": output, "stderr": output, **options}
    return subprocess.Popen(command, env=environment, start_new_session=True, **options)


def kill(process: ChildProcess) -> None:
    """Kill a process that has pipes, and wait for its exit, for a limited time."""
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=KILL_SECONDS)


def complete(action: Callable[[], object]) -> None:
    """Run an action to its end although a signal may interrupt it, and raise the signal's exception after that.

    An interrupted action is run again from its beginning, so it must be idempotent. KeyboardInterrupt and exceptions of
    class Exception are raised at once.
    """
    try:
        action()
    except BaseException as reason:
        if not isinstance(reason, Exception | KeyboardInterrupt):
            action()
        raise
