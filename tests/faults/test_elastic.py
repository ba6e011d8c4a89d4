"""The worker group follows the capacity of a cluster whose nodes come and go, are drained and are lost."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect.client.orchestration import get_client

from prefect_elastic_train.core.events import (
    AttemptStarted,
    CheckpointCommitted,
    Event,
    WaitingForCapacity,
    WorkerGroupResized,
    WorkerGroupStarted,
)
from prefect_elastic_train.runs.history import read_history
from prefect_elastic_train.storage.store import LocalRunStore
from tests.support.clusters import ElasticCluster
from tests.support.loops import hash_after
from tests.support.processes import FlowProcess, commits, read_ledger, repeated, steps_of, wait_for
from tests.support.reports import incidents_of, report_of, run_events

Start = Callable[..., FlowProcess]

INTERVAL, STABILITY = 2.0, 1.0


@pytest.fixture(scope="module")
def lasting_cluster() -> Iterator[ElasticCluster]:
    """The head that all nodes of these tests join."""
    made = ElasticCluster()
    yield made
    made.close()


@pytest.fixture
def cluster(lasting_cluster: ElasticCluster) -> Iterator[ElasticCluster]:
    """A cluster without nodes for workers."""
    yield lasting_cluster
    lasting_cluster.clear()


class Training:
    """A training of hashed steps that goes on until it is told to end."""

    def __init__(self, start: Start, cluster: ElasticCluster, folder: Path, **arguments: Any) -> None:
        self.ledger = folder / "ledger.jsonl"
        self._until = folder / "until"
        config = {
            "steps": 100_000,
            "checkpoint_every": 5,
            "sleep": 0.2,
            "ledger": str(self.ledger),
            "until": str(self._until),
            **arguments.pop("config", {}),
        }
        scaling = {
            "accelerator": "gpu",
            "resources_per_worker": {"GPU": 1},
            "resize_check_interval_seconds": INTERVAL,
            "stability_delay_seconds": STABILITY,
            **arguments.pop("scaling"),
        }
        self.flow = start(
            **{
                "loop": "tests.support.loops:hashing_loop",
                "framework": "none",
                "config": config,
                "scaling": scaling,
                "cluster": cluster.block,
                **arguments,
            }
        )

    @property
    def sizes(self) -> list[int]:
        """Give the sizes of the worker groups that trained, in order."""
        found: list[int] = []
        pid = 0
        for line in read_ledger(self.ledger):
            if line["rank"] == 0 and line["pid"] != pid:
                pid = line["pid"]
                found.append(line["world"])
        return found

    def node_of(self, rank: int) -> str:
        """Give the node of a rank of the group that trains."""
        return str([line["node"] for line in read_ledger(self.ledger) if line["rank"] == rank][-1])

    def events(self) -> list[Event]:
        """Give the history of the run."""
        return list(read_history(LocalRunStore(str(self.flow.run)))) if self.flow.run else []

    def wait_for_size(self, size: int, timeout: float = 150) -> None:
        """Wait until a group of that size is the one that trains, and has committed."""
        wait_for(lambda: self.sizes[-1:] == [size], timeout, f"{size} workers, not {self.sizes}")
        # Their number says nothing: old ones are removed.
        before = commits(self.flow.run)[-1:]
        self.flow.wait_for(lambda: commits(self.flow.run)[-1:] != before, 60, "a commit")

    def end(self) -> dict[str, Any]:
        """Let it end, and check that every step counted once."""
        self._until.touch()
        outcome = self.flow.wait(180)
        assert outcome["state"] == "COMPLETED", outcome
        result: dict[str, Any] = outcome["result"]
        step, state = json.loads((Path(result["checkpoint_uri"]) / "state.json").read_text())
        assert step == steps_of(self.ledger)[-1]
        assert state == hash_after(step)
        return result


def test_gpu_workers_follow_the_nodes_from_none_to_all(start: Start, cluster: ElasticCluster, tmp_path: Path) -> None:
    gpus, fewest, more, most = 1, 1, 2, 3
    training = Training(start, cluster, tmp_path, scaling={"min_workers": fewest, "max_workers": most})
    wait_for(lambda: any(isinstance(e, WaitingForCapacity) for e in training.events()), 120, "a word of waiting")
    first = cluster.add_gpus(gpus)
    training.wait_for_size(fewest)
    second, third = cluster.add_gpus(gpus), cluster.add_gpus(gpus)
    arrived = time.time()
    training.wait_for_size(most)
    cluster.remove(third)
    training.wait_for_size(more)
    groups = len(training.sizes)
    cluster.remove(first, second)
    wait_for(lambda: isinstance(training.events()[-1], WaitingForCapacity), 120, "a word of waiting")
    cluster.add_gpus(gpus)
    wait_for(lambda: len(training.sizes) > groups and training.sizes[-1] == fewest, 150, "workers again")
    result = training.end()
    assert all(fewest <= size <= most for size in training.sizes)
    assert result["attempts"] == 1, "waiting costs no retry"
    assert result["worker_failures"] == 2
    growths = [event for event in training.events() if isinstance(event, WorkerGroupResized)]
    assert {event.reason for event in growths} == {"commit"}
    first_growth = next(event for event in growths if event.new_size == most)
    # One of the two nodes may come while the group is restarted for the other.
    groups_started = [event.at for event in training.events() if isinstance(event, WorkerGroupStarted)]
    arrived = max(arrived, *(at for at in groups_started if at < first_growth.at))
    committed = [event.at for event in training.events() if isinstance(event, CheckpointCommitted)]
    commit_interval = statistics.median(later - earlier for earlier, later in itertools.pairwise(committed))
    assert first_growth.at - arrived <= 1.5 * (INTERVAL + STABILITY) + commit_interval, "at the next commit"


@pytest.mark.full
def test_a_lost_node_is_replaced_below_the_minimum(start: Start, cluster: ElasticCluster, tmp_path: Path) -> None:
    nodes = [cluster.add_gpus(1), cluster.add_gpus(1)]
    training = Training(start, cluster, tmp_path, scaling={"min_workers": 2, "max_workers": 2})
    training.wait_for_size(2)
    cluster.remove(nodes[0])
    wait_for(lambda: isinstance(training.events()[-1], WaitingForCapacity), 60, "a word of waiting")
    cluster.add_gpus(1)
    wait_for(lambda: training.sizes == [2, 2], 60, "two workers again")
    result = training.end()
    assert (result["attempts"], result["worker_failures"]) == (1, 1)


@pytest.mark.full
def test_a_killed_worker_a_killed_driver_and_a_resize_are_told_as_just_these_three(
    start: Start, cluster: ElasticCluster, tmp_path: Path, api: str
) -> None:
    cluster.add_gpus(2)
    config = {"checkpoint_every": 20, "sleep": 0.1}
    training = Training(start, cluster, tmp_path, scaling={"max_workers": 3}, config=config)
    training.wait_for_size(2)
    psutil.Process(next(line["pid"] for line in read_ledger(training.ledger) if line["rank"] == 1)).kill()
    wait_for(lambda: training.sizes == [2, 2], 60, "two workers again")
    training.wait_for_size(2)
    driver = training.flow.driver()
    assert driver is not None
    driver.kill()
    wait_for(lambda: training.sizes == [2, 2, 2], 120, "a new driver's workers")
    training.wait_for_size(2)
    cluster.add_gpus(1)
    training.wait_for_size(3)
    result = training.end()

    counted = {name: result[name] for name in ("attempts", "worker_failures", "preemptions", "resizes")}
    assert counted == {"attempts": 2, "worker_failures": 1, "preemptions": 0, "resizes": 1}
    with get_client(sync_client=True) as client:
        report = report_of(client, training.flow.flow_run_id)
        told = run_events(client, training.flow.flow_run_id)
    assert "1 worker failure, 1 driver restart, 1 resize" in report
    happened = incidents_of(report)[::-1]
    assert [what.partition(":")[0] for what, _ in happened] == [
        "attempt 1 starts from the beginning",
        "worker failure",
        "attempt 2",
        "from 2 to 3 workers; nothing is done again",
        "completed",
    ]
    _, failure, restart, resize, _ = [why for _, why in happened]
    assert "rank 1: its process was killed or has crashed" in failure
    assert "was ended by signal 9 (SIGKILL)" in restart
    assert "there is room for 3 workers" in resize
    troubles = {"worker-failed", "preempted", "driver-restarted", "resized", "waiting-for-capacity", "storage-waited"}
    names = [event["event"].removeprefix("elastic-train.run.") for event in told]
    assert [name for name in names if name in troubles] == ["worker-failed", "driver-restarted", "resized"]
    assert (names[0], names[-1]) == ("started", "completed")
    payloads = {name: event["payload"] for name, event in zip(names, told, strict=True)}
    assert payloads["worker-failed"]["ranks"][-1] == 1
    assert "SIGKILL" in payloads["driver-restarted"]["reason"]
    assert (payloads["resized"]["old_size"], payloads["resized"]["new_size"]) == (2, 3)

    spent = result["time"]
    assert payloads["completed"]["time"] == spent
    history = training.events()
    begun = [event for event in history if isinstance(event, AttemptStarted)]
    wall = history[-1].at - begun[0].driver_started_at
    assert spent["wall_seconds"] == pytest.approx(wall, rel=0.01)
    parts = {name: seconds for name, seconds in spent.items() if name not in ("wall_seconds", "stopped_seconds")}
    assert sum(parts.values()) == pytest.approx(spent["wall_seconds"], rel=0.01)
    assert (spent["stopped_seconds"], spent["waiting_for_capacity_seconds"]) == (0, 0)
    # The ledger has its own view of the same: the gaps in which no step was taken, by their cause.
    steps = [line for line in read_ledger(training.ledger) if line["rank"] == 0]
    gaps = [
        (one["at"], other["at"] - one["at"]) for one, other in itertools.pairwise(steps) if one["pid"] != other["pid"]
    ]
    assert len(gaps) == 3
    assert spent["restart_seconds"] == pytest.approx(gaps[0][1] + gaps[1][1], abs=3)
    assert spent["resize_seconds"] == pytest.approx(gaps[2][1], abs=1.5)
    assert spent["startup_seconds"] >= steps[0]["at"] - begun[0].driver_started_at - 1
    trained = sum(other["at"] - one["at"] for one, other in itertools.pairwise(steps) if one["pid"] == other["pid"])
    kept_or_lost = spent["productive_seconds"] + spent["lost_seconds"] + spent["checkpoint_stall_seconds"]
    assert kept_or_lost == pytest.approx(trained, abs=3)
    assert spent["lost_seconds"] <= 2 * 20 * trained / len(steps) + 1, "two intervals between checkpoints"
    assert result["goodput"] == pytest.approx(spent["productive_seconds"] / spent["wall_seconds"], abs=1e-3)


def test_a_healthy_group_grows_without_losing_a_step(start: Start, cluster: ElasticCluster, tmp_path: Path) -> None:
    cluster.add_gpus(1)
    config = {"checkpoint_every": 20, "ask": True}
    training = Training(start, cluster, tmp_path, scaling={"max_workers": 2}, config=config)
    training.wait_for_size(1)
    cluster.add_gpus(1)
    training.wait_for_size(2)
    result = training.end()
    assert training.sizes == [1, 2]
    assert repeated(steps_of(training.ledger)) == 0
    assert (result["resizes"], result["worker_failures"], result["preemptions"]) == (1, 0, 0)


def test_a_drained_node_gives_way_at_once_after_its_last_checkpoint(
    start: Start, cluster: ElasticCluster, tmp_path: Path
) -> None:
    cluster.add_gpus(1)
    cluster.add_gpus(1)
    config = {"checkpoint_every": 1000, "ask": True}
    training = Training(start, cluster, tmp_path, scaling={"max_workers": 2}, config=config)
    wait_for(lambda: len(steps_of(training.ledger)) > 10, 120, "training")
    assert training.sizes == [2]
    drained = training.node_of(0)
    notice = time.time()
    cluster.drain(drained, 30)
    wait_for(lambda: training.sizes == [2, 1], 60, "a smaller group")
    resumed_at = next(line["at"] for line in read_ledger(training.ledger) if line["world"] == 1)
    assert resumed_at - notice < 28, "before the deadline"
    cluster.remove(drained)
    result = training.end()
    assert repeated(steps_of(training.ledger)) <= 1
    assert (result["preemptions"], result["worker_failures"], result["attempts"]) == (1, 0, 1)
    committed = [e.at for e in training.events() if isinstance(e, CheckpointCommitted) and e.at < resumed_at][-1]
    assert resumed_at - committed < 20, "from the just-in-time checkpoint to the first step of the smaller group"


@pytest.mark.full
def test_a_drain_shorter_than_the_upload_goes_on_from_the_commit_before(
    start: Start, cluster: ElasticCluster, tmp_path: Path
) -> None:
    cluster.add_gpus(1)
    cluster.add_gpus(1)
    config = {"checkpoint_every": 20, "ask": True, "upload_seconds": 12}
    failures = {"max_failures": 0}
    training = Training(start, cluster, tmp_path, scaling={"max_workers": 2}, config=config, failures=failures)
    training.flow.wait_for(lambda: len(commits(training.flow.run)) == 1, 120, "a commit")
    drained = training.node_of(0)
    cluster.drain(drained, 5)
    time.sleep(5)
    cluster.remove(drained)
    wait_for(lambda: training.sizes == [2, 1], 90, "a smaller group")
    assert [line["resumed_from"] for line in read_ledger(training.ledger)][-1] == 20
    result = training.end()
    assert (result["preemptions"], result["worker_failures"], result["attempts"]) == (1, 0, 1)
    folders = {path.name for path in Path(training.flow.run or "").glob("checkpoint_*")}
    assert len(folders) <= 3, "what was uploaded in part is gone"


@pytest.mark.full
def test_a_node_that_comes_and_goes_does_not_restart_the_run_each_time(
    start: Start, cluster: ElasticCluster, tmp_path: Path
) -> None:
    cluster.add_gpus(1)
    scaling = {"max_workers": 2, "stability_delay_seconds": 20}
    training = Training(start, cluster, tmp_path, scaling=scaling)
    training.wait_for_size(1)
    ends = time.monotonic() + 120
    while time.monotonic() < ends:
        node = cluster.add_gpus(1)
        time.sleep(10)
        cluster.remove(node)
    training.end()
    assert training.sizes == [1], "it has never been there for long enough"


@pytest.mark.full
def test_a_wait_for_capacity_ends_when_its_bound_is_reached(
    start: Start, cluster: ElasticCluster, tmp_path: Path
) -> None:
    cluster.add_gpus(1)
    scaling = {"min_workers": 2, "max_workers": 2, "capacity_timeout_seconds": 5}
    training = Training(start, cluster, tmp_path, scaling=scaling)
    outcome = training.flow.wait(120)
    assert outcome["state"] == "FAILED"
    assert outcome["outcome"] == "timed_out"
    assert "1 more worker(s) with GPU=1" in outcome["error"]
    assert "capacity_timeout_seconds" in outcome["error"]
    assert "Waiting for capacity" in training.flow.log


TPUS = {
    "accelerator": "tpu",
    "resources_per_worker": {"TPU": 4, "CPU": 1},
    "topology": "2x4",
    "accelerator_type": "TPU-V6E",
    "placement_strategy": "SPREAD",
}


@pytest.mark.full
def test_tpu_workers_fill_whole_slices_or_none(start: Start, cluster: ElasticCluster, tmp_path: Path) -> None:
    cluster.add_host("one", 0)
    scaling = {**TPUS, "min_workers": 2, "max_workers": 4}
    training = Training(start, cluster, tmp_path, scaling=scaling, framework="jax")
    waiting = wait_for(
        lambda: [e for e in training.events() if isinstance(e, WaitingForCapacity)], 120, "a word of waiting"
    )
    assert "one: 4 of 8 chips are there" in waiting[0].missing
    cluster.add_host("one", 1)
    training.wait_for_size(2)
    other = [cluster.add_host("two", 0), cluster.add_host("two", 1)]
    training.wait_for_size(4)
    cluster.remove(other[1])
    training.wait_for_size(2)
    result = training.end()
    assert training.sizes == [2, 4, 2]
    assert (result["attempts"], result["worker_failures"], result["resizes"]) == (1, 1, 1)
    for line in read_ledger(training.ledger):
        numbers = {name: line["slices"].get(f"MEGASCALE_{name}") for name in ("NUM_SLICES", "SLICE_ID")}
        several = {"NUM_SLICES": "2", "SLICE_ID": str(line["rank"] // 2)}
        assert numbers == (several if line["world"] == 4 else dict.fromkeys(numbers)), line


@pytest.mark.full
def test_a_slice_goes_whole_when_one_of_its_hosts_is_drained(
    start: Start, cluster: ElasticCluster, tmp_path: Path
) -> None:
    hosts = {name: [cluster.add_host(name, number) for number in range(2)] for name in ("one", "two")}
    config = {"checkpoint_every": 1000, "ask": True}
    scaling = {**TPUS, "min_workers": 2, "max_workers": 4}
    training = Training(start, cluster, tmp_path, scaling=scaling, config=config)
    wait_for(lambda: len(steps_of(training.ledger)) > 10, 120, "training")
    assert training.sizes == [4]
    drained, stays = (
        (hosts["one"], hosts["two"]) if training.node_of(0) in hosts["one"] else (hosts["two"], hosts["one"])
    )
    cluster.drain(drained[1], 30)
    wait_for(lambda: training.sizes == [4, 2], 60, "one slice")
    assert {training.node_of(0), training.node_of(1)} == set(stays)
    cluster.remove(drained[1])
    result = training.end()
    assert repeated(steps_of(training.ledger)) <= 1
    assert (result["preemptions"], result["worker_failures"], result["attempts"]) == (1, 0, 1)


@pytest.mark.full
def test_a_slice_of_another_job_and_one_without_a_host_are_waited_for(
    start: Start, cluster: ElasticCluster, tmp_path: Path
) -> None:
    broken = [cluster.add_host("broken", 0), cluster.add_host("broken", 1)]
    cluster.add_host("busy", 0)
    cluster.add_host("busy", 1)
    cluster.remove(broken[1])
    job = cluster.hold({"TPU": 4}, {"ray.io/tpu-slice-name": "busy", "ray.io/tpu-worker-id": "1"})
    training = Training(start, cluster, tmp_path, scaling={**TPUS, "min_workers": 2, "max_workers": 4})
    waiting = wait_for(
        lambda: [e for e in training.events() if isinstance(e, WaitingForCapacity)], 120, "a word of waiting"
    )
    assert "broken: 4 of 8 chips are there" in waiting[0].missing
    assert "busy: held by another job" in waiting[0].missing
    time.sleep(5)
    assert training.sizes == []
    job.kill()
    training.wait_for_size(2)
    training.end()
    assert training.sizes == [2]
