"""The worker group follows the capacity of a cluster whose nodes come and go, are drained and are lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.faults.conftest import is_right
from tests.support.clusters import ElasticCluster
from tests.support.processes import FlowProcess, read_ledger, repeated, steps_of, wait_for

Start = Callable[..., FlowProcess]


@pytest.fixture
def cluster() -> Iterator[ElasticCluster]:
    """A cluster without nodes for workers."""
    made = ElasticCluster()
    yield made
    made.close()


@pytest.fixture
def train(start: Start, cluster: ElasticCluster, ledger: str) -> Callable[..., FlowProcess]:
    """Starts a training of hashed steps on that cluster."""

    def start_training(
        scaling: dict[str, Any],
        steps: int,
        checkpoint_every: int = 5,
        sleep: float = 0.2,
        ask: bool = False,
        **more: Any,
    ) -> FlowProcess:
        config = {"steps": steps, "checkpoint_every": checkpoint_every, "sleep": sleep, "ledger": ledger, "ask": ask}
        scaling = {
            "accelerator": "gpu",
            "resources_per_worker": {"GPU": 1},
            "resize_check_interval_seconds": 2,
            "stability_delay_seconds": 1,
            **scaling,
        }
        return start(
            loop="tests.support.loops:hashing_loop",
            framework="none",
            config=config,
            scaling=scaling,
            cluster=cluster.block,
            **more,
        )

    return start_training


def worlds(ledger: str) -> list[int]:
    """Give the sizes of the worker groups that trained, in order."""
    sizes: list[int] = []
    for line in read_ledger(ledger):
        if line["rank"] == 0 and (not sizes or sizes[-1] != line["world"]):
            sizes.append(line["world"])
    return sizes


def trains_with(ledger: str, size: int, since: int = 0) -> bool:
    """Tell whether rank 0 has trained in a group of that size after its first `since` steps."""
    return any(line["world"] == size for line in read_ledger(ledger)[since:] if line["rank"] == 0)


@pytest.mark.parametrize("ask", [True, False])
def test_a_healthy_group_grows_without_losing_a_step(
    train: Callable[..., FlowProcess], cluster: ElasticCluster, ledger: str, ask: bool
) -> None:
    cluster.add_gpus(2)
    flow = train({"min_workers": 1, "max_workers": 4}, steps=100, checkpoint_every=20, ask=ask)
    wait_for(lambda: trains_with(ledger, 2), 120, "two workers")
    cluster.add_gpus(2)
    outcome = flow.wait(240)
    assert outcome["state"] == "COMPLETED", outcome
    assert worlds(ledger) == [2, 4]
    assert repeated(steps_of(ledger)) == 0
    result = outcome["result"]
    assert (result["resizes"], result["worker_failures"], result["preemptions"]) == (1, 0, 0)
    assert is_right(result["checkpoint_uri"], 100)
