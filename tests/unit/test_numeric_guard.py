"""The numeric guard: what it finds, and what a session and the controller do about it."""

import logging
import math
import random
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

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
from prefect_elastic_train.loop.numeric_guard import GuardedSteps
from prefect_elastic_train.loop.state import State as LoopState
from prefect_elastic_train.worker.rank_failures import portable_failure
from tests.unit.test_policy import State

FINE = loop.ArrayState(weights=np.ones(2))


class NoState(LoopState):
    """A state without weights."""


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No session has been in this process, as in that of a worker."""
    monkeypatch.setattr(training_session, "current", None)


# What it finds


def _problem(steps: GuardedSteps, loss: Any) -> str:
    """Return what is wrong with a step; empty: nothing."""
    try:
        steps.check({"loss": loss}, 7, ())
    except loop.NumericError as error:
        return str(error).removeprefix("step 7: ").removesuffix(" (guard: rollback)")
    return ""


@pytest.mark.parametrize("found", [math.nan, torch.tensor(math.nan), np.array([math.inf], np.float16)])
def test_a_loss_that_is_not_finite_is_found(found: Any) -> None:
    assert _problem(GuardedSteps(loop.Guard(), FINE), found) in ("loss is nan", "loss is inf")
    GuardedSteps(loop.Guard(loss="train_loss"), FINE).check({"loss": found, "train_loss": None}, 0, ())


def _module(dtype: torch.dtype, value: float) -> loop.TorchState:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    model[0].bias.data = torch.tensor([1.0, value]).to(dtype)
    model.register_parameter("number", torch.nn.Parameter(torch.tensor([3], dtype=torch.uint8), requires_grad=False))
    return loop.TorchState(model=model)


DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.0])
def test_a_weight_that_is_not_finite_is_found_in_each_kind_of_state(value: float) -> None:
    import jax.numpy as jnp  # not before other tests fork this process

    array = np.array([1.0, value])
    states = [
        loop.ArrayState(weights=array, best=math.inf, count=np.array([3])),
        loop.JaxState(params={"w": jnp.asarray(array, jnp.bfloat16), "n": jnp.array([3])}, best=math.inf),
        loop.JaxState(params={"w": array}),
        *(_module(dtype, value) for dtype in DTYPES),
    ]
    found = {_problem(GuardedSteps(loop.Guard(), state), 1.0) for state in states}
    assert found == {"" if value == 1.0 else "a weight is not a finite number"}


@pytest.mark.parametrize("spread", [0.0, 0.1])
def test_a_spike_is_found_and_noise_and_slow_changes_are_not(spread: float) -> None:
    chance, steps = random.Random(0), GuardedSteps(loop.Guard(spike=8.0), FINE)
    losses = [3 * 0.999**step + spread * chance.gauss(0, 1) for step in range(10_000)]
    assert {_problem(steps, loss) for loss in losses} == {""}
    assert "loss spikes to" in _problem(steps, losses[-1] + 8.5 * spread + 1)
    assert _problem(GuardedSteps(loop.Guard(spike=8.0), FINE), 1e9) == "", "nothing is known yet"
    assert _problem(GuardedSteps(loop.Guard(), FINE), 1e9) == ""


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda: loop.Guard(nan="skip"), "nan='skip': must be one of rollback, raise, warn"),
        (lambda: loop.Guard(spike=-1), "spike=-1"),
        (lambda: GuardedSteps(loop.Guard(), NoState()), "a NoState is not supported"),
        (lambda: _problem(GuardedSteps(loop.Guard(), FINE), "low"), "metric 'loss' is 'low': a guard needs a number"),
        (lambda: _problem(GuardedSteps(loop.Guard(), FINE), np.ones(2)), "a guard needs a number"),
    ],
)
def test_what_a_guard_cannot_check_is_refused(use: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        use()


# What is done about it


def _train(guard: loop.Guard, bad: Collection[int], skipped: tuple[int, ...] = ()) -> list[int]:
    """Train 5 steps with a loss of NaN at some, and return the steps that are done."""
    done = []
    context = loop.RunContext("run", "id", 1, "/", "/run", skipped_steps=skipped)
    with (
        loop.use_run_context(context),
        loop.session(loop.ArrayState(weights=np.ones(2)), steps=5, global_batch=4, guard=guard) as session,
    ):
        for _ in session.batches(np.arange(12), micro_batch=3):
            if not session.is_last_part:
                continue
            loss = math.nan if session.done in bad else 1.0
            session.step({"loss": loss})
            done.append(session.done - 1)
        assert session.done == 5
    return done


@pytest.mark.parametrize(("nan", "skipped"), [("rollback", 2), ("raise", -1)])
def test_a_step_with_a_problem_is_not_done(nan: Any, skipped: int) -> None:
    with pytest.raises(loop.NumericError, match=rf"step 2: loss is nan \(guard: {nan}\)") as error:
        _train(loop.Guard(nan=nan), bad=[2])
    assert error.value.skipped_step == skipped


def test_warnings_are_logged_once_a_minute_and_leave_the_steps_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert _train(loop.Guard(nan="warn"), bad=[2, 3]) == [0, 1, 2, 3, 4]
    [warning] = [record.getMessage() for record in caplog.records if "loss" in record.getMessage()]
    assert warning == "Step 2: loss is nan (1 such steps since the last warning)"


def test_the_next_worker_group_skips_the_batch_of_the_step_and_the_fourth_in_a_row_ends_the_training() -> None:
    assert _train(loop.Guard(), bad=[2, 4], skipped=(2, 4)) == [0, 1, 3]
    with pytest.raises(loop.NumericError) as error:
        _train(loop.Guard(), bad=range(1, 5), skipped=(1, 2, 3))
    assert error.value.skipped_step == -1


def test_a_save_that_is_due_at_a_skipped_step_is_made_and_points_go_on_after_a_required_one() -> None:
    context = loop.RunContext("run", "id", 1, "/", "/run", skipped_steps=(2, 3))
    plan = {"steps": 6, "global_batch": 4, "save_every": 4, "guard": loop.Guard()}
    with loop.use_run_context(context), loop.session(loop.ArrayState(weights=np.ones(2)), **plan) as session:
        saved: list[int] = []
        session._ray, session._can_save = SimpleNamespace(), True
        session._save = lambda restart: saved.append(session.done)
        session._report = lambda: None
        for _ in session.batches(np.arange(24)):
            session.step({"loss": 1.0}, save=session.done == 1)
            assert session._required_step == (0 if session.done < 4 else 2)
    assert saved == [2, 4, 6]


def _find_and_clean_up() -> None:
    try:
        raise loop.NumericError("step 7: loss is nan", 7)
    finally:
        raise RuntimeError("in a cleanup")


def test_a_problem_that_another_error_follows_is_seen() -> None:
    with pytest.raises(RuntimeError) as error:
        _find_and_clean_up()
    assert portable_failure(error.value).skipped_step == 7


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
