"""Starts drivers as child processes, and the next one ahead of time."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from prefect_elastic_train.core.time_limits import KILL_SECONDS
from prefect_elastic_train.supervisor.processes import start_process

#: Training time before the next driver is started. Its imports take processor time, and short trainings need none.
_PRESTART_SECONDS = 60.0


class DriverStarter:
    """Starts the drivers of a training as child processes, one after the other.

    Attributes:
        prestarted: The pre-started driver, which waits for the path of its spec file; None without one.
    """

    def __init__(self) -> None:
        self.prestarted: subprocess.Popen[bytes] | None = None
        self._due_at = float("inf")
        self._command: Sequence[str] = ()
        self._environment: dict[str, str] = {}

    def start(
        self, command: Sequence[str], environment: dict[str, str], spec_file: Path, prestart_command: Sequence[str]
    ) -> subprocess.Popen[bytes]:
        """Return a driver process for `spec_file`: the pre-started driver if its environment fits, or a new one.

        Args:
            command: Command of a new driver, without the path of the spec file.
            environment: Environment of the driver.
            spec_file: File with the spec.
            prestart_command: Command of the next pre-started driver; empty for none.
        """
        self._due_at = float("inf")
        if environment != self._environment or not self._is_prestarted():
            self.close()
        process = self.prestarted
        self.prestarted = None
        self._command = prestart_command
        self._environment = environment
        if process is None or process.stdin is None:
            return start_process([*command, str(spec_file)], environment, subprocess.DEVNULL, subprocess.PIPE)
        with suppress(OSError), process.stdin as stream:  # if it has just died, this driver is lost
            stream.write(f"{spec_file}\n".encode())
        return process

    def schedule(self) -> None:
        """Schedule the next pre-started driver for `_PRESTART_SECONDS` from now, unless one runs or none is wanted."""
        if self._command and not self._is_prestarted():
            self.close()
            self._due_at = time.monotonic() + _PRESTART_SECONDS

    def start_if_due(self) -> None:
        """Start the pre-started driver if one is scheduled and its time has come."""
        if time.monotonic() > self._due_at:
            self._due_at = float("inf")
            with suppress(OSError):  # the next driver is started when it is needed
                self.prestarted = start_process(self._command, self._environment, subprocess.PIPE, subprocess.PIPE)

    def close(self) -> None:
        """Kill the pre-started driver, if there is one."""
        if self.prestarted is not None:
            self.prestarted.kill()
            with suppress(subprocess.TimeoutExpired):
                self.prestarted.communicate(timeout=KILL_SECONDS)
            self.prestarted = None

    def _is_prestarted(self) -> bool:
        return self.prestarted is not None and self.prestarted.poll() is None
