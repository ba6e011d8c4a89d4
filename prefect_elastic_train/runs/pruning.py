"""Deleting what no resume needs, and runs that nobody wants any more, safely against a driver that begins meanwhile.

A plan only looks. Carrying it out looks again right before each deletion. A whole run's fence is taken first: a driver
that was thought dead stops at its next look at the fence, and one that begins meanwhile is told whose the run is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from prefect_elastic_train.core.outcomes import AttemptFailedError, ElasticTrainError
from prefect_elastic_train.core.records import AttemptRecord, Owner, encode
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.inspecting import RunState, summarize
from prefect_elastic_train.runs.liveness import Life, is_alive, this_process
from prefect_elastic_train.runs.model import PRUNER, RunDirectory, all_attempts, newest_attempt
from prefect_elastic_train.storage.store import RunStore

_SETTLE_SECONDS = 60.0  # processes of an attempt may outlive its driver, or the record of its end, by some seconds
#: A run whose first attempt is yet to come may wait for a cluster, or copy the checkpoint that it starts from.
_CLAIM_SECONDS = 86400.0


class RunChangedError(ElasticTrainError):
    """A run is not what it was when it was looked at, so that nothing more of it is deleted."""


class Deletion(NamedTuple):
    """A folder of a run to delete, empty for the whole run; the size of its files; and why nobody needs it."""

    folder: str
    size_bytes: int
    reason: str


@dataclass(frozen=True)
class RunPlan:
    """What is deleted of a run, and what its newest attempt and commit were when it was looked at."""

    run: str
    newest_attempt: int
    newest_commit: tuple[int, int] | None
    deletions: list[Deletion] = field(default_factory=list)
    kept: str = ""  # why it is left alone, in words; empty if it is not, or if there is nothing to delete


def plan_run(run: RunDirectory, older_than_seconds: float | None = None) -> RunPlan:
    """Find what can be deleted of a run: the whole, if it has ended and its last activity is longer ago than that."""
    try:
        return _plan(run, older_than_seconds)
    except AttemptFailedError as error:  # its commits are lost, or it is of an older version
        return RunPlan(run.name, 0, None, kept=str(error))


def _plan(run: RunDirectory, older_than_seconds: float | None) -> RunPlan:
    summary, newest = summarize(run), run.newest_attempt
    seen = RunPlan(run.name, max(run.numbers, default=0), next(run.lineage, None))
    if summary is None:
        return seen
    state, idle_seconds = summary.state, time.time() - (summary.last_activity_at or 0.0)
    is_cut_short, has_no_end = state is RunState.DELETING, newest is not None and newest.ended is None
    if summary.life in (Life.ALIVE, Life.UNKNOWN):
        what = "deleted" if is_cut_short else "trained, or may be"
        return replace(seen, kept=f"it is being {what}: {summary.detail}")
    if not is_cut_short and idle_seconds <= (_CLAIM_SECONDS if state is RunState.NOT_BEGUN else _SETTLE_SECONDS):
        return replace(seen, kept="it was active just now, or was claimed within a day and is about to begin")
    is_old = older_than_seconds is not None and summary.last_activity_at and idle_seconds > older_than_seconds
    if is_cut_short or is_old:
        owner = newest.record.owner if newest is not None and newest.record is not None else None
        # Somebody else's clock may be wrong: before a run is taken from a driver, its heartbeat is watched.
        if has_no_end and is_alive(run.store, owner):
            return replace(seen, kept="it is being trained: its heartbeat moves")
        reason = f"{state.value.replace('_', ' ')}, last activity {idle_seconds / 86400:.1f} days ago"
        reason = "its deletion was cut short" if is_cut_short else reason
        return replace(seen, deletions=[Deletion("", sum((run.file_sizes("") or {}).values()), reason)])
    leftovers = run.leftovers
    if leftovers and has_no_end:
        kept = "its newest attempt has no end: resume the run, which removes leftovers, or delete it whole"
        return replace(seen, kept=kept)
    return replace(seen, deletions=[Deletion(folder, size, "no commit needs it") for folder, size in leftovers.items()])


def carry_out(store: RunStore, planned: RunPlan) -> Iterator[Deletion]:
    """Delete what was planned, and yield each thing when it is gone.

    Raises:
        RunChangedError: Somebody has begun to train the run, or goes on with it. What was not yielded yet stays.
    """

    def check() -> None:
        _check_unchanged(RunDirectory(store), planned)

    for deletion in planned.deletions:
        if deletion.folder:
            store.delete_folder(deletion.folder, check)
        else:
            _delete_run(store, planned)
        yield deletion
    if planned.deletions and planned.deletions[-1].folder:
        check()
        store.abandon_uploads()  # an object store keeps the parts of files that were interrupted out of sight


def _check_unchanged(run: RunDirectory, planned: RunPlan) -> None:
    if newest_attempt(run.store) != planned.newest_attempt or next(run.lineage, None) != planned.newest_commit:
        raise RunChangedError(f"run {planned.run} has gone on meanwhile")


def _delete_run(store: RunStore, planned: RunPlan) -> None:
    """Delete a run, last of all the attempt that holds it meanwhile, begun as any is: created, then looked again."""
    run = RunDirectory(store)
    _check_unchanged(run, planned)
    number = run.next_number
    owner = Owner(flow_run_id=PRUNER, flow_run_name=PRUNER, **this_process())
    record = AttemptRecord(attempt=number, owner=owner, confirmed=False, base=planned.newest_commit)
    if not store.create(layout.attempt_name(number), encode(record)):
        raise RunChangedError(f"run {planned.run} has gone on meanwhile")
    try:
        _check_unchanged(RunDirectory(store, number - 1), replace(planned, newest_attempt=number))
    except RunChangedError:
        store.delete(layout.attempt_name(number))
        raise

    def check() -> None:
        if newest_attempt(store) != number:
            raise RunChangedError(f"run {planned.run} was begun anew while it was deleted")

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
