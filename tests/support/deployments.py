"""Runs of deployments: under ``serve``, under a process worker, cancelled and resumed through the API."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId, LogFilter
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Pending, Running

from prefect_elastic_train.supervisor.guard import kill_marked, marked_processes
from tests.support.flow_script import train
from tests.support.processes import ROOT, drivers_of, end_tree, run_folder, spawn, wait_for

WORK_POOL = "fault-tests"
SERVED, WORKED = "served", "worked"


class Program:
    """A program of Prefect in the background, with all that it starts."""

    def __init__(self, command: list[str], folder: Path, api_url: str, *, cwd: Path = ROOT, **environment: str) -> None:
        self.log_file = folder / "program.log"
        often = {"PREFECT_RUNNER_POLL_FREQUENCY": "1", "PREFECT_WORKER_QUERY_SECONDS": "1"}
        variables = {**os.environ, "PREFECT_API_URL": api_url, "PYTHONPATH": str(ROOT), **often, **environment}
        self.process = spawn(sys.executable, "-m", *command, log=self.log_file, folder=cwd, env=variables)

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def close(self) -> None:
        """End the program with all that it has started, gently first."""
        end_tree(self.process)


def flow_run_log(client: SyncPrefectClient, flow_run_id: UUID | str) -> list[str]:
    """The messages of a flow run's log on the server, the oldest first."""
    this_run = LogFilter.model_validate({"flow_run_id": {"any_": [flow_run_id]}})
    messages: list[str] = []
    while page := client.read_logs(this_run, limit=200, offset=len(messages)):
        messages += [log.message for log in page]
    return messages


@contextlib.contextmanager
def project_served(folder: Path, api_url: str, blocks: str, **environment: str) -> Iterator[Program]:
    """Run `python -m flows.serve`, as its user does, with blocks of a name; its deployments are new, and go with it."""
    program = Program(["flows.serve", "--blocks", blocks], folder, api_url, cwd=folder, **environment)
    try:
        # Until then it writes to the server, which answers some others "busy" (503).
        wait_for(lambda: "deployments are being served" in program.log, 60, "the deployments")
        yield program
    finally:
        program.close()
        with temporary_settings({PREFECT_API_URL: api_url}), get_client(sync_client=True) as client:
            for deployment in client.read_deployments():
                if blocks in deployment.tags:
                    client.delete_deployment(deployment.id)


def serve_flows(folder: Path, api_url: str, name: str = SERVED, **environment: str) -> Program:
    """Serve the flows of the tests as their user would, as deployments of a name."""
    return Program(["tests.support.flow_script", "--serve", name], folder, api_url, **environment)


@contextlib.contextmanager
def process_worker(folder: Path, api_url: str, client: SyncPrefectClient) -> Iterator[Program]:
    """Deploy the flow of the tests to a process work pool, and run a worker for it."""
    with contextlib.suppress(ObjectAlreadyExists):
        client.create_work_pool(WorkPoolCreate(name=WORK_POOL, type="process"))
    deployed = train.from_source(source=str(ROOT), entrypoint="tests/support/flow_script.py:train")
    deployed.deploy(WORKED, work_pool_name=WORK_POOL, build=False, push=False, print_next_steps=False)  # type: ignore[union-attr]
    worker = Program(["prefect", "worker", "start", "--pool", WORK_POOL, "--type", "process"], folder, api_url)
    try:
        yield worker
    finally:
        worker.close()


def deployment_id(client: SyncPrefectClient, name: str) -> UUID:
    """The id of a deployment, ``<flow>/<deployment>``, once it is there."""

    def found() -> UUID | None:
        with contextlib.suppress(ObjectNotFound):
            return client.read_deployment_by_name(name).id
        return None

    return wait_for(found, 60, f"deployment {name}")  # type: ignore[return-value]


#: So long Prefect's server holds a request when two of its writes meet in SQLite, whatever else the time is for.
DATABASE_SECONDS = 60


def end_of(client: SyncPrefectClient, flow_run_id: UUID, timeout: float) -> State:
    """Wait for the final state of a flow run."""

    def ended() -> State | None:
        state = client.read_flow_run(flow_run_id).state
        return state if state is not None and state.is_final() else None

    why = f"the end of flow run {flow_run_id}"
    return wait_for(ended, timeout + DATABASE_SECONDS, why)  # type: ignore[return-value]


def runs_of(client: SyncPrefectClient, deployment: UUID) -> list[FlowRun]:
    """The flow runs of a deployment."""
    its_runs = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployment]))
    return client.read_flow_runs(flow_run_filter=its_runs)


class DeployedRun:
    """A flow run of a deployment; a `lost` one looks running, though nobody executes it."""

    def __init__(self, client: SyncPrefectClient, deployment: str, folder: Path, **arguments: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.client = client
        self.storage = folder / "runs"
        self.flow_run_file = folder / "flow-run.jsonl"
        self._marks: set[str] = set()
        lost = arguments.pop("lost", False)
        arguments = {"storage": str(self.storage), "flow_run_file": str(self.flow_run_file), **arguments}
        run = client.create_flow_run_from_deployment(
            deployment_id(client, deployment),
            parameters={"arguments": arguments},
            state=Pending() if lost else None,
        )
        self.id = run.id
        if lost:
            self.propose(Running())

    @property
    def state(self) -> State:
        return self.client.read_flow_run(self.id).state

    @property
    def folder(self) -> Path | None:
        return run_folder(self.storage)

    @property
    def flow_processes(self) -> list[int]:
        """The ids of the processes that ran the flow, one after the other."""
        lines = self.flow_run_file.read_text().splitlines() if self.flow_run_file.exists() else []
        return [json.loads(line)["pid"] for line in lines]

    def wait_for_end(self, timeout: float) -> State:
        """Wait for a final state."""
        return end_of(self.client, self.id, timeout)

    def propose(self, state: State) -> None:
        """Propose a state, as the UI does when somebody presses a button."""
        self.client.set_flow_run_state(self.id, state)

    def processes(self) -> list[psutil.Process]:
        """All processes of the run's trainings, as far as they have been seen by now."""
        self._marks |= {mark for _, mark in drivers_of(*self.flow_processes)}
        return [process for mark in self._marks for process in marked_processes(mark)]

    def close(self) -> None:
        """End whatever is left of it."""
        for pid in self.flow_processes:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if any("prefect" in part or "tests" in part for part in process.cmdline()):
                    self.processes()
                    process.kill()
        for mark in self._marks:
            kill_marked(mark)


#: Starts a run of a deployment: the fixture ``deployed``.
Deploy = Callable[..., DeployedRun]


def delete_automations(client: SyncPrefectClient, scope: str) -> list[str]:
    """Delete the automations that `elastic-train automations create` has made for a deployment or tag."""
    ours = [
        one for one in client.read_automations() if one.name.startswith("elastic-train: ") and one.name.endswith(scope)
    ]
    for one in ours:
        client.delete_automation(one.id)
    return [one.name for one in ours]
