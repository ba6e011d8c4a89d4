"""What a run is and where it stands, read from its directory, for people and for scripts."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from prefect_elastic_train.core.checkpoint_names import loop_name
from prefect_elastic_train.core.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    Event,
    WaitingForCapacity,
    WorkerGroupStarted,
)
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.core.records import CommitRecord, EndedRecord, Fingerprint, Owner
from prefect_elastic_train.core.result import TimeAccount, WorldSize
from prefect_elastic_train.report.accounts import Accounts, add_up
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.ancestry import Ancestor
from prefect_elastic_train.runs.commits import all_attempts, commit_label
from prefect_elastic_train.runs.history import read_history
from prefect_elastic_train.runs.liveness import Life, look_for_life
from prefect_elastic_train.runs.model import Attempt, RunDirectory
from prefect_elastic_train.runs.snapshots import latest_checkpoint, parse_snapshot
from prefect_elastic_train.runs.view import RunReader


class RunState(str, enum.Enum):
    """Where a run stands, by its newest attempt."""

    #: Its driver lives.
    TRAINING = "training"
    COMPLETED = "completed"
    #: It ended with another outcome; a driver that was lost may be followed by another one.
    FAILED = "failed"
    #: A person stopped it.
    CANCELLED = "cancelled"
    #: It has no end, and its driver shows no sign of life.
    DIED = "died"
    #: It has no end, and nothing tells whether its driver lives.
    UNKNOWN = "unknown"
    #: A flow run has claimed it, and no attempt has begun.
    NOT_BEGUN = "not_begun"
    #: Ray Train wrote it, for another program.
    FOREIGN = "foreign"
    #: It is being deleted, or was and that was cut short.
    DELETING = "deleting"
    #: The storage refuses to show it.
    UNREADABLE = "unreadable"


class _View(BaseModel):
    # A metric may be NaN, which is no JSON: it becomes null.
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="null")


class RunSummary(_View):
    """A run in short. Times are seconds since the epoch."""

    name: str
    uri: str
    state: RunState
    #: How the newest attempt ended; empty if it has not.
    outcome: str = ""
    #: What can be told of its driver; null once it has ended.
    life: Life | None = None
    #: Why it is in this state, in words.
    detail: str = ""
    #: Attempts that ever began.
    attempts: int = 0
    #: Reports up to the newest commit, over all attempts.
    reports: int = 0
    #: What was reported with the newest checkpoint.
    metrics: dict[str, Any] = Field(default_factory=dict)
    #: Checkpoints that the newest commit keeps, and the size of their files in bytes as it lists them.
    checkpoints: int = 0
    size_bytes: int = 0
    last_commit_at: float | None = None
    #: The newest of all times in its newest records.
    last_activity_at: float | None = None
    flow_run_id: str = ""
    flow_run_name: str = ""
    flow_name: str = ""


class AttemptView(_View):
    """An attempt. Times are seconds since the epoch."""

    attempt: int
    #: Its record cannot be read, and with it all that it tells.
    torn: bool = False
    started_at: float | None = None
    ended_at: float | None = None
    outcome: str = ""
    message: str = ""
    #: The commit that it went on from as ``<attempt>-<sequence>``; empty for the beginning.
    base: str = ""
    dropped: list[str] = Field(default_factory=list)
    repairs: list[str] = Field(default_factory=list)
    #: It gave way before it did anything.
    void: bool = False
    #: A budget was used up after it, and which.
    final: bool = False
    verdict: str = ""
    flow_run_id: str = ""
    flow_run_name: str = ""
    host: str = ""
    pid: int = 0
    #: Submission id of the Ray job that its driver was; empty for a process of the flow's machine.
    job: str = ""


class CheckpointView(_View):
    """A checkpoint that the newest commit keeps."""

    name: str
    uri: str
    #: Which report of the run brought it, counted from 0.
    report_index: int
    metrics: dict[str, Any] = Field(default_factory=dict)
    files: int = 0
    size_bytes: int = 0
    committed_at: float | None = None
    latest: bool = False
    #: By the score of the checkpoint policy; without one the newest.
    best: bool = False


class RunAccounts(_View):
    """What the history adds up to. See :class:`prefect_elastic_train.TrainingResult` for the fields."""

    worker_failures: int = 0
    preemptions: int = 0
    resizes: int = 0
    steps_lost: int = 0
    goodput: float = 0.0
    time: TimeAccount = Field(default_factory=TimeAccount)
    storage_wait_seconds: float = 0.0
    world_sizes: list[WorldSize] = Field(default_factory=list)

    @classmethod
    def of(cls, accounts: Accounts) -> RunAccounts:
        """Take from the accounts what is shown."""
        same = {name: getattr(accounts, name) for name in cls.model_fields if name != "goodput"}
        return cls(goodput=accounts.time.goodput, **same)


class RunDetails(_View):
    """All that there is to know of a run."""

    summary: RunSummary
    created_at: float | None = None
    creator: Owner | None = None
    fingerprint: Fingerprint | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    #: The run whose checkpoint it started from, as it was asked for; empty for none.
    resume_from: str = ""
    #: The checkpoints that it comes from: the one that it started from, the one that that one's run started from, and
    #: so on.
    ancestors: list[Ancestor] = Field(default_factory=list)
    attempts: list[AttemptView] = Field(default_factory=list)
    accounts: RunAccounts = Field(default_factory=RunAccounts)
    #: What a training that lives waits for, if it waits for capacity.
    waiting: str = ""
    commit: str = ""
    checkpoints: list[CheckpointView] = Field(default_factory=list)
    #: The result of a completed run, without its history.
    result: dict[str, Any] | None = None


def summarize(
    store: RunReader, name: str, *, watch: Collection[Life] = (), now: float | None = None
) -> RunSummary | None:
    """Return where a run stands, by about six requests to its storage.

    Args:
        store: The run directory.
        name: Name of the run.
        watch: Answers about its life that shall be watched for: see :func:`look_for_life`.
        now: Seconds since the epoch.

    Returns:
        None if the folder holds no run.
    """
    run = RunDirectory(store)
    commit, attempt = run.newest_commit, run.newest_attempt
    if attempt is None and commit is None and run.read(layout.RUN) is None:
        return _foreign(run, name)
    summary = _with_commit(RunSummary(name=name, uri=run.uri, state=RunState.NOT_BEGUN), commit)
    if attempt is None:
        return _not_begun(run, summary)
    record, ended = attempt.record, attempt.ended
    update: dict[str, Any] = {"attempts": len(all_attempts(run)), **_owned_by(record.owner if record else None)}
    times = [summary.last_activity_at, record.started_at if record else None]
    if ended is not None:
        update.update(state=_state_of(ended), outcome=ended.outcome, detail=ended.verdict or _first_line(ended.message))
        times.append(ended.at)
    else:
        sign = look_for_life(store, attempt.number, record, watch=watch, now=now)
        update.update(state=_STATE_OF_LIFE[sign.life], life=sign.life, detail=sign.words)
        times.append(sign.at or None)
    if attempt.is_pruner:
        update["state"] = RunState.DELETING
    return summary.model_copy(update={**update, "last_activity_at": _newest(times)})


def describe(store: RunReader, name: str, *, now: float | None = None) -> RunDetails | None:
    """Return all about a run. If nothing else tells whether it lives, its heartbeat is watched for 15 s.

    Returns:
        None if the folder holds no run.
    """
    summary = summarize(store, name, watch=(Life.UNKNOWN,), now=now)
    if summary is None:
        return None
    run = RunDirectory(store)
    record, commit = run.record, run.newest_commit
    events = _ended(list(read_history(run)), summary.state)
    known = record.model_dump(include={"created_at", "versions", "resume_from"}) if record is not None else {}
    return RunDetails(
        summary=summary,
        attempts=[_attempt_view(attempt) for attempt in run.attempts],
        accounts=RunAccounts.of(add_up(events)),
        waiting=_waits_for(events) if summary.state is RunState.TRAINING else "",
        commit=commit_label((commit.attempt, commit.sequence)) if commit is not None else "",
        checkpoints=_checkpoint_views(run, events),
        result=_result(run.newest_attempt),
        creator=record.creator if record is not None else None,
        fingerprint=record.fingerprint if record is not None else None,
        **known,
    )


def _ended(events: list[Event], state: RunState) -> list[Event]:
    """Add the end that a driver could not tell of: what it trained since its last commit is nobody's."""
    told = [event for event in events if isinstance(event, AttemptStarted | AttemptEnded)]
    if not told or isinstance(told[-1], AttemptEnded) or state not in _WITHOUT_A_WORD:
        return events
    last = events[-1]
    end = AttemptEnded(at=last.at, attempt=told[-1].attempt, outcome=_WITHOUT_A_WORD[state], final=True)
    return [*events, end]


