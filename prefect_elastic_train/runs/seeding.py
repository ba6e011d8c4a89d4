"""Starting a new run from another run's checkpoint, which stays untouched.

Which one it is, is written into the new run's record before it is copied: a restart copies from the same run, and
whoever deletes old runs leaves it alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

from prefect_elastic_train.core.checkpoint_names import age_of, loop_name, physical_name
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.records import CompletedRuns, Owner, RunRecord, decode, encode
from prefect_elastic_train.core.request import RunRequest
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.commits import damage_of
from prefect_elastic_train.runs.identity import LATEST_RUN, check_run_name
from prefect_elastic_train.runs.model import PRUNER, RunDirectory
from prefect_elastic_train.runs.resume import seed_run
from prefect_elastic_train.runs.snapshots import latest_checkpoint
from prefect_elastic_train.storage.opening import Storage
from prefect_elastic_train.storage.store import RunStore

#: Completed runs that are remembered of each training of a deployment; all but the newest stand in for it.
_REMEMBERED = 20
#: Runs that were passed over are named one by one up to here.
_MAX_NAMED = 5
#: How often another source is chosen because somebody deletes the one that was.
_MAX_CHOICES = 5


class _UnfitError(Exception):
    """A run that no other can start from, and why."""


@dataclass(frozen=True)
class Source:
    """What a new run starts from.

    Attributes:
        checkpoint: As ``<run>@<checkpoint folder>``; empty for the beginning.
        notes: What the user should know of the choice, in words.
    """

    checkpoint: str
    notes: list[str] = field(default_factory=list)

    @property
    def run(self) -> str:
        """The run that the checkpoint is of."""
        return self.checkpoint.partition("@")[0]

    @property
    def folder(self) -> str:
        """The checkpoint's folder in it."""
        return self.checkpoint.partition("@")[2]


@dataclass(frozen=True)
class _Chosen:
    """A whole checkpoint of a run: its folder, its metrics, its files, and what was repaired to get there."""

    folder: str
    metrics: dict[str, Any]
    manifest: dict[str, int] | None
    repairs: list[str]


def parse_source(resume_from: str) -> tuple[str, str]:
    """Return run name and choice of ``"<run>"`` or ``"<run>@latest|best|<checkpoint>"``.

    Without a choice it is the newest checkpoint of a run that is named, and the best one of ``"latest"``.

    Raises:
        ConfigurationError: The run's name is not one.
    """
    name, _, choice = resume_from.partition("@")
    return check_run_name(name), choice or ("best" if name == LATEST_RUN else "latest")


def choose_source(storage: Storage, request: RunRequest, target: RunStore) -> Source:
    """Choose the checkpoint that a new run starts from. Nothing is written.

    ``"latest"`` is looked up once: the checkpoint that the run's record says stays the one, unless it is gone or about
    to go.

    Args:
        storage: Where both runs are.
        request: What the new run's driver wants.
        target: The new run, which need not exist.

    Raises:
        AttemptFailedError: A run was named that has no such checkpoint, or what tells the newest run is torn; outcome
            ``invalid``.
    """
    name, choice = parse_source(request.resume_from)
    if name != LATEST_RUN:
        return _named_source(storage, request, target, name, choice)
    recorded = decode(RunRecord, target.read(layout.RUN))
    if recorded is None or recorded.source is None:
        return _newest_run(storage, request, choice)
    before = Source(recorded.source)
    try:
        if before.checkpoint:
            _choose(storage, before.run, before.folder, by_folder=True)
        return before
    except _UnfitError as error:
        anew = _newest_run(storage, request, choice)
        note = f"resume_from={request.resume_from!r}: it was to start from {before.checkpoint}, but {error}"
        return Source(anew.checkpoint, [note, *anew.notes])


def seed_from_source(storage: Storage, request: RunRequest, target: RunStore) -> list[str]:
    """Copy the checkpoint that a new run starts from into it, as its first commit.

    The choice is in the run's record before the source is looked at for the last time, and whoever deletes a run takes
    its fence before looking who awaits it: one of the two sees the other.

    Args:
        storage: Where both runs are.
        request: What the new run's driver wants; its record exists.
        target: The new run.

    Returns:
        What the user should know, in words.

    Raises:
        AttemptFailedError: There is no such checkpoint, or it could not be copied.
    """
    notes: list[str] = []
    for _ in range(_MAX_CHOICES):
        record = decode(RunRecord, target.read(layout.RUN))
        if record is None or not (request.resume_from or record.resume_from):
            return notes
        # A run that is taken over starts from what it was to start from.
        request = replace(request, resume_from=request.resume_from or record.resume_from)
        source = choose_source(storage, request, target)
        notes += source.notes
        if record.source == source.checkpoint:
            if source.checkpoint:
                _copy(storage, source, target)
            return notes
        target.replace(layout.RUN, encode(record.model_copy(update={"source": source.checkpoint})))
    raise AttemptFailedError(
        f"resume_from={request.resume_from!r}: {_MAX_CHOICES} runs were deleted while this one was about to start from "
        "them; retry the flow run",
        outcome=Outcome.STORAGE_ERROR,
    )


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
    pointers = storage.folder(f"{storage.settings.root}/{layout.STATE_FOLDER}")
    pointer = f"{_pointers_of(record.creator)}/{_digest(record.part)}.json"
    known = decode(CompletedRuns, pointers.read(pointer))
    runs = [record, *(one for one in (known.runs if known is not None else []) if one.name != name)]
    runs.sort(key=lambda one: one.created_at, reverse=True)
    pointers.replace(pointer, encode(CompletedRuns(runs=runs[:_REMEMBERED])))


