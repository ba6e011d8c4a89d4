"""What a run is, where it stands and what it came to, read from its directory, for people and for scripts."""

from __future__ import annotations

import enum
from typing import Any

from pydantic import BaseModel, Field

from prefect_elastic_train.core.checkpoint_names import loop_name
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.records import CommitRecord, RunRecord
from prefect_elastic_train.core.result import BestCheckpoint, RunResult, bounded
from prefect_elastic_train.report.accounts import Accounts, add_up
from prefect_elastic_train.runs.history import read_history
from prefect_elastic_train.runs.layout import commit_label
from prefect_elastic_train.runs.liveness import Life, look_for_life
from prefect_elastic_train.runs.model import Attempt, RunDirectory
from prefect_elastic_train.runs.snapshots import latest_checkpoint
from prefect_elastic_train.storage.store import RunStore


class RunState(str, enum.Enum):
    """Where a run stands, by its newest attempt; one without an end is by what can be told of its driver."""

    TRAINING = "training"
    DIED = "died"
    UNKNOWN = "unknown"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"
    NOT_BEGUN = "not_begun"  # a flow run has claimed it, and no attempt has begun
    DELETING = "deleting"  # it is being deleted, or was and that was cut short
    UNREADABLE = "unreadable"  # the storage refuses to show it


_STATES = {Life.ALIVE: RunState.TRAINING, Life.DEAD: RunState.DIED, Life.UNKNOWN: RunState.UNKNOWN}
_ENDS = {Outcome.COMPLETED.value: RunState.COMPLETED, Outcome.CANCELLED.value: RunState.CANCELLED}


class _View(BaseModel, frozen=True, ser_json_inf_nan="null"):
    """Shown as JSON, which has no NaN: a metric that is one becomes null."""


class RunSummary(_View):
    """A run in short. Times are seconds since the epoch."""

    name: str
    uri: str
    state: RunState
    outcome: str = ""  # of the newest attempt; empty if it has not ended
    life: Life | None = None  # of its driver; null once it has ended
    detail: str = ""  # why it is in this state, in words
    attempts: int = 0
    reports: int = 0  # up to the newest commit, over all attempts
    metrics: dict[str, Any] = Field(default_factory=dict)  # what was reported with the newest checkpoint
    #: Those that the newest commit keeps, and the size of their files in bytes as it lists them.
    checkpoints: int = 0
    size_bytes: int = 0
    last_commit_at: float | None = None
    last_activity_at: float | None = None
    flow_run_id: str = ""
    flow_run_name: str = ""
    flow_name: str = ""


class RunDetails(_View):
    """All that there is to know of a run: its records, each null if it is lost, and what its history adds up to."""

    summary: RunSummary
    run: RunRecord | None
    #: URI of the checkpoint of another run that it started from, empty for none; that may be gone by now.
    started_from: str
    attempts: list[Attempt]
    commit: CommitRecord | None  # the newest one that counts, without checkpoints that were dropped since
    best_checkpoint: str = ""  # folder of the best one by the newest attempt's policy; empty if none has its score
    accounts: Accounts  # without the rows of the history
    goodput: float


class Verification(_View):
    """What a resume would do, found without doing it."""

    name: str
    uri: str
    whole: bool = False  # it finds all that it needs as it was written
    #: What it would do, in words; the checkpoint and the commit that it would start from, if any.
    resume: str = ""
    checkpoint: str = ""
    commit: str = ""
    repairs: list[str] = Field(default_factory=list)  # what it would repair or drop to get there, in words
    #: Folders that no commit needs, and the size of their files in bytes.
    leftovers: dict[str, int] = Field(default_factory=dict)


