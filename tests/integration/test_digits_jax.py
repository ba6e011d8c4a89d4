"""The pipeline in JAX that comes with the project."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prefect import flow

from flows.digits import REQUIRED_ACCURACY, DigitsSummary
from flows.digits_jax import digits_jax, train_loop
from prefect_elastic_train import ElasticScaling, LocalStorage, RayCluster, TrainingResult, elastic_train

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


@pytest.mark.full
def test_what_two_processes_have_learned_is_trained_on_by_one(tmp_path: Path, joined: RayCluster) -> None:
    summary = _learn(tmp_path, joined, workers=2, epochs=10)

    @flow
    def train_on() -> TrainingResult:
        config = {"epochs": 12, "seed": 0, "batch_size": 64, "learning_rate": 0.01}
        config["train_path"] = str(tmp_path / "data" / "train.parquet")
        return elastic_train(
            train_loop,
            train_loop_config=config,
            framework="jax",
            resume_from=summary.run_name,
            **_where(tmp_path, joined),
        )

    more = train_on()
    assert [size.size for size in more.world_sizes] == [1]
    assert list(more.metrics_dataframe()["epoch"]) == [11, 12]
    assert summary.loss is not None
    assert more.metrics["loss"] < 2 * summary.loss, "it goes on from what the two had learned"
