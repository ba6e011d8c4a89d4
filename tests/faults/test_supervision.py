"""The flow process's side of every fault, in seconds: a script stands in for the driver, everything else is real.

The README's fault table names the tests in which the same befalls a driver that trains on Ray.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest
from prefect import flow, task
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import Abort
from prefect.states import Cancelling

from prefect_elastic_train import (
    AttemptFailedError,
    FailureBudget,
    LocalStorage,
    Outcome,
    aelastic_train,
    elastic_train,
)
from prefect_elastic_train.core.operator_settings import get_settings
from prefect_elastic_train.supervisor.runtime import Runtime
from tests.support.deployments import SERVED, DeployedRun, Program
from tests.support.processes import FlowProcess, alive, free_port, prefect_server, wait_for
from tests.support.reports import report_of, run_events
from tests.support.scripted_driver import COMPLETED, Script, Step, ended

pytestmark = pytest.mark.usefixtures("api")

Start = Callable[..., FlowProcess]
Deploy = Callable[..., DeployedRun]
#: Trains until somebody stops it.
ENDLESS: list[Step] = [{"train": 100_000}]
#: How long a training that is told to end may take for it.
BOUND_SECONDS = 15


def train(folder: Path, *attempts: list[Step], **more: Any) -> tuple[Any, Script]:
    """What a flow of this process returned or failed with, whose drivers do what a script says."""
    script = Script(folder / "script", *attempts)
    budget = {"driver_restarts": 3, "driver_restart_delay_seconds": 0, **more.pop("failures", {})}

    @flow(name="scripted")
    def training() -> Any:
        return elastic_train(
            "a.module:loop", storage=LocalStorage(path=str(folder / "runs")), failures=FailureBudget(**budget), **more
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runtime, "driver_command", script.command)
        return training(return_state=True).result(raise_on_failure=False), script


def scripted(folder: Path, *attempts: list[Step], **more: Any) -> tuple[Script, dict[str, Any]]:
    """A script, and the arguments of a flow process or a deployment's run whose drivers do what it says."""
    script = Script(folder, *attempts)
    return script, {"script": str(script.path), "scaling": {"min_workers": 1, "max_workers": 1}, **more}


@pytest.mark.parametrize(
    "lost",
    [
        pytest.param(["kill"], id="killed"),
        pytest.param([{"exit": 3}], id="exit code"),
        pytest.param([{"exit": 0}], id="last word lost"),
        pytest.param([ended(Outcome.CLUSTER_LOST)], id="cluster lost"),
        pytest.param(["deaf", "child", "hang"], id="no sign of life"),
    ],
)
def test_lost_driver_is_followed_by_another_that_knows_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: list[Step]
) -> None:
    monkeypatch.setenv("PREFECT_ELASTIC_TRAIN_LIVENESS_TIMEOUT_SECONDS", "2")
    monkeypatch.setenv("PREFECT_ELASTIC_TRAIN_STOP_GRACE_SECONDS", "1")
    get_settings.cache_clear()
    try:
        result, script = train(tmp_path, [{"train": 2}, *lost], [{"train": 3}, COMPLETED])
    finally:
        get_settings.cache_clear()
    assert not isinstance(result, BaseException), result
    assert (result.attempts, result.metrics) == (2, {"step": 3})
    first, second = script.drivers()
    assert (first["run_name"], first["flow_run_id"]) == (second["run_name"], second["flow_run_id"])
    assert not psutil.pid_exists(first["pid"])
    assert (first["previous_end"], bool(second["previous_end"])) == ("", True)


@pytest.mark.parametrize(
    "last", [one for one in Outcome if not one.retryable and one not in (Outcome.COMPLETED, Outcome.SUPERSEDED)]
)
def test_an_end_that_no_driver_can_heal_is_told_at_once(tmp_path: Path, last: Outcome) -> None:
    error, script = train(tmp_path, [ended(last, "the reason")])
    assert len(script.drivers()) == 1
    assert isinstance(error, AttemptFailedError)
    assert error.outcome is last
    assert "the reason" in str(error)


def test_a_driver_that_another_process_has_superseded_ends_the_flow_without_a_word(tmp_path: Path) -> None:
    with pytest.raises(Abort, match="the reason"):
        train(tmp_path, [ended(Outcome.SUPERSEDED, "the reason")])


