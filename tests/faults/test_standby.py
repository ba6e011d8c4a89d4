"""Workers and drivers that die are replaced by those that stand by."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.clusters import ElasticCluster
from tests.support.loops import hashing_loop
from tests.support.processes import FlowProcess, Start, read_ledger, titled
from tests.support.session_loops import lost_and_repeated, same_weights, torch_loop

LENGTH, GLOBAL_BATCH, STEPS = 200, 20, 2000
READY = "2 of 2 standby workers are ready"


def _workers(flow: FlowProcess, ledger: Path) -> tuple[set[int], set[int]]:
    """Which processes train, and which stand by."""
    lines = read_ledger(ledger)
    training = {line["pid"] for line in lines if line["group"] == lines[-1]["group"]}
    return training, {process.pid for process in titled(flow.marked(), "RayTrainWorker")} - training


def loop_of_its_own_environment(config: dict[str, Any]) -> None:
    """Train where the process is as it was asked for."""
    wanted = config["environment"]
    assert {name: os.environ.get(name) for name in wanted} == wanted
    hashing_loop(config)


@pytest.mark.full
def test_standbys_leave_the_resources_of_a_shared_cluster_to_others_and_are_as_the_workers_are(
    start: Start, cluster: ElasticCluster, tmp_path: Path
) -> None:
    for pool in ("a", "a", "b"):
        cluster.add(num_cpus=2, labels={"pool": pool})
    until = tmp_path / "until"

    def trains(name: str) -> tuple[FlowProcess, Path]:
        ledger, environment = tmp_path / f"{name}.jsonl", {"WHOSE": name, "OMP_NUM_THREADS": "3"}
        config = {"steps": 100_000, "checkpoint_every": 10, "sleep": 0.2, "ledger": str(ledger), "until": str(until)}
        flow = start(
            name,
            loop="tests.faults.test_standby:loop_of_its_own_environment",
            config={**config, "environment": environment},
            worker_runtime_env={"env_vars": environment},
            scaling={"min_workers": 2, "max_workers": 2, "standby": "on", "label_selector": {"pool": "a"}},
            cluster=cluster.block,
        )
        flow.wait_for(lambda: READY in flow.log, 180, "standby workers")
        return flow, ledger

    flow, ledger = trains("first")
    other, _ = trains("second")  # which has all that is left of the nodes
    before = {line["pid"] for line in read_ledger(ledger)}
    booted = {process.pid for process in titled(psutil.process_iter(), "RayTrainWorker")} - before
    psutil.Process(max(before)).kill()
    taken = lambda: {line["pid"] for line in read_ledger(ledger)} - before  # noqa: E731
    flow.wait_for(lambda: len(taken()) == 2, 60, "two that take over")
    assert taken() <= booted
    until.touch()
    for one in (flow, other):
        assert one.completed(120)["attempts"] == 1


def test_workers_that_die_are_replaced_by_those_that_stand_by_whichever_die(start: Start, tmp_path: Path) -> None:
    ledger, slow, weights = tmp_path / "ledger.jsonl", tmp_path / "slow", tmp_path / "weights.npz"
    slow.touch()
    config = {"steps": STEPS, "length": LENGTH, "global_batch": GLOBAL_BATCH, "save_every": 10}
    files = {"ledger": str(ledger), "weights": str(weights), "slow": str(slow), "sleep": 0.1}
    flow = start(
        loop="tests.support.session_loops:torch_loop",
        framework="torch",
        config={**config, **files},
        scaling={"min_workers": 2, "max_workers": 2, "standby": "on"},
        failures={"max_failures": -1},
    )

    def ready(times: int) -> tuple[set[int], set[int]]:
        flow.wait_for(lambda: flow.log.count(READY) >= times, 180, f"standby workers for the {times}. time")
        return _workers(flow, ledger)

    def replaced(dead: set[int]) -> set[int]:
        for pid in dead:
            psutil.Process(pid).kill()
        before = {line["group"] for line in read_ledger(ledger)}

        def trains() -> set[int] | None:
            pids = {line["pid"] for line in read_ledger(ledger) if line["group"] not in before}
            return pids if len(pids) == 2 else None

        return flow.wait_for(trains, 120, "two workers that train") or set()

    flow.wait_for(lambda: ledger.exists(), 180, "a first step")
    flow.living_driver()
    needless = ("ray.util.client.server", "dashboard/dashboard.py", "_private/monitor.py")
    assert not [name for name in needless if titled(flow.marked(), name)], "the local head brings what nobody uses"
    training, parked = ready(1)
    assert len(parked) == 2
    taken = replaced({max(training)})
    assert taken == parked, "the others were not waited for"
    replaced({min(taken)})  # before another stands by

    training, parked = ready(2)
    gone = parked.pop()
    psutil.Process(gone).kill()
    flow.wait_for(lambda: len(_workers(flow, ledger)[1] - {gone}) == 2, 120, "one for the one that was killed")
    training, parked = _workers(flow, ledger)
    replaced(training | parked)

    spare = flow.wait_for(lambda: titled(flow.marked(), "--spare"), 60, "a spare driver")
    assert spare is not None
    flow.living_driver().kill()
    replaced(set())
    assert [flow.living_driver()] == spare, "the one that stood by"

    slow.unlink()
    result = flow.completed(120)
    assert (result["worker_failures"], result["attempts"]) == (3, 2)
    assert lost_and_repeated(str(ledger), STEPS, LENGTH) == (0, 0)
    undisturbed = str(weights.with_name("undisturbed.npz"))
    torch_loop({**config, "weights": undisturbed})
    assert same_weights(weights, undisturbed, relative=1e-5)
    assert flow.marked() == []
    assert not re.search("standby workers? could not", flow.log)
