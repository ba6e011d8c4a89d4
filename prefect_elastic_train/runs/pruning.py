"""Deletion of leftover folders and of whole runs, safe against a driver that starts at the same time.

A plan is made without writing, and checked again before each deletion. Before a whole run is deleted, its fence is
taken: a driver that seemed dead stops at its next check of the fence, and a new driver finds the run owned by another.
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

from prefect_elastic_train.core.outcomes import AttemptFailedError, ElasticTrainError
from prefect_elastic_train.core.records import AttemptRecord, Owner, encode
from prefect_elastic_train.storage.store import RunStore

from . import layout
from .heartbeat import Liveness, is_alive, this_process
from .inspecting import RunState, summarize
from .run_directory import PRUNER, RunDirectory, newest_attempt_number

_SETTLE_SECONDS = 60.0  # time that an attempt's processes may outlive its driver, or the record of its end
#: Time that a run may be without an attempt, while it waits for a cluster or copies the checkpoint that it starts from.
_CLAIM_SECONDS = 86400.0


class RunChangedError(ElasticTrainError):
    """A run has changed since its deletion was planned. The rest of it is not deleted."""


class Deletion(NamedTuple):
    """A folder of a run to delete, empty for the whole run; the size of its files; and the reason."""

    folder: str
    size_bytes: int
    reason: str


class RunPlan(NamedTuple):
    """The planned deletions in a run, and the run's newest attempt and commit when they were planned."""

    run: str
    newest_attempt: int
    newest_commit: layout.CommitId | None
    deletions: list[Deletion]
    skipped: str = ""  # reason why nothing may be deleted; empty if something is, or if there is nothing to delete


def plan_run(run: RunDirectory, older_than_seconds: float | None = None) -> RunPlan:
    """Return a plan of the deletions in a run. Nothing is deleted.

    By default these are the checkpoint folders that no commit needs. The whole run is deleted if it was not active for
    ``older_than_seconds``, or if its deletion was interrupted. A run that may be trained is skipped, with the reason.
    """
    try:
        summary = summarize(run)
        plan = RunPlan(run.name, run.newest_attempt.number, run.newest_commit_id, [])
        if not summary:
            return plan
        has_no_end = summary.life is not None
        is_interrupted = summary.state is RunState.DELETING
        idle_seconds = time.time() - (summary.last_activity_at or 0.0)
        if summary.life in (Liveness.ALIVE, Liveness.UNKNOWN):
            raise AttemptFailedError(
                f"it is being {'deleted' if is_interrupted else 'trained, or may be'}: {summary.detail}"
            )
        settle_seconds = _CLAIM_SECONDS if summary.state is RunState.NOT_BEGUN else _SETTLE_SECONDS
        if not is_interrupted and idle_seconds <= settle_seconds:
            raise AttemptFailedError("it was active just now, or was claimed within a day and is about to begin")
        is_old = older_than_seconds is not None and summary.last_activity_at and idle_seconds > older_than_seconds
        if is_interrupted or is_old:
            # The driver's clock may be wrong: before its run is deleted, its heartbeat is watched.
            if has_no_end and is_alive(run.store, run.newest_attempt.owner):
                raise AttemptFailedError("it is being trained: its heartbeat changes")
            reason = f"{summary.state.value.replace('_', ' ')}, last activity {idle_seconds / 86400:.1f} days ago"
            if is_interrupted:
                reason = "its deletion was interrupted"
            return plan._replace(deletions=[Deletion("", sum(run.file_sizes().values()), reason)])
        if run.resume_point.repairs:
            raise AttemptFailedError(f"a resume repairs it first: {run.resume_point.repairs[0]}")
        leftovers = [Deletion(folder, size, "no commit needs it") for folder, size in run.leftovers.items()]
        if leftovers and has_no_end:
            raise AttemptFailedError(
                "its newest attempt has no end: resume the run, which removes leftovers, or delete it whole"
            )
        return plan._replace(deletions=leftovers)
    except AttemptFailedError as error:  # also if commits are lost, or another version wrote the run
        return RunPlan(run.name, 0, None, [], skipped=str(error))


def delete_planned(store: RunStore, plan: RunPlan) -> Iterator[Deletion]:
    """Delete the folders of a plan, or the whole run, and yield each deletion after it is done.

    Raises:
        RunChangedError: The run has changed since the plan was made, or while the run was deleted. Deletions that were
            not yielded are not done; that of a whole run may be half done.
    """

    def check() -> None:
        _check_unchanged(RunDirectory(store), plan)

    for deletion in plan.deletions:
        if deletion.folder:
            store.delete_folder(deletion.folder, check)
        else:
            _delete_run(store, plan)
        yield deletion
    if plan.deletions and plan.deletions[-1].folder:
        check()
        store.abort_uploads()  # an object store keeps the parts of interrupted uploads without listing them


def _check_unchanged(run: RunDirectory, plan: RunPlan) -> None:
    if newest_attempt_number(run.store) != plan.newest_attempt or run.newest_commit_id != plan.newest_commit:
        raise RunChangedError(f"run {plan.run} has changed meanwhile")


def _delete_run(store: RunStore, plan: RunPlan) -> None:
    """Delete a whole run. A new attempt takes the fence first; the record of this attempt is deleted last."""
    run = RunDirectory(store)
    _check_unchanged(run, plan)
    number = run.next_attempt_number
    owner = Owner(flow_run_id=PRUNER, flow_run_name=PRUNER, **this_process())
    record = AttemptRecord(attempt=number, owner=owner, confirmed=False, base=plan.newest_commit)
    if not store.create(layout.attempt_name(number), encode(record)):
        raise RunChangedError(f"run {plan.run} has changed meanwhile")
    try:
        _check_unchanged(RunDirectory(store, number - 1), plan._replace(newest_attempt=number))
    except RunChangedError:
        store.delete(layout.attempt_name(number))
        raise

    def check() -> None:
        if newest_attempt_number(store) != number:
            raise RunChangedError(f"run {plan.run} was started again while it was deleted")

    state = [f"{layout.STATE_FOLDER}/{folder}" for folder in store.folders(layout.STATE_FOLDER)]
    for folder in [*store.folders(), *state]:
        if folder not in (layout.STATE_FOLDER, layout.ATTEMPTS):
            store.delete_folder(folder, check)
    files = store.file_sizes("") or {}
    check()  # after the listing: if it passes, the listing has no later attempt
    store.abort_uploads()
    for name in sorted(files, key=layout.attempt_name(number).__eq__):  # the record of this attempt last
        store.delete(name)

    def check_not_started() -> None:
        if RunDirectory(store).is_begun:
            raise RunChangedError(f"run {plan.run} was started again while it was deleted")

    store.delete_folder("", check_not_started)
