"""A driver as a Ray job: found again or submitted, followed by its status and its log, and stopped, over HTTP.

Only the job's own end ends an attempt. A dashboard that does not answer says nothing about it.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ray.job_submission import JobDetails

from prefect_elastic_train.core.bounds import whole_lines
from prefect_elastic_train.core.events import EVENT_TAG, AttemptEnded, Event
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.request import DriverSpec
from prefect_elastic_train.supervisor.attempt import NO_LAST_WORD, TURN_SECONDS, Driver
from prefect_elastic_train.supervisor.job_client import JobClient, RefusedError, UnreachableError, job_package

if TYPE_CHECKING:
    from prefect_elastic_train.supervisor.runtime import Runtime

_T = TypeVar("_T")

#: How long a submission is repeated that does not arrive.
_SUBMIT_SECONDS = 60.0
#: After so long without an answer or a start a note says so.
NOTE_SECONDS = 30.0
#: How often a job is asked after.
_ASK_SECONDS = 1.0
#: How long the rest of an ended job's log is tried, and how long a job may take to end after its driver's last word.
_LAST_LINES_SECONDS = 60.0
_LEAVE_SECONDS = 30.0
_STOP_SECONDS = 20.0
#: How long a stopped job may be pending until it is ended otherwise, and how late one cut short on its way may arrive.
_STOP_PENDING_SECONDS = 1.5
_STOP_UNKNOWN_SECONDS = 5.0
#: How many lines before its end a log is read from at least.
_LEAST_LINES = 100


class JobDriver(Driver):
    """A driver inside a cluster, told its spec unless it runs already; its package is made in the private folder.

    The one before is that of the attempt before, in this process.
    """

    #: Whether a dashboard was there: then it is away, and not misspelt.
    _is_known = False
    #: Id of a job that may go on although nobody follows it.
    _left = ""
    #: Up to where jobs were told of, in seconds since the epoch.
    _told_until = 0.0

    def __init__(self, follower: Runtime, spec: DriverSpec, folder: Path, before: JobDriver | None) -> None:
        super().__init__(follower)
        self._spec = spec
        self._folder = folder
        self._client = JobClient(spec.cluster)
        if before is not None:
            self._is_known = before._is_known
            self._left = before._left
            self._told_until = before._told_until
        self._is_gone = self._log_is_complete = False
        self._problem = "no answer"
        self._noted = ""
        self._over_at = float("inf")

    def start(self) -> None:
        """Look for the run's job, and submit one if none is there that is not over."""
        request = self._spec.request
        cluster = self._spec.cluster
        self._is_known = self._is_known or request.resumed
        metadata = {
            "elastic_train_run": request.run_name,
            "elastic_train_storage": _digest(self._spec.storage.uri)[:16],
            "elastic_train_owner": request.owner.flow_run_id,
        }
        jobs = self._ask(
            self._client.jobs,
            cluster.unreachable_timeout_seconds if self._is_known else cluster.connect_timeout_seconds,
        )
        own = [job for job in jobs if metadata.items() <= (job.metadata or {}).items()]
        found = next((job for job in own if not job.status.is_terminal()), None)
        self._was_found = found is not None
        config = _digest(json.dumps(request.fingerprint.config, sort_keys=True))
        if found is not None:
            if (found.metadata or {}).get("elastic_train_config", config) != config:
                raise AttemptFailedError(
                    f"job {found.submission_id} still trains run {request.run_name!r} with another train_loop_config. "
                    f"End it with `ray job stop {found.submission_id}` and retry, or wait for its end",
                    outcome=Outcome.INVALID,
                )
            self.job = found
            is_running = " already, which is followed from now on"
            self._told_until = self._told_until or self.follower.followed_until()
        else:
            name = re.sub(r"[^\w.-]", "-", request.run_name)
            prefix = f"elastic-train-{name}-{_digest(json.dumps(metadata, sort_keys=True))[:8]}-"
            number = max((int(job.submission_id.removeprefix(prefix)) for job in own), default=0) + 1
            self.job = self._submit(f"{prefix}{number}", {**metadata, "elastic_train_config": config})
            is_running = ""
            self._told_until = 0.0
        self._is_past = self._told_until > 0
        self._id: str = self.job.submission_id
        self._left = self._id
        # Counted from now, since the submission may have taken long.
        self._ask_at = self._began = self._heard_at = self._read_at = self._alive_at = time.monotonic()
        self.follower.on_note(
            f"The training runs as job {self._id}{is_running}; its log: {self._client.address}/#/jobs/{self._id}"
        )
        self._log = JobLog(self._client)

    def lines(self) -> Iterator[tuple[str, bytes]]:
        """Ask after the job, when it is time for that, and read what has come to its log."""
        if time.monotonic() < self._ask_at:
            time.sleep(TURN_SECONDS)
            return
        try:
            found = self._client.job(self._id)
            self._heard_at = time.monotonic()
            self._is_gone = found is None
            self.job = found or self.job
            if found is not None and found.driver_node_id:
                has_ended = found.status.is_terminal()
                for line in self._log.read(found, to_the_end=has_ended):
                    yield "driver", line
                self._log_is_complete = has_ended
            self._read_at = time.monotonic()
        except (UnreachableError, RefusedError) as error:  # what is known of the job stays what it is
            self._problem = str(error)
            self._alive_at = time.monotonic()  # or dead: nobody can say
        self._ask_at = time.monotonic() + _ASK_SECONDS

    def look(self) -> AttemptEnded | None:
        """How the attempt ended: the job has ended or is gone, its driver hangs, or nobody has seen it for too long."""
        now = time.monotonic()
        unreachable_seconds = self._spec.cluster.unreachable_timeout_seconds
        if self.job.status.is_terminal():
            self._left = ""
            self._over_at = min(self._over_at, now)
            is_read = self._log_is_complete or not self.job.driver_node_id
            return self._outcome() if is_read or now - self._over_at > _LAST_LINES_SECONDS else None
        if self._is_gone:
            self._left = ""
        if self._ended is not None and (self._is_gone or now - self._ended_at > _LEAVE_SECONDS):
            return self._outcome()  # a cluster may be gone as soon as its job is done
        if self._is_gone:
            return self.lost(
                f"job {self._id}: the cluster does not know it any more; it was started anew", Outcome.CLUSTER_LOST
            )
        blind = now - self._heard_at
        if blind > unreachable_seconds:
            return self.lost(
                f"the dashboard at {self._client.address} did not answer for {unreachable_seconds:g} s "
                f"({self._problem}); job {self._id} may go on, and the next attempt looks for it",
                Outcome.CLUSTER_LOST,
            )
        note = ""
        if now - self._read_at > NOTE_SECONDS:
            note = (
                f"The dashboard has not answered, or not with the log, for {NOTE_SECONDS:g} s: job {self._id} may go "
                f"on unseen, and is asked after again and again ({self._problem})"
            )
        elif self.job.status == "PENDING" and now - self._began > NOTE_SECONDS:
            note = f"Job {self._id} has not started yet: {self.job.message}"
        if note and note != self._noted:
            self.follower.on_note(note)
        self._noted = note
        if self.job.status != "RUNNING":
            self._alive_at = now
        hung = self.hung() if self._ended is None else None
        if hung is not None:
            self.end()
        return hung

    def leave(self, reason: BaseException) -> None:
        """Stop the job if the flow run was told to stop, unless the job shall go on without us."""
        if not self._left or (isinstance(reason, Exception) and not isinstance(reason, TimeoutError)):
            return
        if not self.follower.detaches(reason):
            self.end()
            return
        self.follower.on_note(
            f"The flow process ends, and job {self._left} goes on in the cluster: the flow run follows it again when "
            "it is resumed"
        )

    def end(self) -> None:
        """Stop a job that may go on, or is on its way, and wait until it has ended or the cluster does not know it."""
        began = time.monotonic()
        problem = ""
        while self._left and (waited := time.monotonic() - began) < _STOP_SECONDS:
            try:
                self._client.stop(self._left)
                job = self._client.job(self._left)
                if job.status.is_terminal() if job is not None else waited > _STOP_UNKNOWN_SECONDS:
                    self._left = ""
                    return
                problem = f"it is still {job.status}" if job is not None else "the cluster does not know it"
                if job is not None and job.status == "PENDING" and waited > _STOP_PENDING_SECONDS:
                    # Ray's own stop waits for its start; another job ends it.
                    self._client.end_pending(self._left)
            except UnreachableError as error:
                problem = str(error)
            except RefusedError as error:
                problem = str(error)
                break
            time.sleep(0.5)
        if self._left:
            self.follower.on_note(
                f"Job {self._left} could not be stopped ({problem}); stop it with `ray job stop {self._left}` when the "
                "cluster answers again"
            )

    def tell(self, event: Event) -> None:
        """Hand an event on, unless an earlier process of the flow run has told it."""
        self._is_past = self._is_past and event.at <= self._told_until
        self._told_until = max(self._told_until, event.at)
        super().tell(event)

    def _submit(self, submission_id: str, metadata: dict[str, str]) -> JobDetails:
        """Submit a job, and recognise it if the answer was lost."""
        # Not before: a job that trains already is followed whatever Ray it has.
        self._ask(self._client.check_version, _SUBMIT_SECONDS)
        owner = self._spec.request.owner.model_copy(update={"job": submission_id})
        spec = replace(self._spec, request=replace(self._spec.request, owner=owner))
        metadata = {**metadata, "flow_run_name": owner.flow_run_name, "flow_name": owner.flow_name}
        self._left = submission_id  # from here on the cluster may have it
        with job_package(spec, self._folder) as package:

            def submit() -> JobDetails:
                problem: Exception = UnreachableError("nobody said why")
                try:
                    self._client.submit(submission_id, metadata, package)
                except (UnreachableError, RefusedError) as error:
                    problem = error
                # Whatever it said: what counts is whether the cluster has the job.
                job = self._client.job(submission_id)
                if job is not None:
                    return job
                if isinstance(problem, RefusedError):
                    self._left = ""
                raise problem

            return self._ask(submit, _SUBMIT_SECONDS)

    def _ask(self, ask: Callable[[], _T], seconds: float) -> _T:
        """Ask, again and again for so long if there is no answer; raises that there was none."""
        deadline = time.monotonic() + seconds
        is_noted = False
        while True:
            try:
                answer = ask()
                self._is_known = True
                return answer
            except UnreachableError as error:
                if time.monotonic() > deadline:
                    raise AttemptFailedError(
                        f"no Ray dashboard answers at {self._client.address} ({error}; tried for {seconds:g} s). "
                        "Correct the address of the RayCluster, or see whether the head of the cluster is up",
                        outcome=Outcome.CLUSTER_LOST,
                        # What was never there is more likely misspelt than lost: no retry heals that.
                        final=not self._is_known,
                    ) from error
                if not is_noted:
                    self.follower.on_note(f"No Ray dashboard answers ({error}); it is waited for")
                is_noted = True
            self.follower.wait(_ASK_SECONDS)

    def _outcome(self) -> AttemptEnded:
        """How the attempt ended, by Ray and the driver's last word, which does not know who has sent it a signal."""
        ended = self._ended
        status = self.job.status
        if status == "STOPPED" and (ended is None or ended.outcome.retryable or ended.outcome is Outcome.CANCELLED):
            return self.lost(f"job {self._id} was stopped, but not by this flow run", Outcome.CANCELLED)
        if ended is not None and ended.outcome is Outcome.CANCELLED:
            return self.lost(f"the driver of job {self._id} was ended by a signal")
        if ended is not None and ended.outcome is Outcome.SUPERSEDED and self._was_found:
            return self.lost(ended.message)  # it was another process's, and this one may be who has the run now
        if ended is not None or status == "SUCCEEDED":
            return ended or self.lost(NO_LAST_WORD)
        # Ray puts the end of the job's log below, which was told line by line.
        told = f"job {self._id} is {status}: {(self.job.message or '').partition(', last available logs')[0]}"
        if self.job.error_type == "RUNTIME_ENV_SETUP_FAILURE":
            return self.lost(f"the cluster cannot set up the runtime environment of {told}", Outcome.INVALID)
        said = self.last_error()
        if not self._attempt and re.match(": (ImportError|ModuleNotFoundError|SyntaxError)", said):
            install = "install that in its image, or with runtime_env={'pip': [...]} of the RayCluster"
            return self.lost(f"the cluster cannot run the driver{said}; {install}", Outcome.INVALID)
        return self.lost(f"the driver was lost: {told.splitlines()[0]}{said}")


