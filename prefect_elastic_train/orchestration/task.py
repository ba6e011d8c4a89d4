"""``elastic_train``: a Prefect task that supervises driver attempts until a training has ended.

The task's retries are driver restarts. The task itself never calls ``fit()``: a driver cannot be retried in the
process that it dies in.
"""

from __future__ import annotations

import asyncio
import contextvars
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from prefect import task
from prefect.blocks.core import Block
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import Abort, TerminationSignal
from prefect.futures import PrefectFuture
from prefect.logging import get_logger, get_run_logger
from pydantic import SecretStr

from prefect_elastic_train.blocks import CheckpointPolicy, ElasticScaling, FailureBudget, LocalStorage, RayCluster
from prefect_elastic_train.blocks._common import TrainingBlock
from prefect_elastic_train.blocks.lookup import (
    STORAGE_TYPES,
    StorageBlock,
    load_block,
    load_storage,
    plain_storage,
    saved_name,
)
from prefect_elastic_train.core.events import AttemptEnded, Event
from prefect_elastic_train.core.operator_settings import default_block_name, get_settings, naming_the_setting
from prefect_elastic_train.core.outcomes import (
    AttemptFailedError,
    ConfigurationError,
    Outcome,
    TrainingTimeoutError,
    may_retry,
    restart_delays,
)
from prefect_elastic_train.core.records import Owner
from prefect_elastic_train.core.request import Payload, RunRequest, dump_payload
from prefect_elastic_train.core.settings import (
    CheckpointSettings,
    ClusterSettings,
    FailureSettings,
    ScalingSettings,
    plain,
)
from prefect_elastic_train.core.spec import DriverSpec
from prefect_elastic_train.core.storage_settings import DEFAULT_STORAGE
from prefect_elastic_train.driver.interruptions import interruptions, notice_interruptions
from prefect_elastic_train.orchestration.cancellation import (
    FlowRunWatch,
    FlowsAround,
    StopReason,
    wants_an_end,
    watched_by_runner,
    watching,
)
from prefect_elastic_train.orchestration.flow_runs import current_place, numbered
from prefect_elastic_train.orchestration.logs import RunLog
from prefect_elastic_train.orchestration.prefect_api import ask_prefect
from prefect_elastic_train.orchestration.publisher import Publisher
from prefect_elastic_train.orchestration.result import TrainingResult
from prefect_elastic_train.report.run_report import RunReport
from prefect_elastic_train.runs.identity import (
    LATEST_RUN,
    check_run_name,
    default_run_name,
    fingerprint,
    loop_name,
    training_part,
)
from prefect_elastic_train.supervisor.runtime import Runtime, import_path

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

__all__ = ["FRAMEWORKS", "aelastic_train", "check_arguments", "elastic_train"]

BlockType = TypeVar("BlockType", bound=TrainingBlock)

TrainLoop = Callable[..., Any] | str

FRAMEWORKS = ("torch", "jax", "none")

_MASK = "*"
#: How long the state of a flow run is asked for when its process is told to end.
_STATE_SECONDS = 8.0
#: How much later than it happens an event of a job may be told: rather told twice than never.
_TOLD_LATE_SECONDS = 2.0
#: How long the signal of a runner is waited for once its flow run is seen cancelling; it kills after 30 s.
_SIGNAL_SECONDS = 40.0


@dataclass(frozen=True)
class _Request:
    """A training as the user asked for it, checked as far as that needs nothing but itself."""

    key: str
    wanted: RunRequest
    scaling: ElasticScaling | str
    failures: FailureBudget | str
    checkpoints: CheckpointPolicy | str
    storage: StorageBlock | str
    cluster: RayCluster | str
    timeout_seconds: float | None
    asked_at: float
    called_at: datetime
    #: The flow run that trains, the one that called it, and so on up to the owner; none outside of flows.
    flow_run_ids: tuple[str, ...]
    #: What its events relate to besides what Prefect finds itself.
    related: tuple[dict[str, str], ...]
    submitted: bool
    interruptions: int
    #: Those of them that were SIGTERM.
    terminations: int

    @property
    def run_name(self) -> str:
        """Name of the run."""
        return self.wanted.run_name

    @property
    def is_out_of_time(self) -> bool:
        """Whether ``timeout_seconds`` went by."""
        return self.timeout_seconds is not None and time.monotonic() - self.asked_at > self.timeout_seconds

    def __repr__(self) -> str:
        # Prefect shows task parameters in some messages; blocks and configs may hold what nobody should read.
        return f"<training {self.run_name}>"