def summarize(run: RunDirectory) -> RunSummary | None:
    """Return where a run stands, by about six requests to its storage; None if the folder holds none of ours."""
    if not run.is_begun:
        return None
    commit, attempt, record, owner = run.newest_commit, run.newest_attempt, run.record, run.owner
    times = [record.created_at] if record is not None else []
    found: dict[str, Any] = {"state": RunState.NOT_BEGUN, "detail": "no attempt has begun"}
    if commit is not None:
        times.append(commit.at)
        found |= {
            "reports": commit.snapshot["current_report_index"],
            "metrics": (latest_checkpoint(commit.snapshot) or {}).get("metrics") or {},
            "checkpoints": len(commit.snapshot["checkpoint_results"]),
            "size_bytes": sum(sum(files.values()) for files in commit.manifest.values()),
            "last_commit_at": commit.at,
        }
    if attempt is not None and attempt.ended is not None:
        detail = (attempt.ended.verdict or attempt.ended.message).strip().partition("\n")[0]
        found |= {"outcome": attempt.outcome, "state": _ENDS.get(attempt.outcome, RunState.FAILED), "detail": detail}
        times.append(attempt.ended.at)
    elif attempt is not None:
        life, words, at = look_for_life(run, attempt)
        found |= {"life": life, "state": _STATES[life], "detail": words}
        times.append(at)
    if attempt is not None and attempt.is_pruner:
        found["state"] = RunState.DELETING
    if owner is not None:
        found |= owner.model_dump(include={"flow_run_id", "flow_run_name", "flow_name"})
    return RunSummary(
        name=run.name,
        uri=run.uri,
        attempts=len(run.numbers),
        last_activity_at=max(times, default=0.0) or None,
        **found,
    )


def describe(run: RunDirectory) -> RunDetails | None:
    """Return all about a run; None if the folder holds none."""
    if (summary := summarize(run)) is None:
        return None
    accounts, commit = add_up(read_history(run.store)), run.newest_commit
    return RunDetails(
        summary=summary,
        run=run.record,
        started_from=run.started_from,
        attempts=[*map(run.attempt, run.numbers)],
        commit=commit,
        best_checkpoint=run.best_checkpoint(commit),
        accounts=accounts.model_copy(update={"history": [], "last_metrics": {}}),
        goodput=accounts.time.goodput,
    )


def verify(run: RunDirectory) -> Verification | None:
    """Resume a run without doing it: check all that a resume needs, and say what it would do; None if there is none."""
    if not run.is_begun:
        return None
    try:
        point, leftovers = run.resume_point, run.leftovers
    except AttemptFailedError as error:
        return Verification(name=run.name, uri=run.uri, resume=f"is refused: {error}")
    checkpoint, commit = loop_name(point.checkpoint), commit_label(point.base)
    return Verification(
        name=run.name,
        uri=run.uri,
        whole=not point.repairs,
        resume=f"starts from checkpoint {checkpoint} of commit {commit}" if commit else "begins from the beginning",
        checkpoint=checkpoint,
        commit=commit,
        repairs=point.repairs,
        leftovers=leftovers,
    )


def make_result(store: RunStore, accounts: Accounts, storage_block: str = "", score: str = "") -> RunResult:
    """The result of a run from its newest whole commit and what its history adds up to, in a bounded size."""
    run = RunDirectory(store)
    point = run.look_back(whole=True)
    latest, best = latest_checkpoint(point.snapshot), run.best_checkpoint(point.commit)
    results = point.snapshot["checkpoint_results"] if point.snapshot else []
    kept = [BestCheckpoint(uri=f"{store.uri}/{one['checkpoint_dir_name']}", metrics=one["metrics"]) for one in results]
    left_out = accounts.reports - len(accounts.history)
    result = RunResult(
        **accounts.model_dump(exclude={"attempts"}),
        run_name=run.name,
        run_uri=store.uri,
        checkpoint_uri=f"{store.uri}/{latest['checkpoint_dir_name']}" if latest else "",
        metrics=latest["metrics"] if latest else accounts.last_metrics,
        best_checkpoint_uri=f"{store.uri}/{best}" if best else "",
        best_checkpoints=kept,
        attempts=max(accounts.attempts, 1),
        goodput=accounts.time.goodput,
        storage_block=storage_block,
        started_from=run.started_from,
        left_out={"history": left_out} if left_out else {},
    )
    return bounded(result, score)
