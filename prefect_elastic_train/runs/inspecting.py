"""Summaries, details and verification of a run, read from its directory for the CLI, and the result of a training."""

import enum
from typing import Any

from pydantic import BaseModel

from prefect_elastic_train.core.checkpoint_names import loop_name
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.records import CommitRecord, RunRecord
from prefect_elastic_train.core.result import BestCheckpoint, RunResult, bounded
from prefect_elastic_train.report.accounts import Accounts, add_up
from prefect_elastic_train.storage.store import RunStore

from .heartbeat import Liveness, observe_driver
from .history import read_history
from .layout import commit_label
from .run_directory import RecordedAttempt, RunDirectory


class RunState(str, enum.Enum):
    """State of a run: that of its newest attempt, or of the attempt's driver while no end is recorded."""

    TRAINING = "training"
    DIED = "died"
    UNKNOWN = "unknown"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"
    NOT_BEGUN = "not_begun"  # a flow run has claimed it, and no attempt has begun
    DELETING = "deleting"  # it is being deleted, or its deletion was interrupted
    UNREADABLE = "unreadable"  # the storage refuses access, or another version wrote it


_STATES = {Liveness.ALIVE: RunState.TRAINING, Liveness.DEAD: RunState.DIED, Liveness.UNKNOWN: RunState.UNKNOWN}
_ENDS = {Outcome.COMPLETED.value: RunState.COMPLETED, Outcome.CANCELLED.value: RunState.CANCELLED}


class RunSummary(BaseModel):
    """Summary of a run. Times are seconds since the epoch."""

    name: str
    uri: str
    state: RunState
    outcome: str = ""  # the newest attempt's; empty if it has not ended
    life: Liveness | None = None  # the driver's; null once the attempt has ended
    detail: str = ""  # reason for the state
    attempts: int = 0
    reports: int = 0  # up to the newest commit, over all attempts
    metrics: dict[str, Any] = {}  # reported with the newest checkpoint
    #: Number of checkpoints in the newest commit, and the size of their files in bytes.
    checkpoints: int = 0
    size_bytes: int = 0
    last_commit_at: float | None = None
    last_activity_at: float | None = None
    flow_run_id: str = ""
    flow_run_name: str = ""
    flow_name: str = ""


class RunDetails(BaseModel):
    """All records of a run, each null if it is missing or torn, and the totals of its history."""

    summary: RunSummary
    run: RunRecord | None
    started_from: str  # URI of another run's checkpoint, empty for none; it may be deleted by now
    attempts: list[RecordedAttempt]
    commit: CommitRecord | None  # the newest that counts, without checkpoints that were dropped since
    best_checkpoint: str  # folder of the best checkpoint of that commit; empty if none has the score
    accounts: Accounts  # without the rows of the history
    goodput: float


class Verification(BaseModel):
    """Result of :func:`verify`: what a resume of the run would do, found without resuming it."""

    name: str
    uri: str
    whole: bool = False  # no repair is needed
    resume: str  # message about what a resume would do
    checkpoint: str = ""  # that a resume would start from, empty for none
    commit: str = ""
    repairs: list[str] = []  # messages about what a resume would repair or drop
    leftovers: dict[str, int] = {}  # size in bytes of folders that no commit needs


def summarize(run: RunDirectory) -> RunSummary | None:
    """Return the summary of a run, read with about six requests; None if this package did not write the run."""
    if not run.is_begun:
        return None
    commit = run.newest_commit
    attempt = run.newest_attempt
    fields: dict[str, Any] = {"state": RunState.NOT_BEGUN, "detail": "no attempt has begun"}
    times = [run.record.created_at] if run.record else []
    if commit:
        times.append(commit.at)
        fields |= {
            "reports": commit.snapshot["current_report_index"],
            "metrics": commit.latest["metrics"],
            "checkpoints": len(commit.snapshot["checkpoint_results"]),
            "size_bytes": sum(sum(files.values()) for files in commit.manifest.values()),
            "last_commit_at": commit.at,
        }
    if attempt.ended:
        times.append(attempt.ended.at)
        fields |= {
            "state": _ENDS.get(attempt.outcome, RunState.FAILED),
            "outcome": attempt.outcome,
            "detail": attempt.end_message,
        }
    elif attempt.number:
        driver = observe_driver(run, attempt)
        times.append(driver.active_at)
        fields |= {"state": _STATES[driver.liveness], "life": driver.liveness, "detail": driver.detail}
    if attempt.is_pruner:
        fields["state"] = RunState.DELETING
    if run.owner:
        fields |= run.owner.model_dump(include={"flow_run_id", "flow_run_name", "flow_name"})
    return RunSummary(
        name=run.name,
        uri=run.uri,
        attempts=len(run.attempt_numbers),
        last_activity_at=max(times, default=0.0) or None,
        **fields,
    )


def inspect_run(run: RunDirectory) -> RunDetails | None:
    """Return all records of a run and the totals of its history; None if this package did not write the run."""
    summary = summarize(run)
    if not summary:
        return None
    accounts = add_up(read_history(run.store))
    commit = run.newest_commit
    return RunDetails(
        summary=summary,
        run=run.record,
        started_from=run.started_from,
        attempts=[*map(run.attempt, run.attempt_numbers)],
        commit=commit,
        best_checkpoint=run.best_checkpoint(commit),
        accounts=accounts.model_copy(update={"history": [], "last_metrics": {}}),
        goodput=accounts.time.goodput,
    )


def verify(run: RunDirectory) -> Verification | None:
    """Check all that a resume of the run needs, without resuming it, and return the result.

    Return None if this package did not write the run.
    """
    if not run.is_begun:
        return None
    try:
        point = run.resume_point
        leftovers = run.leftovers
    except AttemptFailedError as error:
        return Verification(name=run.name, uri=run.uri, resume=f"is refused: {error}")
    checkpoint = loop_name(point.checkpoint)
    commit = commit_label(point.base)
    return Verification(
        name=run.name,
        uri=run.uri,
        whole=not point.repairs,
        resume=f"starts from checkpoint {checkpoint} of commit {commit}" if commit else "starts from the beginning",
        checkpoint=checkpoint,
        commit=commit,
        repairs=point.repairs,
        leftovers=leftovers,
    )


def make_result(store: RunStore, accounts: Accounts, storage_block: str = "", score: str = "") -> RunResult:
    """Return the result of a training, from the newest intact commit of its run and the totals of its history.

    Args:
        store: The run directory.
        accounts: The totals of the history.
        storage_block: Name of the saved storage block; empty for one that is not saved.
        score: Metric that is kept first if the result must be shortened for the attempt's final event.
    """
    run = RunDirectory(store)
    commit = run.find_resume_point().commit
    best = run.best_checkpoint(commit)
    left_out = accounts.reports - len(accounts.history)
    result = RunResult(
        **accounts.model_dump(exclude={"attempts"}),
        run_name=run.name,
        run_uri=store.uri,
        checkpoint_uri=f"{store.uri}/{commit.checkpoint}" if commit else "",
        metrics=commit.latest["metrics"] if commit else accounts.last_metrics,
        best_checkpoint_uri=f"{store.uri}/{best}" if best else "",
        best_checkpoints=[
            BestCheckpoint(uri=f"{store.uri}/{result['checkpoint_dir_name']}", metrics=result["metrics"])
            for result in (commit.snapshot["checkpoint_results"] if commit else [])
        ],
        attempts=max(accounts.attempts, 1),
        goodput=accounts.time.goodput,
        storage_block=storage_block,
        started_from=run.started_from,
        left_out={"history": left_out} if left_out else {},
    )
    return bounded(result, score)
