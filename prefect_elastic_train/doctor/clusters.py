"""Whether the Ray cluster can be used: one that is started here, one that is joined, or one that takes jobs."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress

from prefect_elastic_train.core.events import ClusterConnected, Event
from prefect_elastic_train.core.operator_settings import ElasticTrainSettings
from prefect_elastic_train.core.records import Owner
from prefect_elastic_train.core.request import RunRequest
from prefect_elastic_train.core.settings import CheckpointSettings, ClusterSettings, FailureSettings, ScalingSettings
from prefect_elastic_train.core.spec import DriverSpec
from prefect_elastic_train.core.storage_settings import LocalStorageSettings
from prefect_elastic_train.doctor.findings import Finding, fail, ok, warn
from prefect_elastic_train.report.words import size
from prefect_elastic_train.runs.identity import fingerprint
from prefect_elastic_train.supervisor.runtime import Runtime

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
    started = time.monotonic()
    if cluster.is_submitted:
        from prefect_elastic_train.doctor.jobs import check_jobs  # it loads Ray's client

        yield from check_jobs(cluster, started + seconds)
        return
    if cluster.is_local:
        yield from _room()
    yield _joined(cluster, started, started + seconds - _LEAVE_SECONDS)


def _room() -> Iterator[Finding]:
    with suppress(OSError):
        memory = shutil.disk_usage("/dev/shm").total
        if memory < _LITTLE_MEMORY:
            yield warn(
                f"/dev/shm has {size(memory)}, so that Ray's object store goes to a disk and data loaders may fail",
                "give the container more shared memory, such as `docker run --shm-size=4g`, or a memory-backed "
                "emptyDir at /dev/shm in Kubernetes",
            )
    folder = tempfile.gettempdir()
    disk = shutil.disk_usage(folder)
    if 100 * (disk.total - disk.free) > _FULL_DISK * disk.total:
        yield warn(
            f"the disk of {folder} is more than {_FULL_DISK} % full, and Ray takes no objects there",
            "make room, or set TMPDIR to a folder on another disk, of 24 characters at most",
        )


def _joined(cluster: ClusterSettings, started: float, deadline: float) -> Finding:
    """Have a driver join the cluster as each training does, a local one after starting it; end what was started."""
    events: list[Event] = []

    def check_time() -> None:
        if time.monotonic() > deadline:
            raise TimeoutError

    # What is sent along is for the loop, and the storage too.
    patience = min(cluster.connect_timeout_seconds, max(1.0, deadline - started - _LEAVE_SECONDS))
    bare = {"runtime_env": {}, "working_dir": "", "connect_timeout_seconds": patience}
    spec = DriverSpec(
        RunRequest("doctor", Owner(flow_run_id="doctor"), fingerprint("doctor:none", "none", None)),
        scaling=ScalingSettings(),
        failures=FailureSettings(),
        checkpoints=CheckpointSettings(),
        storage=LocalStorageSettings(path=tempfile.gettempdir()),
        cluster=cluster.model_copy(update=bare),
    )
    settings = ElasticTrainSettings.model_construct(stop_grace_seconds=0.5)
    runtime = Runtime(settings, events.append, lambda source, line: None, check_time)
    runtime.driver_command = (sys.executable, "-m", "prefect_elastic_train.doctor.probe")
    try:
        ended = runtime.run_attempt(spec)
    except TimeoutError:
        what = (
            "a local Ray cluster takes too long to start" if cluster.is_local else "the cluster was not joined in time"
        )
        return fail(
            what,
            "see that memory, CPUs and room in /tmp are left, or give more --timeout",
        )
    finally:
        runtime.close()
    found = [event for event in events if isinstance(event, ClusterConnected)]
    if not found:
        same = "use the same versions of Ray and Python here and in the cluster"
        return fail(ended.message, same if "Version mismatch" in ended.message else "")
    amounts = found[0].resources
    told = ", ".join(f"{amounts[name]:g} {name}" for name in ("CPU", "GPU", "TPU") if name in amounts)
    if cluster.is_local:
        return ok(f"a local cluster started and answered in {time.monotonic() - started:.1f} s: {told}")
    return ok(f"joined the cluster at {found[0].address}: {told}")
