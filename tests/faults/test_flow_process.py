"""The flow process ends or dies; nothing of its training stays behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType

from tests.faults.conftest import train_config
from tests.support.processes import FlowProcess, RayHead, alive, commits, steps_of, titled, wait_for

Start = Callable[..., FlowProcess]


@pytest.mark.parametrize(
    ("number", "arguments", "message"),
    [
        pytest.param(signal.SIGTERM, {}, "a termination signal", id="SIGTERM", marks=pytest.mark.full),
        pytest.param(
            signal.SIGTERM, {"submit": True}, "a termination signal", id="SIGTERM-submitted", marks=pytest.mark.full
        ),
        pytest.param(
            signal.SIGTERM,
            {"within": "a submitted task"},
            "a termination signal",
            id="SIGTERM-in a task",
            marks=pytest.mark.full,
        ),
        pytest.param(
            signal.SIGINT,
            {"within": "mapped tasks"},
            "an interrupt signal",
            id="SIGINT-in mapped tasks",
            marks=pytest.mark.full,
        ),
        pytest.param(signal.SIGINT, {}, "an interrupt signal", id="SIGINT", marks=pytest.mark.full),
        pytest.param(
            signal.SIGINT, {"asynchronous": True}, "an interrupt signal", id="SIGINT-async", marks=pytest.mark.full
        ),
        pytest.param(signal.SIGKILL, {}, None, id="SIGKILL"),
    ],
)
def test_nothing_is_left_15_seconds_after_the_flow_process_got_a_signal(
    start: Start,
    client: SyncPrefectClient,
    ledger: str,
    number: signal.Signals,
    arguments: dict[str, Any],
    message: str | None,
) -> None:
    flow = start(config=train_config(ledger, steps=100_000), **arguments)
    flow.wait_for(lambda: commits(flow.run), 120, "a commit")
    assert flow.driver() is not None
    before = flow.marked()
    assert len(before) > 5, "driver, head, controller and workers"
    assert flow.private_folder.exists()
    os.kill(flow.pid, number)
    wait_for(lambda: flow.marked() == [] and alive(before) == [], 15, "all processes to end, by their own ids, too")
    wait_for(lambda: flow.process.poll() is not None, 60, "the flow process to end")
    wait_for(lambda: not flow.private_folder.exists(), 5, "spec and token to be removed")
    assert commits(flow.run), "what was committed stays"
    if message is not None:
        state = client.read_flow_run(UUID(flow.flow_run_id)).state
        assert state is not None
        assert (state.type, state.message) == (StateType.CRASHED, f"Execution was aborted by {message}.")


def test_nothing_is_left_on_a_joined_cluster_15_seconds_after_the_flow_process_was_killed(
    start: Start, ledger: str, head: RayHead
) -> None:
    flow = start(config=train_config(ledger, steps=100_000), cluster=head.block)
    flow.wait_for(lambda: commits(flow.run), 120, "a commit")
    assert flow.driver() is not None
    # A process's title changes with each call of it, and may be read in between.
    wait_for(lambda: len(head.train_processes()) == 3, 10, "controller and two workers")
    os.kill(flow.pid, signal.SIGKILL)
    wait_for(lambda: not head.train_processes() and flow.marked() == [], 15, "all processes to end")
    wait_for(lambda: not head.placement_groups(), 45, "its placement group to be removed")
    assert head.processes(), "the cluster itself is left alone"


def test_nothing_is_left_when_the_flow_process_is_killed_while_the_cluster_starts(start: Start, ledger: str) -> None:
    flow = start(config=train_config(ledger))
    flow.wait_for(lambda: flow.driver() is not None and len(flow.marked()) >= 2, 60, "the cluster to begin")
    os.kill(flow.pid, signal.SIGKILL)
    wait_for(lambda: flow.marked() == [], 15, "all processes to end")
    assert steps_of(ledger) == []


@pytest.mark.full
def test_two_flow_runs_at_once_leave_each_other_alone(start: Start, ledger: str) -> None:
    flows = [
        start(
            name,
            config={"steps": 60, "sleep": 0.2, "ledger": f"{ledger}.{name}"},
            loop="tests.support.loops:counting_loop",
            framework="none",
            scaling={"min_workers": 1, "max_workers": 1},
        )
        for name in ("one", "two")
    ]
    for flow in flows:
        flow.wait_for(lambda flow=flow: flow.driver() is not None, 60, "a driver")
    wait_for(lambda: all(commits(flow.run) for flow in flows), 180, "both to train at the same time")
    heads = [[process.pid for process in titled(flow.marked(), "gcs_server")] for flow in flows]
    assert [len(of_one) for of_one in heads] == [1, 1]
    assert heads[0] != heads[1], "a cluster each"
    outcomes = [flow.wait(240) for flow in flows]
    for name, outcome in zip(("one", "two"), outcomes, strict=True):
        assert outcome["state"] == "COMPLETED"
        assert outcome["result"]["attempts"] == 1
        assert outcome["result"]["worker_failures"] == 0
        assert steps_of(f"{ledger}.{name}") == list(range(1, 61))
