"""Whose fault it is when collectives break: that of the rank or node that died, or of the rank that raised."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.runs.history import read_history
from prefect_elastic_train.storage.store import LocalRunStore
from tests.support.clusters import ElasticCluster
from tests.support.processes import FlowProcess, Start, read_ledger, records

GPUS = {"accelerator": "gpu", "resources_per_worker": {"GPU": 1}, "min_workers": 2, "max_workers": 2}
LOSSES = 5


def _train(start: Start, folder: Path, failures: dict[str, Any], raises: Any = None, **more: Any) -> FlowProcess:
    config = {"steps": 100_000, "sleep": 0.02, "ledger": str(folder / "ledger.jsonl"), "raises": raises}
    failures = {"driver_restart_delay_seconds": 0, **failures}
    loop = "tests.support.loops:gloo_loop"
    return start(loop=loop, framework="torch", config=config, torch_backend="gloo", failures=failures, **more)


def _lose_node(flow: FlowProcess, cluster: ElasticCluster, folder: Path, number: int) -> None:
    """Remove the node of rank 1 at once, as a lost machine is, once the group has trained; another one comes."""
    pids = {line["pid"] for line in read_ledger(folder / "ledger.jsonl")}
    seen = set[int]() if not number else pids

    def trains() -> list[dict[str, Any]]:
        new = [line for line in read_ledger(folder / "ledger.jsonl") if line["pid"] not in seen and line["rank"] == 1]
        return new[20:]

    line = flow.wait_for(trains, 300, f"the worker group after {number} losses")[-1]
    time.sleep(0.013 * number)  # at another moment of the step each time
    cluster.remove(line["node"])
    cluster.add_gpu()


def _failures(flow: FlowProcess) -> list[ev.Event]:
    assert flow.run is not None
    return [event for event in read_history(LocalRunStore(str(flow.run))) if isinstance(event, ev.GroupFailed)]


def _ended(flow: FlowProcess) -> list[dict[str, Any]]:
    return records(flow.run, "ended")


@pytest.mark.full
def test_a_lost_node_is_a_lost_cluster_for_a_new_driver_whatever_its_peers_collectives_say(
    start: Start, cluster: ElasticCluster, tmp_path: Path
) -> None:
    cluster.add_gpu(), cluster.add_gpu()
    budget = {"max_failures": 0, "driver_restarts": LOSSES}
    flow = _train(start, tmp_path, budget, scaling=GPUS, cluster=cluster.block)
    for number in range(LOSSES):
        _lose_node(flow, cluster, tmp_path, number)
        record = flow.wait_for(lambda: _ended(flow)[number:], 180, "the end of the attempt")[0]
        assert (record["outcome"], flow.process.poll()) == ("cluster_lost", None), record["message"]
        assert record["message"].startswith("workers died more often than max_failures allows: rank 1: ")
    assert len(_failures(flow)) == LOSSES
    flow.wait_for(lambda: f"Retry {LOSSES}/{LOSSES} will start" in flow.log, 60, "Prefect's line about the retry")


def test_a_lost_node_is_one_failure_of_the_budget(start: Start, cluster: ElasticCluster, tmp_path: Path) -> None:
    cluster.add_gpu(), cluster.add_gpu()
    flow = _train(start, tmp_path, {"max_failures": 1, "driver_restarts": 0}, scaling=GPUS, cluster=cluster.block)
    _lose_node(flow, cluster, tmp_path, 0)
    before = {line["pid"] for line in read_ledger(tmp_path / "ledger.jsonl")}
    flow.wait_for(lambda: {line["pid"] for line in read_ledger(tmp_path / "ledger.jsonl")} - before, 180, "to go on")
    (failed,) = _failures(flow)
    assert (type(failed), failed.left) == (ev.WorkerFailed, 0)


def test_a_killed_rank_is_a_death_and_one_that_raises_is_the_users_error_although_its_peers_fail_first(
    start: Start, tmp_path: Path
) -> None:
    budget, scaling = {"max_failures": 0, "driver_restarts": 1}, {"min_workers": 2, "max_workers": 2}
    flow = _train(start, tmp_path, budget, raises=[300, 1], scaling=scaling)
    flow.wait_for(lambda: len(read_ledger(tmp_path / "ledger.jsonl")) > 60, 300, "steps")
    psutil.Process([line for line in read_ledger(tmp_path / "ledger.jsonl") if line["rank"] == 1][-1]["pid"]).kill()
    error = flow.wait(240)["error"]
    raised = [line["at"] for line in read_ledger(tmp_path / "ledger.jsonl") if line["step"] == 300]
    killed, by_user = _failures(flow)
    assert [record["outcome"] for record in _ended(flow)] == ["cluster_lost", "user_error"]
    assert "rank 1: ValueError: step 300 has no gradient" in error
    assert by_user.at - max(raised) < 5, "nothing is waited for once a rank has raised"
    assert killed.errors