_WITHOUT_A_WORD = {
    RunState.DIED: Outcome.DRIVER_LOST,
    RunState.FAILED: Outcome.DRIVER_LOST,
    RunState.CANCELLED: Outcome.CANCELLED,
}
_STATE_OF_LIFE = {Life.ALIVE: RunState.TRAINING, Life.DEAD: RunState.DIED, Life.UNKNOWN: RunState.UNKNOWN}


def _state_of(ended: EndedRecord) -> RunState:
    known = {Outcome.COMPLETED.value: RunState.COMPLETED, Outcome.CANCELLED.value: RunState.CANCELLED}
    return known.get(ended.outcome, RunState.FAILED)


def _foreign(run: RunDirectory, name: str) -> RunSummary | None:
    data = run.read(layout.SNAPSHOT)
    if data is None:
        return None
    snapshot = parse_snapshot(data)
    detail = "Ray Train wrote it for another program" + ("" if snapshot else ", and its snapshot is torn")
    summary = RunSummary(name=name, uri=run.uri, state=RunState.FOREIGN, detail=detail)
    return summary.model_copy(update=_of_snapshot(snapshot or {}))


def _not_begun(run: RunDirectory, summary: RunSummary) -> RunSummary:
    """Describe a run that was claimed, whose attempts are yet to come, or were lost."""
    update = {**_owned_by(run.record.creator if run.record is not None else None), "detail": "no attempt has begun"}
    times = [summary.last_activity_at, run.record.created_at if run.record is not None else None]
    return summary.model_copy(update={**update, "last_activity_at": _newest(times)})


