"""What Prefect is told of the end of a training, and what is done about one whose next attempt does not come."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock
from uuid import UUID, uuid4

import psutil
import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import Abort, TerminationSignal
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import AwaitingRetry, Cancelling, Failed, Running

from prefect_elastic_train import ElasticScaling, FailureBudget
from prefect_elastic_train.core.events import AttemptEnded, AttemptStarted, CheckpointCommitted, WorkerFailed
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome, TrainingTimeoutError
from prefect_elastic_train.orchestration import flow_run_state, task
from prefect_elastic_train.orchestration import supervision as training_of
from prefect_elastic_train.orchestration.report_publisher import Publisher
from prefect_elastic_train.orchestration.supervision import End, SilentEndError, Stop, Training, classify_end
from prefect_elastic_train.orchestration.task import elastic_train, make_training
from prefect_elastic_train.report.run_report import RunReport
from tests.support.processes import alive, wait_for
from tests.unit.support import REPOSITORY


def _loop() -> None:
    """A train loop."""


@pytest.mark.parametrize(
    ("error", "wanted", "end"),
    [
        (TerminationSignal(signal=15), True, End.CANCELLED),
        (TerminationSignal(signal=15), False, End.INTERRUPTED),
        (KeyboardInterrupt(), False, End.CANCELLED),
        (asyncio.CancelledError(), False, End.CANCELLED),
        (TimeoutError("the flow's own"), False, End.TIMED_OUT),
        (TrainingTimeoutError("late", outcome=Outcome.TIMED_OUT), False, End.TIMED_OUT),
        (Stop(), True, End.CANCELLED),
        (Stop(), False, End.INTERRUPTED),
        (Stop("1"), False, End.CANCELLED),
        (SilentEndError("taken over", outcome=Outcome.SUPERSEDED), False, None),
        (Abort("taken over"), False, None),
        (AttemptFailedError("stopped", outcome=Outcome.CANCELLED), False, End.CANCELLED),
        (AttemptFailedError("the head died", outcome=Outcome.CLUSTER_LOST), True, End.FAILED),
        (ValueError("a bug"), True, End.FAILED),
    ],
)
def test_an_end_is_told_by_who_ended_the_training_unless_its_job_goes_on(
    error: BaseException, wanted: bool, end: End | None
) -> None:
    ending = classify_end(error, False, lambda: wanted)
    assert (ending[0] if ending else None) is end
    detached = classify_end(error, True, lambda: wanted)
    assert (detached[0] if detached else None) is (End.DETACHED if end else None)


@pytest.mark.parametrize(
    ("reason", "terminated", "wanted", "goes_on"),
    [
        (Stop(), True, False, True),
        (Stop(), True, True, False),
        (Stop(), False, False, False),
        (TerminationSignal(signal=15), False, False, True),
        (KeyboardInterrupt(), False, False, False),
        (TimeoutError(), True, False, False),
        (Stop("1"), True, False, False),
    ],
)
def test_a_job_goes_on_without_its_flow_process_unless_somebody_wants_its_end(
    reason: BaseException, terminated: bool, wanted: bool, goes_on: bool
) -> None:
    training: Any = make_training(_loop)
    training._is_end_requested = lambda: wanted
    training._terminations -= terminated
    assert training.keeps_job(reason) is training._is_detached is goes_on


class _Runtime(Counter[str]):
    """Stands for a cluster that waits for the next attempt; counts what is done to it."""

    def __getattr__(self, name: str) -> Any:
        return lambda: self.update([name])


def _waiting(runtime: _Runtime, **arguments: Any) -> Any:
    """A training whose first attempt has ended, and whose cluster waits for the next one."""
    training: Any = make_training(_loop, **arguments)
    training._start()
    training._runtime = runtime
    return training


def _use_budget(training: Any, **budget: float) -> None:
    training.blocks = training.blocks._replace(failures=FailureBudget(**budget))


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("between", [False, True])
def test_an_interrupted_wait_ends_the_job_that_the_attempt_has_lost_sight_of(goes_on: bool, between: bool) -> None:
    runtime = _Runtime()
    training = _waiting(runtime)
    training._may_detach = lambda reason: goes_on
    if between:
        training.close(KeyboardInterrupt())
        assert runtime == ({"close": 1} if goes_on else {"stop_job": 1, "close": 1})
        return
    runtime.wait = lambda seconds: 1 / 0
    with pytest.raises(ZeroDivisionError):
        training._wait_before_restart(runtime)
    assert runtime == ({} if goes_on else {"stop_job": 1})


@pytest.mark.parametrize("commits", [False, True])
def test_a_driver_that_is_lost_is_followed_by_another_on_the_same_cluster_at_once_if_it_has_committed_anything(
    monkeypatch: pytest.MonkeyPatch, commits: bool
) -> None:
    runtime, waits, run_counts = _Runtime(), list[float](), iter([1, 2])
    lost = AttemptEnded(attempt=1, outcome=Outcome.DRIVER_LOST, message="killed")
    completed = AttemptEnded(
        attempt=2, outcome=Outcome.COMPLETED, result={"run_name": "mnist", "run_uri": "/r/mnist", "status": "completed"}
    )
    ends = iter([lost, completed])

    def run_attempt(spec: Any) -> AttemptEnded:
        if commits:
            training.on_event(
                CheckpointCommitted(attempt=1, checkpoint="a", size_bytes=1, metrics={}, world_size=1), False
            )
        return next(ends)

    runtime.run_attempt, runtime.wait = run_attempt, waits.append
    training = _waiting(runtime)
    _use_budget(training, driver_restart_delay_seconds=40, driver_restarts=3)
    training._restarts_left = 3
    _show(training, RunReport(run_name="mnist"))
    monkeypatch.setattr(training_of, "get_run_logger", lambda: logging.getLogger("run"))

    def context() -> Any:
        return SimpleNamespace(task_run=SimpleNamespace(run_count=next(run_counts)), task=SimpleNamespace(retries=3))

    monkeypatch.setattr(training_of.TaskRunContext, "get", context)
    with pytest.raises(AttemptFailedError, match="driver_lost: killed"):
        training.attempt()
    assert (runtime, waits) == ({}, [])
    assert training.attempt().run_name == "mnist"
    assert waits == [] if commits else 40 <= waits[0] <= 48
    assert runtime == {"close": 1}


def test_a_driver_that_follows_while_the_api_is_away_gets_the_blocks_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = _waiting(_Runtime())
    notes: list[str] = []
    training._log.note = lambda text, level: notes.append(text)
    training.saved_blocks = {"scaling": "elastic-scaling/lab"}
    before = training._next_spec()

    def away(*_: Any) -> Any:
        raise ConnectionError("no answer")

    monkeypatch.setattr(training_of, "load_block", away)
    training.request = replace(training.request, begun=True)
    assert training._next_spec() == replace(before, request=training.request)
    assert "cannot be loaded now: ConnectionError: no answer. They are used as they were" in notes[0]


def test_the_log_says_at_the_next_attempt_that_a_saved_block_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    training = _waiting(_Runtime())
    notes: list[str] = []
    training._log.note = notes.append
    training.saved_blocks = {"scaling": "elastic-scaling/lab"}
    monkeypatch.setattr(training_of, "load_block", lambda *_: ElasticScaling())
    training._next_spec()
    training._next_spec()
    assert notes == []
    monkeypatch.setattr(training_of, "load_block", lambda *_: ElasticScaling(max_workers=9))
    assert training._next_spec().scaling.max_workers == 9
    training._next_spec()
    assert notes == ["A saved block has changed since the previous attempt; this attempt uses the new values"]


@pytest.mark.parametrize(("commits", "retryable"), [([1, 1, 1, 1], True), ([1, 0, 0, 1], True), ([1, 0, 0, 0], False)])
def test_drivers_that_commit_nothing_in_a_row_are_given_up_whatever_the_task_still_has_of_retries(
    monkeypatch: pytest.MonkeyPatch, commits: list[int], retryable: bool
) -> None:
    runtime = _Runtime()

    def run_attempt(spec: Any) -> AttemptEnded:
        if commits.pop(0):
            training.on_event(
                CheckpointCommitted(attempt=1, checkpoint="a", size_bytes=1, metrics={}, world_size=1), False
            )
        return AttemptEnded(outcome=Outcome.CLUSTER_LOST, message="no cluster answers")

    runtime.run_attempt, runtime.wait = run_attempt, lambda seconds: None
    training = _waiting(runtime)
    _use_budget(training, driver_restarts=2, forgive_after_seconds=0)
    _show(training, RunReport(run_name="mnist"))
    monkeypatch.setattr(training_of, "get_run_logger", lambda: logging.getLogger("run"))
    task = SimpleNamespace(task_run=SimpleNamespace(run_count=2), task=SimpleNamespace(retries=1000))
    monkeypatch.setattr(training_of.TaskRunContext, "get", lambda: task)
    training._restarts_left = 1000
    while commits:
        with pytest.raises(AttemptFailedError) as lost:
            training.attempt()
    assert lost.value.retryable == retryable


@pytest.mark.parametrize("outcome", [Outcome.USER_ERROR, Outcome.DRIVER_LOST])
def test_the_error_of_a_loop_that_failed_is_raised_from_what_the_loop_has_raised(
    monkeypatch: pytest.MonkeyPatch, outcome: Outcome
) -> None:
    raised = 'Traceback (most recent call last):\n  File "train.py", line 3, in loop\nValueError: the data is bad'
    broken = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4183"
    training, runtime = _waiting(_Runtime()), _Runtime()
    training._runtime = runtime
    _show(training, RunReport(run_name="mnist"))

    def run_attempt(spec: Any) -> AttemptEnded:
        training.on_event(AttemptStarted(attempt=1, run_name="mnist", run_uri="/r/mnist"), False)
        training.on_event(
            WorkerFailed(errors={"0": broken, "1": raised}, retried=outcome is not Outcome.USER_ERROR), False
        )
        return AttemptEnded(attempt=1, outcome=outcome, message="ValueError: the data is bad")

    runtime.run_attempt = run_attempt
    monkeypatch.setattr(task, "_configured", lambda template, asked: lambda asked: training.attempt())
    with pytest.raises(AttemptFailedError) as failed:
        elastic_train(_loop)
    assert str(failed.value.__cause__) == (f"\n[rank 1] {raised}" if outcome is Outcome.USER_ERROR else "None")


def _show(training: Training, report: RunReport) -> None:
    """Have a training shown in a report that is written nowhere."""
    training._publisher = Publisher(report)
    training._publisher.abandon()


def test_what_ended_the_wait_for_an_attempt_is_told_whatever_signal_comes_while_its_cluster_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = RunReport(run_name="mnist", attempt=1)

    def interrupted(training: Any) -> None:
        training._start()
        training._runtime = runtime = _Runtime()
        runtime.close = stop_again
        _show(training, report)
        raise KeyboardInterrupt

    def stop_again() -> None:
        raise TerminationSignal(signal=15)

    monkeypatch.setattr(task, "_configured", lambda template, training: interrupted)
    with pytest.raises(TerminationSignal):
        elastic_train(_loop)
    assert report.state == "cancelled"


@pytest.mark.parametrize("is_async", [True, False])
def test_a_call_that_holds_an_event_loop_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_async: bool
) -> None:
    monkeypatch.setattr(task, "_configured", lambda template, training: lambda training: "trained")
    monkeypatch.setattr(task, "get_run_logger", lambda: logging.getLogger("run"), raising=False)

    async def train() -> Any:
        return elastic_train(_loop)

    assert (asyncio.run(train()) if is_async else elastic_train(_loop)) == "trained"
    assert ("await aelastic_train(...)" in caplog.text) is is_async


@pytest.mark.parametrize(
    ("state", "marked"), [(Cancelling(), [0, 1]), (Failed(), [0]), (AwaitingRetry(), [0]), (Running(), [0])]
)
def test_a_flow_run_that_had_ended_and_is_retried_by_now_is_not_cancelled(state: Any, marked: list[int]) -> None:
    ids, client = [str(UUID(int=number)) for number in (1, 2)], Mock()
    client.read_flow_run = lambda one: SimpleNamespace(state=state if str(one) == ids[-1] else Running())
    flow_run_state.mark_cancelled(client, ids)
    assert [str(call.args[0]) for call in client.set_flow_run_state.mock_calls] == [ids[number] for number in marked]


def test_where_a_job_is_followed_from_is_when_its_own_flow_run_last_told_something() -> None:
    own, other = UUID(int=1), UUID(int=2)
    at, client = {own: 100, other: 900}, Mock()
    client.read_task_runs = lambda flow_run_filter, **_: [SimpleNamespace(id=one) for one in flow_run_filter.id.any_]
    client.read_logs = lambda logs, **_: [
        SimpleNamespace(timestamp=datetime.fromtimestamp(at[logs.task_run_id.any_[0]]))
    ]
    assert flow_run_state.last_log_time(client, "mnist", [str(own)]) == 98


#: Starts a process that prints its process id, and is to exit with this one.
_POOL = """
import multiprocessing, os, sys, time
from types import SimpleNamespace
from prefect_elastic_train.orchestration.flow_run_state import exit_with_flow_process

