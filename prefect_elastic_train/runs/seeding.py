"""Starting a new run from another run's checkpoint, which stays untouched.

Which one it is, is written into the new run's record before it is copied: a restart copies from the same run, and
whoever deletes old runs leaves it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

from prefect_elastic_train.core.checkpoint_names import loop_name, physical_name
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome, is_passing
from prefect_elastic_train.core.records import AttemptRecord, EndedRecord, RunRecord, decode, encode
from prefect_elastic_train.core.request import RunRequest
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.commits import damage_of, newest_attempt, read_lineage
from prefect_elastic_train.runs.identity import LATEST_RUN, check_run_name, is_run_name
from prefect_elastic_train.runs.inspecting import PRUNER
from prefect_elastic_train.runs.resume import seed_run
from prefect_elastic_train.runs.snapshots import checkpoint_names, latest_checkpoint
from prefect_elastic_train.runs.view import RunReader, RunView
from prefect_elastic_train.storage.opening import Storage
from prefect_elastic_train.storage.store import RunStore

__all__ = ["Source", "choose_source", "copy_checkpoint", "parse_source", "seed_from_source"]

#: Runs looked at, at a time.
_THREADS = 32
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
    """A checkpoint of a run: the result that belongs to it, what it consists of, and which one it stands in for."""

    result: dict[str, Any]
    manifest: dict[str, int] | None
    passed_over: list[str]

    @property
    def folder(self) -> str:
        name: str = self.result["checkpoint_dir_name"]
        return name


def parse_source(resume_from: str) -> tuple[str, str]:
    """Give run name and choice of ``"<run>"`` or ``"<run>@latest|best|<checkpoint>"``.

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
        AttemptFailedError: A run was named that has no such checkpoint; outcome ``invalid``.
    """
    name, choice = parse_source(request.resume_from)
    if name != LATEST_RUN:
        try:
            _check_stays(storage.run(name), name)
            chosen = _choose(storage.run(name), name, choice)
            return Source(f"{name}@{chosen.folder}", _notes(request, chosen.passed_over))
        except _UnfitError as error:
            raise _invalid(request.resume_from, error) from error
    recorded = decode(RunRecord, target.read(layout.RUN))
    if recorded is None or recorded.source is None:
        return _newest_run(storage, request, choice)
    if not recorded.source:
        return Source("")
    before = Source(recorded.source)
    try:
        _check_stays(storage.run(before.run), before.run)
        _chosen(storage.run(before.run), before)
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
        if not request.resume_from:  # a run that is taken over starts from what it was to start from
            if record is None or not record.resume_from:
                return notes
            request = replace(request, resume_from=record.resume_from)
        source = choose_source(storage, request, target)
        notes += source.notes
        if record is not None and record.source != source.checkpoint:
            target.replace(layout.RUN, encode(record.model_copy(update={"source": source.checkpoint})))
        if not source.checkpoint:
            return notes
        if record is not None and record.source is not None and Source(record.source).run == source.run:
            _copy(storage.run(source.run), source, storage, target)
            return notes
    raise AttemptFailedError(
        f"resume_from={request.resume_from!r}: {_MAX_CHOICES} runs were deleted while this one was about to start from "
        "them; retry the flow run",
        outcome=Outcome.STORAGE_ERROR,
    )


def copy_checkpoint(storage: Storage, resume_from: str, target: RunStore) -> None:
    """Copy a checkpoint of another run into a new one and commit it there.

    Args:
        storage: Where both runs are.
        resume_from: ``"<run>"`` for its latest checkpoint, ``"<run>@best"`` for the best by its score, or
            ``"<run>@<checkpoint folder>"``.
        target: The new run.

    Raises:
        AttemptFailedError: The other run does not exist or has no such checkpoint; outcome ``invalid``.
    """
    name, choice = parse_source(resume_from)
    try:
        chosen = _choose(storage.run(name), name, choice)
    except _UnfitError as error:
        raise _invalid(resume_from, error) from error
    _copy(storage.run(name), Source(f"{name}@{chosen.folder}"), storage, target)


def _copy(store: RunStore, source: Source, storage: Storage, target: RunStore) -> None:
    try:
        chosen = _chosen(store, source)
    except _UnfitError as error:
        raise _invalid(source.checkpoint, error) from error
    folder = _name_of_copy(store, source.run, source.folder)
    target.delete_folder(folder)  # what an interrupted copy left behind
    storage.copy_folder(f"{store.path}/{source.folder}", f"{target.path}/{folder}")
    damage = damage_of(target, folder, chosen.manifest)
    if damage:
        why = f"the copy of the checkpoint is not whole: {damage}; retry the flow run"
        raise AttemptFailedError(f"resume_from={source.checkpoint!r}: {why}", outcome=Outcome.STORAGE_ERROR)
    seed_run(target, folder, chosen.result["metrics"], version("ray"))


def _name_of_copy(source: RunStore, run: str, checkpoint: str) -> str:
    """Name the folder of a copy. The name of what is a copy itself does not grow from run to run."""
    record = decode(RunRecord, source.read(layout.RUN))
    before = (record.source or record.resume_from).partition("@")[0] if record is not None else ""
    name = loop_name(checkpoint)
    original = name.removeprefix(f"from-{before}-") if before else name
    return physical_name(f"from-{run}-{original.replace('/', '-')}", attempt=0)


def _newest_run(storage: Storage, request: RunRequest, choice: str) -> Source:
    """Choose among the earlier runs of the same training, the newest first, with one request for each run there is."""
    records, passed_over = _records(storage, request.run_name)
    earlier = [(name, record) for name, record in records if _may_be_same_training(record, request)]
    flow_runs: dict[str, list[tuple[str, RunRecord]]] = {}
    for name, record in sorted(earlier, key=lambda one: (one[1].created_at, one[0]), reverse=True):
        flow_runs.setdefault(record.creator.flow_run_id, []).append((name, record))
    config = request.fingerprint.config
    several = any(len(runs) > 1 for runs in flow_runs.values())
    by_config = several and any(record.fingerprint.config == config for _, record in earlier)
    same = (one for runs in flow_runs.values() for one in _same_training(runs, request, by_config))
    for name, record in same:
        view = RunView(storage.run(name))
        try:
            _check_completed(view, name)
            chosen = _choose(view, name, choice)
        except _UnfitError as error:
            passed_over.append(str(error))
            continue
        notes = _notes(request, [*chosen.passed_over, *passed_over])
        if differences := record.fingerprint.differences(request.fingerprint):
            words = _some(differences, "; ")
            notes.append(f"resume_from={request.resume_from!r}: run {name!r} had another configuration: {words}")
        return Source(f"{name}@{chosen.folder}", notes)
    owner = request.owner
    of = "this deployment" if owner.deployment_id else f"flow {owner.flow_name!r}" if owner.flow_name else "no flow"
    nothing = (
        f"resume_from={request.resume_from!r}: {storage.uri} holds no completed run with a checkpoint of training "
        f"{request.part!r} (train loop {request.fingerprint.loop!r}) of {of}; it trains from the beginning"
    )
    return Source("", [*_notes(request, passed_over), nothing])


def _records(storage: Storage, besides: str) -> tuple[list[tuple[str, RunRecord]], list[str]]:
    """Read the records of all runs but one; give those that can be read, and a line for each that cannot."""
    names = [name for name in storage.run_names() if name != besides and is_run_name(name)]

    def read(name: str) -> bytes | OSError | None:
        try:
            return storage.run(name).read(layout.RUN)
        except OSError as error:
            if is_passing(error):
                raise
            return error

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="elastic-train-look") as pool:
        answers = list(pool.map(read, names))
    if (errors := [answer for answer in answers if isinstance(answer, OSError)]) and len(errors) == len(answers):
        raise errors[0]  # not one of them: it is the storage
    records, unreadable = [], []
    for name, answer in zip(names, answers, strict=True):
        if isinstance(answer, OSError):
            unreadable.append(f"run {name!r}, which cannot be read: {answer}")
        elif answer is not None:
            record = decode(RunRecord, answer)
            if record is None:
                unreadable.append(f"run {name!r}, whose record is torn")
            else:
                records.append((name, record))
    return records, unreadable


def _same_training(
    runs: Sequence[tuple[str, RunRecord]], request: RunRequest, by_config: bool
) -> list[tuple[str, RunRecord]]:
    """Give those runs of one earlier flow run that are of the same training in it.

    A flow run that trains several models may begin them in another order the next night, or not all of them: the one
    with the same configuration is meant, if just one has it, else the one that took the same place.

    Args:
        runs: Of the flow run.
        request: Of the training.
        by_config: Some flow run trained several models, and the configuration tells which is meant.
    """
    alike = [one for one in runs if one[1].fingerprint.config == request.fingerprint.config]
    if by_config and (len(alike) == 1 or len(runs) == 1):
        return alike
    return [one for one in runs if one[1].part == request.part]


def _may_be_same_training(record: RunRecord, request: RunRequest) -> bool:
    """Tell whether another flow run's run is of the same deployment (without one: flow) and loop."""
    ours, theirs = request.owner, record.creator
    return (
        theirs.flow_run_id != ours.flow_run_id
        and theirs.deployment_id == ours.deployment_id
        and (bool(ours.deployment_id) or _is_same_flow(record, request))
        and record.fingerprint.may_be_loop_of(request.fingerprint)
    )


