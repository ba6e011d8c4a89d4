"""A driver that runs as a Ray job: submitted or found, followed by its status and its log, and stopped, over HTTP.

Only the end of the job ends an attempt. While the dashboard does not answer, the state of the job is unknown.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import InitVar, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

from ray.job_submission import JobDetails

from prefect_elastic_train.core.events import EVENT_TAG, AttemptEnded, Event
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.request import DriverSpec
from prefect_elastic_train.core.size_limits import whole_lines
from prefect_elastic_train.core.time_limits import JOB_STOP_SECONDS

from .driver_handle import NO_FINAL_EVENT, DriverHandle
from .job_client import JobClient, RefusedError, UnknownJobError, UnreachableError, job_package

_T = TypeVar("_T")

#: Time for which a submission that does not arrive is repeated.
_SUBMIT_SECONDS = 60.0
#: Time without an answer, or without a start of the job, after which a note is logged.
NOTE_SECONDS = 30.0
#: Time between two requests for the state of a job.
_REQUEST_INTERVAL_SECONDS = 1.0
#: Time for which reading the end of an ended job's log is repeated.
_LOG_END_SECONDS = 60.0
#: Longest time from a driver's final event to the end of its job.
_JOB_EXIT_SECONDS = 30.0
#: Time within which a submission that was cut short may still arrive.
_STOP_UNKNOWN_SECONDS = 5.0
#: Lines before the end of a log at which reading starts at least.
_MIN_LINES = 100


@dataclass
class JobDriver(DriverHandle):
    """A driver that runs as a Ray job.

    Args:
        _wait: Waits for some seconds, and checks meanwhile that the flow run goes on.
        _folder: The private folder, in which the job's package is made.
        previous: The driver of the previous attempt in this process.
    """

    _wait: Callable[[float], None]
    _spec: DriverSpec
    _folder: Path
    previous: InitVar[JobDriver | None]

    # Without annotations, which would make them parameters.
    _is_unknown = False  # True once the cluster has answered that it does not know the job
    _log_is_complete = False
    _problem = "no answer"
    _last_note = ""

    def __post_init__(self, previous: JobDriver | None) -> None:
        super().__post_init__()
        self._client = JobClient(self._spec.cluster)
        #: True once the dashboard has answered: then its address is not misspelt. Without an answer no attempt follows.
        self._has_answered = self._spec.request.resumed or previous is not None
        #: Id of a job that may still run; empty for none.
        self._running_id: str = previous._running_id if previous else ""
        #: Time of the newest event that the flow run has received, in seconds since the epoch.
        self._received_until: float = previous._received_until if previous else 0.0
        self._log = JobLog(self._client)

    def start(self) -> None:
        """Find the Ray job that already trains the run, or submit a new job.

        Raises:
            AttemptFailedError: The dashboard does not answer, the cluster refuses the job, or a job trains the run with
                another ``train_loop_config``.
        """
        request = self._spec.request
        cluster = self._spec.cluster
        name = re.sub(r"[^\w.-]", "-", request.run_name)
        identity = _digest([request.run_name, self._spec.storage.uri, request.owner.flow_run_id])
        prefix = f"elastic-train-{name}-{identity[:12]}-"
        config = _digest(request.fingerprint.config)
        limit = cluster.unreachable_timeout_seconds if self._has_answered else cluster.connect_timeout_seconds
        own_jobs = [
            job for job in self._retry(self._client.submitted_jobs, limit) if job.submission_id.startswith(prefix)
        ]
        running = next((job for job in own_jobs if not job.status.is_terminal()), None)
        self._was_running = bool(running)
        if running:
            if (running.metadata or {}).get("elastic_train_config", config) != config:
                raise AttemptFailedError(
                    f"job {running.submission_id} still trains run {request.run_name!r} with another "
                    f"train_loop_config. Stop it with `ray job stop {running.submission_id}` and retry, or wait until "
                    "it has ended"
                )
            self.job = running
            self._received_until = self._received_until or self.follower.logged_until()
        else:
            number = max((int(job.submission_id.removeprefix(prefix)) for job in own_jobs), default=0) + 1
            self.job = self._submit(f"{prefix}{number}", config)
            self._received_until = 0.0
        self._is_replay = self._received_until > 0
        self._id = self._running_id = self.job.submission_id
        # Counted from now, since the submission may have taken long.
        self._started_at = self._answered_at = self._log_read_at = self._heartbeat_at = time.monotonic()
        already = " already, which is followed from now on" if self._was_running else ""
        self.follower.on_note(
            f"The training runs as job {self._id}{already}; its log: {self._client.get_address()}/#/jobs/{self._id}"
        )

    def read_output(self) -> Iterator[tuple[str, bytes]]:
        """Wait a second, request the status of the Ray job, and yield the new lines of its log."""
        self._wait(_REQUEST_INTERVAL_SECONDS)
        try:
            self.job = self._client.find_job(self._id)
            self._answered_at = time.monotonic()
            has_ended = self.job.status.is_terminal()
            if has_ended:
                self._running_id = ""
            if self.job.driver_node_id:
                for line in self._log.read(self.job, to_the_end=has_ended):
                    yield "driver", line
            self._log_is_complete = has_ended
            self._log_read_at = time.monotonic()
        except UnknownJobError:
            self._is_unknown = True
            self._running_id = ""
        except (UnreachableError, RefusedError) as error:  # the last known state of the job stays
            self._problem = str(error)
            self._heartbeat_at = time.monotonic()  # heartbeats cannot be read now

    def poll(self) -> AttemptEnded | None:
        """Return the attempt's final event, or None while the Ray job runs.

        The event comes once the job has ended or is lost, its driver hangs, or the dashboard has not answered for too
        long.
        """
        now = time.monotonic()
        if self.job.status.is_terminal():
            self._exited_at = min(self._exited_at, now)
            return self._end_of_job() if self._log_is_complete or now - self._exited_at > _LOG_END_SECONDS else None
        if self._is_unknown or now - self._final_event_at > _JOB_EXIT_SECONDS:
            return self._end_of_job()
        limit = self._spec.cluster.unreachable_timeout_seconds
        if now - self._answered_at > limit:
            return self.final_event(
                f"the dashboard at {self._client.get_address()} did not answer for {limit:g} s ({self._problem}); job "
                f"{self._id} may go on, and the next attempt looks for it",
                Outcome.CLUSTER_LOST,
            )
        self._log_problem(now)
        if self.job.status != "RUNNING":
            self._heartbeat_at = now
        hang = None if self._final_event else self.check_liveness()
        if hang:
            self.stop()
        return hang

    def prepare_stop(self, reason: BaseException) -> None:
        """Stop the Ray job if `reason` is a cancellation or a time-out, unless the follower keeps the job."""
        if not self._running_id or (isinstance(reason, Exception) and not isinstance(reason, TimeoutError)):
            return
        if not self.follower.keeps_job(reason):
            self.stop()
            return
        self.follower.on_note(
            f"The flow process ends, and job {self._running_id} goes on in the cluster: the flow run follows it again "
            "when it is resumed"
        )

    def stop(self) -> None:
        """Stop the Ray job, also one that is being submitted, and wait until it has ended. Log a note if that fails."""
        began = time.monotonic()
        problem = ""
        while self._running_id and (waited := time.monotonic() - began) < JOB_STOP_SECONDS:
            has_ended = False
            try:
                status = self._client.stop(self._running_id)
                problem = f"it is still {status}"
                has_ended = status.is_terminal()
            except UnknownJobError:
                has_ended = waited > _STOP_UNKNOWN_SECONDS
            except (UnreachableError, RefusedError) as error:
                problem = str(error)
            if has_ended:
                self._running_id = ""
                return
            time.sleep(0.5)
        if self._running_id:
            self.follower.on_note(
                f"Job {self._running_id} could not be stopped ({problem}). If it is pending, Ray stops it when it "
                f"starts; else stop it with `ray job stop {self._running_id}` when the cluster answers again"
            )

    def process_event(self, event: Event) -> None:
        """Process an event from the Ray job's log; it is replayed if an earlier process of the flow run received it."""
        self._is_replay = self._is_replay and event.at <= self._received_until
        self._received_until = max(self._received_until, event.at)
        super().process_event(event)

    def _log_problem(self, now: float) -> None:
        """Log a note, once for each problem, if the dashboard does not answer or the Ray job does not start."""
        note = ""
        if now - self._log_read_at > NOTE_SECONDS:
            note = (
                f"The dashboard has not answered, or not with the log, for {NOTE_SECONDS:g} s: job {self._id} may go "
                f"on meanwhile, and requests are repeated ({self._problem})"
            )
        elif self.job.status == "PENDING" and now - self._started_at > NOTE_SECONDS:
            note = f"Job {self._id} has not started yet: {self.job.message}"
        if note and note != self._last_note:
            self.follower.on_note(note)
        self._last_note = note

    def _submit(self, submission_id: str, config: str) -> JobDetails:
        """Submit a Ray job, and return its details. If the answer is lost, find the job by its id."""
        owner = self._spec.request.owner.model_copy(update={"job": submission_id})
        spec = replace(self._spec, request=replace(self._spec.request, owner=owner))
        metadata = {
            "elastic_train_run": spec.request.run_name,
            "elastic_train_config": config,
            "elastic_train_owner": owner.flow_run_id,
            "flow_run_name": owner.flow_run_name,
            "flow_name": owner.flow_name,
        }
        with job_package(spec, self._folder) as package:

            def submit() -> JobDetails:
                with suppress(UnknownJobError):  # an earlier try has arrived, whatever the answer was
                    return self._client.find_job(submission_id)
                # Checked only here: a job that already trains is followed with any version of Ray.
                self._client.check_version()
                self._running_id = submission_id  # from here on the cluster may have it
                self._client.submit(submission_id, metadata, package)
                return self._client.find_job(submission_id)

            return self._retry(submit, _SUBMIT_SECONDS)

    def _retry(self, request: Callable[[], _T], seconds: float) -> _T:
        """Call a request to the dashboard until it is answered, and return the answer.

        Raises:
            AttemptFailedError: The dashboard did not answer for `seconds` after its first failure.
        """
        deadline = 0.0
        while True:
            try:
                answer = request()
                self._has_answered = True
                return answer
            except UnreachableError as error:
                if not deadline:
                    deadline = time.monotonic() + seconds  # from here, since an upload may take longer
                    self.follower.on_note(f"No Ray dashboard answers ({error}); requests are repeated")
                elif time.monotonic() > deadline:
                    raise AttemptFailedError(
                        f"no Ray dashboard answers at {self._client.get_address()} ({error}; tried for {seconds:g} s). "
                        "Correct the address of the RayCluster, or see whether the head of the cluster is up",
                        outcome=Outcome.CLUSTER_LOST,
                        # A dashboard that never answered is more likely misspelt than lost; a retry cannot help.
                        final=not self._has_answered,
                    ) from error
            self._wait(_REQUEST_INTERVAL_SECONDS)

    def _end_of_job(self) -> AttemptEnded:
        """Return the attempt's final event, from the status of its Ray job and the final event that the driver sent.

        The driver's event does not hold if the job was stopped or killed: the driver does not know who sent its signal.
        """
        ended = self._final_event
        status = self.job.status
        if status == "STOPPED" and (not ended or ended.outcome.retryable or ended.outcome is Outcome.CANCELLED):
            return self.final_event(f"job {self._id} was stopped, but not by this flow run", Outcome.CANCELLED)
        if ended:
            if ended.outcome is Outcome.CANCELLED:
                return self.final_event(f"the driver of job {self._id} was ended by a signal")
            if ended.outcome is Outcome.SUPERSEDED and self._was_running:
                # Another process started that job. This process may be the one that has taken over the run.
                return self.final_event(ended.message)
            return ended  # also of an unknown job: a cluster may be removed as soon as its job has ended
        if self._is_unknown:
            return self.final_event(
                f"job {self._id}: the cluster does not know it any more, since the cluster was started again",
                Outcome.CLUSTER_LOST,
            )
        if status == "SUCCEEDED":
            return self.final_event(NO_FINAL_EVENT)
        # Ray appends the end of the job's log, which was passed on line by line.
        message = (self.job.message or "").partition(", last available logs")[0]
        reason = f"job {self._id} is {status}: {message}"
        if self.job.error_type == "RUNTIME_ENV_SETUP_FAILURE":
            return self.final_event(f"the cluster cannot set up the runtime environment of {reason}", Outcome.INVALID)
        error = self.last_error()
        if not self._attempt and re.match(": (ImportError|ModuleNotFoundError|SyntaxError)", error):
            remedy = "install that in its image, or with runtime_env={'pip': [...]} of the RayCluster"
            return self.final_event(f"the cluster cannot run the driver{error}; {remedy}", Outcome.INVALID)
        return self.final_event(f"the driver was lost: {reason.splitlines()[0]}{error}")


