"""What a run is, where it stands and what it came to, read from its directory, for people and for scripts."""

from __future__ import annotations

import enum
import time
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from prefect_elastic_train.core.checkpoint_names import loop_name
from prefect_elastic_train.core.events import AttemptEnded
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.records import RunRecord
from prefect_elastic_train.core.result import BestCheckpoint, RunResult, bounded
from prefect_elastic_train.report.accounts import Accounts, add_up
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.commits import all_attempts, commit_label, lineage, newest_commit
from prefect_elastic_train.runs.history import read_history
from prefect_elastic_train.runs.liveness import Life, look_for_life
from prefect_elastic_train.runs.model import Attempt, Leftover, RunDirectory
from prefect_elastic_train.runs.snapshots import latest_checkpoint, reported
from prefect_elastic_train.runs.view import RunReader

if TYPE_CHECKING:
    from prefect_elastic_train.storage.opening import Storage

#: More nights than anybody looks back, each of which is a request.
_MAX_ANCESTORS = 100
#: A run that is being trained goes on while it is looked at: then it is looked at anew, so often.
_LOOKS = 3


class RunState(str, enum.Enum):
    """Where a run stands, by its newest attempt; one without an end is by what can be told of its driver."""

    TRAINING = "training"
    DIED = "died"
    UNKNOWN = "unknown"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"
    #: A flow run has claimed it, and no attempt has begun.
    NOT_BEGUN = "not_begun"
    #: Ray Train wrote it, for another program.
    FOREIGN = "foreign"
    #: It is being deleted, or was and that was cut short.
    DELETING = "deleting"
    #: The storage refuses to show it.
    UNREADABLE = "unreadable"


_STATES = {
    Life.ALIVE: RunState.TRAINING,
    Life.DEAD: RunState.DIED,
    Life.UNKNOWN: RunState.UNKNOWN,
    Outcome.COMPLETED.value: RunState.COMPLETED,
    Outcome.CANCELLED.value: RunState.CANCELLED,
}


class _View(BaseModel):
    # A metric may be NaN, which is no JSON: it becomes null.
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="null")


class RunSummary(_View):
    """A run in short. Times are seconds since the epoch."""

    name: str
    uri: str
    state: RunState
    #: Of the newest attempt; empty if it has not ended.
    outcome: str = ""
    #: Of its driver; null once it has ended.
    life: Life | None = None
    #: Why it is in this state, in words.
    detail: str = ""
    attempts: int = 0
    #: Up to the newest commit, over all attempts.
    reports: int = 0
    #: What was reported with the newest checkpoint.
    metrics: dict[str, Any] = Field(default_factory=dict)
    #: Those that the newest commit keeps, and the size of their files in bytes as it lists them.
    checkpoints: int = 0
    size_bytes: int = 0
    last_commit_at: float | None = None
    last_activity_at: float | None = None
    flow_run_id: str = ""
    flow_run_name: str = ""
    flow_name: str = ""


class Ancestor(_View):
    """A checkpoint that a run started from, itself or by way of other runs."""

    run: str
    checkpoint: str
    uri: str
    #: Whether its run is still there.
    there: bool


class CheckpointView(_View):
    """A checkpoint that the newest commit keeps; the best one by the score of the policy, without one the newest."""

    name: str
    uri: str
    #: Which report of the run brought it, counted from 0.
    report_index: int
    metrics: dict[str, Any]
    files: int
    size_bytes: int
    latest: bool
    best: bool


class RunDetails(_View):
    """All that there is to know of a run."""

    summary: RunSummary
    #: Null if that is lost.
    run: RunRecord | None
    #: The checkpoints that it comes from, the nearest first.
    ancestors: list[Ancestor]
    attempts: list[Attempt]
    #: What the history adds up to, without its rows.
    accounts: Accounts
    goodput: float
    #: The newest one that counts, as ``<attempt>-<sequence>``.
    commit: str
    checkpoints: list[CheckpointView]
    #: Of a completed run, without its history.
    result: dict[str, Any] | None