def _owned_by(owner: Owner | None) -> dict[str, Any]:
    if owner is None:
        return {}
    return {"flow_run_id": owner.flow_run_id, "flow_run_name": owner.flow_run_name, "flow_name": owner.flow_name}


def _with_commit(summary: RunSummary, commit: CommitRecord | None) -> RunSummary:
    if commit is None:
        return summary
    size = sum(sum(files.values()) for files in commit.manifest.values())
    times = {"last_commit_at": commit.at, "last_activity_at": commit.at}
    return summary.model_copy(update={**_of_snapshot(commit.snapshot), "size_bytes": size, **times})


def _of_snapshot(snapshot: dict[str, Any]) -> dict[str, Any]:
    latest = latest_checkpoint(snapshot)
    return {
        "reports": snapshot.get("current_report_index", 0),
        "metrics": (latest.get("metrics") or {}) if latest else {},
        "checkpoints": len(snapshot.get("checkpoint_results", [])),
    }


def _attempt_view(attempt: Attempt) -> AttemptView:
    record, ended = attempt.record, attempt.ended
    values: dict[str, Any] = {"attempt": attempt.number, "torn": record is None}
    if record is not None:
        owner = record.owner.model_dump(include={"flow_run_id", "flow_run_name", "pid", "job"})
        values |= {**owner, **record.model_dump(include={"started_at", "repairs"})}
        values["dropped"] = [loop_name(name) for name in record.dropped]
        values |= {"base": commit_label(record.base), "host": record.owner.host.partition("/")[0]}
    if ended is not None:
        values |= ended.model_dump(include={"outcome", "message", "void", "final", "verdict"})
        values["ended_at"] = ended.at
    return AttemptView(**values)


def _checkpoint_views(run: RunDirectory, events: Iterable[Event]) -> list[CheckpointView]:
    commit = run.newest_commit
    snapshot = parse_snapshot(run.read(layout.SNAPSHOT)) if commit is None else commit.snapshot
    if snapshot is None:
        return []
    manifest = commit.manifest if commit is not None else {}
    committed = {event.checkpoint: event.at for event in events if isinstance(event, CheckpointCommitted)}
    results: list[dict[str, Any]] = snapshot["checkpoint_results"]
    latest = latest_checkpoint(snapshot)
    latest_name = latest["checkpoint_dir_name"] if latest else ""
    if commit is not None and latest_name:
        committed.setdefault(latest_name, commit.at)
    best = results[-1]["checkpoint_dir_name"] if results else ""
    views = []
    pairs = zip(snapshot["checkpoint_report_indices"], results, strict=True)
    for index, result in sorted(pairs, key=lambda pair: pair[0]):
        name = result["checkpoint_dir_name"]
        files = manifest.get(name, {})
        views.append(
            CheckpointView(
                name=loop_name(name),
                uri=f"{run.uri}/{name}",
                report_index=index,
                metrics=result.get("metrics") or {},
                files=len(files),
                size_bytes=sum(files.values()),
                committed_at=committed.get(name),
                latest=name == latest_name,
                best=name == best,
            )
        )
    return views


def _waits_for(events: Iterable[Event]) -> str:
    waiting = ""
    for event in events:
        if isinstance(event, WaitingForCapacity):
            missing = f": {event.missing}" if event.missing else ""
            waiting = f"{event.possible_workers} of at least {event.min_workers} workers fit{missing}"
        elif isinstance(event, WorkerGroupStarted | AttemptStarted | AttemptEnded):
            waiting = ""
    return waiting


def _result(attempt: Attempt | None) -> dict[str, Any] | None:
    ended = attempt.ended if attempt is not None else None
    if ended is None or ended.outcome != Outcome.COMPLETED.value or ended.result is None:
        return None
    return {key: value for key, value in ended.result.items() if key != "history"}


def _newest(times: Iterable[float | None]) -> float | None:
    return max((at for at in times if at), default=None)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
