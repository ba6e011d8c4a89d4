"""Fixtures of the integration tier: one joined cluster for all tests that need no cluster of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from prefect_elastic_train import RayCluster
from tests.support.processes import RayHead


@pytest.fixture(scope="session")
def head() -> Iterator[RayHead]:
    """A cluster with three CPUs, one of them for Ray Data, to join or to submit jobs to."""
    cluster = RayHead(cpus=3, dashboard=True)
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def joined(head: RayHead) -> RayCluster:
    """The block that joins it."""
    return RayCluster(address=head.address, auth_token=head.token)
