"""Trackers show a training as one run with each step once, whatever its processes and the trackers do."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from prefect_elastic_train import loop
from prefect_elastic_train.core.threads import start_thread
from prefect_elastic_train.loop import training_session
from prefect_elastic_train.trackers import tracker as tracker_module
from prefect_elastic_train.trackers.mlflow_backend import _METRICS_OF_A_CALL
from prefect_elastic_train.trackers.tracked_run import TrackedRun, mark_ended
from tests.support.processes import free_port, wait_for
from tests.support.trackers import RUN, MlflowServer, loss_of, read_mlflow, read_tensorboard, read_wandb
from tests.unit.support import private_folder

IDS = {"run_id": RUN.run_id, "run_name": RUN.run_name}


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder."""
    with private_folder() as path:
        yield Path(path)


@pytest.fixture(autouse=True)
def in_a_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is that of a worker, which had no session yet."""
    monkeypatch.setattr(training_session, "current", None)
    with loop.use_run_context(RUN):
        yield


def _losses(first: int, last: int, attempt: int = 1) -> list[tuple[int, float]]:
    return [(step, loss_of(step, attempt)) for step in range(first, last + 1)]


@pytest.mark.parametrize("store", ["", "sqlite:///{}/mlflow.db"])
def test_each_step_is_there_once_with_the_value_that_was_committed(folder: Path, store: str) -> None:
    """The first process dies after it has sent its commit, of which W&B has written nothing yet, and two more steps."""
    uri = store.format(folder)
    for arguments in (("1", "4", "1", "dies"), ("5", "8", "2", "closes")):
        command = (sys.executable, "-m", "tests.support.trackers", str(folder), *arguments, uri)
        dies = arguments[-1] == "dies"
        assert subprocess.run(command, timeout=240).returncode == (9 if dies else 0)
    expected = [*_losses(1, 4), *_losses(5, 8, attempt=2)]
    mlflow = read_mlflow(uri or str(folder / "mlflow"))
    assert (mlflow.losses, mlflow.status) == (expected, "FINISHED")
    assert (mlflow.more["rate"], mlflow.more["loss _train_"]) == ("0.1", "mse")
    assert mlflow.more["elastic_train.checkpoint"] == str(folder / "checkpoint")
    assert (mlflow.more["mlflow.runName"], mlflow.more["elastic_train.flow_run_id"]) == ("mnist", RUN.flow_run_id)
    offline = read_wandb(folder / "wandb")
    assert (offline.losses, offline.status) == (expected, "FINISHED")
    assert offline.more == {"processes": 2, "references": [f"file://{folder}/checkpoint/points.npz"]}
    tensorboard = read_tensorboard(folder / "tensorboard")
    assert tensorboard.losses == [(step, np.float32(loss)) for step, loss in expected]
    assert tensorboard.more == {"name": "mnist-aaaaaaaa"}


def test_a_tracker_that_is_away_gets_later_what_it_missed(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    tracker = loop.track(mlflow={"tracking_uri": uri})
    for step, loss in _losses(1, 3):
        tracker.log(step, {"loss": loss})
    wait_for(lambda: caplog.records, 60, "the warning of an outage")
    server = MlflowServer(folder, port)
    wait_for(lambda: len(caplog.records) > 1, 60, "the end of the outage")
    server.close()
    tracker.log(4, {"loss": loss_of(4, 1)})
    wait_for(lambda: len(caplog.records) > 2, 60, "another outage")
    server = MlflowServer(folder, port)
    tracker.close()
    found = read_mlflow(uri)
    server.close()
    assert (found.losses, found.status) == (_losses(1, 4), "FINISHED")
    messages = [record.getMessage().split(":")[0] for record in caplog.records]
    again = "mlflow answers again, and has got what it had missed"
    assert messages == ["mlflow does not answer", again] * 2


def test_what_a_tracker_has_not_got_in_the_end_is_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracker_module, "_CLOSE_SECONDS", 0.5)
    tracker = loop.track(mlflow={"tracking_uri": f"http://127.0.0.1:{free_port()}"})
    tracker.log(1, {"loss": 1.0, "rate": 0.1})
    tracker.log(2, {"loss": 1.0})
    tracker.close()
    assert "mlflow did not answer for 0.5 s: it lacks 2 steps" in caplog.text


def test_a_session_sends_the_metrics_of_its_steps(folder: Path) -> None:
    tracker = loop.track(tensorboard={"log_dir": str(folder)})
    weights = torch.ones(1, requires_grad=True)
    state = loop.ArrayState(weights=np.zeros(1))
    with loop.session(state, steps=3, global_batch=2, tracker=tracker) as session:
        for _ in session.batches(np.arange(6)):
            session.step({"loss": (weights * session.done).sum(), "per class": np.ones(3)})
    assert read_tensorboard(folder).losses == [(1, 0.0), (2, 1.0), (3, 2.0)]


def test_more_points_than_mlflow_takes_at_once_arrive(folder: Path) -> None:
    tracker = loop.track(mlflow={"tracking_uri": str(folder)})
    for step, loss in _losses(1, _METRICS_OF_A_CALL + 1):
        tracker.log(step, {"loss": loss})
    tracker.close()
    assert read_mlflow(str(folder)).losses == _losses(1, _METRICS_OF_A_CALL + 1)


def test_sent_points_leave_the_checkpoints_after_a_minute(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = loop.track(tensorboard={"log_dir": str(folder)})
    tracker.committed = 2
    for step in (1, 2, 3):
        tracker.log(step, {"loss": 1.0})
    wait_for(lambda: tracker._sent == {"tensorboard": 2}, 30, "two steps to be sent")
    assert tracker.points()["tracked_points"][:, 0].tolist() == [1, 2, 3]
    monkeypatch.setattr(tracker_module, "_KEEP_SECONDS", 0.0)
    assert tracker.points()["tracked_points"][:, 0].tolist() == [2, 3]
    tracker.close()


def test_the_flow_process_marks_runs_of_a_training_that_failed(folder: Path) -> None:
    command = (sys.executable, "-m", "tests.support.trackers", str(folder), "1", "2", "1", "fails", "")
    assert subprocess.check_output(command, timeout=240) == b"", "no warning"
    assert [read_mlflow(str(folder / "mlflow")).status, read_wandb(folder / "wandb").status] == ["FAILED"] * 2
    assert read_mlflow(str(folder / "mlflow")).losses == read_wandb(folder / "wandb").losses == _losses(1, 2)


def test_a_run_that_cannot_be_marked_is_one_warning() -> None:
    warnings: list[str] = []
    away = TrackedRun("mlflow", IDS, {"tracking_uri": f"http://127.0.0.1:{free_port()}"}, "http://link")
    mark_ended(away, "FAILED", 60, warnings.append)
    assert len(warnings) == 1
    assert warnings[0].startswith("The run in mlflow could not be marked as FAILED within 60 s. Last output: mlflow.ex")


@pytest.mark.parametrize("kind", ["mlflow", "wandb"])
def test_a_mark_ends_in_time_though_its_tracker_does_not_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """W&B would wait for 90 s, also at the exit of its process."""
    warnings: list[str] = []
    before = psutil.Process().children(recursive=True)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("WANDB_BASE_URL", url)
        monkeypatch.setenv("WANDB_API_KEY", 40 * "0")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "90")
        options = {"mlflow": {"tracking_uri": url}, "wandb": {"dir": str(folder), "mode": "online"}}
        run = TrackedRun(kind, IDS, options[kind], "http://link")
        marking = start_thread(mark_ended, run, "KILLED", 8, warnings.append)
        marking.join(60)
    assert [warning.partition(". Last output")[0] for warning in warnings] == [
        f"The run in {kind} could not be marked as KILLED within 8 s"
    ]
    wait_for(lambda: psutil.Process().children(recursive=True) == before, 20, "the end of the processes that mark")


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"tensorboard": {"log_dir": "runs"}}, ValueError, "log_dir of tensorboard must be an absolute path"),
        ({"mlflow": {"tracking_uri": "https://a:b@host"}}, ValueError, "or a URL without credentials"),
        ({"mlflow": {"tracking_uri": "https://token@host"}}, ValueError, "or a URL without credentials"),
        ({"mlflow": {"tracking_uri": "postgresql://db/m?password=p"}}, ValueError, "or a URL without credentials"),
        ({"mlflow": {"uri": "/runs"}}, TypeError, "tracking_uri"),
        ({"wandb": {"dir": "/w", "settings": {"api_key": "x"}}}, TypeError, "wandb: leave out the option settings"),
        ({"wandb": {"dir": "/w", "id": "mine"}}, TypeError, "option id. .* sets id, resume, reinit itself"),
    ],
)
def test_wrong_options_are_refused(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        loop.track(**given)
