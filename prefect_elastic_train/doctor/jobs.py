"""Whether a cluster that is reached over HTTP takes our jobs, and runs the versions that the flow does."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress

from prefect_elastic_train.core.events import EVENT_TAG, AttemptEnded, decode_event
from prefect_elastic_train.core.outcomes import AttemptFailedError
from prefect_elastic_train.core.settings import ClusterSettings
from prefect_elastic_train.doctor.findings import Finding, fail, ok
from prefect_elastic_train.supervisor import job_package as package
from prefect_elastic_train.supervisor.job_client import JobClient, JobDetails, UnreachableError

__all__ = ["check_jobs"]

_LOOK_SECONDS = 0.2
#: What is kept of the time for ending a job that has not ended by then, and for deleting it.
_LEAVE_SECONDS = 10.0
#: Of that, for deleting.
_DELETE_SECONDS = 3.0
#: How long Ray's monitor of a job needs to see that it has ended; and on a busy head it needs some more.
_MONITOR_SECONDS, _DELETIONS = 1.2, 3
_METADATA = {"elastic_train": "doctor"}


def check_jobs(cluster: ClusterSettings, end: float) -> Iterator[Finding]:
    """Ask the dashboard, and have a job tell the versions that a driver would have; nothing of it is left.

    Args:
        cluster: The cluster.
        end: When to be done, by the monotonic clock.

    Raises:
        AttemptFailedError: The cluster cannot be used; the message says what to do.
    """
    api = JobClient(cluster)
    try:
        api.session()
        yield ok(f"the dashboard at {api.address} answers and lets us in")
        yield from _versions(api, end)
    except UnreachableError as error:
        yield fail(
            f"no Ray dashboard answers at {api.address} ({error})",
            "correct the address of the RayCluster, or see whether the head of the cluster is up",
        )
    finally:
        api.close()


def _versions(api: JobClient, end: float) -> Iterator[Finding]:
    submission_id = f"elastic-train-doctor-{uuid.uuid4().hex[:12]}"
    started = time.monotonic()
    # Reserves nothing, whatever a driver would: it shall not wait in the cluster for what is taken just now.
    api.submit(submission_id, package.tell_versions(), _METADATA)
    job = None
    try:
        while job is None or not job.status.is_terminal():
            if time.monotonic() > end - _LEAVE_SECONDS:
                status = job.status if job is not None else "unknown to the cluster"
                told = f": {job.message}" if job is not None and job.message else ""
                yield fail(
                    f"a job that only tells its versions is {status} after {time.monotonic() - started:.0f} s{told}",
                    f"see in {api.address}/#/jobs what keeps jobs of this cluster from running, or give more --timeout",
                )
                return
            time.sleep(_LOOK_SECONDS)
            job = api.job(submission_id)
        output = _log(api, job)
        finding = _compared(output, time.monotonic() - started)
        yield finding or fail(f"a job that only tells its versions ended {job.status}: {job.message or output[-500:]}")
    finally:
        # What was found is told by then, should this take too long.
        _forget(api, job, submission_id, end)


def _compared(output: str, seconds: float) -> Finding | None:
    """Compare what a job has printed with the flow's versions; None if it has not told them."""
    for line in output.splitlines():
        if line.startswith(EVENT_TAG):
            said = decode_event(line.removeprefix(EVENT_TAG))
            if isinstance(said, AttemptEnded):
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


def _forget(api: JobClient, job: JobDetails | None, submission_id: str, end: float) -> None:
    """Delete a job, and end it before if it has not ended."""
    with suppress(UnreachableError, AttemptFailedError):
        left = {submission_id}
        if job is None or not job.status.is_terminal():
            left |= _end(api, job, submission_id, end - _DELETE_SECONDS)
        _delete(api, left)


def _end(api: JobClient, job: JobDetails | None, submission_id: str, end: float) -> set[str]:
    """End a job: one that runs by Ray's stop, and one that waits for its start by another job, which is given."""
    if job is not None and job.status != "PENDING":
        api.stop(submission_id)
        _await_end(api, submission_id, end)
        return set()
    helper = f"{submission_id}-end"
    api.submit(helper, package.end_pending(submission_id), _METADATA)
    for one in (submission_id, helper):
        _await_end(api, one, end)
    return {helper}


def _await_end(api: JobClient, submission_id: str, end: float) -> None:
    while time.monotonic() < end:
        job = api.job(submission_id)
        if job is None or job.status.is_terminal():
            return
        time.sleep(_LOOK_SECONDS)


def _delete(api: JobClient, submission_ids: set[str]) -> None:
    """Delete jobs that have ended.

    Ray's monitor of a job looks once a second, and takes one that is deleted under its eyes for failed: it would write
    down anew that there was such a job.
    """
    for _ in range(_DELETIONS):
        time.sleep(_MONITOR_SECONDS)
        left = [one for one in submission_ids if api.job(one) is not None]
        if not left:
            return
        for one in left:
            api.delete_job(one)
