"""Running an attempt as a Ray job: found again, submitted, followed and ended over HTTP.

Only a job's own terminal state ends an attempt. A dashboard that does not answer says nothing about it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from prefect_elastic_train.core.events import AttemptEnded
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.spec import DriverSpec
from prefect_elastic_train.supervisor.jobs.api import (
    ClusterVersion,
    Job,
    JobsApi,
    NoDashboardError,
    UnreachableError,
)
from prefect_elastic_train.supervisor.jobs.following import BLIND_NOTE_SECONDS, BLIND_SECONDS, JobFollowing
from prefect_elastic_train.supervisor.jobs.package import ENTRYPOINT, forget_job, make_runtime_env
from prefect_elastic_train.supervisor.jobs.stopping import left_of, stop
from prefect_elastic_train.supervisor.jobs.submitting import run_submission, with_token, write_request

if TYPE_CHECKING:
    from prefect_elastic_train.supervisor.launch import Runtime

__all__ = ["JobLauncher", "check_version"]

_T = TypeVar("_T")

_TURN_SECONDS = 0.2
#: What is uploaded may be large, and the way slow.
_SUBMIT_SECONDS = 600.0
#: How long an id is looked up whose submission was cut short.
_RECOGNISE_SECONDS = 60.0
#: How long a resumed flow run waits for a cluster that it may have a job in.
_RESUMED_SECONDS = 300.0
#: A submission is tried so often; a job that needs another one at once is followed by so many.
_SUBMISSIONS = 5
_MOST_JOBS = 20

_RUN, _STORAGE, _OWNER = "elastic_train_run", "elastic_train_storage", "elastic_train_owner"


class JobLauncher:
    """Runs attempts of one training as jobs, one at a time.

    Args:
        runtime: The training's runtime, whose callbacks are told what happens.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        #: Whether the newest attempt is a job.
        self.in_use = False
        self._reached = False
        self._followed: set[str] = set()
        #: Up to which event each job was told of, in seconds since the epoch.
        self._told_until: dict[str, float] = {}
        #: A job that may go on although nobody follows it, and what it was submitted as.
        self._unfollowed: tuple[DriverSpec, str] | None = None

    def run_attempt(self, spec: DriverSpec, folder: Path, environment: dict[str, str]) -> AttemptEnded:
        """Follow the run's job to its end, the one that runs already or a new one.

        Args:
            spec: What the driver is told.
            folder: Private folder of the training.
            environment: For processes of this machine.

        Raises:
            AttemptFailedError: The cluster cannot be reached, or cannot run the driver.
        """
        api = JobsApi(spec.cluster)
        try:
            cluster = self._contact(api, spec)
            for _ in range(_MOST_JOBS):
                job, is_new = self._find_or_submit(api, spec, cluster, folder, environment)
                self._followed.add(job.submission_id)
                self._unfollowed = (spec, job.submission_id)
                ended = self._follow(api, spec, job, cluster, is_new=is_new)
                if ended is not None:
                    return ended
            return AttemptEnded(outcome=Outcome.DRIVER_LOST, message="one job after the other ended without a result")
        except BaseException as reason:
            if not isinstance(reason, Exception) or isinstance(reason, TimeoutError):
                self._leave(api, reason, folder, environment)
            raise
        finally:
            api.close()

    def end_unfollowed(self, folder: Path, environment: dict[str, str]) -> None:
        """Stop a job that an attempt has lost sight of, when no other attempt is to follow."""
        if self._unfollowed is None:
            return
        try:
            api = JobsApi(self._unfollowed[0].cluster)
        except AttemptFailedError:
            return
        try:
            self._end(api, folder, environment)
        finally:
            api.close()

    def _follow(
        self, api: JobsApi, spec: DriverSpec, job: Job, cluster: ClusterVersion, *, is_new: bool
    ) -> AttemptEnded | None:
        """Follow a job to its end; None if another job has to follow at once."""
        told_until = self._told_until.get(job.submission_id)
        if told_until is None:
            told_until = 0.0 if is_new else self._runtime.followed_until()
        following = JobFollowing(self._runtime, api, spec, job, cluster.session, told_until, is_new=is_new)
        try:
            ended = following.until_end()
        finally:
            following.leave()
            self._told_until[job.submission_id] = following.told_until
        if following.is_over:
            self._unfollowed = None
        if ended is None or is_new:
            return ended
        if job.is_terminal and ended.outcome is not Outcome.COMPLETED:
            return None  # it told how an earlier attempt ended
        if ended.outcome is Outcome.SUPERSEDED:
            return None  # it was another process's, and this one may be who has the run now
        return ended

    def _leave(self, api: JobsApi, reason: BaseException, folder: Path, environment: dict[str, str]) -> None:
        """Leave a job, if there may be one, as the reason wants it: to itself, or ended."""
        if self._unfollowed is None:
            return
        if self._runtime.detaches(reason):
            self._runtime.on_note(
                f"The flow process ends, and job {self._unfollowed[1]} goes on in the cluster: the flow run follows it "
                "again when it is resumed"
            )
        else:
            self._end(api, folder, environment)

    def _end(self, api: JobsApi, folder: Path, environment: dict[str, str]) -> None:
        """Stop the job that may go on, and see to it that nothing of it is left."""
        assert self._unfollowed is not None
        spec, submission_id = self._unfollowed
        try:
            ended = stop(api, submission_id, spec, folder, environment)
        except (UnreachableError, AttemptFailedError) as error:
            self._runtime.on_note(
                f"Job {submission_id} could not be stopped ({error}); stop it with `ray job stop {submission_id}` when "
                "the cluster answers again"
            )
            return
        self._unfollowed = None
        left = left_of(api, ended) if ended is not None else []
        if left:
            self._runtime.on_note(f"Job {submission_id} has ended, and of it is left: {'; '.join(left[:10])}")

    def _contact(self, api: JobsApi, spec: DriverSpec) -> ClusterVersion:
        """Wait until the cluster answers.

        Raises:
            AttemptFailedError: It does not, or it refuses us.
        """
        limit = spec.cluster.connect_timeout_seconds
        if spec.request.resumed:
            limit = max(limit, min(spec.cluster.unreachable_timeout_seconds, _RESUMED_SECONDS))
        if self._reached:
            limit = max(limit, spec.cluster.unreachable_timeout_seconds)
        known = self._reached or spec.request.resumed
        began = time.monotonic()
        tell_at = began + BLIND_SECONDS
        while True:
            self._runtime.check_stop()
            self._runtime.keep_guarded()
            try:
                found = api.version()
                api.jobs()  # the version is told to everybody
                self._reached = True
                return found
            except (UnreachableError, NoDashboardError) as error:
                if isinstance(error, NoDashboardError) and not known:
                    raise
                now = time.monotonic()
                if now - began > limit:
                    raise AttemptFailedError(
                        f"no Ray dashboard answers at {api.address} ({error}; tried for {limit:g} s). Correct the "
                        "address of the RayCluster, or see whether the head of the cluster is up",
                        outcome=Outcome.CLUSTER_LOST,
                        # What was never there is more likely misspelt than lost: no retry heals that.
                        final=not known,
                    ) from error
                if now > tell_at:
                    tell_at = now + BLIND_NOTE_SECONDS
                    self._runtime.on_note(f"No Ray dashboard answers at {api.address} ({error}); it is waited for")
                time.sleep(0.5 if now - began < BLIND_SECONDS else 2.0)

    def _find_or_submit(
        self, api: JobsApi, spec: DriverSpec, cluster: ClusterVersion, folder: Path, environment: dict[str, str]
    ) -> tuple[Job, bool]:
        """Give the job that trains, and whether it was submitted just now."""
        metadata = _metadata(spec)
        prefix = _prefix(metadata)

        def own_jobs() -> list[Job]:
            return [job for job in api.jobs() if metadata.items() <= job.metadata.items()]

        found = self._patiently(own_jobs)
        for job in found:
            if not job.is_terminal:
                return job, False
        newest = max(found, key=lambda job: job.started_at, default=None)
        if newest is not None and newest.status == "SUCCEEDED" and newest.submission_id not in self._followed:
            return newest, False
        check_version(api, cluster)
        number = 1 + max((_number(job.submission_id, prefix) for job in found), default=0)
        return self._submit(api, spec, f"{prefix}{number}", metadata, folder, environment), True

    def _submit(
        self,
        api: JobsApi,
        spec: DriverSpec,
        submission_id: str,
        metadata: dict[str, str],
        folder: Path,
        environment: dict[str, str],
    ) -> Job:
        """Submit a job, and recognise it if the answer was lost."""
        request = folder / "request.json"
        owner = spec.request.owner.model_copy(update={"job": submission_id})
        spec = replace(spec, request=replace(spec.request, owner=owner))
        about = {"flow_run_id": owner.flow_run_id, "flow_run_name": owner.flow_run_name, "flow_name": owner.flow_name}
        write_request(
            request,
            spec.cluster,
            entrypoint=ENTRYPOINT,
            submission_id=submission_id,
            runtime_env=make_runtime_env(spec, folder),
            metadata={**metadata, **{name: value for name, value in about.items() if value}},
            resources=_entrypoint_resources(spec),
        )
        environment = with_token(environment, spec.cluster, folder)
        self._unfollowed = (spec, submission_id)  # from here on the cluster may have it
        try:
            return self._submit_as(request, api, submission_id, environment)
        finally:
            request.unlink(missing_ok=True)
            forget_job(folder)

    def _submit_as(self, request: Path, api: JobsApi, submission_id: str, environment: dict[str, str]) -> Job:
        deadline = time.monotonic() + _SUBMIT_SECONDS
        said = ""
        for tries in range(1, _SUBMISSIONS + 1):
            code, said = run_submission(request, environment, deadline, self._between)
            # Whatever it said: what counts is whether the cluster has the job.
            job = self._patiently(lambda: api.job(submission_id))
            if job is not None:
                self._runtime.on_note(
                    f"The training runs as job {submission_id}; its log: {api.address}/#/jobs/{submission_id}"
                )
                return job
            if code == 2:
                self._unfollowed = None
                raise AttemptFailedError(f"Ray does not accept the job: {said}", outcome=Outcome.INVALID)
            if time.monotonic() > deadline:
                break
            self._wait(2.0 * tries)
        raise AttemptFailedError(
            f"the job could not be submitted to {api.address}: {said or 'nobody said why'}",
            outcome=Outcome.CLUSTER_LOST,
        )

    def _between(self) -> None:
        self._runtime.check_stop()
        self._runtime.keep_guarded()

    def _patiently(self, ask: Callable[[], _T]) -> _T:
        """Ask, again and again for a while if there is no answer."""
        deadline = time.monotonic() + _RECOGNISE_SECONDS
        pause = 0.5
        while True:
            try:
                return ask()
            except UnreachableError as error:
                if time.monotonic() > deadline:
                    raise AttemptFailedError(
                        f"the dashboard does not answer any more: {error}", outcome=Outcome.CLUSTER_LOST
                    ) from error
                self._wait(pause)
                pause = min(5.0, 2 * pause)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._between()
            time.sleep(_TURN_SECONDS)


