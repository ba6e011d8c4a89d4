"""Trainings of one flow on local clusters of their own, and the GPUs of their machine, which are pretended ones."""

from __future__ import annotations

import itertools
import secrets
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from ray.train.v2.api.validation_config import ValidationConfig

from prefect_elastic_train import ElasticScaling, LocalStorage, RayCluster, elastic_train
from tests.support.processes import read_ledger


@pytest.mark.full
@pytest.mark.usefixtures("api")
@pytest.mark.parametrize("there", [2, 1])
def test_two_trainings_of_a_flow_train_on_a_gpu_each_or_one_after_the_other_if_there_is_one(
    tmp_path: Path, ledger: str, monkeypatch: pytest.MonkeyPatch, there: int
) -> None:
    gpus = [f"{secrets.token_hex(4)}-{number}" for number in range(there)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(gpus))

    @flow
    def trains() -> list[Any]:
        given: dict[str, Any] = {
            "train_loop_config": {"ledger": ledger},
            "framework": "none",
            "storage": LocalStorage(path=str(tmp_path / "runs")),
            "scaling": ElasticScaling(accelerator="gpu", standby="off"),
            "cluster": RayCluster(num_cpus=1, num_gpus=1),
        }
        loop = "tests.support.loops:seeing_loop"
        futures = [elastic_train.submit(loop, run_name=name, **given) for name in ("first", "second")]
        return [future.result().status for future in futures]

    assert len(trains()) == 2
    lines = read_ledger(ledger)
    assert sorted({line["gpu"] for line in lines}) == sorted(gpus)
    if there == 1:
        assert [line["what"] for line in lines] == ["begin", "end"] * 2, "one after the other"
        assert [len([*of_one]) for _, of_one in itertools.groupby(lines, key=lambda line: line["pid"])] == [2, 2]


@pytest.mark.usefixtures("api")
def test_checkpoints_are_validated_while_the_workers_hold_all_cpus_that_a_local_cluster_was_given(
    tmp_path: Path, ledger: str
) -> None:
    @flow
    def trains() -> None:
        elastic_train(
            "tests.support.loops:validated_loop",
            train_loop_config={"ledger": ledger},
            framework="none",
            storage=LocalStorage(path=str(tmp_path / "runs")),
            scaling=ElasticScaling(min_workers=2, max_workers=3),
            cluster=RayCluster(num_cpus=2),
            validation_config=ValidationConfig(lambda checkpoint: {"score": 1.0}),
        )

    trains()
    assert [line["validated"] for line in read_ledger(ledger)] == [3, 3], "each of the two workers sees all of them"
