"""Fixtures of all tiers: each session, of pytest-xdist too, has a server, clusters and ports of its own."""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.clusters import RayHead
from tests.support.processes import RUN_VARIABLE, SESSION_VARIABLE, FlowProcess, carrying, kill_all, prefect_server

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

    from prefect_elastic_train import RayCluster

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
# Ray's 15 leaves a worker a thirtieth of a core that another test is busy on: its boot would take minutes.
os.environ.setdefault("RAY_worker_niceness", "0")

# Neither a profile of whoever runs this plays a part nor is what a killed loop left kept. Before Prefect is imported.
_run_home = os.environ["PREFECT_HOME"] if "PYTEST_XDIST_WORKER" in os.environ else None
os.environ["PREFECT_HOME"] = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="t-", dir=_run_home)
os.environ[SESSION_VARIABLE] = secrets.token_hex(8)
os.environ.setdefault(RUN_VARIABLE, secrets.token_hex(8))
atexit.register(shutil.rmtree, os.environ["PREFECT_HOME"], ignore_errors=True)

# A shell that starts the tests in the background has SIGINT ignored, and every process of theirs would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure() -> None:
    """End what is left: pytest-xdist ends its processes without their fixtures when the run is interrupted."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        for title in kill_all(lambda: carrying(f"{RUN_VARIABLE}={os.environ[RUN_VARIABLE]}")):
            print(f"was left and is ended: {title}")


@pytest.fixture(scope="session")
def server_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the session's Prefect server keeps what it knows."""
    return tmp_path_factory.mktemp("prefect")


@pytest.fixture(scope="session")
def api_url(server_folder: Path) -> Iterator[str]:
    """A real Prefect server for the whole session."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    with prefect_server(server_folder) as url:
        yield url
        # What is still on its way to the server would wait a minute for it at exit.
        APILogWorker.drain_all(timeout=5)
        EventsWorker.drain_all(timeout=5)


@pytest.fixture
def api(api_url: str) -> Iterator[str]:
    """The session's server as this process's API."""
    from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    # The heartbeat's thread takes a second to end.
    with temporary_settings({PREFECT_API_URL: api_url, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        yield api_url


@pytest.fixture
def ledger(tmp_path: Path) -> str:
    """A file that the loop of a test writes its steps into."""
    return str(tmp_path / "ledger.jsonl")


@pytest.fixture
def client(api: str) -> Iterator[SyncPrefectClient]:
    """A client of the session's server."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        yield client


@pytest.fixture(scope="session")
def head() -> Iterator[RayHead]:
    """A cluster to join or to submit jobs to: room for two trainings of two workers."""
    cluster = RayHead(cpus=4)
    yield cluster
    cluster.close()


@pytest.fixture
def own_head() -> Iterator[RayHead]:
    """A cluster to kill."""
    cluster = RayHead(cpus=2)
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def joined(head: RayHead) -> RayCluster:
    """The block that joins the session's cluster."""
    from prefect_elastic_train import RayCluster

    return RayCluster(**head.block)


@pytest.fixture
def start(api_url: str, tmp_path: Path) -> Iterator[Callable[..., FlowProcess]]:
    """Starts flow processes, and ends what is left of them."""
    started: list[FlowProcess] = []

    def start_flow(name: str = "flow", **arguments: Any) -> FlowProcess:
        started.append(FlowProcess(tmp_path / name, api_url, **arguments))
        return started[-1]

    yield start_flow
    for process in started:
        process.close()
