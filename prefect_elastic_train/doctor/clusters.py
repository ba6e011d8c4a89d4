"""Whether the Ray cluster can be used: one that is started here, one that is joined, or one that takes jobs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from prefect_elastic_train.core.events import ClusterConnected, Event
from prefect_elastic_train.core.operator_settings import ElasticTrainSettings
from prefect_elastic_train.core.settings import ClusterSettings
from prefect_elastic_train.core.spec import DriverSpec
from prefect_elastic_train.doctor import Finding, fail, ok
from prefect_elastic_train.supervisor.runtime import Runtime

#: What is kept of a check's time for ending what it has started, and for a driver that does not answer to say so.
_LEAVE_SECONDS = 4.0


def check_cluster(spec: DriverSpec, seconds: float) -> Iterator[Finding]:
    """Join a cluster as a training would, a local one after starting it; of one that takes jobs ask the dashboard.

    Args:
        spec: Of a training with the cluster.
        seconds: How long that may take.

    Raises:
        AttemptFailedError: It cannot be used; the message says what to do.
    """
    yield _asked(spec.cluster) if spec.cluster.is_submitted else _joined(spec, seconds - _LEAVE_SECONDS)


def _asked(cluster: ClusterSettings) -> Finding:
    from prefect_elastic_train.supervisor.job_client import JobClient, UnreachableError  # it loads Ray's client

    api = JobClient(cluster)
    try:
        api.jobs()
        api.check_version()
    except UnreachableError as error:
        return fail(
            f"no Ray dashboard answers at {api.address} ({error})",
            "correct the address of the RayCluster, or see whether the head of the cluster is up",
        )
    return ok(f"the dashboard at {api.address} answers, lets us in, and has the Ray that is here")


def _joined(spec: DriverSpec, seconds: float) -> Finding:
    """Have a driver join the cluster, and end what was started."""
    deadline = time.monotonic() + seconds
    events: list[Event] = []

    def check_time() -> None:
        if time.monotonic() > deadline:
            raise TimeoutError("the cluster was not joined in time: see that memory, CPUs and room in /tmp are left")

    # What is sent along is for the loop.
    patience = min(spec.cluster.connect_timeout_seconds, max(1.0, seconds - _LEAVE_SECONDS))
    bare = {"runtime_env": {}, "working_dir": "", "connect_timeout_seconds": patience}
    settings = ElasticTrainSettings.model_construct(stop_grace_seconds=0.5)
    runtime = Runtime(settings, events.append, lambda source, line: None, check_time)
    runtime.driver_command = (sys.executable, "-m", "prefect_elastic_train.doctor.probe")
    try:
        ended = runtime.run_attempt(replace(spec, cluster=spec.cluster.model_copy(update=bare)))
    finally:
        runtime.close()
    for event in events:
        if isinstance(event, ClusterConnected):
            there = [f"{event.resources[name]:g} {name}" for name in ("CPU", "GPU", "TPU") if name in event.resources]
            return ok(f"joined the cluster at {event.address}: {', '.join(there)}")
    return fail(ended.message)
