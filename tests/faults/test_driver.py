"""A driver or its cluster dies; the training does not."""

from pathlib import Path

import psutil
import pytest

from tests.support.clusters import RayHead
from tests.support.loops import CHECKPOINT_EVERY, STEPS, is_right, train_config
from tests.support.processes import (
    FlowProcess,
    Start,
    alive,
    assert_each_rank_knew_its_run,
    attempts,
    commits,
    read_ledger,
    repeated,
    steps_of,
    titled,
    wait_for,
)

TWO = {"min_workers": 2, "max_workers": 2}


@pytest.mark.full
def test_killed_head_is_waited_for_and_the_run_resumes_on_the_new_one(
    start: Start, ledger: str, own_head: RayHead
) -> None:
    flow = start(
        config=train_config(ledger),
        scaling=TWO,
        cluster=own_head.block,
        failures={"driver_restarts": 5, "driver_restart_delay_seconds": 2},
        environment={"RAY_gcs_rpc_server_reconnect_timeout_s": 6},
    )
    flow.wait_for_commits()
    first = flow.living_driver()
    own_head.kill()
    wait_for(lambda: not alive([first]), 60, "the driver to notice")
    assert flow.process.poll() is None, "the flow process outlives its driver"
    own_head.start()
    result = flow.completed(240)
    last = max((c for c in commits(flow.run) if c["attempt"] == 1), key=lambda commit: commit["sequence"])
    assert attempts(flow.run)[1]["base"] == [1, last["sequence"]], "the last commit of the killed driver"
    resumed = next(line for line in read_ledger(ledger) if line["rank"] == 0 and line["resumed_from"] > 0)
    assert resumed["resumed_from"] == last["snapshot"]["latest_checkpoint_result"]["metrics"]["step"]
    assert (result["attempts"], result["worker_failures"]) == (2, 0)
    assert repeated(steps_of(ledger)) <= 2 * CHECKPOINT_EVERY
    assert is_right(result["checkpoint_uri"])
    assert flow.marked() == []
    wait_for(lambda: not own_head.train_processes(), 20, "the workers to leave the new cluster")


def _lines_until_others_train(flow: FlowProcess, ledger: str, victim: psutil.Process) -> list[str]:
    """Kill a process of a training, and return what its log says until two others take a step."""
    known, told = {line["pid"] for line in read_ledger(ledger)}, len(flow.log.splitlines())
    victim.kill()
    two = lambda: len({line["pid"] for line in read_ledger(ledger)} - known) >= 2  # noqa: E731 - both ranks are new
    wait_for(two, 120, "a step of two other processes")
    return flow.log.splitlines()[told:]


def test_killed_worker_driver_and_local_cluster_are_told_in_a_few_lines_and_rays_own_words_are_in_a_file(
    start: Start, ledger: str
) -> None:
    flow = start(config=train_config(ledger, sleep=0.25), scaling=TWO)
    flow.wait_for_commits()
    worker = next(line["pid"] for line in read_ledger(ledger) if line["rank"] == 1)
    of_worker = _lines_until_others_train(flow, ledger, psutil.Process(worker))
    failure = next(line for line in of_worker if "Worker failure" in line)
    details = Path(failure.rpartition("details: ")[2])
    flow.wait_for(details.exists, 30, "what Ray said of the worker")
    driver = flow.living_driver()
    before = flow.marked()
    assert len(before) > 5, "driver, head, controller and workers: the cluster survives its driver"
    of_driver = _lines_until_others_train(flow, ledger, driver)
    [gcs] = titled(flow.marked(), "gcs_server")
    _lines_until_others_train(flow, ledger, gcs)
    result = flow.completed(180)
    assert (result["attempts"], result["worker_failures"]) == (3, 1)
    assert {size["size"] for size in result["world_sizes"]} == {2}
    assert sorted(set(steps_of(ledger))) == list(range(1, STEPS + 1))
    assert repeated(steps_of(ledger)) <= 4 * CHECKPOINT_EVERY
    assert is_right(result["checkpoint_uri"])
    assert_each_rank_knew_its_run(ledger, flow.run, flow.flow_run_id)
    assert flow.marked() == alive(before) == [], "by their own ids, too"
    assert not flow.private_folder.exists()

    assert len(of_worker) <= 12, of_worker
    assert len(of_driver) <= 12, of_driver
    assert f"rank 1 (pid {worker}, node " in failure
    [follows] = [line for line in of_driver if "A new driver follows" in line]
    assert "WARNING" in follows
    assert f"(pid {driver.pid}) was ended by signal 9 (Killed)" in follows
    assert "Traceback" not in "".join(of_worker + of_driver)
    assert details.parent.parent.parent == flow.run
    assert "The actor is dead because" in details.read_text()
    assert "[rank 1] WorkerHealthCheckFailedError" in details.read_text()