def _copy(storage: Storage, source: Source, target: RunStore) -> None:
    store = storage.run(source.run)
    try:
        chosen = _choose(storage, source.run, source.folder, by_folder=True)
    except _UnfitError as error:
        raise _invalid(source.checkpoint, str(error)) from error
    folder = _name_of_copy(RunDirectory(store).record, source)
    target.delete_folder(folder)  # what an interrupted copy left behind
    target.copy_folder(f"{store.path}/{source.folder}", folder)
    damage = damage_of(target, folder, chosen.manifest)
    if damage:
        why = f"the copy of the checkpoint is not whole: {damage}; retry the flow run"
        raise AttemptFailedError(f"resume_from={source.checkpoint!r}: {why}", outcome=Outcome.STORAGE_ERROR)
    seed_run(target, folder, chosen.metrics, version("ray"))


def _name_of_copy(record: RunRecord | None, source: Source) -> str:
    """Return the folder of a copy. The name of what is a copy itself does not grow from run to run."""
    before = (record.source or record.resume_from).partition("@")[0] if record is not None else ""
    original = loop_name(source.folder).removeprefix(f"from-{before}-" if before else "")
    return physical_name(f"from-{source.run}-{original.replace('/', '-')}", attempt=0)


def _newest_run(storage: Storage, request: RunRequest, choice: str) -> Source:
    """Choose among the completed runs of the same training, the newest first."""
    passed_over = []
    for record in _same_training(list(_completed(storage, request)), request):
        try:
            chosen = _choose(storage, record.name, choice, record)
        except _UnfitError as error:
            passed_over.append(str(error))
            continue
        notes = _notes(request, [*passed_over, *chosen.repairs])
        if differences := record.fingerprint.differences(request.fingerprint):
            words = _some(differences, "; ")
            notes.append(f"resume_from={request.resume_from!r}: run {record.name!r} had another configuration: {words}")
        return Source(f"{record.name}@{chosen.folder}", notes)
    owner = request.owner
    of = "this deployment" if owner.deployment_id else f"flow {owner.flow_name!r}" if owner.flow_name else "no flow"
    nothing = (
        f"resume_from={request.resume_from!r}: {storage.uri} holds no completed run with a checkpoint of training "
        f"{request.part!r} (train loop {request.fingerprint.loop!r}) of {of}; it trains from the beginning"
    )
    return Source("", [*_notes(request, passed_over), nothing])


def _completed(storage: Storage, request: RunRequest) -> Iterator[RunRecord]:
    """Yield the completed runs of earlier flow runs of the same deployment (without one: flow) and loop."""
    pointers = storage.folder(f"{storage.settings.root}/{layout.STATE_FOLDER}")
    folder = _pointers_of(request.owner)
    for name in pointers.names(folder):
        known = decode(CompletedRuns, data := pointers.read(f"{folder}/{name}"))
        if known is None and data is not None:
            where = f"{pointers.uri}/{folder}/{name}"
            why = f"{where}, which names the completed runs, is torn; name the run to start from, or remove that file"
            raise _invalid(request.resume_from, why)
        for record in known.runs if known is not None else []:
            marks = record.fingerprint
            same_file = bool(request.owner.deployment_id) or marks.may_be_in_file_of(request.fingerprint)
            if record.creator.flow_run_id != request.owner.flow_run_id and marks.may_be_loop_of(request.fingerprint):
                yield from [record] if same_file else []


def _same_training(runs: list[RunRecord], request: RunRequest) -> list[RunRecord]:
    """Return those of them that are of the same training in their flow run, the newest first.

    A flow run that trains several models may begin them in another order the next night, or not all of them: the one
    with the same configuration is meant, if just one has it, else the one that took the same place.
    """
    flow_runs: dict[str, list[RunRecord]] = {}
    for record in sorted(runs, key=lambda one: (one.created_at, one.name), reverse=True):
        flow_runs.setdefault(record.creator.flow_run_id, []).append(record)
    config = request.fingerprint.config
    by_config = any(len(some) > 1 for some in flow_runs.values()) and any(r.fingerprint.config == config for r in runs)
    found = []
    for some in flow_runs.values():
        alike = [record for record in some if record.fingerprint.config == config]
        use_config = by_config and (len(alike) == 1 or len(some) == 1)
        found += alike if use_config else [record for record in some if record.part == request.part]
    return found