class Verification(_View):
    """What a resume would do, found without doing it."""

    name: str
    uri: str
    #: It finds all that it needs as it was written.
    whole: bool = False
    #: What it would do, in words; the checkpoint and the commit that it would start from, if any.
    resume: str = ""
    checkpoint: str = ""
    commit: str = ""
    #: What it would repair or drop to get there, in words.
    repairs: list[str] = Field(default_factory=list)
    leftovers: list[Leftover] = Field(default_factory=list)


def summarize(store: RunReader, name: str, now: float | None = None) -> RunSummary | None:
    """Return where a run stands, by about six requests to its storage.

    Args:
        store: The run directory.
        name: Name of the run.
        now: Seconds since the epoch.

    Returns:
        None if the folder holds no run.
    """
    run = RunDirectory(store)
    commit, attempt, record = run.newest_commit, run.newest_attempt, run.record
    is_foreign = not run.is_begun
    if is_foreign and run.read(layout.SNAPSHOT) is None:
        return None
    snapshot = (run.mirror if is_foreign else commit.snapshot if commit is not None else None) or {}
    owner = record.creator if record is not None else None
    times = [commit.at if commit is not None else 0.0]
    found: dict[str, Any] = {"state": RunState.FOREIGN, "detail": "Ray Train wrote it for another program"}
    if attempt is not None and attempt.ended is not None:
        detail = (attempt.ended.verdict or attempt.ended.message).strip().partition("\n")[0]
        found = {"outcome": attempt.outcome, "state": _STATES.get(attempt.outcome, RunState.FAILED), "detail": detail}
        times.append(attempt.ended.at)
    elif attempt is not None:
        sign = look_for_life(run, attempt.number, attempt.record, time.time() if now is None else now)
        found = {"life": sign.life, "state": _STATES[sign.life], "detail": sign.words}
        times.append(sign.at)
    elif not is_foreign:
        found = {"state": RunState.NOT_BEGUN, "detail": "no attempt has begun"}
        times.append(record.created_at if record is not None else 0.0)
    if attempt is not None and attempt.record is not None:
        owner = attempt.record.owner
        times.append(attempt.record.started_at)
    if attempt is not None and attempt.is_pruner:
        found["state"] = RunState.DELETING
    if owner is not None:
        found |= owner.model_dump(include={"flow_run_id", "flow_run_name", "flow_name"})
    return RunSummary(
        name=name,
        uri=run.uri,
        attempts=len(all_attempts(run)),
        reports=snapshot.get("current_report_index", 0),
        metrics=(latest_checkpoint(snapshot) or {}).get("metrics") or {},
        checkpoints=len(snapshot.get("checkpoint_results", [])),
        size_bytes=sum(sum(files.values()) for files in commit.manifest.values()) if commit is not None else 0,
        last_commit_at=commit.at if commit is not None else None,
        last_activity_at=max(times) or None,
        **found,
    )


def describe(storage: Storage, name: str) -> RunDetails | None:
    """Return all about a run.

    Returns:
        None if the folder holds no run.
    """
    run = RunDirectory(storage.run(name))
    summary = summarize(run, name)
    if summary is None:
        return None
    commit, newest = run.newest_commit, run.newest_attempt
    events = list(read_history(run))
    if events and summary.state in (RunState.DIED, RunState.FAILED, RunState.CANCELLED):
        last = events[-1]
        if not isinstance(last, AttemptEnded):  # what it trained since its last commit is nobody's
            events.append(AttemptEnded(at=last.at, attempt=last.attempt, outcome=Outcome.DRIVER_LOST, final=True))
    accounts = add_up(events)
    result = newest.ended.result if newest is not None and newest.ended is not None else None
    return RunDetails(
        summary=summary,
        run=run.record,
        ancestors=_ancestors(storage, name),
        attempts=[one.without_result for one in run.attempts],
        accounts=accounts.model_copy(update={"history": [], "last_metrics": {}}),
        goodput=accounts.time.goodput,
        commit=commit_label((commit.attempt, commit.sequence)) if commit is not None else "",
        checkpoints=_checkpoints(run),
        result={key: value for key, value in result.items() if key != "history"} if result is not None else None,
    )


