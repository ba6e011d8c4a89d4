"""A training over all its attempts in this process: the resources that it owns, and how it ends."""

import asyncio
import enum
import math
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from logging import INFO, WARNING
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State
from prefect.context import TaskRunContext
from prefect.exceptions import Abort, TerminationSignal
from prefect.logging import get_run_logger
from prefect.states import Cancelled
from prefect.transactions import CommitMode, get_transaction
from prefect.utilities.urls import url_for
from prefect.variables import Variable

from prefect_elastic_train.blocks.lookup import Blocks, load_block, saved_name
from prefect_elastic_train.core.events import AttemptEnded, AttemptStarted, BlocksChanged, CheckpointCommitted, Event
from prefect_elastic_train.core.operator_settings import get_settings
from prefect_elastic_train.core.outcomes import (
    AttemptFailedError,
    ConfigurationError,
    ElasticTrainError,
    Outcome,
    TrainingTimeoutError,
)
from prefect_elastic_train.core.request import DriverSpec, RunRequest
from prefect_elastic_train.core.settings import MAX_RESTART_DELAY_SECONDS, RESTART_JITTER
from prefect_elastic_train.core.threads import start_thread
from prefect_elastic_train.core.time_limits import PUBLISHER_CLOSE_SECONDS, RUNNER_GRACE_SECONDS
from prefect_elastic_train.core.version import untested_ray
from prefect_elastic_train.driver.termination_signals import count_signals
from prefect_elastic_train.report.run_report import RunReport
from prefect_elastic_train.supervisor.follower import Follower
from prefect_elastic_train.supervisor.training_processes import TrainingProcesses
from prefect_elastic_train.trackers.tracked_run import mark_ended

from .arguments import driver_spec
from .flow_run_state import (
    FlowRunWatch,
    enclosing_flows,
    exit_with_flow_process,
    is_ending,
    last_event_time,
    mark_cancelled,
    outermost_ended_flow_run,
    query_prefect,
)
from .logs import RunLog
from .position import TrainingPosition
from .prefect_events import ATTEMPT_EVENTS, PREFIX
from .report_publisher import Publisher, prefect_key
from .saved_blocks import READ_SECONDS, ApplyBlocks, last_request
from .training_result import TrainingResult

#: Time limit for the signal of a runner whose flow run is cancelling.
_SIGNAL_SECONDS = RUNNER_GRACE_SECONDS + 10
_MARK_SECONDS = 30.0  # for the marks in trackers, if no runner waits for the end of the flow process


class Stop(BaseException):
    """Raised in the flow process when the training has to stop.

    A signal came, the training's coroutine was cancelled, or its flow run was cancelled or has ended.
    """

    def __init__(self, flow_run_id: str = "") -> None:
        super().__init__("the flow run was cancelled or has ended" if flow_run_id else "the flow process was stopped")
        #: The flow run that has ended; empty for a signal or a cancelled coroutine.
        self.flow_run_id = flow_run_id


class SilentEndError(AttemptFailedError):
    """The flow run has its state already, or another process sets it, so the flow must end without setting one.

    Prefect's ``Abort`` does that, but a task that raises it stays Running forever. So a task raises this error, which
    becomes an ``Abort`` in the flow.
    """


class TrainingState(enum.Enum):
    """The states of a training in this process. The value of a final state is shown in the report.

    ::

        CREATED ──► RUNNING ──► WAITING ──► RUNNING   a retryable error; the next attempt
                       │           │
                       │           └──► a final state: the call ends before the next attempt
                       ├──► DETACHING ──► DETACHED   the Ray job continues without this process
                       └──► any other final state

    From its first attempt to a final state, the training owns its processes, its log and its report.
    """

    CREATED = "created"
    RUNNING = "running"
    WAITING = "waiting"
    DETACHING = "detaching"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed out"
    INTERRUPTED = "interrupted"
    DETACHED = "continues as a job"
    #: Another process publishes the training now, or has set the state of its flow run.
    TAKEN_OVER = "taken over"


#: States in which the training owns its processes.
_OPEN_STATES = (TrainingState.RUNNING, TrainingState.WAITING, TrainingState.DETACHING)


