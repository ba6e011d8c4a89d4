"""JAX on CPUs: processes that compute together, one of them killed."""

from typing import Any

import numpy as np
import psutil
import pytest

from tests.support import processes
from tests.support.loops import LEARNING_RATE, jax_batch, jax_weights

STEPS, CHECKPOINT_EVERY = 60, 10


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


@pytest.mark.full
def test_killed_coordinator_is_replaced_and_all_are_joined_again_with_the_same_weights_in_the_end(
    start: processes.Start, ledger: str
) -> None:
    config = {"steps": STEPS, "checkpoint_every": CHECKPOINT_EVERY, "ledger": ledger, "sleep": {"2": 0.05}}
    scaling = {"min_workers": 2, "max_workers": 2}
    flow = start(loop="tests.support.loops:jax_loop", framework="jax", config=config, scaling=scaling)
    flow.wait_for_commits()
    psutil.Process(next(line["pid"] for line in processes.read_ledger(ledger) if line["rank"] == 0)).kill()
    result = flow.completed(180)
    assert (result["attempts"], result["worker_failures"]) == (1, 1)
    assert [len(processes.generations(ledger, rank)) for rank in (0, 1)] == [2, 2], "one process each, and one more"
    assert processes.repeated(processes.steps_of(ledger)) <= CHECKPOINT_EVERY
    assert {line["world"] for line in processes.read_ledger(ledger)} == {2}
    processes.assert_each_rank_knew_its_run(ledger, flow.run, flow.flow_run_id)
    losses, weights = _fit()
    found = {line["step"]: line["loss"] for line in processes.read_ledger(ledger) if line["rank"] == 0}
    assert [found[step] for step in range(1, STEPS + 1)] == pytest.approx(losses, abs=1e-9)
    with np.load(f"{result['checkpoint_uri']}/weights.npz") as saved:
        for name, array in weights.items():
            assert np.allclose(saved[name], array, rtol=0, atol=1e-9), name
