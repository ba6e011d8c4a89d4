"""The MLflow run of the example flow: one for all its writers, whatever the one before got done."""

from collections.abc import Iterator
from typing import Any

import pytest

from flows.mlflow_curve import METRICS_OF_A_CALL, Point, TrackedRun, open_client
from prefect_elastic_train.loop import RunContext
from tests.unit.support import FLOW_RUN, private_folder

RUN = RunContext("mnist", "a" * 32, 1, "/runs", "/runs/mnist", flow_run_id=FLOW_RUN, flow_name="nightly")
PARAMETERS = {"steps": 6, "learning_rate": 0.1}


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Iterator[Any]:
    """An empty MLflow store, in files unless the test says otherwise."""
    with private_folder() as folder:
        is_database = getattr(request, "param", "file") == "sqlite"
        yield open_client(f"sqlite:///{folder}/mlflow.db" if is_database else f"{folder}/mlflow")


def _points(first: int, last: int, attempt: int = 1) -> list[Point]:
    """Steps with two metrics; what they amount to depends on who did them."""
    return [Point(n, 1000 * attempt + n, {"loss": attempt + 1 / n, "rate": 0.1}) for n in range(first, last + 1)]


def _values(client: Any, run_id: str, name: str) -> list[tuple[int, float]]:
    return [(metric.step, metric.value) for metric in client.get_metric_history(run_id, name)]


@pytest.mark.parametrize("client", ["file", "sqlite"], indirect=True)
def test_the_next_writer_goes_on_with_the_run_and_with_what_the_one_before_left_undone(client: Any) -> None:
    first = TrackedRun(client, "nightly", RUN, PARAMETERS)
    first.log(_points(1, 2))
    committed = _points(3, 4)  # it dies in the middle of logging these
    client.log_metric(first.mlflow_run_id, "loss", committed[0].metrics["loss"], committed[0].at, 3)

    second = TrackedRun(client, "nightly", RUN, PARAMETERS)
    assert second.mlflow_run_id == first.mlflow_run_id
    second.log(committed)
    second.log(committed)
    second.log(_points(5, 6, attempt=2))
    second.finish()

    run = client.get_run(second.mlflow_run_id)
    steps = [*_points(1, 4), *_points(5, 6, attempt=2)]
    assert _values(client, run.info.run_id, "loss") == [(point.step, point.metrics["loss"]) for point in steps]
    assert _values(client, run.info.run_id, "rate") == [(point.step, 0.1) for point in steps]
    assert (run.info.status, run.info.run_name) == ("FINISHED", "mnist")
    assert run.data.params == {"steps": "6", "learning_rate": "0.1"}
    assert run.data.tags["elastic_train.run_id"] == RUN.run_id
    assert run.data.tags["prefect.flow_run_id"] == RUN.flow_run_id


def test_more_points_than_mlflow_takes_at_once_arrive(client: Any) -> None:
    tracked = TrackedRun(client, "nightly", RUN, PARAMETERS)
    tracked.log(_points(1, METRICS_OF_A_CALL))
    assert [step for step, _ in _values(client, tracked.mlflow_run_id, "loss")] == list(range(1, METRICS_OF_A_CALL + 1))