#: Marks in trackers for final states, and their time limits. The loop marks a completed training.
_TRACKER_MARKS = {
    TrainingState.FAILED: ("FAILED", _MARK_SECONDS),
    TrainingState.TIMED_OUT: ("FAILED", _MARK_SECONDS),
    TrainingState.CANCELLED: ("KILLED", PUBLISHER_CLOSE_SECONDS),
}

#: Reasons for final states that an error does not explain.
_REASONS = {
    TrainingState.DETACHED: "the flow process was stopped; the job continues",
    TrainingState.INTERRUPTED: "the flow process was stopped; its commits are kept",
}


def classify_end(error: BaseException, is_detached: bool, is_end_requested: Callable[[], bool]) -> TrainingState:
    """Return the final state of a training that this error ended.

    Args:
        error: The error that ends the training.
        is_detached: True if the Ray job of the training continues without this process.
        is_end_requested: Returns True if a flow run around the training is cancelled or failed. Called after signals.
    """
    match error:
        case SilentEndError() | Abort():
            return TrainingState.TAKEN_OVER
        case _ if is_detached:
            return TrainingState.DETACHED
        case TimeoutError():
            return TrainingState.TIMED_OUT
        case AttemptFailedError(outcome=Outcome.CANCELLED) | KeyboardInterrupt() | asyncio.CancelledError():
            return TrainingState.CANCELLED
        case Stop() if error.flow_run_id:
            return TrainingState.CANCELLED
        case Exception():
            return TrainingState.FAILED
    # A cancellation and the loss of a machine send the same signal, so the state of the flow runs decides.
    return TrainingState.CANCELLED if is_end_requested() else TrainingState.INTERRUPTED


