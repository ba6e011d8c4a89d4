"""A driver as a Ray job, followed by its status and its log.

Only the job's own end ends an attempt. A dashboard that does not answer says nothing about it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice

from ray.job_submission import JobDetails

from prefect_elastic_train.core.bounds import whole_lines
from prefect_elastic_train.core.events import EVENT_TAG, AttemptEnded, Event
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.supervisor.attempt import TURN_SECONDS, Driver, Follower
from prefect_elastic_train.supervisor.job_client import JobClient, RefusedError, UnreachableError
from prefect_elastic_train.supervisor.job_package import end_pending

#: After so long without an answer or a start a note says so.
NOTE_SECONDS = 30.0
#: How often a job is asked after while the dashboard answers, and while it does not.
_ASK_SECONDS, _SELDOM_SECONDS = 1.0, 5.0
#: How long the rest of the log of a job that has ended is tried to be read.
_LAST_LINES_SECONDS = 60.0
#: How long a job may take from its driver's last word to its end.
_LEAVE_SECONDS = 30.0
#: A cluster that was asked this often, in a row, does not know the job.
_GONE_LOOKS = 2
_STOP_SECONDS = 20.0
#: How long a job that is stopped may be pending before it is ended in another way, and how late one may arrive whose
#: submission was cut short.
_STOP_PENDING_SECONDS, _STOP_UNKNOWN_SECONDS = 1.5, 5.0
#: How many lines before its end a log is read from at least.
_LEAST_LINES = 100


class JobDriver(Driver):
    """A driver inside a cluster, asked after without an answer for so long.

    Attributes:
        job: The job, as far as it is known.
        told_until: Up to where it is told of, in seconds since the epoch; 0 of one that was submitted just now.
    """

    def __init__(
        self, follower: Follower, client: JobClient, job: JobDetails, unreachable_seconds: float, told_until: float
    ) -> None:
        super().__init__(follower)
        self.job = job
        self.told_until = told_until
        self._is_past = told_until > 0
        self._client = client
        self._unreachable_seconds = unreachable_seconds
        self._id: str = job.submission_id
        self._log = JobLog(client)
        self._log_is_complete = False
        self._misses = 0
        self._problem = "no answer"
        self._noted = ""
        self._ask_at = self._began = self._heard_at = time.monotonic()
        self._over_at = float("inf")

    @property
    def is_over(self) -> bool:
        """Whether nothing of the job goes on."""
        return bool(self.job.status.is_terminal() or self._misses >= _GONE_LOOKS)

    def lines(self) -> Iterator[tuple[str, bytes]]:
        """Ask after the job, when it is time for that, and read what has come to its log."""
        if time.monotonic() < self._ask_at:
            time.sleep(TURN_SECONDS)
            return
        pause = _ASK_SECONDS
        try:
            found = self._client.job(self._id)
            self._heard_at = time.monotonic()
            self._misses = 0 if found is not None else self._misses + 1
            self.job = found or self.job
            if found is not None and found.driver_node_id:
                has_ended = found.status.is_terminal()
                for line in self._log.read(found, to_the_end=has_ended):
                    yield "driver", line
                self._log_is_complete = has_ended
        except (UnreachableError, RefusedError) as error:  # what is known of the job stays what it is
            self._problem, pause = str(error), _SELDOM_SECONDS
            self.seen_alive()  # or dead: nobody can say
        self._ask_at = time.monotonic() + pause

    def has_gone(self) -> bool:
        """Whether the job has ended and its log was read, as far as it can be read."""
        if not self.job.status.is_terminal():
            return False
        self._over_at = min(self._over_at, time.monotonic())
        is_read = self._log_is_complete or not self.job.driver_node_id
        return is_read or time.monotonic() - self._over_at > _LAST_LINES_SECONDS

    def look(self) -> AttemptEnded | None:
        """How the attempt ended, if the job is gone, its driver hangs, or nobody has seen it for too long."""
        now, is_unknown = time.monotonic(), self._misses >= _GONE_LOOKS
        if self.ended is not None and (is_unknown or now - self.ended_at > _LEAVE_SECONDS):
            return self._verdict(self.ended)  # a cluster may be gone as soon as its job is done
        if is_unknown:
            return self.given_up(
                Outcome.CLUSTER_LOST, f"job {self._id}: the cluster does not know it any more; it was started anew"
            )
        blind = now - self._heard_at
        if blind > self._unreachable_seconds:
            return self.given_up(
                Outcome.CLUSTER_LOST,
                f"the dashboard at {self._client.address} did not answer for {self._unreachable_seconds:g} s "
                f"({self._problem}); job {self._id} may go on, and the next attempt looks for it",
            )
        note = ""
        if blind > NOTE_SECONDS:
            note = f"The dashboard has not answered for {NOTE_SECONDS:g} s: job {self._id} may go on unseen, and is "
            note += f"asked after again and again ({self._problem})"
        elif self.job.status == "PENDING" and now - self._began > NOTE_SECONDS:
            note = f"Job {self._id} has not started yet: {self.job.message}"
        if note and note != self._noted:
            self.follower.on_note(note)
        self._noted = note
        if self.job.status != "RUNNING":
            self.seen_alive()
        hung = self.hung(self.follower.settings.liveness_timeout_seconds) if self.ended is None else None
        if hung is not None:
            try:
                stop(self._client, self._id)
            except (UnreachableError, RefusedError) as error:
                self.follower.on_note(f"Job {self._id}, whose driver hangs, cannot be stopped: {error}")
        return hung

    def outcome(self) -> AttemptEnded | None:
        """How the attempt ended, by the driver's last word or what Ray says; None if another job has to follow."""
        if self.ended is not None:
            return self._verdict(self.ended)
        if self.job.status == "SUCCEEDED" or self.job.error_type == "JOB_SUPERVISOR_ACTOR_START_TIMEOUT":
            return None  # its result is in the run directory, where the next driver finds it; or it never started
        if self.job.status == "STOPPED":
            return self._stopped()
        # Ray puts the end of the job's log below, which was told line by line.
        told = f"job {self._id} is {self.job.status}: {(self.job.message or '').partition(', last available logs')[0]}"
        if self.job.error_type == "RUNTIME_ENV_SETUP_FAILURE":
            return self.given_up(Outcome.INVALID, f"the cluster cannot set up the runtime environment of {told}")
        return self.given_up(Outcome.DRIVER_LOST, f"the driver was lost: {told.splitlines()[0]}{self.last_error()}")

    def tell(self, source: str, line: bytes) -> Event | str:
        """Take a line in, and tell it, unless an earlier process of the flow run has."""
        if not self._is_past:
            said = super().tell(source, line)
        elif not isinstance(said := self.take(line), str):
            self._is_past = said.at <= self.told_until
            (self.follower.on_past_event if self._is_past else self.follower.on_event)(said)
        if not isinstance(said, str):
            self.told_until = max(self.told_until, said.at)
        return said

    def _verdict(self, ended: AttemptEnded) -> AttemptEnded:
        """Judge the driver's last word by what became of the job: it does not know who has ended it by a signal."""
        if self.job.status == "STOPPED" and (ended.outcome.retryable or ended.outcome is Outcome.CANCELLED):
            return self._stopped()
        if ended.outcome is Outcome.CANCELLED:
            return self.given_up(Outcome.DRIVER_LOST, f"the driver of job {self._id} was ended by a signal")
        return ended

    def _stopped(self) -> AttemptEnded:
        return self.given_up(Outcome.CANCELLED, f"job {self._id} was stopped, but not by this flow run")


