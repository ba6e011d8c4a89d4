"""The driver as a job inside a cluster: it outlives its flow process, and nobody starts a second one."""

import signal
import time
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.states import Cancelling

from tests.support.clusters import RayHead
from tests.support.deployments import flow_run_log
from tests.support.loops import CHECKPOINT_EVERY, STEPS, is_right, train_config
from tests.support.processes import (
    FlowProcess,
    Start,
    alive,
    assert_each_rank_knew_its_run,
    assert_every_step_counts_once,
    attempts,
    commits,
    steps_of,
    titled,
    wait_for,
)
from tests.support.s3 import FaultProxy

pytestmark = pytest.mark.usefixtures("api")


@pytest.fixture(autouse=True)
def _no_job_stays(head: RayHead) -> Iterator[None]:
    """A job that a test has left does not disturb the others."""
    yield
    for job in head.jobs():
        if job["status"] in ("PENDING", "RUNNING"):
            head.dashboard("POST", f"/api/jobs/{job['submission_id']}/stop")


def _train(
    start: Start, ledger: str, head: RayHead, name: str = "flow", steps: int = STEPS, **more: Any
) -> FlowProcess:
    config = train_config(ledger, sleep=0.1, steps=steps)
    return start(name, **{"cluster": head.jobs_block, "config": config, **more})


def _jobs_of(head: RayHead, flow: FlowProcess) -> list[dict[str, Any]]:
    return [job for job in head.jobs() if (job["metadata"] or {}).get("elastic_train_run") == flow.run.name]


def _assert_complete(flow: FlowProcess, ledger: str, attempts: int, steps: int = STEPS) -> None:
    result = flow.completed(240)
    assert result["attempts"] == attempts
    assert_every_step_counts_once(ledger, steps, CHECKPOINT_EVERY)
    assert is_right(result["checkpoint_uri"], steps)


def _assert_nothing_left(head: RayHead) -> None:
    wait_for(lambda: head.train_processes() == [] and head.job_driver() is None, 20, "the end of the training")
    assert head.placement_groups() == []
    rays_own = {"_AutoscalingCoordinatorActor"}  # one for all
    living = lambda: {one["class_name"] for one in head.states("actors", "DEAD")}  # noqa: E731
    wait_for(lambda: living() <= rays_own, 10, "the end of the actors; the job's own ends a moment after the driver")
    assert alive(titled(head.processes(), "elastic_train_job")) == []


def test_the_job_of_a_flow_process_that_is_killed_or_evicted_goes_on_and_is_followed_by_the_resumed_flow_run(
    start: Start, ledger: str, head: RayHead, client: SyncPrefectClient
) -> None:
    steps = 300  # it must still train when the second flow process has started
    first = _train(start, ledger, head, steps=steps)
    first.wait_for_commits()
    first.process.kill()

    def told() -> list[str]:
        return [line for line in flow_run_log(client, first.flow_run_id) if line.startswith("Checkpoint ")]

    at_kill, by_first = len(steps_of(ledger)), len(told())
    time.sleep(3)
    assert len(steps_of(ledger)) > at_kill + 10, "it trains on"
    same = {"steps": steps, "flow_run_id": first.flow_run_id, "storage": str(first.storage)}
    second = _train(start, ledger, head, "second", **same)
    second.wait_for(lambda: len(told()) > by_first, 60, "the second to tell of a checkpoint")
    assert "which is followed from now on" in second.log
    second.process.send_signal(signal.SIGTERM)
    second.process.wait(30)
    assert "goes on in the cluster" in second.log
    wait_for(lambda: head.jobs()[-1]["status"] == "SUCCEEDED", 60, "the job to end by itself")
    assert len(_jobs_of(head, first)) == 1
    _assert_complete(_train(start, ledger, head, "third", **same), ledger, attempts=1, steps=steps)
    assert steps_of(ledger) == list(range(1, steps + 1)), "no step redone"
    assert len(told()) - len(set(told())) <= 1, "one of two seconds may be told twice"
    _assert_nothing_left(head)


@pytest.mark.full
def test_a_submission_whose_answer_is_lost_is_recognised_and_the_killed_driver_of_a_job_is_followed_by_another_job(
    start: Start, ledger: str, head: RayHead
) -> None:
    with FaultProxy(head.url) as proxy:
        proxy.lose_answer_of("POST", "/api/jobs/")
        flow = _train(start, ledger, head, cluster={**head.jobs_block, "address": proxy.endpoint_url})
        flow.wait_for_commits()
        assert proxy.faults_given["lost_answer"] == len(_jobs_of(head, flow)) == 1
        head.job_driver().kill()
        _assert_complete(flow, ledger, attempts=2)
    assert [job["status"] for job in _jobs_of(head, flow)] == ["FAILED", "SUCCEEDED"]
    assert_each_rank_knew_its_run(ledger, flow.run, flow.flow_run_id)


@pytest.mark.full
def test_a_cancelled_flow_run_leaves_nothing_in_the_cluster(
    start: Start, ledger: str, head: RayHead, client: SyncPrefectClient
) -> None:
    flow = _train(start, ledger, head, steps=100_000)
    flow.wait_for_commits()
    client.set_flow_run_state(UUID(flow.flow_run_id), Cancelling())
    _assert_nothing_left(head)
    flow.process.wait(60)
    assert client.read_flow_run(UUID(flow.flow_run_id)).state.type == StateType.CANCELLED
    assert [job["status"] for job in _jobs_of(head, flow)] == ["STOPPED"]
    written = commits(flow.run)
    time.sleep(2)
    assert commits(flow.run) == written


@pytest.mark.full
def test_drivers_that_hang_or_are_ended_are_replaced_and_a_job_that_somebody_stops_is_not(
    start: Start, ledger: str, head: RayHead
) -> None:
    bound = {"PREFECT_ELASTIC_TRAIN_LIVENESS_TIMEOUT_SECONDS": 40}
    flow = _train(start, ledger, head, steps=100_000, environment=bound)
    flow.wait_for_commits()
    driver = head.job_driver()
    driver.suspend()
    flow.wait_for(lambda: len(attempts(flow.run)) == 2, 120, "the second attempt")
    assert "sent no heartbeat for 40 s" in flow.log
    assert not alive([driver])
    wait_for(head.job_driver, 30, "its driver").terminate()
    flow.wait_for(lambda: len(attempts(flow.run)) == 3, 60, "the third attempt")
    assert "was ended by a signal" in flow.log
    head.dashboard("POST", f"/api/jobs/{head.jobs()[-1]['submission_id']}/stop")
    outcome = flow.wait(60)
    assert (outcome["state"], outcome["outcome"]) == ("FAILED", "cancelled")
    assert "was stopped, but not by this flow run" in outcome["error"]
    assert len(attempts(flow.run)) == 3
    _assert_nothing_left(head)