class _Stop(BaseException):
    """The coroutine that awaits the training was cancelled, or the flow process or the flow run was told to end.

    Attributes:
        reason: What the flow run's state said; None for a signal or a cancelled coroutine.
        flow_run_id: Which flow run's state that was.
    """

    def __init__(self, reason: StopReason | None = None, flow_run_id: str = "") -> None:
        super().__init__(reason.value if reason else "told to end")
        self.reason = reason
        self.flow_run_id = flow_run_id


class _NothingToSayError(AttemptFailedError):
    """The flow run has its state already, or another process speaks for it: the flow must end without a word.

    Prefect's ``Abort`` does that. Raised in a task it would leave the task run Running for ever, so a task fails with
    this, and whoever has called it raises the other.
    """


#: Runtimes that wait for the next attempt of their training, by its key.
_waiting: dict[str, Runtime] = {}
#: Trainings that were stopped while they waited, by their key.
_stopped_waiting: dict[str, _Stop] = {}
#: What shows the trainings that go on or wait in Prefect, by their key.
_publishers: dict[str, Publisher] = {}
_waiting_lock = threading.Lock()


class _ElasticTrain:
    """Train elastically with Ray Train, in a Prefect task whose retries are driver restarts.

    Call it in a flow, or outside of one::

        result = elastic_train(train_loop, scaling=ElasticScaling(max_workers=8))

    ``elastic_train.submit(...)`` takes the same arguments and gives a future.
    """

    def __call__(
        self,
        train_loop: TrainLoop,
        *,
        train_loop_config: dict[str, Any] | None = None,
        framework: str = "torch",
        scaling: ElasticScaling | str | None = None,
        failures: FailureBudget | str | None = None,
        checkpoints: CheckpointPolicy | str | None = None,
        storage: StorageBlock | str | None = None,
        cluster: RayCluster | str | None = None,
        datasets: dict[str, Any] | Callable[[], dict[str, Any]] | None = None,
        run_name: str | None = None,
        resume: bool = False,
        resume_from: str | None = None,
        torch_config: Any = None,
        jax_config: Any = None,
        dataset_config: Any = None,
        validation_config: Any = None,
        worker_runtime_env: dict[str, Any] | None = None,
        timeout_seconds: float | None = None,
    ) -> TrainingResult:
        """Train, and return when the loop has returned on all ranks.

        Args:
            train_loop: A Ray Train loop: a function of no argument or of the config, or its import path
                ``"package.module:function"``.
            train_loop_config: Handed to the loop. Default none.
            framework: ``"torch"``, ``"jax"``, or ``"none"`` for a plain Python loop. Default ``"torch"``.
            scaling: Workers, as a block or the name of a saved one. Default, as of the next four: the saved block
                that the settings name (``default_scaling`` and so on), else one CPU worker.
            failures: How much may fail. Default without a setting: 3 worker failures and 3 driver restarts.
            checkpoints: Which checkpoints are kept. Default without a setting: all.
            storage: Where the run directory goes. Default without a setting: ``~/elastic_train_runs``.
            cluster: The Ray cluster. Default without a setting: a local one for this training.
            datasets: Ray Data datasets by name, functions that make them, or one function that makes all.
            run_name: Name of the run. Default: the flow's name and the first 8 characters of the flow run id,
                and from the second training of a flow run on its number.
            resume: Take over a run that belongs to another flow run. Default False.
            resume_from: Start a new run from the checkpoint of another: ``"<run>"`` for its latest,
                ``"<run>@best"``, or ``"<run>@<checkpoint>"``. ``"latest"``: from the best checkpoint of the newest
                run that the same training of an earlier flow run of this deployment (without one: of this flow) has
                completed, from the beginning if there is none; ``"latest@latest"`` from its newest.
            torch_config: Ray's ``TorchConfig``.
            jax_config: Ray's ``JaxConfig``.
            dataset_config: Ray's ``DataConfig``.
            validation_config: Ray's ``ValidationConfig``.
            worker_runtime_env: Ray runtime environment of the workers.
            timeout_seconds: Seconds from now after which the training is ended and TimedOut, over all its driver
                restarts in this flow process; what it has committed stays. Default: no bound.

        Returns:
            What the training gives back.

        Raises:
            ConfigurationError: It cannot start as configured; nothing was started.
            AttemptFailedError: The last attempt failed; its ``outcome`` says how.
            TrainingTimeoutError: ``timeout_seconds`` went by.
        """
        request = _request(**{name: value for name, value in locals().items() if name != "self"})
        try:
            result: TrainingResult = _with_budget(_elastic_train_task, request)(request)
        except _NothingToSayError as error:
            raise Abort(str(error)) from error
        except AttemptFailedError as error:
            raise error.with_traceback(None)  # noqa: B904 - the message says it all, and Prefect logs all frames
        finally:
            _close_waiting(request, sys.exc_info()[1])
        return result

    def submit(self, train_loop: TrainLoop, **arguments: Any) -> PrefectFuture[TrainingResult]:
        """Start the training in the flow's task runner. Takes the arguments of a call, gives a future."""
        request = replace(_request(train_loop=train_loop, **arguments), submitted=True)
        notice_interruptions()
        future: PrefectFuture[TrainingResult] = _with_budget(_elastic_train_task, request).submit(request)
        future.add_done_callback(lambda _: _close_waiting(request))
        return future


