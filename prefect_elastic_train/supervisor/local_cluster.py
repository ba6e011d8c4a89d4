"""The local Ray cluster of a training: a head node on the machine of the flow process, and its fork server."""

import re
import secrets
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prefect_elastic_train.core.ray_output import DETAIL_TAG, without_marks
from prefect_elastic_train.core.request import FORK_SERVER_VARIABLE, PRINT_PATCH, DriverSpec

from .devices import DeviceClaims, usable_cpus
from .follower import Follower
from .processes import ChildProcess, start_process
from .raylet_patches import unused_ports

#: Time after which a driver notices that its head has died; Ray's default is 60 s.
_RECONNECT_SECONDS = "6"
_MAX_LOG_CHARACTERS = 2000


def use_token(environment: dict[str, str], token: str, folder: Path) -> None:
    """Write a token into a private file, and set the variables in `environment` that make Ray use it.

    The environment holds the path of the file, not the token.
    """
    path = folder / "token"
    path.touch(mode=0o600)
    path.write_text(token)
    environment.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(path))
    environment.pop("RAY_AUTH_TOKEN", None)  # Ray prefers it to the file


@dataclass
class LocalCluster:
    """The head node of a local cluster, with its own token, ports and session folder, and its fork server.

    Args:
        _spec: The spec of the first attempt.
        _folder: The training's private folder. Its path must be short, since Ray makes sockets in it.
        _environment: The environment of the training's processes.
        _claims: The training's claims on GPUs and CPUs.

    Attributes:
        address: ``host:port`` of the head. Nothing listens there before the head is up.
        is_lost: True once a driver could not join although the head lives; the next driver could not join either.
    """

    _spec: DriverSpec
    _folder: Path
    _environment: dict[str, str]
    _claims: DeviceClaims

    is_lost = False

    def __post_init__(self) -> None:
        self.address = f"127.0.0.1:{next(unused_ports())}"
        self._head: ChildProcess | None = None
        self._head_log = self._folder / "r0.log"
        self._token = secrets.token_hex(32)
        self._variables = {"RAY_gcs_rpc_server_reconnect_timeout_s": _RECONNECT_SECONDS}
        if self._spec.can_fork:
            # Ray Train sets the last two by a runtime environment, which forked workers do not have.
            self._variables |= {
                FORK_SERVER_VARIABLE: str(self._folder / "fork"),
                "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": str(self._spec.poll_interval_seconds),
                "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0",
            }
        # Workers get their variables from the head. With a runtime environment Ray would start a process for each of
        # the first workers and could not use those that it has started ahead. RAY_ADDRESS keeps Ray's tools in the
        # workers from looking for other clusters on the host.
        self._environment = {
            PRINT_PATCH: "0",
            **self._environment,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ADDRESS": self.address,
        }
        self.add_variables(self._environment)
        if self._claims.sockets:
            self._environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._claims.sockets)

    def add_variables(self, environment: dict[str, str]) -> None:
        """Add to a process's environment the variables that the process needs to join this local cluster."""
        use_token(environment, self._token, self._folder)
        environment.update(self._variables)
        # The node of a local cluster is never drained, so no worker group waits for a watcher.
        environment.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")

    def start(self) -> None:
        """Start the head node and the fork server, unless they were started.

        They are not stopped here: they have the process mark, so they are killed with the training.
        """
        if self._head:
            return
        shutil.rmtree(self._folder / "r0", ignore_errors=True)
        with self._head_log.open("wb") as log:
            start = partial(start_process, environment=self._environment, stdin=subprocess.DEVNULL, cwd=self._folder)
            claims = [claim.fileno() for claim in [*self._claims.sockets.values(), *self._claims.cpu_sockets]]
            self._head = start(self._command(), output=log, pass_fds=claims)
            if self._spec.can_fork:
                Path(self._variables[FORK_SERVER_VARIABLE]).unlink(missing_ok=True)
                threads = max(1, int(self._spec.scaling.resources_per_worker.get("CPU", 1)))
                program = "prefect_elastic_train.supervisor.fork_server"
                # Once it has exited, Ray starts the workers itself.
                self._fork_server = start(
                    [sys.executable, "-m", program, self._spec.request.framework, str(threads)], output=log
                )

    def is_dead(self) -> bool:
        """Return True if the head node was started and has exited, or if a driver could not join it."""
        return self.is_lost or (self._head is not None and self._head.poll() is not None)

    def log_failure(self, follower: Follower) -> str:
        """Log the end of the head node's output. Return its parts that name an exited process, or else that output."""
        output = without_marks(self._head_log.read_text(errors="replace"))[-_MAX_LOG_CHARACTERS:].strip()
        for line in output.splitlines():
            follower.on_line("cluster", f"{DETAIL_TAG}{line}")
        return ", ".join(re.findall(r"\w+ \[exit code=-?\d+\]", output)) or output

    def _command(self) -> list[str]:
        command = [
            sys.executable,
            "-m",
            "prefect_elastic_train.supervisor.cluster_head",
            "start",
            "--head",
            "--block",
            "--no-monitor",  # the autoscaler's, which a single node does not need
            "--node-ip-address=127.0.0.1",
            f"--port={self.address.rpartition(':')[2]}",
            f"--temp-dir={self._folder / 'r0'}",
        ]
        # Without a number Ray counts the CPUs itself.
        num_cpus = self._spec.cluster.num_cpus or self._claims.num_cpus
        if extra_cpus := self._spec.request.extra_cpus:
            num_cpus = (num_cpus or usable_cpus()) + extra_cpus
        if num_cpus:
            command.append(f"--num-cpus={num_cpus}")
        num_gpus = len(self._claims.sockets) or self._spec.cluster.num_gpus
        if num_gpus >= 0:
            command.append(f"--num-gpus={num_gpus}")
        return command