@dataclass(eq=False)
class Training(Follower):
    """A call of ``elastic_train``: one run, trained by one attempt after the other.

    Prefect calls the task's function again for each attempt, with this object as the argument. So it owns what outlives
    an attempt: processes, cluster and report. A copy in another process starts without them.

    Attributes:
        request: The run request.
        blocks: The loaded blocks of the current attempt.
        saved_blocks: Names of saved blocks by argument. Each attempt after the first loads them again, so that changed
            values are used.
        position: The flow runs around the training, and its number among the trainings of its flow run.
        timeout_seconds: Time limit from the call on; None for no limit.
        submitted: True if the caller has a future, from ``elastic_train.submit``.
    """

    request: RunRequest
    blocks: Blocks
    saved_blocks: Mapping[str, str]
    position: TrainingPosition
    timeout_seconds: float | None
    submitted: bool = False

    def __post_init__(self) -> None:
        #: True once the coroutine of the training is cancelled.
        self.cancelled = False
        #: The error that a cancelled training raises in its flow.
        self.cancellation: BaseException | None = None
        self._state = TrainingState.CREATED
        #: Deadline of the training on the monotonic clock. Changes of the system time do not move it.
        self._deadline = time.monotonic() + (self.timeout_seconds or math.inf)
        self._interruptions = count_signals()
        self._terminations = count_signals(signal.SIGTERM)
        #: Number of driver restarts left, according to the run's records.
        self._restarts_left = self.blocks.failures.driver_restarts
        #: Attempts in a row without a commit.
        self._idle_attempts = 0
        #: The blocks as they were read last, and those whose changes are published.
        self._newest_blocks = self._known_blocks = self.blocks
        self._blocks_due_at = 0.0
        #: Time of the newest request to apply changed blocks; negative while it is unknown.
        self._requested_at = -1.0
        #: True while a request waits for a commit, and after that commit.
        self._is_requested = self._is_committed = False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    def __repr__(self) -> str:
        # Prefect shows task parameters in some messages, and blocks and configs may hold secrets.
        return f"<training {self.request.run_name}>"

    def attempt(self) -> TrainingResult | State[Any]:
        """Run one attempt of the training. Return its result, or the state Cancelled. Called by Prefect's task.

        After a retryable error, processes, cluster and report are kept for the next attempt. Otherwise they are closed.
        """
        if self._state is TrainingState.CREATED:
            self._start()
        try:
            if self._state is TrainingState.WAITING:
                self._prepare_restart()
            self._enter(TrainingState.RUNNING)
            self._idle_attempts += 1
            ended = self._run_driver()
        except BaseException as error:
            if isinstance(error, AttemptFailedError) and error.retryable:
                if self._may_retry():
                    self._enter(TrainingState.WAITING)
                    self._log.note(f"A new driver follows: {error}", WARNING)
                    raise
                error.final = True
            return self._fail(error)
        self._enter(TrainingState.COMPLETED, is_published=ended.already_finished)
        return TrainingResult.model_validate(ended.result)

    def close(self, error: BaseException | None = None) -> None:
        """Close the training at the end of its call: stop its processes, and publish its end.

        Do nothing if the last attempt has closed it. An attempt that can be retried leaves it open for the next one,
        which may never start, for example after a signal. ``error`` is the exception that ends the call.
        """
        if self._state in _OPEN_STATES:
            self._end(error or Stop())

    def _enter(self, state: TrainingState, reason: str = "", is_published: bool = False) -> None:
        """Change the state of the training. The change to a final state closes its processes and its report.

        Args:
            state: The new state.
            reason: The reason for a final state.
            is_published: True if another process has published the end.
        """
        self._state = state
        if state in _OPEN_STATES:
            return
        continues = state in (TrainingState.DETACHED, TrainingState.TAKEN_OVER)
        try:
            self._watch.close()
            self._processes.close(keep_cluster=continues)
        finally:  # also if a runner's signal interrupts the closing
            status, seconds = _TRACKER_MARKS.get(state, ("", 0.0))
            runs = self._publisher.report.tracked if status else []
            marks = [start_thread(mark_ended, run, status, seconds, self._log.note) for run in runs]
            marked_by = time.monotonic() + seconds
            self._publisher.end(state.value, reason, is_published or continues)
            for mark in marks:
                mark.join(marked_by - time.monotonic())  # a process that a tracker starts may keep a pipe open

    def _start(self) -> None:
        """Start what the training owns until its end: log, report, the watch of its flow runs, and processes."""
        self._flows = list(enclosing_flows())
        exit_with_flow_process(self._flows)
        settings = get_settings()
        flow_run_ids = self.position.flow_run_ids
        flow_run_id = flow_run_ids[0] if flow_run_ids else ""
        report = RunReport(
            run_name=self.request.run_name,
            run_uri=f"{self.blocks.storage.uri}/{self.request.run_name}",
            totals=self.request.totals,
            score_attribute=self.blocks.checkpoints.score_attribute,
            score_order=self.blocks.checkpoints.score_order,
            flow_run_url=(url_for("flow-run", flow_run_id) if flow_run_id else "") or "",
            storage_block=saved_name(self.blocks.storage),
        )
        self._log = RunLog(get_run_logger(), settings.log_lines_per_second)
        self._log.note(untested_ray(), WARNING)
        self._publisher = Publisher(
            report,
            self._log.note,
            interval_seconds=settings.report_interval_seconds,
            flow_run_id=flow_run_id,
            related=self.position.related,
        )
        if settings.reporting:
            self._publisher.start()
        self._watch = FlowRunWatch(flow_run_ids, settings.flow_run_check_seconds, self._read_changes)
        self._processes = TrainingProcesses(settings, self)

    def _end(self, error: BaseException) -> TrainingState:
        """Stop the processes of a training that ``error`` ends, and publish its end. Return the final state.

        Between two attempts, also stop the Ray job that the last attempt could no longer follow, unless it may continue
        without this process.
        """
        if self._state is TrainingState.WAITING and not self._may_detach(error):
            self._processes.stop_job()
        state = classify_end(error, self._state is TrainingState.DETACHING, self._is_end_requested)
        is_explained = isinstance(error, AttemptFailedError) or not isinstance(error, Exception)
        self._enter(state, _REASONS.get(state) or (str(error) if is_explained else f"{type(error).__name__}: {error}"))
        return state

    def _fail(self, error: BaseException) -> State[Any]:
        """Close the training after an error that no attempt follows: stop its processes, and publish its end.

        Return the state Cancelled for a cancelled training; otherwise raise the error.
        """
        state = self._end(error)
        reason = str(error) or "its flow process was stopped"
        if isinstance(error, Stop) and error.flow_run_id:
            error = self._flow_run_error(error)
        if state is TrainingState.CANCELLED and not self.submitted:
            self.cancellation = error  # the flow raises it after its task is Cancelled
            if transaction := get_transaction():  # an enclosing transaction would roll the state back
                transaction.commit_mode = CommitMode.EAGER
            return Cancelled(
                message=f"The training was cancelled: {reason}; a Retry of the flow run resumes from the last "
                "checkpoint, if any"
            )
        if self.submitted and isinstance(error, SilentEndError):
            raise Abort(str(error))  # with a future, no call of elastic_train converts it
        raise error

    def _may_retry(self) -> bool:
        """Return True if another attempt may follow, and set the retries of Prefect's task accordingly.

        When no driver restarts are left, one more attempt may follow after a commit: an earlier attempt may no longer
        count by then, which the next driver finds out from the run directory.
        """
        context = TaskRunContext.get()
        assert context
        failures = self.blocks.failures
        left = max(self._restarts_left, failures.forgive_after_seconds > 0 and not self._idle_attempts)
        context.task.retries = context.task_run.run_count - 1 + left
        return left > 0 and self._idle_attempts <= failures.driver_restarts

    def _prepare_restart(self) -> None:
        """Wait for the delay before a driver restart, and load the saved blocks again.

        The cluster is supervised meanwhile, which Prefect's own retry delay would not do. The previous blocks are kept
        if Prefect's API does not answer.
        """
        if self._idle_attempts:
            delay = restart_delay(self._idle_attempts, self.blocks.failures.driver_restart_delay_seconds)
            seconds = delay * random.uniform(1.0, RESTART_JITTER)
            self._log.note(f"The next driver starts in {seconds:.0f} s")
            self._processes.wait(seconds)
        try:
            blocks = self._load_blocks()
        except ConfigurationError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the API does
            self._log.note(
                f"the blocks of training {self.request.run_name!r} cannot be loaded now: {type(error).__name__}: "
                f"{error}. They are used as they were at the attempt before",
                WARNING,
            )
            return
        if blocks != self.blocks:
            self._log.note("A saved block has changed since the previous attempt; this attempt uses the new values")
        self.blocks = blocks

    def _load_blocks(self) -> Blocks:
        loaded = {argument: load_block(argument, name) for argument, name in self.saved_blocks.items()}
        return self.blocks._replace(**loaded)

    def _read_changes(self, client: SyncPrefectClient) -> None:
        """Read requests to apply changed blocks, and then the blocks, every 15 s. Called in the thread of the watch."""
        if not self.saved_blocks or time.monotonic() < self._blocks_due_at:
            return
        self._blocks_due_at = time.monotonic() + READ_SECONDS
        requested_at = last_request(client, self.request.run_name)
        self._newest_blocks = self._load_blocks()
        # The first one may be of the time of an earlier process.
        self._is_requested = self._is_requested or requested_at > self._requested_at >= 0
        self._requested_at = requested_at

    def _apply_changes(self) -> None:
        """Publish that saved blocks have changed.

        Raise ApplyBlocks if that was requested, and a checkpoint was committed since, or the training waits for
        capacity. It does not while workers restart, because they may restore a later step from memory.
        """
        newest = self._newest_blocks
        if newest != self._known_blocks and newest != self.blocks:
            self._publish(BlocksChanged())
        self._known_blocks = newest
        if self._is_requested and (self._is_committed or self._publisher.report.state == "waiting for capacity"):
            self._is_requested = self._is_committed = False
            if newest != self.blocks and self._state is TrainingState.RUNNING:  # else the next attempt uses them
                raise ApplyBlocks

    def _run_driver(self) -> AttemptEnded:
        """Run one driver until it exits. Return its final event if it completed the run; otherwise raise an error.

        If changed blocks are to be applied, another driver follows.
        """
        ended = None
        while not ended:
            try:
                self.check_stop()
                ended = self._processes.run_attempt(self._next_spec())
            except ApplyBlocks:
                self._publish(BlocksChanged(is_applied=True))
                before = self.blocks
                self.blocks = self._newest_blocks
                if (before.scaling, before.cluster) != (self.blocks.scaling, self.blocks.cluster):
                    self._processes.close(keep_cluster=True)  # a local cluster may need other CPUs or GPUs
            finally:
                self._log.close()
        if not ended.sequence:
            # The driver sent no final event. The time since its last event is not counted.
            self._publisher.add(ended.model_copy(update={"at": self._publisher.report.last_event_at or ended.at}))
        if ended.outcome is Outcome.COMPLETED:
            return ended
        cause = self._log.loop_error if ended.outcome is Outcome.USER_ERROR else ""
        raise attempt_error(self.request.run_name, ended) from (ElasticTrainError(cause) if cause else None)

    def _next_spec(self) -> DriverSpec:
        """Return the spec of the next driver: run request, blocks and time limit."""
        request = self.request
        if request.resumed and not request.begun:  # perhaps in an earlier process
            request = replace(request, begun=bool(self._last_event_time(event={"name": ATTEMPT_EVENTS})))
        storage_block = saved_name(self.blocks.storage)
        if storage_block and self.blocks.storage.preflight:
            variable = prefect_key("elastic-train-storage", storage_block)
            uri = query_prefect(lambda client: str(getattr(client.read_variable_by_name(variable), "value", "")))
            # Without an answer, no variable: the storage that is used now must not replace the known one.
            request = replace(request, known_storage=("", "") if uri is None else (uri, variable))
        self.request = request
        return replace(
            driver_spec(request, self.blocks),
            previous_end=self._publisher.report.last_end,
            ends_at=self._deadline - time.monotonic() + time.time(),
        )

    def on_event(self, event: Event, replayed: bool) -> None:
        """Log and publish an event of the driver, and count restarts and commits by it. Called by the supervisor.

        An earlier process of the flow run has logged and published a replayed event.
        """
        if isinstance(event, CheckpointCommitted):
            self._idle_attempts = 0
            self._is_committed = self._is_requested
        elif isinstance(event, AttemptStarted):
            self._restarts_left = event.left.get("driver restart", self._restarts_left)
            self.request = replace(self.request, begun=True)
            known_uri, variable = self.request.known_storage
            uri = event.run_uri.rpartition("/")[0]
            if variable and uri != known_uri:  # the next attempt reads it again
                # Without ``_sync``, ``set`` returns a coroutine in an async flow.
                query_prefect(lambda _: Variable.set(variable, uri, overwrite=True, _sync=True))  # type: ignore[call-arg]
        self._publish(event, replayed)

    def on_line(self, source: str, text: str) -> None:
        """Log a line of output of the driver or the local cluster. Called by the supervisor."""
        self._log.line(source, text)

    def on_note(self, text: str, level: int = INFO) -> None:
        """Log a message of the supervisor about the processes of the training."""
        self._log.note(text, level)

    def check_stop(self) -> None:
        """Raise an exception if the training has to stop. The supervisor calls this several times a second.

        Raises:
            Stop: A signal came, the coroutine of the training was cancelled, or its flow run was cancelled or has
                ended.
            ApplyBlocks: A person requested that changed blocks are applied, and this is the time to do it.
            TrainingTimeoutError: ``timeout_seconds`` have passed.
        """
        if self._is_interrupted():
            raise Stop
        if self._watch.ended:
            raise Stop(self._watch.ended)
        if time.monotonic() > self._deadline:
            raise TrainingTimeoutError(
                f"training {self.request.run_name!r} was stopped after timeout_seconds={self.timeout_seconds:g}; its "
                "commits are kept, and a retry of the flow run resumes from there",
                outcome=Outcome.TIMED_OUT,
            )
        self._apply_changes()

    def keeps_job(self, reason: BaseException) -> bool:
        """Return True if the Ray job continues after ``reason`` was raised here, so that another process can follow it.

        It does after SIGTERM, unless the flow run is cancelled or failed.
        """
        if self._may_detach(reason):
            self._enter(TrainingState.DETACHING)
        return self._state is TrainingState.DETACHING

    def saves_first(self, reason: BaseException) -> bool:
        """Return True if a session saves before its driver ends.

        It does before changed blocks are applied, and after SIGTERM that is not a cancellation.
        """
        saves = isinstance(reason, ApplyBlocks) or self._may_detach(reason)
        return saves and get_settings().termination_grace_seconds > 0

    def logged_until(self) -> float:
        """Return the time up to which an earlier process has published this training's events; 0 if there are none.

        It is the current time if that is unknown, so that nothing is published twice.
        """
        published = self._last_event_time()
        return time.time() if published is None or not get_settings().reporting else published

    def _publish(self, event: Event, replayed: bool = False) -> None:
        self._publisher.add(event, replayed)
        self._log.event(event, replayed)

    def _last_event_time(self, **more: Any) -> float | None:
        """Return the time of the newest Prefect event of this run, as :func:`last_event_time` does.

        ``more`` are further conditions for the event. It is None if the Prefect API does not answer.
        """
        # Other flow runs may have runs of the same name in other storages.
        flow_run = f"prefect.flow-run.{self.request.owner.flow_run_id}"
        own = {"resource": {"id": [f"{PREFIX}{self.request.run_name}"]}, "related": {"id": [flow_run]}}
        return query_prefect(last_event_time, own | more)

    def _may_detach(self, reason: BaseException) -> bool:
        # The loss of a machine sends SIGTERM, and so does a runner that carries out a cancellation. In the main thread
        # Prefect's own signal handler raises; in other threads only `count_signals` has the signal.
        terminated = isinstance(reason, TerminationSignal) or count_signals(signal.SIGTERM) > self._terminations
        return terminated and classify_end(reason, False, self._is_end_requested) is TrainingState.INTERRUPTED

    def _is_interrupted(self) -> bool:
        return self.cancelled or count_signals() > self._interruptions or any(map(is_ending, self._flows))

    def _is_end_requested(self) -> bool:
        """Query Prefect, and return True if a flow run around the training is cancelling, cancelled or failed.

        Also return True outside of flows, where no process would resume the training.
        """
        flow_run_ids = self.position.flow_run_ids
        return not flow_run_ids or bool(query_prefect(outermost_ended_flow_run, flow_run_ids))

    def _flow_run_error(self, stop: Stop) -> AttemptFailedError:
        """Return the error to raise after a flow run around the training was cancelled or has ended.

        Set a cancelling flow run to Cancelled if no runner signals the cancellation in time.
        """
        # A runner signals a cancellation, which Prefect's engine recognizes, and sets the final state. A dead runner
        # does neither, and subflows have none. A subflow that is cancelled alone fails its parent.
        is_root = stop.flow_run_id == self.request.owner.flow_run_id
        flow_run_ids = self.position.flow_run_ids
        has_runner = os.environ.get("PREFECT__ENABLE_CANCELLATION_AND_CRASHED_HOOKS", "true").lower() == "false"
        deadline = time.monotonic() + (_SIGNAL_SECONDS if is_root and has_runner else 0)
        while time.monotonic() < deadline:
            if self._is_interrupted():
                break
            time.sleep(0.1)
        else:  # with the subflows around the training
            query_prefect(mark_cancelled, flow_run_ids[: flow_run_ids.index(stop.flow_run_id) + 1])
        error_type = SilentEndError if is_root else AttemptFailedError
        return error_type(f"training {self.request.run_name!r} was stopped: {stop}", outcome=Outcome.CANCELLED)


def restart_delay(restart: int, first_delay_seconds: float) -> float:
    """Return the seconds to wait before the next driver starts.

    ``restart`` is the number of attempts in a row without a commit. Each doubles the delay, up to 300 s or to the first
    delay if that is longer.
    """
    return min(max(MAX_RESTART_DELAY_SECONDS, first_delay_seconds), first_delay_seconds * 2.0 ** min(restart - 1, 50))


def attempt_error(run_name: str, ended: AttemptEnded) -> AttemptFailedError:
    """Return the exception for an attempt that did not complete the run.

    It is a SilentEndError if another process has taken over the run, and a TrainingTimeoutError after the time limit.
    """
    attempt = f"attempt {ended.attempt}" if ended.attempt else "the driver"
    error_types = {Outcome.SUPERSEDED: SilentEndError, Outcome.TIMED_OUT: TrainingTimeoutError}
    return error_types.get(ended.outcome, AttemptFailedError)(
        f"training {run_name!r}, {attempt}: {ended.outcome.value}: {ended.message}",
        outcome=ended.outcome,
        attempt=ended.attempt,
        final=ended.final,
    )
