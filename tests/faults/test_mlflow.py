"""The example flow that logs to MLflow loses a worker and its driver, and MLflow shows one undisturbed curve."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flows.mlflow_curve import WEIGHTS, open_client, take_step
from tests.support.processes import FlowProcess, attempts, commits, titled, wait_for

Start = Callable[..., FlowProcess]

STEPS, CHECKPOINT_EVERY, LEARNING_RATE = 80, 10, 0.05
STEP_SECONDS = 0.05


def _undisturbed_losses() -> list[float]:
    weights, losses = np.zeros(WEIGHTS), []
    for step in range(1, STEPS + 1):
        weights, loss = take_step(weights, step, LEARNING_RATE)
        losses.append(loss)
    return losses


def _commits_of(flow: FlowProcess, attempt: int) -> int:
    """Count the commits of an attempt, deleted ones too."""
    return max((commit["sequence"] for commit in commits(flow.run) if commit["attempt"] == attempt), default=0)


@pytest.mark.full
def test_killed_worker_and_killed_driver_leave_one_mlflow_run_with_each_step_once(start: Start, tmp_path: Path) -> None:
    store = tmp_path / "mlflow"
    flow = start(
        flow="flows.mlflow_curve:mlflow_curve",
        parameters={
            "steps": STEPS,
            "checkpoint_every": CHECKPOINT_EVERY,
            "learning_rate": LEARNING_RATE,
            "step_seconds": STEP_SECONDS,
            "tracking_uri": str(store),
            "experiment": "kills",
            "storage": {"path": str(tmp_path / "flow" / "runs")},
            "scaling": {"min_workers": 2, "max_workers": 2},
            "failures": {"driver_restart_delay_seconds": 0.5},
        },
    )
    wait_for(lambda: _commits_of(flow, 1) >= 2, 120, "two commits")
    driver = flow.driver()
    assert driver is not None
    worker = titled(flow.marked(), "RayTrainWorker")[0]
    time.sleep(6 * STEP_SECONDS)  # into the next checkpoint's steps
    first_kill = time.time()
    worker.kill()
    before = _commits_of(flow, 1)
    wait_for(lambda: _commits_of(flow, 1) > before, 60, "a commit of the next workers")
    time.sleep(6 * STEP_SECONDS)
    driver.kill()
    outcome = flow.wait(120)
    assert outcome["state"] == "COMPLETED"
    assert (outcome["result"]["attempts"], outcome["result"]["worker_failures"]) == (2, 1)

    client = open_client(str(store))
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == outcome["result"]["run_name"]
    curve = client.get_metric_history(run.info.run_id, "loss")
    assert [point.step for point in curve] == list(range(1, STEPS + 1)), "in the order in which they were logged"
    assert [point.timestamp for point in curve] == sorted(point.timestamp for point in curve)
    assert [point.value for point in curve] == _undisturbed_losses()
    assert run.data.params == {
        "steps": str(STEPS),
        "checkpoint_every": str(CHECKPOINT_EVERY),
        "learning_rate": str(LEARNING_RATE),
    }
    written = [file.stat().st_mtime for file in (store / run.info.experiment_id / run.info.run_id / "params").iterdir()]
    assert max(written) < first_kill, "logged once"

    # What each rank knew, of each worker group.
    told = {
        (int(rank), int(attempt), run_id, flow_run_id)
        for rank, attempt, run_id, flow_run_id in re.findall(
            r"rank (\d) of 2 goes on after step \d+ in attempt (\d+) of ([0-9a-f]{32}), for flow run ([0-9a-f-]{36})",
            flow.log,
        )
    }
    run_id = run.data.tags["elastic_train.run_id"]
    assert run.data.tags["prefect.flow_run_id"] == outcome["flow_run_id"]
    assert told == {(rank, attempt, run_id, outcome["flow_run_id"]) for rank in (0, 1) for attempt in (1, 2)}
    assert {attempt["run_id"] for attempt in attempts(flow.run)} == {run_id}