def test_drivers_that_are_lost_again_and_again_are_given_up_after_growing_pauses(tmp_path: Path) -> None:
    budget = {"driver_restarts": 2, "driver_restart_delay_seconds": 1}
    error, script = train(tmp_path, ["kill"], failures=budget)
    assert isinstance(error, AttemptFailedError)
    assert (error.outcome, error.retryable) == (Outcome.DRIVER_LOST, True)
    assert "signal 9 (SIGKILL)" in str(error)
    began = [driver["at"] for driver in script.drivers()]
    pauses = [later - earlier for earlier, later in pairwise(began)]
    assert len(pauses) == 2
    assert pauses[0] >= 1
    assert pauses[1] >= 2


def test_a_budget_that_the_driver_knows_to_be_used_up_ends_the_training(tmp_path: Path) -> None:
    error, script = train(tmp_path, [ended(Outcome.DRIVER_LOST, "all attempts are used up", final=True)])
    assert "all attempts are used up" in str(error)
    assert len(script.drivers()) == 1


def test_each_training_of_a_flow_run_has_a_name_of_its_own_that_a_retried_task_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(tmp_path, [COMPLETED])
    monkeypatch.setattr(Runtime, "driver_command", script.command)
    given: dict[str, Any] = {"storage": LocalStorage(path=str(tmp_path / "runs"))}
    tries: list[str] = []

    @task(retries=1)
    def wrapper() -> None:
        tries.append(elastic_train("a.module:loop", **given).run_name)
        if len(tries) == 1:
            raise RuntimeError("after its training")

    @flow
    def thrice() -> list[str]:
        first = elastic_train("a.module:loop", **given)
        second = elastic_train.submit("a.module:loop", **given).result()
        wrapper()
        return [first.run_name, second.run_name]

    first, second = thrice()
    assert second == f"{first}-2"
    assert tries == [f"{first}-3"] * 2


async def test_async_twin_trains_without_holding_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio

    monkeypatch.setattr(Runtime, "driver_command", Script(tmp_path, [{"wait": 1}, COMPLETED]).command)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.05)

    @flow
    async def asynchronous() -> Any:
        ticking = asyncio.create_task(tick())
        try:
            return await aelastic_train("a.module:loop", storage=LocalStorage(path=str(tmp_path / "runs")))
        finally:
            ticking.cancel()

    assert (await asynchronous()).status == "completed"
    assert ticks > 15


def test_what_happened_is_in_the_report_and_the_events_of_the_flow_run(
    tmp_path: Path, client: SyncPrefectClient
) -> None:
    result, script = train(tmp_path, [{"train": 2}, "kill"], [{"train": 3}, COMPLETED], run_name="published")
    flow_run_id = script.drivers()[0]["flow_run_id"]
    report = wait_for(lambda: [text for text in [report_of(client, flow_run_id)] if "## Completed" in text], 20)[0]
    assert "driver_lost" in report or "SIGKILL" in report
    assert result.run_name == "published"
    names = [event["event"].rpartition(".")[2] for event in run_events(client, flow_run_id)]
    assert (names[0], names[-1]) == ("started", "completed")


#: Where in a flow a training is called.
PLACES = {
    "called": {},
    "submitted": {"submit": True},
    "in a task": {"within": "a submitted task"},
    "in mapped tasks": {"within": "mapped tasks"},
    "in a subflow": {"within": "a subflow"},
    "async": {"asynchronous": True},
}


@pytest.mark.parametrize(
    ("number", "place", "message"),
    [
        (signal.SIGTERM, "called", "a termination signal"),
        (signal.SIGTERM, "submitted", "a termination signal"),
        (signal.SIGTERM, "in a task", "a termination signal"),
        (signal.SIGINT, "in mapped tasks", "an interrupt signal"),
        (signal.SIGINT, "called", "an interrupt signal"),
        (signal.SIGINT, "async", "an interrupt signal"),
        (signal.SIGKILL, "called", None),
    ],
)
def test_nothing_is_left_when_the_flow_process_gets_a_signal_even_of_a_driver_that_heeds_none(
    start: Start,
    client: SyncPrefectClient,
    tmp_path: Path,
    number: signal.Signals,
    place: str,
    message: str | None,
) -> None:
    script, arguments = scripted(tmp_path, ["child", "deaf", *ENDLESS], **PLACES[place])
    flow_process = start(environment={"PREFECT_ELASTIC_TRAIN_STOP_GRACE_SECONDS": 2}, **arguments)
    flow_process.wait_for(lambda: script.trained() > 2, 60, "steps")
    assert flow_process.driver() is not None
    before = flow_process.marked()
    assert len(before) == 2, "driver and its child"
    os.kill(flow_process.pid, number)
    wait_for(lambda: not flow_process.marked() and not alive(before), BOUND_SECONDS, "all processes to end")
    wait_for(lambda: flow_process.process.poll() is not None, 60, "the flow process to end")
    wait_for(lambda: not flow_process.private_folder.exists(), 5, "the spec to be removed")
    if message is not None:
        assert len(script.did("SIGINT")) == 1, "it was asked before it was killed"
        state = client.read_flow_run(UUID(flow_process.flow_run_id)).state
        assert state is not None
        assert (state.type, state.message) == (StateType.CRASHED, f"Execution was aborted by {message}.")


