"""Trackers as their users see them, and a process that sends to them.

``python -m tests.support.trackers <folder> <first step> <last step> <attempt> <end> <MLflow's URI, or "">``, where the
end is "dies", "closes" or "fails".
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from prefect_elastic_train.loop import RunContext, track, use_run_context
from prefect_elastic_train.trackers.tracked_run import mark_ended
from tests.support.processes import spawn, wait_for

RUN = RunContext("mnist", "a" * 32, 1, "/runs", "/runs/mnist", flow_run_id="f" * 32, flow_name="nightly")
PARAMETERS = {"rate": 0.1, "loss (train)": "mse"}
_SAVED = "points.npz"


class Found(NamedTuple):
    """What a tracker shows: the steps of its only run with their losses, the run's status, and its other data."""

    losses: list[tuple[int, float]]
    status: str
    more: dict[str, Any]


def options(folder: Path, mlflow_uri: str = "") -> dict[str, Any]:
    """Arguments of ``loop.track`` for trackers in a folder."""
    return {
        "mlflow": {"tracking_uri": mlflow_uri or str(folder / "mlflow")},
        "wandb": {"dir": str(folder / "wandb"), "mode": "offline"},
        "tensorboard": {"log_dir": str(folder / "tensorboard")},
    }


def read_mlflow(uri: str) -> Found:
    """Read MLflow's only run with its client."""
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("elastic-train")
    [run] = client.search_runs([experiment.experiment_id])
    losses = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "loss")]
    return Found(losses, run.info.status, {**run.data.params, **run.data.tags})


def read_wandb(folder: Path) -> Found:
    """Read the files of W&B's only run with its command, in the order in which ``wandb sync`` sends them."""
    losses, exit_codes, references = [], [], []
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    assert len({file.name for file in files}) == 1, "one run"
    for file in files:
        command = (sys.executable, "-m", "wandb", "leet", "inspect", "--json", file)
        exit_codes.append(None)
        for line in subprocess.check_output(command, text=True).splitlines():
            record = json.loads(line)
            if "history" in record:
                losses.append((record["history"]["step"]["num"], record["history"]["item"]["loss"]))
            if "exit" in record:
                exit_codes[-1] = record["exit"].get("exit_code", 0)
            if "artifact" in record:
                references += [entry["ref"] for entry in record["artifact"]["manifest"]["contents"]]
    status = {0: "FINISHED", None: "RUNNING"}.get(exit_codes[-1], "FAILED")
    return Found(losses, status, {"processes": len(files), "references": references})


def read_tensorboard(folder: Path) -> Found:
    """Read TensorBoard's only run as TensorBoard does; its values have single precision."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [run] = folder.iterdir()
    events = EventAccumulator(str(run), {"scalars": 0}).Reload().Scalars("loss")
    return Found([(event.step, event.value) for event in events], "", {"name": run.name})


class MlflowServer:
    """MLflow's own server on loopback, with its files in a folder."""

    def __init__(self, folder: Path, port: int) -> None:
        import httpx

        store = ("--backend-store-uri", folder / "store", "--default-artifact-root", folder / "artifacts")
        command = (sys.executable, "-m", "mlflow", "server", *store, "--port", str(port), "--workers", "1")
        settings = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_ALLOW_FILE_STORE": "true"}
        self.process = spawn(*command, log=folder / "server.log", env={**os.environ, **settings})

        def answers() -> bool:
            try:
                return httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).is_success
            except httpx.HTTPError:
                return False

        wait_for(answers, 120, "MLflow's server")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)


def loss_of(step: int, attempt: int) -> float:
    """The loss of a step, which depends on the attempt that took it."""
    return attempt + 1 / step


def main(folder: Path, first: int, last: int, attempt: int, end: str, mlflow_uri: str) -> None:
    """Take steps, save and commit the last of them; then take two more and die, or close the tracker."""
    with use_run_context(RUN):
        tracker = track(**options(folder, mlflow_uri), parameters=PARAMETERS)
    tracker.committed = 0
    if first > 1:
        with np.load(folder / "checkpoint" / _SAVED) as arrays:
            tracker.restore(arrays)
        tracker.commit(first - 1, "/runs/mnist/gone")
    for step in range(first, last + 1):
        tracker.log(step, {"loss": loss_of(step, attempt), "rate": 0.1, "note": "no number"})
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir(exist_ok=True)
    np.savez(checkpoint / _SAVED, **tracker.points())
    tracker.commit(last, str(checkpoint))
    if end != "dies":
        tracker.close()
        if end == "fails":  # then the flow process marks the runs
            for run in tracker.runs.values():
                mark_ended(run, "FAILED", 60, print)
        return
    while set(tracker._sent.values()) != {last}:
        time.sleep(0.05)
    for step in (last + 1, last + 2):
        tracker.log(step, {"loss": loss_of(step, attempt)})
    os._exit(9)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]), *sys.argv[5:])
