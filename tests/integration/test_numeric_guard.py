"""The numeric guard in trainings with real workers."""

from pathlib import Path
from typing import Any

import pytest
from prefect import flow

from prefect_elastic_train import ElasticScaling, RayCluster, TrainingResult, elastic_train, loop
from prefect_elastic_train.runs.run_directory import RunDirectory
from prefect_elastic_train.runs.sample_check import check_samples
from prefect_elastic_train.storage.store import LocalRunStore
from tests.support.session_loops import same_weights, torch_loop

STEPS, BATCH = 60, 20
PLAN = {"steps": STEPS, "length": 200, "global_batch": BATCH, "dropout": 0.0}


def _train(folder: Path, joined: RayCluster, **config: Any) -> Any:
    """Train on two workers in a flow, and return the result or the error."""

    @flow(name="guarded")
    def trains() -> TrainingResult:
        return elastic_train(
            "tests.support.session_loops:torch_loop",
            train_loop_config={**PLAN, "ledger": str(folder / "ledger"), "weights": str(folder / "w.npz"), **config},
            run_name="guarded",
            scaling=ElasticScaling(min_workers=2, max_workers=2),
            storage=folder,
            cluster=joined,
        )

    return trains(return_state=True).result(raise_on_failure=False)


@pytest.mark.usefixtures("api")
def test_a_batch_whose_loss_is_bad_is_skipped_after_a_rollback_and_all_others_count_once(
    tmp_path: Path, joined: RayCluster
) -> None:
    """A loss of NaN breaks the weights of both ranks; a spike is seen by rank 0 alone."""
    result = _train(tmp_path, joined, guard={"spike": 8.0}, bad={25: "nan", 50: "1e6"})
    assert (result.worker_failures, result.attempts) == (2, 1)
    check = check_samples(RunDirectory(LocalRunStore(str(tmp_path / "guarded"))))
    assert check is not None
    assert (check.skipped, check.wrong, check.exact) == ([25, 50], [], True)
    assert check.samples == (STEPS - 2) * BATCH
    assert check.message.endswith("by index, without those of the skipped steps 25, 50")
    undisturbed = str(tmp_path / "undisturbed.npz")
    with loop.use_run_context(loop.RunContext("", "", 1, "", "", skipped_steps=(25, 50))):
        torch_loop({**PLAN, "weights": undisturbed})
    assert same_weights(tmp_path / "w.npz", undisturbed, relative=1e-5)


@pytest.mark.full
@pytest.mark.usefixtures("api")
def test_a_guard_that_raises_ends_the_training_without_a_restart(tmp_path: Path, joined: RayCluster) -> None:
    error = _train(tmp_path, joined, guard={"nan": "raise"}, bad={25: "nan"})
    assert "user_error: the guard of the session has found a problem: " in str(error)
    assert "NumericError: step 25: loss is nan (guard: raise)" in str(error)
