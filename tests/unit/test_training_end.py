"""What Prefect is told of the end of a training, and what is done about one whose next attempt does not come."""

import asyncio
import gc
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import datetime
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import Abort, TerminationSignal
from prefect.states import Cancelling, Failed, Running

from prefect_elastic_train import ElasticScaling, FailureBudget
from prefect_elastic_train.core.causes import Cause
from prefect_elastic_train.core.events import (
    AttemptEnded,
    AttemptStarted,
    BlocksChanged,
    CheckpointCommitted,
    TrackersOpened,
    WorkerFailed,
)
from prefect_elastic_train.core.operator_settings import ElasticTrainSettings
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome, TrainingTimeoutError
from prefect_elastic_train.orchestration import flow_run_state, report_publisher, supervision, task
from prefect_elastic_train.orchestration.supervision import SilentEndError, Stop, Training, TrainingState, classify_end
from prefect_elastic_train.orchestration.task import aelastic_train, elastic_train, make_training
from prefect_elastic_train.report.run_report import RunReport
from prefect_elastic_train.trackers.tracked_run import TrackedRun
from tests.support.processes import wait_for
from tests.support.trackers import read_mlflow


def _loop() -> None:
    """A train loop."""


#: Errors by the end of a training that they cause, if its job does not go on. Empty: it depends on who wanted the end.
ENDS = {
    "": [TerminationSignal(signal=15), Stop()],
    "cancelled": [
        Stop("1"),
        KeyboardInterrupt(),
        asyncio.CancelledError(),
        AttemptFailedError("stopped", outcome=Outcome.CANCELLED),
    ],
    "timed out": [TimeoutError("the flow's own"), TrainingTimeoutError("late", outcome=Outcome.TIMED_OUT)],
    "taken over": [Abort("taken over"), SilentEndError("taken over", outcome=Outcome.SUPERSEDED)],
    "failed": [ValueError("a bug"), AttemptFailedError("the head died", outcome=Outcome.CLUSTER_LOST)],
}


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_an_end_is_told_by_who_ended_the_training_unless_its_job_goes_on(end: str, wanted: bool) -> None:
    for error in ENDS[end]:
        detached = classify_end(error, True, lambda: wanted).value
        assert detached == ("taken over" if end == "taken over" else "continues as a job")
        assert classify_end(error, False, lambda: wanted).value == (end or ("cancelled" if wanted else "interrupted"))


@pytest.mark.parametrize(
    ("reason", "terminated", "goes_on"),
    [
        (Stop(), True, True),
        (Stop(), False, False),
        (TerminationSignal(signal=15), False, True),
        (Stop("1"), True, False),
        (TimeoutError(), True, False),
    ],
)
def test_a_job_goes_on_without_its_flow_process_unless_somebody_wants_its_end(
    processes: Mock, monkeypatch: pytest.MonkeyPatch, reason: BaseException, terminated: bool, goes_on: bool
) -> None:
    monkeypatch.setattr(supervision, "count_signals", lambda *numbers: 1)
    training = make_training(_loop)
    training._enter(TrainingState.RUNNING)
    training._is_end_requested = lambda: False
    monkeypatch.setattr(supervision, "count_signals", lambda *numbers: 1 + terminated)  # one came before the call
    assert training.keeps_job(reason) is goes_on
    assert (training._state is TrainingState.DETACHING) is goes_on


