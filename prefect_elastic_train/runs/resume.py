"""What an attempt starts from, and what has to be written for that.

It is the newest whole commit, put back as Ray's file; in a new run a copy of another's checkpoint; or raw Ray Train's.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from typing import Any

from prefect_elastic_train.core.checkpoint_names import age_of, loop_name, physical_name
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.records import CommitRecord, CompletedRuns, Owner, RunRecord, decode, encode
from prefect_elastic_train.core.request import RunRequest
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.commits import check_fence
from prefect_elastic_train.runs.identity import LATEST_RUN, check_run_name
from prefect_elastic_train.runs.model import SEED_COMMIT, ResumePoint, RunDirectory, refusal
from prefect_elastic_train.runs.snapshots import checkpoint_names, seed_snapshot, without_checkpoints
from prefect_elastic_train.storage.opening import Storage
from prefect_elastic_train.storage.store import RunStore

#: Completed runs that are remembered of each training of a deployment; all but the newest stand in for it.
_REMEMBERED = 20


def restore_snapshot(store: RunStore, point: ResumePoint) -> list[str]:
    """Put the resume point back as Ray's file; return in words what was wrong with that."""
    run = RunDirectory(store)
    is_there = run.read(layout.SNAPSHOT) is not None
    if point.snapshot is None:
        store.delete(layout.SNAPSHOT)
        return ["Ray's snapshot belongs to no commit and was removed"] if is_there else []
    text = json.dumps(point.snapshot)
    if json.dumps(run.mirror) == text:  # a metric may be NaN, which equals nothing
        return []
    store.replace(layout.SNAPSHOT, text.encode())
    # A copied checkpoint comes without Ray's file, and incremental commits do not write it.
    if point.repairs or "since" in point.snapshot or (not is_there and point.base == SEED_COMMIT):
        return []
    return ["Ray's snapshot was torn, missing or not the newest commit's, and was written anew from that"]


def adopt_snapshot(store: RunStore) -> list[str]:
    """Make the state of a run that raw Ray Train has written the first commit; return in words what that is."""
    run = RunDirectory(store)
    snapshot = run.mirror
    names = checkpoint_names(snapshot)
    missing = [name for name in names if not run.file_sizes(name)]
    usable = without_checkpoints(snapshot, missing) if snapshot is not None else None
    if usable is None:
        raise refusal(
            f"{store.uri} holds a run that another program wrote with Ray Train, and its {layout.SNAPSHOT} is torn or "
            "names no checkpoint that is still there; remove that file to begin anew there, or give another run_name"
        )
    _write_first_commit(store, usable)
    notes = [f"checkpoint {name} was dropped: its folder is missing or empty" for name in missing]
    adopted = len(names) - len(missing)
    return [f"the run was written by Ray Train alone; {adopted} of its checkpoints were adopted", *notes]


def _write_first_commit(store: RunStore, snapshot: dict[str, Any]) -> None:
    """Make a snapshot whose checkpoints are in place the first commit of a run, unless it has one."""
    manifest = {name: store.file_sizes(name) or {} for name in checkpoint_names(snapshot)}
    attempt, sequence = SEED_COMMIT
    record = CommitRecord(attempt=attempt, sequence=sequence, snapshot=snapshot, manifest=manifest)
    store.create(layout.commit_name(*SEED_COMMIT), encode(record))


def remove_interrupted_uploads(store: RunStore, attempt: int) -> list[str]:
    """Remove checkpoint folders that no commit needs, but for those of later attempts; return their names."""
    check = partial(check_fence, store, attempt)
    check()
    return [folder for folder in RunDirectory(store, attempt).leftovers if store.delete_folder(folder, check)]


@dataclass(frozen=True)
class Source:
    """A whole checkpoint that a new run starts from, by its run and folder; none of both is the beginning."""

    run: str = ""
    folder: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)
    manifest: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what the user should know of the choice, in words


def choose_source(storage: Storage, request: RunRequest) -> Source:
    """Choose the checkpoint that a new run starts from, ``"<run>"`` or ``"<run>@latest|best|<checkpoint>"``, or refuse.

    Without a choice it is the newest checkpoint of a run that is named, and the best one of ``"latest"``.
    """
    name, _, choice = request.resume_from.partition("@")
    try:
        if name == LATEST_RUN:  # of which the best checkpoint is meant, unless one is named
            source = _newest_run(storage, request, choice)
        else:
            source = _choose(storage, check_run_name(name), choice or "latest")
    except AttemptFailedError as error:
        raise refusal(f"resume_from={request.resume_from!r}: {error}") from error
    return replace(source, notes=[f"resume_from={request.resume_from!r}: {note}" for note in source.notes])


