"""The processes of a training on the flow's machine: guard, local cluster and, one at a time, its drivers.

Drivers that run inside a cluster are left to :mod:`prefect_elastic_train.supervisor.job`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from prefect_elastic_train.core.events import AttemptEnded
from prefect_elastic_train.core.request import MARK_VARIABLE, DriverSpec
from prefect_elastic_train.supervisor.attempt import ChildDriver, Follower
from prefect_elastic_train.supervisor.guard import DISMISSED, end_marked
from prefect_elastic_train.supervisor.local_cluster import LocalCluster, use_token

if TYPE_CHECKING:
    from prefect_elastic_train.supervisor.job import JobDriver

#: Sockets below the private folder must fit into 107 characters with Ray's session name.
_MAX_FOLDER_CHARACTERS = 24
_END_SECONDS = 10.0


def import_path() -> list[str]:
    """Return where this process finds modules, as absolute folders, so that others find the same."""
    return list(dict.fromkeys(os.path.abspath(folder) for folder in sys.path if not folder.endswith(".zip")))


class Runtime(Follower):
    """Runs the attempts of one training, and owns what they need on this machine.

    It outlives a driver, so that a driver restart keeps the cluster. Use it from one thread at a time.
    """

    #: What starts a driver as a child process; the path of its spec follows.
    driver_command: tuple[str, ...] = (sys.executable, "-m", "prefect_elastic_train.driver")

    _job: JobDriver | None = None
    _folder: Path | None = None
    _guard: subprocess.Popen[bytes] | None = None
    _cluster: LocalCluster | None = None

    def run_attempt(self, spec: DriverSpec) -> AttemptEnded:
        """Run one driver to its end, and return how it ended by its last word or, without one, by how it died.

        Raises:
            AttemptFailedError: The cluster cannot be reached.
        """
        folder, environment = self._prepare()
        if spec.cluster.is_submitted:
            from prefect_elastic_train.supervisor.job import JobDriver  # it loads Ray's client

            self._job = JobDriver(self, spec, folder, self._job)
            return self.follow(self._job)
        cluster, token = None, spec.cluster.auth_token.get_secret_value()
        if spec.cluster.is_local:
            if self._cluster is not None and self._cluster.is_dead():
                end_marked(str(folder), _END_SECONDS)
                self._cluster = None
            # Ray Data needs a CPU beside those that the workers hold.
            extra_cpus = int(spec.request.has_datasets)
            cluster = self._cluster = self._cluster or LocalCluster(spec.cluster, extra_cpus, folder, environment)
            cluster.admit(environment)
            patience = {"connect_timeout_seconds": self.settings.local_cluster_timeout_seconds}
            settings = spec.cluster.model_copy(update=patience)
            spec = replace(spec, cluster=settings, local_address=cluster.address)
        elif token:
            use_token(environment, token, folder)
        if spec.cluster.address == "auto" and "RAY_ADDRESS" in os.environ:
            environment["RAY_ADDRESS"] = os.environ["RAY_ADDRESS"]
        return self.follow(ChildDriver(self, self.driver_command, environment, spec, folder, cluster))

    def turn(self) -> None:
        """Look whether the flow run goes on, and that the guard is there."""
        self.check_stop()
        self.keep_guarded()

    def keep_guarded(self) -> None:
        """Start the guard, or another one if it was killed."""
        if self._folder is not None and (self._guard is None or self._guard.poll() is not None):
            guard = "prefect_elastic_train.supervisor.guard"
            self._guard = subprocess.Popen(
                [sys.executable, "-m", guard, str(self._folder), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(import_path())},
                start_new_session=True,
            )

    def end_jobs(self) -> None:
        """Stop a job that an attempt has lost sight of."""
        if self._job is not None:
            self._job.end()

    def close(self) -> None:
        """End everything that belongs to the training; nothing of it is left after this, bar what cannot be killed."""
        if self._folder is None:
            return
        end_marked(str(self._folder), _END_SECONDS)
        if self._guard is not None and self._guard.stdin is not None:
            with suppress(OSError, subprocess.TimeoutExpired):
                self._guard.stdin.write(DISMISSED)
                self._guard.stdin.close()
                self._guard.wait(timeout=5)
            self._guard.kill()
            self._guard.wait(timeout=5)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = self._guard = self._cluster = self._job = None

    def _prepare(self) -> tuple[Path, dict[str, str]]:
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