@pytest.fixture
def prefect_api(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """The client of Prefect's API."""
    client = MagicMock()
    client.__enter__.return_value = client
    for module in (flow_run_state, report_publisher):
        monkeypatch.setattr(module, "get_client", lambda sync_client: client)
    return client


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """The processes of the test's training, which play its ``attempts`` in a task of Prefect and are shown nowhere."""
    played = Mock()

    def run_attempt(spec):
        *events, ended = played.attempts.pop(0)
        for event in events:
            played.make.call_args.args[1].on_event(event, False)
        return ended

    played.run_attempt.side_effect = run_attempt
    played.make.return_value = played
    context = SimpleNamespace(task_run=SimpleNamespace(run_count=1), task=SimpleNamespace(retries=0))
    monkeypatch.setattr(supervision.TaskRunContext, "get", lambda: context)
    monkeypatch.setattr(supervision, "get_run_logger", lambda: logging.getLogger("run"))
    monkeypatch.setattr(supervision, "get_settings", lambda: ElasticTrainSettings(reporting=False))
    monkeypatch.setattr(supervision, "TrainingProcesses", played.make)
    return played


def _specs(processes: Mock) -> list[Any]:
    """The specs of the drivers that were started."""
    return [call.args[0] for call in processes.run_attempt.mock_calls]


COMMITTED = CheckpointCommitted(attempt=1, checkpoint="a", size_bytes=1, metrics={}, world_size=1)
BEGUN = AttemptStarted(attempt=1, run_name="mnist", run_uri="/r/mnist", left={"driver restart": 1000})
LOST = AttemptEnded(attempt=1, outcome=Outcome.CLUSTER_LOST, message="no cluster answers")
COMPLETED = AttemptEnded(attempt=2, outcome=Outcome.COMPLETED, result={"run_name": "mnist", "run_uri": "/r/mnist"})


def _fail(training: Training) -> AttemptFailedError:
    """Run an attempt that fails."""
    with pytest.raises(AttemptFailedError) as failed:
        training.attempt()
    return failed.value


@pytest.mark.parametrize(
    ("outcome", "status"),
    [(Outcome.USER_ERROR, "FAILED"), (Outcome.TIMED_OUT, "FAILED"), (Outcome.CANCELLED, "KILLED")],
)
def test_a_training_that_has_not_completed_is_marked_in_its_trackers(
    processes: Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: Outcome, status: str
) -> None:
    unhurried = {state: (mark, 60.0) for state, (mark, _) in supervision._TRACKER_MARKS.items()}
    monkeypatch.setattr(supervision, "_TRACKER_MARKS", unhurried)
    run = TrackedRun("mlflow", {"run_id": "1", "run_name": "mnist"}, {"tracking_uri": str(tmp_path)}, "link")
    opened = TrackersOpened(attempt=1, runs=[run])
    processes.attempts = [[BEGUN, opened, AttemptEnded(attempt=1, outcome=outcome, message="nan")]]
    with suppress(AttemptFailedError):
        make_training(_loop).attempt()
    assert read_mlflow(str(tmp_path)).status == status


@pytest.mark.parametrize("commits", [False, True])
def test_a_driver_that_is_lost_is_followed_by_another_on_the_same_cluster_at_once_if_it_has_committed_anything(
    processes: Mock, commits: bool
) -> None:
    processes.attempts = [[COMMITTED, LOST] if commits else [LOST.model_copy(update={"attempt": 0})], [COMPLETED]]
    training = make_training(_loop, run_name="mnist", failures=FailureBudget(driver_restart_delay_seconds=40))
    error, who = _fail(training), "attempt 1" if commits else "the driver"
    assert str(error) == f"training 'mnist', {who}: cluster_lost: no cluster answers"
    assert (error.outcome, error.attempt) == (Outcome.CLUSTER_LOST, commits)
    assert not processes.close.called
    result = training.attempt()
    assert result.run_name == "mnist"
    assert [40 <= call.args[0] <= 48 for call in processes.wait.mock_calls] == [True] * (not commits)
    processes.close.assert_called_once()
    assert [spec.previous_end for spec in _specs(processes)] == ["", "cluster_lost: no cluster answers"]


@pytest.mark.parametrize(("commits", "retryable"), [([1, 1, 1, 1], True), ([1, 0, 0, 1], True), ([1, 0, 0, 0], False)])
def test_drivers_that_commit_nothing_in_a_row_are_given_up_whatever_the_task_still_has_of_retries(
    processes: Mock, commits: list[int], retryable: bool
) -> None:
    processes.attempts = [[BEGUN, *[COMMITTED] * committed, LOST] for committed in commits]
    training = make_training(_loop, failures=FailureBudget(driver_restarts=2, forgive_after_seconds=0))
    assert [_fail(training).retryable for _ in commits][-1] == retryable


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("interrupt", [Training.attempt, lambda training: training.close(KeyboardInterrupt())])
def test_an_interrupted_wait_ends_the_job_that_the_attempt_has_lost_sight_of(
    processes: Mock, monkeypatch: pytest.MonkeyPatch, goes_on: bool, interrupt: Callable[[Training], object]
) -> None:
    processes.attempts = [[LOST]]
    training = make_training(_loop)
    _fail(training)
    monkeypatch.setattr(training, "_may_detach", lambda reason: goes_on)
    processes.wait.side_effect = ZeroDivisionError
    with suppress(ZeroDivisionError):
        interrupt(training)
    processes.close.assert_called_once()
    assert processes.stop_job.called is not goes_on


def test_saved_blocks_are_loaded_again_at_each_attempt_unless_the_api_is_away_and_the_log_tells_of_changes(
    processes: Mock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    changed = ElasticScaling(max_workers=9)
    load = Mock(side_effect=[ElasticScaling(), changed, changed, ConnectionError("no answer")])
    processes.attempts = [[LOST]] * 5
    training = make_training(_loop, failures=FailureBudget(driver_restarts=9))
    training.saved_blocks = {"scaling": "elastic-scaling/lab"}
    monkeypatch.setattr(supervision, "load_block", load)
    with caplog.at_level(logging.INFO, "run"):
        for _ in range(5):
            _fail(training)
    assert [spec.scaling.max_workers for spec in _specs(processes)] == [1, 1, 9, 9, 9]
    notes = [text for text in caplog.messages if "block" in text]
    assert notes[0] == "A saved block has changed since the previous attempt; this attempt uses the new values"
    assert "cannot be loaded now: ConnectionError: no answer. They are used as they were" in notes[1]
    assert len(notes) == 2
    assert not processes.close.called, "the local cluster holds recovery points"


@pytest.mark.parametrize("state", ["waiting for capacity", "restarting workers"])
@pytest.mark.parametrize(("requests", "is_changed"), [((0.0, 5.0), True), ((0.0, 5.0), False), ((5.0, 5.0), True)])
def test_a_request_applies_changed_blocks_after_a_commit_or_during_a_wait_for_capacity_unless_it_is_old(
    processes: Mock, monkeypatch: pytest.MonkeyPatch, requests: tuple[float, float], is_changed: bool, state: str
) -> None:
    monkeypatch.setattr(supervision, "last_request", Mock(side_effect=requests))
    monkeypatch.setattr(supervision, "READ_SECONDS", -1.0)
    monkeypatch.setattr(supervision, "load_block", lambda *_: ElasticScaling(max_workers=1 + is_changed))
    training = make_training(_loop)
    training.saved_blocks = {"scaling": "elastic-scaling/lab"}
    published = Mock()
    processes.attempts = [[LOST]]
    _fail(training)
    monkeypatch.setattr(training, "_publish", published)
    training._enter(TrainingState.RUNNING)
    training._publisher.report.state = state
    for _ in requests:
        training._read_changes(Mock())
    applies = is_changed and requests[0] != requests[1]
    with pytest.raises(supervision.ApplyBlocks) if applies and state == "waiting for capacity" else nullcontext():
        training.check_stop()
    with pytest.raises(supervision.ApplyBlocks) if applies and state != "waiting for capacity" else nullcontext():
        training.on_event(COMMITTED, replayed=False)
        training.check_stop()
    training.check_stop()
    told = [call.args[0] for call in published.call_args_list]
    assert [isinstance(event, BlocksChanged) for event in told if event != COMMITTED] == [True] * is_changed


@pytest.mark.parametrize("argument", ["scaling", "failures"])
def test_blocks_are_applied_by_another_driver_and_a_local_cluster_is_replaced_if_its_size_may_change(
    processes: Mock, monkeypatch: pytest.MonkeyPatch, argument: str
) -> None:
    changed = {"scaling": ElasticScaling(max_workers=9), "failures": FailureBudget(max_failures=9)}[argument]
    monkeypatch.setattr(supervision, "load_block", lambda *_: changed)
    training = make_training(_loop)
    training.saved_blocks = {argument: "a saved one"}
    play = processes.run_attempt.side_effect

    def apply(spec: Any) -> None:
        processes.run_attempt.side_effect = play
        training._newest_blocks = training._load_blocks()
        raise supervision.ApplyBlocks

    processes.run_attempt.side_effect = apply
    processes.attempts = [[LOST]]
    _fail(training)
    assert [getattr(spec, argument) == changed.plain() for spec in _specs(processes)] == [False, True]
    assert processes.close.call_count == (argument == "scaling")


@pytest.mark.parametrize(("limit", "remaining"), [(None, math.inf), (60.0, 59.0)])
def test_a_time_limit_moves_with_the_wall_clock_in_the_driver_only(
    processes: Mock, monkeypatch: pytest.MonkeyPatch, limit: float | None, remaining: float
) -> None:
    clock = Mock(monotonic=lambda: 10.0, time=lambda: 1000.0)
    monkeypatch.setattr(supervision, "time", clock)
    training = make_training(_loop, timeout_seconds=limit)
    processes.attempts = [[LOST]]
    clock.monotonic, clock.time = lambda: 11.0, lambda: 5000.0
    _fail(training)
    assert _specs(processes)[0].ends_at == 5000.0 + remaining
    clock.monotonic = lambda: 71.0
    with pytest.raises(TrainingTimeoutError) if limit else nullcontext():
        training.check_stop()


@pytest.mark.parametrize("answer", [ConnectionError("no answer"), None, SimpleNamespace(value="/old")])
def test_a_known_storage_is_neither_checked_nor_replaced_without_an_answer_of_the_api(
    processes: Mock, prefect_api: MagicMock, monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    prefect_api.read_variable_by_name.side_effect = [answer]
    monkeypatch.setattr(supervision, "saved_name", lambda block: "training-storage-directory/lab")
    written = Mock()
    monkeypatch.setattr(supervision.Variable, "set", written)
    training = make_training(_loop)
    processes.attempts = [[BEGUN, LOST]]
    _fail(training)
    uri = getattr(answer, "value", "")
    has_answer = not isinstance(answer, Exception)
    assert _specs(processes)[0].request.known_storage[0] == uri
    assert written.called is has_answer


@pytest.mark.parametrize(("state", "creates"), [("taken over", False), ("interrupted", True)])
def test_a_process_that_another_one_has_replaced_does_not_hide_its_report_by_a_new_one(
    prefect_api: MagicMock, monkeypatch: pytest.MonkeyPatch, state: str, creates: bool
) -> None:
    publisher = report_publisher.Publisher(RunReport(run_name="mnist"), pytest.fail)
    monkeypatch.setattr(publisher, "_written_at", math.inf)  # it writes at its end only
    publisher.start()
    publisher.end(state, is_published=True)
    created = [call for call in prefect_api.request.call_args_list if call.args == ("POST", "/artifacts/")]
    assert bool(created) is creates


@pytest.mark.parametrize("outcome", [Outcome.USER_ERROR, Outcome.DRIVER_LOST])
def test_the_error_of_a_loop_that_failed_is_raised_from_what_the_loop_has_raised(
    processes: Mock, monkeypatch: pytest.MonkeyPatch, outcome: Outcome
) -> None:
    raised = 'Traceback (most recent call last):\n  File "train.py", line 3, in loop\nValueError: the data is bad'
    broken = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4183"
    causes = [Cause([0], broken, is_consequence=True), Cause([1], "ValueError: the data is bad", traceback=raised)]
    failed = WorkerFailed(causes=causes, retried=outcome is not Outcome.USER_ERROR)
    processes.attempts = [[BEGUN, failed, AttemptEnded(attempt=1, outcome=outcome, message="ValueError", final=True)]]
    monkeypatch.setattr(task, "_task", lambda training: Training.attempt)
    with pytest.raises(AttemptFailedError) as error:
        elastic_train(_loop)
    assert error.value.final
    assert str(error.value.__cause__) == (f"\n[rank 1] {raised}" if outcome is Outcome.USER_ERROR else "None")


def test_what_ended_the_wait_for_an_attempt_is_told_whatever_signal_comes_while_its_cluster_is_ended(
    processes: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(training):
        _fail(training)
        raise KeyboardInterrupt

    processes.attempts = [[LOST]]
    processes.close.side_effect = TerminationSignal(signal=15)
    monkeypatch.setattr(task, "_task", lambda training: interrupted)
    with pytest.raises(TerminationSignal):
        elastic_train(_loop)
    assert processes.make.call_args.args[1]._publisher.report.state == "cancelled"


@pytest.mark.parametrize("is_async", [True, False])
def test_a_call_that_holds_an_event_loop_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_async: bool
) -> None:
    monkeypatch.setattr(task, "_task", lambda training: lambda training: "trained")
    monkeypatch.setattr(task, "get_run_logger", lambda: logging.getLogger("run"), raising=False)

    async def train() -> Any:
        return elastic_train(_loop)

    assert (asyncio.run(train()) if is_async else elastic_train(_loop)) == "trained"
    assert ("await aelastic_train(...)" in caplog.text) is is_async


@pytest.mark.parametrize("cancellations", [1, 2])
def test_a_cancelled_coroutine_waits_for_the_end_of_its_training_and_asyncio_logs_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cancellations: int
) -> None:
    began, ended = threading.Event(), threading.Event()

    def run(training):
        began.set()
        wait_for(lambda: training.cancelled, 10, "the cancellation")
        time.sleep(0.2)
        ended.set()
        raise Stop

    async def train() -> None:
        training = asyncio.create_task(aelastic_train(_loop))
        await asyncio.to_thread(began.wait, 10)
        for _ in range(cancellations):
            training.cancel()
            await asyncio.sleep(0.05)
        await training

    monkeypatch.setattr(task, "_task", lambda training: run)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(train())
    gc.collect()
    assert ended.is_set()
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("state", [Cancelling(), Failed(), Running()])
def test_a_flow_run_that_had_ended_and_is_retried_by_now_is_not_cancelled(state: Any) -> None:
    ids, client = [str(UUID(int=number)) for number in (1, 2)], Mock()
    client.read_flow_run = lambda one: SimpleNamespace(state=state if str(one) == ids[-1] else Running())
    flow_run_state.mark_cancelled(client, ids)
    marked = [str(call.args[0]) for call in client.set_flow_run_state.mock_calls]
    assert marked == (ids if state.is_cancelling() else ids[:1])


@pytest.mark.parametrize(
    ("published", "reporting", "until"),
    [([100, 90], True, 100.0), ([], True, 0.0), (None, True, 500.0), ([], False, 500.0)],
)
def test_a_job_is_followed_from_the_newest_event_of_its_flow_run_and_from_now_if_that_is_unknown(
    prefect_api: MagicMock, monkeypatch: pytest.MonkeyPatch, published: list[int] | None, reporting: bool, until: float
) -> None:
    monkeypatch.setattr(supervision, "get_settings", lambda: ElasticTrainSettings(reporting=reporting))
    training = make_training(_loop, run_name="mnist")
    if published is None:
        prefect_api.read_events.side_effect = ConnectionError
    else:
        prefect_api.read_events.return_value.events = [
            SimpleNamespace(occurred=datetime.fromtimestamp(at)) for at in published
        ]
    monkeypatch.setattr(supervision, "time", Mock(time=lambda: 500.0))
    assert training.logged_until() == pytest.approx(until, abs=1e-5)
    wanted = prefect_api.read_events.call_args.args[0]
    assert wanted.resource.id == ["elastic-train.run.mnist"]
    assert wanted.related.id == [f"prefect.flow-run.{training.request.owner.flow_run_id}"]


@pytest.mark.parametrize(("detached", "ends"), [([], True), ([False, True], True), ([False], False)])
def test_a_worker_of_a_process_pool_ends_with_its_flow_process_and_a_flow_process_does_not_with_who_has_started_it(
    monkeypatch: pytest.MonkeyPatch, detached: list[bool], ends: bool
) -> None:
    ended, exited = threading.Event(), threading.Event()
    parent = Mock(join=ended.wait)
    monkeypatch.setattr(flow_run_state.multiprocessing, "parent_process", lambda: parent)
    monkeypatch.setattr(os, "_exit", lambda code: exited.set())
    flows = [SimpleNamespace(detached=flow) for flow in detached]
    flow_run_state.exit_with_flow_process(flows)
    assert not exited.is_set()
    ended.set()
    assert exited.wait(10 if ends else 0.2) is ends


def test_all_flow_runs_around_a_training_are_one_request_and_errors_of_the_api_end_no_training(
    prefect_api: MagicMock,
) -> None:
    ids = [str(uuid4()) for _ in range(3)]
    ended = [FlowRun(id=one, flow_id=uuid4()) for one in ids[1:]]
    prefect_api.read_flow_runs.side_effect = chain([[], ConnectionError("429")], repeat(ended))
    watch = flow_run_state.FlowRunWatch(ids, 0.01, lambda client: None)
    wait_for(lambda: watch.ended, 10, "the end of a flow run")
    watch.close()
    assert watch.ended == ids[-1]
    prefect_api.__enter__.assert_called_once()
    wanted = prefect_api.read_flow_runs.call_args.kwargs["flow_run_filter"]
    assert [*map(str, wanted.id.any_)] == ids
    assert [kind.value for kind in wanted.state.type.any_] == ["CANCELLING", "CANCELLED", "FAILED"]
