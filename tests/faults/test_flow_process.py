"""The flow process ends or dies; nothing of its training stays behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests.faults.conftest import train_config
from tests.support.processes import FlowProcess, RayHead, alive, commits, steps_of, wait_for

Start = Callable[..., FlowProcess]


def test_nothing_is_left_15_seconds_after_the_flow_process_was_killed(start: Start, ledger: str) -> None:
    flow = start(config=train_config(ledger, steps=100_000))
    flow.wait_for(lambda: commits(flow.run), 120, "a commit")
    assert flow.driver() is not None
    before = flow.marked()
    assert len(before) > 5, "driver, head, controller and workers"
    assert flow.private_folder.exists()
    os.kill(flow.pid, signal.SIGKILL)
    wait_for(lambda: flow.marked() == [] and alive(before) == [], 15, "all processes to end, by their own ids, too")
    wait_for(lambda: not flow.private_folder.exists(), 5, "spec and token to be removed")
    assert commits(flow.run), "what was committed stays"


@pytest.mark.full
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
