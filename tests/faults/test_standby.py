"""Workers and drivers that die are replaced by those that stand by, or that are forked."""

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
from tests.support.session_loops import jax_loop, problems, same_weights, torch_loop

LENGTH, GLOBAL_BATCH, STEPS = 200, 20, 800
READY = "2 of 2 standby workers are ready"
#: Workers with an environment of their own are not forked.
OWN = {"env_vars": {"MINE": "1"}}


class _Training:
    """Two workers with a session, slow until they are let go, and what stands by for them."""

    def __init__(self, start: Start, folder: Path, framework: str, **more: Any) -> None:
        self.ledger, self.slow, self.weights = (folder / name for name in ("ledger.jsonl", "slow", "weights.npz"))
        self.slow.touch()
        self.config = {"steps": STEPS, "length": LENGTH, "global_batch": GLOBAL_BATCH, "save_every": 10}
        files = {"ledger": str(self.ledger), "weights": str(self.weights), "slow": str(self.slow), "sleep": 0.3}
        self.loop = {"torch": torch_loop, "jax": jax_loop}[framework]
        self.flow: FlowProcess = start(
            loop=f"tests.support.session_loops:{self.loop.__name__}",
            framework=framework,
            config={**self.config, **files},
            scaling={"min_workers": 2, "max_workers": 2, "standby": "on"},
            failures={"max_failures": -1, "max_attempts_without_progress": 10},
            **more,
        )
        self.flow.wait_for(lambda: self.ledger.exists(), 180, "a first step")
        self.flow.living_driver()

    def workers(self) -> tuple[set[int], set[int]]:
        """Which processes train, and which stand by."""
        lines = read_ledger(self.ledger)
        training = {line["pid"] for line in lines if line["group"] == lines[-1]["group"]}
        return training, {one.pid for one in titled(self.flow.marked(), "RayTrainWorker")} - training

    def ready(self, times: int) -> tuple[set[int], set[int]]:
        """Wait until workers have become ready to stand by so many times."""
        self.flow.wait_for(lambda: self.flow.log.count(READY) >= times, 180, f"standby workers for the {times}. time")
        return self.workers()

    def replaced(self, dead: set[int]) -> set[int]:
        """Kill processes, and wait for a new group of two that trains."""
        before = {line["group"] for line in read_ledger(self.ledger)}
        for pid in dead:
            psutil.Process(pid).kill()

        def trains() -> set[int] | None:
            pids = {line["pid"] for line in read_ledger(self.ledger) if line["group"] not in before}
            return pids if len(pids) == 2 else None

        return self.flow.wait_for(trains, 120, "two workers that train") or set()

    def end(self) -> dict[str, Any]:
        """Let it go, and return its result: each sample counted once, and the weights of one worker undisturbed."""
        self.slow.unlink()
        result = self.flow.completed(120)
        assert problems(str(self.ledger), STEPS, LENGTH) == []
        undisturbed = str(self.weights.with_name("undisturbed.npz"))
        self.loop({**self.config, "weights": undisturbed})
        assert same_weights(self.weights, undisturbed, relative=1e-5)
        assert self.flow.marked() == []
        assert not re.search("standby workers? could not", self.flow.log, re.IGNORECASE)
        return result


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


def test_a_worker_that_dies_is_replaced_by_the_ones_that_stand_by_and_so_is_a_driver(
    start: Start, tmp_path: Path
) -> None:
    training = _Training(start, tmp_path, "torch", worker_runtime_env=OWN)
    flow = training.flow
    working, parked = training.ready(1)
    assert len(parked) == 2
    assert training.replaced({max(working)}) == parked, "the others were not waited for"
    prestarted = flow.wait_for(lambda: titled(flow.marked(), "--prestarted"), 150, "a pre-started driver")
    flow.living_driver().kill()
    training.replaced(set())
    assert [flow.living_driver()] == prestarted
    result = training.end()
    assert (result["worker_failures"], result["attempts"]) == (1, 2)


@pytest.mark.full
def test_workers_are_replaced_while_others_boot_where_a_standby_has_died_and_where_all_do(
    start: Start, tmp_path: Path
) -> None:
    training = _Training(start, tmp_path, "torch", worker_runtime_env=OWN)
    flow = training.flow
    working, _ = training.ready(1)
    taken = training.replaced({max(working)})
    training.replaced({min(taken)})  # before another stands by
    working, parked = training.ready(2)
    gone = parked.pop()
    psutil.Process(gone).kill()
    flow.wait_for(lambda: len(training.workers()[1] - {gone}) == 2, 120, "one for the one that was killed")
    training.replaced(set.union(*training.workers()))
    result = training.end()
    assert (result["worker_failures"], result["attempts"]) == (3, 1)


@pytest.mark.full
@pytest.mark.parametrize(("framework", "rank"), [("torch", 1), ("jax", 0)])
def test_a_rank_that_dies_ten_times_is_replaced_each_time_by_others_ready_or_booting(
    start: Start, tmp_path: Path, framework: str, rank: int
) -> None:
    training, warm = _Training(start, tmp_path, framework, worker_runtime_env=OWN), 0
    for number in range(10):
        if number % 2:
            warm += 1
            _, parked = training.ready(warm)
        else:
            training.flow.wait_for(lambda: training.workers()[1], 60, "workers that boot")
            parked = set()
        victim = [line["pid"] for line in read_ledger(training.ledger) if line["rank"] == rank][-1]
        taken = training.replaced({victim})
        assert taken == parked or not parked
    result = training.end()
    assert (result["worker_failures"], result["attempts"]) == (10, 1)


@pytest.mark.parametrize("framework", ["torch", pytest.param("jax", marks=pytest.mark.full)])
def test_forked_workers_are_replaced_by_others_whichever_die(start: Start, tmp_path: Path, framework: str) -> None:
    training = _Training(start, tmp_path, framework)
    flow = training.flow
    needless = ("ray.util.client.server", "dashboard/dashboard.py", "_private/monitor.py")
    assert not [name for name in needless if titled(flow.marked(), name)], "the local head brings what nobody uses"
    first = read_ledger(training.ledger)[0]
    assert first["address"].startswith("127.0.0.1:"), "tools in the workers find the training's own cluster"
    assert not first["runtime_env"], "which would cost each of the workers a process before its own"

    [server] = titled(flow.marked(), "fork_server")
    are_forked = lambda pids: {psutil.Process(pid).ppid() == server.pid for pid in pids}  # noqa: E731
    working, _ = training.workers()
    assert are_forked(working) == {True}
    working = training.replaced({max(working)})
    flow.living_driver().kill()
    working = training.replaced(set())
    assert are_forked(working) == {True}
    server.kill()
    working = training.replaced({max(working)})
    assert "Workers are not forked, and take longer to start: its process ended with -9" in flow.log
    result = training.end()
    assert (result["worker_failures"], result["attempts"]) == (2, 2)
