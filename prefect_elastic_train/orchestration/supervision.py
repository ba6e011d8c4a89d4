"""A training over all its attempts in this process: the resources that it owns, and how it ends."""

from __future__ import annotations

import asyncio
import enum
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from logging import INFO, WARNING
from typing import Any, NamedTuple
from uuid import UUID

from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import Abort, TerminationSignal
from prefect.logging import get_logger, get_run_logger
from prefect.states import Cancelled
from prefect.transactions import CommitMode, get_transaction
from prefect.utilities.urls import url_for
from prefect.variables import Variable

from prefect_elastic_train.blocks.lookup import Blocks, load_block
from prefect_elastic_train.core.events import AttemptEnded, AttemptStarted, CheckpointCommitted, Event
from prefect_elastic_train.core.operator_settings import get_settings
from prefect_elastic_train.core.outcomes import (
    AttemptFailedError,
    ConfigurationError,
    ElasticTrainError,
    Outcome,
    TrainingTimeoutError,
)
from prefect_elastic_train.core.request import DriverSpec, RunRequest
from prefect_elastic_train.core.time_limits import RUNNER_GRACE_SECONDS
from prefect_elastic_train.driver.termination_signals import count_signals
from prefect_elastic_train.orchestration.arguments import driver_spec
from prefect_elastic_train.orchestration.flow_run_state import (
    FlowRunWatch,
    enclosing_flows,
    exit_with_flow_process,
    has_begun,
    is_ending,
    last_log_time,
    mark_cancelled,
    outermost_ended_flow_run,
    query_prefect,
)
from prefect_elastic_train.orchestration.logs import RunLog
from prefect_elastic_train.orchestration.position import TrainingPosition
from prefect_elastic_train.orchestration.report_publisher import Publisher, prefect_key
from prefect_elastic_train.orchestration.training_result import TrainingResult
from prefect_elastic_train.report.run_report import RunReport
from prefect_elastic_train.supervisor.follower import Follower
from prefect_elastic_train.supervisor.training_processes import TrainingProcesses

#: Time limit for the signal of a runner whose flow run is cancelling.
_SIGNAL_SECONDS = RUNNER_GRACE_SECONDS + 10
_MAX_DELAY_SECONDS = 300.0


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


