"""A run directory that is copied while it trains, in the order that docs/operations.md gives."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from prefect_elastic_train.storage.store import LocalRunStore
from tests.unit.ray_storage import Ray
from tests.unit.support import OTHER_FLOW_RUN, begin, claim

KEEP = 3
BEFORE = 4


@pytest.mark.parametrize("meanwhile", range(KEEP + 1))
def test_a_copy_of_a_run_that_trains_resumes_at_its_newest_whole_checkpoint(tmp_path: Path, meanwhile: int) -> None:
    run, copy = tmp_path / "runs" / "mnist", tmp_path / "backup" / "mnist"
    store = LocalRunStore(str(run))
    ray = Ray(store, begin(store).attempt, num_to_keep=KEEP).start()
    for number in range(1, BEFORE + 1):
        ray.report(f"checkpoint_{number}", epoch=number)
    copy.mkdir(parents=True)
    for item in run.iterdir():
        if not item.name.startswith("."):
            shutil.copytree(item, copy / item.name) if item.is_dir() else shutil.copy(item, copy)
    for number in range(BEFORE + 1, BEFORE + 1 + meanwhile):
        ray.report(f"checkpoint_{number}", epoch=number)
    shutil.copytree(run / ".elastic_train", copy / ".elastic_train")

    begun = begin(LocalRunStore(str(copy)), claim(OTHER_FLOW_RUN, resume=True))

    assert begun.point.checkpoint == f"checkpoint_{BEFORE}"
    assert (copy / begun.point.checkpoint / "model.pt").read_text() == begun.point.checkpoint
    assert bool(begun.notes) == bool(meanwhile), "what is not there is told"
