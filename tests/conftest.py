"""Fixtures of all tiers: one Prefect server a test session, and nothing left behind.

Several sessions may run beside each other, as those of pytest-xdist do: each has a server, a Prefect home, clusters and
ports of its own.
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import RUN_VARIABLE, SESSION_VARIABLE, end_carrying, prefect_server

# Workers of the tests read modules of the tests, whatever folder pytest was started in.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")

# Neither a profile of whoever runs the tests nor what another session stores plays a part. Before Prefect is imported.
_run_home = os.environ["PREFECT_HOME"] if "PYTEST_XDIST_WORKER" in os.environ else None
os.environ["PREFECT_HOME"] = tempfile.mkdtemp(prefix="prefect-home-", dir=_run_home)
os.environ[SESSION_VARIABLE] = secrets.token_hex(8)
os.environ.setdefault(RUN_VARIABLE, secrets.token_hex(8))
atexit.register(shutil.rmtree, os.environ["PREFECT_HOME"], ignore_errors=True)

# A shell that starts the tests in the background has SIGINT ignored, and every process of theirs would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure() -> None:
    """End what is left: pytest-xdist ends its processes without their fixtures when the run is interrupted."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        for title in end_carrying(f"{RUN_VARIABLE}={os.environ[RUN_VARIABLE]}"):
            print(f"was left and is ended: {title}")


@pytest.fixture(scope="session")
def api_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Prefect server for the whole session."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    with prefect_server(tmp_path_factory.mktemp("prefect")) as url:
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
