"""Which retries Prefect's engine counts and logs, by a scripted driver and the budget that its records have left."""

import asyncio
import logging
import re
from typing import Any

import pytest
from prefect import flow

from prefect_elastic_train.blocks import FailureBudget
from prefect_elastic_train.core.events import AttemptEnded, AttemptStarted, CheckpointCommitted
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.orchestration import task
from prefect_elastic_train.orchestration.supervision import Training


def _loop() -> None:
    """A train loop."""


@pytest.mark.parametrize(
    ("mode", "forgiving", "attempts", "said"),
    [
        # Each attempt: the restarts left by the records, None if it fails before it begins, and whether it commits.
        *((mode, 3600, [(2, False), (1, False), (0, False)], ["1/2", "2/2"]) for mode in ("call", "submit", "async")),
        ("call", 3600, [(1, True), (0, False)], ["1/1"]),  # of a resumed flow run, which has used one before
        # One does not count any more.
        ("call", 3600, [(2, True), (1, True), (1, True), (0, False)], ["1/2", "2/2", "3/3"]),
        ("call", 3600, [(2, True), (None, False), (1, False), (0, False)], ["1/2", "2/3", "3/3"]),
        ("call", 3600, [(2, True), (1, True), (0, True), ("used up", False)], ["1/2", "2/2", "3/3"]),
        ("call", 0, [(2, True), (1, True), (0, False)], ["1/2", "2/2"]),
    ],
)
def test_prefect_counts_the_retries_that_the_budget_has_left_and_goes_on_as_long(
    api: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mode: str,
    forgiving: float,
    attempts: list[tuple[Any, bool]],
    said: list[str],
) -> None:
    coming = iter(attempts)

    def run_driver(training: Training) -> AttemptEnded:
        left, commits = next(coming)
        if left == "used up":
            raise AttemptFailedError("the driver restarts are used up", outcome=Outcome.DRIVER_LOST, final=True)
        if left is not None:
            training.on_event(AttemptStarted(run_name="mnist", run_uri="/r", left={"driver restart": left}), False)
        if commits:
            committed = CheckpointCommitted(attempt=1, checkpoint="a", size_bytes=1, metrics={}, world_size=1)
            training.on_event(committed, False)
        raise AttemptFailedError("the head died", outcome=Outcome.CLUSTER_LOST)

    monkeypatch.setattr(Training, "_run_driver", run_driver)
    budget = FailureBudget(driver_restarts=2, driver_restart_delay_seconds=0, forgive_after_seconds=forgiving)

    @flow
    def train() -> None:
        if mode == "submit":
            task.elastic_train.submit(_loop, failures=budget).result()
        else:
            task.elastic_train(_loop, failures=budget)

    @flow
    async def train_async() -> None:
        await task.aelastic_train(_loop, failures=budget)

    with pytest.raises(AttemptFailedError), caplog.at_level(logging.INFO):
        asyncio.run(train_async()) if mode == "async" else train()
    assert re.findall(r"Retry (\d+/\d+) will start", caplog.text) == said
    assert list(coming) == []
