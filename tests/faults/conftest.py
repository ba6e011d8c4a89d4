"""Fixtures of the fault tier: deployments whose runs are disturbed."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient

from tests.support.clusters import ElasticCluster
from tests.support.deployments import DeployedRun, Program, serve_flows


@pytest.fixture(scope="package")
def served(api_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """The flows of the tests, served as their user would."""
    program = serve_flows(tmp_path_factory.mktemp("served"), api_url)
    yield program
    program.close()


@pytest.fixture
def deployed(client: SyncPrefectClient, tmp_path: Path) -> Iterator[Callable[..., DeployedRun]]:
    """Starts runs of deployments, and ends what is left of them."""
    started: list[DeployedRun] = []

    def start_run(deployment: str, **arguments: Any) -> DeployedRun:
        started.append(DeployedRun(client, deployment, tmp_path / "deployed", **arguments))
        return started[-1]

    yield start_run
    for run in started:
        run.close()


@pytest.fixture(scope="module")
def lasting_cluster() -> Iterator[ElasticCluster]:
    """The head that all nodes of a file's tests join."""
    made = ElasticCluster()
    yield made
    made.close()


@pytest.fixture
def cluster(lasting_cluster: ElasticCluster) -> Iterator[ElasticCluster]:
    """A cluster without nodes for workers."""
    yield lasting_cluster
    lasting_cluster.clear()
