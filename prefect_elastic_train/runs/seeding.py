"""Starting a new run from another run's checkpoint, which stays untouched."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

from prefect_elastic_train.core.checkpoint_names import age_of, loop_name, physical_name
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.records import CompletedRuns, RunRecord, decode, encode
from prefect_elastic_train.core.request import RunRequest
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.commits import damage_of
from prefect_elastic_train.runs.identity import LATEST_RUN, check_run_name
from prefect_elastic_train.runs.model import RunDirectory
from prefect_elastic_train.runs.resume import write_first_commit
from prefect_elastic_train.runs.snapshots import latest_checkpoint, seed_snapshot
from prefect_elastic_train.storage.opening import Storage
from prefect_elastic_train.storage.store import RunStore

#: Completed runs that are remembered of each training of a deployment; all but the newest stand in for it.
_REMEMBERED = 20


@dataclass(frozen=True)
class Source:
    """A whole checkpoint that a new run starts from.

    Attributes:
        run: The run that it is of; empty for the beginning.
        folder: Its folder in it.
        metrics: What was reported with it.
        manifest: Path and size in bytes of its files.
        notes: What the user should know of the choice, in words.
    """

    run: str = ""
    folder: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)
    manifest: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def parse_source(resume_from: str) -> tuple[str, str]:
    """Return run name and choice of ``"<run>"`` or ``"<run>@latest|best|<checkpoint>"``.

    Without a choice it is the newest checkpoint of a run that is named, and the best one of ``"latest"``.

    Raises:
        ConfigurationError: The run's name is not one.
    """
    name, _, choice = resume_from.partition("@")
    return check_run_name(name), choice or ("best" if name == LATEST_RUN else "latest")


def choose_source(storage: Storage, request: RunRequest) -> Source:
    """Choose the checkpoint that a new run starts from. Nothing is written.

    Args:
        storage: Where both runs are.
        request: What the new run's driver wants.

    Raises:
        AttemptFailedError: A run was named that has no such checkpoint, or what tells the newest run is torn; outcome
            ``invalid``.
    """
    name, choice = parse_source(request.resume_from)
    if name == LATEST_RUN:
        return _newest_run(storage, request, choice)
    try:
        return _choose(storage, name, choice)
    except AttemptFailedError as error:
        raise _refused(request, str(error)) from error


def seed_from_source(storage: Storage, request: RunRequest, target: RunStore) -> list[str]:
    """Copy the checkpoint that a new run starts from into it, as its first commit.

    The copy has a name of its own each time, and is no checkpoint until it was checked and committed.

    Args:
        storage: Where both runs are.
        request: What the new run's driver wants; its record exists.
        target: The new run.

    Returns:
        What the user should know, in words.

    Raises:
        AttemptFailedError: There is no such checkpoint, or it could not be copied.
    """
    record = decode(RunRecord, target.read(layout.RUN))
    # A run that is taken over starts from what it was to start from.
    resume_from = request.resume_from or (record.resume_from if record is not None else "")
    if record is None or not resume_from:
        return []
    source = choose_source(storage, replace(request, resume_from=resume_from))
    chosen = f"{source.run}@{source.folder}" if source.run else ""
    folder = physical_name(f"from-{source.run}", attempt=0, report=time.time_ns())
    if chosen:
        target.copy_folder(f"{storage.run(source.run).path}/{source.folder}", folder)
        if damage := damage_of(target, folder, source.manifest):
            raise AttemptFailedError(
                f"resume_from={chosen!r}: the copy of the checkpoint is not whole: {damage}; retry the flow run",
                outcome=Outcome.STORAGE_ERROR,
            )
    target.replace(layout.RUN, encode(record.model_copy(update={"source": chosen})))
    if chosen:
        write_first_commit(target, seed_snapshot(folder, source.metrics, version("ray")))
    return source.notes


def note_completed(storage: Storage, name: str) -> None:
    """Note that a run has completed, for those that start from the newest one.

    Two runs of the same training that complete in the same instant may forget one another; the later one stays.

    Args:
        storage: Where it is.
        name: Its name.
    """
    record = decode(RunRecord, storage.run(name).read(layout.RUN))
    if record is None:
        return
    pointers, pointer = _pointer(storage, record.creator.deployment_id, record.creator.flow_name, record.part)
    known = decode(CompletedRuns, pointers.read(pointer))
    runs = [record, *(one for one in (known.runs if known is not None else []) if one.name != name)]
    runs.sort(key=lambda one: one.created_at, reverse=True)
    pointers.replace(pointer, encode(CompletedRuns(runs=runs[:_REMEMBERED])))


def _newest_run(storage: Storage, request: RunRequest, choice: str) -> Source:
    """Choose among the completed runs of the same training by earlier flow runs, the newest first."""
    owner, marks = request.owner, request.fingerprint
    pointers, pointer = _pointer(storage, owner.deployment_id, owner.flow_name, request.part)
    known = decode(CompletedRuns, data := pointers.read(pointer))
    if known is None and data is not None:
        raise _refused(
            request,
            f"{pointers.uri}/{pointer}, which names the completed runs, is torn; name the run to start from, or remove "
            "that file",
        )
    passed_over: list[str] = []
    for record in known.runs if known is not None else []:
        if record.creator.flow_run_id == owner.flow_run_id or not record.fingerprint.may_be_loop_of(marks):
            continue
        try:
            source = _choose(storage, record.name, choice, record)
        except AttemptFailedError as error:
            passed_over.append(str(error))
            continue
        if differences := record.fingerprint.differences(marks):
            source.notes.append(f"run {record.name!r} had another configuration: {'; '.join(differences)}")
        return replace(source, notes=_notes(request, [*passed_over, *source.notes]))
    nothing = (
        f"{storage.uri} holds no completed run with a checkpoint of training {request.part!r} (train loop "
        f"{marks.loop!r}) of this deployment or flow; it trains from the beginning"
    )
    return Source(notes=_notes(request, [*passed_over, nothing]))


def _choose(storage: Storage, name: str, choice: str, completed: RunRecord | None = None) -> Source:
    """Return a whole checkpoint of a run.

    Args:
        storage: Where the run is.
        name: Its name.
        choice: ``latest``, ``best``, or a checkpoint by the loop's name or its folder's.
        completed: What the run was when it had completed, and must be still. None: whatever it is.

    Raises:
        AttemptFailedError: It is being deleted, or has no checkpoint, or not the one that was asked for.
    """
    run = RunDirectory(storage.run(name))
    newest = run.newest_attempt
    is_completed = newest is not None and newest.outcome == Outcome.COMPLETED.value
    if newest is not None and newest.is_pruner:
        raise _unfit(f"run {name!r} is being deleted")
    if completed is not None and (run.record is None or run.record.id != completed.id or not is_completed):
        raise _unfit(f"run {name!r} is gone, or is not completed any more")
    point = run.resume_point
    if point.commit is None:
        raise _unfit("; ".join([f"{run.uri} has no committed checkpoint", *point.repairs]))
    results: list[dict[str, Any]] = point.commit.snapshot["checkpoint_results"]
    folders = [result["checkpoint_dir_name"] for result in results]
    alike = [choice] if choice in folders else [folder for folder in folders if loop_name(folder) == choice]
    if choice == "latest":
        alike = [(latest_checkpoint(point.commit.snapshot) or {})["checkpoint_dir_name"]]
    elif choice == "best":
        alike = folders[-1:]
    if not alike:
        names = ", ".join(sorted(map(loop_name, folders)))
        raise _unfit("; ".join([f"run {name!r} has no checkpoint {choice!r}, it has {names}", *point.repairs]))
    folder = max(alike, key=age_of)
    metrics = results[folders.index(folder)]["metrics"] or {}
    notes = [f"of run {name!r}: {repair}" for repair in point.repairs]
    return Source(name, folder, metrics, point.commit.manifest.get(folder, {}), notes)


def _pointer(storage: Storage, deployment_id: str, flow_name: str, part: str) -> tuple[RunStore, str]:
    """Return the file that names the completed runs of a training of a deployment, or of a flow without one."""
    of = f"deployment {deployment_id}" if deployment_id else f"flow {flow_name}"
    digests = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in (of, part)]
    return storage.folder(f"{storage.settings.root}/{layout.STATE_FOLDER}"), f"completed/{'/'.join(digests)}.json"


def _notes(request: RunRequest, notes: list[str]) -> list[str]:
    return [f"resume_from={request.resume_from!r}: {note}" for note in notes]


def _unfit(why: str) -> AttemptFailedError:
    return AttemptFailedError(why, outcome=Outcome.INVALID)


def _refused(request: RunRequest, why: str) -> AttemptFailedError:
    return _unfit(f"resume_from={request.resume_from!r}: {why}")
