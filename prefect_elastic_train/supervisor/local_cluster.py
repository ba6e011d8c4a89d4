"""A local Ray cluster that belongs to one training and outlives its drivers."""

from __future__ import annotations

import contextlib
import os
import random
import re
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.ray_output import DETAIL_TAG, without_marks
from prefect_elastic_train.core.settings import ClusterSettings

#: A driver whose head has died notices it after so many seconds instead of Ray's 60.
_RECONNECT = {"RAY_gcs_rpc_server_reconnect_timeout_s": "6"}
#: Free of those that Ray gives its workers, below, and that the kernel gives out by itself, above.
_PORTS, _PORT_PROBES = range(20_000, 32_768), 100


def write_token(token: str, folder: Path) -> dict[str, str]:
    """Put a cluster token into a private file.

    Returns:
        Environment variables that make Ray use it, none of which holds the token itself.
    """
    path = folder / "token"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(token)
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}


class LocalCluster:
    """A head node on this machine, with a token, ports and a session folder of its own.

    Args:
        settings: Sizes of the cluster.
        extra_cpus: CPUs to add to this machine's count, for Ray Data beside the workers.
        folder: Private folder of the training; its path is short, since sockets are made below it.
        environment: Environment of the training's processes, with their mark.

    Attributes:
        driver_environment: Environment variables that a driver needs to join.
        address_file: Where a driver that waits for it finds the address, ``host:port``.
    """

    def __init__(self, settings: ClusterSettings, extra_cpus: int, folder: Path, environment: dict[str, str]) -> None:
        self._settings = settings
        self._extra_cpus = extra_cpus
        self._folder = folder
        self.driver_environment = write_token(secrets.token_hex(32), folder) | _RECONNECT
        self._environment = {**environment, **self.driver_environment, "RAY_USAGE_STATS_ENABLED": "0"}
        self._environment.pop("RAY_AUTH_TOKEN", None)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_up = False
        self._log = folder / "r0.log"
        self._starting: threading.Thread | None = None
        self.address_file = folder / "address"

    def is_alive(self) -> bool:
        """Whether the cluster's head node runs."""
        return self._is_up and self._process is not None and self._process.poll() is None

    def is_dead(self) -> bool:
        """Whether the head node was up and is not any more."""
        return self._is_up and not self.is_alive()

    def lost_processes(self, on_line: Callable[[str, str], None]) -> str:
        """Return which of its processes the head node saw go, as a part of an error; all it said is a detail line."""
        words = self._last_words()
        for line in words.splitlines():
            on_line("cluster", f"{DETAIL_TAG}{line}")
        gone = ", ".join(re.findall(r"\w+ \[exit code=-?\d+\]", words))
        return f": {gone}" if gone else ""

    def start_aside(self, timeout_seconds: float) -> None:
        """Start the head node in a thread, unless it runs; its address, or what went wrong, goes to `address_file`."""
        if self.is_alive() or (self._starting is not None and self._starting.is_alive()):
            return

        def run() -> None:
            try:
                told = self._start(timeout_seconds)
            except Exception as error:  # noqa: BLE001 - told to the driver, which ends the attempt with it
                told = f"!{error}"
            temporary = self.address_file.with_suffix(".new")
            with contextlib.suppress(OSError):  # the training may be over and its folder gone
                temporary.write_text(told)
                temporary.replace(self.address_file)

        self._starting = threading.Thread(target=run, daemon=True)
        self._starting.start()

    def forget(self) -> None:
        """Give up a head node that has died or did not start; its processes are ended by their mark."""
        process, self._process = self._process, None
        self._is_up = False
        self.address_file.unlink(missing_ok=True)
        if process is not None and process.poll() is None:
            process.kill()
            process.wait(timeout=10)

    def _start(self, timeout_seconds: float) -> str:
        """Start the head node, and return its address.

        Raises:
            AttemptFailedError: It did not come up; outcome ``cluster_lost``.
        """
        session_folder, port = self._folder / "r0", _free_port()
        shutil.rmtree(session_folder, ignore_errors=True)
        with self._log.open("wb") as stream:
            self._process = process = subprocess.Popen(
                self._command(port, session_folder),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=self._folder,
                start_new_session=True,
            )
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                self._is_up = True
                return f"127.0.0.1:{port}"
            time.sleep(0.05)
        output = self._last_words()
        self.forget()
        raise AttemptFailedError(
            f"the local Ray cluster did not start within {timeout_seconds:g} s; its last words were:\n{output}",
            outcome=Outcome.CLUSTER_LOST,
        )

    def _command(self, port: int, session_folder: Path) -> list[str]:
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
            "--include-dashboard=false",
            "--node-ip-address=127.0.0.1",
            f"--port={port}",
            f"--ray-client-server-port={_free_port()}",
            "--dashboard-agent-listen-port=0",
            f"--temp-dir={session_folder}",
        ]
        # Without a number Ray counts by itself, and knows of the limits of a container.
        if self._settings.num_cpus or self._extra_cpus:
            own = self._settings.num_cpus or len(os.sched_getaffinity(0))
            command.append(f"--num-cpus={own + self._extra_cpus}")
        if self._settings.num_gpus >= 0:
            command.append(f"--num-gpus={self._settings.num_gpus}")
        return command

    def _last_words(self) -> str:
        try:
            return without_marks(self._log.read_text(errors="replace"))[-2000:].strip()
        except OSError:
            return ""


def _free_port() -> int:
    """Return a free port that nobody is given by the kernel before Ray's process listens there.

    That takes seconds, and one port of the head node in other hands ends all of it.
    """
    for port in random.sample(_PORTS, k=_PORT_PROBES):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError("no port is free on this machine")
