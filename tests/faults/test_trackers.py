"""Trackers through kills: one run in each, with each step once, and with the value that counts."""

from pathlib import Path

import numpy as np
import psutil
import pytest

from prefect_elastic_train.core.events import TrackersOpened
from prefect_elastic_train.runs.history import read_history
from prefect_elastic_train.storage.store import LocalRunStore
from tests.support.processes import Start, read_ledger, repeated, steps_of
from tests.support.trackers import options, read_mlflow, read_tensorboard, read_wandb

STEPS = 120


@pytest.mark.parametrize(
    "victim", ["worker", pytest.param("driver", marks=pytest.mark.full), pytest.param("flow", marks=pytest.mark.full)]
)
def test_a_kill_leaves_one_run_in_each_tracker_with_each_step_once(
    start: Start, ledger: str, tmp_path: Path, victim: str
) -> None:
    trackers = options(tmp_path)
    config = {"steps": STEPS, "save_every": 20, "sleep": 0.15, "trackers": trackers, "ledger": ledger}
    arguments = {"loop": "tests.support.session_loops:tracked_loop", "config": config}
    flow = start(**arguments)
    flow.wait_for(lambda: len(steps_of(ledger)) > 70, 240, "70 steps")
    flow.living_driver()
    if victim == "flow":
        flow.process.kill()
        flow.process.wait(10)
        flow = start("again", **arguments, flow_run_id=flow.flow_run_id, storage=str(flow.storage))
    else:
        process = psutil.Process(read_ledger(ledger)[-1]["pid"]) if victim == "worker" else flow.living_driver()
        process.kill()
    result = flow.completed(240)
    assert (result["worker_failures"], result["attempts"]) == ((1, 1) if victim == "worker" else (0, 2))
    assert repeated(steps_of(ledger)), "the kill has cost steps, whose first losses do not count"
    expected = sorted({line["step"]: line["loss"] for line in read_ledger(ledger)}.items())
    mlflow = read_mlflow(trackers["mlflow"]["tracking_uri"])
    assert (mlflow.losses, mlflow.status) == (expected, "FINISHED")
    assert mlflow.more["elastic_train.checkpoint"] == result["checkpoint_uri"]
    wandb = read_wandb(Path(trackers["wandb"]["dir"]))
    assert (wandb.losses, wandb.status, wandb.more["processes"]) == (expected, "FINISHED", 2)
    assert all(reference.startswith(f"file://{result['checkpoint_uri']}/") for reference in wandb.more["references"])
    tensorboard = read_tensorboard(Path(trackers["tensorboard"]["log_dir"]))
    assert tensorboard.losses == [(step, np.float32(loss)) for step, loss in expected]
    opened = [event for event in read_history(LocalRunStore(str(flow.run))) if isinstance(event, TrackersOpened)]
    assert {run.kind: bool(run.link) for run in opened[-1].runs} == dict.fromkeys(trackers, True)
