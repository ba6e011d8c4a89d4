"""One training over all its attempts in this process: what it owns, and how it goes from one state to the next."""

from __future__ import annotations

import contextvars
import enum
import signal
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any

from prefect.context import TaskRunContext
from prefect.exceptions import Abort
from prefect.logging import get_logger, get_run_logger

from prefect_elastic_train.core.events import AttemptEnded, Event
from prefect_elastic_train.core.operator_settings import get_settings
from prefect_elastic_train.core.outcomes import (
    AttemptFailedError,
    ConfigurationError,
    Outcome,
    TrainingTimeoutError,
)
from prefect_elastic_train.core.request import RunRequest
from prefect_elastic_train.core.spec import DriverSpec
from prefect_elastic_train.driver.interruptions import interruptions
from prefect_elastic_train.orchestration.arguments import GivenBlock, driver_spec
from prefect_elastic_train.orchestration.cancellation import (
    FlowRunWatch,
    FlowsAround,
    Stop,
    StopReason,
    mark_cancelled,
    wants_an_end,
    watched_by_runner,
)
from prefect_elastic_train.orchestration.endings import End, Ending, SilentEndError, detaches, ending_of, error_of
from prefect_elastic_train.orchestration.flow_runs import Place
from prefect_elastic_train.orchestration.logs import RunLog
from prefect_elastic_train.orchestration.prefect_api import last_told_at
from prefect_elastic_train.orchestration.publisher import Publisher
from prefect_elastic_train.orchestration.result import TrainingResult
from prefect_elastic_train.report.run_report import RunReport
from prefect_elastic_train.supervisor.runtime import Runtime

#: How long the state of a flow run is asked for when its process is told to end.
_STATE_SECONDS = 8.0
#: How much later than it happens an event of a job may be told: rather told twice than never.
_TOLD_LATE_SECONDS = 2.0
#: How long the signal of a runner is waited for once its flow run is seen cancelling; it kills after 30 s.
_SIGNAL_SECONDS = 40.0
#: Between two looks at what waits for the next attempt.
_WAIT_SECONDS = 0.5


class _State(enum.Enum):
    """Asked, then in turn training and waiting for the next attempt, until it has ended."""

    ASKED = enum.auto()
    TRAINING = enum.auto()
    WAITING = enum.auto()
    ENDED = enum.auto()