def verify(store: RunReader, name: str) -> Verification | None:
    """Resume a run without doing it: check all that a resume needs, and say what it would do.

    Returns:
        None if the folder holds no run of ours.
    """
    found = None
    for _ in range(_LOOKS):
        run = RunDirectory(store)
        found = _dry_resume(run, name) if run.is_begun else None
        if next(lineage(store), None) == next(lineage(run), None):
            break
    return found


def _dry_resume(run: RunDirectory, name: str) -> Verification:
    try:
        point, leftovers = run.resume_point, run.leftovers
    except AttemptFailedError as error:
        return Verification(name=name, uri=run.uri, resume=f"is refused: {error}")
    checkpoint, commit = loop_name(point.checkpoint), commit_label(point.base)
    return Verification(
        name=name,
        uri=run.uri,
        whole=not point.repairs,
        resume=f"starts from checkpoint {checkpoint} of commit {commit}" if checkpoint else "begins from the beginning",
        checkpoint=checkpoint,
        commit=commit,
        repairs=point.repairs,
        leftovers=leftovers,
    )


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
    left_out = accounts.reports - len(accounts.history)
    same = {"worker_failures", "preemptions", "resizes", "steps_lost", "storage_wait_seconds", "world_sizes", "history"}
    result = RunResult(
        run_name=run_name,
        run_uri=store.uri,
        checkpoint_uri=f"{store.uri}/{latest['checkpoint_dir_name']}" if latest else "",
        metrics=latest["metrics"] if latest else accounts.last_metrics,
        best_checkpoints=[
            BestCheckpoint(uri=f"{store.uri}/{item['checkpoint_dir_name']}", metrics=item["metrics"]) for item in kept
        ],
        attempts=max(accounts.attempts, 1),
        goodput=accounts.time.goodput,
        time=accounts.time,
        storage_block=storage_block,
        started_from=run.started_from,
        left_out={"history": left_out} if left_out else {},
        **accounts.model_dump(include=same),
    )
    return bounded(result, score)


def _ancestors(storage: Storage, name: str) -> list[Ancestor]:
    """Return what a run started from, what that one's run started from, and so on."""
    found: list[Ancestor] = []
    seen = {name}
    record = RunDirectory(storage.run(name)).record
    while record is not None and record.source and len(found) < _MAX_ANCESTORS:
        run, _, checkpoint = record.source.partition("@")
        source = RunDirectory(storage.run(run))
        record = source.record if run not in seen else None  # the name was used again
        seen.add(run)
        uri = f"{source.uri}/{checkpoint}"
        found.append(Ancestor(run=run, checkpoint=loop_name(checkpoint), uri=uri, there=record is not None))
    return found


def _checkpoints(run: RunDirectory) -> list[CheckpointView]:
    commit = run.newest_commit
    snapshot = commit.snapshot if commit is not None else run.mirror
    if snapshot is None:
        return []
    latest = (latest_checkpoint(snapshot) or {}).get("checkpoint_dir_name")
    results = reported(snapshot)
    listed = commit.manifest if commit is not None else {}
    files = {result["checkpoint_dir_name"]: listed.get(result["checkpoint_dir_name"], {}) for _, result in results}
    return [
        CheckpointView(
            name=loop_name(name := result["checkpoint_dir_name"]),
            uri=f"{run.uri}/{name}",
            report_index=index,
            metrics=result.get("metrics") or {},
            files=len(files[name]),
            size_bytes=sum(files[name].values()),
            latest=name == latest,
            best=result is snapshot["checkpoint_results"][-1],
        )
        for index, result in results
    ]
