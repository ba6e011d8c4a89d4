"""More than one driver wants a run: one trains, and what the others do counts for nothing."""

import json
from uuid import UUID

import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient

from tests.support.clusters import RayHead
from tests.support.loops import CHECKPOINT_EVERY, STEPS, is_right, train_config
from tests.support.processes import (
    Start,
    alive,
    attempts,
    commits,
    generations,
    read_ledger,
    records,
    steps_of,
    titled,
    wait_for,
)


def test_frozen_holder_that_wakes_up_commits_nothing_that_counts_and_stops_by_itself(
    start: Start, ledger: str, head: RayHead, client: SyncPrefectClient
) -> None:
    scaling = {"min_workers": 2, "max_workers": 2}
    training = {"config": train_config(ledger, sleep=0.1), "scaling": scaling, "cluster": head.block}
    first = start("first", **training)
    first.wait_for_commits()
    workers = [psutil.Process(pid) for pid in {line["pid"] for line in read_ledger(ledger)}]
    controllers = titled(head.processes(), "TrainController")
    assert (len(workers), len(controllers)) == (2, 1)
    frozen = [psutil.Process(first.pid), first.living_driver(), *controllers, *workers]
    for process in frozen:
        process.suspend()
    # As if the first were on another machine: on this one its driver would be ended at the take-over.
    record_file = first.run / ".elastic_train" / "attempts" / "0001.json"
    record = json.loads(record_file.read_text())
    record["owner"]["host"] = "another-machine/1"
    record_file.write_text(json.dumps(record))
    before = commits(first.run)

    second = start("second", **training, storage=str(first.storage), flow_run_id=first.flow_run_id)
    wait_for(lambda: [c for c in commits(first.run) if c["attempt"] == 2], 120, "a commit of the second attempt")
    for process in reversed(frozen):
        process.resume()
    result = second.completed(180)
    first.process.wait(60)
    wait_for(lambda: not alive(frozen), 20, "the first attempt's processes to end by themselves")
    assert result["attempts"] == 2
    assert attempts(first.run)[1]["base"] == [1, max(c["sequence"] for c in before)]
    assert is_right(result["checkpoint_uri"])
    _, (resumed_from, last) = generations(ledger)
    assert (resumed_from >= 2 * CHECKPOINT_EVERY, last) == (True, STEPS)
    state = client.read_flow_run(UUID(first.flow_run_id)).state
    assert state.is_completed(), "the first process has nothing to say about the flow run"


@pytest.mark.full
def test_of_two_trainings_of_a_flow_run_with_one_name_at_the_same_time_one_is_refused_and_the_other_completes(
    start: Start, ledger: str
) -> None:
    flow = start(
        config=train_config(ledger, steps=60, sleep=0.2),
        run_name="same",
        within="two trainings at once",
        process_pool=True,
        cluster={"num_cpus": 1},
    )
    outcome = flow.wait(240)
    assert (outcome["state"], outcome["outcome"]) == ("FAILED", "invalid")
    assert "need a run_name each" in outcome["error"]
    assert [ended["outcome"] for ended in records(flow.run, "ended")] == ["completed"]
    assert steps_of(ledger) == list(range(1, 61)), "one trained, and was not disturbed"
