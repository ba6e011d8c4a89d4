"""A session under plain Ray Train, without a flow: the same training whatever number of workers share it or die."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.clusters import RayHead
from tests.support.processes import ROOT, call, read_ledger, steps_of
from tests.support.session_loops import problems, same_weights, torch_loop, what_counts

Train = Callable[..., dict[str, Any]]
STEPS, LENGTH, BATCH = 208, 200, 16  # 16 epochs, whose last step has 8 samples


@pytest.fixture
def train(head: RayHead, tmp_path: Path) -> Train:
    """Trains with a loop of the tests, and returns its configuration with the result."""

    def run(name: str, loop: str = "torch_loop", framework: str = "torch", **more: Any) -> dict[str, Any]:
        files = {kind: str(tmp_path / f"{name}.{kind}") for kind in ("ledger", "npz")}
        config = {"steps": STEPS, "length": LENGTH, "global_batch": BATCH, "ledger": files["ledger"]}
        config |= {"weights": files["npz"], **more.pop("config", {})}
        training = {
            "name": name,
            "loop": loop,
            "framework": framework,
            "config": config,
            "storage": str(tmp_path),
            **more,
        }
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps([training]))
        # At Ray's own 2 s, each report would take that.
        quick = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1"}
        environment = {**os.environ, **head.joining, **quick, "PYTHONPATH": str(ROOT)}
        call(sys.executable, "-m", "tests.support.plain_trainer", head.address, file, timeout=300, env=environment)
        [result] = json.loads(file.with_suffix(".results").read_text())
        return {**config, **result}

    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights that one worker trains, outside of Ray."""
    weights = tmp_path_factory.mktemp("undisturbed") / "weights.npz"
    torch_loop({"steps": STEPS, "length": LENGTH, "global_batch": BATCH, "weights": str(weights)})
    return weights


@pytest.mark.full
def test_any_number_of_workers_sees_the_same_samples_with_the_same_losses(train: Train, undisturbed: Path) -> None:
    found = [train(f"of-{workers}", workers=workers) for workers in (1, 2, 3, 4)]
    losses = [[lines[0]["loss"] for lines in what_counts(one["ledger"]).values()] for one in found]
    for one, own in zip(found, losses, strict=True):
        assert problems(one["ledger"], STEPS, LENGTH) == []
        assert np.allclose(own, losses[0], rtol=1e-5, atol=0)
        assert same_weights(one["weights"], undisturbed, relative=1e-5)
    assert np.mean(losses[0][-13:]) < 0.95 * np.mean(losses[0][:13]), "it learns"


def test_killed_workers_change_no_bit_of_the_weights_dropout_and_shuffling_included(train: Train) -> None:
    config = {"dropout": 0.2, "micro_batch": 5}
    whole = train("whole", workers=2, config=config)
    killed = train("killed", workers=2, config={**config, "dies": [[33, 1], [118, 0]]}, max_failures=2)
    assert len({line["group"] for line in read_ledger(killed["ledger"])}) == 3
    assert problems(killed["ledger"], STEPS, LENGTH) == []
    assert len(steps_of(killed["ledger"])) > STEPS, "something was done again"
    assert same_weights(killed["weights"], whole["weights"])


@pytest.mark.full
def test_a_loop_in_jax_that_is_killed_ends_with_the_same_weights(train: Train) -> None:
    config = {"global_batch": 20, "steps": 200}
    whole = train("jax", "jax_loop", "jax", config=config)
    killed = train("killed-jax", "jax_loop", "jax", config={**config, "dies": [[33, 0]]}, max_failures=1)
    assert len({line["group"] for line in read_ledger(killed["ledger"])}) == 2
    assert problems(killed["ledger"], killed["steps"], LENGTH) == []
    assert same_weights(killed["weights"], whole["weights"])


def test_a_loop_that_uses_its_session_wrongly_is_told_what_to_change(train: Train) -> None:
    result = train("misused", "misusing_loop", workers=2)
    found: dict[str, list[str]] = {}
    for line in sorted(read_ledger(result["ledger"]), key=lambda one: int(one["rank"])):
        found.setdefault(line["what"], []).append(line["found"])
    assert found["too small a batch"][0].startswith("ValueError: global_batch=1 is below the 2 workers")
    assert found["an early end on all ranks"] == ["nothing"] * 2
    assert "written with SampleOrder(length=20, " in found["another length"][0]
    assert "this is SampleOrder(length=21, " in found["another length"][1]
    assert "or train under a new run_name" in found["another order"][0]
    assert found["all as before"] == ["nothing"] * 2
    assert found["a second session"][0].startswith("LoopError: this loop already had a session")
    assert found["a second session"][1].endswith(
        "give one session the steps of all phases, and choose the phase by session.done"
    )
    assert re.search("rank 1 has done 7 steps, and rank 0 [89]: all must call", result["error"])