def check_version(api: JobsApi, cluster: ClusterVersion) -> None:
    """Refuse a cluster that cannot run the driver.

    Raises:
        AttemptFailedError: Its Ray is another one; outcome ``invalid``.
    """
    own = version("ray")
    if cluster.ray.split(".")[:2] != own.split(".")[:2]:
        raise AttemptFailedError(
            f"the cluster at {api.address} runs Ray {cluster.ray} and the flow Ray {own}; use the same minor version",
            outcome=Outcome.INVALID,
        )


def _metadata(spec: DriverSpec) -> dict[str, str]:
    """Give what tells the jobs of a run from all others."""
    return {
        _RUN: spec.request.run_name,
        _STORAGE: hashlib.sha256(spec.storage.uri.encode()).hexdigest()[:16],
        _OWNER: spec.request.owner.flow_run_id,
    }


def _prefix(metadata: dict[str, str]) -> str:
    """Give how the submission ids of a run begin; what follows is the how manieth job of it is meant."""
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode()).hexdigest()[:8]
    return f"elastic-train-{metadata[_RUN]}-{digest}-"


def _number(submission_id: str, prefix: str) -> int:
    rest = submission_id.removeprefix(prefix)
    return int(rest) if submission_id.startswith(prefix) and rest.isdigit() else 0


def _entrypoint_resources(spec: DriverSpec) -> dict[str, Any]:
    resources = dict(spec.cluster.driver_resources)
    given = {
        "entrypoint_num_cpus": resources.pop("CPU", None),
        "entrypoint_num_gpus": resources.pop("GPU", None),
        "entrypoint_memory": resources.pop("memory", None),
        "entrypoint_resources": resources or None,
    }
    return {name: value for name, value in given.items() if value is not None}
