"""The numeric guard: what it finds, and what a session and the controller do about it."""

import logging
import math
import random
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from ray.train import WorkerGroupError
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2.api.config import FailureConfig

from prefect_elastic_train import loop
from prefect_elastic_train.controller.failure_policy import RunFailurePolicy
from prefect_elastic_train.controller.failures import classify_failure, permanent_reason
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.loop import training_session
from prefect_elastic_train.worker.rank_failures import portable_failure
from tests.unit.test_policy import State

FINE = loop.ArrayState(weights=np.ones(2))


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No session has been in this process, as in that of a worker."""
    monkeypatch.setattr(training_session, "current", None)


# What it finds


@pytest.mark.parametrize("loss", [math.nan, math.inf, torch.tensor(math.nan), np.float32(math.inf)])
def test_a_loss_that_is_not_finite_is_found(loss: Any) -> None:
    guard = loop.Guard(loss="train_loss")
    assert guard.find({"train_loss": loss, "other": 1.0}, FINE) == f"train_loss is {float(loss)}"
    assert guard.find({"loss": loss, "train_loss": None}, FINE) == ""


def _module(dtype: torch.dtype, value: float) -> loop.TorchState:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2, dtype=dtype), torch.nn.BatchNorm1d(2))
    torch.nn.init.constant_(model[0].bias, value)
    return loop.TorchState(model=model)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.0])
def test_a_weight_that_is_not_finite_is_found_in_each_kind_of_state(value: float) -> None:
    array = np.array([1.0, value])
    states = [
        loop.ArrayState(weights=array, best=math.inf, count=np.array([3])),
        loop.JaxState(params={"w": jnp.asarray(array, jnp.bfloat16), "n": jnp.array([3])}, best=math.inf),
        *(_module(dtype, value) for dtype in (torch.float32, torch.float16, torch.bfloat16)),
    ]
    found = {loop.Guard().find({"loss": 1.0}, state) for state in states}
    assert found == {"" if value == 1.0 else "a weight is not a finite number"}


@pytest.mark.parametrize("spread", [0.0, 0.1])
def test_an_outlier_of_the_loss_is_found_and_noise_and_slow_changes_are_not(spread: float) -> None:
    chance, guard = random.Random(0), loop.Guard(spike=8.0)
    losses = [3 * 0.999**step + spread * chance.gauss(0, 1) for step in range(10_000)]
    assert {guard.find({"loss": loss}, FINE) for loss in losses} == {""}
    assert "an outlier: the median of the steps before is" in guard.find({"loss": losses[-1] + 8.5 * spread + 1}, FINE)
    assert loop.Guard(spike=8.0).find({"loss": 1e9}, FINE) == "", "nothing is known yet"
    assert loop.Guard().find({"loss": 1e9}, FINE) == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [({"nan": "skip"}, "nan='skip': must be one of rollback, raise, warn"), ({"spike": -1}, "spike=-1")],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        loop.Guard(**arguments)


# What is done about it


def _train(guard: loop.Guard, bad_step: int, skipped: frozenset[int] = frozenset()) -> list[int]:
    """Train 5 steps with a loss of NaN at one, and return the steps that are done."""
    done = []
    context = loop.RunContext("run", "id", 1, "/", "/run", skipped_steps=skipped)
    with (
        loop.use_run_context(context),
        loop.session(loop.ArrayState(weights=0.0), steps=5, global_batch=4, guard=guard) as session,
    ):
        for _ in session.batches(np.arange(12), micro_batch=3):
            if not session.is_last_part:
                continue
            loss = math.nan if session.done == bad_step else 1.0
            session.step({"loss": loss})
            done.append(session.done - 1)
        assert session.done == 5
    return done


@pytest.mark.parametrize(("nan", "skipped"), [("rollback", 2), ("raise", -1)])
def test_a_step_with_a_problem_is_not_done(nan: Any, skipped: int) -> None:
    with pytest.raises(loop.NumericError, match=rf"step 2: loss is nan \(guard: {nan}\)") as error:
        _train(loop.Guard(nan=nan), bad_step=2)
    assert error.value.skipped_step == skipped


def test_a_warning_leaves_the_step_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert _train(loop.Guard(nan="warn"), bad_step=2) == [0, 1, 2, 3, 4]
    assert "step 2: loss is nan" in caplog.text


def test_the_next_worker_group_skips_the_batch_of_the_step() -> None:
    assert _train(loop.Guard(), bad_step=2, skipped=frozenset({2, 4})) == [0, 1, 3]


@pytest.mark.parametrize("skipped", [7, -1])
def test_a_worker_group_skips_what_its_ranks_have_found_or_the_training_ends_as_a_user_error(skipped: int) -> None:
    failure = portable_failure(loop.NumericError("step 7: loss is nan", skipped))
    state = State()
    policy = RunFailurePolicy(FailureConfig(max_failures=3), state)
    decision = policy.make_decision(
        WorkerGroupError("failed", {0: failure, 1: portable_failure(RuntimeError("other"))})
    )
    assert state.skipped_steps == {skipped}
    assert decision is (FailureDecision.RAISE if skipped == -1 else FailureDecision.RETRY)
    ends = "the training ends, as configured by the guard of the session"
    assert permanent_reason([failure]) == (ends if skipped == -1 else "")
    assert classify_failure([failure])[0] is Outcome.USER_ERROR
