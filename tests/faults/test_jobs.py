"""The driver as a job inside a cluster: it outlives its flow process, and nobody starts a second one."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.states import Cancelling

from tests.faults.conftest import CHECKPOINT_EVERY, STEPS, hash_training, is_right
from tests.support.deployments import flow_run_log
from tests.support.gateway import Gateway
from tests.support.processes import (
    FlowProcess,
    RayHead,
    alive,
    assert_each_rank_knew_its_run,
    assert_every_step_counts_once,
    attempts,
    commits,
    generations,
    steps_of,
    titled,
    wait_for,
)
from tests.support.s3 import FaultProxy

Start = Callable[..., FlowProcess]

pytestmark = pytest.mark.usefixtures("api")


@pytest.fixture(scope="module")
def shared_head() -> Iterator[RayHead]:
    """A cluster with a dashboard and room for one worker."""
    cluster = RayHead(cpus=1, dashboard=True)
    yield cluster
    cluster.close()


@pytest.fixture
def jobs_head(shared_head: RayHead) -> Iterator[RayHead]:
    """The same for each test; a job that one of them has left does not keep the others from their CPU."""
    yield shared_head
    for job in shared_head.jobs():
        if job["status"] in ("PENDING", "RUNNING"):
            shared_head.dashboard("POST", f"/api/jobs/{job['submission_id']}/stop")


@pytest.fixture
def mortal_head() -> Iterator[RayHead]:
    """A cluster with a dashboard, to kill."""
    cluster = RayHead(cpus=1, dashboard=True)
    yield cluster
    cluster.close()


def _train(start: Start, ledger: str, head: RayHead, name: str = "flow", **more: Any) -> FlowProcess:
    config = {"steps": STEPS, "checkpoint_every": CHECKPOINT_EVERY, "sleep": 0.1, "ledger": ledger}
    config |= more.pop("config", {})
    return start(name, **{**hash_training(ledger), "cluster": head.jobs_block, "config": config, **more})


def _in_mid_training(flow: FlowProcess) -> None:
    flow.wait_for(lambda: len(commits(flow.run)) >= 2, 120, "two commits")


def _jobs_of(head: RayHead, flow: FlowProcess) -> list[dict[str, Any]]:
    assert flow.run is not None
    return [job for job in head.jobs() if (job["metadata"] or {}).get("elastic_train_run") == flow.run.name]


def _assert_complete(
    flow: FlowProcess, outcome: dict[str, Any], ledger: str, attempts: int, steps: int = STEPS
) -> None:
    assert outcome["state"] == "COMPLETED", flow.log[-5000:]
    assert outcome["result"]["attempts"] == attempts
    assert_every_step_counts_once(ledger, steps, CHECKPOINT_EVERY)
    assert is_right(outcome["result"]["checkpoint_uri"], steps)


def _assert_nothing_left(head: RayHead) -> None:
    wait_for(lambda: head.train_processes() == [] and head.job_driver() is None, 20, "the end of the training")
    assert head.placement_groups() == []
    actors = head.dashboard("GET", "/api/v0/actors?limit=1000")["data"]["result"]["result"]
    left = [one["class_name"] for one in actors if one["state"] != "DEAD"]
    assert left in ([], ["_AutoscalingCoordinatorActor"]), "Ray's own, one for all"


def test_the_job_of_a_killed_flow_process_goes_on_and_is_followed_by_the_resumed_flow_run(
    start: Start, ledger: str, jobs_head: RayHead, client: SyncPrefectClient
) -> None:
    steps = 200
    first = _train(start, ledger, jobs_head, config={"steps": steps})
    _in_mid_training(first)
    first.process.kill()
    at_kill = len(steps_of(ledger))
    time.sleep(5)
    assert len(steps_of(ledger)) > at_kill + 20, "it trains on"
    second = _train(
        start,
        ledger,
        jobs_head,
        "second",
        config={"steps": steps},
        flow_run_id=first.flow_run_id,
        storage=str(first.storage),
    )
    outcome = second.wait(120)
    assert outcome["state"] == "COMPLETED", second.log[-5000:]
    assert len(_jobs_of(jobs_head, first)) == 1
    assert outcome["result"]["attempts"] == 1
    assert steps_of(ledger) == list(range(1, steps + 1)), "no step redone"
    assert is_right(outcome["result"]["checkpoint_uri"], steps)
    assert "which is followed from now on" in second.log

    def told() -> list[str]:
        return [line for line in flow_run_log(client, first.flow_run_id) if line.startswith("Checkpoint ")]

    wait_for(
        lambda: len(set(told())) == steps // CHECKPOINT_EVERY, 30, "each event to be told, of both processes' times"
    )
    assert len(told()) <= steps // CHECKPOINT_EVERY + 6, "those of two seconds may be told twice"


def test_killed_driver_of_a_job_is_followed_by_another_job(start: Start, ledger: str, jobs_head: RayHead) -> None:
    flow = _train(start, ledger, jobs_head)
    _in_mid_training(flow)
    driver = jobs_head.job_driver()
    assert driver is not None
    killed_at = time.monotonic()
    driver.kill()
    flow.wait_for(lambda: len(attempts(flow.run)) == 2, 30, "the second attempt")
    print(f"attempt 2 began {time.monotonic() - killed_at:.1f} s after the kill")
    _assert_complete(flow, flow.wait(120), ledger, attempts=2)
    assert [job["status"] for job in _jobs_of(jobs_head, flow)] == ["FAILED", "SUCCEEDED"]
    assert_each_rank_knew_its_run(ledger, flow.run, flow.flow_run_id)


@pytest.mark.full
def test_a_dashboard_that_does_not_answer_is_not_a_failure(start: Start, ledger: str, jobs_head: RayHead) -> None:
    flow = _train(start, ledger, jobs_head, config={"steps": 200})
    _in_mid_training(flow)
    dashboards = [one for one in jobs_head.processes() if _is_dashboard(one)]
    assert dashboards
    for one in dashboards:
        one.send_signal(signal.SIGSTOP)
    try:
        time.sleep(60)
        assert flow.process.poll() is None
        assert "The dashboard has not answered for" in flow.log
    finally:
        for one in dashboards:
            one.send_signal(signal.SIGCONT)
    _assert_complete(flow, flow.wait(120), ledger, attempts=1, steps=200)
    assert len(_jobs_of(jobs_head, flow)) == 1


def _is_dashboard(process: psutil.Process) -> bool:
    try:
        return any(part.endswith("dashboard/dashboard.py") or "ray-dashboard" in part for part in process.cmdline())
    except psutil.Error:
        return False


@pytest.mark.full
def test_a_cluster_that_is_started_anew_gets_another_job(start: Start, ledger: str, mortal_head: RayHead) -> None:
    flow = _train(start, ledger, mortal_head)
    _in_mid_training(flow)
    mortal_head.kill()
    time.sleep(5)
    mortal_head.start()
    outcome = flow.wait(240)
    _assert_complete(flow, outcome, ledger, attempts=2)
    assert generations(ledger)[-1][0] > 1, "resumed from a commit"
    assert "cluster_lost" in flow.log


def test_a_cancelled_flow_run_leaves_nothing_in_the_cluster(
    start: Start, ledger: str, jobs_head: RayHead, client: SyncPrefectClient
) -> None:
    flow = _train(start, ledger, jobs_head, config={"steps": 100_000})
    _in_mid_training(flow)
    cancelled_at = time.monotonic()
    client.set_flow_run_state(UUID(flow.flow_run_id), Cancelling())
    _assert_nothing_left(jobs_head)
    print(f"nothing was left {time.monotonic() - cancelled_at:.1f} s after the cancellation")
    flow.process.wait(60)
    assert client.read_flow_run(UUID(flow.flow_run_id)).state.type == StateType.CANCELLED  # type: ignore[union-attr]
    assert [job["status"] for job in _jobs_of(jobs_head, flow)] == ["STOPPED"]
    written = commits(flow.run)
    time.sleep(2)
    assert commits(flow.run) == written


@pytest.mark.full
def test_a_flow_process_whose_machine_is_taken_away_leaves_the_job_alone(
    start: Start, ledger: str, jobs_head: RayHead
) -> None:
    steps = 150
    flow = _train(start, ledger, jobs_head, config={"steps": steps})
    _in_mid_training(flow)
    flow.process.send_signal(signal.SIGTERM)
    flow.process.wait(30)
    assert "goes on in the cluster" in flow.log
    wait_for(lambda: jobs_head.jobs()[-1]["status"] == "SUCCEEDED", 60, "the job to end by itself")
    assert steps_of(ledger) == list(range(1, steps + 1))
    again = _train(
        start,
        ledger,
        jobs_head,
        "again",
        config={"steps": steps},
        flow_run_id=flow.flow_run_id,
        storage=str(flow.storage),
    )
    outcome = again.wait(60)
    assert outcome["state"] == "COMPLETED", again.log[-3000:]
    assert is_right(outcome["result"]["checkpoint_uri"], steps)
    assert len(steps_of(ledger)) == steps, "its result is read from the run that ended"


@pytest.mark.full
def test_a_frozen_flow_process_leaves_the_job_to_the_resumed_one(
    start: Start, ledger: str, jobs_head: RayHead, client: SyncPrefectClient
) -> None:
    steps = 250
    frozen = _train(start, ledger, jobs_head, config={"steps": steps})
    _in_mid_training(frozen)
    frozen.process.send_signal(signal.SIGSTOP)
    more: dict[str, Any] = {"flow_run_id": frozen.flow_run_id, "storage": str(frozen.storage)}
    resumed = _train(start, ledger, jobs_head, "resumed", config={"steps": steps}, **more)
    wait_for(lambda: "which is followed from now on" in resumed.log, 60, "the resumed flow run to follow")
    frozen.process.send_signal(signal.SIGCONT)
    frozen.process.wait(60)
    outcome = resumed.wait(120)
    assert outcome["state"] == "COMPLETED", resumed.log[-3000:]
    assert not frozen.result_file.exists() or json.loads(frozen.result_file.read_text())["state"] != "COMPLETED"
    assert steps_of(ledger) == list(range(1, steps + 1))
    assert len(_jobs_of(jobs_head, frozen)) == 1
    assert client.read_flow_run(UUID(frozen.flow_run_id)).state.type == StateType.COMPLETED  # type: ignore[union-attr]


@pytest.mark.full
def test_a_driver_that_hangs_is_replaced(start: Start, ledger: str, jobs_head: RayHead) -> None:
    environment = {"PREFECT_ELASTIC_TRAIN_LIVENESS_TIMEOUT_SECONDS": "40"}
    flow = _train(start, ledger, jobs_head, config={"steps": 100_000}, environment=environment)
    _in_mid_training(flow)
    driver = jobs_head.job_driver()
    assert driver is not None
    driver.send_signal(signal.SIGSTOP)
    flow.wait_for(lambda: len(attempts(flow.run)) == 2, 120, "the second attempt")
    assert "gave no sign of life for 40 s" in flow.log
    assert not driver.is_running() or driver.status() == psutil.STATUS_ZOMBIE
    flow.process.send_signal(signal.SIGINT)
    flow.process.wait(60)
    _assert_nothing_left(jobs_head)


@pytest.mark.full
def test_a_driver_that_somebody_ends_is_replaced_and_a_job_that_somebody_stops_is_not(
    start: Start, ledger: str, jobs_head: RayHead
) -> None:
    flow = _train(start, ledger, jobs_head, config={"steps": 100_000})
    _in_mid_training(flow)
    driver = jobs_head.job_driver()
    assert driver is not None
    driver.terminate()
    flow.wait_for(lambda: len(attempts(flow.run)) == 2, 60, "the second attempt")
    assert "was ended by a signal" in flow.log
    jobs_head.dashboard("POST", f"/api/jobs/{jobs_head.jobs()[-1]['submission_id']}/stop")
    outcome = flow.wait(60)
    assert (outcome["state"], outcome["outcome"]) == ("FAILED", "cancelled")
    assert "was stopped, but not by this flow run" in outcome["error"]
    assert len(attempts(flow.run)) == 2
    _assert_nothing_left(jobs_head)


@pytest.mark.full
def test_a_flow_run_that_is_cancelled_during_a_slow_submission_leaves_no_job(
    start: Start, ledger: str, jobs_head: RayHead, client: SyncPrefectClient
) -> None:
    before = len(jobs_head.jobs())
    with FaultProxy(jobs_head.url) as proxy:
        proxy.latency(3.0)
        cluster = {**jobs_head.jobs_block, "address": proxy.endpoint_url}
        flow = _train(start, ledger, jobs_head, cluster=cluster)
        wait_for(lambda: len(jobs_head.jobs()) > before, 120, "the job")
        assert "The training runs as job" not in flow.log, "its submission is still under way"
        client.set_flow_run_state(UUID(flow.flow_run_id), Cancelling())
        flow.process.wait(90)
    assert [job["status"] for job in jobs_head.jobs()[before:]] == ["STOPPED"], flow.log[-3000:]
    _assert_nothing_left(jobs_head)


def test_a_submission_whose_answer_is_lost_is_recognised(start: Start, ledger: str, jobs_head: RayHead) -> None:
    with FaultProxy(jobs_head.url) as proxy:
        proxy.lose_answer_of("POST", "/api/jobs/")
        cluster = {**jobs_head.jobs_block, "address": proxy.endpoint_url}
        flow = _train(start, ledger, jobs_head, cluster=cluster)
        outcome = flow.wait(120)
        assert proxy.faults_given["lost_answer"] == 1
    _assert_complete(flow, outcome, ledger, attempts=1)
    assert len(_jobs_of(jobs_head, flow)) == 1


@pytest.mark.full
def test_a_gateway_with_tls_and_a_path_prefix_is_passed(
    start: Start, ledger: str, jobs_head: RayHead, tmp_path: Path
) -> None:
    with Gateway(jobs_head.url, tmp_path) as gateway:
        cluster = {**jobs_head.jobs_block, "address": gateway.url, "ca_bundle": str(gateway.certificate)}
        flow = _train(start, ledger, jobs_head, cluster=cluster)
        outcome = flow.wait(120)
    _assert_complete(flow, outcome, ledger, attempts=1)


def test_jobs_leave_no_processes(jobs_head: RayHead) -> None:
    _assert_nothing_left(jobs_head)
    assert alive(titled(jobs_head.processes(), "elastic_train_job")) == []
