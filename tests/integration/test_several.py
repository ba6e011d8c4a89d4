"""Several trainings of one flow at once: `elastic_train.map`, and local clusters that wait for room on the machine."""

import os
from pathlib import Path
from typing import Any

import pytest
from prefect import flow, task, unmapped
from prefect.client.orchestration import SyncPrefectClient
from prefect.exceptions import MappingLengthMismatch, MappingMissingIterable
from prefect.futures import PrefectFutureList

from prefect_elastic_train import ConfigurationError, ElasticScaling, TrainingResult, elastic_train
from prefect_elastic_train.core.events import AttemptEnded
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.orchestration.supervision import Training
from tests.support.processes import read_ledger
from tests.support.reports import run_events

pytestmark = pytest.mark.usefixtures("api")

LOOP = "tests.support.loops:hashing_loop"


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> dict[str, Training]:
    """The trainings by run name, in place of what their drivers do."""
    trainings: dict[str, Training] = {}

    def run_driver(training: Training) -> AttemptEnded:
        trainings[training.request.run_name] = training
        result = {"run_name": training.request.run_name, "run_uri": "/r"}
        return AttemptEnded(outcome=Outcome.COMPLETED, result=result)

    monkeypatch.setattr(Training, "_run_driver", run_driver)
    return trainings


@task
def _numbers() -> list[int]:
    return [1, 2, 3]


def test_map_starts_a_training_for_each_element_as_the_tasks_of_prefect_do(trained: dict[str, Training]) -> None:
    def sweep(**arguments: Any) -> list[str]:
        @flow
        def sweeps() -> list[str]:  # Prefect would unwrap `unmapped` in the parameters of a flow
            futures = elastic_train.map(LOOP, scaling=ElasticScaling(max_workers=3), framework="none", **arguments)
            assert isinstance(futures, PrefectFutureList)
            return [result.run_name for result in futures.result()]

        return sweeps()

    assert sweep(train_loop_config=[{"a": 1}, {"a": 2}], run_name="sweep") == ["sweep-1", "sweep-2"]
    assert {training.blocks.scaling.max_workers for training in trained.values()} == {3}, "a block is no iterable"
    assert len({str(training.request.fingerprint) for training in trained.values()}) == 2, "each has its own config"
    assert sweep(train_loop_config=unmapped([1, 2]), timeout_seconds=range(60, 63), run_name=list("abc")) == [*"abc"]
    names = sweep(timeout_seconds=[60, 60])
    assert names[1] == f"{names[0]}-2", "as two calls, so that a retry finds the same runs"

    @flow
    def after() -> int:
        return len(elastic_train.map(LOOP, framework="none", timeout_seconds=_numbers.submit()).result())

    assert after() == 3


def test_map_starts_nothing_if_the_lengths_differ_or_a_training_cannot_start(trained: dict[str, Training]) -> None:
    @flow
    def sweep(**arguments: Any) -> None:
        elastic_train.map(LOOP, **arguments)

    for error, arguments in (
        (MappingLengthMismatch, {"train_loop_config": [1, 2], "timeout_seconds": [1, 2, 3]}),
        (MappingMissingIterable, {"train_loop_config": {"a": 1}}),
        (ConfigurationError, {"timeout_seconds": [1, 2, -1]}),
    ):
        with pytest.raises(error):
            sweep(**arguments)
    assert not trained


@pytest.mark.full
def test_four_trainings_on_the_machine_complete_and_never_use_more_cpus_than_it_has(
    client: SyncPrefectClient, tmp_path: Path
) -> None:
    cpus = len(os.sched_getaffinity(0))
    ledgers = [str(tmp_path / f"{number}.jsonl") for number in range(cpus + 2)]

    @flow
    def sweep() -> list[TrainingResult]:
        futures = elastic_train.map(
            LOOP,
            train_loop_config=[{"steps": 20, "sleep": 0.1, "ledger": ledger} for ledger in ledgers],
            framework="none",
            storage=tmp_path / "runs",
            run_name=f"sweep-{tmp_path.name}",
        )
        return futures.result()

    assert [result.metrics for result in sweep()] == [{"step": 20}] * len(ledgers)
    times = [[line["at"] for line in read_ledger(ledger)] for ledger in ledgers]
    for at in sorted(start for start, *_ in times):
        assert sum(each[0] <= at <= each[-1] for each in times) <= cpus
    waited = [
        number
        for number in range(1, len(ledgers) + 1)
        if any(
            event["event"].endswith("waiting-for-capacity")
            for event in run_events(client, run_name=f"sweep-{tmp_path.name}-{number}")
        )
    ]
    assert len(waited) >= 2