class End(str, enum.Enum):
    """The final state of a training in its report and its events."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed out"
    INTERRUPTED = "interrupted"
    DETACHED = "left to its job"


class Ending(NamedTuple):
    """The final state of a training, and the reason."""

    end: End
    reason: str = ""


def classify_end(error: BaseException, detached: bool, is_end_requested: Callable[[], bool]) -> Ending | None:
    """Return the final state and the reason of a training that this error ended.

    Return None if another process publishes the training now, or has set the state of its flow run.

    Args:
        error: The error that ends the training.
        detached: The Ray job of the training continues without this process.
        is_end_requested: Returns True if a flow run around the training is cancelled or failed. Called after signals.
    """
    # A cancellation and the loss of a machine send the same signal, so the state of the flow runs decides.
    if isinstance(error, SilentEndError | Abort):
        return None
    if detached:
        return Ending(End.DETACHED, "the flow process was stopped; the job continues")
    if isinstance(error, TimeoutError):
        return Ending(End.TIMED_OUT, str(error))
    if isinstance(error, AttemptFailedError):
        return Ending(End.CANCELLED if error.outcome is Outcome.CANCELLED else End.FAILED, str(error))
    if isinstance(error, Exception):
        return Ending(End.FAILED, f"{type(error).__name__}: {error}")
    by_state = isinstance(error, Stop) and error.flow_run_id
    if by_state or isinstance(error, KeyboardInterrupt | asyncio.CancelledError) or is_end_requested():
        return Ending(End.CANCELLED, str(error))
    return Ending(End.INTERRUPTED, "the flow process was stopped; its commits are kept")


@dataclass(eq=False, repr=False)
class Training(Follower):
    """A call of ``elastic_train``: one run, trained by one attempt after the other.

    Prefect calls the task's function again for each attempt, with this object as the argument. So it owns what outlives
    an attempt: processes, cluster and report. A copy in another process starts without them.

    Attributes:
        request: The run request.
        blocks: The loaded blocks of the current attempt.
        saved_blocks: Names of saved blocks by argument. Each attempt after the first loads them again, so that changed
            credentials are used.
        position: The flow runs around the training, and its number among the trainings of its flow run.
        timeout_seconds: Time limit from the call on; None for no limit.
        submitted: True if the caller has a future, from ``elastic_train.submit``.
    """

    request: RunRequest
    blocks: Blocks
    saved_blocks: Mapping[str, str]
    position: TrainingPosition
    timeout_seconds: float | None = None
    submitted: bool = False

    def __post_init__(self) -> None:
        #: Set when the coroutine of the training is cancelled.
        self.cancelled = threading.Event()
        #: The error that a cancelled training raises in its flow.
        self.cancellation: BaseException | None = None
        self._called_at = time.monotonic()
        self._interruptions = count_signals()
        self._terminations = count_signals(signal.SIGTERM)
        # From the first attempt to the end. There is no publisher if the settings turn reporting off.
        self._runtime: TrainingProcesses | None = None
        self._watch: FlowRunWatch
        self._log: RunLog
        self._publisher: Publisher | None = None
        #: The spec of the previous attempt.
        self._spec: DriverSpec | None = None
        #: The context of the attempt's task run, and of the flows around it.
        self._context: TaskRunContext | None = None
        self._flows: list[FlowRunContext] = []
        #: Driver restarts that the run's records leave.
        self._restarts_left = 0
        #: Attempts in a row without a commit.
        self._idle_attempts = 0
        #: The job continues without this process.
        self._is_detached = False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    def __repr__(self) -> str:
        # Prefect shows task parameters in some messages, and blocks and configs may hold secrets.
        return f"<training {self.request.run_name}>"

    def attempt(self) -> TrainingResult | State[Any]:
        """Run one attempt of the training. Return its result, or the state Cancelled. Called by Prefect's task.

        After a retryable error, processes, cluster and report are kept for the next attempt. Otherwise they are closed.
        """
        self._context = TaskRunContext.get()
        self._flows = list(enclosing_flows())
        self._is_detached = False
        exit_with_flow_process(self._flows)
        if self._runtime is None:
            self._restarts_left = self.blocks.failures.driver_restarts
            self._runtime = self._start()
        try:
            if self._idle_attempts:
                self._wait_before_restart(self._runtime)
            self._idle_attempts += 1
            ended = self._run_driver(self._runtime)
        except BaseException as error:
            self._log.close()
            if isinstance(error, AttemptFailedError) and error.retryable:
                if self._may_retry():
                    self._log.note(f"A new driver follows: {error}", WARNING)
                    raise
                error.final = True
            return self._fail(self._runtime, error)
        self._log.close()
        self._finish(self._runtime, Ending(End.COMPLETED), is_published=ended.already_finished)
        return TrainingResult.model_validate(ended.result)

    def close(self, error: BaseException | None = None) -> None:
        """Close the training at the end of its call: stop its processes, and publish its end.

        Do nothing if the last attempt has closed it. An attempt leaves that to the next one, which does not follow
        after, for example, a signal between the two. ``error`` is the exception that ends the call.
        """
        if self._runtime is not None:
            reason = error or Stop()
            self._stop_lost_job(self._runtime, reason)
            self._finish(self._runtime, classify_end(reason, self._is_detached, self._is_end_requested))

    def _fail(self, runtime: TrainingProcesses, error: BaseException) -> State[Any]:
        """Close the training after an error that no attempt follows: stop its processes, and publish its end.

        Return the state Cancelled for a cancelled training; otherwise raise the error.
        """
        ending = classify_end(error, self._is_detached, self._is_end_requested)
        self._finish(runtime, ending)
        if isinstance(error, Stop) and error.flow_run_id:
            error = self._flow_run_error(error)
        if ending is not None and ending.end is End.CANCELLED and not self.submitted:
            self.cancellation = error  # the flow raises it after its task is Cancelled
            if (transaction := get_transaction()) is not None:  # an enclosing transaction would roll the state back
                transaction.commit_mode = CommitMode.EAGER
            reason = ending.reason or "its flow process was stopped"
            hint = "a Retry of the flow run resumes from the last checkpoint, if any"
            return Cancelled(message=f"The training was cancelled: {reason}; {hint}")
        if self.submitted and isinstance(error, SilentEndError):
            raise Abort(str(error))  # no call converts it for the user of a future
        raise error

    def _may_retry(self) -> bool:
        """Return True if another attempt may follow, and set the retries of Prefect's task accordingly.

        When no driver restarts are left, one more attempt may follow after a commit: an earlier attempt may no longer
        count by then, which the next driver finds out from the run directory.
        """
        if self._context is None:
            return False
        failures = self.blocks.failures
        left = max(self._restarts_left, failures.forgive_after_seconds > 0 and not self._idle_attempts)
        self._context.task.retries = self._context.task_run.run_count - 1 + left
        return left > 0 and self._idle_attempts <= failures.driver_restarts

    def _start(self) -> TrainingProcesses:
        settings = get_settings()
        logger = get_logger("elastic_train") if self._context is None else get_run_logger()
        self._log = RunLog(logger, settings.log_lines_per_second)
        self._watch = FlowRunWatch(self.position.flow_run_ids, settings.flow_run_check_seconds)
        return TrainingProcesses(settings, self)

    def _finish(self, runtime: TrainingProcesses, ending: Ending | None, is_published: bool = False) -> None:
        publisher = self._publisher
        self._runtime = None
        self._publisher = None
        try:
            self._watch.close()
            runtime.close()
        finally:  # also after the signal of a runner
            if publisher is not None and ending is not None:
                publisher.end(ending.end.value, ending.reason, is_published or ending.end is End.DETACHED)
            elif publisher is not None:
                publisher.abandon()

    def _wait_before_restart(self, runtime: TrainingProcesses) -> None:
        """Wait for the delay before a driver restart, and supervise the cluster meanwhile.

        Prefect's own retry delay would not supervise it.
        """
        delay = restart_delay(self._idle_attempts, self.blocks.failures.driver_restart_delay_seconds)
        seconds = delay * random.uniform(1.0, 1.2)
        self._log.note(f"The next driver starts in {seconds:.0f} s")
        try:
            runtime.wait(seconds)
        except BaseException as reason:
            self._stop_lost_job(runtime, reason)
            raise

    def _stop_lost_job(self, runtime: TrainingProcesses, reason: BaseException) -> None:
        """Stop the Ray job that the previous attempt could no longer follow.

        Keep it if it may continue without this process after ``reason``, the exception that ends the training.
        """
        if not self._may_detach(reason):
            runtime.stop_job()

    def _run_driver(self, runtime: TrainingProcesses) -> AttemptEnded:
        """Run one driver until it exits. Return its final event if it completed the run; otherwise raise an error."""
        self.check_stop()
        spec = self._next_spec()
        if self._publisher is None and runtime.settings.reporting:
            self._publisher = self._make_publisher(spec, runtime.settings.report_interval_seconds)
        ended = runtime.run_attempt(spec)
        if self._publisher is not None and not ended.sequence:
            # The driver sent no final event. The time since its last event is not counted.
            self._publisher.add(ended.model_copy(update={"at": self._publisher.report.last_event_at or ended.at}))
        if ended.outcome is not Outcome.COMPLETED or ended.result is None:
            loop_error = ended.outcome is Outcome.USER_ERROR and self._log.loop_error
            raise attempt_error(spec.request.run_name, ended) from (
                ElasticTrainError(loop_error) if loop_error else None
            )
        return ended

    def _make_publisher(self, spec: DriverSpec, interval_seconds: float) -> Publisher:
        flow_run_id = next(iter(self.position.flow_run_ids), "")
        report = RunReport(
            run_name=spec.request.run_name,
            totals=spec.request.totals,
            score_attribute=spec.checkpoints.score_attribute,
            score_order=spec.checkpoints.score_order,
            flow_run_url=(url_for("flow-run", UUID(flow_run_id)) if flow_run_id else "") or "",
        )
        return Publisher(
            report,
            interval_seconds=interval_seconds,
            storage_block=spec.storage_block,
            flow_run_id=flow_run_id,
            related=self.position.related,
            on_error=self._log.note,
        )

    def _next_spec(self) -> DriverSpec:
        """Return the spec of the next driver: run request, blocks and time limit.

        Each attempt after the first loads the saved blocks again.
        """
        if self.request.resumed and not self.request.begun:  # perhaps in an earlier process
            run = (self.request.run_name, self.request.owner.flow_run_id)
            begun = query_prefect(lambda client: has_begun(client, *run))
            self.request = replace(self.request, begun=bool(begun))
        if self._spec is not None:
            self._reload_blocks()
        publisher = self._publisher
        spec = driver_spec(self.request, self.blocks, publisher.report.last_end if publisher is not None else "")
        if spec.storage_block and spec.storage.preflight and not self.request.known_storage[1]:
            self._load_known_storage(prefect_key(spec.storage_block, "storage"))
        left = self.timeout_seconds and self.timeout_seconds - time.monotonic() + self._called_at
        self._spec = replace(spec, request=self.request, ends_at=time.time() + left if left else 0.0)
        return self._spec

    def _reload_blocks(self) -> None:
        """Load the saved blocks again; keep the previous ones if Prefect's API does not answer."""
        try:
            loaded: dict[str, Any] = {
                argument: load_block(argument, name) for argument, name in self.saved_blocks.items()
            }
        except ConfigurationError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the API does
            name = self.request.run_name
            problem = f"the blocks of training {name!r} cannot be loaded now: {type(error).__name__}: {error}"
            self._log.note(f"{problem}. They are used as they were at the attempt before", WARNING)
            return
        if any(dict(block) != dict(getattr(self.blocks, argument)) for argument, block in loaded.items()):
            self._log.note("A saved block has changed since the previous attempt; this attempt uses the new values")
        self.blocks = self.blocks._replace(**loaded)

    def _load_known_storage(self, variable: str) -> None:
        """Read from a Prefect variable the storage URI of earlier trainings with the same saved block.

        The URI and the variable are stored in the run request, unless the Prefect API does not answer.
        """
        uri = query_prefect(lambda client: str(getattr(client.read_variable_by_name(variable), "value", "")))
        if uri is not None:  # else the next attempt tries again
            self.request = replace(self.request, known_storage=(uri, variable))

    def _write_known_storage(self, uri: str) -> None:
        known_uri, variable = self.request.known_storage
        if not variable or known_uri == uri:
            return
        self.request = replace(self.request, known_storage=(uri, variable))
        # Without ``_sync``, ``set`` returns a coroutine in an async flow.
        write = partial(Variable.set, variable, uri, overwrite=True, _sync=True)  # type: ignore[call-arg]
        query_prefect(lambda client: write())

    def on_event(self, event: Event, replayed: bool) -> None:
        """Log and publish an event of the driver, and count restarts and commits by it. Called by the supervisor.

        An earlier process of the flow run has logged and published a replayed event.
        """
        if isinstance(event, CheckpointCommitted):
            self._idle_attempts = 0
        elif isinstance(event, AttemptStarted):
            self._restarts_left = event.left.get("driver restart", self._restarts_left)
            self.request = replace(self.request, begun=True)
            self._write_known_storage(event.run_uri.rpartition("/")[0])
        if self._publisher is not None:
            self._publisher.add(event, replayed)
        self._log.event(event, replayed)

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
            TrainingTimeoutError: ``timeout_seconds`` have passed.
        """
        if self._is_interrupted():
            raise Stop
        if self._watch.ended:
            raise Stop(self._watch.ended)
        if self.timeout_seconds is not None and time.monotonic() - self._called_at > self.timeout_seconds:
            raise TrainingTimeoutError(
                f"training {self.request.run_name!r} was stopped after timeout_seconds={self.timeout_seconds:g}; its "
                "commits are kept, and a retry of the flow run resumes from there",
                outcome=Outcome.TIMED_OUT,
            )

    def keeps_job(self, reason: BaseException) -> bool:
        """Return True if the Ray job continues after ``reason`` was raised here, so that another process can follow it.

        It does after SIGTERM, unless the flow run is cancelled or failed.
        """
        self._is_detached = self._may_detach(reason)
        return self._is_detached

    def logged_until(self) -> float:
        """Return the time up to which an earlier process has logged this training's events (seconds since the epoch).

        It is the current time if there is no such process, or if the Prefect API does not answer.
        """
        query = partial(last_log_time, run_name=self.request.run_name, flow_run_ids=self.position.flow_run_ids)
        return query_prefect(query) or time.time()

    def _may_detach(self, reason: BaseException) -> bool:
        # The loss of a machine sends SIGTERM, and so does a runner that carries out a cancellation. In the main thread
        # Prefect's own signal handler raises; in other threads only `count_signals` has the signal.
        if isinstance(reason, TimeoutError) or (isinstance(reason, Stop) and reason.flow_run_id):
            return False
        terminated = isinstance(reason, TerminationSignal) or count_signals(signal.SIGTERM) > self._terminations
        return terminated and not self._is_end_requested()

    def _is_interrupted(self) -> bool:
        interrupted = self.cancelled.is_set() or count_signals() > self._interruptions
        return interrupted or any(map(is_ending, self._flows))

    def _is_end_requested(self) -> bool:
        """Query Prefect, and return True if a flow run around the training is cancelling, cancelled or failed.

        Also return True outside of flows, where no process would resume the training.
        """
        ids = self.position.flow_run_ids
        query = partial(outermost_ended_flow_run, flow_run_ids=ids)
        return not ids or bool(query_prefect(query))

    def _flow_run_error(self, stop: Stop) -> AttemptFailedError:
        """Return the error to raise after a flow run around the training was cancelled or has ended.

        Set a cancelling flow run to Cancelled if no runner signals the cancellation in time.
        """
        # A runner signals a cancellation, which Prefect's engine recognizes, and sets the final state. A dead runner
        # does neither, and subflows have none. A subflow that is cancelled alone fails its parent.
        is_root = stop.flow_run_id == self.request.owner.flow_run_id
        ids = self.position.flow_run_ids
        ended = ids[: ids.index(stop.flow_run_id) + 1]  # with the subflows around the training
        has_runner = os.environ.get("PREFECT__ENABLE_CANCELLATION_AND_CRASHED_HOOKS", "true").lower() == "false"
        deadline = time.monotonic() + (_SIGNAL_SECONDS if is_root and has_runner else 0)
        while time.monotonic() < deadline:
            if self._is_interrupted():
                break
            time.sleep(0.1)
        else:
            query_prefect(lambda client: mark_cancelled(client, ended))
        error_type = SilentEndError if is_root else AttemptFailedError
        return error_type(f"training {self.request.run_name!r} was stopped: {stop}", outcome=Outcome.CANCELLED)


def restart_delay(restart: int, first_delay_seconds: float) -> float:
    """Return the seconds to wait before the next driver starts.

    ``restart`` is the number of attempts in a row without a commit. Each doubles the delay, up to 300 s or to the first
    delay if that is longer.
    """
    return min(max(_MAX_DELAY_SECONDS, first_delay_seconds), first_delay_seconds * 2.0 ** min(restart - 1, 50))


def attempt_error(run_name: str, ended: AttemptEnded) -> AttemptFailedError:
    """Return the exception for an attempt that did not complete the run.

    It is a SilentEndError if another process has taken over the run, and a TrainingTimeoutError after the time limit.
    """
    if ended.outcome is Outcome.SUPERSEDED:
        # The other process sets the state of the flow run.
        return SilentEndError(f"training {run_name!r}: {ended.message}", outcome=ended.outcome)
    attempt = f"attempt {ended.attempt}" if ended.attempt else "the driver"
    error_type = TrainingTimeoutError if ended.outcome is Outcome.TIMED_OUT else AttemptFailedError
    return error_type(
        f"training {run_name!r}, {attempt}: {ended.outcome.value}: {ended.message}",
        outcome=ended.outcome,
        attempt=ended.attempt,
        final=ended.final,
    )
