"""Runs of a nightly deployment that overlap: the later one is refused, waits or is cancelled; one training goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.objects import ConcurrencyLimitStrategy, ConcurrencyOptions

from tests.support.deployments import DeployedRun, deployment_id, serve_flows
from tests.support.loops import train_config
from tests.support.processes import attempts, records, steps_of, wait_for

LIMITED, UNLIMITED = "fault test/overlap", "async fault test/overlap"


def _limit(client: SyncPrefectClient, strategy: ConcurrencyLimitStrategy) -> None:
    """Have the deployment run one flow run at a time, as its `concurrency_limit` in code or in prefect.yaml does."""
    limit = DeploymentUpdate(concurrency_limit=1, concurrency_options=ConcurrencyOptions(collision_strategy=strategy))
    client.update_deployment(deployment_id(client, LIMITED), limit)


@pytest.mark.full
def test_a_later_run_is_refused_waits_or_is_cancelled_while_the_first_one_trains(
    client: SyncPrefectClient, api_url: str, tmp_path: Path, ledger: str
) -> None:
    gate, storage = tmp_path / "gate", tmp_path / "runs"
    config = train_config(ledger, steps=100_000, checkpoint_every=1, until=str(gate))
    # Every night goes on with one run.
    arguments = {"config": config, "storage": str(storage), "run_name": "nightly", "resume": True}
    flows = serve_flows(tmp_path / "served", api_url, "overlap")
    runs: list[DeployedRun] = []

    def trigger(name: str, deployment: str = LIMITED) -> DeployedRun:
        runs.append(DeployedRun(client, deployment, tmp_path / name, **arguments))
        return runs[-1]

    try:
        _limit(client, ConcurrencyLimitStrategy.CANCEL_NEW)
        first = trigger("first")
        wait_for(lambda: steps_of(ledger), 60, "the first training")
        cancelled = trigger("cancelled")
        assert cancelled.wait_for_end(30).name == "Cancelled"
        assert cancelled.flow_processes == []

        _limit(client, ConcurrencyLimitStrategy.ENQUEUE)
        second = trigger("second")
        wait_for(lambda: second.state.name == "AwaitingConcurrencySlot", 30, "the second to be put off")

        # Without a limit, what keeps a second training from the run is the run itself.
        state = trigger("refused", UNLIMITED).wait_for_end(60)
        assert state.name == "Failed"
        for words in ("'nightly' is being trained right now by", str(first.id), "cancel that flow run first"):
            assert words in (state.message or "")

        assert first.state.is_running()
        assert second.flow_processes == []
        gate.touch()
        assert first.wait_for_end(60).name == "Completed"
        assert second.wait_for_end(90).name == "Completed"
    finally:
        for run in runs:
            run.close()
        flows.close()

    began, ended = attempts(storage / "nightly"), records(storage / "nightly", "ended")
    assert [attempt["owner"]["flow_run_id"] for attempt in began] == [str(first.id), str(second.id)]
    assert [end["outcome"] for end in ended] == ["completed", "completed"]
    assert ended[0]["at"] <= began[1]["started_at"], "they did not overlap"
    steps = steps_of(ledger)
    assert steps == list(range(1, len(steps) + 1)), "one training after the other, each step once"
