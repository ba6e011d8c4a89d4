"""Running an attempt as a Ray job: found again or submitted, followed, and stopped, over HTTP."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ray.job_submission import JobDetails

from prefect_elastic_train.core.events import AttemptEnded
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.settings import ClusterSettings
from prefect_elastic_train.core.spec import DriverSpec
from prefect_elastic_train.supervisor.attempt import Follower
from prefect_elastic_train.supervisor.job_client import (
    JobClient,
    RefusedError,
    UnreachableError,
)
from prefect_elastic_train.supervisor.job_driver import BLIND_NOTE_SECONDS, BLIND_SECONDS, JobDriver, stop
from prefect_elastic_train.supervisor.job_package import ENTRYPOINT, job_modules, make_runtime_env

_T = TypeVar("_T")

#: How long a dashboard that has answered is asked again.
_ASK_SECONDS = 60.0
#: How long a resumed flow run waits for a cluster that it may have a job in.
_RESUMED_SECONDS = 300.0
#: A submission is tried so often; a job that needs another one at once is followed by so many.
_SUBMISSIONS = 5
_MOST_JOBS = 20

_RUN, _STORAGE, _OWNER = "elastic_train_run", "elastic_train_storage", "elastic_train_owner"


class JobLauncher:
    """Runs attempts of one training as jobs, one at a time.

    Args:
        follower: Who follows them.
        folder: Private folder of the training.
    """

    def __init__(self, follower: Follower, folder: Path) -> None:
        self._follower = follower
        self._folder = folder
        self._reached = False
        self._followed: set[str] = set()
        #: Up to which event each job was told of, in seconds since the epoch.
        self._told_until: dict[str, float] = {}
        #: A job that may go on although nobody follows it, and where.
        self._unfollowed: tuple[ClusterSettings, str] | None = None

    def run_attempt(self, spec: DriverSpec) -> AttemptEnded:
        """Follow the run's job to its end, the one that runs already or a new one.

        Raises:
            AttemptFailedError: The cluster cannot be reached, or cannot run the driver.
        """
        client = JobClient(spec.cluster, self._follower.turn, self._folder)
        try:
            session = self._contact(client, spec)
            for _ in range(_MOST_JOBS):
                job, is_new = self._find_or_submit(client, spec)
                self._followed.add(job.submission_id)
                self._unfollowed = (spec.cluster, job.submission_id)
                ended = self._follow(client, spec, job, session, is_new=is_new)
                if ended is not None:
                    return ended
            return AttemptEnded(outcome=Outcome.DRIVER_LOST, message="one job after the other ended without a result")
        except UnreachableError as error:
            raise AttemptFailedError(
                f"the dashboard does not answer any more: {error}", outcome=Outcome.CLUSTER_LOST
            ) from error
        except BaseException as reason:
            if not isinstance(reason, Exception) or isinstance(reason, TimeoutError):
                self._leave(reason, client)
            raise
        finally:
            client.close()

    def end_unfollowed(self) -> None:
        """Stop a job that an attempt has lost sight of, when no other attempt is to follow."""
        if self._unfollowed is not None:
            self._end()

    def _contact(self, client: JobClient, spec: DriverSpec) -> str:
        """Wait until the cluster answers, and return the name of its session.

        Raises:
            AttemptFailedError: It does not, or it refuses us.
        """
        limit = spec.cluster.connect_timeout_seconds
        if spec.request.resumed:
            limit = max(limit, min(spec.cluster.unreachable_timeout_seconds, _RESUMED_SECONDS))
        if self._reached:
            limit = max(limit, spec.cluster.unreachable_timeout_seconds)
        known = self._reached or spec.request.resumed

        try:
            session = self._ask(client, client.session, limit)
        except UnreachableError as error:
            raise AttemptFailedError(
                f"no Ray dashboard answers at {client.address} ({error}; tried for {limit:g} s). Correct the "
                "address of the RayCluster, or see whether the head of the cluster is up",
                outcome=Outcome.CLUSTER_LOST,
                # What was never there is more likely misspelt than lost: no retry heals that.
                final=not known,
            ) from error
        self._reached = True
        return session

    def _find_or_submit(self, client: JobClient, spec: DriverSpec) -> tuple[JobDetails, bool]:
        """Return the job that trains, and whether it was submitted just now."""
        metadata = _metadata(spec)
        prefix = _prefix(metadata)
        jobs = self._ask(client, client.jobs)
        found = [job for job in jobs if metadata.items() <= (job.metadata or {}).items()]
        for job in found:
            if not job.status.is_terminal():
                return job, False
        newest = max(found, key=lambda job: job.start_time or 0, default=None)
        if newest is not None and newest.status == "SUCCEEDED" and newest.submission_id not in self._followed:
            return newest, False
        number = max((int(job.submission_id.removeprefix(prefix)) for job in found), default=0)
        return self._submit(client, spec, f"{prefix}{number + 1}", metadata), True

    def _submit(self, client: JobClient, spec: DriverSpec, submission_id: str, metadata: dict[str, str]) -> JobDetails:
        """Submit a job, and recognise it if the answer was lost."""
        client.check_version()  # not before: a job that trains already is followed whatever Ray it has
        owner = spec.request.owner.model_copy(update={"job": submission_id})
        spec = replace(spec, request=replace(spec.request, owner=owner))
        about = {"flow_run_id": owner.flow_run_id, "flow_run_name": owner.flow_run_name, "flow_name": owner.flow_name}
        metadata = {**metadata, **{name: value for name, value in about.items() if value}}
        environment, resources = make_runtime_env(spec.cluster), _entrypoint_resources(spec)
        self._unfollowed = (spec.cluster, submission_id)  # from here on the cluster may have it
        with job_modules(spec, self._folder) as modules:
            for tries in range(1, _SUBMISSIONS + 1):
                problem: Exception | None = None
                try:
                    client.submit(submission_id, ENTRYPOINT, metadata, environment, modules, resources)
                except (UnreachableError, RefusedError) as error:
                    problem = error
                # Whatever it said: what counts is whether the cluster has the job.
                job = self._ask(client, partial(client.job, submission_id))
                if job is not None:
                    self._follower.on_note(
                        f"The training runs as job {submission_id}; its log: {client.address}/#/jobs/{submission_id}"
                    )
                    return job
                if isinstance(problem, RefusedError):
                    self._unfollowed = None
                    raise problem
                self._follower.wait(2.0 * tries)
        raise AttemptFailedError(
            f"the job could not be submitted to {client.address}: {problem or 'nobody said why'}",
            outcome=Outcome.CLUSTER_LOST,
        )

    def _follow(
        self, client: JobClient, spec: DriverSpec, job: JobDetails, session: str, *, is_new: bool
    ) -> AttemptEnded | None:
        """Follow a job to its end; None if another job has to follow at once."""
        told_until = self._told_until.get(job.submission_id)
        if told_until is None and not is_new:
            told_until = self._follower.followed_until()
        if not is_new and not job.status.is_terminal():
            self._follower.on_note(
                f"The training runs as job {job.submission_id} already, which is followed from now on"
            )
        limit = spec.cluster.unreachable_timeout_seconds
        driver = JobDriver(self._follower, client, job, session, limit, told_until)
        try:
            ended = self._follower.follow(driver)
        finally:
            self._told_until[job.submission_id] = driver.told_until
        if driver.is_over:
            self._unfollowed = None
        if ended is None or is_new:
            return ended
        if job.status.is_terminal() and ended.outcome is not Outcome.COMPLETED:
            return None  # it told how an earlier attempt ended
        if ended.outcome is Outcome.SUPERSEDED:
            return None  # it was another process's, and this one may be who has the run now
        return ended

    def _leave(self, reason: BaseException, client: JobClient) -> None:
        """Leave a job, if there may be one, as the reason wants it: to itself, or ended."""
        if self._unfollowed is None:
            return
        if self._follower.detaches(reason):
            self._follower.on_note(
                f"The flow process ends, and job {self._unfollowed[1]} goes on in the cluster: the flow run follows it "
                "again when it is resumed"
            )
        else:
            self._end(lambda: client.is_posting)

    def _end(self, is_coming: Callable[[], bool] = lambda: False) -> None:
        """Stop the job that may go on, or whose submission is on its way."""
        assert self._unfollowed is not None
        cluster, submission_id = self._unfollowed
        try:
            with closing(JobClient(cluster)) as client:
                stop(client, submission_id, is_coming)
            self._unfollowed = None
        except (UnreachableError, RefusedError) as error:
            self._follower.on_note(
                f"Job {submission_id} could not be stopped ({error}); stop it with `ray job stop {submission_id}` when "
                "the cluster answers again"
            )

    def _ask(self, client: JobClient, ask: Callable[[], _T], seconds: float = _ASK_SECONDS) -> _T:
        """Ask, again and again for so long if there is no answer.

        Raises:
            UnreachableError: There was none.
        """
        began = time.monotonic()
        tell_at, pause = began + BLIND_SECONDS, 0.5
        while True:
            try:
                return ask()
            except UnreachableError as error:
                now = time.monotonic()
                if now - began > seconds:
                    raise
                if now > tell_at:
                    tell_at = now + BLIND_NOTE_SECONDS
                    self._follower.on_note(f"No Ray dashboard answers at {client.address} ({error}); it is waited for")
                self._follower.wait(pause)
                pause = min(2.0, 2 * pause)


def _metadata(spec: DriverSpec) -> dict[str, str]:
    """Return what tells the jobs of a run from all others."""
    return {
        _RUN: spec.request.run_name,
        _STORAGE: hashlib.sha256(spec.storage.uri.encode()).hexdigest()[:16],
        _OWNER: spec.request.owner.flow_run_id,
    }


def _prefix(metadata: dict[str, str]) -> str:
    """Return how the submission ids of a run begin; the number of the job follows."""
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode()).hexdigest()[:8]
    return f"elastic-train-{metadata[_RUN]}-{digest}-"


def _entrypoint_resources(spec: DriverSpec) -> dict[str, Any]:
    resources = dict(spec.cluster.driver_resources)
    given = {
        "entrypoint_num_cpus": resources.pop("CPU", None),
        "entrypoint_num_gpus": resources.pop("GPU", None),
        "entrypoint_memory": int(resources.pop("memory", 0)) or None,
        "entrypoint_resources": resources or None,
    }
    return {name: value for name, value in given.items() if value is not None}
