"""Whose fault it is when collectives break: that of the rank or node that died, or of the rank that raised."""

from typing import Any

import psutil
import pytest

from prefect_elastic_train.core import events as ev
from tests.support.clusters import ElasticCluster
from tests.support.processes import FlowProcess, Start, read_ledger, records
from tests.support.reports import history

pytestmark = pytest.mark.full

GPUS = {"accelerator": "gpu", "resources_per_worker": {"GPU": 1}, "min_workers": 2, "max_workers": 2}


def _train(start: Start, ledger: str, max_failures: int, raises: Any = None, **more: Any) -> FlowProcess:
    return start(
        loop="tests.support.loops:gloo_loop",
        framework="torch",
        config={"steps": 100_000, "sleep": 0.02, "ledger": ledger, "raises": raises},
        torch_backend="gloo",
        failures={"driver_restart_delay_seconds": 0, "driver_restarts": 1, "max_failures": max_failures},
        **more,
    )


def _trained(flow: FlowProcess, ledger: str, known: set[int]) -> dict[str, Any]:
    """Wait until a new worker group has trained, and return the newest line of its rank 1."""

    def lines() -> list[dict[str, Any]]:
        return [line for line in read_ledger(ledger) if line["pid"] not in known and line["rank"] == 1][20:]

    return flow.wait_for(lines, 300, f"a worker group after {known}")[-1]


def test_a_lost_node_is_one_failure_of_the_budget_and_beyond_it_a_lost_cluster_whatever_its_peers_collectives_say(
    start: Start, cluster: ElasticCluster, ledger: str
) -> None:
    cluster.add_gpu(), cluster.add_gpu()
    flow, known = _train(start, ledger, 1, scaling=GPUS, cluster=cluster.block), set[int]()
    for _ in range(2):
        cluster.remove(_trained(flow, ledger, known)["node"])  # at once, as a lost machine is
        cluster.add_gpu()
        known = {line["pid"] for line in read_ledger(ledger)}
    _trained(flow, ledger, known)
    first, second = history(flow.run, ev.GroupFailed)
    assert (first.left, first.retried, second.retried) == (0, True, False)
    [record] = records(flow.run, "ended")
    assert (record["outcome"], flow.process.poll()) == ("cluster_lost", None), record["message"]
    assert record["message"].startswith("workers died more often than max_failures allows: rank 1: ")
    assert "Retry 1/1 will start" in flow.log, "Prefect's line about the retry"


def test_a_killed_rank_is_a_death_and_one_that_raises_is_the_users_error_although_its_peers_fail_first(
    start: Start, ledger: str
) -> None:
    flow = _train(start, ledger, 0, raises=[300, 1], scaling={"min_workers": 2, "max_workers": 2})
    psutil.Process(_trained(flow, ledger, set())["pid"]).kill()
    error = flow.wait(240)["error"]
    raised = [line["at"] for line in read_ledger(ledger) if line["step"] == 300]
    killed, by_user = history(flow.run, ev.GroupFailed)
    assert [record["outcome"] for record in records(flow.run, "ended")] == ["cluster_lost", "user_error"]
    assert "rank 1: ValueError: step 300 has no gradient" in error
    assert by_user.at - max(raised) < 5, "nothing is waited for once a rank has raised"
    assert killed.causes
