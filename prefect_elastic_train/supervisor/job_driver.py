"""A driver as a Ray job, followed by its status and its log.

Only the job's own end ends an attempt. A dashboard that does not answer says nothing about it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from ray.job_submission import JobDetails

from prefect_elastic_train.core.events import AttemptEnded, Event
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.supervisor.attempt import TURN_SECONDS, Driver, Follower
from prefect_elastic_train.supervisor.job_client import JobClient, RefusedError, UnreachableError
from prefect_elastic_train.supervisor.job_log import JobLog
from prefect_elastic_train.supervisor.job_package import end_pending

#: Without an answer for so long nobody sees the job, and a note says so, again after some minutes.
BLIND_SECONDS = 30.0
BLIND_NOTE_SECONDS = 300.0
#: How often a job is asked after, and how seldom at most while there is no answer.
_ASK_SECONDS, _SELDOM_SECONDS = 1.0, 15.0
#: A log that was read so long ago does not say what the driver does now.
_FRESH_SECONDS = 15.0
#: How long the end of a log is tried to be read while the dashboard answers.
_LAST_LINES_SECONDS = 60.0
#: How long a job may take from its driver's last word to its end.
_LEAVE_SECONDS = 30.0
_PENDING_NOTE_SECONDS = 10.0
#: A cluster that was asked this often, in a row, does not know the job.
_GONE_LOOKS = 2
_STOP_SECONDS = 20.0
#: How long a job that is stopped may be pending before it is ended in another way.
_STOP_PENDING_SECONDS = 1.5
#: After so long without effect a stop is asked for again; a job that the cluster does not know by then is none.
_STOP_AGAIN_SECONDS = 4.0


class JobDriver(Driver):
    """A driver inside a cluster.

    Args:
        follower: Who follows it.
        client: The dashboard.
        job: The job.
        session: Name of the cluster's session.
        unreachable_seconds: How long it is asked after without an answer.
        told_until: Up to where it was told of before, in seconds since the epoch; None if it was submitted just now.

    Attributes:
        job: The job, as far as it is known.
        told_until: Up to where it is told of.
    """

    def __init__(
        self,
        follower: Follower,
        client: JobClient,
        job: JobDetails,
        session: str,
        unreachable_seconds: float,
        told_until: float | None,
    ) -> None:
        super().__init__(follower)
        self.job = job
        self.told_until = told_until or 0.0
        self._client = client
        self._session = session
        self._unreachable_seconds = unreachable_seconds
        self._id: str = job.submission_id
        self._log = JobLog(client)
        self._log_is_complete = False
        self._is_past = told_until is not None
        self._passed_over = 0
        self._missed = 0
        self._gone = ""
        self._problem = "no answer"
        self._answers = True
        self._ask_at = self._began = self._heard_at = time.monotonic()
        self._pause = _ASK_SECONDS
        self._read_at = self._ended_at = float("-inf")
        self._blind_told_at = 0.0
        self._pending_told = ""

    @property
    def is_over(self) -> bool:
        """Whether nothing of the job goes on."""
        return bool(self.job.status.is_terminal() or self._gone)

    def lines(self) -> Iterator[tuple[str, bytes]]:
        """Ask after the job, when it is time for that, and read what has come to its log."""
        if time.monotonic() < self._ask_at:
            time.sleep(TURN_SECONDS)
            return
        try:
            self._ask()
            has_ended = self.job.status.is_terminal()
            if self.job.driver_node_id and not self._gone:
                for line in self._log.read(self.job, to_the_end=has_ended):
                    self._heard_at = time.monotonic()
                    yield "driver", line
                self._read_at, self._log_is_complete = time.monotonic(), has_ended
            self._pause = _ASK_SECONDS
        except (UnreachableError, RefusedError) as error:  # what is known of the job stays what it is
            self._problem = str(error)
            self._pause = min(_SELDOM_SECONDS, 1.5 * self._pause)
        self._ask_at = time.monotonic() + self._pause

    def has_gone(self) -> bool:
        """Whether the job has ended and its log was read, as far as it can be read."""
        if not self.job.status.is_terminal():
            return False
        if self._log_is_complete or not self.job.driver_node_id:
            return True
        # A dashboard that does not answer says nothing about the log; one that answers without the log does.
        if self._ended_at < 0 or not self._answers:
            self._ended_at = time.monotonic()
        return time.monotonic() - self._ended_at > _LAST_LINES_SECONDS

    def look(self) -> AttemptEnded | None:
        """How the attempt ended, if the job is gone, its driver hangs, or nobody has seen it for too long."""
        job = self.job
        if self.ended is not None and (self._gone or time.monotonic() - self.ended_at > _LEAVE_SECONDS):
            return self._verdict(self.ended)  # a cluster may be gone as soon as its job is done
        if self._gone:
            return self.given_up(Outcome.CLUSTER_LOST, f"job {self._id}: {self._gone}")
        limit = self._unreachable_seconds
        self._tell_blindness()
        if self._blind_seconds > limit:
            return self.given_up(
                Outcome.CLUSTER_LOST,
                f"the dashboard at {self._client.address} did not answer for {limit:g} s ({self._problem}); job "
                f"{self._id} may go on, and the next attempt looks for it",
            )
        is_late = job.status == "PENDING" and time.monotonic() - self._began > _PENDING_NOTE_SECONDS
        if is_late and job.message != self._pending_told:
            self._pending_told = str(job.message)
            self.follower.on_note(f"Job {self._id} has not started yet: {job.message}")
        if job.status != "RUNNING" or time.monotonic() - self._read_at > _FRESH_SECONDS:
            self.seen_alive()  # or dead: nobody can say
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
        # Ray puts the end of the job's log below, which was told line by line.
        told = f"job {self._id} is {self.job.status}: {(self.job.message or '').partition(', last available logs')[0]}"
        if self.job.status == "SUCCEEDED":
            # Its result is in the run directory, where the next driver finds it.
            self.follower.on_note(f"Job {self._id} has ended well, and its last words cannot be read")
            return None
        if self.job.error_type == "JOB_SUPERVISOR_ACTOR_START_TIMEOUT":
            self.follower.on_note(f"Ray waits no longer for the driver to start, so it is submitted anew: {told}")
            return None
        if self.job.status == "STOPPED":
            return self._stopped()
        if self.job.error_type == "RUNTIME_ENV_SETUP_FAILURE":
            return self.given_up(Outcome.INVALID, f"the cluster cannot set up the runtime environment of {told}")
        return self.given_up(Outcome.DRIVER_LOST, f"the driver was lost: {told.splitlines()[0]}{self.last_error()}")

    def tell(self, source: str, line: bytes) -> Event | str:
        """Take a line in, and tell it, unless an earlier process of the flow run has."""
        if not self._is_past:
            said = super().tell(source, line)
            self.told_until = self.told_until if isinstance(said, str) else said.at
            return said
        said = self.take(line)
        if isinstance(said, str):
            self._passed_over += 1
        elif said.at <= self.told_until:
            self.follower.on_past_event(said)
        else:
            self._is_past, self.told_until = False, said.at
            if self._passed_over:
                self.follower.on_note(
                    f"{self._passed_over} lines of output from before are in the job's log only: "
                    f"{self._client.address}/#/jobs/{self._id}"
                )
            self.follower.on_event(said)
        return said

    @property
    def _blind_seconds(self) -> float:
        """For how long nothing was heard of the job."""
        return time.monotonic() - self._heard_at

    def _verdict(self, ended: AttemptEnded) -> AttemptEnded:
        """Judge the driver's last word by what became of the job: it does not know who has ended it by a signal."""
        if self.job.status == "STOPPED" and (ended.outcome.retryable or ended.outcome is Outcome.CANCELLED):
            return self._stopped()
        if ended.outcome is Outcome.CANCELLED:
            return self.given_up(Outcome.DRIVER_LOST, f"the driver of job {self._id} was ended by a signal")
        return ended

    def _stopped(self) -> AttemptEnded:
        return self.given_up(Outcome.CANCELLED, f"job {self._id} was stopped, but not by this flow run")

    def _tell_blindness(self) -> None:
        blind, now = self._blind_seconds, time.monotonic()
        if blind < BLIND_SECONDS:
            if self._blind_told_at:
                self.follower.on_note("The dashboard answers again")
            self._blind_told_at = 0.0
        elif not self._blind_told_at or now - self._blind_told_at > BLIND_NOTE_SECONDS:
            self._blind_told_at = now
            self.follower.on_note(
                f"The dashboard has not answered for {blind:.0f} s ({self._problem}): job {self._id} "
                "may go on unseen, and is asked after again and again"
            )

    def _ask(self) -> None:
        self._answers = False
        found = self._client.job(self._id)
        if found is not None:
            self.job, self._missed = found, 0
        else:
            self._missed += 1
            if self._missed >= _GONE_LOOKS:
                self._gone = "the cluster does not know the job any more"
            elif self._client.session() != self._session:
                self._gone = "the cluster was started anew, and knows nothing of the job"
        self._heard_at, self._answers = time.monotonic(), True


