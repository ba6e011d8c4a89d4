"""JAX on CPUs: processes that compute together, one of them killed, and as many of them as there are nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from tests.support import processes
from tests.support.clusters import ElasticCluster
from tests.support.loops import LEARNING_RATE, jax_batch, jax_weights

STEPS, CHECKPOINT_EVERY = 60, 10


def _training(ledger: str, **more: Any) -> dict[str, Any]:
    sleep = {"1": 0.3, "2": 0.05}
    config = {"steps": STEPS, "checkpoint_every": CHECKPOINT_EVERY, "ledger": ledger, "sleep": sleep}
    return {"loop": "tests.support.loops:jax_loop", "framework": "jax", "config": config, **more}


def _in_mid_training(flow: processes.FlowProcess, ledger: str) -> None:
    flow.wait_for(
        lambda: processes.commits(flow.run) and max(processes.steps_of(ledger)) >= 13, 120, "two workers and a commit"
    )


def _fit() -> tuple[list[float], dict[str, Any]]:
    """The loss of each step and the final weights, computed in one process without JAX."""
    weights, losses = jax_weights(), []
    for step in range(STEPS):
        inputs, targets = jax_batch(step)
        hidden = np.tanh(inputs @ weights["inner"])
        error = hidden @ weights["outer"] - targets
        losses.append(float((error**2).mean()))
        slope = 2 * error / len(error)
        change = {"outer": hidden.T @ slope, "inner": inputs.T @ (slope @ weights["outer"].T * (1 - hidden**2))}
        weights = {name: array - LEARNING_RATE * change[name] for name, array in weights.items()}
    return losses, weights


def _assert_fits(ledger: str, result: dict[str, Any]) -> None:
    """Check loss of each step and final weights; of a step that was redone, what counts in the end."""
    losses, weights = _fit()
    found = {line["step"]: line["loss"] for line in processes.read_ledger(ledger) if line["rank"] == 0}
    assert [found[step] for step in range(1, STEPS + 1)] == pytest.approx(losses, abs=1e-9)
    with np.load(f"{result['checkpoint_uri']}/weights.npz") as saved:
        for name, array in weights.items():
            assert np.allclose(saved[name], array, rtol=0, atol=1e-9), name


def test_killed_coordinator_is_replaced_and_all_are_joined_again_with_the_same_weights_in_the_end(
    start: processes.Start, ledger: str
) -> None:
    flow = start(**_training(ledger, scaling={"min_workers": 2, "max_workers": 2}))
    _in_mid_training(flow, ledger)
    psutil.Process(next(line["pid"] for line in processes.read_ledger(ledger) if line["rank"] == 0)).kill()
    result = flow.completed(180)
    assert (result["attempts"], result["worker_failures"]) == (1, 1)
    assert [len(processes.generations(ledger, rank)) for rank in (0, 1)] == [2, 2], "one process each, and one more"
    assert processes.repeated(processes.steps_of(ledger)) <= CHECKPOINT_EVERY
    assert {line["world"] for line in processes.read_ledger(ledger)} == {2}
    processes.assert_each_rank_knew_its_run(ledger, flow.run, flow.flow_run_id)
    _assert_fits(ledger, result)


@pytest.fixture
def cluster() -> Iterator[ElasticCluster]:
    """A cluster without nodes for workers."""
    made = ElasticCluster()
    yield made
    made.close()


@pytest.mark.full
def test_fewer_and_more_processes_fit_along_the_same_curve(
    start: processes.Start, ledger: str, cluster: ElasticCluster
) -> None:
    cluster.add(num_cpus=1)
    cluster.add(num_cpus=1)
    often = {"resize_check_interval_seconds": 1, "stability_delay_seconds": 1}
    flow = start(**_training(ledger, scaling={"max_workers": 2, **often}, cluster=cluster.block))
    _in_mid_training(flow, ledger)
    # Not that of rank 0, which is the coordinator: its end is that of all.
    cluster.remove(next(line["node"] for line in processes.read_ledger(ledger) if line["rank"] == 1))
    processes.wait_for(lambda: any(line["world"] == 1 for line in processes.read_ledger(ledger)), 60, "one worker")
    cluster.add(num_cpus=1)
    result = flow.completed(180)
    assert [size["size"] for size in result["world_sizes"]] == [2, 1, 2]
    assert "Terminating process" not in flow.log, "no process takes the end of another for a failure"
    _assert_fits(ledger, result)
