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
from collections.abc import Callable
from pathlib import Path

from prefect_elastic_train.core.ray_output import DETAIL_TAG, without_marks
from prefect_elastic_train.core.settings import ClusterSettings

#: A driver whose head has died notices it after so many seconds instead of Ray's 60.
_RECONNECT = {"RAY_gcs_rpc_server_reconnect_timeout_s": "6"}
#: Free of those that Ray gives its workers, below, and that the kernel gives out by itself, above.
_PORTS, _PORT_PROBES = range(20_000, 32_768), 100


def use_token(environment: dict[str, str], token: str, folder: Path) -> None:
    """Have Ray use a token in a process with this environment, which holds only the path of a private file with it."""
    path = folder / "token"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(token)
    environment.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(path))
    environment.pop("RAY_AUTH_TOKEN", None)  # Ray looks there first, and would not see the file


class LocalCluster:
    """A head node on this machine, with a token, ports and a session folder of its own.

    Args:
        settings: Sizes of the cluster.
        extra_cpus: CPUs to add to this machine's count, for Ray Data beside the workers.
        folder: Private folder of the training; its path is short, since sockets are made below it.
        environment: Environment of the training's processes, with their mark.

    Attributes:
        address: ``host:port``; nothing listens there before it is up.
    """

    def __init__(self, settings: ClusterSettings, extra_cpus: int, folder: Path, environment: dict[str, str]) -> None:
        self._settings = settings
        self._extra_cpus = extra_cpus
        self._folder = folder
        self._log = folder / "r0.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._port = _free_port()
        self.address = f"127.0.0.1:{self._port}"
        self._token = secrets.token_hex(32)
        self._environment = {**environment, "RAY_USAGE_STATS_ENABLED": "0"}
        self.admit(self._environment)

    def admit(self, environment: dict[str, str]) -> None:
        """Add to the environment of a process what it needs to join."""
        use_token(environment, self._token, self._folder)
        environment.update(_RECONNECT)

    def start(self) -> None:
        """Start the head node, unless that was done; one that is to be given up is ended by its mark."""
        if self._process is not None:
            return
        session_folder = self._folder / "r0"
        shutil.rmtree(session_folder, ignore_errors=True)
        with self._log.open("wb") as stream:
            self._process = subprocess.Popen(
                self._command(self._port, session_folder),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=self._folder,
                start_new_session=True,
            )

    def is_dead(self) -> bool:
        """Whether the head node was started and is not there any more."""
        return self._process is not None and self._process.poll() is not None

    def last_words(self, on_line: Callable[[str, str], None]) -> str:
        """Return which of its processes the head node saw go, else what it said last; each line is a detail, too."""
        with contextlib.suppress(OSError):
            words = without_marks(self._log.read_text(errors="replace"))[-2000:].strip()
            for line in words.splitlines():
                on_line("cluster", f"{DETAIL_TAG}{line}")
            return ", ".join(re.findall(r"\w+ \[exit code=-?\d+\]", words)) or words
        return ""

    def _command(self, port: int, session_folder: Path) -> list[str]:
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
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


def _free_port() -> int:
    """Return a free port that nobody is given by the kernel before Ray's process listens there.

    That takes seconds, and one port of the head node in other hands ends all of it.
    """
    for port in random.sample(_PORTS, k=_PORT_PROBES):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError("no port is free on this machine")