def stop(client: JobClient, submission_id: str, is_coming: Callable[[], bool] = lambda: False) -> None:
    """Stop a job, whatever state it is in, and wait until it has ended or the cluster is seen not to know it.

    Args:
        client: The dashboard.
        submission_id: The job.
        is_coming: Whether its submission is still on its way; one that has arrived counts from then on.

    Raises:
        UnreachableError: It does not end, or the cluster does not answer, for so long.
        RefusedError: The cluster refuses us.
    """
    began = time.monotonic()
    ask_at, pending_until = began, began + _STOP_PENDING_SECONDS
    while True:
        now, may_come = time.monotonic(), is_coming()
        try:
            if now >= ask_at:
                client.stop(submission_id)
                ask_at = now + _STOP_AGAIN_SECONDS
            job = client.job(submission_id)
            if job is not None and job.status.is_terminal():
                return
            if job is None and may_come:
                began = now
            if job is None and now - began > _STOP_AGAIN_SECONDS:
                return  # a submission that was cut short may arrive late, but not as late as this
            problem = f"it is still {job.status}" if job else "the cluster does not know it"
            if job is not None and job.status == "PENDING" and now > pending_until:
                # Ray's own stop waits for its start; another job ends it.
                pending_until = float("inf")
                client.submit(f"{submission_id}-end", end_pending(submission_id), {})
        except UnreachableError as error:
            problem = str(error)
        if now - began > _STOP_SECONDS:
            raise UnreachableError(problem)
        time.sleep(0.5)
