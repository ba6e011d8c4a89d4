"""Running an attempt as a Ray job: found again, submitted, followed and ended over HTTP.

Only a job's own terminal state ends an attempt. A dashboard that does not answer says nothing about it.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from prefect_elastic_train.driver.cluster import write_token
from prefect_elastic_train.driver.events import AttemptEnded, Event
from prefect_elastic_train.driver.following import AttemptAccount
from prefect_elastic_train.driver.jobs.api import Job, JobsApi, UnreachableError, token_of
from prefect_elastic_train.driver.jobs.log import JobLog
from prefect_elastic_train.driver.jobs.package import ENTRYPOINT, end_pending, forget_job, make_runtime_env
from prefect_elastic_train.driver.spec import DriverSpec
from prefect_elastic_train.outcomes import AttemptFailedError, Outcome

if TYPE_CHECKING:
    from prefect_elastic_train.driver.launch import Runtime

__all__ = ["JobLauncher"]

_T = TypeVar("_T")

_TURN_SECONDS = 0.2
_STATUS_SECONDS = 2.0
_SLOWEST_STATUS_SECONDS = 15.0
#: What is uploaded may be large, and the way slow.
_SUBMIT_SECONDS = 600.0
#: How long an id is looked up whose submission was cut short.
_RECOGNISE_SECONDS = 60.0
_STOP_SECONDS = 20.0
#: How long a job that is stopped may be pending before it is ended in another way.
_PENDING_SECONDS = 1.5
_LEFT_SECONDS = 8.0
_LAST_LINES_SECONDS = 30.0
#: A cluster that was asked this often, in a row, does not know the job.
_GONE_LOOKS = 2
_BLIND_NOTE_SECONDS = 300.0
_OUTPUT_QUEUE = 10_000

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
            session = self._contact(api, spec)
            job, is_new = self._find_or_submit(api, spec, folder, environment)
            self._followed.add(job.submission_id)
            following = _Following(self._runtime, api, spec, job, session, is_new=is_new)
            try:
                return following.until_end()
            except BaseException as reason:
                following.leave()
                if self._runtime.detaches(reason):
                    self._runtime.on_note(
                        f"The flow process ends, and job {job.submission_id} goes on in the cluster: the flow run "
                        "follows it again when it is resumed"
                    )
                else:
                    self._end(api, spec, job, folder, environment)
                raise
        finally:
            api.close()

    def _contact(self, api: JobsApi, spec: DriverSpec) -> str:
        """Wait until the cluster answers, and give its session's name.

        Raises:
            AttemptFailedError: It does not, it refuses us, or it runs another Ray.
        """
        limit = spec.cluster.connect_timeout_seconds
        deadline = time.monotonic() + limit
        while True:
            self._runtime.check_stop()
            try:
                found = api.version()
                api.jobs()  # the version is told to everybody
                break
            except UnreachableError as error:
                if time.monotonic() > deadline:
                    raise AttemptFailedError(
                        f"no Ray dashboard answers at {api.address} ({error}; tried for {limit:g} s). Correct the "
                        "address of the RayCluster, or see whether the head of the cluster is up",
                        outcome=Outcome.CLUSTER_LOST,
                        # What was never there is more likely misspelt than lost: no retry heals that.
                        final=not (self._reached or spec.resumed),
                    ) from error
                time.sleep(0.5)
        own = version("ray")
        if found.ray.split(".")[:2] != own.split(".")[:2]:
            raise AttemptFailedError(
                f"the cluster at {api.address} runs Ray {found.ray} and the flow Ray {own}; use the same minor version",
                outcome=Outcome.INVALID,
            )
        self._reached = True
        return found.session

    def _find_or_submit(
        self, api: JobsApi, spec: DriverSpec, folder: Path, environment: dict[str, str]
    ) -> tuple[Job, bool]:
        """Give the job that trains, and whether it was submitted just now."""
        metadata = _metadata(spec)
        prefix = _prefix(spec)

        def own_jobs() -> list[Job]:
            return [job for job in api.jobs() if metadata.items() <= job.metadata.items()]

        found = self._patiently(own_jobs)
        for job in found:
            if not job.is_terminal:
                return job, False
        newest = max(found, key=lambda job: job.started_at, default=None)
        if newest is not None and newest.status == "SUCCEEDED" and newest.submission_id not in self._followed:
            return newest, False
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
        owner = spec.owner.model_copy(update={"job": submission_id})
        spec = replace(spec, owner=owner)
        about = {"flow_run_id": owner.flow_run_id, "flow_run_name": owner.flow_run_name, "flow_name": owner.flow_name}
        _write_request(
            request,
            spec,
            entrypoint=ENTRYPOINT,
            submission_id=submission_id,
            runtime_env=make_runtime_env(spec, folder),
            metadata={**metadata, **{name: value for name, value in about.items() if value}},
            resources=_entrypoint_resources(spec),
        )
        environment = _with_token(environment, spec, folder)
        try:
            return self._submit_as(request, api, submission_id, environment)
        finally:
            request.unlink(missing_ok=True)
            forget_job(folder)

    def _submit_as(self, request: Path, api: JobsApi, submission_id: str, environment: dict[str, str]) -> Job:
        deadline = time.monotonic() + _SUBMIT_SECONDS
        problem = ""
        while True:
            code, said = _run_submission(request, environment, deadline, self._between)
            if code == 2:
                raise AttemptFailedError(f"Ray does not accept the job: {said}", outcome=Outcome.INVALID)
            # Whatever it said: what counts is whether the cluster has the job.
            job = self._patiently(lambda: api.job(submission_id))
            if job is not None:
                self._runtime.on_note(
                    f"The training runs as job {submission_id}; its log: {api.address}/#/jobs/{submission_id}"
                )
                return job
            problem = said or problem
            if time.monotonic() > deadline or "status code 4" in problem:
                raise AttemptFailedError(
                    f"the job could not be submitted to {api.address}: {problem}", outcome=Outcome.CLUSTER_LOST
                )
            self._wait(2.0)

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
            self._runtime.check_stop()
            time.sleep(_TURN_SECONDS)

    def _end(self, api: JobsApi, spec: DriverSpec, job: Job, folder: Path, environment: dict[str, str]) -> None:
        """Stop a job, and see to it that nothing of it is left."""
        note = self._runtime.on_note

        def end_pending_job() -> None:
            request = folder / "request.json"
            _write_request(
                request,
                spec,
                entrypoint=end_pending(job.submission_id),
                submission_id=f"{job.submission_id}-end",
                runtime_env={},
                metadata={},
                resources={},
            )
            _run_submission(
                request, _with_token(environment, spec, folder), time.monotonic() + _STOP_SECONDS / 2, lambda: None
            )
            request.unlink(missing_ok=True)

        try:
            ended = _stop(api, job.submission_id, end_pending_job)
        except (UnreachableError, AttemptFailedError) as error:
            note(
                f"Job {job.submission_id} could not be stopped ({error}); stop it with `ray job stop "
                f"{job.submission_id}` when the cluster answers again"
            )
            return
        if ended is None or not ended.job_id:
            return
        left: list[str] = []
        deadline = time.monotonic() + _LEFT_SECONDS
        while time.monotonic() < deadline:
            try:
                left = api.left_of(ended.job_id)
            except (UnreachableError, AttemptFailedError, KeyError, TypeError) as error:
                left = [f"what is left cannot be asked ({error})"]
            if not left:
                return
            time.sleep(0.5)
        note(f"Job {job.submission_id} has ended, and of it is left: {'; '.join(left[:10])}")


def _run_submission(
    request: Path, environment: dict[str, str], deadline: float, between: Callable[[], None]
) -> tuple[int, str]:
    """Run Ray's client in a process of its own; the exit code 1 says that nobody knows what became of it."""
    with subprocess.Popen(
        [sys.executable, "-m", "prefect_elastic_train.driver.jobs.submit", str(request)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            while time.monotonic() < deadline:
                between()
                try:
                    output, _ = process.communicate(timeout=_TURN_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
                return process.returncode, output.decode(errors="replace").strip()[-2000:]
            return 1, "Ray's client did not come to an end"
        finally:
            process.kill()


def _write_request(path: Path, spec: DriverSpec, **request: Any) -> None:
    path.write_text(json.dumps({"address": spec.cluster.address, "verify": _verify(spec), **request}))


def _with_token(environment: dict[str, str], spec: DriverSpec, folder: Path) -> dict[str, str]:
    """Give the environment of Ray's client, with the token in a file."""
    token = token_of(spec.cluster)
    kept = {name: value for name, value in environment.items() if name != "RAY_AUTH_TOKEN"}
    return {**kept, **(write_token(token, folder) if token else {})}


def _stop(api: JobsApi, submission_id: str, end_pending_job: Callable[[], None] = lambda: None) -> Job | None:
    """Stop a job and wait until it has ended; None if the cluster does not know it.

    Args:
        api: The dashboard.
        submission_id: The job.
        end_pending_job: Ends one that has not started after some seconds, which Ray's stop does not.

    Raises:
        UnreachableError: It does not end, or the cluster does not answer, for so long.
    """
    deadline = time.monotonic() + _STOP_SECONDS
    pending_until = time.monotonic() + _PENDING_SECONDS
    asked = False
    while True:
        try:
            if not asked:
                api.stop(submission_id)
                asked = True
            job = api.job(submission_id)
            if job is None or job.is_terminal:
                return job
            problem = f"it is still {job.status}"
            if job.status == "PENDING" and time.monotonic() > pending_until:
                pending_until = deadline
                end_pending_job()
        except UnreachableError as error:
            problem = str(error)
        if time.monotonic() > deadline:
            raise UnreachableError(problem)
        time.sleep(0.5)


class _StatusWatch:
    """Asks after a job now and then, in a thread of its own: a request may take long, and a stop must not wait."""

    def __init__(self, api: JobsApi, job: Job, session: str) -> None:
        self.job = job
        #: Why the job is gone, empty as long as it is not known to be.
        self.gone = ""
        self.reached_at = time.monotonic()
        self.problem = ""
        self._api = api
        self._session = session
        self._missed = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic-train-job-status", daemon=True)
        self._thread.start()

    @property
    def blind_seconds(self) -> float:
        """For how long nothing was heard of the job."""
        return time.monotonic() - self.reached_at

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        pause = _STATUS_SECONDS
        while not self._stopped.is_set():
            try:
                self._look()
                pause = _STATUS_SECONDS
            except Exception as error:  # noqa: BLE001 - a refusal, too: what is known of the job stays what it is
                self.problem = str(error)
                pause = min(_SLOWEST_STATUS_SECONDS, 1.5 * pause)
            self._stopped.wait(pause)

    def _look(self) -> None:
        found = self._api.job(self.job.submission_id)
        if found is None:
            session = self._api.version().session
            self._missed += 1
            if session != self._session and self._session and session:
                self.gone = "the cluster was started anew, and knows nothing of the job"
            elif self._missed >= _GONE_LOOKS:
                self.gone = "the cluster does not know the job any more"
        else:
            self.job = found
            self._missed = 0
        self.reached_at = time.monotonic()
        self.problem = ""


class _Following:
    """Follows a job until it has ended."""

    def __init__(
        self, runtime: Runtime, api: JobsApi, spec: DriverSpec, job: Job, session: str, *, is_new: bool
    ) -> None:
        self._runtime = runtime
        self._api = api
        self._spec = spec
        self._watch = _StatusWatch(api, job, session)
        self._account = AttemptAccount()
        self._lines: queue.Queue[bytes] = queue.Queue(maxsize=_OUTPUT_QUEUE)
        self._log: JobLog | None = None
        #: What was said before is not said again.
        self._known_until = 0.0 if is_new else runtime.followed_until()
        self._past = not is_new
        self._passed_over = 0
        self._pending_since = time.monotonic()
        self._pending_told = ""
        self._blind_told_at = 0.0
        if not is_new:
            runtime.on_note(f"The training runs as job {job.submission_id} already, which is followed from now on")

    def until_end(self) -> AttemptEnded:
        """Follow; end a job whose driver hangs."""
        looked_at = 0.0
        while True:
            if time.monotonic() - looked_at >= _TURN_SECONDS:
                looked_at = time.monotonic()
                self._runtime.check_stop()
                self._runtime.keep_guarded()
                ended = self._look_after()
                if ended is not None:
                    return ended
            self._take_lines(_TURN_SECONDS)

    def leave(self) -> None:
        """Ask and read no more."""
        self._watch.stop()
        if self._log is not None:
            self._log.stop()

    def _look_after(self) -> AttemptEnded | None:
        job = self._watch.job
        if self._watch.gone:
            self.leave()
            return self._account.ended or self._account.given_up(
                Outcome.CLUSTER_LOST, f"job {job.submission_id}: {self._watch.gone}"
            )
        if self._log is None and job.driver_node_id:
            self._log = JobLog(self._api, job, self._lines.put)
            self._log.start()
            self._account.seen_alive()
        if job.is_terminal:
            return self._last_word(job)
        if self._tell_blindness():
            limit = self._spec.cluster.unreachable_timeout_seconds
            self.leave()
            return self._account.given_up(
                Outcome.CLUSTER_LOST,
                f"the dashboard at {self._api.address} did not answer for {limit:g} s ({self._watch.problem}); job "
                f"{job.submission_id} may go on, and the next attempt looks for it",
            )
        if job.status == "PENDING":
            self._tell_pending(job)
        if self._log is None or not self._log.is_connected or job.status == "PENDING":
            self._account.seen_alive()  # or dead: nobody can say
            return None
        hung = self._account.hung(self._runtime.settings.liveness_timeout_seconds)
        if hung is not None:
            self.leave()
            try:
                _stop(self._api, job.submission_id)
            except (UnreachableError, AttemptFailedError) as error:
                self._runtime.on_note(f"Job {job.submission_id}, whose driver hangs, could not be stopped: {error}")
        return hung

    def _tell_blindness(self) -> bool:
        """Tell that nothing is heard of the job, and whether that has lasted for too long."""
        blind = self._watch.blind_seconds
        if blind < 2 * _SLOWEST_STATUS_SECONDS:
            if self._blind_told_at:
                self._runtime.on_note("The dashboard answers again")
            self._blind_told_at = 0.0
            return False
        now = time.monotonic()
        if not self._blind_told_at or now - self._blind_told_at > _BLIND_NOTE_SECONDS:
            self._blind_told_at = now
            self._runtime.on_note(
                f"The dashboard has not answered for {blind:.0f} s ({self._watch.problem or 'no answer'}): job "
                f"{self._watch.job.submission_id} may go on unseen, and is asked after again and again"
            )
        return blind > self._spec.cluster.unreachable_timeout_seconds

    def _tell_pending(self, job: Job) -> None:
        if job.message != self._pending_told and time.monotonic() - self._pending_since > 10:
            self._pending_told = job.message
            self._runtime.on_note(f"Job {job.submission_id} has not started yet: {job.message}")

    def _take_lines(self, seconds: float) -> None:
        """Take in what has come, at most for so long."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                self._take(self._lines.get(timeout=left))
            except queue.Empty:
                return

    def _take(self, line: bytes) -> None:
        said = self._account.take(line)
        if isinstance(said, str):
            if self._past:
                self._passed_over += 1
            else:
                self._runtime.on_line("driver", said)
            return
        if self._past and said.at > self._known_until:
            self._past = False
            if self._passed_over:
                self._runtime.on_note(
                    f"{self._passed_over} lines of output from before are in the job's log only: "
                    f"{self._api.address}/#/jobs/{self._watch.job.submission_id}"
                )
        self._tell(said)

    def _tell(self, event: Event) -> None:
        if self._past:
            self._runtime.on_past_event(event)
        else:
            self._runtime.on_event(event)

    def _last_word(self, job: Job) -> AttemptEnded:
        """Read the log to its end, and say how the attempt ended."""
        if not job.driver_node_id:
            self.leave()
            return self._without_a_word(job)
        if self._log is None:
            self._log = JobLog(self._api, job, self._lines.put)
        done = self._log.finish(_LAST_LINES_SECONDS)
        deadline = time.monotonic() + 2 * _LAST_LINES_SECONDS
        while not (done.is_set() and self._lines.empty()) and time.monotonic() < deadline:
            self._runtime.check_stop()
            self._take_lines(0.05)
        self.leave()
        ended = self._account.ended
        if ended is None or (job.status == "STOPPED" and ended.outcome.retryable):
            return self._without_a_word(job)
        return ended

    def _without_a_word(self, job: Job) -> AttemptEnded:
        told = f"job {job.submission_id} is {job.status}: {job.message}"
        if job.status == "STOPPED":
            return self._account.given_up(
                Outcome.CANCELLED, f"job {job.submission_id} was stopped, but not by this flow run"
            )
        if "runtime_env" in job.message.lower() and not job.job_id:
            return self._account.given_up(
                Outcome.INVALID, f"the cluster cannot set up the runtime environment of {told}"
            )
        return self._account.given_up(Outcome.DRIVER_LOST, f"the driver was lost: {told}")


def _metadata(spec: DriverSpec) -> dict[str, str]:
    """Give what tells the jobs of a run from all others."""
    return {
        _RUN: spec.run_name,
        _STORAGE: hashlib.sha256(spec.storage.uri.encode()).hexdigest()[:16],
        _OWNER: spec.owner.flow_run_id,
    }


def _prefix(spec: DriverSpec) -> str:
    """Give how the submission ids of a run begin; what follows is the how manieth job of it is meant."""
    digest = hashlib.sha256(json.dumps(_metadata(spec), sort_keys=True).encode()).hexdigest()[:8]
    return f"elastic-train-{spec.run_name}-{digest}-"


def _number(submission_id: str, prefix: str) -> int:
    rest = submission_id.removeprefix(prefix)
    return int(rest) if submission_id.startswith(prefix) and rest.isdigit() else 0


def _verify(spec: DriverSpec) -> bool | str:
    if not spec.cluster.verify_tls:
        return False
    return os.path.expanduser(spec.cluster.ca_bundle) or True


def _entrypoint_resources(spec: DriverSpec) -> dict[str, Any]:
    resources = dict(spec.cluster.driver_resources)
    given = {
        "entrypoint_num_cpus": resources.pop("CPU", None),
        "entrypoint_num_gpus": resources.pop("GPU", None),
        "entrypoint_memory": resources.pop("memory", None),
        "entrypoint_resources": resources or None,
    }
    return {name: value for name, value in given.items() if value is not None}
