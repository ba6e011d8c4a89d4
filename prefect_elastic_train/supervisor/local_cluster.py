"""The local Ray cluster of a training: a head node on the machine of the flow process, and its fork server."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

from prefect_elastic_train.core.ray_output import DETAIL_TAG, without_marks
from prefect_elastic_train.core.request import FORK_SERVER_VARIABLE, PRINT_PATCH, DriverSpec
from prefect_elastic_train.supervisor.devices import DeviceClaims
from prefect_elastic_train.supervisor.follower import Follower
from prefect_elastic_train.supervisor.processes import start_process
from prefect_elastic_train.supervisor.raylet_patches import free_port

#: Time after which a driver notices that its head has died; Ray's default is 60 s.
_RECONNECT = {"RAY_gcs_rpc_server_reconnect_timeout_s": "6"}
_MAX_LOG_CHARACTERS = 2000


def use_token(environment: dict[str, str], token: str, folder: Path) -> None:
    """Write a token into a private file, and set the variables in `environment` that make Ray use it.

    The environment holds the path of the file, not the token.
    """
    path = folder / "token"
    with open(path, "w", opener=partial(os.open, mode=0o600)) as file:
        file.write(token)
    environment.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(path))
    environment.pop("RAY_AUTH_TOKEN", None)  # Ray prefers it to the file


class LocalCluster:
    """The head node of a local cluster, with its own token, ports and session folder, and its fork server.

    Args:
        spec: The spec of the first attempt.
        folder: The training's private folder. Its path must be short, since Ray makes sockets in it.
        environment: The environment of the training's processes.
        claims: The training's claims on GPUs.

    Attributes:
        address: ``host:port`` of the head. Nothing listens there before the head is up.
        is_lost: True once a driver could not join although the head lives; the next driver could not join either.
    """

    def __init__(self, spec: DriverSpec, folder: Path, environment: dict[str, str], claims: DeviceClaims) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.is_lost = False
        self._folder = folder
        self._claims = claims
        # Without a number Ray counts the CPUs itself, and observes the limits of a container.
        self._num_cpus = spec.cluster.num_cpus
        if spec.request.cpus_beside:
            self._num_cpus = (self._num_cpus or len(os.sched_getaffinity(0))) + spec.request.cpus_beside
        self._num_gpus = len(claims.gpus) or spec.cluster.num_gpus
        self._head: subprocess.Popen[bytes] | None = None
        self._head_log = folder / "r0.log"
        self._token = secrets.token_hex(32)
        self._fork_server: subprocess.Popen[bytes] | None = None
        self._fork_log = folder / "fork.log"
        threads = max(1, int(spec.scaling.resources_per_worker.get("CPU", 1)))
        self._fork_arguments = [spec.request.framework, str(threads)]
        #: Variables of workers. Ray Train sets them by a runtime environment, which forked workers do not have.
        self._fork_variables: dict[str, str] = {}
        if spec.can_fork:
            self._fork_variables = {
                FORK_SERVER_VARIABLE: str(folder / "fork"),
                "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": str(spec.poll_interval_seconds),
                "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": environment.get("RAY_WARN_BLOCKING_GET_INSIDE_ASYNC", "0"),
            }
        # Workers get their variables from the head. With a runtime environment Ray would start a process for each of
        # the first workers and could not use those that it has started ahead. RAY_ADDRESS keeps Ray's tools in the
        # workers from looking for other clusters on the host.
        self._environment = {
            PRINT_PATCH: "0",
            **environment,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ADDRESS": self.address,
        }
        self.add_variables(self._environment)
        if claims.gpus:
            self._environment["CUDA_VISIBLE_DEVICES"] = ",".join(claims.gpus)

    def add_variables(self, environment: dict[str, str]) -> None:
        """Add to a process's environment the variables that the process needs to join this local cluster."""
        use_token(environment, self._token, self._folder)
        environment.update(_RECONNECT | self._fork_variables)
        # The node of a local cluster is never drained, so no worker group waits for a watcher.
        environment.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")

    def start(self) -> None:
        """Start the head node and the fork server, unless they were started.

        They are not stopped here: they have the process mark, so they are killed with the training.
        """
        if self._head is not None:
            return
        session_folder = self._folder / "r0"
        shutil.rmtree(session_folder, ignore_errors=True)
        command = self._command(self.address.rpartition(":")[2], session_folder)
        claims = [claim.fileno() for claim in self._claims.sockets]
        with self._head_log.open("wb") as log:
            self._head = start_process(
                command, self._environment, subprocess.DEVNULL, log, cwd=self._folder, pass_fds=claims
            )
        if self._fork_variables:
            with suppress(OSError):  # Ray starts the workers itself then
                self._start_fork_server()

    def check_fork_server(self, follower: Follower) -> None:
        """Log a note, once, if the fork server has exited. Ray then starts the workers itself."""
        exit_code = self._fork_server.poll() if self._fork_server is not None else None
        if exit_code is None:
            return
        self._fork_server = None
        output = self._fork_log.read_text(errors="replace").strip()
        reason = output.rpartition("\n")[2] or f"its process ended with {exit_code}"
        follower.on_note(f"Workers are not forked, and take longer to start: {reason}")

    def is_dead(self) -> bool:
        """Return True if the head node was started and has exited, or if a driver could not join it."""
        return self.is_lost or (self._head is not None and self._head.poll() is not None)

    def log_failure(self, follower: Follower) -> str:
        """Log the end of the head node's output. Return its parts that name an exited process, or else that output."""
        try:
            output = without_marks(self._head_log.read_text(errors="replace"))[-_MAX_LOG_CHARACTERS:].strip()
        except OSError:
            return ""
        for line in output.splitlines():
            follower.on_line("cluster", f"{DETAIL_TAG}{line}")
        return ", ".join(re.findall(r"\w+ \[exit code=-?\d+\]", output)) or output

    def _start_fork_server(self) -> None:
        Path(self._fork_variables[FORK_SERVER_VARIABLE]).unlink(missing_ok=True)
        command = [sys.executable, "-m", "prefect_elastic_train.supervisor.fork_server", *self._fork_arguments]
        with self._fork_log.open("wb") as log:
            self._fork_server = start_process(command, self._environment, subprocess.DEVNULL, log, cwd=self._folder)

    def _command(self, port: str, session_folder: Path) -> list[str]:
        command = [
            *(sys.executable, "-m", "prefect_elastic_train.supervisor.cluster_head", "start", "--head", "--block"),
            "--no-monitor",  # the autoscaler's, which a single node does not need
            "--node-ip-address=127.0.0.1",
            f"--port={port}",
            "--dashboard-agent-listen-port=0",
            f"--temp-dir={session_folder}",
        ]
        if self._num_cpus:
            command.append(f"--num-cpus={self._num_cpus}")
        if self._num_gpus >= 0:
            command.append(f"--num-gpus={self._num_gpus}")
        return command
