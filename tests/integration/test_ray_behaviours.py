"""What Ray Train does, of what its own tests name, by Ray Train alone and here. Where it differs, the row says why.

Both run the trainings of `tests.support.ray_trainings`, on one cluster.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prefect import flow

from prefect_elastic_train import (
    AttemptFailedError,
    CheckpointPolicy,
    ElasticScaling,
    FailureBudget,
    LocalStorage,
    RayCluster,
    TrainingResult,
    elastic_train,
)
from tests.support.clusters import RayHead
from tests.support.processes import spawn
from tests.support.ray_trainings import (
    TRAININGS,
    WORKERS,
    Training,
    files_of,
    own_name,
    read_facts,
    validate,
)

SECONDS = 600
FAILING = ("raises", "unpicklable", "failing upload", "numpy")
RANKS = ["rank-0", "rank-1"]
SHARED = [*RANKS, "shared"]


class Row(NamedTuple):
    """A behaviour: a fact of a training with Ray Train alone and, where they differ, here and why."""

    training: str
    fact: str
    ray: Any
    here: Any = ...
    why: str = ""


OWN_FOLDER = "no folder is used twice, so that nothing that a commit needs is ever written over"
ROWS = [
    # The loop and its context.
    Row("reports", "config", [7, 7]),
    Row("reports", "ranks", [[2, 2, 0, 0, 0], [2, 2, 1, 1, 0]]),
    Row("reports", "name", ["reports"] * 2),
    Row("reports", "path of the run", ["reports"] * 2),
    Row("reports", "working directory", ["reports"] * 2),
    Row("reports", "no metadata", ["DeprecationWarning"] * 2),
    Row("reports", "no trial", ["DeprecationWarning"] * 2),
    Row("reports", "resumes from", [None, None]),
    Row("reports", "preemption", [None, None]),
    Row("reports", "reported before", [0, 0]),
    Row("reports", "broadcast", [{"from": 0}] * 2),
    Row("reports", "large broadcast", [100_000] * 2),
    Row("reports", "barrier", [True, True]),
    Row("reports", "returned", {"returned": 0}, None, "nobody reads it, and it may be a model or a lock"),
    # Reporting.
    Row("reports", "checkpoint after metrics", [None, None]),
    Row("reports", "checkpoint after by-0", ["by-0", None]),
    Row("reports", "folder of by-0", ["by-0", ""], ["by-0.a0001.g01.r0002", ""], OWN_FOLDER),
    Row("reports", "checkpoint after by-both", ["by-both"] * 2),
    Row("reports", "files of by-0", ["rank-0", "shared"]),
    Row("reports", "files of by-1", ["rank-1", "shared"]),
    Row("reports", "files of by-both", SHARED),
    Row("reports", "files of twice", ["file-0", "file-1"], ["file-1"], OWN_FOLDER),
    Row("reports", "files of nested", [f"part/of/{rank}" for rank in RANKS]),
    Row("reports", "metrics of by-1", [{"report": "by-1", "rank": 0}] * 2),
    Row("reports", "local directory is kept", [True, True]),
    Row("reports", "local directory is deleted", [False, False]),
    Row("reports", "default name", ["checkpoint_20"] * 2),
    Row("reports", "metadata", [{"made by": "rank 0"}] * 2),
    Row("reports", "nested metrics", [{"list": [1, 2.5], "none": None, "text": "é"}] * 2),
    Row("reports", "tensor", ["ValueError"] * 2, ["", ""], "a tensor of one number is that number"),
    Row("numpy", "error", "ControllerError", None, "numbers of numpy are numbers, also with a checkpoint"),
    Row("numpy", "metrics", None, {"loss": "0.5"}, "the same"),
    # Upload modes.
    Row("reports", "deleted in the background", [False, False]),
    Row("reports", "kept in the background", [True, True]),
    Row("reports", "order of uploads", [["slow", "after-slow"]] * 2),
    Row("reports", "files of slow", ["rank-0", "shared"]),
    Row("reports", "files of own-upload", ["rank-0", "shared"]),
    Row("reports", "files of two-modes", SHARED),
    Row("reports", "checkpoint after placed", ["placed"] * 2),
    Row("reports", "files of placed", RANKS),
    Row("raises", "upload without a checkpoint", ["ValueError"] * 2),
    Row("failing upload", "words", "no such bucket"),
    # Validation.
    Row("reports", "validation without a checkpoint", ["ValueError"] * 2),
    Row("reports", "validations", [[3, 30, None]] * 2),
    Row("reports", "status of validated", ["VALIDATED"] * 2),
    Row("reports", "status of not-valid", ["VALIDATION_FAILED"] * 2),
    Row("reports", "status of by-0", ["COMMITTED"] * 2),
    # What is kept, and restarts.
    Row("kept", "starts", [2, 2]),
    Row("kept", "starts at 3", [[3, 5]] * 2),
    Row("kept", "kept at 1", [[1, 5]] * 2),
    Row("kept", "kept at 2", [[3, 5]] * 2),
    Row("kept", "files of step-0", None),
    Row("kept", "files of step-1", ["step"]),
    Row("kept", "checkpoint", "step-3"),
    Row("kept", "best", ["step-3", "step-1"]),
    Row("kept", "metrics", {"score": "4", "step": "3"}),
    Row("raises", "starts", [2, 2]),
    Row("raises", "words", "the words of the loop"),
    Row(
        "unpicklable",
        "words",
        "",
        "the words of the loop",
        "Ray says that a health check failed, and we what was raised",
    ),
    # Preemption.
    Row("reclaimed", "info", [[0, 1]] * 2),
    Row("reclaimed", "starts", [2, 2]),
    Row("reclaimed", "resumes from", ["step-0"] * 2),
    Row("reclaimed", "checkpoint", "step-1"),
]


def _id(row: Row) -> str:
    return f"{row.training}-{row.fact}".replace(" ", "_")


def _train(name: str, training: Training, folder: Path, cluster: RayCluster) -> dict[str, Any]:
    facts = folder / f"{name}.jsonl"

    @flow
    def trains() -> TrainingResult:
        from ray.train import ValidationConfig

        return elastic_train(
            training.loop,
            train_loop_config={"facts": str(facts), "value": 7},
            framework="none",
            scaling=ElasticScaling(min_workers=WORKERS, max_workers=WORKERS),
            failures=FailureBudget(
                max_failures=training.max_failures,
                max_preemption_failures=training.max_preemption_failures,
                driver_restarts=0,
            ),
            checkpoints=CheckpointPolicy(keep=training.keep, score_attribute=training.score or ""),
            validation_config=ValidationConfig(validate, ray_remote_kwargs={"num_cpus": 0}),
            storage=LocalStorage(path=str(folder)),
            run_name=name,
            cluster=cluster,
        )

    end: dict[str, Any] = {}
    state = trains(return_state=True)
    if state.is_completed():
        result = state.result()
        end = {
            "metrics": {name: repr(value) for name, value in result.metrics.items()},
            "checkpoint": result.checkpoint_uri and own_name(result.checkpoint_uri),
            "best": [own_name(checkpoint.uri) for checkpoint in result.best_checkpoints],
            "path": result.run_uri,
            "rows": len(result.metrics_dataframe()),
        }
    else:
        error = state.result(raise_on_failure=False)
        assert isinstance(error, AttemptFailedError), error
        end = {"error": str(error.outcome), "text": str(error), "cause": repr(error.__cause__)}
    return {**read_facts(facts), **end}


def _derived(facts: dict[str, Any], files: dict[str, list[str]]) -> dict[str, Any]:
    """Return what follows from the facts of a training and from the files of its checkpoints."""
    more: dict[str, Any] = {f"files of {checkpoint}": names for checkpoint, names in files.items()}
    for checkpoint in (facts.get("status") or [{}])[0]:
        more[f"status of {checkpoint}"] = [status[checkpoint] for status in facts["status"]]
    words = ("the words of the loop", "no such bucket")
    return {**more, "words": next((one for one in words if one in facts.get("text", "")), "")}


def _facts(names: Sequence[str], factory: pytest.TempPathFactory, api_url: str) -> Iterator[dict[str, Any]]:
    """Yield the facts of the named trainings: with Ray Train alone (`ray`) and with this package (`here`)."""
    from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    alone, here = factory.mktemp("ray"), factory.mktemp("here")
    head = RayHead(cpus=4)
    try:
        # Ray Train handles reports at its health checks, by default every 2 s.
        own = {"RAY_ADDRESS": head.address, "RAY_TRAIN_V2_ENABLED": "1", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2"}
        environment = {**os.environ, **head.joining, **own}
        command = (sys.executable, "-m", "tests.support.ray_trainings", alone, *names)
        process = spawn(*command, log=alone / "log", env=environment)
        try:
            assert process.wait(SECONDS) == 0, (alone / "log").read_text()[-6000:]
        finally:
            process.kill()
            process.wait(10)
        with temporary_settings({PREFECT_API_URL: api_url, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
            found = {name: _train(name, TRAININGS[name], here, RayCluster(**head.block)) for name in names}
        by_ray = json.loads((alone / "facts.json").read_text())
        for folder, ends in ((alone, by_ray), (here, found)):
            for name in names:
                ends[name] |= _derived(ends[name], files_of(folder / name))
        yield {"ray": by_ray, "here": found}
    finally:
        head.close()


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory, api_url: str) -> Iterator[dict[str, Any]]:
    """Return the facts of the trainings that complete."""
    yield from _facts([name for name in TRAININGS if name not in FAILING], tmp_path_factory, api_url)


@pytest.fixture(scope="module")
def facts_of_failures(tmp_path_factory: pytest.TempPathFactory, api_url: str) -> Iterator[dict[str, Any]]:
    """Return the facts of the trainings that fail with Ray Train alone."""
    yield from _facts(FAILING, tmp_path_factory, api_url)


@pytest.mark.parametrize("row", [row for row in ROWS if row.training not in FAILING], ids=_id)
def test_what_ray_train_does_is_done_here_or_the_row_says_why_not(facts: dict[str, Any], row: Row) -> None:
    _compare(facts, row)


@pytest.mark.full
@pytest.mark.parametrize("row", [row for row in ROWS if row.training in FAILING], ids=_id)
def test_a_training_fails_as_with_ray_train_alone_or_the_row_gives_the_reason(
    facts_of_failures: dict[str, Any], row: Row
) -> None:
    _compare(facts_of_failures, row)


def _compare(facts: dict[str, Any], row: Row) -> None:
    assert facts["ray"][row.training].get(row.fact) == row.ray
    assert facts["here"][row.training].get(row.fact) == (row.ray if row.here is ... else row.here)
