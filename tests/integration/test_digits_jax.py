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


def test_digits_are_learned_by_two_processes_and_trained_on_by_one(tmp_path: Path, joined: RayCluster) -> None:
    where: dict[str, Any] = {"storage": LocalStorage(path=str(tmp_path / "runs")), "cluster": joined}
    scaling = ElasticScaling(min_workers=2, max_workers=2)
    summary = DigitsSummary.model_validate(digits_jax(data_dir=str(tmp_path / "data"), scaling=scaling, **where))
    assert summary.accuracy > REQUIRED_ACCURACY
    assert summary.epochs == 30
    assert summary.world_sizes == [2]
    assert {file.name for file in Path(summary.checkpoint_uri).iterdir()} >= {"weights.npz", "progress.json"}

    @flow
    def train_on() -> TrainingResult:
        config = {"epochs": 32, "seed": 0, "batch_size": 64, "learning_rate": 0.01}
        config["train_path"] = str(tmp_path / "data" / "train.parquet")
        return elastic_train(
            train_loop, train_loop_config=config, framework="jax", resume_from=summary.run_name, **where
        )

    more = train_on()
    assert [size.size for size in more.world_sizes] == [1]
    assert list(more.metrics_dataframe()["epoch"]) == [31, 32]
    assert summary.loss is not None
    assert more.metrics["loss"] < 2 * summary.loss, "it goes on from what the two had learned"
