"""What Ray Train does, of what its own tests name, by Ray Train alone and here. Where it differs, the table says why.

Both run the trainings of `tests.support.ray_trainings`, on one cluster.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prefect import flow
from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from ray.train import ValidationConfig

from prefect_elastic_train import (
    CheckpointPolicy,
    ElasticScaling,
    FailureBudget,
    RayCluster,
    TrainingResult,
    elastic_train,
)
from tests.support.clusters import RayHead
from tests.support.processes import call
from tests.support.ray_trainings import (
    TRAININGS,
    WORKERS,
    Training,
    files_of,
    own_name,
    read_facts,
    validate,
)

pytestmark = pytest.mark.full

SECONDS = 600
RANKS = ["rank-0", "rank-1"]
SHARED = [*RANKS, "shared"]


class Differs(NamedTuple):
    """A fact with Ray Train alone and here."""

    ray: Any
    here: Any


#: What the trainings find, with Ray Train alone and here.
FACTS: dict[str, dict[str, Any]] = {
    "reports": {
        # The loop and its context.
        "ranks": [[2, 2, 0, 0, 0], [2, 2, 1, 1, 0]],
        "name": ["reports"] * 2,
        # Nobody reads it, and it may be a model or a lock.
        "returned": Differs({"returned": 0}, None),
        # Reporting. No folder is used twice, so that nothing that a commit needs is ever written over.
        "checkpoint after metrics": [None, None],
        "checkpoint after by-0": ["by-0", None],
        "folder of by-0": Differs(["by-0", ""], ["by-0.a0001.g01.r0002", ""]),
        "checkpoint after by-both": ["by-both"] * 2,
        "files of by-1": ["rank-1", "shared"],
        "files of by-both": SHARED,
        "files of twice": Differs(["file-0", "file-1"], ["file-1"]),
        "metrics of by-1": [{"report": "by-1", "rank": 0}] * 2,
        "local directory is kept": [True, True],
        "local directory is deleted": [False, False],
        "default name": ["checkpoint_20"] * 2,
        "metadata": [{"made by": "rank 0"}] * 2,
        # A tensor of one number is that number.
        "tensor": Differs(["ValueError"] * 2, ["", ""]),
        # Upload modes.
        "deleted in the background": [False, False],
        "order of uploads": [["slow", "after-slow"]] * 2,
        "files of own-upload": ["rank-0", "shared"],
        "files of two-modes": SHARED,
        "checkpoint after placed": ["placed"] * 2,
        "files of placed": RANKS,
        # Validation.
        "validation without a checkpoint": ["ValueError"] * 2,
        "validations": [[3, 30, None]] * 2,
        "status of validated": ["VALIDATED"] * 2,
        "status of not-valid": ["VALIDATION_FAILED"] * 2,
        "status of by-0": ["COMMITTED"] * 2,
    },
    # What is kept, and restarts.
    "kept": {
        "starts": [2, 2],
        "starts at 3": [[3, 5]] * 2,
        "kept at 1": [[1, 5]] * 2,
        "kept at 2": [[3, 5]] * 2,
        "files of step-0": None,
        "files of step-1": ["step"],
        "checkpoint": "step-3",
        "best": ["step-3", "step-1"],
        "metrics": {"score": "4", "step": "3"},
    },
    # Ray says that a health check failed, and we what was raised.
    "unpicklable": {"words": Differs("", "the words of the loop")},
    "failing upload": {"words": "no such bucket"},
    # Numbers of numpy are numbers, also with a checkpoint.
    "numpy": {"error": Differs("ControllerError", None), "metrics": Differs(None, {"loss": "0.5"})},
}


def _train(name: str, training: Training, folder: Path, cluster: RayCluster) -> dict[str, Any]:
    facts = folder / f"{name}.jsonl"

    @flow
    def trains() -> TrainingResult:
        return elastic_train(
            training.loop,
            train_loop_config={"facts": str(facts)},
            framework="none",
            scaling=ElasticScaling(min_workers=WORKERS, max_workers=WORKERS),
            failures=FailureBudget(driver_restarts=0, max_failures=training.max_failures),
            checkpoints=CheckpointPolicy(keep=training.keep, score_attribute=training.score or ""),
            validation_config=ValidationConfig(validate, ray_remote_kwargs={"num_cpus": 0}),
            storage=folder,
            run_name=name,
            cluster=cluster,
        )

    state = trains(return_state=True)
    result = state.result(raise_on_failure=False)
    if state.is_completed():
        end = {
            "metrics": {name: repr(value) for name, value in result.metrics.items()},
            "checkpoint": result.checkpoint_uri and own_name(result.checkpoint_uri),
            "best": [own_name(checkpoint.uri) for checkpoint in result.best_checkpoints],
        }
    else:
        end = {"error": str(result.outcome), "text": str(result)}
    return {**read_facts(facts), **end}


def _derived(facts: dict[str, Any], files: dict[str, list[str]]) -> dict[str, Any]:
    """Return what follows from the facts of a training and from the files of its checkpoints."""
    more: dict[str, Any] = {f"files of {checkpoint}": names for checkpoint, names in files.items()}
    for checkpoint in (facts.get("status") or [{}])[0]:
        more[f"status of {checkpoint}"] = [status[checkpoint] for status in facts["status"]]
    words = ("the words of the loop", "no such bucket")
    return {**more, "words": next((one for one in words if one in facts.get("text", "")), "")}


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, api_url: str, head: RayHead, joined: RayCluster
) -> list[dict[str, Any]]:
    """The facts of the trainings: with Ray Train alone, and with this package."""
    alone, here = (tmp_path_factory.mktemp(name) for name in ("ray", "here"))
    # Ray Train handles reports at its health checks, by default every 2 s.
    own = {"RAY_ADDRESS": head.address, "RAY_TRAIN_V2_ENABLED": "1", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2"}
    command = (sys.executable, "-m", "tests.support.ray_trainings", alone)
    call(*command, timeout=SECONDS, env={**os.environ, **head.joining, **own})
    with temporary_settings({PREFECT_API_URL: api_url, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        ours = {name: _train(name, training, here, joined) for name, training in TRAININGS.items()}
    sides = {alone: json.loads((alone / "facts.json").read_text()), here: ours}
    return [
        {name: {**facts, **_derived(facts, files_of(folder / name))} for name, facts in ends.items()}
        for folder, ends in sides.items()
    ]


@pytest.mark.parametrize(("training", "fact"), [(name, fact) for name, facts in FACTS.items() for fact in facts])
def test_what_ray_train_does_is_done_here_or_the_table_says_why_not(
    found: list[dict[str, Any]], training: str, fact: str
) -> None:
    expected = FACTS[training][fact]
    expected = expected if isinstance(expected, Differs) else Differs(expected, expected)
    assert [facts[training].get(fact) for facts in found] == [*expected]