def seed_from_source(storage: Storage, request: RunRequest, target: RunStore) -> list[str]:
    """Copy what a new run starts from into it, check and commit it, and return what the user should know."""
    record = decode(RunRecord, target.read(layout.RUN))
    if record is None or not record.resume_from:
        return []
    # A run that is taken over starts from what it was to start from.
    source = choose_source(storage, replace(request, resume_from=record.resume_from))
    chosen = f"{source.run}@{source.folder}" if source.run else ""
    folder = physical_name(f"from-{source.run}", attempt=0, report=time.time_ns())
    if chosen:
        try:
            target.copy_folder(f"{storage.run(source.run).path}/{source.folder}", folder)
            damage = RunDirectory(target).damage_of(folder, source.manifest)
        except FileNotFoundError:
            damage = "it was deleted meanwhile"
        if damage:
            raise AttemptFailedError(
                f"resume_from={chosen!r}: the copy of the checkpoint is not whole: {damage}; retry the flow run",
                outcome=Outcome.STORAGE_ERROR,
            )
    target.replace(layout.RUN, encode(record.model_copy(update={"source": chosen})))
    if chosen:
        _write_first_commit(target, seed_snapshot(folder, source.metrics, version("ray")))
    return source.notes


def note_completed(storage: Storage, name: str) -> None:
    """Note that a run has completed, for those that start from the newest one; of two at once the later one stays."""
    record = decode(RunRecord, storage.run(name).read(layout.RUN))
    if record is None:
        return
    pointers, pointer = _pointer(storage, record.creator, record.part)
    known = decode(CompletedRuns, pointers.read(pointer)) or CompletedRuns()
    runs = [record, *(one for one in known.runs if one.name != name)]
    runs.sort(key=lambda one: one.created_at, reverse=True)
    pointers.replace(pointer, encode(CompletedRuns(runs=runs[:_REMEMBERED])))


def _newest_run(storage: Storage, request: RunRequest, choice: str) -> Source:
    """Choose among the completed runs of the same training by earlier flow runs, the newest first."""
    marks = request.fingerprint
    pointers, pointer = _pointer(storage, request.owner, request.part)
    known = decode(CompletedRuns, data := pointers.read(pointer))
    if known is None and data is not None:
        raise refusal(
            f"{pointers.uri}/{pointer}, which names the completed runs, is torn; name the run to start from, or remove "
            "that file"
        )
    notes: list[str] = []
    for record in known.runs if known is not None else []:
        if record.creator.flow_run_id == request.owner.flow_run_id or not record.fingerprint.may_be_loop_of(marks):
            continue
        try:
            source = _choose(storage, record.name, choice, record)
        except AttemptFailedError as error:
            notes.append(str(error))
            continue
        if differences := record.fingerprint.differences(marks):
            notes.append(f"run {record.name!r} had another configuration: {'; '.join(differences)}")
        return replace(source, notes=[*notes, *source.notes])
    nothing = (
        f"{storage.uri} holds no completed run with a checkpoint of training {request.part!r} (train loop "
        f"{marks.loop!r}) of this deployment or flow; it trains from the beginning"
    )
    return Source(notes=[*notes, nothing])


def _choose(storage: Storage, name: str, choice: str, completed: RunRecord | None = None) -> Source:
    """Return a whole checkpoint of a run: ``latest``, ``best``, or one by the loop's name or its folder's.

    Without a choice it is the best, if any has the score, else the newest.
    """
    run = RunDirectory(storage.run(name))
    newest = run.newest_attempt
    is_completed = newest is not None and newest.outcome == Outcome.COMPLETED.value
    if newest is not None and newest.is_pruner:
        raise refusal(f"run {name!r} is being deleted")
    if completed is not None and (run.record is None or run.record.id != completed.id or not is_completed):
        raise refusal(f"run {name!r} is gone, or is not completed any more")
    point = run.resume_point
    if point.commit is None:
        raise refusal("; ".join([f"{run.uri} has no committed checkpoint", *point.repairs]))
    results: list[dict[str, Any]] = point.commit.snapshot["checkpoint_results"]
    folders = [result["checkpoint_dir_name"] for result in results]
    notes = [f"of run {name!r}: {repair}" for repair in point.repairs]
    best, score = run.best_checkpoint(point.commit), run.score_attribute(point.commit)
    named = [folder for folder in folders if choice in (folder, loop_name(folder))]
    if choice in ("best", "") and best:
        folder = best
    elif choice in ("latest", ""):
        folder = point.checkpoint
        notes += [f"no checkpoint of run {name!r} has the score {score!r}: its newest one is used"] * (not choice)
    elif named:
        folder = max(named, key=age_of)
    elif choice == "best":
        raise refusal(f"no checkpoint of run {name!r} has the score {score!r}; give {name}@latest for its newest one")
    else:
        names = ", ".join(sorted(map(loop_name, folders)))
        raise refusal("; ".join([f"run {name!r} has no checkpoint {choice!r}, it has {names}", *point.repairs]))
    metrics = results[folders.index(folder)]["metrics"] or {}
    return Source(name, folder, metrics, point.commit.manifest.get(folder, {}), notes)


def _pointer(storage: Storage, owner: Owner, part: str) -> tuple[RunStore, str]:
    """Return the file that names the completed runs of a training of a deployment, or of a flow without one."""
    of = f"deployment {owner.deployment_id}" if owner.deployment_id else f"flow {owner.flow_name}"
    digests = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in (of, part)]
    return storage.folder(f"{storage.settings.root}/{layout.STATE_FOLDER}"), f"completed/{'/'.join(digests)}.json"