def test_guard_and_then_flow_process_killed_leave_nothing(start: Start, tmp_path: Path) -> None:
    script, arguments = scripted(tmp_path, ["child", *ENDLESS])
    flow_process = start(**arguments)
    flow_process.wait_for(lambda: script.trained() > 2, 60, "steps")
    assert flow_process.driver() is not None
    first = flow_process.guard()
    assert first is not None
    first.kill()
    flow_process.wait_for(lambda: flow_process.guard() not in (None, first), 10, "another guard")
    before = flow_process.marked()
    flow_process.process.kill()
    wait_for(lambda: not flow_process.marked() and not alive(before), BOUND_SECONDS, "all processes to end")


def test_a_killed_flow_process_is_followed_by_one_that_goes_on_with_its_trainings(start: Start, tmp_path: Path) -> None:
    """The first of two subflows has ended before; its driver finds the result that is there."""
    script, arguments = scripted(tmp_path, [{"train": 1}, COMPLETED], ENDLESS, [COMPLETED], [{"train": 2}, COMPLETED])
    arguments |= {"within": "subflows", "config": {}, "short_ledger": ""}
    first = start("first", **arguments)
    first.wait_for(lambda: len(script.drivers()) == 2 and script.trained() > 2, 60, "the second subflow to train")
    first.process.kill()
    again = start("again", flow_run_id=first.flow_run_id, **{**arguments, "storage": str(first.storage)})
    outcome = again.wait(60)
    assert outcome["state"] == "COMPLETED"
    told = [(driver["run_name"], driver["resumed"]) for driver in script.drivers()]
    short = f"fault-test-subflow-{first.flow_run_id[:8]}"
    assert [name for name, _ in told] == [f"{short}.1", f"{short}.2"] * 2
    assert outcome["result"]["run_name"] == f"{short}.2"
    assert {driver["flow_run_id"] for driver in script.drivers()} == {first.flow_run_id}


def _is_cancelled(client: SyncPrefectClient, flow_run_id: UUID) -> bool:
    state = client.read_flow_run(flow_run_id).state
    return state is not None and state.type == StateType.CANCELLED


@pytest.mark.parametrize("place", ["called", "submitted", "in a task", "in a subflow", "async"])
def test_cancel_of_a_flow_that_no_runner_watches_ends_its_training(
    start: Start, client: SyncPrefectClient, tmp_path: Path, place: str
) -> None:
    script, arguments = scripted(tmp_path, ["child", *ENDLESS], **PLACES[place])
    flow_process = start(**arguments)
    flow_process.wait_for(lambda: script.trained() > 2, 60, "steps")
    assert flow_process.driver() is not None
    flow_run_id = UUID(flow_process.flow_run_id)
    client.set_flow_run_state(flow_run_id, Cancelling())
    wait_for(lambda: not flow_process.marked(), BOUND_SECONDS, "the training to end")
    assert [one["sent_for"] for one in script.did("SIGINT")] == ["cancelled"]
    flow_process.process.wait(60)
    assert _is_cancelled(client, flow_run_id)
    assert len(script.drivers()) == 1, "no driver restart follows"

    def states() -> list[State | None]:
        if place == "in a subflow":
            below = FlowRunFilter(parent_flow_run_id={"any_": [flow_run_id]})  # type: ignore[arg-type]
            return [run.state for run in client.read_flow_runs(flow_run_filter=below)]
        of_this = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
        return [run.state for run in client.read_task_runs(flow_run_filter=of_this)]

    if place in ("called", "in a subflow"):  # tasks of threads are left without a word
        # The server learns of a task's state by an event, a moment later.
        wait_for(lambda: all(state and state.is_final() for state in states()), 20, "nothing to look running")


