"""Workers that die are replaced by those that stand by."""

from __future__ import annotations

import re
from pathlib import Path

import psutil

from tests.support.processes import FlowProcess, Start, read_ledger, titled
from tests.support.session_loops import lost_and_repeated, same_weights, torch_loop

LENGTH, GLOBAL_BATCH, STEPS = 200, 20, 2000
READY = "2 of 2 standby workers are ready"


def _workers(flow: FlowProcess, ledger: Path) -> tuple[set[int], set[int]]:
    """Which processes train, and which stand by."""
    lines = read_ledger(ledger)
    training = {line["pid"] for line in lines if line["group"] == lines[-1]["group"]}
    return training, {process.pid for process in titled(flow.marked(), "RayTrainWorker")} - training


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
    training, parked = ready(1)
    assert len(parked) == 2
    taken = replaced({max(training)})
    assert taken == parked, "the others were not waited for"
    assert not replaced({min(taken)}) & parked, "none stands by right after that"

    training, parked = ready(2)
    gone = parked.pop()
    psutil.Process(gone).kill()
    flow.wait_for(lambda: len(_workers(flow, ledger)[1] - {gone}) == 2, 120, "one for the one that was killed")
    training, parked = _workers(flow, ledger)
    assert not replaced(training | parked) & parked

    slow.unlink()
    result = flow.completed(120)
    assert result["worker_failures"] == 3
    assert lost_and_repeated(str(ledger), STEPS, LENGTH) == (0, 0)
    undisturbed = str(weights.with_name("undisturbed.npz"))
    torch_loop({**config, "weights": undisturbed})
    assert same_weights(weights, undisturbed, relative=1e-5)
    assert flow.marked() == []
    assert not re.search("standby workers? could not", flow.log)