elastic_train = _ElasticTrain()


async def aelastic_train(train_loop: TrainLoop, **arguments: Any) -> TrainingResult:
    """Train like :data:`elastic_train`, without holding the event loop.

    Takes the same arguments, returns and raises the same. Cancelling the coroutine ends the training.
    """
    notice_interruptions()
    interrupts = interruptions(signal.SIGINT)
    request = _request(train_loop=train_loop, **arguments)
    try:
        result: TrainingResult = await _with_budget(_aelastic_train_task, request)(request)
    except _NothingToSayError as error:
        raise Abort(str(error)) from error
    except AttemptFailedError as error:
        raise error.with_traceback(None)  # noqa: B904 - as above
    except asyncio.CancelledError:
        if interruptions(signal.SIGINT) > interrupts:
            # asyncio makes a cancellation of Ctrl-C, which Prefect could not tell from the end of a machine.
            raise KeyboardInterrupt from None
        raise
    finally:
        await asyncio.to_thread(_close_waiting, request, sys.exc_info()[1])
    return result


def _close_waiting(request: _Request, error: BaseException | None = None) -> None:
    """End a cluster that was kept for an attempt which did not come, as when a retry delay was interrupted.

    Args:
        request: The training.
        error: What ended the wait, as far as that is known.
    """
    with _waiting_lock:
        runtime = _waiting.pop(request.key, None)
        stopped = _stopped_waiting.pop(request.key, None)
        is_shown = request.key in _publishers
    if runtime is not None:
        runtime.close()
    if is_shown:
        _publish_failure(request, stopped or error or _Stop(), detached=False)


def _watch_waiting(request: _Request, runtime: Runtime, around: FlowsAround) -> None:
    """Look after a cluster that waits for the next attempt, and end it when no attempt is to follow.

    Nothing can be done about the delay itself: the training's task sleeps in it, and a thread's sleep has no end but
    its own.
    """
    with watching(request.flow_run_ids, get_settings().flow_run_check_seconds) as watch:
        stop = None
        while stop is None:
            with _waiting_lock:
                if _waiting.get(request.key) is not runtime:
                    return
                runtime.keep_guarded()
            time.sleep(0.5)
            stop = _told_to_stop(request, around, watch)
            if stop is None and request.is_out_of_time:
                stop = _Stop()
    with _waiting_lock:
        if _waiting.pop(request.key, None) is not runtime:
            return
        if stop.reason is not None:
            _stopped_waiting[request.key] = stop
    if not _detaches(request, stop):
        runtime.end_jobs()
    runtime.close()
    if stop.reason is StopReason.CANCELLING and not (watched_by_runner() and _is_of_the_root(request, stop)):
        _mark_cancelled(request, stop)


def _told_to_stop(request: _Request, around: FlowsAround, watch: FlowRunWatch | None) -> _Stop | None:
    """Tell whether the flow process or the flow run was told to end since the training was asked for."""
    if _told_to_end(request, around):
        return _Stop()
    if watch is not None and watch.reason is not None:
        return _Stop(watch.reason, watch.flow_run_id)
    return None


def _told_to_end(request: _Request, around: FlowsAround) -> bool:
    return interruptions() > request.interruptions or around.are_ending()


def _with_budget(template: Any, request: _Request) -> Any:
    """Give the task with the retries that the failure budget asks for; Prefect fixes them before it runs."""
    failures = _resolved(FailureBudget, request.failures)
    return template.with_options(
        task_run_name=request.run_name,
        retries=failures.driver_restarts,
        retry_delay_seconds=restart_delays(failures.driver_restarts, failures.driver_restart_delay_seconds) or 0,
        retry_jitter_factor=0.2 if failures.driver_restart_delay_seconds else None,
    )


