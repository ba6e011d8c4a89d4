"""The processes of a training on the flow's machine: guard, local cluster and, one at a time, its drivers.

Drivers that run inside a cluster are left to :mod:`prefect_elastic_train.supervisor.job`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from prefect_elastic_train.core.events import AttemptEnded
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.core.settings import ClusterSettings
from prefect_elastic_train.core.spec import MARK_VARIABLE, STOP_FILE, DriverSpec, write_spec
from prefect_elastic_train.supervisor.attempt import Follower
from prefect_elastic_train.supervisor.child import ChildDriver
from prefect_elastic_train.supervisor.guard import DISMISSED
from prefect_elastic_train.supervisor.local_cluster import LocalCluster, write_token
from prefect_elastic_train.supervisor.processes import end_marked

if TYPE_CHECKING:
    from prefect_elastic_train.supervisor.job import JobLauncher

#: Sockets below the private folder must fit into 107 characters with Ray's session name.
_MAX_FOLDER_CHARACTERS = 24
#: A driver that ends well without its last word is followed by another one, which finds the result.
_DRIVERS = 2


def import_path() -> list[str]:
    """Return where this process finds modules, as absolute folders, so that others find the same."""
    return list(dict.fromkeys(os.path.abspath(folder) for folder in sys.path if not folder.endswith(".zip")))


class Runtime(Follower):
    """Runs the attempts of one training, and owns what they need on this machine.

    It outlives a driver, so that a driver restart keeps the cluster. Use it from one thread at a time.
    """

    #: What starts a driver as a child process; the path of its spec follows.
    driver_command: tuple[str, ...] = (sys.executable, "-m", "prefect_elastic_train.driver")

    _jobs: JobLauncher | None = None
    _folder: Path | None = None
    _guard: subprocess.Popen[bytes] | None = None
    _cluster: LocalCluster | None = None

    #: Whether the attempt is a job, which others may follow, too.
    follows_job = False

    def run_attempt(self, spec: DriverSpec) -> AttemptEnded:
        """Run one driver to its end.

        Args:
            spec: What the driver is told.

        Returns:
            How the attempt ended, also if the driver went without a word.
        """
        folder, environment = self.prepare()
        self.follows_job = spec.cluster.is_submitted
        if self.follows_job:
            # Ray's client of its dashboards is loaded where one is asked only.
            from prefect_elastic_train.supervisor.job import JobLauncher

            self._jobs = self._jobs or JobLauncher(self, folder)
            return self._jobs.run_attempt(spec)
        cluster = self._local_cluster(spec, folder, environment) if spec.cluster.is_local else None
        if cluster is not None:
            spec = replace(spec, address_file=str(cluster.address_file))
        let_join(environment, spec.cluster, folder, cluster)
        (folder / STOP_FILE).unlink(missing_ok=True)
        for _ in range(_DRIVERS):
            ended = self._run_child(spec, folder / "spec", environment, cluster)
            if ended is not None:
                return ended
        return AttemptEnded(outcome=Outcome.DRIVER_LOST, message=f"{_DRIVERS} drivers ended well without a last word")

    def prepare(self) -> tuple[Path, dict[str, str]]:
        """Return the private folder, guarded from now on, and the environment of processes that end with it."""
        if self._folder is None:
            base = tempfile.gettempdir()
            if len(base) > _MAX_FOLDER_CHARACTERS:
                base = "/tmp"
            self._folder = Path(tempfile.mkdtemp(prefix="elt-", dir=os.path.realpath(base)))
        self.keep_guarded()
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        environment[MARK_VARIABLE] = str(self._folder)
        environment["PYTHONPATH"] = os.pathsep.join(import_path())
        environment["PYTHONUNBUFFERED"] = "1"
        # A person's prints are not to be guessed at; the run's log has a limit of its own.
        environment.setdefault("RAY_DEDUP_LOGS", "0")
        return self._folder, environment

    def turn(self) -> None:
        """Look whether the flow run goes on, and that the guard is there."""
        self.check_stop()
        self.keep_guarded()

    def keep_guarded(self) -> None:
        """Start the guard, or another one if it was killed."""
        if self._folder is not None and (self._guard is None or self._guard.poll() is not None):
            self._guard = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "prefect_elastic_train.supervisor.guard",
                    f"--mark={self._folder}",
                    f"--parent={os.getpid()}",
                    f"--folder={self._folder}",
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(import_path())},
                start_new_session=True,
            )

    def end_jobs(self) -> None:
        """Stop a job that an attempt has lost sight of."""
        if self._jobs is not None:
            self._jobs.end_unfollowed()

    def close(self) -> None:
        """End everything that belongs to the training; nothing of it is left after this, bar what cannot be killed."""
        if self._folder is None:
            return
        if self._cluster is not None:
            self._cluster.start_no_more()
        end_marked(str(self._folder), timeout_seconds=10.0)
        if self._cluster is not None:
            self._cluster.forget()
            self._cluster = None
        guard, self._guard = self._guard, None
        if guard is not None and guard.stdin is not None:
            try:
                guard.stdin.write(DISMISSED)
                guard.stdin.close()
                guard.wait(timeout=5)
            except (OSError, subprocess.TimeoutExpired):
                guard.kill()
                guard.wait(timeout=5)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = self._jobs = None

    def _local_cluster(self, spec: DriverSpec, folder: Path, environment: dict[str, str]) -> LocalCluster:
        """Return the training's local cluster, which a driver starts when it needs it."""
        if self._cluster is None:
            # Ray Data needs a CPU beside those that the workers hold.
            self._cluster = LocalCluster(spec.cluster, int(spec.request.has_datasets), folder, environment)
        elif not self._cluster.is_alive():  # the next one is not to be mistaken for one that has died
            end_marked(str(folder), timeout_seconds=10.0)
            self._cluster.forget()
        return self._cluster

    def _run_child(
        self, spec: DriverSpec, spec_file: Path, environment: dict[str, str], cluster: LocalCluster | None
    ) -> AttemptEnded | None:
        """Run a driver as a child process; None if it has ended well, and its result is to be looked for."""
        write_spec(spec, spec_file)
        driver = ChildDriver(self, [*self.driver_command, str(spec_file)], environment, cluster)
        try:
            return self.follow(driver)
        except BaseException as reason:
            # The flow run was told to stop: the driver shall know that its end is meant.
            outcome = Outcome.TIMED_OUT if isinstance(reason, TimeoutError) else Outcome.CANCELLED
            spec_file.with_name(STOP_FILE).write_text(outcome.value)
            raise
        finally:
            driver.stop()
            spec_file.unlink(missing_ok=True)


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
    token = cluster.auth_token.get_secret_value()
    if local is None and cluster.address == "auto" and "RAY_ADDRESS" in os.environ:
        environment["RAY_ADDRESS"] = os.environ["RAY_ADDRESS"]
    if local is not None or token:
        # Ray looks at this variable first, and would not see the file.
        environment.pop("RAY_AUTH_TOKEN", None)
    if local is not None:
        environment.update(local.driver_environment)
    if token:
        environment.update(write_token(token, folder))
