"""What a killed driver's controller asks Ray for in its last moments."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from prefect_elastic_train.core.request import DRIVER_MODULE, JOB_MODULE
from tests.support.clusters import ElasticCluster
from tests.support.processes import call


@pytest.fixture(scope="module")
def cluster() -> Iterator[ElasticCluster]:
    cluster = ElasticCluster()
    cluster.add(num_cpus=1)
    yield cluster
    cluster.close()


@pytest.mark.parametrize("name", [DRIVER_MODULE, JOB_MODULE, "another.program"])
def test_placement_group_that_outlives_its_killed_driver_is_removed_if_it_is_ours(
    cluster: ElasticCluster, name: str
) -> None:
    command = sys.executable, "-m", "tests.support.orphans", cluster.address, name
    said = call(*command, env=cluster.environment)
    removed, kept = map(int, said.splitlines()[-1].split())
    assert (removed > 0, kept == 0) == (name != "another.program",) * 2
