"""The worker group follows the capacity of a cluster whose nodes come and go, are drained and are lost."""

import itertools
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.request import DRIVER_MODULE, JOB_MODULE
from tests.support.clusters import ElasticCluster
from tests.support.loops import is_right
from tests.support.processes import Start, call, commits, read_ledger, repeated, steps_of
from tests.support.reports import history, report_of, run_events

INTERVAL, STABILITY = 2.0, 1.0
TPUS = {
    "accelerator": "tpu",
    "resources_per_worker": {"TPU": 4, "CPU": 1},
    "topology": "2x4",
    "accelerator_type": "TPU-V6E",
    "placement_strategy": "SPREAD",
    "min_workers": 2,
    "max_workers": 4,
}


class Training:
    """A training of hashed steps that goes on until it is told to end."""

    def __init__(self, start: Start, cluster: ElasticCluster, folder: Path, **arguments: Any) -> None:
        self.ledger, self._until = folder / "ledger.jsonl", folder / "until"
        config = {"steps": 100_000, "checkpoint_every": 20, "sleep": 0.2, "ask": True, "ledger": str(self.ledger)}
        often = {"resize_check_interval_seconds": INTERVAL, "stability_delay_seconds": STABILITY}
        gpus = {"accelerator": "gpu", "resources_per_worker": {"GPU": 1}, "max_workers": 2}
        self.flow = start(
            config={**config, "until": str(self._until), **arguments.pop("config", {})},
            scaling={**gpus, **often, **arguments.pop("scaling", {})},
            cluster=cluster.block,
            **arguments,
        )

    @property
    def sizes(self) -> list[int]:
        """The sizes of the worker groups that trained, in order."""
        of_first = [line for line in read_ledger(self.ledger) if line["rank"] == 0]
        return [next(group)["world"] for _, group in itertools.groupby(of_first, lambda line: line["pid"])]

    def node_of(self, rank: int) -> str:
        """The node of a rank of the group that trains."""
        return str([line["node"] for line in read_ledger(self.ledger) if line["rank"] == rank][-1])

    def events(self) -> list[ev.Event]:
        """The history of the run."""
        return history(self.flow.run, ev.Event)

    def wait_for_group(self, *sizes: int) -> None:
        """Wait until groups of just these sizes have trained."""
        self.flow.wait_for(lambda: self.sizes == list(sizes), 120, f"{sizes} workers, not {self.sizes}")

    def wait_for_sizes(self, *sizes: int) -> None:
        """Wait until groups of just these sizes have trained, and the last has committed."""
        self.wait_for_group(*sizes)
        # Their number says nothing: old ones are removed.
        before = commits(self.flow.run)[-1:]
        self.flow.wait_for(lambda: commits(self.flow.run)[-1:] != before, 60, "a commit")

    def wait_for_waiting(self) -> str:
        """Wait until a word of waiting is the newest of the group, and return what it says is missing."""

        def waits() -> list[str]:
            trained = (ev.WorkerGroupStarted, ev.CheckpointCommitted)
            since = itertools.takewhile(lambda event: not isinstance(event, trained), reversed(self.events()))
            return [event.missing for event in since if isinstance(event, ev.WaitingForCapacity)]

        return self.flow.wait_for(waits, 120, "a word of waiting")[0]

    def end(self, counts: tuple[int, int, int]) -> dict[str, Any]:
        """Let it end, and check its attempts, worker failures and preemptions, and that every step counted once."""
        self._until.touch()
        result = self.flow.completed(180)
        assert is_right(result["checkpoint_uri"], steps_of(self.ledger)[-1])
        assert (result["attempts"], result["worker_failures"], result["preemptions"]) == counts
        return result


# The first of them, as trainings leave an actor of Ray's in their cluster.
@pytest.mark.full
@pytest.mark.parametrize("name", [DRIVER_MODULE, JOB_MODULE, "another.program"])
def test_placement_group_that_outlives_its_killed_driver_is_removed_if_it_is_ours(
    cluster: ElasticCluster, name: str
) -> None:
    cluster.add(num_cpus=1)
    time.sleep(5)  # until Ray knows that the node of the test before is gone: the driver could connect to it
    command = sys.executable, "-m", "tests.support.orphans", cluster.address, name
    removed, kept = map(int, call(*command, env=cluster.environment).splitlines()[-1].split())
    assert (removed > 0, kept == 0) == (name != "another.program",) * 2


def test_workers_wait_for_nodes_grow_with_them_and_give_way_to_drained_and_lost_ones(
    start: Start, cluster: ElasticCluster, tmp_path: Path
) -> None:
    training = Training(start, cluster, tmp_path)
    training.wait_for_waiting()
    nodes = {cluster.add_gpu()}
    training.wait_for_sizes(1)
    nodes.add(cluster.add_gpu())
    arrived = time.time()
    training.wait_for_sizes(1, 2)
    [grown] = [event for event in training.events() if isinstance(event, ev.WorkerGroupResized)]
    assert (grown.reason, grown.new_size) == ("commit", 2)
    assert grown.at - arrived <= 1.5 * (INTERVAL + STABILITY) + 20 * 0.2, "at the next commit"
    assert repeated(steps_of(training.ledger)) == 0, "no step is done again"

    drained = training.node_of(0)
    notice = time.time()
    cluster.drain(drained, 30)
    training.wait_for_group(1, 2, 1)
    later = (line for line in read_ledger(training.ledger) if line["at"] > notice)
    resumed_at = next(line["at"] for line in later if line["world"] == 1)
    assert resumed_at - notice < 28, "before the deadline"
    committed = [e.at for e in training.events() if isinstance(e, ev.CheckpointCommitted) and e.at < resumed_at][-1]
    assert resumed_at - committed < 20, "from the just-in-time checkpoint to the first step of the smaller group"
    assert repeated(steps_of(training.ledger)) <= 1
    cluster.remove(drained)

    cluster.remove(*nodes - {drained})
    training.wait_for_waiting()
    cluster.add_gpu()
    training.wait_for_sizes(1, 2, 1, 1)
    training.end((1, 1, 1))


