"""Fixtures of the fault tier: flow processes to kill, and an undisturbed run to compare with."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient

from tests.support.deployments import DeployedRun, Program, api_client, serve_flows
from tests.support.loops import hash_after
from tests.support.processes import FlowProcess, RayHead

#: How often each random test is done, each time with another seed.
ROUNDS = int(os.environ.get("SOAK_ROUNDS", "1"))

STEPS = 40
CHECKPOINT_EVERY = 5


def train_config(ledger: str, **more: Any) -> dict[str, Any]:
    """The training that the fault tests disturb."""
    return {"steps": STEPS, "checkpoint_every": CHECKPOINT_EVERY, "sleep": 0.05, "ledger": ledger, **more}


def hash_training(ledger: str, **more: Any) -> dict[str, Any]:
    """The same steps without a framework, in one worker: quicker, and as sensitive to a lost or repeated step."""
    return {
        "loop": "tests.support.loops:hashing_loop",
        "framework": "none",
        "config": train_config(ledger),
        "scaling": {"min_workers": 1, "max_workers": 1},
        **more,
    }


def is_right(checkpoint_uri: str, steps: int = STEPS) -> bool:
    """Tell whether a checkpoint of the hashing loop is that of an undisturbed run of so many steps."""
    step, state = json.loads((Path(checkpoint_uri) / "state.json").read_text())
    return bool(step == steps and state == hash_after(steps))


@pytest.fixture
def start(api_url: str, tmp_path: Path) -> Iterator[Callable[..., FlowProcess]]:
    """Starts flow processes, and ends what is left of them."""
    started: list[FlowProcess] = []

    def start_flow(name: str = "flow", **arguments: Any) -> FlowProcess:
        process = FlowProcess(tmp_path / name, api_url, **arguments)
        started.append(process)
        return process

    yield start_flow
    for process in started:
        process.close()


@pytest.fixture(scope="package")
def head() -> Iterator[RayHead]:
    """A cluster to join, with room for two workers."""
    cluster = RayHead(cpus=2)
    yield cluster
    cluster.close()


@pytest.fixture
def own_head() -> Iterator[RayHead]:
    """A cluster to join and to kill."""
    cluster = RayHead(cpus=2)
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def undisturbed(api_url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Final weights of the same training with nothing in its way."""
    folder = tmp_path_factory.mktemp("undisturbed")
    flow = FlowProcess(folder, api_url, config=train_config(str(folder / "ledger.jsonl"), sleep=0))
    try:
        outcome = flow.wait(180)
    finally:
        flow.close()
    assert outcome["state"] == "COMPLETED", flow.log[-4000:]
    return final_weights(outcome["result"]["checkpoint_uri"])


def final_weights(checkpoint_uri: str) -> dict[str, Any]:
    """Read the weights and the step of a checkpoint."""
    import torch

    state: dict[str, Any] = torch.load(Path(checkpoint_uri) / "state.pt")
    return state


def same_weights(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Tell whether two checkpoints are equal in every bit: step, weights and optimizer."""
    import torch

    if one["step"] != other["step"]:
        return False
    if any(not torch.equal(one["model"][name], other["model"][name]) for name in other["model"]):
        return False
    ours, theirs = one["optimizer"]["state"], other["optimizer"]["state"]
    return all(torch.equal(ours[key][name], theirs[key][name]) for key in theirs for name in theirs[key])


@pytest.fixture(scope="package")
def served(api_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """The flows of the tests, served as their user would."""
    program = serve_flows(tmp_path_factory.mktemp("served"), api_url)
    yield program
    program.close()


@pytest.fixture
def client(api: str) -> Iterator[SyncPrefectClient]:
    """A client of the session's server."""
    with api_client() as client:
        yield client


@pytest.fixture
def deployed(client: SyncPrefectClient, tmp_path: Path) -> Iterator[Callable[..., DeployedRun]]:
    """Starts runs of deployments, and ends what is left of them."""
    started: list[DeployedRun] = []

    def start_run(deployment: str, **arguments: Any) -> DeployedRun:
        run = DeployedRun(client, deployment, tmp_path / "deployed", **arguments)
        started.append(run)
        return run

    yield start_run
    for run in started:
        run.close()
