"""Outcomes of attempts, and decisions to retry."""

import asyncio
import pickle
from typing import Any

import pytest
from prefect.filesystems import LocalFileSystem
from prefect.results import ResultStore
from prefect.states import Crashed, Failed, exception_to_failed_state

from prefect_elastic_train.core.outcomes import (
    AttemptFailedError,
    ConfigurationError,
    Outcome,
    TrainingTimeoutError,
    may_retry,
)
from prefect_elastic_train.orchestration.supervision import restart_delay

#: The condition looks at the state only.
UNUSED = None


def _failed(error: BaseException) -> Any:
    """The state of a task run that raised, as Prefect's engine makes it."""
    results = ResultStore(result_storage=LocalFileSystem(basepath="/nowhere"))
    return asyncio.run(exception_to_failed_state(error, result_store=results))


@pytest.mark.parametrize("outcome", Outcome)
def test_only_a_lost_driver_and_a_lost_cluster_are_tried_again_and_nothing_final(outcome: Outcome) -> None:
    error = AttemptFailedError("gone", outcome=outcome, attempt=1)
    retryable = outcome.value in ("driver_lost", "cluster_lost")
    assert (outcome.retryable, error.retryable) == (retryable, retryable)
    assert may_retry(UNUSED, UNUSED, _failed(error)) is retryable
    assert may_retry(UNUSED, UNUSED, Failed(data=error)) is retryable
    assert not may_retry(UNUSED, UNUSED, _failed(AttemptFailedError("used up", outcome=outcome, final=True)))


@pytest.mark.parametrize(
    "state",
    [Failed(), Failed(data=Outcome.DRIVER_LOST), Crashed(), Failed(data=ConfigurationError("bad"))],
)
def test_anything_but_a_failed_attempt_is_not_tried_again(state: Any) -> None:
    assert may_retry(UNUSED, UNUSED, state) is False


@pytest.mark.parametrize("kind", [AttemptFailedError, TrainingTimeoutError])
def test_a_failed_attempt_survives_pickling_whole(kind: type[AttemptFailedError]) -> None:
    error = kind("the driver went", outcome=Outcome.CLUSTER_LOST, attempt=7, final=True)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (str(copy), vars(copy)) == ("the driver went", vars(error))


@pytest.mark.parametrize(("first", "delays"), [(10.0, [10, 20, 40, 80, 160, 300, 300]), (400.0, [400] * 7)])
def test_delays_double_up_to_five_minutes(first: float, delays: list[float]) -> None:
    assert [restart_delay(restart, first) for restart in range(1, 8)] == delays
    assert restart_delay(10_000, first) == delays[-1]
