"""Fixtures and the hypothesis profiles of the unit tier."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from prefect.settings import PREFECT_SERVER_ALLOW_EPHEMERAL_MODE, temporary_settings

from prefect_elastic_train.runs.store import LocalRunStore
from tests.unit.support import PROFILE, WIDER, private_folder

# The same examples at every run; HYPOTHESIS_PROFILE=wide looks at many more, new ones each time.
_common = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", _common, max_examples=50, derandomize=True)
settings.register_profile("wide", _common, max_examples=50 * WIDER)
settings.load_profile(PROFILE)


@pytest.fixture(scope="package", autouse=True)
def _no_prefect_server() -> Iterator[None]:
    """Nothing in this tier may start a Prefect server."""
    with temporary_settings({PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: False}):
        yield


@pytest.fixture
def store() -> Iterator[LocalRunStore]:
    """A run directory that nobody has used yet."""
    with private_folder() as folder:
        yield LocalRunStore(f"{folder}/runs/mnist")