@task(name="elastic_train", cache_policy=NO_CACHE, retry_condition_fn=may_retry)
def _elastic_train_task(request: _Request) -> TrainingResult:
    try:
        return _attempt(request, threading.Event())
    except _Stop as stop:
        _leave(request, stop)
        raise


@task(name="elastic_train", cache_policy=NO_CACHE, retry_condition_fn=may_retry)
async def _aelastic_train_task(request: _Request) -> TrainingResult:
    stop = threading.Event()
    context = contextvars.copy_context()
    loop = asyncio.get_running_loop()
    # A thread of its own: the loop's pool is small, and other trainings may fill it for weeks.
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="elastic-train") as thread:
        attempt = loop.run_in_executor(thread, lambda: context.run(_attempt, request, stop))
        try:
            return await asyncio.shield(attempt)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait([attempt])
            raise
        except _Stop as stopped:
            await asyncio.to_thread(_leave, request, stopped)
            raise


def _leave(request: _Request, stop: _Stop) -> None:
    """Leave the flow in the way that gives its run the state that it should have. The training has ended by now.

    Raises:
        _NothingToSayError: The flow run has its state already.
        AttemptFailedError: Only a subflow is being cancelled, and the flow that called it shall know.
    """
    if stop.reason is None:
        return
    message = f"training {request.run_name!r} ended: {stop.reason.value}"
    if stop.reason is StopReason.TAKEN_OVER:
        raise _silent_end(request, message, Outcome.SUPERSEDED)
    of_the_root = _is_of_the_root(request, stop)
    # A runner signals a cancellation and sets the final state. One that has died does neither, and for subflows none
    # does.
    if stop.reason is StopReason.CANCELLING and not (of_the_root and watched_by_runner() and _signal_comes(request)):
        _mark_cancelled(request, stop)
    if not of_the_root:
        raise AttemptFailedError(message, outcome=Outcome.CANCELLED)
    raise _silent_end(request, message, Outcome.CANCELLED)


def _is_of_the_root(request: _Request, stop: _Stop) -> bool:
    """Tell whether it is the root's state that stops the training, and not only a subflow's."""
    return stop.flow_run_id == request.wanted.owner.flow_run_id


def _silent_end(request: _Request, message: str, outcome: Outcome) -> BaseException:
    """Give what ends the flow without a word; nobody catches for the user of a future, so that one gets it directly."""
    return Abort(message) if request.submitted else _NothingToSayError(message, outcome=outcome)


def _signal_comes(request: _Request) -> bool:
    """Let the runner's signal arrive, which Prefect's engine knows for a cancellation; tell whether it did."""
    around = FlowsAround()
    deadline = time.monotonic() + _SIGNAL_SECONDS
    while time.monotonic() < deadline:
        if _told_to_end(request, around):
            return True
        time.sleep(0.1)
    return False


def _mark_cancelled(request: _Request, stop: _Stop) -> None:
    """Say that the cancellation is carried out, of the flow run and its subflows around the training."""
    from prefect.client.orchestration import get_client
    from prefect.states import Cancelled

    try:
        with get_client(sync_client=True) as client:
            below = request.flow_run_ids[: request.flow_run_ids.index(stop.flow_run_id) + 1]
            for flow_run_id in map(uuid.UUID, below):
                state = client.read_flow_run(flow_run_id).state
                if state is None or not state.is_final():
                    client.set_flow_run_state(flow_run_id, Cancelled(message="The training was cancelled."), force=True)
    except Exception as error:  # noqa: BLE001 - the training has ended; the state is for people
        get_logger("elastic_train").warning("cannot mark the flow run as cancelled: %s", error)


