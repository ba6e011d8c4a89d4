"""However the driver is launched, a training gives the same result, events and logs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client

from prefect_elastic_train import (
    AttemptFailedError,
    CheckpointPolicy,
    ElasticScaling,
    FailureBudget,
    LocalStorage,
    Outcome,
    RayCluster,
    TrainingResult,
    elastic_train,
)
from tests.support.deployments import flow_run_log
from tests.support.processes import RayHead, wait_for

pytestmark = pytest.mark.usefixtures("api")

TWO = ElasticScaling(min_workers=2, max_workers=2)


# Most other tests train on a local or a joined cluster.
_OTHERS = [pytest.param(name, marks=pytest.mark.full) for name in ("a local cluster", "a joined cluster")]


@pytest.fixture(params=[*_OTHERS, "a job"])
def launched(request: pytest.FixtureRequest, head: RayHead) -> RayCluster:
    """The cluster, and with it the place of the driver."""
    if request.param == "a local cluster":
        return RayCluster()
    return RayCluster(**(head.block if request.param == "a joined cluster" else head.jobs_block))


def _messages(flow_run_id: Any) -> list[str]:
    """Give what the Prefect log of a flow run says."""
    with get_client(sync_client=True) as client:
        return flow_run_log(client, flow_run_id)


def _lifecycle(run_uri: str) -> list[str]:
    """Give the kinds of the events of a run's history that no clock decides about."""
    lines = [
        json.loads(line)
        for file in sorted(Path(run_uri, ".elastic_train", "events").glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    return [line["kind"] for line in lines if line["kind"] not in ("controller_alive", "state_changed")]


def test_closure_of_a_flow_trains_and_gives_a_json_safe_result(tmp_path: Path, launched: RayCluster) -> None:
    base = 10.0

    def loop(config: dict[str, Any]) -> None:
        import os
        import tempfile

        import ray.train

        for step in range(1, config["steps"] + 1):
            folder = tempfile.mkdtemp()
            with open(os.path.join(folder, "weights.txt"), "w") as file:
                file.write(str(step))
            ray.train.report(
                {"step": step, "loss": base / step}, checkpoint=ray.train.Checkpoint.from_directory(folder)
            )
            print(f"printed in step {step}")

    @flow
    def nightly() -> TrainingResult:
        return elastic_train(
            loop,
            train_loop_config={"steps": 6},
            scaling=TWO,
            checkpoints=CheckpointPolicy(keep=2, score_attribute="loss", score_order="min"),
            framework="none",
            storage=LocalStorage(path=str(tmp_path)),
            cluster=launched,
        )

    state = nightly(return_state=True)
    result = state.result()
    assert TrainingResult.model_validate_json(result.model_dump_json()) == result
    assert result.run_name == f"nightly-{str(state.state_details.flow_run_id)[:8]}"
    assert result.run_uri == str(tmp_path / result.run_name)
    assert (result.attempts, result.worker_failures, result.preemptions, result.resizes) == (1, 0, 0, 0)
    assert result.metrics == {"step": 6, "loss": 10 / 6}
    assert [size.size for size in result.world_sizes] == [2]
    assert [best.metrics["step"] for best in result.best_checkpoints] == [5, 6]
    assert len(list(Path(result.run_uri).glob("checkpoint_2*"))) == 2, "the others are deleted"
    with result.checkpoint().as_directory() as folder:
        assert Path(folder, "weights.txt").read_text() == "6"
    frame = result.metrics_dataframe()
    assert list(frame["step"]) == [1, 2, 3, 4, 5, 6]
    assert set(frame["_world_size"]) == {2}
    assert 0 < result.goodput <= 1
    assert result.steps_lost == 0

    def printed() -> list[str]:
        lines = [
            message.partition("] ")[0] + message.partition("]")[2]
            for message in _messages(state.state_details.flow_run_id)
        ]
        return sorted(line for line in lines if "printed in step" in line and not line.endswith("step 6"))

    expected = sorted(f"[attempt 1 rank {rank} printed in step {step}" for rank in (0, 1) for step in range(1, 6))
    wait_for(lambda: len(printed()) >= len(expected), 30, "the log to reach the server")
    assert printed() == expected, "each line once, tagged with its rank"

    def told() -> Counter[str]:
        return Counter(message.split(" ")[0] for message in _messages(state.state_details.flow_run_id))

    wait_for(lambda: told()["Checkpoint"] >= 6, 30, "the rest of the log")
    assert (told()["Attempt"], told()["Checkpoint"]) == (1, 6)
    kinds = _lifecycle(result.run_uri)
    assert [kinds[0], kinds[1], kinds[-1]] == ["attempt_started", "worker_group_started", "attempt_ended"]
    told_besides = Counter(kinds[2:-1])
    assert told_besides.pop("checkpoint_stalled", 0) <= 6, "how long the loop stood still, if that is worth a word"
    assert told_besides == {"checkpoint_committed": 6}


@pytest.mark.full
@pytest.mark.parametrize("launched", ["a job"], indirect=True)
def test_a_loop_that_raises_ends_the_training_with_its_traceback(tmp_path: Path, launched: RayCluster) -> None:
    def loop() -> None:
        raise ArithmeticError("the loss became a pumpkin")

    @flow
    def nightly() -> TrainingResult:
        return elastic_train(
            loop,
            framework="none",
            failures=FailureBudget(max_failures=0),
            storage=LocalStorage(path=str(tmp_path)),
            cluster=launched,
        )

    state = nightly(return_state=True)
    error = state.result(raise_on_failure=False)
    assert isinstance(error, AttemptFailedError)
    assert (error.outcome, error.attempt) == (Outcome.USER_ERROR, 1)
    message, _, details = str(error).partition("; details: ")
    assert message.endswith("rank 0: ArithmeticError: the loss became a pumpkin")
    assert "Traceback" in Path(details).read_text()
