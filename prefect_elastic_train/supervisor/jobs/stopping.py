"""Ending a job, whatever state it is in, and looking what is left of it."""

from __future__ import annotations

import time
from pathlib import Path

from prefect_elastic_train.core.outcomes import AttemptFailedError
from prefect_elastic_train.core.spec import DriverSpec
from prefect_elastic_train.supervisor.jobs.api import Job, JobsApi, UnreachableError
from prefect_elastic_train.supervisor.jobs.package import end_pending
from prefect_elastic_train.supervisor.jobs.submitting import run_submission, with_token, write_request

__all__ = ["left_of", "stop"]

_STOP_SECONDS = 20.0
_LEFT_SECONDS = 8.0
#: How long a job that is stopped may be pending before it is ended in another way.
_PENDING_SECONDS = 1.5
#: After so long without effect a stop is asked for again; a job that the cluster does not know by then is none.
_ASK_AGAIN_SECONDS = 4.0
_TURN_SECONDS = 0.5


def stop(api: JobsApi, submission_id: str, spec: DriverSpec, folder: Path, environment: dict[str, str]) -> Job | None:
    """Stop a job and wait until it has ended; None if the cluster does not know it.

    Args:
        api: The dashboard.
        submission_id: The job.
        spec: What it was submitted as.
        folder: Private folder of the training.
        environment: For processes of this machine.

    Raises:
        UnreachableError: It does not end, or the cluster does not answer, for so long.
        AttemptFailedError: The cluster refuses us.
    """
    began = time.monotonic()
    ask_at, pending_until = began, began + _PENDING_SECONDS
    while True:
        now = time.monotonic()
        try:
            if now >= ask_at:
                api.stop(submission_id)
                ask_at = now + _ASK_AGAIN_SECONDS
            job = api.job(submission_id)
            if job is not None and job.is_terminal:
                return job
            if job is None and now - began > _ASK_AGAIN_SECONDS:
                return None  # a submission that was cut short may arrive late, but not as late as this
            problem = f"it is still {job.status}" if job else "the cluster does not know it"
            if job is not None and job.status == "PENDING" and now > pending_until:
                pending_until = float("inf")
                _end_pending(submission_id, spec, folder, environment)
        except UnreachableError as error:
            problem = str(error)
        if now - began > _STOP_SECONDS:
            raise UnreachableError(problem)
        time.sleep(_TURN_SECONDS)


def left_of(api: JobsApi, job: Job) -> list[str]:
    """Give what is left of a job that has ended, after some time for it to go."""
    if not job.job_id:
        return []
    left: list[str] = []
    deadline = time.monotonic() + _LEFT_SECONDS
    while time.monotonic() < deadline:
        try:
            left = api.left_of(job.job_id)
        except (UnreachableError, AttemptFailedError, KeyError, TypeError) as error:
            left = [f"what is left cannot be asked ({error})"]
        if not left:
            break
        time.sleep(_TURN_SECONDS)
    return left


def _end_pending(submission_id: str, spec: DriverSpec, folder: Path, environment: dict[str, str]) -> None:
    """End a job that has not started, which Ray's own stop does not, by another job."""
    request = folder / "end.json"
    write_request(
        request,
        spec.cluster,
        entrypoint=end_pending(submission_id),
        submission_id=f"{submission_id}-end",
        runtime_env={},
        metadata={},
        resources={},
    )
    deadline = time.monotonic() + _STOP_SECONDS / 2
    run_submission(request, with_token(environment, spec.cluster, folder), deadline, lambda: None)
    request.unlink(missing_ok=True)
