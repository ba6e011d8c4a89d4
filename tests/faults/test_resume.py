"""The flow process, its host or its server suffers; the same flow run goes on from the last whole commit."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import Result
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events import emit_event
from prefect.states import Failed
from typer.testing import CliRunner

from prefect_elastic_train.cli import app
from prefect_elastic_train.orchestration.prefect_events import DRIVER_RESTARTED, WORKER_FAILED
from tests.support.clusters import RayHead
from tests.support.deployments import (
    DATABASE_SECONDS,
    SERVED,
    Deploy,
    Program,
    delete_automations,
    deployment_id,
    serve_flows,
)
from tests.support.loops import CHECKPOINT_EVERY, STEPS, is_right, train_config
from tests.support.processes import (
    Start,
    alive,
    assert_each_rank_knew_its_run,
    assert_every_step_counts_once,
    attempts,
    commits,
    read_ledger,
    titled,
    wait_for,
)

DEPLOYMENT = f"fault test/{SERVED}"
Resuming = Callable[..., None]


@contextmanager
def inbox() -> Iterator[tuple[str, list[str]]]:
    """A URL, and the texts that are posted to it."""
    messages: list[str] = []

    class Inbox(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
            self.send_response(204)
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Inbox)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", messages
    server.shutdown()
    server.server_close()


def _command(*arguments: str) -> Result:
    """What `elastic-train` says in this process, whose API is the session's server."""
    return CliRunner().invoke(app, arguments)


@pytest.fixture
def resuming(served: Program, client: SyncPrefectClient) -> Iterator[Resuming]:
    """Creates the automations for the served deployment, and deletes them."""

    def create(max_resumes: int, heartbeat_timeout: int = 600, deployment: str = DEPLOYMENT) -> None:
        deployment_id(client, deployment)
        bounds = (f"--max-resumes={max_resumes}", f"--heartbeat-timeout={heartbeat_timeout}")
        done = _command("automations", "create", deployment, *bounds)
        assert done.exit_code == 0, done.stderr
        time.sleep(2)  # a server takes up to a second to load them

    yield create
    delete_automations(client, DEPLOYMENT)


@pytest.mark.full
def test_controller_that_gives_no_sign_of_life_is_replaced_and_one_that_computes_is_not(
    start: Start, ledger: str, head: RayHead
) -> None:
    bound = 15  # seconds, in which a driver and a controller also start beside other tests
    environment = {"PREFECT_ELASTIC_TRAIN_LIVENESS_TIMEOUT_SECONDS": bound}
    config = train_config(ledger, steps=10, sleep_once=bound + 6)
    flow = start(config=config, cluster=head.block, environment=environment)
    wait_for(lambda: len(read_ledger(ledger)) >= 7, 120, "the long step to be over")
    assert len(attempts(flow.run)) == 1, "a long step is no death"
    controller = titled(head.processes(), "TrainController")[0]
    controller.suspend()
    result = flow.completed(120)
    assert result["attempts"] == 2
    assert "sent no heartbeat" in flow.log
    assert is_right(result["checkpoint_uri"], steps=10)
    assert not alive([controller]), "the stopped controller is not left behind"


def test_flow_process_of_a_deployment_is_resumed_by_the_automation_when_killed_and_after_ctrl_c_by_the_command_only(
    deployed: Deploy, resuming: Resuming, ledger: str, head: RayHead
) -> None:
    resuming(3)
    run = deployed(DEPLOYMENT, config=train_config(ledger, steps=200), cluster=head.block)
    wait_for(lambda: len(commits(run.folder)) >= 2, 120, "two commits")
    processes = run.processes()
    os.kill(run.flow_processes[0], signal.SIGKILL)
    wait_for(lambda: not alive(processes), 15, "all processes of the first one to end")
    wait_for(lambda: len(run.flow_processes) == 2, 60 + DATABASE_SECONDS, "the same flow run to begin again")
    wait_for(lambda: commits(run.folder)[-1]["attempt"] == 2, 120, "a commit of the second attempt")
    os.kill(run.flow_processes[1], signal.SIGINT)
    assert run.wait_for_end(45).type == StateType.CRASHED
    time.sleep(8)
    assert (run.state.type, len(run.flow_processes)) == (StateType.CRASHED, 2)
    done = _command("resume", str(run.id))
    assert done.exit_code == 0, done.stderr
    wait_for(lambda: len(run.flow_processes) == 3, 60 + DATABASE_SECONDS, "a third process")
    assert run.wait_for_end(120).type == StateType.COMPLETED
    assert len(attempts(run.folder)) == 3
    assert_every_step_counts_once(ledger, 200, CHECKPOINT_EVERY)
    assert_each_rank_knew_its_run(ledger, run.folder, str(run.id), DEPLOYMENT)


@pytest.mark.full
def test_flow_that_dies_at_once_each_time_is_resumed_as_often_as_the_automation_says(
    deployed: Deploy, resuming: Resuming
) -> None:
    resuming(2)
    run = deployed(DEPLOYMENT, die_at_once=True)
    wait_for(lambda: len(run.flow_processes) == 3, 90 + 2 * DATABASE_SECONDS, "two resumes")
    assert run.wait_for_end(30).type == StateType.CRASHED
    time.sleep(8)
    assert (run.state.type, len(run.flow_processes)) == (StateType.CRASHED, 3)


