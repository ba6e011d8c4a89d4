"""A session under plain Ray Train, without a flow: the same training whatever number of workers share it or die."""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.clusters import RayHead
from tests.support.processes import ROOT, call, read_ledger, steps_of
from tests.support.session_loops import problems, same_weights
from tests.support.trackers import options, read_mlflow, read_tensorboard, read_wandb

Train = Callable[..., list[dict[str, Any]]]
STEPS, LENGTH, BATCH = 104, 200, 16  # 8 epochs, whose last step has 8 samples


@pytest.fixture
def train(head: RayHead, tmp_path: Path) -> Train:
    """Trains with loops of the tests, one after the other, and returns their configurations with their errors."""

    def run(**trainings: dict[str, Any]) -> list[dict[str, Any]]:
        common = {"loop": "torch_loop", "storage": str(tmp_path)}
        config = {"steps": STEPS, "length": LENGTH, "global_batch": BATCH}
        for name, training in trainings.items():
            files = {"ledger": str(tmp_path / f"{name}.jsonl"), "weights": str(tmp_path / f"{name}.npz")}
            own = {**config, **files, **training.get("config", {})}
            trainings[name] = {**common, **training, "name": name, "config": own}
        file = tmp_path / "trainings.json"
        file.write_text(json.dumps([*trainings.values()]))
        # At Ray's own 2 s, each report would take that.
        quick = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1"}
        environment = {**os.environ, **head.joining, **quick, "PYTHONPATH": str(ROOT)}
        call(sys.executable, "-m", "tests.support.plain_trainer", head.address, file, timeout=300, env=environment)
        errors = json.loads(file.with_suffix(".errors").read_text())
        return [{**one["config"], "error": error} for one, error in zip(trainings.values(), errors, strict=True)]

    return run


@pytest.mark.full
def test_killed_workers_change_no_bit_of_the_weights_dropout_and_shuffling_included(train: Train) -> None:
    config = {"dropout": 0.2, "micro_batch": 5}
    disturbed = {"config": {**config, "dies": [[33, 1], [60, 0]]}, "max_failures": 2}
    whole, killed = train(whole={"config": config}, killed=disturbed)
    assert len({line["group"] for line in read_ledger(killed["ledger"])}) == 3
    assert problems(killed["ledger"], STEPS, LENGTH) == []
    assert len(steps_of(killed["ledger"])) > STEPS, "something was done again"
    assert same_weights(killed["weights"], whole["weights"])


def test_trackers_get_each_step_once_though_a_worker_was_killed(train: Train, tmp_path: Path) -> None:
    """Without commits that are known, steps are sent at once, and those that are done again keep their first value."""
    trackers = options(tmp_path)
    config = {"steps": 45, "save_every": 20, "sleep": 0.2, "trackers": trackers, "dies": [[39, 0]]}
    [result] = train(tracked={"loop": "tracked_loop", "config": config, "max_failures": 1})
    losses: dict[int, set[float]] = {}
    for line in read_ledger(result["ledger"]):
        losses.setdefault(line["step"], set()).add(line["loss"])
    assert len(losses[39]) == 2, "steps were done again"
    mlflow = read_mlflow(trackers["mlflow"]["tracking_uri"])
    wandb = read_wandb(Path(trackers["wandb"]["dir"]))
    tensorboard = read_tensorboard(Path(trackers["tensorboard"]["log_dir"]))
    assert (result["error"], mlflow.status, wandb.status) == ("", "FINISHED", "FINISHED")
    for tracked in (mlflow, wandb, tensorboard):
        assert [step for step, _ in tracked.losses] == [*range(1, 46)]
    assert all(loss in losses[step] for step, loss in [*mlflow.losses, *wandb.losses])


def test_long_uploads_of_other_ranks_have_no_part_in_the_time_limit_of_trackers(train: Train, tmp_path: Path) -> None:
    trackers = {"mlflow": options(tmp_path)["mlflow"]}
    slow = {"upload_seconds": 10.0, "close_seconds": 5.0}
    config = {"steps": 20, "save_every": 20, "sleep": 0.1, "trackers": trackers, **slow}
    [result] = train(slow={"loop": "tracked_loop", "config": config})
    mlflow = read_mlflow(trackers["mlflow"]["tracking_uri"])
    assert (result["error"], mlflow.status, len(mlflow.losses)) == ("", "FINISHED", 20)
    assert Path(result["ledger"] + ".unfinished").read_text() == ""


def test_a_loop_that_uses_its_session_wrongly_is_told_what_to_change(train: Train) -> None:
    [result] = train(misused={"loop": "misusing_loop"})
    found: dict[str, list[str]] = {}
    for line in sorted(read_ledger(result["ledger"]), key=lambda one: int(one["rank"])):
        found.setdefault(line["what"], []).append(line["found"])
    assert found["an early end on all ranks"] == ["nothing"] * 2
    assert "written with SampleOrder(length=20, " in found["another length"][0]
    assert "this is SampleOrder(length=21, " in found["another length"][1]
    assert "or train under a new run_name" in found["another order"][0]
    assert found["all as before"] == ["nothing"] * 2
    assert found["a second session"][0].startswith("LoopError: this loop already had a session")
    assert "and choose the phase by session.done" in found["a second session"][1]
    assert re.search("rank 1 has done 7 steps, and rank 0 [89]: all must call", result["error"])