def _attempt(request: _Request, stop: threading.Event) -> TrainingResult:
    """Run one attempt, and keep its cluster if another attempt may follow."""
    task_run = TaskRunContext.get()
    more = task_run is not None and task_run.task_run.run_count <= int(task_run.task.retries or 0)
    around = FlowsAround()
    log = RunLog(get_run_logger() if task_run else get_logger("elastic_train"), get_settings().log_lines_per_second)
    with _waiting_lock:
        stopped = _stopped_waiting.pop(request.key, None)
        runtime = _waiting.pop(request.key, None) or Runtime(get_settings(), log.event, log.line)
    keep = detached = False
    try:
        if stopped is not None:
            raise stopped
        with watching(request.flow_run_ids, get_settings().flow_run_check_seconds) as watch:

            def check_executions() -> None:
                # No fence tells two processes apart that follow the same job.
                if watch is not None and watch.is_executed_again and runtime.follows_job:
                    raise _Stop(StopReason.TAKEN_OVER, request.wanted.owner.flow_run_id)

            def check_stop() -> None:
                told = _Stop() if stop.is_set() else _told_to_stop(request, around, watch)
                if told is not None:
                    raise told
                check_executions()
                _check_time(request)

            runtime.on_line, runtime.check_stop, runtime.on_note = log.line, check_stop, log.note

            def detaches(reason: BaseException) -> bool:
                nonlocal detached
                detached = _detaches(request, reason)
                return detached

            runtime.detaches = detaches
            runtime.followed_until = partial(_followed_until, request)
            result, finished_before = _supervise(request, runtime, log)
            if watch is not None and runtime.follows_job:
                watch.look_once_more(_STATE_SECONDS)
                check_executions()
        show_end = partial(_publish_end, request, "completed", told=finished_before)
        return result
    except BaseException as error:
        keep = isinstance(error, AttemptFailedError) and error.retryable and more
        show_end = partial(_publish_failure, request, error, detached)
        raise
    finally:
        log.close()
        if keep:
            with _waiting_lock:
                _waiting[request.key] = runtime
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(_watch_waiting, request, runtime, around),
                name="elastic-train-waiting",
                daemon=True,
            ).start()
        else:
            runtime.close()
            show_end()


def _detaches(request: _Request, reason: BaseException) -> bool:
    """Tell whether a job goes on when the flow process is told to end: only if nobody wants the training to end.

    A machine that is taken away sends SIGTERM, as does a runner that carries out a cancellation. Without a flow run
    nobody would ever follow the job again.
    """
    if isinstance(reason, _Stop) and reason.reason is not None:
        return reason.reason is StopReason.TAKEN_OVER
    if isinstance(reason, TimeoutError):
        return False
    # In the main thread Prefect's own signal handler raises; elsewhere only the pipe knows.
    terminated = isinstance(reason, TerminationSignal) or interruptions(signal.SIGTERM) > request.terminations
    if not terminated or not request.flow_run_ids:
        return False
    return not wants_an_end(request.flow_run_ids, _STATE_SECONDS)


def _followed_until(request: _Request) -> float:
    """Give when this flow run last told something in an earlier process: from there a job is followed on."""
    found = ask_prefect(lambda client: _last_told(client, request), _STATE_SECONDS) if request.flow_run_ids else None
    # Without an answer what was before is not told again.
    return time.time() if found is None else found - _TOLD_LATE_SECONDS


def _last_told(client: SyncPrefectClient, request: _Request) -> float | None:
    from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId, LogFilterTimestamp
    from prefect.client.schemas.sorting import LogSort

    flow_run_id = uuid.UUID(request.flow_run_ids[0])
    states = sorted(client.read_flow_run_states(flow_run_id), key=lambda state: state.timestamp)
    running = [number for number, state in enumerate(states) if state.is_running()]
    # What is logged after the end of the last execution is of this one: its runner's, its other tasks'. Where nobody
    # has noticed that end, there is no runner either.
    before = states[running[-2] + 1].timestamp if len(running) > 1 else request.called_at
    newest = client.read_logs(
        LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run_id]), timestamp=LogFilterTimestamp(before_=before)),
        limit=1,
        sort=LogSort.TIMESTAMP_DESC,
    )
    return newest[0].timestamp.timestamp() if newest else None


def _publisher(request: _Request, spec: DriverSpec, log: RunLog) -> Publisher | None:
    """Give what shows the training in Prefect, over all its attempts in this process; None if nothing shall."""
    if not get_settings().reporting:
        return None
    with _waiting_lock:
        publisher = _publishers.get(request.key)
        if publisher is None:
            task_run = TaskRunContext.get()
            checkpoints = spec.checkpoints
            publisher = _publishers[request.key] = Publisher(
                RunReport(
                    run_name=spec.request.run_name,
                    score_attribute=checkpoints.score_attribute,
                    score_order=checkpoints.score_order,
                ),
                interval_seconds=get_settings().report_interval_seconds,
                storage_block=spec.storage_block,
                flow_run_id=request.flow_run_ids[0] if request.flow_run_ids else "",
                task_run_id=str(task_run.task_run.id) if task_run is not None else "",
                related=request.related,
            )
        publisher.on_trouble = log.note
    return publisher


def _publish_end(request: _Request, state: str, why: str = "", told: bool = False) -> None:
    """Show how the training ended, if it is shown at all."""
    with _waiting_lock:
        publisher = _publishers.pop(request.key, None)
    if publisher is not None:
        publisher.end(state, why, told)
        publisher.close()


