"""The pipeline in JAX that comes with the project."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows.digits import REQUIRED_ACCURACY, DigitsSummary
from flows.digits_jax import digits_jax
from prefect_elastic_train import ElasticScaling, LocalStorage, RayCluster

pytestmark = pytest.mark.usefixtures("api")


def _where(tmp_path: Path, joined: RayCluster) -> dict[str, Any]:
    return {"storage": LocalStorage(path=str(tmp_path / "runs")), "cluster": joined}


def _learn(tmp_path: Path, joined: RayCluster, workers: int, epochs: int) -> DigitsSummary:
    scaling = ElasticScaling(min_workers=workers, max_workers=workers)
    data_dir = str(tmp_path / "data")
    summary = digits_jax(epochs=epochs, data_dir=data_dir, scaling=scaling, **_where(tmp_path, joined))
    return DigitsSummary.model_validate(summary)


@pytest.mark.full
def test_digits_are_learned_by_two_processes(tmp_path: Path, joined: RayCluster) -> None:
    summary = _learn(tmp_path, joined, workers=2, epochs=30)
    assert summary.accuracy > REQUIRED_ACCURACY
    assert summary.epochs == 30
    assert summary.world_sizes == [2]
    assert {file.name for file in Path(summary.checkpoint_uri).iterdir()} >= {"weights.npz", "progress.json"}
