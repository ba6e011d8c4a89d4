"""However the driver is launched, a training gives the same result, events and logs."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient

from prefect_elastic_train import (
    CheckpointPolicy,
    ElasticScaling,
    RayCluster,
    TrainingResult,
    elastic_train,
)
from prefect_elastic_train.core.events import Event
from tests.support.clusters import RayHead
from tests.support.deployments import flow_run_log
from tests.support.processes import wait_for
from tests.support.reports import history


# Most other tests train on a local or a joined cluster.
@pytest.mark.parametrize(
    "where",
    ["a job", *(pytest.param(one, marks=pytest.mark.full) for one in ("a local cluster", "a joined cluster"))],
)
def test_closure_of_a_flow_trains_and_gives_a_json_safe_result(
    tmp_path: Path, head: RayHead, client: SyncPrefectClient, where: str
) -> None:
    base = 10.0
    fields = {"a local cluster": {}, "a joined cluster": head.block, "a job": head.jobs_block}[where]

    def loop(config: dict[str, Any]) -> None:
        import pathlib
        import tempfile

        import ray.train

        for step in range(1, config["steps"] + 1):
            folder = tempfile.mkdtemp()
            pathlib.Path(folder, "weights.txt").write_text(str(step))
            ray.train.report({"step": step, "loss": base / step}, ray.train.Checkpoint(folder))
            print(f"printed in step {step}")

    @flow
    def nightly() -> TrainingResult:
        return elastic_train(
            loop,
            train_loop_config={"steps": 6},
            scaling=ElasticScaling(min_workers=2, max_workers=2),
            checkpoints=CheckpointPolicy(keep=2, score_attribute="loss", score_order="min"),
            framework="none",
            storage=tmp_path,
            cluster=RayCluster(**fields),
        )

    state = nightly(return_state=True)
    result, flow_run_id = state.result(), state.state_details.flow_run_id
    assert TrainingResult.model_validate_json(result.model_dump_json()) == result
    assert result.run_name == f"nightly-{str(flow_run_id)[:8]}"
    assert result.run_uri == str(tmp_path / result.run_name)
    assert (result.attempts, result.worker_failures, result.preemptions, result.resizes) == (1, 0, 0, 0)
    assert result.metrics == {"step": 6, "loss": 10 / 6}
    assert [best.metrics["step"] for best in result.best_checkpoints] == [5, 6]
    assert len(list(Path(result.run_uri).glob("checkpoint_2*"))) == 2, "the others are deleted"
    with result.checkpoint().as_directory() as folder:
        assert Path(folder, "weights.txt").read_text() == "6"
    frame = result.metrics_dataframe()
    assert list(frame["step"]) == [1, 2, 3, 4, 5, 6]
    assert set(frame["_world_size"]) == {2}
    assert (0 < result.goodput <= 1, result.reports_lost) == (True, 0)

    def log(part: str) -> list[str]:
        return sorted(line for line in flow_run_log(client, flow_run_id) if part in line)

    expected = [f"[attempt 1 rank {rank}] printed in step {step}" for rank in (0, 1) for step in range(1, 6)]
    printed = lambda: [line for line in log("printed in step") if not line.endswith("step 6")]  # noqa: E731
    wait_for(lambda: len(printed()) >= len(expected), 30, "the log to reach the server")
    assert printed() == expected, "each line once, tagged with its rank"
    wait_for(lambda: any("step=6" in line for line in log("Checkpoint ")), 30, "the rest of the log")
    assert sum(line.startswith("Attempt ") for line in log("Attempt")) == 1

    kinds = [event.kind for event in history(result.run_uri, Event)]
    # Those that do not depend on the time.
    kinds = [one for one in kinds if one not in ("state_changed", "checkpoint_stalled", "ranks_measured")]
    assert [kinds[0], kinds[1], kinds[-1]] == ["attempt_started", "worker_group_started", "attempt_ended"]
    assert Counter(kinds[2:-1]) == {"checkpoint_committed": 6}
