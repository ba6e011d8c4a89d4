"""One training over all its attempts in this process: what it owns, and how it goes from one state to the next."""

from __future__ import annotations

import asyncio
import enum
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from logging import WARNING
from typing import Any
from uuid import UUID

from prefect.client.schemas.objects import State
from prefect.context import TaskRunContext
from prefect.exceptions import Abort, TerminationSignal
from prefect.logging import get_logger, get_run_logger
from prefect.states import Cancelled
from prefect.tasks import Task
from prefect.transactions import CommitMode, get_transaction
from prefect.utilities.urls import url_for
from prefect.variables import Variable

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
from prefect_elastic_train.core.settings import FailureSettings
from prefect_elastic_train.driver.interruptions import interruptions
from prefect_elastic_train.orchestration import flow_runs
from prefect_elastic_train.orchestration.arguments import GivenBlock, driver_spec
from prefect_elastic_train.orchestration.logs import RunLog
from prefect_elastic_train.orchestration.publisher import Publisher, artifact_key
from prefect_elastic_train.orchestration.result import TrainingResult
from prefect_elastic_train.report.run_report import RunReport
from prefect_elastic_train.supervisor.runtime import Runtime

#: How long the Prefect API is asked for the state of a flow run, and told of it.
_STATE_SECONDS = 8.0
#: How long the signal of a runner is waited for once its flow run is seen cancelling; it kills after 30 s.
_SIGNAL_SECONDS = 40.0
_MAX_DELAY_SECONDS = 300.0


class Stop(BaseException):
    """The training shall end: a signal came, its coroutine was cancelled, or its flow run has come to an end."""

    def __init__(self, flow_run_id: str = "") -> None:
        super().__init__("the flow run was cancelled or has ended" if flow_run_id else "told to end")
        #: Which flow run's state said so; empty for a signal or a cancelled coroutine.
        self.flow_run_id = flow_run_id


class SilentEndError(AttemptFailedError):
    """The flow run has its state already, or another process speaks for it: the flow must end without a word.

    Prefect's ``Abort`` does that, but a task that raises it stays Running for ever: so a task raises this instead.
    """