def _publish_failure(request: _Request, error: BaseException, detached: bool) -> None:
    """Show why the training ended otherwise than completed."""
    silent = isinstance(error, _NothingToSayError | Abort)
    if silent or (isinstance(error, _Stop) and error.reason is StopReason.TAKEN_OVER):
        with _waiting_lock:
            publisher = _publishers.pop(request.key, None)
        if publisher is not None:
            publisher.abandon()  # another process shows the training now
    elif detached:
        _publish_end(request, "left to its job", "the flow process was told to end; the job goes on", told=True)
    elif isinstance(error, TimeoutError):
        _publish_end(request, "timed out", str(error))
    elif isinstance(error, AttemptFailedError) and error.outcome is not Outcome.CANCELLED:
        _publish_end(request, "failed", str(error))
    elif isinstance(error, Exception) and not isinstance(error, AttemptFailedError):
        _publish_end(request, "failed", f"{type(error).__name__}: {error}")
    elif _is_cancelled(request, error):
        _publish_end(request, "cancelled", str(error))
    else:
        _publish_end(request, "interrupted", "the flow process was told to end; what is committed stays")


def _is_cancelled(request: _Request, error: BaseException) -> bool:
    """Tell whether somebody wanted the end: a machine that is taken away sends the same signal as a cancellation."""
    if isinstance(error, KeyboardInterrupt | asyncio.CancelledError | AttemptFailedError):
        return True
    if isinstance(error, _Stop) and error.reason is not None:
        return error.reason is StopReason.CANCELLING
    return not request.flow_run_ids or wants_an_end(request.flow_run_ids, _STATE_SECONDS)


def _supervise(request: _Request, runtime: Runtime, log: RunLog) -> tuple[TrainingResult, bool]:
    """Start a driver and follow it to its end; give the result, and whether the run had it before."""
    runtime.check_stop()
    try:
        spec = _spec(request)
    except ConfigurationError:
        raise
    except Exception as error:
        # Blocks are loaded by name at each attempt, and Prefect's API may be away just now.
        raise AttemptFailedError(
            f"the blocks of training {request.run_name!r} cannot be loaded now: {type(error).__name__}: {error}",
            outcome=Outcome.DRIVER_LOST,
        ) from error
    publisher = _publisher(request, spec, log)

    def on_event(event: Event, told: bool = False) -> None:
        (log.past_event if told else log.event)(event)
        if publisher is not None:
            publisher.take(event, told)

    runtime.on_event, runtime.on_past_event = on_event, partial(on_event, told=True)
    if publisher is not None:
        spec = replace(spec, previous_end=publisher.last_end)
    ended = runtime.run_attempt(spec)
    if publisher is not None and not ended.sequence:
        # The driver could not say so itself. The time since it spoke last is nobody's work.
        publisher.take(ended.model_copy(update={"at": publisher.last_event_at}))
    if ended.outcome is Outcome.COMPLETED and ended.result is not None:
        return TrainingResult.model_validate(ended.result), ended.already_finished
    if ended.outcome is Outcome.SUPERSEDED:
        # The flow run is the other process's now: whatever this one said of it would be wrong.
        raise _silent_end(request, f"training {request.run_name!r}: {ended.message}", ended.outcome)
    raise _failure(request, ended)


def _check_time(request: _Request) -> None:
    if request.is_out_of_time:
        raise TrainingTimeoutError(
            f"training {request.run_name!r} was ended after timeout_seconds={request.timeout_seconds:g}; what it has "
            "committed is kept, and a retry of the flow run goes on from there",
            outcome=Outcome.TIMED_OUT,
        )


def _failure(request: _Request, ended: AttemptEnded) -> AttemptFailedError:
    attempt = f"attempt {ended.attempt}" if ended.attempt else "the driver"
    error_type = TrainingTimeoutError if ended.outcome is Outcome.TIMED_OUT else AttemptFailedError
    return error_type(
        f"training {request.run_name!r}, {attempt}: {ended.outcome.value}: {ended.message}",
        outcome=ended.outcome,
        attempt=ended.attempt,
        final=ended.final,
    )