class JobLog:
    """Reads the log of a job's driver again and again, and each of its lines once.

    The dashboard gives the end of a log, from so many lines before it, and no position in it. So each reading begins
    some lines back, and what is known already is passed over: a line with an event is like no other, since events are
    numbered.
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
                self._anchor, self._since_anchor = line, 0
            else:
                self._since_anchor += 1
            yield line


def stop(client: JobClient, submission_id: str) -> None:
    """Stop a job, whatever state it is in, and wait until it has ended or the cluster is seen not to know it.

    Raises:
        UnreachableError: It does not end, or the cluster does not answer, for so long.
        RefusedError: The cluster refuses us.
    """
    began, is_helped = time.monotonic(), False
    while True:
        waited = time.monotonic() - began
        try:
            client.stop(submission_id)
            job = client.job(submission_id)
            if job.status.is_terminal() if job is not None else waited > _STOP_UNKNOWN_SECONDS:
                return
            problem = f"it is still {job.status}" if job is not None else "the cluster does not know it"
            if job is not None and job.status == "PENDING" and waited > _STOP_PENDING_SECONDS and not is_helped:
                # Ray's own stop waits for its start; another job ends it.
                is_helped = True
                client.submit(f"{submission_id}-end", end_pending(submission_id), {})
        except UnreachableError as error:
            problem = str(error)
        if waited > _STOP_SECONDS:
            raise UnreachableError(problem)
        time.sleep(0.5)
