"""The example flow that logs to MLflow loses a worker and its driver, and MLflow shows one undisturbed curve."""

from __future__ import annotations

import re
import time
from pathlib import Path

import numpy as np
import pytest

from flows.mlflow_curve import WEIGHTS, open_client, take_step
from tests.support.processes import FlowProcess, Start, attempts, commits, titled, wait_for

STEPS, LEARNING_RATE, STEP_SECONDS = 80, 0.05, 0.05


def _undisturbed_losses() -> list[float]:
    weights, losses = np.zeros(WEIGHTS), []
    for step in range(1, STEPS + 1):
        weights, loss = take_step(weights, step, LEARNING_RATE)
        losses.append(loss)
    return losses


def _commits_of_first(flow: FlowProcess) -> int:
    """How many commits the first attempt has made, deleted ones too."""
    return max((commit["sequence"] for commit in commits(flow.run) if commit["attempt"] == 1), default=0)


@pytest.mark.full
def test_killed_worker_and_killed_driver_leave_one_mlflow_run_with_each_step_once(start: Start, tmp_path: Path) -> None:
    store = tmp_path / "mlflow"
    logged = {"steps": STEPS, "checkpoint_every": 10, "learning_rate": LEARNING_RATE}
    parameters = {
        **logged,
        "step_seconds": STEP_SECONDS,
        "tracking_uri": str(store),
        "experiment": "kills",
        "storage": {"path": str(tmp_path / "flow" / "runs")},
        "scaling": {"min_workers": 2, "max_workers": 2},
        "failures": {"driver_restart_delay_seconds": 0.5},
    }
    flow = start(flow="flows.mlflow_curve:mlflow_curve", parameters=parameters)
    wait_for(lambda: _commits_of_first(flow) >= 2, 120, "two commits")
    driver = flow.living_driver()
    worker = titled(flow.marked(), "RayTrainWorker")[0]
    time.sleep(6 * STEP_SECONDS)  # into the next checkpoint's steps
    first_kill = time.time()
    worker.kill()
    before = _commits_of_first(flow)
    wait_for(lambda: _commits_of_first(flow) > before, 60, "a commit of the next workers")
    time.sleep(6 * STEP_SECONDS)
    driver.kill()
    outcome = flow.wait(120)
    assert outcome["state"] == "COMPLETED"
    assert (outcome["result"]["attempts"], outcome["result"]["worker_failures"]) == (2, 1)

    client = open_client(str(store))
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert (run.info.status, run.info.run_name) == ("FINISHED", outcome["result"]["run_name"])
    curve = client.get_metric_history(run.info.run_id, "loss")
    assert [point.step for point in curve] == list(range(1, STEPS + 1)), "in the order in which they were logged"
    assert [point.timestamp for point in curve] == sorted(point.timestamp for point in curve)
    assert [point.value for point in curve] == _undisturbed_losses()
    assert run.data.params == {name: str(value) for name, value in logged.items()}
    params = (store / run.info.experiment_id / run.info.run_id / "params").iterdir()
    assert max(file.stat().st_mtime for file in params) < first_kill, "logged once"
    # What each rank knew, of each worker group.
    known = r"rank (\d) of 2 goes on after step \d+ in attempt (\d+) of ([0-9a-f]{32}), for flow run ([0-9a-f-]{36})"
    run_id = run.data.tags["elastic_train.run_id"]
    assert run.data.tags["prefect.flow_run_id"] == outcome["flow_run_id"]
    expected = {(rank, attempt, run_id, outcome["flow_run_id"]) for rank in "01" for attempt in "12"}
    assert set(re.findall(known, flow.log)) == expected
    assert {attempt["run_id"] for attempt in attempts(flow.run)} == {run_id}
