"""Workers and drivers that die are replaced by those that stand by, or that are forked."""

import os
import re
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.clusters import ElasticCluster
from tests.support.loops import hashing_loop, train_config
from tests.support.processes import Start, read_ledger, titled
from tests.support.session_training import SessionTraining

READY = "2 of 2 standby workers are ready"
SCALING = {"min_workers": 2, "max_workers": 2, "standby": "on"}


class _Training(SessionTraining):
    """Two workers with a session, and what stands by for them."""

    def __init__(self, start: Start, folder: Path, framework: str = "torch", **more: Any) -> None:
        super().__init__(start, folder, framework, SCALING, **more)
        self.working = {line["pid"] for line in self.group()}
        self.flow.living_driver()

    def standbys(self) -> set[int]:
        """Return the processes that stand by."""
        return {one.pid for one in titled(self.flow.marked(), "RayTrainWorker")} - self.working

    def ready(self, times: int) -> set[int]:
        """Wait until workers have become ready to stand by so many times."""
        self.flow.wait_for(lambda: self.flow.log.count(READY) >= times, 180, f"standby workers for the {times}. time")
        return self.standbys()

    def replaced(self, *dead: int) -> set[int]:
        """Kill processes, and wait for a new group of two that trains."""
        self.working = {line["pid"] for line in self.group(dead=dead)}
        return self.working

    def end(self, *counts: int) -> list[int]:
        """Let it go, and check that nothing is left."""
        sizes = super().end(*counts)
        assert self.flow.marked() == []
        assert not re.search("standby workers? could not", self.flow.log, re.IGNORECASE)
        return sizes


def loop_of_its_own_environment(config: dict[str, Any]) -> None:
    """Train where the process is as it was asked for."""
    wanted = config["environment"]
    assert {name: os.environ.get(name) for name in wanted} == wanted
    hashing_loop(config)


@pytest.mark.full
def test_standbys_need_no_resources_of_a_shared_cluster_and_are_as_the_workers_are(
    start: Start, cluster: ElasticCluster, tmp_path: Path, ledger: str
) -> None:
    for pool in ("a", "b"):
        cluster.add(num_cpus=2, labels={"pool": pool})
    until, environment = tmp_path / "until", {"MINE": "1", "OMP_NUM_THREADS": "3"}
    flow = start(
        loop="tests.faults.test_standby:loop_of_its_own_environment",
        config=train_config(ledger, steps=100_000, sleep=0.2, until=str(until), environment=environment),
        worker_runtime_env={"env_vars": environment},
        scaling={**SCALING, "label_selector": [{"pool": "a"}, {"pool": "!b"}]},  # whose CPUs the workers hold all
        cluster=cluster.block,
    )
    flow.wait_for(lambda: READY in flow.log, 180, "standby workers")
    before = {line["pid"] for line in read_ledger(ledger)}
    booted = {process.pid for process in titled(cluster.processes(), "RayTrainWorker")} - before
    psutil.Process(max(before)).kill()
    taken = lambda: {line["pid"] for line in read_ledger(ledger)} - before  # noqa: E731
    flow.wait_for(lambda: len(taken()) == 2, 60, "two that take over")
    assert taken() <= booted
    until.touch()
    assert flow.completed(120)["attempts"] == 1


@pytest.mark.full
def test_workers_and_a_driver_that_die_are_replaced_by_the_ones_that_stand_by_or_boot(
    start: Start, tmp_path: Path
) -> None:
    # Workers with an environment of their own are not forked.
    training = _Training(start, tmp_path, worker_runtime_env={"env_vars": {"MINE": "1"}})
    flow = training.flow
    parked = training.ready(1)
    assert len(parked) == 2
    taken = training.replaced(max(training.working))
    assert taken == parked, "the others were not waited for"
    training.replaced(min(taken))  # before another stands by
    gone = training.ready(2).pop()
    psutil.Process(gone).kill()
    flow.wait_for(lambda: len(training.standbys() - {gone}) == 2, 120, "one for the one that was killed")
    training.replaced(*training.working, *training.standbys())
    prestarted = flow.wait_for(lambda: titled(flow.marked(), "--prestarted"), 150, "a pre-started driver")
    training.replaced(flow.living_driver().pid)
    assert [flow.living_driver()] == prestarted
    training.end(2, 3)


@pytest.mark.parametrize("framework", [pytest.param("torch", marks=pytest.mark.full), "jax"])
def test_forked_workers_are_replaced_by_others_whichever_die(start: Start, tmp_path: Path, framework: str) -> None:
    training = _Training(start, tmp_path, framework)
    flow = training.flow
    needless = ("ray.util.client.server", "dashboard/dashboard.py", "_private/monitor.py")
    assert not [name for name in needless if titled(flow.marked(), name)], "the local head brings what nobody uses"
    first = next(line for line in read_ledger(training.ledger) if line["rank"] == 0)
    assert first["address"].startswith("127.0.0.1:"), "tools in the workers find the training's own cluster"
    assert not first["runtime_env"], "which would cost each of the workers a process before its own"

    [server] = titled(flow.marked(), "fork_server")
    are_forked = lambda pids: {psutil.Process(pid).ppid() == server.pid for pid in pids}  # noqa: E731
    assert are_forked(training.working) == {True}
    training.replaced(first["pid"])  # with JAX the coordinator of all processes
    assert are_forked(training.replaced(flow.living_driver().pid)) == {True}
    server.kill()
    training.replaced(max(training.working))
    training.end(2, 2)