@pytest.mark.full
def test_a_killed_worker_a_killed_driver_and_a_resize_are_told_as_just_these_three(
    start: Start, cluster: ElasticCluster, tmp_path: Path, client: SyncPrefectClient
) -> None:
    cluster.add_gpu()
    cluster.add_gpu()
    config = {"sleep": 0.1, "ask": False}
    training = Training(start, cluster, tmp_path, scaling={"max_workers": 3}, config=config)
    training.wait_for_sizes(2)
    psutil.Process(next(line["pid"] for line in read_ledger(training.ledger) if line["rank"] == 1)).kill()
    training.wait_for_sizes(2, 2)
    training.flow.living_driver().kill()
    training.wait_for_sizes(2, 2, 2)
    cluster.add_gpu()
    training.wait_for_sizes(2, 2, 2, 3)
    result = training.end((2, 1, 0))

    assert result["resizes"] == 1
    report = report_of(client, training.flow.flow_run_id)
    assert "1 resize" in report
    assert report.partition("**Failures:** ")[2].partition("\n")[0].count("1 × ") == 2, "a worker and a driver"

    spent, history = result["time"], training.events()
    assert run_events(client, training.flow.flow_run_id)[-1]["payload"]["time"] == spent
    begun = next(event for event in history if isinstance(event, ev.AttemptStarted)).driver_started_at
    assert spent["wall_seconds"] == pytest.approx(history[-1].at - begun, rel=0.01)
    # The ledger has its own view of the same: the gaps in which no step was taken, by their cause.
    pairs = list(itertools.pairwise(line for line in read_ledger(training.ledger) if line["rank"] == 0))
    first, second, third = [two["at"] - one["at"] for one, two in pairs if one["pid"] != two["pid"]]
    assert spent["restart_seconds"] == pytest.approx(first + second, abs=3)
    assert spent["resize_seconds"] == pytest.approx(third, abs=1.5)
    assert spent["startup_seconds"] >= pairs[0][0]["at"] - begun - 1
    trained = sum(two["at"] - one["at"] for one, two in pairs if one["pid"] == two["pid"])
    kept_or_lost = spent["productive_seconds"] + spent["lost_seconds"] + spent["checkpoint_stall_seconds"]
    assert kept_or_lost == pytest.approx(trained, abs=3)
    assert spent["lost_seconds"] <= 2 * 20 * trained / len(pairs) + 1, "two intervals between checkpoints"


@pytest.mark.full
def test_a_node_that_goes_much_later_is_used_until_another_group_can_start(
    start: Start, cluster: ElasticCluster, tmp_path: Path
) -> None:
    cluster.add_gpu()
    training = Training(start, cluster, tmp_path, scaling={"max_workers": 1})
    training.flow.wait_for_commits(1)
    drained = training.node_of(0)
    cluster.drain(drained, 100)
    notice = time.time()
    time.sleep(20)
    assert read_ledger(training.ledger)[-1]["at"] > notice + 15, "it trains on"
    cluster.add_gpu()
    training.wait_for_group(1, 1)
    assert time.time() - notice < 60, "long before the deadline"
    assert training.node_of(0) != drained
    assert repeated(steps_of(training.ledger)) <= 1
    cluster.remove(drained)
    training.end((1, 0, 1))


@pytest.mark.full
def test_tpu_workers_fill_whole_free_slices_and_leave_one_whole_when_a_host_is_drained(
    start: Start, cluster: ElasticCluster, tmp_path: Path
) -> None:
    cluster.add_host("broken", 0)
    busy = cluster.add_slice("busy")
    job = cluster.hold({"TPU": 4}, {"ray.io/tpu-slice-name": "busy", "ray.io/tpu-worker-id": "1"})
    training = Training(start, cluster, tmp_path, scaling=TPUS, framework="jax")
    missing = training.wait_for_waiting()
    assert "broken: 4 of 8 chips live and do not drain, 4 are free" in missing
    assert "busy: 8 of 8 chips live and do not drain, 4 are free" in missing
    job.kill()
    training.wait_for_sizes(2)
    free = cluster.add_slice("free")
    training.wait_for_sizes(2, 4)
    for line in read_ledger(training.ledger):
        numbers = [line["slices"].get(f"MEGASCALE_{name}") for name in ("NUM_SLICES", "SLICE_ID")]
        assert numbers == (["2", str(line["rank"] // 2)] if line["world"] == 4 else [None, None]), line
    before = repeated(steps_of(training.ledger))
    drained, stays = (busy, free) if training.node_of(0) in busy else (free, busy)
    cluster.drain(drained[1], 30)
    training.wait_for_group(2, 4, 2)
    assert {training.node_of(0), training.node_of(1)} == set(stays)
    assert repeated(steps_of(training.ledger)) <= before + 1
    cluster.remove(drained[1])
    training.wait_for_sizes(2, 4, 2)
    cluster.remove(stays[1])
    training.wait_for_waiting()
    cluster.add_slice("another")
    training.wait_for_sizes(2, 4, 2, 2)
    training.end((1, 1, 1))
