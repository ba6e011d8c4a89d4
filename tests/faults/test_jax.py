"""JAX on CPUs: processes that compute together, one of them killed."""

from pathlib import Path

import pytest

from tests.support.processes import Start
from tests.support.session_training import SessionTraining


@pytest.mark.full
def test_killed_coordinator_is_replaced_and_all_are_joined_again_with_the_same_weights_in_the_end(
    start: Start, tmp_path: Path
) -> None:
    training = SessionTraining(start, tmp_path, "jax", {"min_workers": 2, "max_workers": 2})
    before = training.group()
    after = training.group(dead=[before[0]["pid"]])
    training.end(attempts=1, worker_failures=1)
    assert len({line["pid"] for line in before + after}) == 4, "one process each, and one more"
