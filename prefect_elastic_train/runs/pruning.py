"""Deleting what no resume needs, and runs that nobody wants any more, safely against a driver that begins meanwhile.

A plan only looks. Carrying it out looks again right before each deletion. A whole run's fence is taken first: a driver
that was thought dead and is not stops at its next look at the fence, and one that begins meanwhile is told whose the
run is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from prefect_elastic_train.core.outcomes import AttemptFailedError, ElasticTrainError
from prefect_elastic_train.core.records import AttemptRecord, Owner, encode
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.attempts import host_id, process_start
from prefect_elastic_train.runs.commits import all_attempts, all_commits, lineage, newest_attempt
from prefect_elastic_train.runs.inspecting import RunState, RunSummary, summarize
from prefect_elastic_train.runs.liveness import Life
from prefect_elastic_train.runs.model import PRUNER, RunDirectory
from prefect_elastic_train.storage.opening import Storage
from prefect_elastic_train.storage.store import RunStore

#: Processes of an attempt may outlive its driver, or the record of its end, by some seconds.
_SETTLE_SECONDS = 60.0
#: A run whose first attempt is yet to come may wait for a cluster, or copy the checkpoint that it starts from.
_CLAIM_SECONDS = 86400.0
#: Runs looked at, at a time; one whose heartbeat must be watched takes 15 s.
_THREADS = 32


class RunChangedError(ElasticTrainError):
    """A run is not what it was when it was looked at, so that nothing more of it is deleted."""


@dataclass(frozen=True)
class Deletion:
    """Something to delete.

    Attributes:
        run: Name of the run.
        folder: Of the run; empty for the whole run.
        size_bytes: Of its files.
        reason: Why nobody needs it.
    """

    run: str
    folder: str
    size_bytes: int
    reason: str


@dataclass(frozen=True)
class RunPlan:
    """What is deleted of a run.

    Attributes:
        run: Its name.
        deletions: What is deleted.
        kept: Why it is left alone, in words; empty if it is not, or if there is nothing to delete.
        newest_attempt: Its newest attempt when it was looked at, 0 if none has begun.
        newest_commit: The newest commit that counted then.
    """

    run: str
    deletions: list[Deletion] = field(default_factory=list)
    kept: str = ""
    newest_attempt: int = 0
    newest_commit: tuple[int, int] | None = None

    @property
    def whole(self) -> Deletion | None:
        """The deletion of the whole run, if that is planned."""
        return next((deletion for deletion in self.deletions if not deletion.folder), None)


class AwaitedSources:
    """Finds out which runs others are about to copy a checkpoint from.

    Args:
        storage: Where they are.
        older_than_seconds: A run that was claimed longer ago, and longer than a day, will not begin any more.
    """

    def __init__(self, storage: Storage, older_than_seconds: float) -> None:
        self._storage = storage
        self._patience_seconds = max(older_than_seconds, _CLAIM_SECONDS)
        #: Runs that have begun; they copy no more, and are not asked again.
        self._begun: set[str] = set()

    def look(self, now: float | None = None) -> dict[str, str]:
        """Give the name of a run that awaits it, for each run that is awaited."""
        now = time.time() if now is None else now
        names = [name for name in self._storage.run_names() if name not in self._begun]
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="elastic-train-prune") as pool:
            sources = pool.map(lambda name: self._source(name, now), names)
            return {source: name for source, name in zip(sources, names, strict=True) if source}

    def _source(self, name: str, now: float) -> str:
        """Give the run whose checkpoint a run is about to copy; empty if it is not about to."""
        run = RunDirectory(self._storage.run(name))
        if all_attempts(run) or all_commits(run):
            self._begun.add(name)
            return ""
        record = run.record
        if record is None or now - record.created_at > self._patience_seconds:
            return ""
        return (record.resume_from if record.source is None else record.source).partition("@")[0]


def plan_runs(
    storage: Storage, names: Sequence[str], *, older_than_seconds: float | None = None, now: float | None = None
) -> list[RunPlan]:
    """Find what can be deleted of some runs; nothing is written.

    Args:
        storage: Where they are.
        names: The runs.
        older_than_seconds: Take whole runs that have ended and whose last activity is longer ago. None: no whole runs.
        now: Seconds since the epoch.

    Raises:
        StorageFaultError: The storage refuses.
    """
    now = time.time() if now is None else now
    awaited = AwaitedSources(storage, older_than_seconds).look(now) if older_than_seconds is not None else {}
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="elastic-train-prune") as pool:

        def look(name: str) -> RunPlan:
            return plan_run(storage.run(name), name, older_than_seconds, awaited_by=awaited.get(name, ""), now=now)

        return list(pool.map(look, names))


def plan_run(
    store: RunStore,
    name: str,
    older_than_seconds: float | None = None,
    *,
    awaited_by: str = "",
    now: float | None = None,
) -> RunPlan:
    """Find what can be deleted of a run.

    Args:
        store: The run directory.
        name: Name of the run.
        older_than_seconds: See :func:`plan_runs`.
        awaited_by: Another run that is yet to copy its checkpoint from here, empty for none.
        now: Seconds since the epoch.
    """
    now = time.time() if now is None else now
    run = RunDirectory(store)
    seen = RunPlan(name, newest_attempt=newest_attempt(run), newest_commit=next(lineage(run), None))
    summary = summarize(store, name, now=now)
    if summary is None:
        return seen
    kept = _kept(summary, now)
    reason = _why_whole(summary, older_than_seconds, now)
    if not kept and not reason:
        return _plan_leftovers(run, seen)
    if not kept and awaited_by:
        kept = f"run {awaited_by} is about to start from its checkpoint"
    if not kept and summary.life is not None:
        # Somebody else's clock may be wrong: before a run is taken from a driver, its heartbeat is watched.
        watched = summarize(store, name, watch=(Life.DEAD, Life.UNKNOWN), now=now)
        kept = _kept(watched, now) if watched is not None else ""
    if kept:
        return replace(seen, kept=kept)
    return replace(seen, deletions=[Deletion(name, "", sum((run.file_sizes("") or {}).values()), reason)])


def carry_out(store: RunStore, planned: RunPlan, awaited: AwaitedSources | None = None) -> Iterator[Deletion]:
    """Delete what was planned, and yield each thing when it is gone.

    Args:
        store: The run directory.
        planned: What goes of it.
        awaited: Tells whether another run is about to start from one that goes as a whole. None: none is.

    Raises:
        RunChangedError: Somebody has begun to train the run, goes on with it, or is about to start from it. What was
            not yielded yet stays.
        StorageFaultError: The storage refuses.
    """
    whole = planned.whole
    if whole is not None:
        _delete_run(store, planned, awaited)
        yield whole
        return

    def check() -> None:
        _check_unchanged(store, planned)

    for deletion in planned.deletions:
        check()
        store.delete_folder(deletion.folder, check)
        yield deletion
    if planned.deletions:
        check()
        store.abandon_uploads()  # an object store keeps the parts of files that were interrupted out of sight


def _kept(summary: RunSummary, now: float) -> str:
    """Say why nothing of a run may be deleted; empty if something may."""
    at = summary.last_activity_at or 0.0
    if summary.state is RunState.FOREIGN:
        return "another program wrote it"
    if summary.state is RunState.DELETING:
        return "" if summary.life in (None, Life.DEAD) else f"it is being deleted: {summary.detail}"
    if summary.life is Life.ALIVE:
        return f"it is being trained: {summary.detail}"
    if summary.life is Life.UNKNOWN:
        return f"nothing tells whether its driver lives: {summary.detail}"
    if summary.state is RunState.NOT_BEGUN and now - at <= _CLAIM_SECONDS:
        return "a flow run has claimed it within a day, and may be about to begin"
    if now - at <= _SETTLE_SECONDS:
        return f"it was active within {_SETTLE_SECONDS:.0f} s, and processes of it may still be ending"
    return ""


def _why_whole(summary: RunSummary, older_than_seconds: float | None, now: float) -> str:
    """Say why a whole run goes; empty if it stays."""
    if summary.state is RunState.DELETING:
        return "its deletion was cut short"
    if older_than_seconds is None or summary.last_activity_at is None:
        return ""
    age = now - summary.last_activity_at
    state = summary.state.value.replace("_", " ")
    return f"{state}, last activity {age / 86400:.1f} days ago" if age > older_than_seconds else ""


def _plan_leftovers(run: RunDirectory, seen: RunPlan) -> RunPlan:
    try:
        leftovers = [leftover for leftover in run.leftovers if leftover.kind != "unnamed"]
    except AttemptFailedError as error:
        return replace(seen, kept=str(error))
    newest = run.newest_attempt
    if leftovers and newest is not None and newest.ended is None:
        why = f"attempt {newest.number} has no end: resume the run, which removes what is left over, or delete it whole"
        return replace(seen, kept=why)
    return replace(seen, deletions=[Deletion(seen.run, one.folder, one.size_bytes, one.reason) for one in leftovers])


def _check_unchanged(store: RunStore, planned: RunPlan) -> None:
    newest = newest_attempt(store)
    if newest != planned.newest_attempt:
        raise RunChangedError(f"attempt {newest} of run {planned.run} has begun meanwhile")
    if next(lineage(store), None) != planned.newest_commit:
        raise RunChangedError(f"run {planned.run} has committed a checkpoint meanwhile")


def _take_fence(store: RunStore, planned: RunPlan) -> int:
    """Begin an attempt that trains nothing, as :func:`begin_attempt` does: create it, then look again."""
    number = max([planned.newest_attempt, *(attempt for attempt, _ in all_commits(store))]) + 1
    _check_unchanged(store, planned)
    pid = os.getpid()
    owner = Owner(
        flow_run_id=PRUNER, flow_run_name=PRUNER, host=host_id(), pid=pid, process_started_at=process_start(pid)
    )
    record = AttemptRecord(attempt=number, owner=owner, confirmed=False, base=planned.newest_commit)
    if not store.create(layout.attempt_name(number), encode(record)):
        raise RunChangedError(f"attempt {number} of run {planned.run} has begun meanwhile")
    if newest_attempt(store) != number or next(lineage(store, before=number), None) != planned.newest_commit:
        store.delete(layout.attempt_name(number))
        raise RunChangedError(f"run {planned.run} has gone on meanwhile")
    return number


def _delete_run(store: RunStore, planned: RunPlan, awaited: AwaitedSources | None) -> None:
    """Delete a run, what holds it last: whoever begins meanwhile finds that it belongs to somebody else."""
    number = _take_fence(store, planned)
    # Looked at behind the fence: whoever asks for the run's checkpoints from here on sees that it is going.
    awaited_by = awaited.look().get(planned.run) if awaited is not None else None
    if awaited_by:
        store.delete(layout.attempt_name(number))
        raise RunChangedError(f"run {awaited_by} is about to start from its checkpoint")

    def check() -> None:
        newest = newest_attempt(store)
        if newest != number:
            raise RunChangedError(f"attempt {newest} of run {planned.run} has begun while it was deleted")

    state = [f"{layout.STATE_FOLDER}/{folder}" for folder in store.folders(layout.STATE_FOLDER)]
    for folder in [*store.folders(), *state]:
        if folder not in (layout.STATE_FOLDER, layout.ATTEMPTS):
            store.delete_folder(folder, check)
    check()
    store.abandon_uploads()
    records = [f"{layout.STATE_FOLDER}/{name}" for name in store.names(layout.STATE_FOLDER)]
    attempts = [layout.attempt_name(attempt) for attempt in all_attempts(store) if attempt != number]
    for name in [*store.names(""), *records, *attempts, layout.attempt_name(number)]:
        store.delete(name)

    def check_nothing_began() -> None:
        if all_attempts(store) or store.read(layout.RUN) is not None:
            raise RunChangedError(f"run {planned.run} was begun anew while it was deleted")

    store.delete_folder("", check_nothing_began)
