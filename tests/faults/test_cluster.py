"""The local cluster of a training dies; the supervisor brings up another one."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import pytest

from tests.support.processes import FlowProcess, commits, steps_of, titled

Start = Callable[..., FlowProcess]


@pytest.mark.full
def test_local_cluster_that_dies_is_replaced_and_the_run_resumes(start: Start, ledger: str) -> None:
    flow = start(
        loop="tests.support.loops:counting_loop",
        framework="none",
        config={"steps": 40, "sleep": 0.1, "ledger": ledger},
        scaling={"min_workers": 1, "max_workers": 1},
    )
    flow.wait_for(lambda: len(commits(flow.run)) >= 3, 120, "commits")
    assert flow.driver() is not None
    heads = titled(flow.marked(), "gcs_server")
    assert len(heads) == 1
    heads[0].kill()
    outcome = flow.wait(240)
    assert outcome["state"] == "COMPLETED"
    assert outcome["result"]["attempts"] == 2
    assert set(steps_of(ledger)) == set(range(1, 41))
    assert steps_of(ledger)[-1] == 40
    assert flow.marked() == []
    assert not psutil.pid_exists(heads[0].pid) or heads[0].status() == psutil.STATUS_ZOMBIE
