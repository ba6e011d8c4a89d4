"""Running an attempt as a Ray job: found again or submitted, followed, and stopped, over HTTP."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import tenacity
from ray.job_submission import JobDetails

from prefect_elastic_train.core.events import AttemptEnded
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.settings import ClusterSettings
from prefect_elastic_train.core.spec import DriverSpec
from prefect_elastic_train.supervisor.attempt import Follower
from prefect_elastic_train.supervisor.job_client import JobClient, RefusedError, UnreachableError
from prefect_elastic_train.supervisor.job_driver import JobDriver, stop
from prefect_elastic_train.supervisor.job_package import ENTRYPOINT, job_package, make_runtime_env

_T = TypeVar("_T")

#: How long a dashboard that has answered is asked again.
_ASK_SECONDS = 60.0
#: A submission is tried so often; a job that needs another one at once is followed by so many.
_SUBMISSIONS, _MOST_JOBS = 5, 20
_RUN, _STORAGE, _OWNER = "elastic_train_run", "elastic_train_storage", "elastic_train_owner"


class JobLauncher:
    """Runs attempts of one training as jobs, one at a time, and packs them in its private folder."""

    def __init__(self, follower: Follower, folder: Path) -> None:
        self._follower = follower
        self._folder = folder
        self._reached = False
        #: Up to which event the jobs were told of, in seconds since the epoch.
        self._told_until = 0.0
        #: A job that may go on although nobody follows it, and where.
        self._unfollowed: tuple[ClusterSettings, str] | None = None

    def run_attempt(self, spec: DriverSpec) -> AttemptEnded:
        """Follow the run's job to its end, the one that runs already or a new one.

        Raises:
            AttemptFailedError: The cluster cannot be reached, or cannot run the driver.
        """
        client = JobClient(spec.cluster)
        try:
            for _ in range(_MOST_JOBS):
                ended = self._run_job(client, spec)
                if ended is not None:
                    return ended
            return AttemptEnded(outcome=Outcome.DRIVER_LOST, message="one job after the other ended without a result")
        except UnreachableError as error:
            raise AttemptFailedError(
                f"the dashboard does not answer any more: {error}", outcome=Outcome.CLUSTER_LOST
            ) from error
        except BaseException as reason:
            if self._unfollowed is not None and (not isinstance(reason, Exception) or isinstance(reason, TimeoutError)):
                if not self._follower.detaches(reason):
                    self.end_unfollowed()
                else:
                    self._follower.on_note(
                        f"The flow process ends, and job {self._unfollowed[1]} goes on in the cluster: the flow run "
                        "follows it again when it is resumed"
                    )
            raise

    def end_unfollowed(self) -> None:
        """Stop a job that may go on, or whose submission is on its way, although nobody follows it."""
        if self._unfollowed is None:
            return
        cluster, submission_id = self._unfollowed
        try:
            stop(JobClient(cluster), submission_id)
            self._unfollowed = None
        except (UnreachableError, RefusedError) as error:
            self._follower.on_note(
                f"Job {submission_id} could not be stopped ({error}); stop it with `ray job stop {submission_id}` when "
                "the cluster answers again"
            )

    def _list(self, client: JobClient, spec: DriverSpec) -> list[JobDetails]:
        """Wait until the cluster answers, and return its jobs.

        Raises:
            AttemptFailedError: It does not, or it refuses us.
        """
        cluster, is_known = spec.cluster, self._reached or spec.request.resumed
        limit = cluster.unreachable_timeout_seconds if is_known else cluster.connect_timeout_seconds
        try:
            jobs = self._ask(client.jobs, limit)
        except UnreachableError as error:
            raise AttemptFailedError(
                f"no Ray dashboard answers at {client.address} ({error}; tried for {limit:g} s). Correct the "
                "address of the RayCluster, or see whether the head of the cluster is up",
                outcome=Outcome.CLUSTER_LOST,
                # What was never there is more likely misspelt than lost: no retry heals that.
                final=not is_known,
            ) from error
        self._reached = True
        return jobs

    def _run_job(self, client: JobClient, spec: DriverSpec) -> AttemptEnded | None:
        """Follow the job that trains, or a new one, to its end; None if another one has to follow at once."""
        metadata = _metadata(spec)
        own = [job for job in self._list(client, spec) if metadata.items() <= (job.metadata or {}).items()]
        found = next((job for job in own if not job.status.is_terminal()), None)
        if found is None:
            prefix = f"elastic-train-{spec.request.run_name}-{_digest(json.dumps(metadata, sort_keys=True))[:8]}-"
            number = max((int(job.submission_id.removeprefix(prefix)) for job in own), default=0) + 1
            job, told_until = self._submit(client, spec, f"{prefix}{number}", metadata), 0.0
            how = "The training runs as job {}; its log: {}"
        else:
            job, told_until = found, self._told_until or self._follower.followed_until()
            how = "The training runs as job {} already, which is followed from now on; its log: {}"
        self._follower.on_note(how.format(job.submission_id, f"{client.address}/#/jobs/{job.submission_id}"))
        self._unfollowed = (spec.cluster, job.submission_id)
        driver = JobDriver(self._follower, client, job, spec.cluster.unreachable_timeout_seconds, told_until)
        try:
            ended = self._follower.follow(driver)
        finally:
            self._told_until = driver.told_until
        if driver.is_over:
            self._unfollowed = None
        if found is not None and ended is not None and ended.outcome is Outcome.SUPERSEDED:
            return None  # it was another process's, and this one may be who has the run now
        return ended

    def _submit(self, client: JobClient, spec: DriverSpec, submission_id: str, metadata: dict[str, str]) -> JobDetails:
        """Submit a job, and recognise it if the answer was lost."""
        self._ask(client.check_version)  # not before: a job that trains already is followed whatever Ray it has
        owner = spec.request.owner.model_copy(update={"job": submission_id})
        spec = replace(spec, request=replace(spec.request, owner=owner))
        about = {"flow_run_id": owner.flow_run_id, "flow_run_name": owner.flow_run_name, "flow_name": owner.flow_name}
        metadata = {**metadata, **{name: value for name, value in about.items() if value}}
        environment, resources = make_runtime_env(spec.cluster), _entrypoint_resources(spec)
        self._unfollowed = (spec.cluster, submission_id)  # from here on the cluster may have it
        with job_package(spec, self._folder) as package:
            for tries in range(1, _SUBMISSIONS + 1):
                self._follower.turn()
                problem: Exception | None = None
                try:
                    client.submit(submission_id, ENTRYPOINT, metadata, environment, package, resources)
                except (UnreachableError, RefusedError) as error:
                    problem = error
                # Whatever it said: what counts is whether the cluster has the job.
                job = self._ask(partial(client.job, submission_id))
                if job is not None:
                    return job
                if isinstance(problem, RefusedError):
                    self._unfollowed = None
                    raise problem
                self._follower.wait(2.0 * tries)
        raise AttemptFailedError(
            f"the job could not be submitted to {client.address}: {problem or 'nobody said why'}",
            outcome=Outcome.CLUSTER_LOST,
        )

    def _ask(self, ask: Callable[[], _T], seconds: float = _ASK_SECONDS) -> _T:
        """Ask, again and again for so long if there is no answer; raises `UnreachableError` if there was none."""

        def note(tries: tenacity.RetryCallState) -> None:
            if tries.attempt_number == 1 and tries.outcome is not None:
                self._follower.on_note(f"No Ray dashboard answers ({tries.outcome.exception()}); it is waited for")

        return tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(UnreachableError),
            stop=tenacity.stop_after_delay(seconds),
            wait=tenacity.wait_exponential(multiplier=0.5, max=2.0),
            sleep=self._follower.wait,
            before_sleep=note,
            reraise=True,
        )(ask)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _metadata(spec: DriverSpec) -> dict[str, str]:
    """Return what tells the jobs of a run from all others."""
    return {
        _RUN: spec.request.run_name,
        _STORAGE: _digest(spec.storage.uri)[:16],
        _OWNER: spec.request.owner.flow_run_id,
    }


def _entrypoint_resources(spec: DriverSpec) -> dict[str, Any]:
    resources = dict(spec.cluster.driver_resources)
    given = {
        "entrypoint_num_cpus": resources.pop("CPU", None),
        "entrypoint_num_gpus": resources.pop("GPU", None),
        "entrypoint_memory": int(resources.pop("memory", 0)) or None,
        "entrypoint_resources": resources or None,
    }
    return {name: value for name, value in given.items() if value is not None}
