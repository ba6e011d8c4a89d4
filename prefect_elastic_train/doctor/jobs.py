"""Whether a cluster that is reached over HTTP takes our jobs, and runs the versions that the flow does."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress

from ray.job_submission import JobDetails

from prefect_elastic_train.core.events import EVENT_TAG, AttemptEnded, decode_event
from prefect_elastic_train.core.outcomes import AttemptFailedError
from prefect_elastic_train.core.settings import ClusterSettings
from prefect_elastic_train.doctor.findings import Finding, fail, ok
from prefect_elastic_train.supervisor import job_package as package
from prefect_elastic_train.supervisor.job_client import JobClient, UnreachableError

_LOOK_SECONDS = 0.2
#: What is kept of the time for deleting the job.
_LEAVE_SECONDS = 5.0
#: Ray's monitor of a job looks once a second whether it has ended, and would write down anew one that was deleted
#: before; on a busy head it needs some more.
_MONITOR_SECONDS, _DELETIONS = 1.2, 3


def check_jobs(cluster: ClusterSettings, end: float) -> Iterator[Finding]:
    """Ask the dashboard, and have a job tell the versions that a driver would have; one that ran is deleted.

    Args:
        cluster: The cluster.
        end: When to be done, by the monotonic clock.

    Raises:
        AttemptFailedError: The cluster cannot be used; the message says what to do.
    """
    api = JobClient(cluster)
    try:
        api.session()
        api.check_version()
        yield ok(f"the dashboard at {api.address} answers and lets us in")
        yield _told_versions(api, end - _LEAVE_SECONDS)
    except UnreachableError as error:
        yield fail(
            f"no Ray dashboard answers at {api.address} ({error})",
            "correct the address of the RayCluster, or see whether the head of the cluster is up",
        )
    finally:
        api.close()


def _told_versions(api: JobClient, deadline: float) -> Finding:
    submission_id = f"elastic-train-doctor-{uuid.uuid4().hex[:12]}"
    started = time.monotonic()
    # Reserves nothing, whatever a driver would: it shall not wait in the cluster for what is taken just now.
    api.submit(submission_id, package.tell_versions(), {"elastic_train": "doctor"})
    job = None
    while job is None or not job.status.is_terminal():
        if time.monotonic() > deadline:
            status = job.status if job is not None else "unknown to the cluster"
            told = f": {job.message}" if job is not None and job.message else ""
            with suppress(UnreachableError, AttemptFailedError):
                api.stop(submission_id)  # a pending one ends as soon as it starts
            return fail(
                f"a job that only tells its versions is {status} after {time.monotonic() - started:.0f} s{told}",
                f"see in {api.address}/#/jobs what keeps jobs of this cluster from running, or give more --timeout; "
                f"then `ray job delete {submission_id}`",
            )
        time.sleep(_LOOK_SECONDS)
        job = api.job(submission_id)
    output = _log(api, job)
    with suppress(UnreachableError, AttemptFailedError):
        for _ in range(_DELETIONS):
            time.sleep(_MONITOR_SECONDS)
            if api.job(submission_id) is None:
                break
            api.delete_job(submission_id)
    ended = fail(f"a job that only tells its versions ended {job.status}: {job.message or output[-500:]}")
    return _compared(output, time.monotonic() - started) or ended


def _compared(output: str, seconds: float) -> Finding | None:
    """Compare what a job has printed with the flow's versions; None if it has not told them."""
    for line in output.splitlines():
        if line.startswith(EVENT_TAG) and isinstance(said := decode_event(line.removeprefix(EVENT_TAG)), AttemptEnded):
            return fail(said.message)
        if not line.startswith(package.VERSIONS_TAG):
            continue
        told: dict[str, str] = json.loads(line.removeprefix(package.VERSIONS_TAG))
        if told["python"].split(".")[:2] != package.PYTHON.split("."):
            return fail(
                f"the cluster runs Python {told['python']} and this machine Python {package.PYTHON}: what the flow "
                "pickles cannot be read there",
                "use an image or environment with the same minor version of Python on both sides",
            )
        return ok(f"a job ran there in {seconds:.1f} s, with Ray {told['ray']} and Python {told['python']}")
    return None


def _log(api: JobClient, job: JobDetails) -> str:
    if not job.driver_node_id:
        return ""
    with suppress(UnreachableError):
        return b"".join(api.log(job, -1)).decode(errors="replace")
    return ""
