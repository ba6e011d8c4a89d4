"""A flow run is cancelled or out of time: its training stops soon, for good, and the run directory stays whole."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.states import Cancelling

from tests.support.clusters import RayHead
from tests.support.deployments import SERVED, WORKED, Deploy, Program, process_worker
from tests.support.processes import Start, alive, attempts, commits, read_ledger, records, wait_for

pytestmark = pytest.mark.usefixtures("api")

#: From the cancellation to the end of the last worker.
BOUND_SECONDS = 20


def _endless(ledger: str, **more: Any) -> dict[str, Any]:
    """A training that goes on until somebody stops it."""
    return {"config": {"steps": 100_000, "sleep": 0.05, "ledger": ledger}, **more}


def _contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of each file of a run directory."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def test_cancel_under_a_process_worker(
    deployed: Deploy, client: SyncPrefectClient, api_url: str, ledger: str, tmp_path: Path
) -> None:
    scaling = {"min_workers": 2, "max_workers": 2}
    with process_worker(tmp_path / "worker", api_url, client):
        run = deployed(f"fault test/{WORKED}", **_endless(ledger, scaling=scaling))
        wait_for(lambda: len(commits(run.folder)) >= 2, 120, "two commits")
        workers = []
        for pid in {line["pid"] for line in read_ledger(ledger)}:
            with contextlib.suppress(psutil.NoSuchProcess):
                workers.append(psutil.Process(pid))
        processes = run.processes()
        assert len(workers) == 2
        assert processes
        cancelled_at = time.monotonic()
        run.propose(Cancelling())
        wait_for(lambda: not alive(workers), BOUND_SECONDS, "the last worker to end")
        print(f"last worker ended {time.monotonic() - cancelled_at:.1f} s after the cancellation")
        assert run.wait_for_end(45).type == StateType.CANCELLED
        assert run.folder is not None
        at_the_end = _contents(run.folder)
        wait_for(lambda: not alive(processes) and not run.processes(), 15, "all processes of the training to end")
        time.sleep(2)
        assert _contents(run.folder) == at_the_end, "nothing is written afterwards"
        assert len(attempts(run.folder)) == 1, "no driver restart follows"
        assert run.state.type == StateType.CANCELLED


@pytest.mark.full
def test_cancel_while_the_controller_waits_for_capacity(
    deployed: Deploy, served: Program, ledger: str, head: RayHead
) -> None:
    # Two nodes are wanted and there is one.
    scaling = {"min_workers": 2, "max_workers": 2, "placement_strategy": "STRICT_SPREAD"}
    run = deployed(f"fault test/{SERVED}", **_endless(ledger, cluster=head.block, scaling=scaling))

    def is_waiting() -> bool:
        events = (run.folder / ".elastic_train" / "events").glob("*.jsonl") if run.folder is not None else ()
        return any('"waiting_for_capacity"' in path.read_text() for path in events)

    wait_for(lambda: head.train_processes() and is_waiting(), 90, "a controller that waits")
    processes = run.processes()
    run.propose(Cancelling())
    wait_for(lambda: not head.train_processes(), BOUND_SECONDS, "the controller to end")
    assert run.wait_for_end(45).type == StateType.CANCELLED
    wait_for(lambda: not alive(processes), 15, "all processes of the training to end")
    assert head.placement_groups() == []
    assert read_ledger(ledger) == []


@pytest.mark.full
def test_training_that_is_out_of_time_leaves_the_cluster(start: Start, ledger: str, head: RayHead) -> None:
    # On a busy machine a training takes half of that to begin.
    flow = start(**_endless(ledger, cluster=head.block, timeout_seconds=60))
    flow.living_driver()
    outcome = flow.wait(150)
    assert (outcome["state"], outcome["name"]) == ("FAILED", "TimedOut")
    assert commits(flow.run), "it trained until then"
    assert len(attempts(flow.run)) == 1, "no driver restart follows"
    wait_for(lambda: not head.train_processes(), 5, "the joined cluster to be free")
    assert flow.marked() == []
    assert records(flow.run, "ended")[0]["outcome"] in ("timed_out", "cancelled")
