"""Whether the Ray cluster can be used: one that is started here, one that is joined, or one that takes jobs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect_elastic_train.core.operator_settings import ElasticTrainSettings
from prefect_elastic_train.core.outcomes import AttemptFailedError
from prefect_elastic_train.core.records import Owner
from prefect_elastic_train.core.request import RunRequest
from prefect_elastic_train.core.settings import CheckpointSettings, ClusterSettings, FailureSettings, ScalingSettings
from prefect_elastic_train.core.spec import DriverSpec, write_spec
from prefect_elastic_train.core.storage_settings import LocalStorageSettings
from prefect_elastic_train.doctor.findings import Finding, fail, ok, warn
from prefect_elastic_train.doctor.probe import ANSWER_TAG
from prefect_elastic_train.report.words import size
from prefect_elastic_train.runs.identity import fingerprint
from prefect_elastic_train.supervisor.local_cluster import LocalCluster
from prefect_elastic_train.supervisor.runtime import Runtime, let_join

__all__ = ["check_cluster"]

#: What is kept of a check's time for ending what it has started.
_LEAVE_SECONDS = 4.0
#: Ray moves its object store to a disk, and torch's data loaders fail, with less. A container gets 64 MB by default.
_LITTLE_MEMORY = 2**28
#: Ray takes no objects any more on a disk that is fuller than this, in percent.
_FULL_DISK = 95


def check_cluster(cluster: ClusterSettings, seconds: float) -> Iterator[Finding]:
    """Use a cluster as a training would, up to the point where it would train.

    Args:
        cluster: The cluster.
        seconds: How long that may take.

    Raises:
        AttemptFailedError: It cannot be used; the message says what to do.
    """
    end = time.monotonic() + seconds
    deadline = end - _LEAVE_SECONDS
    if cluster.is_submitted:
        from prefect_elastic_train.doctor.jobs import check_jobs  # it loads Ray's client

        yield from check_jobs(cluster, end)
    elif cluster.is_local:
        yield from _room()
        yield _start(cluster, deadline)
    else:
        yield _join(cluster, deadline)


def _room() -> Iterator[Finding]:
    with suppress(OSError):
        memory = shutil.disk_usage("/dev/shm").total
        if memory < _LITTLE_MEMORY:
            yield warn(
                f"/dev/shm has {size(memory)}, so that Ray's object store goes to a disk and data loaders may fail",
                "give the container more shared memory, such as `docker run --shm-size=4g`, or a memory-backed "
                "emptyDir at /dev/shm in Kubernetes",
            )


def _start(cluster: ClusterSettings, deadline: float) -> Finding:
    """Start a head on this machine and have a driver join it, as each training does; end both."""
    started = time.monotonic()
    with _processes() as (folder, environment):
        disk = shutil.disk_usage(folder)
        if 100 * (disk.total - disk.free) > _FULL_DISK * disk.total:
            return fail(
                f"the disk of {folder.parent} is more than {_FULL_DISK} % full, and Ray takes no objects there",
                "make room, or set TMPDIR to a folder on another disk, of 24 characters at most",
            )
        address_file = folder / "address"
        head = LocalCluster(cluster, 0, folder, environment)
        let_join(environment, cluster, folder, head)
        # Beside the head, as it takes as long to load Ray.
        driver = _driver(cluster, folder, environment, str(address_file))
        too_late = threading.Timer(max(0.0, deadline - time.monotonic()), head.start_no_more)
        too_late.start()
        try:
            address = head.start(max(1.0, deadline - time.monotonic()))
        except AttemptFailedError as error:
            told = str(error)
            if time.monotonic() > deadline:
                told = f"the local Ray cluster takes too long to start; its last words were: {head.last_words()}"
            return fail(told, "see that memory, CPUs and room in /tmp are left, or give more --timeout")
        finally:
            too_late.cancel()
        address_file.write_text(address)
        answer = _answer(driver, folder, deadline)
        if answer.problem:
            return fail(answer.problem)
    return ok(f"a local cluster started and answered in {time.monotonic() - started:.1f} s: {answer.told}")


def _join(cluster: ClusterSettings, deadline: float) -> Finding:
    left = max(1.0, deadline - time.monotonic() - _LEAVE_SECONDS)
    hasty = cluster.model_copy(update={"connect_timeout_seconds": min(left, cluster.connect_timeout_seconds)})
    with _processes() as (folder, environment):
        let_join(environment, cluster, folder)
        answer = _answer(_driver(hasty, folder, environment), folder, deadline)
    if "Version mismatch" in answer.problem:
        return fail(answer.problem, "use the same versions of Ray and Python here and in the cluster")
    if answer.problem:
        return fail(answer.problem)
    return ok(f"joined the cluster at {answer.address}: {answer.told}")


@contextmanager
def _processes() -> Iterator[tuple[Path, dict[str, str]]]:
    """Give a private folder, and an environment whose processes end with the block, or with this process."""
    runtime = Runtime(ElasticTrainSettings.model_construct(), lambda event: None, lambda source, line: None)
    try:
        yield runtime.prepare()
    finally:
        runtime.close()


def _driver(
    cluster: ClusterSettings, folder: Path, environment: dict[str, str], address_file: str = ""
) -> subprocess.Popen[bytes]:
    spec = DriverSpec(
        RunRequest("doctor", Owner(flow_run_id="doctor"), fingerprint("doctor:none", "none", None)),
        scaling=ScalingSettings(),
        failures=FailureSettings(),
        checkpoints=CheckpointSettings(),
        storage=LocalStorageSettings(path=str(folder)),
        # What is sent along is for the loop.
        cluster=cluster.model_copy(update={"runtime_env": {}, "working_dir": ""}),
        address_file=address_file,
    )
    write_spec(spec, folder / "spec")
    with (folder / "probe.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "prefect_elastic_train.doctor.probe", str(folder / "spec")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            cwd=os.getcwd(),
            start_new_session=True,
        )


@dataclass(frozen=True)
class _Answer:
    """What a driver has found out."""

    problem: str = ""
    address: str = ""
    resources: dict[str, float] | None = None

    @property
    def told(self) -> str:
        amounts = self.resources or {}
        return ", ".join(f"{amounts.get(name, 0):g} {name}" for name in ("CPU", "GPU", "TPU") if name in amounts)


def _answer(driver: subprocess.Popen[bytes], folder: Path, deadline: float) -> _Answer:
    try:
        output, _ = driver.communicate(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return _Answer(problem="the cluster was there, but a driver took too long to join it; give more --timeout")
    for line in output.decode(errors="replace").splitlines():
        if line.startswith(ANSWER_TAG):
            found: dict[str, Any] = json.loads(line.removeprefix(ANSWER_TAG))
            return _Answer(**found)
    words = (folder / "probe.log").read_text(errors="replace").strip()[-1000:]
    return _Answer(problem=f"a driver that joined the cluster ended with exit code {driver.returncode}: {words}")