def _named_source(storage: Storage, request: RunRequest, target: RunStore, name: str, choice: str) -> Source:
    """Choose a checkpoint of a run that may still train: what was chosen first stays, while it is there."""
    recorded = decode(RunRecord, target.read(layout.RUN))
    before = Source(recorded.source or "") if recorded is not None else Source("")
    if recorded is not None and recorded.resume_from == request.resume_from and before.run == name:
        try:
            _choose(storage, name, before.folder, by_folder=True)
            return before
        except _UnfitError:
            pass  # it went as the run trained on
    try:
        chosen = _choose(storage, name, choice)
    except _UnfitError as error:
        raise _invalid(request.resume_from, str(error)) from error
    return Source(f"{name}@{chosen.folder}", _notes(request, chosen.repairs))


def _choose(
    storage: Storage, name: str, choice: str, completed: RunRecord | None = None, *, by_folder: bool = False
) -> _Chosen:
    """Return a whole checkpoint of a run.

    Args:
        storage: Where the run is.
        name: Its name.
        choice: ``latest``, ``best``, or a checkpoint by the loop's name or its folder's.
        completed: What the run was when it had completed, and must be still. None: whatever it is.
        by_folder: The choice is a folder, whatever it is called.

    Raises:
        _UnfitError: It is being deleted, or has no checkpoint, or not the one that was asked for.
    """
    run = RunDirectory(storage.run(name))
    newest = run.newest_attempt
    if newest is not None and newest.is_pruner:
        raise _UnfitError(f"run {name!r} is being deleted by `{PRUNER}`")
    if completed is not None:
        if run.record is None or run.record.id != completed.id or newest is None:
            raise _UnfitError(f"run {name!r} is gone")
        if newest.outcome != Outcome.COMPLETED.value:
            raise _UnfitError(
                f"run {name!r} goes on" if newest.ended is None else f"run {name!r} ended as {newest.outcome}"
            )
    try:
        point = run.resume_point
    except AttemptFailedError as error:
        raise _UnfitError(str(error)) from error
    if point.commit is None:
        why = f": {_some(point.repairs, '; ')}" if point.repairs else ""
        raise _UnfitError(f"{run.uri} has no committed checkpoint{why}")
    snapshot = point.commit.snapshot
    results: list[dict[str, Any]] = snapshot["checkpoint_results"]
    folders = {result["checkpoint_dir_name"]: result for result in results}
    if by_folder:
        result = folders.get(choice)
    elif choice in ("latest", "best"):
        result = latest_checkpoint(snapshot) if choice == "latest" else results[-1]
    else:
        result = folders.get(_find(choice, list(folders)))
    if result is None:
        lost = run.commits[0].lost
        folder = _find(choice, list(lost))
        why = f"checkpoint {choice!r} of run {name!r} is damaged: {lost[folder]}" if folder else ""
        names = ", ".join(sorted(map(loop_name, folders)))
        raise _UnfitError(f"{why or f'run {name!r} has no checkpoint {choice!r}'}; it has {names}")
    folder = result["checkpoint_dir_name"]
    repairs = [f"of run {name!r}: {repair}" for repair in point.repairs]
    return _Chosen(folder, result["metrics"], point.commit.manifest.get(folder), repairs)


def _find(choice: str, folders: Sequence[str]) -> str:
    """Return the folder of a checkpoint by its name or the loop's, the newest of that; empty if there is none."""
    alike = [folder for folder in folders if loop_name(folder) == choice]
    return choice if choice in folders else max(alike, key=age_of, default="")


def _pointers_of(owner: Owner) -> str:
    """Return the folder that names the completed runs of a deployment, or of a flow without one."""
    of = f"deployment {owner.deployment_id}" if owner.deployment_id else f"flow {owner.flow_name}"
    return f"completed/{_digest(of)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _notes(request: RunRequest, passed_over: Sequence[str]) -> list[str]:
    return [f"resume_from={request.resume_from!r} passed over {_some(passed_over, '; ')}"] if passed_over else []


def _some(words: Sequence[str], separator: str) -> str:
    more = len(words) - _MAX_NAMED
    return separator.join([*words[:_MAX_NAMED], *([f"and {more} more"] if more > 0 else [])])


def _invalid(resume_from: str, why: str) -> AttemptFailedError:
    return AttemptFailedError(f"resume_from={resume_from!r}: {why}", outcome=Outcome.INVALID)
