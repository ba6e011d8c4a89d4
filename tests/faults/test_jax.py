"""JAX on CPUs: processes that compute together, one of them killed, and as many of them as there are nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest

from tests.support.clusters import ElasticCluster
from tests.support.jax_loops import PRECISIONS, read_weights
from tests.support.processes import (
    FlowProcess,
    assert_each_rank_knew_its_run,
    commits,
    generations,
    read_ledger,
    repeated,
    steps_of,
    wait_for,
)

Start = Callable[..., FlowProcess]

STEPS = 100
CHECKPOINT_EVERY = 10
#: How far a loss may be from that of a run of another size, which rounds its sums in another order.
TOLERANCES = {"float64": 1e-9, "float32": 1e-4}


def training(ledger: str, sleep_alone: float = 0.0, **more: Any) -> dict[str, Any]:
    """The training of these tests: about five seconds of steps with two workers."""
    sleep = {"1": sleep_alone, "2": 0.05}
    return {
        "loop": "tests.support.jax_loops:fitting_loop",
        "framework": "jax",
        "config": {"steps": STEPS, "checkpoint_every": CHECKPOINT_EVERY, "ledger": ledger, "sleep": sleep},
        **more,
    }


class Fit(NamedTuple):
    """What a training came to."""

    losses: dict[str, list[float]]
    weights: dict[str, dict[str, Any]]


def fit_of(ledger: str, outcome: dict[str, Any]) -> Fit:
    """Read the loss of each step and the final weights; of a step that was redone, what counts in the end."""
    step, weights = read_weights(outcome["result"]["checkpoint_uri"])
    assert step == STEPS
    lines = {line["step"]: line for line in read_ledger(ledger) if line["rank"] == 0}
    assert sorted(lines) == list(range(1, STEPS + 1))
    return Fit({precision: [lines[s][precision] for s in sorted(lines)] for precision in PRECISIONS}, weights)


@pytest.fixture(scope="module")
def undisturbed(api_url: str, tmp_path_factory: pytest.TempPathFactory) -> Fit:
    """The same training with two workers throughout and nothing in its way."""
    folder = tmp_path_factory.mktemp("undisturbed-jax")
    ledger = str(folder / "ledger.jsonl")
    flow = FlowProcess(folder, api_url, **training(ledger))
    try:
        outcome = flow.wait(180)
    finally:
        flow.close()
    assert outcome["state"] == "COMPLETED", flow.log[-4000:]
    assert outcome["result"]["worker_failures"] == 0
    assert "Terminating process" not in flow.log, "no process takes the end of another for a failure"
    assert {(line["rank"], line["sum"]) for line in read_ledger(ledger)} == {(0, 3.0), (1, 3.0)}
    return fit_of(ledger, outcome)


@pytest.fixture
def cluster() -> Iterator[ElasticCluster]:
    """A cluster without nodes for workers."""
    made = ElasticCluster()
    yield made
    made.close()


def test_killed_coordinator_is_replaced_and_all_are_joined_again_with_the_same_weights_in_the_end(
    start: Start, ledger: str, undisturbed: Fit
) -> None:
    flow = start(**training(ledger))
    flow.wait_for(lambda: commits(flow.run) and max(steps_of(ledger)) >= 13, 120, "a commit")
    psutil.Process(next(line["pid"] for line in read_ledger(ledger) if line["rank"] == 0)).kill()
    outcome = flow.wait(180)
    assert outcome["state"] == "COMPLETED", flow.log[-4000:]
    assert outcome["result"]["attempts"] == 1
    assert outcome["result"]["worker_failures"] == 1
    assert [len(generations(ledger, rank)) for rank in (0, 1)] == [2, 2], "one process each, and one more"
    assert repeated(steps_of(ledger)) <= CHECKPOINT_EVERY
    assert {(line["world"], line["sum"]) for line in read_ledger(ledger)} == {(2, 3.0)}
    assert_each_rank_knew_its_run(ledger, flow.run, flow.flow_run_id)
    fit = fit_of(ledger, outcome)
    assert fit.losses == undisturbed.losses
    for precision in PRECISIONS:
        for name, array in undisturbed.weights[precision].items():
            assert np.array_equal(fit.weights[precision][name], array), (precision, name)


@pytest.mark.full
def test_fewer_and_more_processes_fit_along_the_same_curve(
    start: Start, ledger: str, undisturbed: Fit, cluster: ElasticCluster
) -> None:
    nodes = [cluster.add(num_cpus=1), cluster.add(num_cpus=1)]
    scaling = {
        "min_workers": 1,
        "max_workers": 2,
        "resize_check_interval_seconds": 1,
        "stability_delay_seconds": 1,
    }
    flow = start(**training(ledger, sleep_alone=0.4, scaling=scaling, cluster=cluster.block))
    flow.wait_for(lambda: commits(flow.run) and max(steps_of(ledger)) >= 13, 120, "two workers and a commit")
    cluster.remove(nodes[0])
    wait_for(lambda: any(line["world"] == 1 for line in read_ledger(ledger)), 60, "one worker")
    cluster.add(num_cpus=1)
    outcome = flow.wait(180)
    assert outcome["state"] == "COMPLETED", flow.log[-4000:]
    assert [size["size"] for size in outcome["result"]["world_sizes"]] == [2, 1, 2]
    assert {(line["world"], line["sum"]) for line in read_ledger(ledger)} == {(1, 1.0), (2, 3.0)}
    fit = fit_of(ledger, outcome)
    for precision, tolerance in TOLERANCES.items():
        assert np.allclose(fit.losses[precision], undisturbed.losses[precision], rtol=0, atol=tolerance), precision
