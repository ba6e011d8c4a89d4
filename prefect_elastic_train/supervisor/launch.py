"""Starting, following and ending drivers as child processes, with the local cluster and the guard around them.

Drivers that run inside a cluster are left to :mod:`prefect_elastic_train.supervisor.jobs`.
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from prefect_elastic_train.core.events import AttemptEnded, ClusterWanted, Event
from prefect_elastic_train.core.operator_settings import ElasticTrainSettings
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.core.ray_output import DETAIL_TAG
from prefect_elastic_train.core.settings import ClusterSettings
from prefect_elastic_train.core.spec import MARK_VARIABLE, STOP_FILE, DriverSpec, write_spec
from prefect_elastic_train.supervisor.cluster import LocalCluster, write_token
from prefect_elastic_train.supervisor.following import AttemptAccount
from prefect_elastic_train.supervisor.guard import DISMISSED
from prefect_elastic_train.supervisor.jobs.launcher import JobLauncher
from prefect_elastic_train.supervisor.lines import read_lines
from prefect_elastic_train.supervisor.processes import end_marked

__all__ = ["Runtime", "import_path", "let_join"]

_TURN_SECONDS = 0.2
#: How long a driver may take from its last word to its end.
_LEAVE_SECONDS = 15.0
#: How long the rest of a dead driver's output is waited for.
_PIPE_SECONDS = 2.0
#: How long a driver may take to notice that its local cluster has died.
_CLUSTER_DEATH_SECONDS = 20.0
#: Sockets below the private folder must fit into 107 characters with Ray's session name.
_MAX_FOLDER_CHARACTERS = 24
_OUTPUT_QUEUE = 10_000


def import_path() -> list[str]:
    """Give where this process finds modules, as absolute folders, so that others find the same."""
    return list(dict.fromkeys(os.path.abspath(folder) for folder in sys.path if not folder.endswith(".zip")))


class Runtime:
    """The processes of one training on this machine: guard, local cluster and, one at a time, its drivers.

    It outlives a driver, so that a driver restart keeps the cluster. Use it from one thread at a time.

    Args:
        settings: The operator's settings.
        on_event: Called with each event of the driver.
        on_line: Called with each other line of output: where it came from, and the text.
        check_stop: Called several times a second; what it raises ends the driver and passes on.
        on_note: Called with what this machine has to say of a job.
    """

    #: What starts a driver as a child process; the path of its spec follows.
    driver_command: tuple[str, ...] = (sys.executable, "-m", "prefect_elastic_train.driver")

    def __init__(
        self,
        settings: ElasticTrainSettings,
        on_event: Callable[[Event], None],
        on_line: Callable[[str, str], None],
        check_stop: Callable[[], None] = lambda: None,
        on_note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.settings = settings
        self.on_event = on_event
        self.on_line = on_line
        self.check_stop = check_stop
        self.on_note = on_note
        #: Called with each event of a job from before it was followed.
        self.on_past_event: Callable[[Event], None] = lambda event: None
        #: Tells of what `check_stop` raised, or what was raised in this thread, whether a job shall go on without us.
        self.detaches: Callable[[BaseException], bool] = lambda reason: False
        #: Gives up to when the flow run has told of a job that is found running, in seconds since the epoch.
        self.followed_until: Callable[[], float] = time.time
        self._jobs = JobLauncher(self)
        self._mark = ""
        self._folder: Path | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._cluster: LocalCluster | None = None
        self._starting: threading.Thread | None = None
        self._driver: subprocess.Popen[bytes] | None = None

    @property
    def follows_job(self) -> bool:
        """Whether the attempt is a job, which others may follow, too."""
        return self._jobs.in_use

    def run_attempt(self, spec: DriverSpec) -> AttemptEnded:
        """Run one driver to its end.

        Args:
            spec: What the driver is told.

        Returns:
            How the attempt ended, also if the driver went without a word.
        """
        folder, environment = self.prepare()
        self._jobs.in_use = spec.cluster.is_submitted
        if spec.cluster.is_submitted:
            return self._jobs.run_attempt(spec, folder, environment)
        if spec.cluster.is_local:
            if self._cluster is None:
                extra_cpus = 1 if spec.request.has_datasets else 0
                self._cluster = LocalCluster(spec.cluster, extra_cpus, folder, environment)
            spec = _with_address_file(spec, folder)
            if not self._cluster.is_alive():
                self._forget_cluster(spec)
        let_join(environment, spec.cluster, folder, self._cluster if spec.cluster.is_local else None)
        spec_file = folder / "spec"
        (folder / STOP_FILE).unlink(missing_ok=True)
        ended, code = self._run_driver(spec, spec_file, environment)
        if code == 0 and not ended.sequence:
            # Its result is in the run directory, where the next driver finds it.
            self.on_note("The driver has ended well, but its last word was lost: another one looks for the result")
            ended, _ = self._run_driver(spec, spec_file, environment)
        return ended

    def _run_driver(
        self, spec: DriverSpec, spec_file: Path, environment: dict[str, str]
    ) -> tuple[AttemptEnded, int | None]:
        """How one driver ended, and its exit code; None for one that has to be ended."""
        write_spec(spec, spec_file)
        self._driver = subprocess.Popen(
            [*self.driver_command, str(spec_file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        try:
            return _Following(self, self._driver, spec).until_end(), self._driver.returncode
        except BaseException as reason:
            # The flow run was told to stop: the driver shall know that its end is meant.
            outcome = Outcome.TIMED_OUT if isinstance(reason, TimeoutError) else Outcome.CANCELLED
            spec_file.with_name(STOP_FILE).write_text(outcome.value)
            raise
        finally:
            self._end_driver()
            spec_file.unlink(missing_ok=True)

    def prepare(self) -> tuple[Path, dict[str, str]]:
        """Give the private folder, guarded from now on, and the environment of processes that end with it."""
        return self._prepare(), self._environment()

    def end_jobs(self) -> None:
        """Stop a job that an attempt has lost sight of."""
        if self._folder is not None:
            self._jobs.end_unfollowed(self._folder, self._environment())

    def close(self) -> None:
        """End everything that belongs to the training; nothing of it is left after this, bar what cannot be killed."""
        self._end_driver()
        if self._folder is None:
            return
        guard = self._guard
        if self._cluster is not None:
            self._cluster.start_no_more()
        end_marked(self._mark, timeout_seconds=10.0)
        if self._starting is not None:
            self._starting.join(timeout=5)
            end_marked(self._mark, timeout_seconds=5.0)
        if self._cluster is not None:
            self._cluster.forget()
            self._cluster = None
        if guard is not None and guard.stdin is not None:
            try:
                guard.stdin.write(DISMISSED)
                guard.stdin.close()
                guard.wait(timeout=5)
            except (OSError, subprocess.TimeoutExpired):
                guard.kill()
                guard.wait(timeout=5)
        self._guard = None
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None

    def want_cluster(self, spec: DriverSpec) -> None:
        """Start the local cluster in the background, unless it runs or is joined."""
        if self._cluster is None or self._cluster.is_alive() or not spec.address_file:
            return
        if self._starting is not None and self._starting.is_alive():
            return
        self._starting = threading.Thread(
            target=self._start_cluster, args=(self._cluster, Path(spec.address_file)), daemon=True
        )
        self._starting.start()

    def cluster_is_dead(self) -> bool:
        """Tell whether the local cluster was up and is not any more."""
        return self._cluster is not None and bool(self._cluster.address) and not self._cluster.is_alive()

    def last_words_of_cluster(self) -> str:
        """Return which of its processes the local cluster saw go, as a part of an error; all it said is a detail."""
        words = self._cluster.last_words() if self._cluster is not None else ""
        for line in words.splitlines():
            self.on_line("cluster", f"{DETAIL_TAG}{line}")
        gone = ", ".join(re.findall(r"\w+ \[exit code=-?\d+\]", words))
        return f": {gone}" if gone else ""

    def _start_cluster(self, cluster: LocalCluster, address_file: Path) -> None:
        try:
            address = cluster.start(self.settings.local_cluster_timeout_seconds)
        except Exception as error:  # noqa: BLE001 - told to the driver, which ends the attempt with it
            address = f"!{error}"
        temporary = address_file.with_suffix(".new")
        try:
            temporary.write_text(address)
            temporary.replace(address_file)
        except OSError:  # the training is over and its folder gone
            return

    def _forget_cluster(self, spec: DriverSpec) -> None:
        """Clear away a dead local cluster, so that the next one is not mistaken for it."""
        Path(spec.address_file).unlink(missing_ok=True)
        end_marked(self._mark, timeout_seconds=10.0)
        if self._cluster is not None:
            self._cluster.forget()

    def _prepare(self) -> Path:
        if self._folder is None:
            base = tempfile.gettempdir()
            if len(base) > _MAX_FOLDER_CHARACTERS:
                base = "/tmp"
            self._folder = Path(tempfile.mkdtemp(prefix="elt-", dir=os.path.realpath(base)))
            self._mark = str(self._folder)
        self.keep_guarded()
        return self._folder

    def keep_guarded(self) -> None:
        """Start the guard, or another one if it was killed."""
        if self._folder is not None and (self._guard is None or self._guard.poll() is not None):
            self._guard = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "prefect_elastic_train.supervisor.guard",
                    f"--mark={self._mark}",
                    f"--parent={os.getpid()}",
                    f"--folder={self._folder}",
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(import_path())},
                start_new_session=True,
            )

    def _environment(self) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        environment[MARK_VARIABLE] = self._mark
        environment["PYTHONPATH"] = os.pathsep.join(import_path())
        environment["PYTHONUNBUFFERED"] = "1"
        # A person's prints are not to be guessed at; the run's log has a limit of its own.
        environment.setdefault("RAY_DEDUP_LOGS", "0")
        return environment

    def _end_driver(self) -> None:
        driver, self._driver = self._driver, None
        if driver is None or driver.poll() is not None:
            return
        driver.send_signal(signal.SIGINT)
        try:
            driver.wait(timeout=self.settings.stop_grace_seconds)
        except subprocess.TimeoutExpired:
            driver.kill()
            driver.wait(timeout=10)


class _Following:
    """Follows one driver's output until it has ended."""

    def __init__(self, runtime: Runtime, driver: subprocess.Popen[bytes], spec: DriverSpec) -> None:
        self._runtime = runtime
        self._driver = driver
        self._spec = spec
        self._output: queue.Queue[tuple[str, bytes | None]] = queue.Queue(maxsize=_OUTPUT_QUEUE)
        self._open_streams = 0
        for stream, source in ((driver.stdout, "driver"), (driver.stderr, "stderr")):
            assert stream is not None
            read_lines(stream, source, self._output)
            self._open_streams += 1
        self._account = AttemptAccount()
        self._gone_at = float("inf")
        self._cluster_dead_at: float | None = None

    def until_end(self) -> AttemptEnded:
        """Follow; end a driver that hangs or whose cluster is gone."""
        looked_at = time.monotonic()
        while self._open_streams and not self._left_its_pipe_open():
            if time.monotonic() - looked_at >= _TURN_SECONDS:
                looked_at = time.monotonic()
                self._runtime.check_stop()
                self._runtime.keep_guarded()
                given_up = self._look_after()
                if given_up is not None:
                    return given_up
            try:
                source, line = self._output.get(timeout=_TURN_SECONDS)
            except queue.Empty:
                continue
            if line is None:
                self._open_streams -= 1
            else:
                self._take(source, line)
        try:
            code = self._driver.wait(timeout=_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self._driver.kill()
            code = self._driver.wait(timeout=10)
        return self._account.ended or self._lost_without_a_word(code)

    def _left_its_pipe_open(self) -> bool:
        """Tell whether the driver is gone and only a process that it left behind still holds its output."""
        if self._driver.poll() is None or not self._output.empty():
            self._gone_at = float("inf")
            return False
        self._gone_at = min(self._gone_at, time.monotonic())
        return time.monotonic() - self._gone_at > _PIPE_SECONDS

    def _take(self, source: str, line: bytes) -> None:
        said = self._account.take(line)
        if isinstance(said, str):
            self._runtime.on_line(source, said)
            return
        if isinstance(said, ClusterWanted):
            self._runtime.want_cluster(self._spec)
        self._runtime.on_event(said)

    def _look_after(self) -> AttemptEnded | None:
        """Find what ends an attempt from outside; give its end if the driver was given up."""
        account = self._account
        if account.ended is not None:
            return account.ended if time.monotonic() - account.ended_at > _LEAVE_SECONDS else None
        if self._runtime.cluster_is_dead():
            self._cluster_dead_at = self._cluster_dead_at or time.monotonic()
            if time.monotonic() - self._cluster_dead_at > _CLUSTER_DEATH_SECONDS:
                return account.given_up(
                    Outcome.CLUSTER_LOST, "the local Ray cluster has died" + self._runtime.last_words_of_cluster()
                )
        return account.hung(self._runtime.settings.liveness_timeout_seconds)

    def _lost_without_a_word(self, code: int) -> AttemptEnded:
        how = f"signal {_signal_name(-code)}" if code < 0 else f"exit code {code}"
        if self._runtime.cluster_is_dead():
            return self._account.given_up(
                Outcome.CLUSTER_LOST,
                f"the local Ray cluster has died, and the driver with it ({how})"
                + self._runtime.last_words_of_cluster(),
            )
        said = self._account.last_error() if code != -signal.SIGKILL else ""
        return self._account.given_up(
            Outcome.DRIVER_LOST, f"the driver process (pid {self._driver.pid}) was ended by {how}{said}"
        )


def _with_address_file(spec: DriverSpec, folder: Path) -> DriverSpec:
    return replace(spec, address_file=str(folder / "address"))


def let_join(
    environment: dict[str, str], cluster: ClusterSettings, folder: Path, local: LocalCluster | None = None
) -> None:
    """Add to the environment of a process what it needs to join a cluster.

    Args:
        environment: Of the process.
        cluster: The cluster.
        folder: Private folder, for the token.
        local: The cluster itself, if it is one of this machine's own.
    """
    if local is not None:
        _set_token(environment, local.driver_environment)
    elif cluster.address == "auto" and "RAY_ADDRESS" in os.environ:
        environment["RAY_ADDRESS"] = os.environ["RAY_ADDRESS"]
    if cluster.auth_token.get_secret_value():
        _set_token(environment, write_token(cluster.auth_token.get_secret_value(), folder))


def _set_token(environment: dict[str, str], token: dict[str, str]) -> None:
    # Ray looks at this variable first, and would not see the file.
    environment.pop("RAY_AUTH_TOKEN", None)
    environment.update(token)


def _signal_name(number: int) -> str:
    try:
        return f"{number} ({signal.Signals(number).name})"
    except ValueError:  # a real-time signal
        return str(number)