class Training:
    """A call of ``elastic_train``: one run, trained by one attempt after the other.

    Prefect runs the task's function anew for each attempt, with the same argument. This is that argument, so that
    what outlives an attempt (processes, cluster, report) has an owner and an end. In another process it begins anew.

    Args:
        request: What was asked for.
        blocks: Its blocks by argument; those given by name are loaded anew at each attempt.
        place: Which training of which flow run it is.
        timeout_seconds: After so many seconds from now it is ended; None for no bound.
        submitted: Its caller holds a future.
    """

    def __init__(
        self,
        request: RunRequest,
        blocks: Mapping[str, GivenBlock],
        place: Place,
        timeout_seconds: float | None = None,
        submitted: bool = False,
    ) -> None:
        self.request = request
        self.blocks = blocks
        self.place = place
        self.timeout_seconds = timeout_seconds
        self.submitted = submitted
        self._asked_at = time.monotonic()
        self._called_at = datetime.now(timezone.utc)
        self._interruptions, self._terminations = interruptions(), interruptions(signal.SIGTERM)
        self._lock = threading.Lock()
        self._state = _State.ASKED
        self._attempts = 0
        #: What the state of the flow run said while it waited.
        self._stopped: Stop | None = None
        self._runtime: Runtime | None = None
        self._publisher: Publisher | None = None
        # Of the attempt:
        self._cancelled = threading.Event()
        self._around = FlowsAround()
        self._watch = FlowRunWatch((), 1.0)
        self._log: RunLog
        self._log_has_failed = False
        self._detached = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Training, (self.request, self.blocks, self.place, self.timeout_seconds, self.submitted)

    def __repr__(self) -> str:
        # Prefect shows task parameters in some messages; blocks and configs may hold what nobody should read.
        return f"<training {self.request.run_name}>"

    @property
    def is_out_of_time(self) -> bool:
        """Whether ``timeout_seconds`` went by."""
        return self.timeout_seconds is not None and time.monotonic() - self._asked_at > self.timeout_seconds

    def attempt(self, cancelled: threading.Event) -> TrainingResult:
        """Run one attempt, and keep what the next one needs if it may follow.

        Args:
            cancelled: Set to have it end.

        Raises:
            ConfigurationError: It cannot start as configured.
            AttemptFailedError: It failed; its ``outcome`` says how.
            Stop: It was told to end.
        """
        task_run = TaskRunContext.get()
        may_follow = task_run is not None and task_run.task_run.run_count <= int(task_run.task.retries or 0)
        settings = get_settings()
        self._log = RunLog(get_run_logger() if task_run else get_logger("elastic_train"), settings.log_lines_per_second)
        self._cancelled, self._around, self._detached = cancelled, FlowsAround(), False
        try:
            with self._lock:
                self._state, stopped = _State.TRAINING, self._stopped
                self._attempts += 1
            if stopped is not None:
                raise stopped
            with FlowRunWatch(self.place.flow_run_ids, settings.flow_run_check_seconds) as self._watch:
                ended = self._run_driver()
        except BaseException as error:
            self._write(self._log.close)
            if may_follow and isinstance(error, AttemptFailedError) and error.retryable:
                self._wait()
            else:
                self._end(self._ending_of(error))
            if isinstance(error, Stop):
                self._leave(error)
            raise
        self._write(self._log.close)
        self._end(Ending(End.COMPLETED, told=ended.already_finished))
        return TrainingResult.model_validate(ended.result)

    def end(self, error: BaseException | None = None) -> None:
        """End what was kept for an attempt that did not come, as when a retry delay was interrupted.

        Args:
            error: What ended the wait, as far as that is known.
        """
        reason = self._stopped or error or Stop()
        with self._lock:
            runtime = self._runtime if self._state is _State.WAITING else None
            self._state = _State.ENDED
        if runtime is not None and not self._may_detach(reason):
            runtime.end_jobs()  # an attempt may have lost sight of one, which the next would have found
        if self._runtime is not None or self._publisher is not None:
            self._end(self._ending_of(reason))

    def _end(self, ending: Ending | None) -> None:
        with self._lock:
            self._state = _State.ENDED
            runtime, self._runtime = self._runtime, None
            publisher, self._publisher = self._publisher, None
        if runtime is not None:
            runtime.close()
        if publisher is None:
            return
        if ending is None:
            publisher.abandon()  # another process shows the training now
        else:
            publisher.end(ending.end.value, ending.why, ending.told)
            publisher.close()

    def _ending_of(self, error: BaseException) -> Ending | None:
        return ending_of(error, self._detached, self._is_end_wanted)

    # -- an attempt

    def _run_driver(self) -> AttemptEnded:
        """Start a driver and follow it until it has completed the run."""
        self._check_stop()
        name = self.request.run_name
        if self._runtime is None:
            self._runtime = self._make_runtime()
        try:
            spec = driver_spec(self.request, self.blocks, self._publisher.last_end if self._publisher else "")
        except ConfigurationError:
            raise
        except Exception as error:
            # Blocks are loaded by name at each attempt, and Prefect's API may be away just now.
            raise AttemptFailedError(
                f"the blocks of training {name!r} cannot be loaded now: {type(error).__name__}: {error}",
                outcome=Outcome.DRIVER_LOST,
            ) from error
        self._show(spec)
        ended = self._runtime.run_attempt(spec)
        if self._publisher is not None and not ended.sequence:
            # The driver could not say so itself. The time since it spoke last is nobody's work.
            self._publisher.take(ended.model_copy(update={"at": self._publisher.last_event_at}))
        if ended.outcome is not Outcome.COMPLETED or ended.result is None:
            failure = error_of(name, ended)
            # Nobody catches for the user of a future, so that one gets what ends the flow directly.
            raise Abort(str(failure)) if self.submitted and isinstance(failure, SilentEndError) else failure
        if self._runtime.follows_job:
            self._watch.look_once_more(_STATE_SECONDS)
            self._check_executions()
        return ended

    def _make_runtime(self) -> Runtime:
        runtime = Runtime(get_settings(), self._take, self._take_line, self._check_stop, self._note)
        runtime.on_past_event = self._take_past
        runtime.detaches, runtime.followed_until = self._detaches, self._followed_until
        return runtime

    def _show(self, spec: DriverSpec) -> None:
        """Show the training in Prefect, over all its attempts in this process, unless nothing shall be shown."""
        settings, checkpoints, task_run = get_settings(), spec.checkpoints, TaskRunContext.get()
        if self._publisher is None and settings.reporting:
            self._publisher = Publisher(
                RunReport(
                    run_name=self.request.run_name,
                    score_attribute=checkpoints.score_attribute,
                    score_order=checkpoints.score_order,
                ),
                interval_seconds=settings.report_interval_seconds,
                storage_block=spec.storage_block,
                flow_run_id=next(iter(self.place.flow_run_ids), ""),
                task_run_id=str(task_run.task_run.id) if task_run is not None else "",
                related=self.place.related,
                on_trouble=self._note,
            )

    def _take(self, event: Event) -> None:
        self._write(lambda: self._log.event(event))
        if self._publisher is not None:
            self._publisher.take(event)

    def _take_past(self, event: Event) -> None:
        """Take in an event of a job from before it was followed."""
        self._write(lambda: self._log.past_event(event))
        if self._publisher is not None:
            self._publisher.take(event, told=True)

    def _take_line(self, source: str, text: str) -> None:
        self._write(lambda: self._log.line(source, text))

    def _note(self, text: str) -> None:
        self._write(lambda: self._log.note(text))

    def _write(self, write: Callable[[], None]) -> None:
        """Write to the log. That it cannot is said once, and harms neither the training nor its report."""
        try:
            write()
        except TimeoutError:  # a flow's time-out may be raised in the middle of anything
            raise
        except Exception:  # noqa: BLE001 - whatever a handler or a text raises
            if not self._log_has_failed:
                self._log_has_failed = True
                get_logger("elastic_train").exception("some of the training's output cannot be written to its log")

    # -- what ends an attempt from outside

    def _check_stop(self) -> None:
        stop = Stop() if self._cancelled.is_set() else self._stop_seen(self._watch)
        if stop is not None:
            raise stop
        self._check_executions()
        if self.is_out_of_time:
            raise TrainingTimeoutError(
                f"training {self.request.run_name!r} was ended after timeout_seconds={self.timeout_seconds:g}; what it "
                "has committed is kept, and a retry of the flow run goes on from there",
                outcome=Outcome.TIMED_OUT,
            )

    def _stop_seen(self, watch: FlowRunWatch) -> Stop | None:
        """Whether the flow process or the flow run was told to end since the training was asked for."""
        return Stop() if self._is_told_to_end() else watch.stop

    def _is_told_to_end(self) -> bool:
        return interruptions() > self._interruptions or self._around.are_ending()

    def _check_executions(self) -> None:
        # No fence tells two processes apart that follow the same job.
        if self._watch.is_executed_again and self._runtime is not None and self._runtime.follows_job:
            raise Stop(StopReason.TAKEN_OVER, self.request.owner.flow_run_id)

    def _detaches(self, reason: BaseException) -> bool:
        self._detached = self._may_detach(reason)
        return self._detached

    def _may_detach(self, reason: BaseException) -> bool:
        """Whether a job goes on without us. Without a flow run nobody would ever follow it again."""
        terminated = interruptions(signal.SIGTERM) > self._terminations
        return detaches(reason, terminated, self._is_end_wanted)

    def _is_end_wanted(self) -> bool:
        flow_run_ids = self.place.flow_run_ids
        return not flow_run_ids or wants_an_end(flow_run_ids, _STATE_SECONDS)

    def _followed_until(self) -> float:
        """When this flow run last told something in an earlier process: from there a job is followed on."""
        flow_run_ids = self.place.flow_run_ids
        found = last_told_at(flow_run_ids[0], self._called_at, _STATE_SECONDS) if flow_run_ids else None
        # Without an answer what was before is not told again.
        return time.time() if found is None else found - _TOLD_LATE_SECONDS

    # -- between two attempts

    def _wait(self) -> None:
        with self._lock:
            self._state = _State.WAITING
        threading.Thread(
            target=contextvars.copy_context().run,
            args=(self._look_after_wait, self._attempts),
            name="elastic-train-waiting",
            daemon=True,
        ).start()

    def _look_after_wait(self, attempt: int) -> None:
        """Look after a cluster that waits for the next attempt, and end it when no attempt is to follow.

        Nothing can be done about the delay itself: the training's task sleeps in it, and a thread's sleep has no end
        but its own.
        """
        stop = None
        with FlowRunWatch(self.place.flow_run_ids, get_settings().flow_run_check_seconds) as watch:
            while stop is None:
                with self._lock:
                    if self._state is not _State.WAITING or self._attempts != attempt:
                        return
                    if self._runtime is not None:
                        self._runtime.keep_guarded()
                time.sleep(_WAIT_SECONDS)
                stop = self._stop_seen(watch) or (Stop() if self.is_out_of_time else None)
        with self._lock:
            if self._state is not _State.WAITING or self._attempts != attempt:
                return
            self._state = _State.ENDED
            self._stopped = stop if stop.reason is not None else None
            runtime, self._runtime = self._runtime, None
        if runtime is not None:
            if not self._may_detach(stop):
                runtime.end_jobs()
            runtime.close()
        if stop.reason is StopReason.CANCELLING and not (watched_by_runner() and self._is_of_the_root(stop)):
            self._mark_cancelled(stop)

    # -- the flow run's state

    def _leave(self, stop: Stop) -> None:
        """Leave the flow in the way that gives its run the state that it should have. The training has ended by now.

        Raises:
            SilentEndError: The flow run has its state already.
            AttemptFailedError: Only a subflow is being cancelled, and the flow that called it shall know.
        """
        if stop.reason is None:
            return
        of_the_root, outcome = self._is_of_the_root(stop), Outcome.CANCELLED
        if stop.reason is StopReason.TAKEN_OVER:
            of_the_root, outcome = True, Outcome.SUPERSEDED
        # A runner signals a cancellation and sets the final state. One that has died does neither, and for subflows
        # none does.
        elif stop.reason is StopReason.CANCELLING and not (
            of_the_root and watched_by_runner() and self._signal_comes()
        ):
            self._mark_cancelled(stop)
        message = f"training {self.request.run_name!r} ended: {stop.reason.value}"
        if not of_the_root:
            raise AttemptFailedError(message, outcome=outcome)
        raise Abort(message) if self.submitted else SilentEndError(message, outcome=outcome)

    def _is_of_the_root(self, stop: Stop) -> bool:
        """Whether it is the root's state that stops the training, and not only a subflow's."""
        return stop.flow_run_id == self.request.owner.flow_run_id

    def _signal_comes(self) -> bool:
        """Let the runner's signal arrive, which Prefect's engine knows for a cancellation."""
        deadline = time.monotonic() + _SIGNAL_SECONDS
        while time.monotonic() < deadline:
            if self._is_told_to_end():
                return True
            time.sleep(0.1)
        return False

    def _mark_cancelled(self, stop: Stop) -> None:
        """Say that the cancellation is carried out, of the flow run and its subflows around the training."""
        flow_run_ids = self.place.flow_run_ids
        mark_cancelled(flow_run_ids[: flow_run_ids.index(stop.flow_run_id) + 1])