class End(str, enum.Enum):
    """What a training that goes on no more is shown as."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed out"
    INTERRUPTED = "interrupted"
    LEFT = "left to its job"


def ending_of(error: BaseException, detached: bool, is_wanted: Callable[[], bool]) -> tuple[End, str] | None:
    """What a training that raised an error is shown as, and why; None if another process shows it now."""
    # A machine that is taken away sends the same signal as a cancellation: it is asked whether the end was wanted.
    if isinstance(error, SilentEndError | Abort):
        return None
    if detached:
        return End.LEFT, "the flow process was told to end; the job goes on"
    if isinstance(error, TimeoutError):
        return End.TIMED_OUT, str(error)
    if isinstance(error, AttemptFailedError):
        return End.CANCELLED if error.outcome is Outcome.CANCELLED else End.FAILED, str(error)
    if isinstance(error, Exception):
        return End.FAILED, f"{type(error).__name__}: {error}"
    by_state = isinstance(error, Stop) and error.flow_run_id
    if by_state or isinstance(error, KeyboardInterrupt | asyncio.CancelledError) or is_wanted():
        return End.CANCELLED, str(error)
    return End.INTERRUPTED, "the flow process was told to end; what is committed stays"


@dataclass(eq=False, repr=False)
class Training:
    """A call of ``elastic_train``: one run, trained by one attempt after the other.

    Prefect runs the task's function anew for each attempt, with the same argument. This is that argument, so that
    what outlives an attempt (processes, cluster, report) has an owner and an end. In another process it begins anew.
    """

    request: RunRequest
    #: By argument; those given by name are loaded anew at each attempt.
    blocks: Mapping[str, GivenBlock]
    place: flow_runs.Place
    #: From now on, until it is ended; None for no bound.
    timeout_seconds: float | None = None
    failures: FailureSettings = field(default_factory=FailureSettings)
    #: Its caller holds a future.
    submitted: bool = False

    def __post_init__(self) -> None:
        self.cancelled = threading.Event()
        #: What a cancelled training has ended by.
        self.stopped_by: BaseException | None = None
        self._asked_at = time.monotonic()
        self._interruptions, self._terminations = interruptions(), interruptions(signal.SIGTERM)
        # From the first attempt to the end; there is no publisher if the operator wants none.
        self._runtime: Runtime | None = None
        self._watch: flow_runs.FlowRunWatch
        self._log: RunLog
        self._publisher: Publisher | None = None
        self._spec: DriverSpec | None = None  # of the attempt before
        #: Prefect's task of the attempt, and how often it was retried before.
        self._task: Task[..., Any] | None = None
        self._retried = 0
        self._left = 0  # attempts that may follow by the run's records
        self._detached = False  # the attempt has left its job to another process
        self._idle = 0  # attempts in a row that have committed nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, one.name) for one in fields(self))

    def __repr__(self) -> str:
        # Prefect shows task parameters in some messages; blocks and configs may hold what nobody should read.
        return f"<training {self.request.run_name}>"

    def attempt(self) -> TrainingResult | State[Any]:
        """Run one attempt, and keep what the next one needs if it may follow; a state if the training is cancelled."""
        context = TaskRunContext.get()
        self._task, self._retried = (context.task, context.task_run.run_count - 1) if context is not None else (None, 0)
        self._flows, self._detached = list(flow_runs.flows_around()), False
        flow_runs.end_with_flow_process(self._flows)
        if self._runtime is None:
            self._left = self.failures.driver_restarts
            self._runtime = self._begin(in_task=context is not None)
        try:
            if self._retried and self._idle:
                self._pause(self._runtime)
            self._idle += 1
            ended = self._run_driver(self._runtime)
        except BaseException as error:
            self._log.close()
            if isinstance(error, AttemptFailedError) and error.retryable:
                if self._may_retry():
                    self._log.note(f"A new driver follows: {error}", WARNING)
                    raise
                error.final = True
            ending = ending_of(error, self._detached, self._is_end_wanted)
            self._end(self._runtime, ending)
            told = self._said_of(error) if isinstance(error, Stop) and error.flow_run_id else error
            if ending is not None and ending[0] is End.CANCELLED and not self.submitted:
                self.stopped_by = told  # for the flow, once its task is Cancelled
                if (transaction := get_transaction()) is not None:  # or what is around it would roll the state back
                    transaction.commit_mode = CommitMode.EAGER
                why = ending[1] or "its flow process was told to end"
                then = "a Retry of the flow run goes on from the last checkpoint, if any"
                return Cancelled(message=f"The training was cancelled: {why}; {then}")
            # Nobody catches for the user of a future, so that one gets what ends the flow directly.
            raise Abort(str(told)) if self.submitted and isinstance(told, SilentEndError) else told  # noqa: B904
        self._log.close()
        self._end(self._runtime, (End.COMPLETED, ""), told=ended.already_finished)
        return TrainingResult.model_validate(ended.result)

    def _may_retry(self) -> bool:
        """Return whether another attempt may follow, and set the retries of Prefect's task to the same effect.

        With nothing left, one more attempt follows a commit: an earlier attempt may no longer count by then, which only
        the next driver can read from the run directory.
        """
        if self._task is None:
            return False
        left = max(self._left, self.failures.forgive_after_seconds > 0 and not self._idle)
        self._task.retries = self._retried + left
        return left > 0 and self._idle <= self.failures.driver_restarts

    def end(self, error: BaseException | None = None) -> None:
        """End what was kept for an attempt that did not come, as when a signal came between two."""
        if self._runtime is not None:
            reason = error or Stop()
            self._end_unfollowed(self._runtime, reason)
            self._end(self._runtime, ending_of(reason, self._detached, self._is_end_wanted))

    def _begin(self, in_task: bool) -> Runtime:
        settings = get_settings()
        logger = get_run_logger() if in_task else get_logger("elastic_train")
        self._log = log = RunLog(logger, settings.log_lines_per_second)
        self._watch = flow_runs.FlowRunWatch(self.place.flow_run_ids, settings.flow_run_check_seconds)
        return Runtime(
            settings,
            self._take,
            log.line,
            self._check_stop,
            log.note,
            partial(self._take, told=True),
            detaches=self._leaves_job,
            followed_until=self._followed_until,
        )

    def _end(self, runtime: Runtime, ending: tuple[End, str] | None, told: bool = False) -> None:
        publisher, self._runtime, self._publisher = self._publisher, None, None
        try:
            self._watch.close()
            runtime.close()
        finally:  # also after the signal of a runner that has come meanwhile
            if publisher is not None and ending is not None:
                publisher.end(ending[0].value, ending[1], told or ending[0] is End.LEFT)
            elif publisher is not None:
                publisher.abandon()  # another process shows the training now

    def _pause(self, runtime: Runtime) -> None:
        """Wait for the next driver, and look after the cluster; Prefect's own delay would look after nothing."""
        seconds = restart_delay(self._idle, self.failures.driver_restart_delay_seconds) * random.uniform(1.0, 1.2)
        self._log.note(f"The next driver starts in {seconds:.0f} s")
        try:
            runtime.wait(seconds)
        except BaseException as reason:
            self._end_unfollowed(runtime, reason)
            raise

    def _end_unfollowed(self, runtime: Runtime, reason: BaseException) -> None:
        """End a job that the attempt before may have lost sight of, which the next one would have found."""
        if not self._may_detach(reason):
            runtime.end_jobs()

    def _run_driver(self, runtime: Runtime) -> AttemptEnded:
        """Start a driver and follow it until it has completed the run."""
        self._check_stop()
        spec = self._driver_spec()
        if self._publisher is None and runtime.settings.reporting:
            flow_run_id = next(iter(self.place.flow_run_ids), "")
            report = RunReport(
                run_name=spec.request.run_name,
                totals=spec.request.totals,
                score_attribute=spec.checkpoints.score_attribute,
                score_order=spec.checkpoints.score_order,
                flow_run_url=(url_for("flow-run", UUID(flow_run_id)) if flow_run_id else "") or "",
            )
            self._publisher = Publisher(
                report,
                interval_seconds=runtime.settings.report_interval_seconds,
                storage_block=spec.storage_block,
                flow_run_id=flow_run_id,
                related=self.place.related,
                on_trouble=self._log.note,
            )
        ended = runtime.run_attempt(spec)
        if self._publisher is not None and not ended.sequence:
            # The driver could not say so itself. The time since it spoke last is nobody's work.
            at = self._publisher.report.last_event_at or ended.at
            self._publisher.take(ended.model_copy(update={"at": at}))
        if ended.outcome is not Outcome.COMPLETED or ended.result is None:
            by_loop = ended.outcome is Outcome.USER_ERROR and self._log.raised
            raise error_of(spec.request.run_name, ended) from (ElasticTrainError(by_loop) if by_loop else None)
        return ended

    def _driver_spec(self) -> DriverSpec:
        name, whose, publisher = self.request.run_name, self.request.owner.flow_run_id, self._publisher
        try:
            if self.request.resumed and not self.request.begun:  # perhaps in an earlier process
                begun = flow_runs.ask_prefect(lambda client: flow_runs.has_begun(client, name, whose), _STATE_SECONDS)
                self.request = replace(self.request, begun=bool(begun))
            spec = driver_spec(self.request, self.blocks, publisher.report.last_end if publisher is not None else "")
            if self._spec and any(getattr(spec, name) != getattr(self._spec, name) for name in self.blocks):
                self._log.note("A saved block has changed since the previous attempt; this attempt uses the new values")
            left = self.timeout_seconds and self.timeout_seconds - time.monotonic() + self._asked_at
            if spec.storage_block and spec.storage.preflight and not self.request.known_storage[1]:
                variable = artifact_key(spec.storage_block, "storage")
                known = flow_runs.ask_prefect(
                    lambda client: str(getattr(client.read_variable_by_name(variable), "value", "")), _STATE_SECONDS
                )
                if known is not None:  # else the next attempt asks again
                    self.request = replace(self.request, known_storage=(known, variable))
            self._spec = replace(spec, ends_at=time.time() + left if left else 0.0)
        except ConfigurationError:
            raise
        except Exception as error:
            # Blocks are loaded by name at each attempt, and Prefect's API may be away just now.
            problem = f"the blocks of training {name!r} cannot be loaded now: {type(error).__name__}: {error}"
            if self._spec is None:
                raise AttemptFailedError(problem, outcome=Outcome.DRIVER_LOST) from error
            self._log.note(f"{problem}. They are used as they were at the attempt before", WARNING)
        return replace(self._spec, request=self.request)

    def _take(self, event: Event, told: bool = False) -> None:
        """Take in an event; one that was told is of a job from before it was followed."""
        if isinstance(event, CheckpointCommitted):
            self._idle = 0
        elif isinstance(event, AttemptStarted):
            self._left = event.left.get("driver restart", self._left)
            self.request = replace(self.request, begun=True)
            (known, variable), uri = self.request.known_storage, event.run_uri.rpartition("/")[0]
            if variable and known != uri:
                self.request = replace(self.request, known_storage=(uri, variable))
                # Without ``_sync``, ``set`` would return a coroutine in an async flow.
                keep = partial(Variable.set, variable, uri, overwrite=True, _sync=True)  # type: ignore[call-arg]
                flow_runs.ask_prefect(lambda client: keep(), _STATE_SECONDS)
        if self._publisher is not None:
            self._publisher.take(event, told)
        self._log.event(event, told)

    def _is_told_to_end(self) -> bool:
        told = self.cancelled.is_set() or interruptions() > self._interruptions
        return told or any(map(flow_runs.is_ending, self._flows))

    def _check_stop(self) -> None:
        if (told := self._is_told_to_end()) or self._watch.ended:
            raise Stop("" if told else self._watch.ended)
        if self.timeout_seconds is not None and time.monotonic() - self._asked_at > self.timeout_seconds:
            raise TrainingTimeoutError(
                f"training {self.request.run_name!r} was ended after timeout_seconds={self.timeout_seconds:g}; what it "
                "has committed is kept, and a retry of the flow run goes on from there",
                outcome=Outcome.TIMED_OUT,
            )

    def _leaves_job(self, reason: BaseException) -> bool:
        self._detached = self._may_detach(reason)
        return self._detached

    def _may_detach(self, reason: BaseException) -> bool:
        """Whether a job goes on without us, for another process to follow it, since nobody wants its end."""
        # A machine that is taken away sends SIGTERM, as does a runner that carries out a cancellation. In the main
        # thread Prefect's own signal handler raises; elsewhere only the pipe knows.
        if isinstance(reason, TimeoutError) or (isinstance(reason, Stop) and reason.flow_run_id):
            return False
        terminated = isinstance(reason, TerminationSignal) or interruptions(signal.SIGTERM) > self._terminations
        return terminated and not self._is_end_wanted()

    def _is_end_wanted(self) -> bool:
        """Whether a flow run around is cancelled or has failed. Without one nobody would ever go on with a job."""
        ids = self.place.flow_run_ids
        look = partial(flow_runs.ended_flow_run, flow_run_ids=ids)
        return not ids or bool(flow_runs.ask_prefect(look, _STATE_SECONDS))

    def _followed_until(self) -> float:
        """When this training last told something in an earlier process, from where a job is followed; else now."""
        look = partial(flow_runs.last_told_at, run_name=self.request.run_name, flow_run_ids=self.place.flow_run_ids)
        return flow_runs.ask_prefect(look, _STATE_SECONDS) or time.time()

    def _said_of(self, stop: Stop) -> AttemptFailedError:
        """What is raised of a flow run's end, after the training's; the flow run gets the state that it should have."""
        # A runner signals a cancellation, which Prefect's engine knows for one, and sets the final state. One that has
        # died does neither, and for subflows none does. A subflow cancelled alone is an error in the flow around it.
        of_the_root, ids = stop.flow_run_id == self.request.owner.flow_run_id, self.place.flow_run_ids
        ended = ids[: ids.index(stop.flow_run_id) + 1]  # with the subflows around the training
        has_runner = os.environ.get("PREFECT__ENABLE_CANCELLATION_AND_CRASHED_HOOKS", "true").lower() == "false"
        deadline = time.monotonic() + (_SIGNAL_SECONDS if of_the_root and has_runner else 0)
        while time.monotonic() < deadline:
            if self._is_told_to_end():
                break
            time.sleep(0.1)
        else:
            flow_runs.ask_prefect(lambda client: flow_runs.mark_cancelled(client, ended), _STATE_SECONDS)
        error_type = SilentEndError if of_the_root else AttemptFailedError
        return error_type(f"training {self.request.run_name!r} ended: {stop}", outcome=Outcome.CANCELLED)


def restart_delay(restart: int, first_delay_seconds: float) -> float:
    """Return the delay after so many attempts in a row without progress, in seconds: doubled each time, up to 300."""
    return min(max(_MAX_DELAY_SECONDS, first_delay_seconds), first_delay_seconds * 2.0 ** min(restart - 1, 50))


def error_of(run_name: str, ended: AttemptEnded) -> AttemptFailedError:
    """The error of an attempt that did not complete."""
    if ended.outcome is Outcome.SUPERSEDED:
        # The flow run is the other process's now: whatever this one said of it would be wrong.
        return SilentEndError(f"training {run_name!r}: {ended.message}", outcome=ended.outcome)
    attempt = f"attempt {ended.attempt}" if ended.attempt else "the driver"
    error_type = TrainingTimeoutError if ended.outcome is Outcome.TIMED_OUT else AttemptFailedError
    return error_type(
        f"training {run_name!r}, {attempt}: {ended.outcome.value}: {ended.message}",
        outcome=ended.outcome,
        attempt=ended.attempt,
        final=ended.final,
    )