def _spec(request: _Request) -> DriverSpec:
    """Resolve the blocks, anew at each attempt, into what the driver is told."""
    scaling = plain(ScalingSettings, _resolved(ElasticScaling, request.scaling))
    failures = plain(FailureSettings, _resolved(FailureBudget, request.failures))
    storage = _resolved_storage(request.storage)
    return DriverSpec(
        request=request.wanted,
        scaling=scaling,
        failures=failures,
        checkpoints=plain(CheckpointSettings, _resolved(CheckpointPolicy, request.checkpoints)),
        storage=plain_storage(storage),
        cluster=plain(ClusterSettings, _resolved(RayCluster, request.cluster)),
        poll_interval_seconds=get_settings().poll_interval(scaling.max_workers),
        sys_path=import_path(),
        storage_block=saved_name(storage),
    )


def _request(
    train_loop: TrainLoop,
    *,
    train_loop_config: dict[str, Any] | None = None,
    framework: str = "torch",
    scaling: ElasticScaling | str | None = None,
    failures: FailureBudget | str | None = None,
    checkpoints: CheckpointPolicy | str | None = None,
    storage: StorageBlock | str | None = None,
    cluster: RayCluster | str | None = None,
    datasets: Any = None,
    run_name: str | None = None,
    resume: bool = False,
    resume_from: str | None = None,
    torch_config: Any = None,
    jax_config: Any = None,
    dataset_config: Any = None,
    validation_config: Any = None,
    worker_runtime_env: dict[str, Any] | None = None,
    timeout_seconds: float | None = None,
) -> _Request:
    """Check what can be checked before anything starts."""
    _check_loop_argument(train_loop)
    if train_loop_config is not None and not isinstance(train_loop_config, dict):
        raise ConfigurationError(f"train_loop_config must be a dict or None, got {type(train_loop_config).__name__}")
    check_arguments(framework, run_name, resume, resume_from, timeout_seconds)
    get_settings()  # what is wrong with them is said now, whether or not a block is looked for
    blocks = {
        "scaling": _given("scaling", scaling, partial(_resolved, ElasticScaling), ElasticScaling),
        "failures": _given("failures", failures, partial(_resolved, FailureBudget), FailureBudget),
        "checkpoints": _given("checkpoints", checkpoints, partial(_resolved, CheckpointPolicy), CheckpointPolicy),
        "storage": _given("storage", storage, _resolved_storage, lambda: LocalStorage(path=DEFAULT_STORAGE)),
        "cluster": _given("cluster", cluster, partial(_resolved, RayCluster), RayCluster),
    }
    try:
        payload = dump_payload(
            Payload(
                train_loop=train_loop,
                train_loop_config=train_loop_config,
                datasets=datasets,
                dataset_config=dataset_config,
                torch_config=torch_config,
                jax_config=jax_config,
                validation_config=validation_config,
            )
        )
    except Exception as error:
        raise ConfigurationError(
            f"train loop {loop_name(train_loop)!r} or its configuration cannot be sent to another process: "
            f"{type(error).__name__}: {error}. Keep locks, open files and connections out of what the loop refers to"
        ) from error
    # Last, since it counts the trainings of the flow run: one that was refused is none.
    identity = _identity(train_loop)
    name = check_run_name(run_name if run_name is not None else identity.default_name)
    key = uuid.uuid4().hex
    return _Request(
        key=key,
        wanted=RunRequest(
            run_name=name,
            named=run_name is not None,
            owner=identity.owner.model_copy(update={"supervisor": key}),
            # Now, as the payload: the user's dict may be changed for the next training.
            fingerprint=fingerprint(train_loop, framework, train_loop_config),
            resume=resume,
            resume_from=resume_from or "",
            part=identity.part,
            resumed=identity.resumed,
            has_datasets=bool(datasets),
            worker_runtime_env=worker_runtime_env or {},
            payload=payload,
        ),
        timeout_seconds=timeout_seconds,
        asked_at=time.monotonic(),
        called_at=datetime.now(timezone.utc),
        flow_run_ids=identity.flow_run_ids,
        related=identity.related,
        submitted=False,
        interruptions=interruptions(),
        terminations=interruptions(signal.SIGTERM),
        **blocks,
    )


def check_arguments(
    framework: str, run_name: str | None, resume: bool, resume_from: str | None, timeout_seconds: float | None
) -> None:
    """Check those arguments of :data:`elastic_train` that are neither blocks nor the user's own objects.

    Raises:
        ConfigurationError: One is not allowed, or two do not fit together.
    """
    if framework not in FRAMEWORKS:
        raise ConfigurationError(f"framework {framework!r} is unknown; use one of {', '.join(map(repr, FRAMEWORKS))}")
    if timeout_seconds is not None and not timeout_seconds > 0:
        raise ConfigurationError(f"timeout_seconds={timeout_seconds!r} must be above 0, or None for no bound")
    if resume and resume_from:
        raise ConfigurationError(
            "resume=True continues a run and resume_from starts a new one from another's checkpoint: give one of them"
        )
    if resume and run_name is None:
        raise ConfigurationError("resume=True takes over a run of another flow run: name it with run_name")
    if resume_from:
        check_run_name(resume_from.partition("@")[0])
    if run_name is not None:
        check_run_name(run_name)
    if run_name == LATEST_RUN:
        raise ConfigurationError(
            f"run_name={run_name!r} is what resume_from calls the newest earlier run; give the run another name"
        )


