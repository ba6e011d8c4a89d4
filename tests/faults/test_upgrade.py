"""Runs that other versions began: recorded run directories of this package, and killed runs of another Ray."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from prefect_elastic_train.runs.run_directory import RunDirectory
from prefect_elastic_train.runs.sample_check import check_samples
from prefect_elastic_train.storage.store import LocalRunStore
from tests.support.processes import Start, attempts, commits, repeated, steps_of, wait_for
from tests.support.recorded_run import CONFIG, RECORDED, RUN_NAME, array_training
from tests.support.session_loops import array_loop, same_weights

OTHER = "UPGRADE_FROM_PYTHON"


def _assert_is_undisturbed(run: Path, training: dict[str, Any]) -> None:
    weights = Path(training["config"]["weights"])
    undisturbed = weights.with_name("undisturbed.npz")
    array_loop({**CONFIG, "weights": str(undisturbed)})
    assert same_weights(weights, undisturbed), "bit for bit"
    check = check_samples(RunDirectory(LocalRunStore(str(run))))
    assert (check.steps, check.wrong, check.exact) == (CONFIG["steps"], [], True)


@pytest.mark.parametrize("recorded", sorted(RECORDED.iterdir()), ids=lambda folder: folder.name)
def test_a_run_that_an_earlier_version_began_goes_on_where_it_ended(
    start: Start, tmp_path: Path, recorded: Path
) -> None:
    run = tmp_path / "runs" / RUN_NAME
    shutil.copytree(recorded, run)
    newest = commits(run)[-1]["snapshot"]["latest_checkpoint_result"]["metrics"]["step"]
    training = array_training(tmp_path, workers=1)
    flow = start(**training, resume=True)
    assert flow.completed(120)["attempts"] == 2
    assert steps_of(training["config"]["ledger"]) == list(range(newest + 1, CONFIG["steps"] + 1))
    _assert_is_undisturbed(run, training)


@pytest.mark.skipif(OTHER not in os.environ, reason="needs an environment with another Ray, as `make matrix` has")
def test_a_run_that_is_killed_with_one_version_of_ray_goes_on_with_another(start: Start, tmp_path: Path) -> None:
    training = array_training(tmp_path, workers=2)
    old = start("old", python=os.environ[OTHER], **training)
    old.wait_for_commits(3)
    driver = old.living_driver()
    old.process.kill()
    driver.kill()
    wait_for(lambda: not old.marked(), 60, "nothing to be left of it")
    new = start("new", **training, resume=True)
    assert new.completed(240)["attempts"] == 2
    run = tmp_path / "runs" / RUN_NAME
    first, second = (attempt["versions"]["ray"] for attempt in attempts(run))
    assert first != second
    assert repeated(steps_of(training["config"]["ledger"])) <= CONFIG["save_every"]
    _assert_is_undisturbed(run, training)
