"""How attempts end, and whether to try again."""

from __future__ import annotations

import asyncio
import inspect
import math
import pickle
from typing import Any

import cloudpickle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect import task
from prefect.filesystems import LocalFileSystem
from prefect.results import ResultStore
from prefect.states import Completed, Crashed, Failed, exception_to_failed_state

from prefect_elastic_train.core.outcomes import (
    AttemptFailedError,
    ConfigurationError,
    ElasticTrainError,
    Outcome,
    may_retry,
    restart_delays,
)

#: The condition looks at the state only.
UNUSED: Any = None

RETRYABLE = {
    "completed": False,
    "user_error": False,
    "driver_lost": True,
    "cluster_lost": True,
    "storage_error": False,
    "no_progress": False,
    "cancelled": False,
    "timed_out": False,
    "invalid": False,
    "superseded": False,
}


def _failed(error: BaseException) -> Any:
    """Give the state of a task run that raised, as Prefect's engine makes it."""
    results = ResultStore(result_storage=LocalFileSystem(basepath="/nowhere"))
    return asyncio.run(exception_to_failed_state(error, result_store=results))


def test_the_table_of_outcomes_is_complete() -> None:
    assert {outcome.value for outcome in Outcome} == RETRYABLE.keys()


@pytest.mark.parametrize(("outcome", "retryable"), RETRYABLE.items())
def test_only_a_lost_driver_and_a_lost_cluster_are_tried_again(outcome: str, retryable: bool) -> None:
    error = AttemptFailedError("gone", outcome=Outcome(outcome), attempt=1)
    assert Outcome(outcome).retryable is retryable
    assert error.retryable is retryable
    assert may_retry(UNUSED, UNUSED, _failed(error)) is retryable
    assert may_retry(UNUSED, UNUSED, Failed(data=error)) is retryable


@pytest.mark.parametrize("outcome", Outcome)
def test_nothing_final_is_tried_again(outcome: Outcome) -> None:
    error = AttemptFailedError("used up", outcome=outcome, final=True)
    assert not may_retry(UNUSED, UNUSED, _failed(error))


@pytest.mark.parametrize(
    "state",
    [
        Failed(),
        Failed(data="driver_lost"),
        Failed(data=Outcome.DRIVER_LOST),
        Crashed(),
        Completed(data=1),
        Failed(data=RuntimeError("driver_lost")),
        Failed(data=ConfigurationError("bad")),
        Failed(data=ElasticTrainError("bad")),
    ],
)
def test_anything_but_a_failed_attempt_is_not_tried_again(state: Any) -> None:
    assert may_retry(UNUSED, UNUSED, state) is False


def test_the_condition_is_a_plain_function_since_prefect_ignores_other_callables() -> None:
    assert inspect.isfunction(may_retry)
    assert not inspect.iscoroutinefunction(may_retry)

    @task(retry_condition_fn=may_retry)
    def train() -> None:
        """Is accepted by Prefect."""

    assert train.retry_condition_fn is may_retry


def test_a_bad_configuration_is_a_value_error_of_this_package() -> None:
    assert issubclass(ConfigurationError, ValueError)
    assert issubclass(ConfigurationError, ElasticTrainError)
    assert issubclass(AttemptFailedError, ElasticTrainError)


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
def test_a_failed_attempt_survives_pickling_whole(pickler: Any) -> None:
    error = AttemptFailedError("the driver went", outcome=Outcome.CLUSTER_LOST, attempt=7, final=True)
    copy = pickle.loads(pickler.dumps(error))
    assert type(copy) is AttemptFailedError
    assert (str(copy), copy.outcome, copy.attempt, copy.final, copy.retryable) == (
        "the driver went",
        Outcome.CLUSTER_LOST,
        7,
        True,
        False,
    )


def test_delays_double_up_to_five_minutes() -> None:
    assert restart_delays(8, 10.0) == [10, 20, 40, 80, 160, 300, 300, 300]


def test_a_first_delay_above_the_bound_stays() -> None:
    assert restart_delays(3, 400.0) == [400, 400, 400]


def test_no_restarts_have_no_delays() -> None:
    assert restart_delays(0, 10.0) == []
    assert restart_delays(-1, 10.0) == []


@given(st.integers(0, 1000), st.floats(0, 3600))
def test_delays_are_a_list_that_prefect_accepts(restarts: int, first: float) -> None:
    delays = restart_delays(restarts, first)
    assert len(delays) == min(restarts, 50)
    assert delays == sorted(delays)
    assert all(0 <= delay <= 3600 and math.isfinite(delay) for delay in delays)

    @task(retries=restarts, retry_delay_seconds=delays or 0)
    def train() -> None:
        """Is accepted by Prefect."""