def _check_loop_argument(train_loop: TrainLoop) -> None:
    from prefect_elastic_train.driver.fit import check_loop

    if isinstance(train_loop, str):
        module, _, function = train_loop.partition(":")
        if not all(part.isidentifier() for part in [*module.split("."), *function.split(".")]):
            raise ConfigurationError(f"train loop {train_loop!r} is no import path; write 'package.module:function'")
        return
    if not callable(train_loop):
        raise ConfigurationError(
            f"the train loop must be a function or an import path, got {type(train_loop).__name__}"
        )
    check_loop(train_loop)


def _given(
    argument: str, given: Block | str | None, resolve: Callable[[Any], Block], default: Callable[[], Block]
) -> Any:
    """Give a block or its name, checked: names are looked up once now, so that a typing error ends nothing later.

    Args:
        argument: Of ``elastic_train``.
        given: What it got.
        resolve: Makes a block of that, or refuses.
        default: Makes the block of those who neither give one nor have a setting that names one.
    """
    if given is not None:
        resolve(given)
        return given
    name = default_block_name(argument)
    if not name:
        return default()
    with naming_the_setting(argument):
        resolve(name)
    return name


def _resolved_storage(given: StorageBlock | str) -> StorageBlock:
    """Load a storage of whatever type that was given by name; see :func:`_resolved`."""
    block = load_storage(given) if isinstance(given, str) else given
    if type(block) not in STORAGE_TYPES:
        names = ", ".join(kind.__name__ for kind in STORAGE_TYPES)
        raise ConfigurationError(f"expected a storage ({names}) or the name of one, got {type(given).__name__}")
    _check_secrets(block)
    return block


def _resolved(block_type: type[BlockType], given: BlockType | str) -> BlockType:
    """Load a block that was given by name; refuse one whose secrets Prefect has masked.

    Raises:
        ConfigurationError: There is no such block, it is of another type, or its secrets are asterisks.
    """
    block = load_block(block_type, given) if isinstance(given, str) else given
    if not isinstance(block, block_type):
        raise ConfigurationError(f"expected a {block_type.__name__} or the name of one, got {type(given).__name__}")
    _check_secrets(block)
    result: BlockType = block
    return result


def _check_secrets(block: Block) -> None:
    """Refuse a block whose secrets Prefect has masked."""
    for field in type(block).model_fields:
        value = getattr(block, field)
        text = value.get_secret_value() if isinstance(value, SecretStr) else ""
        if text and not text.strip(_MASK):
            raise ConfigurationError(
                f"{type(block).__name__}.{field} is masked: Prefect stores the secrets of a block that is given inline "
                "as a flow parameter as asterisks. Save the block and pick it by name in the parameter"
            )


@dataclass(frozen=True)
class _Identity:
    """Whose training it is, and what it is called unless the user says."""

    owner: Owner
    flow_run_ids: tuple[str, ...]
    default_name: str
    part: str
    resumed: bool = False
    related: tuple[dict[str, str], ...] = ()


def _identity(train_loop: TrainLoop) -> _Identity:
    """Find out for which flow run this is, and its how manieth training."""
    context = FlowRunContext.get()
    flow_run = context.flow_run if context else None
    if context is None or flow_run is None:
        owner = Owner(flow_run_id=uuid.uuid4().hex)
        name = loop_name(train_loop)
        return _Identity(owner, (), default_run_name(name, owner.flow_run_id, 1), training_part(name, 1))
    place = current_place(context)
    ordinal = numbered(("training", str(flow_run.id), str(flow_run.run_count)), str(flow_run.id))
    flow_name = (context.flow.name if context.flow else "") or loop_name(train_loop)
    return _Identity(
        place.owner,
        place.flow_run_ids,
        default_run_name(flow_name, place.owner.flow_run_id, ordinal, place.calls),
        training_part(flow_name, ordinal, place.calls),
        resumed=(flow_run.run_count or 0) > 1,
        related=place.related,
    )