def _is_same_flow(record: RunRecord, request: RunRequest) -> bool:
    """Tell whether a run without a deployment is of the same flow, and its loop of the same file."""
    same_file = record.fingerprint.may_be_in_file_of(request.fingerprint)
    return record.creator.flow_name == request.owner.flow_name and same_file


def _notes(request: RunRequest, passed_over: list[str]) -> list[str]:
    if not passed_over:
        return []
    return [f"resume_from={request.resume_from!r} passed over {_some(passed_over, '; ')}"]


def _some(words: Sequence[str], separator: str) -> str:
    more = len(words) - _MAX_NAMED
    return separator.join([*words[:_MAX_NAMED], *([f"and {more} more"] if more > 0 else [])])


def _check_completed(source: RunReader, name: str) -> None:
    """Refuse a run that is not complete: it may go on, and one that failed half-way is no base for another.

    Raises:
        _UnfitError: See above.
    """
    number = newest_attempt(source)
    if not number:
        raise _UnfitError(f"run {name!r} has not begun, or is gone")
    ended = decode(EndedRecord, source.read(layout.ended_name(number)))
    if ended is None:
        _check_stays(source, name)
        raise _UnfitError(f"run {name!r} has not ended")
    if ended.outcome != Outcome.COMPLETED.value:
        raise _UnfitError(f"run {name!r} ended as {ended.outcome}")