@pytest.mark.parametrize("flow_name", ["fault test", "async fault test"])
def test_cancel_under_serve(
    deployed: Deploy, served: Program, client: SyncPrefectClient, tmp_path: Path, flow_name: str
) -> None:
    script, arguments = scripted(tmp_path, ["child", *ENDLESS])
    run = deployed(f"{flow_name}/{SERVED}", **arguments)
    wait_for(lambda: script.trained() > 2, 60, "steps")
    processes = run.processes()
    assert len(processes) == 2
    run.propose(Cancelling())
    wait_for(lambda: not alive(processes), BOUND_SECONDS, "the training to end")
    assert run.wait_for_end(45).type == StateType.CANCELLED
    assert len(script.drivers()) == 1


@pytest.mark.full  # the runner's signal is waited for, 40 s
def test_cancel_of_a_flow_whose_runner_has_died(start: Start, client: SyncPrefectClient, tmp_path: Path) -> None:
    script, arguments = scripted(tmp_path, ENDLESS)
    # What a runner tells the processes that it starts; this one has none that would signal it.
    started_by_a_runner = {"PREFECT__ENABLE_CANCELLATION_AND_CRASHED_HOOKS": "false"}
    flow_process = start(environment=started_by_a_runner, **arguments)
    flow_process.wait_for(lambda: script.trained() > 2, 60, "steps")
    driver = flow_process.driver()
    assert driver is not None
    flow_run_id = UUID(flow_process.flow_run_id)
    client.set_flow_run_state(flow_run_id, Cancelling())
    wait_for(lambda: not alive([driver]), BOUND_SECONDS, "the training to end")
    flow_process.process.wait(90)
    assert _is_cancelled(client, flow_run_id)


def test_cancel_of_a_subflow_alone_ends_its_training_and_is_an_error_where_it_was_called(
    start: Start, client: SyncPrefectClient, tmp_path: Path
) -> None:
    script, arguments = scripted(tmp_path, ENDLESS, within="a subflow")
    flow_process = start(**arguments)
    flow_process.wait_for(lambda: script.trained() > 2, 60, "steps")
    below = FlowRunFilter(parent_flow_run_id={"any_": [UUID(flow_process.flow_run_id)]})  # type: ignore[arg-type]
    subflow = client.read_flow_runs(flow_run_filter=below)[0].id
    client.set_flow_run_state(subflow, Cancelling())
    outcome = flow_process.wait(60)
    assert (outcome["state"], outcome["outcome"]) == ("FAILED", "cancelled")
    state = client.read_flow_run(subflow).state
    assert state is not None
    assert state.is_final()


@pytest.mark.parametrize(
    ("arguments", "by"),
    [
        pytest.param({"timeout_seconds": 2}, "timed_out", id="training"),
        pytest.param({"timeout_seconds": 2, "asynchronous": True}, "timed_out", id="training-async"),
        pytest.param({"flow_timeout": 8}, "", id="flow"),
        pytest.param({"flow_timeout": 8, "submit": True}, "", id="flow-submitted", marks=pytest.mark.full),
        pytest.param({"flow_timeout": 8, "asynchronous": True}, "", id="flow-async", marks=pytest.mark.full),
    ],
)
def test_training_that_is_out_of_time_ends_as_timed_out(
    start: Start, tmp_path: Path, arguments: dict[str, Any], by: str
) -> None:
    script, arguments = scripted(tmp_path, ["child", *ENDLESS], **arguments)
    flow_process = start(**arguments)
    flow_process.wait_for(flow_process.driver, 60, "a driver")
    outcome = flow_process.wait(60)
    assert (outcome["state"], outcome["name"]) == ("FAILED", "TimedOut")
    assert script.trained() > 0, "it trained until then"
    assert len(script.drivers()) == 1, "no driver restart follows"
    assert script.did("SIGINT")[0]["sent_for"] in ([by] if by else ["timed_out", "cancelled"])
    assert flow_process.marked() == []


def test_outage_of_the_prefect_api_does_not_disturb_training(tmp_path: Path) -> None:
    port, gate = free_port(), tmp_path / "gate"
    script, arguments = scripted(tmp_path, [{"train": 100}, {"until": str(gate)}, {"train": 20}, COMPLETED])
    with ExitStack() as stack:
        with prefect_server(tmp_path / "server", port) as url:
            flow_process = FlowProcess(tmp_path / "flow", url, **arguments)
            stack.callback(flow_process.close)
            flow_process.wait_for(lambda: script.trained() > 2, 60, "steps")
        flow_process.wait_for(lambda: script.trained() == 100, 30, "training to go on")
        time.sleep(5)
        with prefect_server(tmp_path / "server", port):
            gate.touch()
            assert flow_process.wait(60)["state"] == "COMPLETED"
    assert len(script.drivers()) == 1
    assert script.trained() == 120
