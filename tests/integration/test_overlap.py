"""Runs of a nightly deployment that overlap: the later one is refused, waits or is cancelled; one training goes on."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.objects import ConcurrencyLimitStrategy, ConcurrencyOptions
from prefect.exceptions import ObjectNotFound

from tests.support.deployments import DeployedRun, api_client, serve_flows
from tests.support.processes import wait_for

pytestmark = pytest.mark.usefixtures("api")

LIMITED, UNLIMITED = "fault test/overlap", "async fault test/overlap"


@pytest.fixture
def client() -> Iterator[SyncPrefectClient]:
    with api_client() as client:
        yield client


def _limit(client: SyncPrefectClient, deployment: str, strategy: ConcurrencyLimitStrategy) -> None:
    """Have a deployment run one flow run at a time, as its `concurrency_limit` in code or in prefect.yaml does."""

    def deployment_id() -> UUID | None:
        with contextlib.suppress(ObjectNotFound):
            return client.read_deployment_by_name(deployment).id
        return None

    found = wait_for(deployment_id, 60, f"deployment {deployment}")
    options = ConcurrencyOptions(collision_strategy=strategy)
    client.update_deployment(found, DeploymentUpdate(concurrency_limit=1, concurrency_options=options))


@pytest.mark.full
def test_a_later_run_is_refused_waits_or_is_cancelled_while_the_first_one_trains(
    client: SyncPrefectClient, api_url: str, tmp_path: Path
) -> None:
    gate, storage = tmp_path / "gate", tmp_path / "runs"
    config = {
        "steps": 100_000,
        "checkpoint_every": 1,
        "sleep": 0.1,
        "ledger": str(tmp_path / "ledger.jsonl"),
        "until": str(gate),
    }
    arguments = {
        "loop": "tests.support.loops:hashing_loop",
        "framework": "none",
        "scaling": {"min_workers": 1, "max_workers": 1},
        "config": config,
        "storage": str(storage),
        "run_name": "nightly",
        "resume": True,  # every night goes on with one run
    }
    records = storage / "nightly" / ".elastic_train"
    flows = serve_flows(tmp_path / "served", api_url, "overlap")
    runs: list[DeployedRun] = []

    def trigger(name: str, deployment: str) -> DeployedRun:
        runs.append(DeployedRun(client, deployment, tmp_path / name, **arguments))
        return runs[-1]

    try:
        _limit(client, LIMITED, ConcurrencyLimitStrategy.CANCEL_NEW)
        first = trigger("first", LIMITED)
        wait_for(lambda: (tmp_path / "ledger.jsonl").exists(), 60, "the first training")

        cancelled = trigger("cancelled", LIMITED)
        assert cancelled.wait_for_end(30).name == "Cancelled"
        assert cancelled.flow_processes == []

        _limit(client, LIMITED, ConcurrencyLimitStrategy.ENQUEUE)
        second = trigger("second", LIMITED)
        wait_for(lambda: second.state.name == "AwaitingConcurrencySlot", 30, "the second to be put off")

        # Without a limit, what keeps a second training from the run is the run itself.
        refused = trigger("refused", UNLIMITED)
        state = refused.wait_for_end(60)
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

    attempts = [json.loads(path.read_text()) for path in sorted((records / "attempts").iterdir())]
    ended = [json.loads(path.read_text()) for path in sorted((records / "ended").iterdir())]
    assert [attempt["owner"]["flow_run_id"] for attempt in attempts] == [str(first.id), str(second.id)]
    assert [end["outcome"] for end in ended] == ["completed", "completed"]
    assert ended[0]["at"] <= attempts[1]["started_at"], "they did not overlap"
    ledger = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in ledger]
    assert steps == list(range(1, len(steps) + 1)), "one training after the other, each step once"