class JobLog:
    """Reads the log of a job's driver again and again, and each of its lines once.

    The dashboard gives the end of a log, from so many lines before it, and no position in it. So each reading begins
    some lines back, and passes over what is known: a line with an event is like no other, since events are numbered.
    """

    def __init__(self, client: JobClient) -> None:
        self._client = client
        #: The last line with an event, and how many other lines have come since.
        self._anchor = b""
        self._since_anchor = 0

    def read(self, job: JobDetails, *, to_the_end: bool = False) -> Iterator[bytes]:
        """Read the lines that have come since the last time; of a job that has ended also what is after the last one.

        Raises:
            UnreachableError: The log cannot be read, or only in part; the next time goes on from there.
        """
        recent = _LEAST_LINES + 2 * self._since_anchor
        for count in (recent, 100 * recent, -1) if self._anchor else (-1,):
            lines = whole_lines(self._client.log(job, count), with_rest=to_the_end)
            if not self._anchor or self._anchor in lines:  # which takes them in up to the last known one
                break
        else:
            raise UnreachableError("the log does not hold what it held before")
        for line in islice(lines, self._since_anchor, None):
            if line.startswith(EVENT_TAG.encode()):
                self._anchor = line
                self._since_anchor = 0
            else:
                self._since_anchor += 1
            yield line


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
