"""Trainings in the flow process itself: ``elastic_train(..., local=True)``."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from prefect import flow

from prefect_elastic_train import ConfigurationError, TrainingResult, elastic_train, loop
from tests.support.session_loops import same_weights, torch_loop

pytestmark = pytest.mark.usefixtures("api")

CONFIG = {"steps": 25, "length": 64, "global_batch": 8, "dropout": 0.1}


class LoopBugError(Exception):
    """An exception of a train loop."""


def _reports(config: dict[str, Any]) -> None:
    import ray.train

    breakpoint()
    context = ray.train.get_context()
    report = {"process": os.getpid(), "workers": context.get_world_size(), "run": loop.run_context().run_name}
    ray.train.report({**report, "rows": len(ray.train.get_dataset_shard("train")), "loss": np.float32(0.5)})
    if config["raises"]:
        raise LoopBugError(config)


def test_local_mode_stops_at_breakpoints_raises_the_exception_of_the_loop_and_starts_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops: list[int] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append(os.getpid()))
    monkeypatch.setenv("HOME", str(tmp_path))
    before = {*psutil.Process().children(recursive=True)}

    @flow
    def trains(raises: bool) -> TrainingResult:
        config, datasets = {"raises": raises}, {"train": lambda: ["row"] * 3}
        return elastic_train(
            _reports, train_loop_config=config, framework="none", datasets=datasets, run_name="a", local=True
        )

    result = trains(False)
    expected = {"process": os.getpid(), "workers": 1, "run": "a", "rows": 3, "loss": 0.5}
    assert (result.metrics, result.run_uri, result.checkpoint_uri) == (expected, "", "")
    with pytest.raises(LoopBugError):
        trains(True)
    assert stops == [os.getpid()] * 2, "the loop ran once in each call: its exception is not retried"
    assert {*psutil.Process().children(recursive=True)} <= before
    assert not list(tmp_path.rglob("elastic_train_runs"))


def test_a_session_ends_with_the_same_weights_in_local_mode_as_in_a_plain_call(tmp_path: Path) -> None:
    @flow
    def trains(weights: str) -> list[TrainingResult]:
        given: Any = {"train_loop_config": {**CONFIG, "weights": weights}, "local": True}
        train = partial(elastic_train, torch_loop, **given)
        for refused in (elastic_train.submit(torch_loop, **given).result, partial(train, resume_from="a")):
            with pytest.raises(ConfigurationError, match="without submit, aelastic_train and resume_from"):
                refused()
        return [train() for _ in range(2)]

    torch_loop({**CONFIG, "weights": str(tmp_path / "plain.npz")})
    for result in trains(str(tmp_path / "local.npz")):
        expected = {"step": 25, "total_steps": 25, "samples": 200, "epoch": 3}
        assert expected.items() <= result.metrics.items()
    assert same_weights(tmp_path / "plain.npz", tmp_path / "local.npz")
