"""The processes of a training on the flow's machine: guard, local Ray cluster and, one at a time, its drivers.

Drivers that run inside a cluster are left to :mod:`prefect_elastic_train.supervisor.job`.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING

from prefect_elastic_train.core.events import AttemptEnded, Event
from prefect_elastic_train.core.operator_settings import ElasticTrainSettings
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.ray_output import DETAIL_TAG, without_marks
from prefect_elastic_train.core.request import (
    DRIVER_MODULE,
    FORK_SERVER_VARIABLE,
    MARK_VARIABLE,
    PRINT_PATCH,
    DriverSpec,
)
from prefect_elastic_train.driver.spare import SPARE
from prefect_elastic_train.supervisor.attempt import TURN_SECONDS, ChildDriver, Driver, in_one_go, start_process
from prefect_elastic_train.supervisor.devices import DeviceClaims
from prefect_elastic_train.supervisor.guard import DISMISSED, end_marked
from prefect_elastic_train.supervisor.nodes import free_port

if TYPE_CHECKING:
    from prefect_elastic_train.supervisor.job import JobDriver

#: Sockets below the private folder must fit into 107 characters with Ray's session name.
_MAX_FOLDER_CHARACTERS = 24
_DRIVER: tuple[str, ...] = (sys.executable, "-m", DRIVER_MODULE)
_END_SECONDS = 10.0
_MOST_FORK_SERVERS = 10  # of a cluster, one after the other
#: Of training, before a spare driver takes processor time for its imports: a short training needs none.
_SPARE_AFTER_SECONDS = 60.0
#: A driver whose head has died notices it after so many seconds instead of Ray's 60.
_RECONNECT = {"RAY_gcs_rpc_server_reconnect_timeout_s": "6"}


def import_path() -> list[str]:
    """Return where this process finds modules, as absolute folders, so that others find the same."""
    return list(dict.fromkeys(os.path.abspath(folder) for folder in sys.path if not folder.endswith(".zip")))


@dataclass(eq=False)
class Runtime:
    """Runs the attempts of one training, follows their drivers, and owns what they need on this machine.

    It outlives a driver, so that a driver restart keeps the cluster. Use it from one thread at a time.

    Attributes:
        settings: The operator's settings.
        on_event: Called with each event of the driver.
        on_line: Called with each other line of output: where it came from, and the text.
        check_stop: Called several times a second; what it raises ends the driver and passes on.
        on_note: Called with a message about the processes on this machine, and its level unless that is INFO.
        on_past_event: Called with each event of a job from before it was followed.
        detaches: Whether a job shall go on without us after what `check_stop` raised, or was raised in this thread.
        followed_until: Up to when the flow run has told of a job that is found running, in seconds since the epoch.
    """

    settings: ElasticTrainSettings
    on_event: Callable[[Event], None]
    on_line: Callable[[str, str], None]
    check_stop: Callable[[], None] = lambda: None
    on_note: Callable[..., None] = lambda *note: None
    on_past_event: Callable[[Event], None] = lambda event: None
    detaches: Callable[[BaseException], bool] = lambda reason: False
    followed_until: Callable[[], float] = time.time

    #: What starts a driver as a child process, in all trainings; the path of its spec follows.
    driver_command = _DRIVER

    def __post_init__(self) -> None:
        self._job: JobDriver | None = None
        self._folder: Path | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._cluster: LocalCluster | None = None
        #: Kept when a cluster dies, so that the next one gets the same GPUs.
        self._claims = DeviceClaims()
        self._spare: subprocess.Popen[bytes] | None = None
        self._spare_is_due = float("inf")
        #: Command and environment of a spare driver; no command: no spare driver is started.
        self._spare_command: list[str] = []
        self._spare_environment: dict[str, str] = {}

    def run_attempt(self, spec: DriverSpec) -> AttemptEnded:
        """Run one driver to its end, and return how it ended by its last word or, without one, by how it died.

        Raises:
            AttemptFailedError: The cluster cannot be reached, or the GPUs of a local one are not free within
                ``capacity_timeout_seconds``.
        """
        folder, environment = self._prepare()
        if spec.cluster.address != "auto":
            environment.pop("RAY_ADDRESS", None)
        if spec.cluster.is_submitted:
            from prefect_elastic_train.supervisor.job import JobDriver  # it loads Ray's client

            self._job = JobDriver(self, spec, folder, self._job)
            return self.follow(self._job)
        cluster = None
        token = spec.cluster.auth_token.get_secret_value()
        if spec.cluster.is_local:
            if self._cluster is not None and self._cluster.is_dead():
                end_marked(str(folder), _END_SECONDS)
                self._cluster = None
            if self._cluster is None:
                self._wait_for_devices(spec)
                self._cluster = LocalCluster(spec, folder, environment, self._claims)
            cluster = self._cluster
            cluster.admit(environment)
            settings = spec.cluster.model_copy(
                update={"connect_timeout_seconds": self.settings.local_cluster_timeout_seconds}
            )
            spec = replace(spec, cluster=settings, local_address=cluster.address)
        elif token:
            use_token(environment, token, folder)
        spare = self._take_spare(environment)
        has_spares = spec.scaling.standby != "off" and self.driver_command == _DRIVER
        self._spare_command = [*_DRIVER, SPARE, spec.request.framework] if has_spares else []
        self._spare_environment = environment
        ended = self.follow(ChildDriver(self, environment, spec, folder, cluster, spare))
        if cluster is not None:
            cluster.is_lost = ended.outcome is Outcome.CLUSTER_LOST and not ended.attempt
        return ended

    def wait(self, seconds: float) -> None:
        """Wait, and look after everything meanwhile."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.turn()
            time.sleep(TURN_SECONDS)

    def _wait_for_devices(self, spec: DriverSpec) -> None:
        """Claim the GPUs of a local cluster, once they are free."""
        limit = spec.scaling.capacity_timeout_seconds
        began = time.monotonic()
        before = ""
        while reason := self._claims.take(spec, self.on_note):
            if reason != before:
                self.on_note(reason)
            if limit and time.monotonic() - began > limit:
                raise AttemptFailedError(
                    f"capacity_timeout_seconds ({limit:g} s) have passed: {reason}", outcome=Outcome.TIMED_OUT
                )
            before = reason
            self.wait(TURN_SECONDS)

    def follow(self, driver: Driver) -> AttemptEnded:
        """Follow a driver to its end, or until it is given up, and return how the attempt ended."""
        try:
            driver.start()
            while (ended := driver.look()) is None:
                self.turn()
                looked_at = time.monotonic()
                for source, line in driver.lines():
                    driver.take(source, line)
                    if time.monotonic() - looked_at > TURN_SECONDS:
                        looked_at = time.monotonic()
                        self.turn()
            return ended
        except BaseException as reason:
            in_one_go(partial(driver.leave, reason))
            raise
        finally:
            driver.close()

    def turn(self) -> None:
        """Look several times a second, whatever is waited for, that the flow run goes on and the guard is there."""
        self.check_stop()
        self.keep_guarded()
        if self._cluster is not None:
            with suppress(OSError):  # workers boot by themselves
                self._cluster.keep_forking(self.on_note)
        if time.monotonic() > self._spare_is_due:
            self._spare_is_due = float("inf")
            with suppress(OSError):  # the next driver boots when it is needed
                self._spare = start_process(
                    self._spare_command, self._spare_environment, subprocess.PIPE, subprocess.PIPE
                )

    def start_beside(self, command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start another process of the training, spoken to by pipes, with more in its environment; it ends with it."""
        folder, environment = self._prepare()
        environment |= {"RAY_TMPDIR": str(folder), **variables}
        with (folder / "beside.log").open("wb") as log:
            return start_process(command, environment, subprocess.PIPE, subprocess.PIPE, stderr=log)

    def want_spare(self) -> None:
        """Have a spare driver soon, now that a worker group trains, unless there is one."""
        if self._spare_command and (self._spare is None or self._spare.poll() is not None):
            self._end_spare()
            self._spare_is_due = time.monotonic() + _SPARE_AFTER_SECONDS

    def keep_guarded(self) -> None:
        """Start the guard, or another one if it was killed."""
        if self._folder is not None and (self._guard is None or self._guard.poll() is not None):
            command = [
                sys.executable,
                "-m",
                "prefect_elastic_train.supervisor.guard",
                str(self._folder),
                str(os.getpid()),
            ]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(import_path())}
            self._guard = start_process(command, environment, subprocess.PIPE, subprocess.DEVNULL)

    def end_jobs(self) -> None:
        """Stop a job that an attempt has lost sight of."""
        if self._job is not None:
            self._job.end()

    def close(self) -> None:
        """End everything that belongs to the training; nothing of it is left after this, bar what cannot be killed."""
        if self._folder is None:
            return
        if left := end_marked(str(self._folder), _END_SECONDS):
            self.on_note(f"Processes that could not be ended, and may still use GPUs or memory: {left}", WARNING)
        self._claims.release()
        self._end_spare()
        if self._guard is not None:
            for word in (DISMISSED, None):
                with suppress(subprocess.TimeoutExpired):
                    self._guard.communicate(word, timeout=5)
                self._guard.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = self._guard = self._cluster = self._job = None

    def _take_spare(self, environment: dict[str, str]) -> subprocess.Popen[bytes] | None:
        """Return the spare driver, if it lives and was started in the same environment."""
        self._spare_is_due = float("inf")
        if self._spare is not None and (self._spare.poll() is not None or environment != self._spare_environment):
            self._end_spare()
        spare = self._spare
        self._spare = None
        return spare

    def _end_spare(self) -> None:
        if self._spare is not None:
            self._spare.kill()
            with suppress(subprocess.TimeoutExpired):
                self._spare.communicate(timeout=_END_SECONDS)
            self._spare = None

    def _prepare(self) -> tuple[Path, dict[str, str]]:
        """Return the private folder, guarded from now on, and the environment of processes that end with it."""
        if self._folder is None:
            base = os.path.realpath(tempfile.gettempdir())  # as in the working directories of Ray's processes
            if len(base) > _MAX_FOLDER_CHARACTERS:
                base = os.path.realpath("/tmp")
            self._folder = Path(tempfile.mkdtemp(prefix="elt-", dir=base))
        self.keep_guarded()
        environment = {
            "RAY_DEDUP_LOGS": "0",  # a person's prints are not to be guessed at; the run's log has a limit of its own
            "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
            **os.environ,
            MARK_VARIABLE: str(self._folder),
            "PYTHONPATH": os.pathsep.join(import_path()),
            "PYTHONUNBUFFERED": "1",
        }
        environment.pop(FORK_SERVER_VARIABLE, None)  # another training's, in whose worker this one is
        return self._folder, environment


def use_token(environment: dict[str, str], token: str, folder: Path) -> None:
    """Have Ray use a token in a process with this environment, which holds only the path of a private file with it."""
    path = folder / "token"
    with open(path, "w", opener=partial(os.open, mode=0o600)) as file:
        file.write(token)
    environment.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(path))
    environment.pop("RAY_AUTH_TOKEN", None)  # Ray looks there first, and would not see the file


class LocalCluster:
    """A head node on this machine, with a token, ports and a session folder of its own.

    The spec is that of the first attempt, and the environment that of the training's processes, with their mark. The
    path of the training's private folder is short, since sockets are made below it.
    """

    def __init__(self, spec: DriverSpec, folder: Path, environment: dict[str, str], claims: DeviceClaims) -> None:
        self.folder = folder
        self._claims = claims
        # Without a number Ray counts the CPUs itself, container limits included.
        self._num_cpus = spec.cluster.num_cpus
        if spec.request.cpus_beside:
            self._num_cpus = (self._num_cpus or len(os.sched_getaffinity(0))) + spec.request.cpus_beside
        self._num_gpus = len(claims.gpus) or spec.cluster.num_gpus
        self._forking: subprocess.Popen[bytes] | None = None
        self._fork_servers_left = _MOST_FORK_SERVERS
        #: Of processes that are forked, which have no runtime environment: what Ray Train says by one.
        forked = {
            FORK_SERVER_VARIABLE: str(self.folder / "fork"),
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": str(spec.poll_interval_seconds),
            "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": environment.get("RAY_WARN_BLOCKING_GET_INSIDE_ASYNC", "0"),
        }
        self._forked = forked if spec.is_forked else {}
        threads = max(1, int(spec.scaling.resources_per_worker.get("CPU", 1)))
        self._fork_arguments = [spec.request.framework, str(threads)]
        self._log = self.folder / "r0.log"
        #: Whether a driver could not join it, though its head lives: another one could not, either.
        self.is_lost = False
        self._process: subprocess.Popen[bytes] | None = None
        #: Nothing listens there before it is up.
        self.address = f"127.0.0.1:{free_port()}"
        self._token = secrets.token_hex(32)
        # What workers read is here, for a runtime environment would cost each of the first ones a process before its
        # own, and those that Ray boots ahead would not fit. Ray's tools would look for any cluster on the host.
        self._environment = {
            PRINT_PATCH: "0",
            **environment,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ADDRESS": self.address,
        }
        self.admit(self._environment)
        if claims.gpus:
            self._environment["CUDA_VISIBLE_DEVICES"] = ",".join(claims.gpus)

    def admit(self, environment: dict[str, str]) -> None:
        """Add to the environment of a process what it needs to join."""
        use_token(environment, self._token, self.folder)
        environment.update(_RECONNECT | self._forked)
        # Nobody drains a node of a cluster that lives on this machine, so no worker group waits for a watcher.
        environment.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")

    def start(self) -> None:
        """Start the head node, unless that was done; one that is to be given up is ended by its mark."""
        if self._process is not None:
            return
        session_folder = self.folder / "r0"
        shutil.rmtree(session_folder, ignore_errors=True)
        command = self._command(self.address.rpartition(":")[2], session_folder)
        claims = [one.fileno() for one in self._claims.sockets]
        with self._log.open("wb") as stream:
            self._process = start_process(
                command, self._environment, subprocess.DEVNULL, stream, cwd=self.folder, pass_fds=claims
            )

    def keep_forking(self, tell: Callable[[str], None]) -> None:
        """Start the fork server of a head that was started, or another one if it was killed.

        One that ends by itself is the last, since the next would, too; so is the tenth that is killed, as by a lack of
        memory.
        """
        ended = self._forking.poll() if self._forking is not None else -1
        if not self._forked or self._process is None or not self._fork_servers_left or ended is None:
            return
        log = self.folder / "fork.log"
        self._fork_servers_left -= 1
        if ended >= 0 or not self._fork_servers_left:
            self._fork_servers_left = 0
            words = log.read_text(errors="replace").strip().rpartition("\n")[2]
            tell(f"Workers are not forked, and take longer to start: {words or f'its process ended with {ended}'}")
            return
        Path(self._forked[FORK_SERVER_VARIABLE]).unlink(missing_ok=True)
        command = [sys.executable, "-m", "prefect_elastic_train.supervisor.fork_server", *self._fork_arguments]
        with log.open("wb") as stream:
            self._forking = start_process(command, self._environment, subprocess.DEVNULL, stream, cwd=self.folder)

    def is_dead(self) -> bool:
        """Whether the head node was started and is not there any more, or of no use."""
        return self.is_lost or (self._process is not None and self._process.poll() is not None)

    def last_words(self, on_line: Callable[[str, str], None]) -> str:
        """Return which of its processes the head node saw go, else what it said last; each line is a detail, too."""
        with suppress(OSError):
            words = without_marks(self._log.read_text(errors="replace"))[-2000:].strip()
            for line in words.splitlines():
                on_line("cluster", f"{DETAIL_TAG}{line}")
            return ", ".join(re.findall(r"\w+ \[exit code=-?\d+\]", words)) or words
        return ""

    def _command(self, port: str, session_folder: Path) -> list[str]:
        command = [
            *(sys.executable, "-m", "prefect_elastic_train.supervisor.head", "start", "--head", "--block"),
            "--no-monitor",  # which would ask for nodes, where none can come
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
