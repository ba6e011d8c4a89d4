"""The result of a finished run, read from its directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect_elastic_train.core.result import BestCheckpoint, RunResult, bounded
from prefect_elastic_train.runs.commits import newest_commit
from prefect_elastic_train.runs.model import RunDirectory
from prefect_elastic_train.runs.snapshots import latest_checkpoint
from prefect_elastic_train.runs.view import RunReader

if TYPE_CHECKING:
    from prefect_elastic_train.report.accounts import Accounts


def make_result(
    store: RunReader, run_name: str, accounts: Accounts, storage_block: str = "", score: str = ""
) -> RunResult:
    """The result of a run from its newest commit and its accounts, in a bounded size.

    Args:
        store: The run directory.
        run_name: Name of the run.
        accounts: What its history adds up to.
        storage_block: Name of the saved storage block, empty for an inline one.
        score: Name of the metric that checkpoints are ranked by.
    """
    run = RunDirectory(store)
    commit = newest_commit(run, whole=True)
    snapshot = commit.snapshot if commit is not None else {}
    latest = latest_checkpoint(snapshot)
    kept = snapshot.get("checkpoint_results", [])
    result = RunResult(
        run_name=run_name,
        run_uri=store.uri,
        checkpoint_uri=f"{store.uri}/{latest['checkpoint_dir_name']}" if latest else "",
        metrics=latest["metrics"] if latest else accounts.last_metrics,
        best_checkpoints=[
            BestCheckpoint(uri=f"{store.uri}/{item['checkpoint_dir_name']}", metrics=item["metrics"]) for item in kept
        ],
        attempts=max(accounts.attempts, 1),
        worker_failures=accounts.worker_failures,
        preemptions=accounts.preemptions,
        resizes=accounts.resizes,
        world_sizes=accounts.world_sizes,
        steps_lost=accounts.steps_lost,
        goodput=accounts.time.goodput,
        time=accounts.time,
        storage_wait_seconds=accounts.storage_wait_seconds,
        storage_block=storage_block,
        started_from=run.started_from,
        history=accounts.history,
        left_out={"history": left_out} if (left_out := accounts.reports - len(accounts.history)) else {},
    )
    return bounded(result, score)
