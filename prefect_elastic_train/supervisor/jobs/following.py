"""Following a job to its end, by its status and its log."""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING

from prefect_elastic_train.core.events import AttemptEnded, Event
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.spec import DriverSpec
from prefect_elastic_train.supervisor.following import AttemptAccount
from prefect_elastic_train.supervisor.jobs.api import Job, JobsApi, UnreachableError
from prefect_elastic_train.supervisor.jobs.log import JobLog

if TYPE_CHECKING:
    from prefect_elastic_train.supervisor.launch import Runtime

__all__ = ["BLIND_NOTE_SECONDS", "BLIND_SECONDS", "JobFollowing"]

#: Without an answer for so long nobody sees the job, and a note says so, again after some minutes.
BLIND_SECONDS = 30.0
BLIND_NOTE_SECONDS = 300.0
_TURN_SECONDS = 0.2
_STATUS_SECONDS = 2.0
_SLOWEST_STATUS_SECONDS = 15.0
#: An answer that is as old as this is not of now.
_FRESH_SECONDS = 15.0
#: How long the end of a log is tried to be read while the dashboard answers.
_LAST_LINES_SECONDS = 60.0
#: How long a job may take from its driver's last word to its end.
_LEAVE_SECONDS = 30.0
_PENDING_NOTE_SECONDS = 10.0
#: A cluster that was asked this often, in a row, does not know the job.
_GONE_LOOKS = 2
_OUTPUT_QUEUE = 10_000


class _StatusWatch:
    """Asks after a job now and then, in a thread of its own: a request may take long, and a stop must not wait."""

    def __init__(self, api: JobsApi, job: Job, session: str) -> None:
        self.job = job
        #: Why the job is gone, empty as long as it is not known to be.
        self.gone = ""
        self.problem = ""
        self._submission_id = job.submission_id
        self._reached_at = time.monotonic()
        self._api = api
        self._session = session
        self._missed = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic-train-job-status", daemon=True)
        self._thread.start()

    @property
    def blind_seconds(self) -> float:
        """For how long nothing was heard of the job."""
        return time.monotonic() - self._reached_at

    def stop(self) -> None:
        """Ask no more."""
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
        found = self._api.job(self._submission_id)
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
        self._reached_at = time.monotonic()
        self.problem = ""