@pytest.mark.full
def test_flow_run_that_nobody_executes_is_resumed_by_the_command_and_one_that_lives_is_not(
    deployed: Deploy, served: Program, ledger: str, head: RayHead
) -> None:
    def resume(*arguments: str) -> tuple[int, str]:
        done = _command("resume", str(run.id), *arguments)
        return done.exit_code, done.stdout + done.stderr

    run = deployed(DEPLOYMENT, lost=True, config=train_config(ledger, sleep=0.3), cluster=head.block)
    assert run.state.type == StateType.RUNNING
    code, said = resume()
    assert code == 0, said
    assert run.state.type in (StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING), "a runner may have it already"
    assert "is Lost (Crashed) now" in said
    wait_for(lambda: commits(run.folder), 120, "a commit")
    code, said = resume()
    assert (code, run.state.type) == (1, StateType.RUNNING), said
    assert "may be alive: process " in said
    assert run.wait_for_end(120).type == StateType.COMPLETED
    assert len(run.flow_processes) == 1
    code, said = resume("--force")
    assert (code, "there is nothing left to resume" in said) == (1, True)


def test_automations_are_created_once_and_updated(served: Program, client: SyncPrefectClient) -> None:
    deployment_id(client, DEPLOYMENT)

    def done(*arguments: str) -> list[str]:
        said = _command("automations", *arguments)
        return [line.split()[0] for line in said.stdout.splitlines()] if said.exit_code == 0 else [said.stderr]

    assert done("create", DEPLOYMENT) == ["created", "created"]
    assert done("create", DEPLOYMENT) == ["unchanged", "unchanged"]
    assert done("create", DEPLOYMENT, "--max-resumes=4") == ["updated", "unchanged"]
    assert sum(one.name.startswith("elastic-train") for one in client.read_automations()) == 2
    assert len(delete_automations(client, DEPLOYMENT)) == 2
    assert "there is no deployment 'no/such'" in done("create", "no/such")[0]


def test_an_alert_tells_of_each_failure_with_its_run_why_what_follows_and_a_link(
    deployed: Deploy, served: Program, client: SyncPrefectClient
) -> None:
    run = deployed(DEPLOYMENT, lost=True)
    name = client.read_flow_run(run.id).name
    resource = {"prefect.resource.id": "elastic-train.run.digits", "prefect.resource.name": "digits"}
    ids = {"flow-run": run.id, "deployment": deployment_id(client, DEPLOYMENT)}
    around = [
        {"prefect.resource.id": f"prefect.{role}.{its_id}", "prefect.resource.role": role}
        for role, its_id in ids.items()
    ]
    failed = {"reasons": ["rank 1: killed", "rank 2: NaN"], "retried": True, "reports_lost": 7}
    lost = {"reason": "driver_lost: signal 9", "checkpoint": "checkpoint_3", "counted": 2}
    wanted = [
        (f"Workers failed: {name} |", "rank 1: killed; rank 2: NaN. The worker group is restarted; reports that"),
        (f"A driver was lost: {name} |", "driver_lost: signal 9. A new driver resumes from checkpoint_3."),
        (f"Failed: {name} |", "the loss is not a number. It stays Failed; a Retry resumes"),
    ]
    with inbox() as (url, messages):
        webhook = CustomWebhookNotificationBlock(name="team", url=url, json_data={"text": "{{subject}} | {{body}}"})
        webhook.save("team", overwrite=True)
        refused = _command("automations", "create", DEPLOYMENT, "--alert=slack-webhook/no")
        assert "no block 'slack-webhook/no'" in refused.stderr
        alert = f"--alert={webhook.get_block_type_slug()}/team"
        created = _command("automations", "create", DEPLOYMENT, alert)
        assert created.exit_code == 0, created.stderr
        try:
            time.sleep(2)  # a server takes up to a second to load them
            for event, payload in {WORKER_FAILED: failed, DRIVER_RESTARTED: lost}.items():
                emit_event(event, resource=resource, related=around, payload={"run_name": "digits", **payload})
            client.set_flow_run_state(run.id, Failed(message="the loss is not a number"), force=True)
            wait_for(lambda: len(messages) >= 3, 60, "three messages")
            time.sleep(3)
        finally:
            delete_automations(client, DEPLOYMENT)
    for title, reason in wanted:
        [message] = [one for one in messages if title in one]
        assert reason in message
        assert f"/runs/flow-run/{run.id}" in message
    assert len(messages) == 3


@pytest.mark.full
def test_runner_and_flow_process_killed_together_are_resumed(
    deployed: Deploy,
    api_url: str,
    client: SyncPrefectClient,
    ledger: str,
    head: RayHead,
    tmp_path: Path,
    resuming: Resuming,
) -> None:
    programs = []

    def serve() -> None:
        folder = tmp_path / f"runner-{len(programs)}"
        programs.append(serve_flows(folder, api_url, "killed", PREFECT_FLOWS_HEARTBEAT_FREQUENCY="30"))

    serve()
    try:
        resuming(3, 60, "fault test/killed")
        run = deployed("fault test/killed", config=train_config(ledger, sleep=1.5), cluster=head.block)
        wait_for(lambda: len(read_ledger(ledger)) >= 22, 120, "33 s of training, with two heartbeats")
        processes = run.processes()
        for victim in (programs[0].process.pid, run.flow_processes[0]):
            os.kill(victim, signal.SIGKILL)
        wait_for(lambda: not alive(processes), 15, "all processes of the run to end")
        serve()
        wait_for(lambda: len(run.flow_processes) == 2, 240, "the same flow run to begin again")
        assert run.wait_for_end(240).type == StateType.COMPLETED
        assert_every_step_counts_once(ledger, STEPS, CHECKPOINT_EVERY)
    finally:
        delete_automations(client, "fault test/killed")
        for program in programs:
            program.close()
