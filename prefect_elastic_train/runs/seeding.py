"""``resume_from``: choose a checkpoint of another run, and copy it into a new run."""

import hashlib
import time
from dataclasses import replace
from typing import Any, NamedTuple

from prefect_elastic_train.core.checkpoint_names import age_of, loop_name, physical_name
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.records import Owner, RunRecord, decode, encode
from prefect_elastic_train.core.request import RunRequest
from prefect_elastic_train.storage.opening import Storage
from prefect_elastic_train.storage.store import RunStore

from . import layout
from .commits import write_first_commit
from .fingerprints import LATEST_RUN, check_run_name
from .run_directory import RunDirectory
from .snapshots import seed_snapshot

#: Number of completed runs that are recorded for each training of a deployment. If the newest is lost, an older one is
#: used.
_RECENT_RUNS = 20


class Source(NamedTuple):
    """The checkpoint of another run that a new run starts from.

    ``run`` and ``folder`` are empty for a start from scratch.
    """

    run: str
    folder: str
    metrics: dict[str, Any]
    manifest: dict[str, int]
    notes: list[str]  # messages for the user about the choice


def choose_source(storage: Storage, request: RunRequest) -> Source:
    """Return the checkpoint that ``resume_from`` of a request names.

    It is ``"<run>"`` or ``"<run>@latest|best|<checkpoint>"``. The run ``latest`` is the newest completed run of the
    same training. Without ``@``, the checkpoint is the newest one of a named run, and the best one of the run
    ``latest``.

    Raises:
        AttemptFailedError: There is no such checkpoint; outcome ``invalid``.
    """
    name, _, choice = request.resume_from.partition("@")
    try:
        if name == LATEST_RUN:
            source = _choose_from_latest_run(storage, request, choice)
        else:
            source = _choose_checkpoint(storage, check_run_name(name), choice or "latest")
    except AttemptFailedError as error:
        raise AttemptFailedError(f"resume_from={request.resume_from!r}: {error}") from error
    return source._replace(notes=[f"resume_from={request.resume_from!r}: {note}" for note in source.notes])


def copy_source(storage: Storage, request: RunRequest, target: RunStore) -> list[str]:
    """Copy the checkpoint that ``resume_from`` names into a new run, check the copy, and commit it.

    Nothing is copied if ``resume_from`` is ``latest`` and there is no completed run: the new run starts from scratch.

    Args:
        storage: The storage of both runs.
        request: The request of the training.
        target: Run directory of the new run.

    Returns:
        Messages for the user; none for a run without ``resume_from``.

    Raises:
        AttemptFailedError: There is no such checkpoint, or its copy is damaged.
    """
    record = RunDirectory(target).record
    if not record or not record.resume_from:
        return []
    # A run that is taken over starts from the checkpoint that its creator requested.
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
                f"resume_from={chosen!r}: the copy of the checkpoint is damaged: {damage}; retry the flow run",
                outcome=Outcome.STORAGE_ERROR,
            )
    target.replace(layout.RUN, encode(record.model_copy(update={"source": chosen})))
    if chosen:
        write_first_commit(target, seed_snapshot(folder, source.metrics), {folder: source.manifest})
    return source.notes


def record_completed_run(storage: Storage, name: str) -> None:
    """Add a run to the completed runs of its training, from which ``resume_from="latest"`` chooses."""
    record = RunDirectory(storage.run(name)).record
    if record:
        folder = _completed_runs(storage, record.creator, record.training_name)
        folder.replace(f"{record.created_at:017.6f}-{name}.json", encode(record))
        for old in folder.names("")[:-_RECENT_RUNS]:
            folder.delete(old)


def _choose_from_latest_run(storage: Storage, request: RunRequest, choice: str) -> Source:
    """Return a checkpoint of the newest completed run that an earlier flow run made with the same training.

    ``choice`` selects the checkpoint in that run. Without such a run, return a start from scratch with a message.
    """
    fingerprint = request.fingerprint
    folder = _completed_runs(storage, request.owner, request.training_name)
    notes = []
    for name in reversed(folder.names("")):
        try:
            record = decode(RunRecord, folder.read(name))
            if not record:
                raise AttemptFailedError(f"{folder.uri}/{name}, the record of a completed run, is torn")
            is_own = record.creator.flow_run_id == request.owner.flow_run_id
            if is_own or not record.fingerprint.may_be_loop_of(fingerprint):
                continue
            source = _choose_checkpoint(storage, record.name, choice, record)
        except AttemptFailedError as error:
            notes.append(str(error))
            continue
        if differences := record.fingerprint.differences(fingerprint):
            notes.append(f"run {record.name!r} had another configuration: {'; '.join(differences)}")
        return source._replace(notes=[*notes, *source.notes])
    notes.append(
        f"{storage.uri} holds no completed run with a checkpoint of training {request.training_name!r} (train loop "
        f"{fingerprint.loop!r}) of this deployment or flow; training starts from the beginning"
    )
    return Source(run="", folder="", metrics={}, manifest={}, notes=notes)


def _choose_checkpoint(storage: Storage, name: str, choice: str, completed: RunRecord | None = None) -> Source:
    """Return the checkpoint of the run ``name`` that ``choice`` selects.

    ``choice`` is ``latest``, ``best``, the loop's name of a checkpoint, or the name of its folder. If it is empty, the
    best checkpoint is selected, or the newest if none has a score. With ``completed``, the run must be the recorded
    one, and still be completed.
    """
    run = RunDirectory(storage.run(name))
    newest = run.newest_attempt
    if newest.is_pruner:
        raise AttemptFailedError(f"run {name!r} is being deleted")
    if completed and (not run.record or run.record.id != completed.id or newest.outcome != Outcome.COMPLETED):
        raise AttemptFailedError(f"run {name!r} was deleted, or is not completed any more")
    point = run.resume_point
    if not point.commit:
        raise AttemptFailedError("; ".join([f"{run.uri} has no committed checkpoint", *point.repairs]))
    metrics = {each["checkpoint_dir_name"]: each["metrics"] for each in point.commit.snapshot["checkpoint_results"]}
    notes = [f"of run {name!r}: {repair}" for repair in point.repairs]
    best = run.best_checkpoint(point.commit)
    unscored = f"no checkpoint of run {name!r} has the score {run.score_attribute(point.commit)!r}"
    if not choice and not best:
        notes.append(f"{unscored}: its newest one is used")
        choice = "latest"
    named = [folder for folder in metrics if choice in (folder, loop_name(folder))]
    if choice == "latest":
        folder = point.checkpoint
    elif choice in ("best", "") and best:
        folder = best
    elif named:
        folder = max(named, key=age_of)
    elif choice == "best":
        raise AttemptFailedError(f"{unscored}; give {name}@latest for its newest one")
    else:
        problem = f"run {name!r} has no checkpoint {choice!r}, it has {', '.join(sorted(map(loop_name, metrics)))}"
        raise AttemptFailedError("; ".join([problem, *point.repairs]))
    return Source(name, folder, metrics[folder], point.commit.manifest.get(folder, {}), notes)


def _completed_runs(storage: Storage, owner: Owner, training_name: str) -> RunStore:
    """Return the folder with the records of a training's completed runs; their names begin with the runs' start.

    They are those of the owner's deployment, or of its flow if it has no deployment.
    """
    scope = f"deployment {owner.deployment_id}" if owner.deployment_id else f"flow {owner.flow_name}"
    digests = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in (scope, training_name)]
    return storage.folder(f"{storage.settings.root}/{layout.STATE_FOLDER}/completed/{'/'.join(digests)}")