class JobFollowing:
    """Follows a job until it has ended.

    Args:
        runtime: The training's runtime, whose callbacks are told what happens.
        api: The dashboard.
        spec: What the driver was told.
        job: The job.
        session: Name of the cluster's session.
        told_until: Up to where it was told of before, in seconds since the epoch.
        is_new: It was submitted just now.

    Attributes:
        told_until: Up to where it is told of.
    """

    def __init__(
        self,
        runtime: Runtime,
        api: JobsApi,
        spec: DriverSpec,
        job: Job,
        session: str,
        told_until: float,
        *,
        is_new: bool,
    ) -> None:
        self.told_until = told_until
        self._runtime = runtime
        self._api = api
        self._spec = spec
        self._watch = _StatusWatch(api, job, session)
        self._account = AttemptAccount()
        self._lines: queue.Queue[bytes] = queue.Queue(maxsize=_OUTPUT_QUEUE)
        self._log: JobLog | None = None
        self._past = not is_new
        self._passed_over = 0
        self._began = time.monotonic()
        self._pending_told = ""
        self._blind_told_at = 0.0
        if not is_new and not job.is_terminal:
            runtime.on_note(f"The training runs as job {job.submission_id} already, which is followed from now on")

    @property
    def is_over(self) -> bool:
        """Whether nothing of the job goes on."""
        return self._watch.job.is_terminal or bool(self._watch.gone)

    def until_end(self) -> AttemptEnded | None:
        """Follow; end a job whose driver hangs. None for one that has to be followed by another at once."""
        looked_at = 0.0
        while True:
            if time.monotonic() - looked_at >= _TURN_SECONDS:
                looked_at = time.monotonic()
                self._runtime.check_stop()
                self._runtime.keep_guarded()
                if self._watch.job.is_terminal:
                    return self._last_word()
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
        job, account = self._watch.job, self._account
        if account.ended is not None and (self._watch.gone or time.monotonic() - account.ended_at > _LEAVE_SECONDS):
            return self._verdict(job, account.ended)  # a cluster may be gone as soon as its job is done
        if self._watch.gone:
            return account.given_up(Outcome.CLUSTER_LOST, f"job {job.submission_id}: {self._watch.gone}")
        if self._log is None and job.driver_node_id:
            self._log = JobLog(self._api, job, self._lines.put)
            self._log.start()
            account.seen_alive()
        if self._tell_blindness():
            limit = self._spec.cluster.unreachable_timeout_seconds
            return account.given_up(
                Outcome.CLUSTER_LOST,
                f"the dashboard at {self._api.address} did not answer for {limit:g} s ({self._watch.problem}); job "
                f"{job.submission_id} may go on, and the next attempt looks for it",
            )
        if job.status == "PENDING":
            self._tell_pending(job)
        unseen = self._log is None or not self._log.is_readable or self._watch.blind_seconds > _FRESH_SECONDS
        if unseen or job.status == "PENDING":
            account.seen_alive()  # or dead: nobody can say
            return None
        if account.ended is not None:
            return None
        hung = account.hung(self._runtime.settings.liveness_timeout_seconds)
        if hung is not None:
            self._end_hanging(job)
        return hung

    def _end_hanging(self, job: Job) -> None:
        deadline = time.monotonic() + _LEAVE_SECONDS
        while not self._watch.job.is_terminal and time.monotonic() < deadline:
            try:
                self._api.stop(job.submission_id)
            except (UnreachableError, AttemptFailedError) as error:
                self._runtime.on_note(f"Job {job.submission_id}, whose driver hangs, cannot be stopped: {error}")
            for _ in range(int(_STATUS_SECONDS / _TURN_SECONDS)):
                self._runtime.check_stop()
                time.sleep(_TURN_SECONDS)

    def _tell_blindness(self) -> bool:
        """Tell that nothing is heard of the job, and whether that has lasted for too long."""
        blind = self._watch.blind_seconds
        if blind < BLIND_SECONDS:
            if self._blind_told_at:
                self._runtime.on_note("The dashboard answers again")
            self._blind_told_at = 0.0
            return False
        now = time.monotonic()
        if not self._blind_told_at or now - self._blind_told_at > BLIND_NOTE_SECONDS:
            self._blind_told_at = now
            self._runtime.on_note(
                f"The dashboard has not answered for {blind:.0f} s ({self._watch.problem or 'no answer'}): job "
                f"{self._watch.job.submission_id} may go on unseen, and is asked after again and again"
            )
        return blind > self._spec.cluster.unreachable_timeout_seconds

    def _tell_pending(self, job: Job) -> None:
        if job.message != self._pending_told and time.monotonic() - self._began > _PENDING_NOTE_SECONDS:
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
        if self._past and said.at > self.told_until:
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
            self.told_until = event.at
            self._runtime.on_event(event)

    def _last_word(self) -> AttemptEnded | None:
        """Read the log to its end, and say how the attempt ended."""
        job = self._watch.job
        if not job.driver_node_id:
            return self._without_a_word(job)
        if self._log is None:
            self._log = JobLog(self._api, job, self._lines.put)
        self._log.finish()
        began = time.monotonic()
        patience = began + _LAST_LINES_SECONDS
        while not (self._log.is_complete and self._lines.empty()):
            self._runtime.check_stop()
            self._runtime.keep_guarded()
            self._take_lines(0.05)
            now = time.monotonic()
            # A dashboard that does not answer says nothing about the log; one that answers without the log does.
            if self._watch.blind_seconds > _FRESH_SECONDS:
                patience = now + _LAST_LINES_SECONDS
            if now > min(patience, began + self._spec.cluster.unreachable_timeout_seconds + _LAST_LINES_SECONDS):
                break
        if self._account.ended is None:
            return self._without_a_word(job)
        return self._verdict(job, self._account.ended)

    def _verdict(self, job: Job, ended: AttemptEnded) -> AttemptEnded:
        """Judge the driver's last word by what became of the job: it does not know who has ended it by a signal."""
        if job.status == "STOPPED" and (ended.outcome.retryable or ended.outcome is Outcome.CANCELLED):
            return self._stopped(job)
        if ended.outcome is Outcome.CANCELLED:
            return self._account.given_up(
                Outcome.DRIVER_LOST, f"the driver of job {job.submission_id} was ended by a signal"
            )
        return ended

    def _without_a_word(self, job: Job) -> AttemptEnded | None:
        # Ray puts the end of the job's log below, which was told line by line.
        told = f"job {job.submission_id} is {job.status}: {job.message.partition(', last available logs')[0]}"
        if job.status == "SUCCEEDED":
            # Its result is in the run directory, where the next driver finds it.
            self._runtime.on_note(f"Job {job.submission_id} has ended well, and its last words cannot be read")
            return None
        if job.error_type == "JOB_SUPERVISOR_ACTOR_START_TIMEOUT":
            self._runtime.on_note(f"Ray waits no longer for the driver to start, so it is submitted anew: {told}")
            return None
        if job.status == "STOPPED":
            return self._stopped(job)
        if job.error_type == "RUNTIME_ENV_SETUP_FAILURE":
            return self._account.given_up(
                Outcome.INVALID, f"the cluster cannot set up the runtime environment of {told}"
            )
        return self._account.given_up(
            Outcome.DRIVER_LOST, f"the driver was lost: {told.splitlines()[0]}{self._account.last_error()}"
        )

    def _stopped(self, job: Job) -> AttemptEnded:
        return self._account.given_up(
            Outcome.CANCELLED, f"job {job.submission_id} was stopped, but not by this flow run"
        )