@dataclass
class JobLog:
    """Reads each line of a Ray job's log once.

    The dashboard returns the last lines of a log, and no position in it. So each reading starts some lines back, and
    skips the known ones. Lines with events are different from each other, since events are numbered: the last one is
    the anchor at which new lines are recognized.
    """

    _client: JobClient
    #: The last line with an event, and the number of other lines since.
    _anchor: bytes = b""
    _lines_since_anchor: int = 0

    def read(self, job: JobDetails, *, to_the_end: bool = False) -> Iterator[bytes]:
        """Yield the lines of the Ray job's log since the last reading.

        For a job that has ended, `to_the_end` includes an unfinished last line.

        Raises:
            UnreachableError: The log cannot be read, or only in part. The next reading continues there.
        """
        recent = _MIN_LINES + 2 * self._lines_since_anchor
        for count in (recent, 100 * recent, -1) if self._anchor else (-1,):
            lines = whole_lines(self._client.read_log(job, count), with_rest=to_the_end)
            if not self._anchor or self._anchor in lines:  # `in` consumes the lines up to the anchor
                break
        else:
            raise UnreachableError("the log lacks lines that it had before")
        for line in islice(lines, self._lines_since_anchor, None):
            if line.startswith(EVENT_TAG.encode()):
                self._anchor = line
                self._lines_since_anchor = 0
            else:
                self._lines_since_anchor += 1
            yield line


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
