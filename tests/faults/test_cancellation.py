"""A flow run is cancelled or out of time: its training stops soon, for good, and the run directory stays whole."""

import time
from pathlib import Path

import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.states import Cancelling

from prefect_elastic_train.core.events import WaitingForCapacity
from tests.support.clusters import RayHead
from tests.support.deployments import SERVED, WORKED, Deploy, Program, process_worker
from tests.support.loops import train_config
from tests.support.processes import alive, attempts, commits, read_ledger, wait_for
from tests.support.reports import history

pytestmark = pytest.mark.usefixtures("api")

#: From the cancellation to the end of the last worker.
BOUND_SECONDS = 20


def _contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of each file of a run directory."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def test_cancel_under_a_process_worker(
    deployed: Deploy, client: SyncPrefectClient, api_url: str, ledger: str, tmp_path: Path
) -> None:
    scaling = {"min_workers": 2, "max_workers": 2}
    with process_worker(tmp_path / "worker", api_url, client):
        run = deployed(f"fault test/{WORKED}", config=train_config(ledger, steps=100_000), scaling=scaling)
        wait_for(lambda: len(commits(run.folder)) >= 2, 120, "two commits")
        workers = [psutil.Process(pid) for pid in {line["pid"] for line in read_ledger(ledger)}]
        processes = run.processes()
        assert len(workers) == 2
        assert processes
        run.propose(Cancelling())
        wait_for(lambda: not alive(workers), BOUND_SECONDS, "the last worker to end")
        assert run.wait_for_end(45).type == StateType.CANCELLED
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
    run = deployed(f"fault test/{SERVED}", config=train_config(ledger), cluster=head.block, scaling=scaling)

    wait_for(lambda: history(run.folder, WaitingForCapacity), 90, "a controller that waits")
    processes = run.processes()
    run.propose(Cancelling())
    wait_for(lambda: not head.train_processes(), BOUND_SECONDS, "the controller to end")
    assert run.wait_for_end(45).type == StateType.CANCELLED
    wait_for(lambda: not alive(processes), 15, "all processes of the training to end")
    assert head.placement_groups() == []
    assert read_ledger(ledger) == []
