"""The processes of a training on the machine of the flow process: guard, local cluster, and one driver at a time.

Drivers that run as Ray jobs: :mod:`prefect_elastic_train.supervisor.job_handle`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING

from prefect_elastic_train.core.events import AttemptEnded, WaitingForCapacity
from prefect_elastic_train.core.operator_settings import ElasticTrainSettings
from prefect_elastic_train.core.outcomes import AttemptFailedError, ElasticTrainError, Outcome
from prefect_elastic_train.core.request import (
    DRIVER_MODULE,
    FORK_SERVER_VARIABLE,
    MARK_VARIABLE,
    STOP_FILE,
    DriverSpec,
    write_spec,
)
from prefect_elastic_train.driver.prestarted import PRESTARTED

from .devices import BUSY, DeviceClaims
from .driver_handle import POLL_SECONDS, ChildDriver, DriverStarter
from .follower import Follower
from .guard import kill_marked
from .local_cluster import LocalCluster, use_token
from .processes import ChildProcess, complete, import_path, kill, start_process

if TYPE_CHECKING:
    from prefect_elastic_train.kubernetes.run_clusters import RunCluster

    from .job_handle import JobDriver

#: Ray makes sockets below the private folder. With Ray's session name their paths must fit into 107 characters.
_MAX_FOLDER_CHARACTERS = 24


class TrainingProcesses:
    """Runs the attempts of one training, and owns the processes that they need on this machine.

    It lives longer than a driver, so that a driver restart keeps the cluster. It is not thread-safe.

    Attributes:
        driver_command: Command that starts a driver as a child process, in all trainings; the path of its spec file
            follows.
    """

    driver_command: Sequence[str] = (sys.executable, "-m", DRIVER_MODULE)
    _folder: Path | None = None
    _guard: ChildProcess | None = None
    _cluster: LocalCluster | None = None
    _job: JobDriver | None = None
    _run_cluster: RunCluster | None = None

    def __init__(self, settings: ElasticTrainSettings, follower: Follower) -> None:
        self.settings = settings
        self.follower = follower
        #: Kept when a cluster dies, so that the next one gets the same GPUs and CPUs.
        self._claims = DeviceClaims()
        self._starter = DriverStarter()

    def run_attempt(self, spec: DriverSpec) -> AttemptEnded:
        """Run one attempt: start a driver, follow it until it has exited or counts as lost, and return its final event.

        If the driver sent no final event, the returned event describes its loss.

        Raises:
            AttemptFailedError: The cluster cannot be reached, or the GPUs and CPUs of a local one are not free
                within ``capacity_timeout_seconds``.
        """
        folder, environment = self._prepare()
        if spec.cluster.address != "auto":
            environment.pop("RAY_ADDRESS", None)
        if kuberay := spec.cluster.kuberay:
            from prefect_elastic_train.kubernetes import run_clusters  # imports ruamel.yaml

            self._run_cluster = run_clusters.create(spec, kuberay)
            self.follower.on_note(f"Waiting for the head of {self._run_cluster}")
            address = self._run_cluster.wait_until_ready(kuberay.start_timeout_seconds, self.wait)
            spec = replace(spec, cluster=spec.cluster.model_copy(update={"address": address}))
        if spec.cluster.is_submitted:
            from .job_handle import JobDriver  # imports Ray

            self._job = JobDriver(self.follower, self.settings, self.wait, spec, folder, self._job)
            return self.follow(self._job)
        cluster = None
        if spec.cluster.is_local:
            cluster = self._get_or_make_cluster(spec, folder, environment)
            cluster.add_variables(environment)
            settings = spec.cluster.model_copy(
                update={"connect_timeout_seconds": self.settings.local_cluster_timeout_seconds}
            )
            spec = replace(spec, cluster=settings, local_address=cluster.address)
        elif token := spec.cluster.auth_token.get_secret_value():
            use_token(environment, token, folder)
        spec_file = folder / "spec"
        write_spec(spec, spec_file)
        spec_file.with_name(STOP_FILE).unlink(missing_ok=True)
        prestart = [*self.driver_command, PRESTARTED, spec.request.framework] if spec.scaling.standby != "off" else []
        process = self._starter.start([*self.driver_command, str(spec_file)], environment, prestart)
        ended = self.follow(ChildDriver(self.follower, self.settings, process, spec_file, cluster))
        if cluster:
            cluster.is_lost = ended.outcome is Outcome.CLUSTER_LOST and not ended.attempt
        return ended

    def wait(self, seconds: float) -> None:
        """Wait for some seconds. Meanwhile, check the flow run and the training's processes several times a second."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._check()
            time.sleep(POLL_SECONDS)

    def follow(self, driver: ChildDriver | JobDriver) -> AttemptEnded:
        """Follow a driver until it has exited or counts as lost, and return the attempt's final event.

        If the flow has to stop, stop the driver and raise the exception that stopped the flow.
        """
        try:
            driver.start()
            while (ended := driver.poll()) is None:
                self._check()
                for source, line in driver.read_output():
                    driver.process_line(source, line)
                    self._check()
            return ended
        except BaseException as reason:
            complete(partial(driver.prepare_stop, reason))
            raise
        finally:
            driver.close()

    def start_helper_process(self, command: Sequence[str], variables: Mapping[str, str]) -> ChildProcess:
        """Start a process beside the driver, with pipes and additional variables; it is killed with the training."""
        folder, environment = self._prepare()
        environment |= {"RAY_TMPDIR": str(folder), **variables}
        return start_process(command, environment, subprocess.PIPE, subprocess.PIPE, stderr=subprocess.DEVNULL)

    def stop_job(self) -> None:
        """Stop the Ray job of the last attempt, which is no longer followed, if it may still run."""
        if self._job:
            self._job.stop()

    def close(self, keep_cluster: bool = False) -> None:
        """Kill all processes of the training on this machine, and delete its private folder and its cluster.

        With ``keep_cluster``, another process uses the training's cluster on Kubernetes.
        """
        if self._run_cluster and not keep_cluster:
            try:
                self._run_cluster.delete()
            except ElasticTrainError as error:
                self.follower.on_note(f"{error}; Kubernetes deletes it with this pod", WARNING)
        self._run_cluster = None
        if not self._folder:
            return
        if left := kill_marked(str(self._folder)):
            self.follower.on_note(
                f"Processes that could not be ended, and may still use GPUs or memory: {left}", WARNING
            )
        self._claims.release()
        self._starter.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._guard:
            kill(self._guard)
        self._folder = None
        self._cluster = None

    def _get_or_make_cluster(self, spec: DriverSpec, folder: Path, environment: dict[str, str]) -> LocalCluster:
        """Return the local cluster of the training. If there is none or it has died, make a new one.

        A new local cluster is started when the driver requests it.
        """
        cluster = self._cluster
        if cluster and not cluster.is_dead():
            return cluster
        if cluster:
            kill_marked(str(folder))
        self._claim_devices(spec)
        self._cluster = LocalCluster(spec, folder, environment, self._claims)
        return self._cluster

    def _claim_devices(self, spec: DriverSpec) -> None:
        """Claim the GPUs and CPUs of the training's local cluster. Waits until enough are free.

        Raises:
            AttemptFailedError: Too few are free within ``capacity_timeout_seconds``; outcome ``timed_out``.
        """
        limit = spec.scaling.capacity_timeout_seconds
        began = time.monotonic()
        logged = ""
        while reason := self._claims.claim(spec):
            if reason not in (logged, BUSY):
                logged = reason
                needs = {"min_workers": spec.scaling.min_workers, "resources_per_worker": {}}
                self.follower.on_event(WaitingForCapacity(possible_workers=0, **needs, missing=reason), replayed=False)
            if limit and time.monotonic() - began > limit:
                raise AttemptFailedError(
                    f"capacity_timeout_seconds ({limit:g} s) have passed: {reason}", outcome=Outcome.TIMED_OUT
                )
            self.wait(POLL_SECONDS)
        self.follower.on_note(self._claims.warning, WARNING)

    def _check(self) -> None:
        """Raise if the training has to stop; else restart a killed guard and start a due pre-started driver."""
        self.follower.check_stop()
        self._maintain_guard()
        self._starter.start_if_due()

    def _maintain_guard(self) -> None:
        """Start the guard process if it does not run: at the beginning of a training, or after it was killed."""
        if not self._folder or (self._guard and self._guard.poll() is None):
            return
        command = [sys.executable, "-m", "prefect_elastic_train.supervisor.guard", str(self._folder), str(os.getpid())]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(import_path())}
        self._guard = start_process(command, environment, subprocess.PIPE, subprocess.DEVNULL)

    def _prepare(self) -> tuple[Path, dict[str, str]]:
        """Make the private folder and start the guard, unless that is done; return the folder and an environment.

        Processes with this environment have the process mark, so they are killed with the training.
        """
        if not self._folder:
            base = os.path.realpath(tempfile.gettempdir())  # as in the working directories of Ray's processes
            if len(base) > _MAX_FOLDER_CHARACTERS:
                base = os.path.realpath("/tmp")
            self._folder = Path(tempfile.mkdtemp(prefix="elt-", dir=base))
        self._maintain_guard()
        environment = {
            "RAY_DEDUP_LOGS": "0",  # the user sees all lines that were printed; the run's log has its own limit
            "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
            **os.environ,
            MARK_VARIABLE: str(self._folder),
            "PYTHONPATH": os.pathsep.join(import_path()),
            "PYTHONUNBUFFERED": "1",
        }
        environment.pop(FORK_SERVER_VARIABLE, None)  # set if this process is a worker of another training
        return self._folder, environment