def _check_stays(source: RunReader, name: str) -> None:
    """Refuse a run that is being deleted.

    Raises:
        _UnfitError: See above.
    """
    number = newest_attempt(source)
    record = decode(AttemptRecord, source.read(layout.attempt_name(number))) if number else None
    if record is not None and record.owner.flow_run_id == PRUNER:
        raise _UnfitError(f"run {name!r} is being deleted by `{PRUNER}`")


def _chosen(store: RunReader, source: Source) -> _Chosen:
    """Give the checkpoint that was chosen before, by its folder.

    Raises:
        _UnfitError: It is not there any more, or not whole.
    """
    return _choose(store, source.run, source.folder, by_folder=True)


def _choose(source: RunReader, name: str, choice: str, *, by_folder: bool = False) -> _Chosen:
    """Give a whole checkpoint of a run, whatever its folder is called if that is what was chosen.

    Raises:
        _UnfitError: It has none, or not the one that was asked for.
    """
    damaged, is_new = "", False
    for read in read_lineage(source, whole=True):
        meant = _result_of(read.record.snapshot, choice, by_folder=by_folder) if read.record is not None else None
        folder = meant["checkpoint_dir_name"] if meant is not None else ""
        if folder in read.lost and not damaged:
            damaged = f"checkpoint {loop_name(folder)!r} of run {name!r} is damaged: {read.lost[folder]}"
            is_new = folder in read.damaged
        commit = read.usable
        if commit is None:
            continue
        chosen = _result_of(commit.snapshot, choice, by_folder=by_folder)
        if chosen is None:
            why = damaged or f"run {name!r} has no checkpoint {choice!r}"
            raise _UnfitError(f"{why}; it has {', '.join(sorted(map(loop_name, commit.manifest)))}")
        manifest = commit.manifest.get(chosen["checkpoint_dir_name"])
        return _Chosen(chosen, manifest, [damaged] if is_new else [])
    raise _UnfitError(damaged or f"{source.uri} has no committed checkpoint")


def _invalid(resume_from: str, error: _UnfitError) -> AttemptFailedError:
    return AttemptFailedError(f"resume_from={resume_from!r}: {error}", outcome=Outcome.INVALID)


def _result_of(snapshot: dict[str, Any], choice: str, *, by_folder: bool) -> dict[str, Any] | None:
    results: list[dict[str, Any]] = snapshot["checkpoint_results"]
    if choice == "latest" and not by_folder:
        return latest_checkpoint(snapshot)
    if choice == "best" and not by_folder:
        return results[-1] if results else None
    known = {result["checkpoint_dir_name"]: result for result in results}
    named = [
        folder for folder in checkpoint_names(snapshot) if choice in (folder, "" if by_folder else loop_name(folder))
    ]
    return known[named[-1]] if named else None