def work():
    exit_with_flow_process([SimpleNamespace(detached=word == "detached") for word in sys.argv[1:]])
    print(os.getpid(), flush=True)
    time.sleep(60)

if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=work).start()
"""


@pytest.mark.parametrize(
    ("flows", "ends"), [([], True), (["subflow", "detached"], True), (["executed in the process itself"], False)]
)
def test_a_worker_of_a_process_pool_ends_with_its_flow_process_and_a_flow_process_does_not_with_who_has_started_it(
    tmp_path: Path, flows: list[str], ends: bool
) -> None:
    program = tmp_path / "pool.py"
    program.write_text(_POOL)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen([sys.executable, program, *flows], stdout=subprocess.PIPE, env=environment) as flow:
        assert flow.stdout is not None
        worker = psutil.Process(int(flow.stdout.readline()))
        flow.kill()
        try:
            if ends:
                wait_for(lambda: not alive([worker]), 15, "the worker to end")
            time.sleep(1)
            assert bool(alive([worker])) is not ends
        finally:
            with suppress(psutil.NoSuchProcess):
                worker.kill()


class _Api(BaseHTTPRequestHandler):
    """A Prefect API that knows three flow runs, and fails for a while."""

    protocol_version = "HTTP/1.1"  # keeps connections open
    connections: ClassVar[set[object]] = set()
    requests: ClassVar[list[int]] = []

    def do_GET(self) -> None:
        self._answer(404, {})  # no CSRF token is needed

    def do_POST(self) -> None:
        wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["flow_runs"]["id"]["any_"]
        number = len(self.requests)
        status = 429 if 3 <= number < 7 else 200
        self.requests.append(status)
        self.connections.add(self.client_address)
        states = [Running(), Running(), Cancelling() if number > 7 else Running()]
        runs = [FlowRun(id=one, flow_id=uuid4(), state=state) for one, state in zip(wanted, states, strict=True)]
        self._answer(status, [run.model_dump(mode="json") for run in runs])

    def _answer(self, status: int, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def test_all_flow_runs_around_a_training_are_one_request_and_errors_of_the_api_end_no_training() -> None:
    ids = [str(uuid4()) for _ in range(3)]
    with ThreadingHTTPServer(("127.0.0.1", 0), _Api) as api:
        threading.Thread(target=api.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{api.server_port}/api"
        with temporary_settings({PREFECT_API_URL: url, PREFECT_CLIENT_MAX_RETRIES: 0}):
            watch = flow_run_state.FlowRunWatch(ids, 0.2)
            wait_for(lambda: len(_Api.requests) >= 3, 10, "three looks")
            assert len(_Api.connections) == 1
            assert watch.ended == ""
            wait_for(lambda: watch.ended, 20, "the end of a flow run")
        watch.close()
        api.shutdown()
    assert watch.ended == ids[-1]
