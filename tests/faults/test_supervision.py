"""The flow process's side of every fault, in seconds: a script stands in for the driver, everything else is real.

`docs/faults.md` names the tests in which the same befalls a driver that trains on Ray.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import Abort
from prefect.states import Cancelling

from prefect_elastic_train import FailureBudget, Outcome, aelastic_train, elastic_train
from prefect_elastic_train.core.operator_settings import get_settings
from prefect_elastic_train.supervisor.training_processes import TrainingProcesses
from tests.support.deployments import DATABASE_SECONDS, SERVED, Deploy, Program, flow_run_log
from tests.support.processes import Start, alive, free_port, prefect_server, wait_for
from tests.support.reports import report_of, run_events
from tests.support.scripted_driver import COMPLETED, Script, Step, ended

pytestmark = pytest.mark.usefixtures("api")

#: Trains until somebody stops it.
ENDLESS: list[Step] = [{"train": 100_000}]
#: How long a training that is told to end may take for it.
BOUND_SECONDS = 15


def train(folder: Path, *attempts: list[Step]) -> tuple[Any, Script]:
    """What a flow of this process returned or failed with, whose drivers do what a script says."""
    script, budget = Script(folder / "script", *attempts), FailureBudget(driver_restart_delay_seconds=0)

    @flow(name="scripted")
    def training() -> Any:
        return elastic_train("a.module:loop", storage=folder / "runs", failures=budget)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingProcesses, "driver_command", script.command)
        return training(return_state=True).result(raise_on_failure=False), script


@pytest.mark.parametrize(
    "lost",
    [
        pytest.param(["kill"], id="killed"),
        pytest.param([{"exit": 0}], id="final event lost"),
        pytest.param([ended(Outcome.CLUSTER_LOST)], id="cluster lost"),
        pytest.param(["deaf", "child", "hang"], id="no heartbeat"),
    ],
)
def test_lost_driver_is_followed_by_another_that_knows_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: list[Step], client: SyncPrefectClient
) -> None:
    monkeypatch.setenv("PREFECT_ELASTIC_TRAIN_LIVENESS_TIMEOUT_SECONDS", "8")
    monkeypatch.setenv("PREFECT_ELASTIC_TRAIN_STOP_GRACE_SECONDS", "1")
    get_settings.cache_clear()
    try:
        result, script = train(tmp_path, [{"train": 2}, *lost], [{"train": 3}, COMPLETED])
    finally:
        get_settings.cache_clear()
    assert (result.attempts, result.metrics) == (2, {"step": 3})
    first, second = script.drivers()
    assert (first["run_name"], first["flow_run_id"]) == (second["run_name"], second["flow_run_id"])
    assert not psutil.pid_exists(first["pid"])
    assert (first["previous_end"], bool(second["previous_end"])) == ("", True)
    if lost == ["kill"]:
        flow_run_id = first["flow_run_id"]
        report = wait_for(lambda: [text for text in [report_of(client, flow_run_id)] if "## Completed" in text], 20)[0]
        assert "signal 9" in report
        names = [event["event"].rpartition(".")[2] for event in run_events(client, flow_run_id)]
        names = [name for name in names if name != "waiting-for-capacity"]  # trainings of other tests use the CPUs
        assert (names[0], names[-1]) == ("started", "completed")


def test_a_driver_that_another_process_has_superseded_ends_the_flow_without_a_word(tmp_path: Path) -> None:
    with pytest.raises(Abort, match="the reason"):
        train(tmp_path, [ended(Outcome.SUPERSEDED, "the reason")])


async def test_async_twin_returns_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingProcesses, "driver_command", Script(tmp_path, [{"train": 1}, COMPLETED]).command)

    @flow
    async def asynchronous() -> Any:
        return await aelastic_train("a.module:loop", storage=tmp_path / "runs")

    assert (await asynchronous()).status == "completed"


#: Where in a flow a training is called.
PLACES: dict[str, dict[str, Any]] = {
    "called": {},
    "submitted": {"submit": True},
    "in a task": {"within": "a submitted task"},
    "in a subflow": {"within": "a subflow"},
    "async": {"asynchronous": True},
}


def _cancel(client: SyncPrefectClient, flow_run_id: str) -> None:
    client.set_flow_run_state(UUID(flow_run_id), Cancelling())


def _state(client: SyncPrefectClient, flow_run_id: str) -> State:
    return client.read_flow_run(UUID(flow_run_id)).state


def _below(client: SyncPrefectClient, flow_run_id: UUID | str) -> list[Any]:
    """The subflows of a flow run, or its tasks."""
    these = {"any_": [flow_run_id]}
    subflows = client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate({"parent_flow_run_id": these}))
    return subflows or client.read_task_runs(flow_run_filter=FlowRunFilter.model_validate({"id": these}))


def _second_case(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.full)


class _Trained:
    """A flow process whose scripted driver, with a child that heeds no signal, trains until it is ended."""

    def __init__(self, start: Start, folder: Path, *steps: Step, **arguments: Any) -> None:
        self.script = Script(folder, ["child", *steps, *ENDLESS])
        self.flow = start(script=str(self.script.path), **arguments)
        self.flow.wait_for(lambda: self.script.trained() > 2, 60, "steps")
        self.driver = self.flow.living_driver()
        self.before = self.flow.marked()
        assert len(self.before) == 2, "driver and its child"

    def wait_for_end(self) -> None:
        wait_for(lambda: not self.flow.marked() and not alive(self.before), BOUND_SECONDS, "all processes to end")


@pytest.mark.parametrize(
    ("number", "place", "message"),
    [
        (signal.SIGTERM, "called", "a termination signal"),
        (signal.SIGINT, "async", "an interrupt signal"),
        (signal.SIGKILL, "called", None),
        _second_case(signal.SIGTERM, "in a task", "a termination signal"),
    ],
)
def test_nothing_is_left_when_the_flow_process_gets_a_signal_even_of_a_driver_that_heeds_none(
    start: Start, client: SyncPrefectClient, tmp_path: Path, number: signal.Signals, place: str, message: str | None
) -> None:
    grace = {"PREFECT_ELASTIC_TRAIN_STOP_GRACE_SECONDS": 2}
    trained = _Trained(start, tmp_path, "deaf", environment=grace, **PLACES[place])
    if number == signal.SIGKILL:
        first = trained.flow.guard()
        first.kill()
        wait_for(lambda: trained.flow.guard() not in (None, first), 10, "another guard")
    os.kill(trained.flow.pid, number)
    trained.wait_for_end()
    wait_for(lambda: trained.flow.process.poll() is not None, 60, "the flow process to end")
    wait_for(lambda: not trained.flow.private_folder.exists(), 5, "the spec to be removed")
    if message is not None:
        assert len(trained.script.did("SIGINT")) == 1, "it was asked before it was killed"
        state = _state(client, trained.flow.flow_run_id)
        assert (state.type, state.message) == (StateType.CRASHED, f"Execution was aborted by {message}.")


def test_a_killed_flow_process_is_followed_by_one_that_goes_on_with_its_trainings(start: Start, tmp_path: Path) -> None:
    """The first of two subflows has ended before; its driver finds the result that is there."""
    script = Script(tmp_path, [{"train": 1}, COMPLETED], ENDLESS, [COMPLETED], [{"train": 2}, COMPLETED])
    arguments = {"script": str(script.path), "within": "subflows"}
    first = start("first", **arguments)
    first.wait_for(lambda: len(script.drivers()) == 2 and script.trained() > 2, 60, "the second subflow to train")
    first.process.kill()
    again = start("again", flow_run_id=first.flow_run_id, storage=str(first.storage), **arguments)
    result = again.completed(60)
    short = f"fault-test-subflow-{first.flow_run_id[:8]}"
    assert [driver["run_name"] for driver in script.drivers()] == [f"{short}.1", f"{short}.2"] * 2
    assert result["run_name"] == f"{short}.2"
    assert {driver["flow_run_id"] for driver in script.drivers()} == {first.flow_run_id}


@pytest.mark.parametrize("place", ["called", *map(_second_case, ("in a subflow", "async", "submitted", "in a task"))])
def test_cancel_of_a_flow_that_no_runner_watches_ends_its_training(
    start: Start, client: SyncPrefectClient, tmp_path: Path, place: str
) -> None:
    trained = _Trained(start, tmp_path, **PLACES[place])
    _cancel(client, trained.flow.flow_run_id)
    trained.wait_for_end()
    assert [one["sent_for"] for one in trained.script.did("SIGINT")] == ["cancelled"]
    trained.flow.process.wait(60)
    assert _state(client, trained.flow.flow_run_id).is_cancelled()
    assert len(trained.script.drivers()) == 1, "no driver restart follows"

    if place in ("called", "in a subflow"):  # tasks of threads are left without a word
        # The server learns of a task's state by an event, a moment later.
        below = lambda: _below(client, trained.flow.flow_run_id)  # noqa: E731
        wait_for(lambda: all(run.state.is_cancelled() for run in below()), 20, "all to be Cancelled")
        assert "During handling" not in trained.flow.log


def test_cancel_in_the_pause_before_a_new_driver_ends_the_training(
    start: Start, client: SyncPrefectClient, tmp_path: Path
) -> None:
    budget = {"driver_restarts": 1, "driver_restart_delay_seconds": 300}
    script = Script(tmp_path, ["kill"])  # before a checkpoint: after one there is no pause
    flow = start(script=str(script.path), failures=budget, submit=True)
    flow.wait_for(lambda: "The next driver starts in" in flow.log, 60, "the pause")
    _cancel(client, flow.flow_run_id)
    flow.process.wait(60)
    assert _state(client, flow.flow_run_id).is_cancelled()
    assert len(script.drivers()) == 1, "and no other follows"


@pytest.mark.parametrize("flow_name", ["fault test", _second_case("async fault test")])
def test_cancel_under_serve(
    deployed: Deploy, served: Program, client: SyncPrefectClient, tmp_path: Path, flow_name: str
) -> None:
    script = Script(tmp_path, ["child", *ENDLESS])
    run = deployed(f"{flow_name}/{SERVED}", script=str(script.path))
    wait_for(lambda: script.trained() > 2, 60 + DATABASE_SECONDS, "steps")
    processes = run.processes()
    assert len(processes) == 2
    run.propose(Cancelling())
    wait_for(lambda: not alive(processes), BOUND_SECONDS, "the training to end")
    assert run.wait_for_end(45).type == StateType.CANCELLED
    assert len(script.drivers()) == 1
    if flow_name == "fault test":  # that of a coroutine is Crashed by the signal, in Prefect's hands
        wait_for(lambda: _below(client, run.id)[0].state.is_cancelled(), 20, "its task to be Cancelled, too")
        assert "Traceback" not in "".join(flow_run_log(client, run.id))


@pytest.mark.full  # the runner's signal is waited for, 40 s
def test_cancel_of_a_flow_whose_runner_has_died(start: Start, client: SyncPrefectClient, tmp_path: Path) -> None:
    # What a runner tells the processes that it starts; this one has none that would signal it.
    started_by_a_runner = {"PREFECT__ENABLE_CANCELLATION_AND_CRASHED_HOOKS": "false"}
    trained = _Trained(start, tmp_path, environment=started_by_a_runner)
    _cancel(client, trained.flow.flow_run_id)
    wait_for(lambda: not alive([trained.driver]), BOUND_SECONDS, "the training to end")
    trained.flow.process.wait(90)
    assert _state(client, trained.flow.flow_run_id).is_cancelled()


@pytest.mark.full
def test_cancel_of_a_subflow_alone_ends_its_training_and_is_an_error_where_it_was_called(
    start: Start, client: SyncPrefectClient, tmp_path: Path
) -> None:
    trained = _Trained(start, tmp_path, within="a subflow")
    [subflow] = _below(client, trained.flow.flow_run_id)
    _cancel(client, str(subflow.id))
    outcome = trained.flow.wait(60)
    assert (outcome["state"], outcome["outcome"]) == ("FAILED", "cancelled")
    assert _state(client, str(subflow.id)).name == "Failed"


@pytest.mark.parametrize(
    ("arguments", "by"),
    [
        ({"timeout_seconds": 3}, "timed_out"),
        _second_case({"flow_timeout": 8}, ""),
        _second_case({"flow_timeout": 8, "submit": True}, ""),
    ],
    ids=str,
)
def test_training_that_is_out_of_time_ends_as_timed_out(
    start: Start, tmp_path: Path, arguments: dict[str, Any], by: str
) -> None:
    script = Script(tmp_path, ["child", *ENDLESS])
    flow_process = start(script=str(script.path), **arguments)
    flow_process.living_driver()
    outcome = flow_process.wait(60)
    assert (outcome["state"], outcome["name"]) == ("FAILED", "TimedOut")
    assert script.trained() > 0, "it trained until then"
    assert len(script.drivers()) == 1, "no driver restart follows"
    assert script.did("SIGINT")[0]["sent_for"] in ([by] if by else ["timed_out", "cancelled"])
    assert flow_process.marked() == []


@pytest.mark.full
def test_outage_of_the_prefect_api_does_not_disturb_training(start: Start, tmp_path: Path) -> None:
    port, gate = free_port(), tmp_path / "gate"
    script = Script(tmp_path, [{"train": 60}, {"until": str(gate)}, {"train": 10}, COMPLETED])
    with prefect_server(tmp_path / "server", port) as url:
        flow_process = start(script=str(script.path), environment={"PREFECT_API_URL": url})
        flow_process.wait_for(lambda: script.trained() > 2, 60, "steps")
    flow_process.wait_for(lambda: script.trained() == 60, 30, "training to go on")
    time.sleep(3)
    with prefect_server(tmp_path / "server", port):
        gate.touch()
        flow_process.completed(60)
    assert (len(script.drivers()), script.trained()) == (1, 70)
