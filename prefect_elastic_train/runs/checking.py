"""Whether a run's records and checkpoints are whole, and what a resume would make of them. Nothing is written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from prefect_elastic_train.core.checkpoint_names import written_by
from prefect_elastic_train.core.outcomes import AttemptFailedError
from prefect_elastic_train.core.records import (
    AttemptRecord,
    CommitRecord,
    EndedRecord,
    Heartbeat,
    RunRecord,
    decode,
)
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.commits import (
    ReadCommit,
    all_attempts,
    all_commits,
    checkpoint_folders,
    commit_label,
    dropped_by,
    lineage,
    newest_commit,
    read_lineage,
)
from prefect_elastic_train.runs.resume import ResumePoint, find_resume_point
from prefect_elastic_train.runs.snapshots import checkpoint_names, latest_checkpoint, parse_snapshot
from prefect_elastic_train.runs.view import RunReader, RunView

__all__ = [
    "CheckpointCheck",
    "CommitCheck",
    "Leftover",
    "Verification",
    "find_leftovers",
    "verify",
]

#: A run that is being trained goes on while it is looked at: then it is looked at anew, so often.
_LOOKS = 3


class _Finding(BaseModel):
    model_config = ConfigDict(frozen=True)


class CheckpointCheck(_Finding):
    """A checkpoint of the newest commit, held against its manifest."""

    name: str
    ok: bool
    problems: list[str] = Field(default_factory=list)
    files: int = 0
    size_bytes: int = 0
    latest: bool = False


class CommitCheck(_Finding):
    """An older commit that counts: what a resume falls back to."""

    commit: str
    #: All its checkpoints are still there as it lists them. Most are not, since Ray deletes what is not kept.
    whole: bool
    #: Those that are.
    checkpoints: list[str] = Field(default_factory=list)
    #: ``torn`` or ``another run's``, empty if it can be read.
    problem: str = ""


class Leftover(_Finding):
    """A folder that no commit needs."""

    folder: str
    #: ``upload`` (begun, never committed), ``condemned`` (no longer kept, its deletion did not come to its end),
    #: ``dropped`` (damaged, given up by an attempt), or ``unnamed`` (nothing tells whose it is).
    kind: str
    reason: str
    #: Whether there is such a folder; an upload may not have come to its first file.
    there: bool = True
    size_bytes: int = 0


class Verification(_Finding):
    """What was found."""

    name: str
    uri: str
    #: A resume finds all that it needs as it was written.
    whole: bool
    #: The newest commit that counts and can be read, as ``<attempt>-<sequence>``; empty without one.
    commit: str = ""
    checkpoints: list[CheckpointCheck] = Field(default_factory=list)
    #: What a resume would do, in words; the checkpoint and the commit that it would start from, if any.
    resume: str = ""
    resume_checkpoint: str = ""
    resume_commit: str = ""
    #: What it would repair or drop to get there, in words.
    repairs: list[str] = Field(default_factory=list)
    #: Ray's snapshot: ``mirrors the newest commit``, ``missing``, ``torn``, ``differs``, or empty where there is none
    #: to be.
    snapshot: str = ""
    older_commits: list[CommitCheck] = Field(default_factory=list)
    #: Other records that cannot be read, in words; a resume does without them.
    torn_records: list[str] = Field(default_factory=list)
    leftovers: list[Leftover] = Field(default_factory=list)


def verify(store: RunReader, name: str) -> Verification | None:
    """Check all that a resume needs of a run.

    Returns:
        None if the folder holds no run.
    """
    view, found = _look(store, name)
    for _ in range(_LOOKS - 1):
        if next(lineage(store), None) == next(lineage(view), None):
            break
        view, found = _look(store, name)
    return found


def find_leftovers(store: RunReader, *, unnamed: bool = True) -> list[Leftover]:
    """Find folders that no commit needs.

    Args:
        store: The run directory.
        unnamed: Look also for folders of which nothing tells whose they are.

    Raises:
        AttemptFailedError: The commits are lost, and with them what tells a checkpoint from what is left over.
    """
    view = store if isinstance(store, RunView) else RunView(store)
    newest = newest_commit(view)
    kept = checkpoint_names(newest.snapshot) if newest is not None else []
    candidates = {name: why for name, why in _candidates(view, newest).items() if not _overlaps(name, kept)}
    folders = [folder for folder in view.folders() if folder != layout.STATE_FOLDER] if unnamed else []
    if not candidates and not [folder for folder in folders if not _overlaps(folder, kept)]:
        return []
    needed = _needed(view)
    found = [_leftover(view, name, *why) for name, why in candidates.items() if not _overlaps(name, needed)]
    known = [*needed, *candidates]
    for folder in folders:
        if not _overlaps(folder, known):
            found.append(_leftover(view, folder, "unnamed", "no commit names it, and nothing tells whose it is"))
    # What an upload has begun may be out of sight. Anything else that is not there has been deleted.
    found = [leftover for leftover in found if leftover.there or leftover.kind == "upload"]
    return sorted(found, key=lambda leftover: leftover.folder)


def _look(store: RunReader, name: str) -> tuple[RunView, Verification | None]:
    view = RunView(store)
    begun = bool(all_attempts(view) or all_commits(view) or view.read(layout.RUN) is not None)
    if not begun:
        return view, _look_at_foreign(view, name) if view.read(layout.SNAPSHOT) is not None else None
    commits = list(read_lineage(view, whole=True))
    newest = next((commit for commit in commits if commit.record is not None), None)
    found = Verification(
        name=name,
        uri=view.uri,
        whole=False,
        commit=newest.label if newest is not None else "",
        checkpoints=_check_newest(newest) if newest is not None else [],
        older_commits=[_check_older(commit) for commit in commits if commit is not newest],
        torn_records=list(_torn_records(view)),
    )
    try:
        point = find_resume_point(view)
        leftovers = find_leftovers(view)
    except AttemptFailedError as error:
        return view, found.model_copy(update={"resume": f"is refused: {error}"})
    return view, found.model_copy(
        update={
            "whole": not point.repairs,
            "resume": _in_words(point),
            "resume_checkpoint": point.checkpoint,
            "resume_commit": commit_label(point.base),
            "repairs": point.repairs,
            "snapshot": _check_snapshot(view, point),
            "leftovers": leftovers,
        }
    )


def _look_at_foreign(view: RunView, name: str) -> Verification:
    """Check what Ray Train alone has written, as far as it can be: it lists no files."""
    snapshot = parse_snapshot(view.read(layout.SNAPSHOT))
    if snapshot is None:
        return Verification(name=name, uri=view.uri, whole=False, resume="is refused: it is torn", snapshot="torn")
    checks = []
    latest = latest_checkpoint(snapshot)
    for checkpoint in checkpoint_names(snapshot):
        files = view.file_sizes(checkpoint)
        problems = ["its folder is missing or empty"] if not files else []
        checks.append(_check(checkpoint, files or {}, problems, latest))
    return Verification(
        name=name,
        uri=view.uri,
        whole=all(check.ok for check in checks),
        checkpoints=checks,
        resume="is refused without resume=True, which adopts what Ray Train has written",
    )


def _check_newest(commit: ReadCommit) -> list[CheckpointCheck]:
    assert commit.record is not None
    usable = commit.usable
    latest = latest_checkpoint(usable.snapshot) if usable is not None else None
    return [
        _check(name, commit.record.manifest.get(name, {}), [commit.lost[name]] if name in commit.lost else [], latest)
        for name in checkpoint_names(commit.record.snapshot)
    ]


def _check(name: str, files: dict[str, int], problems: list[str], latest: dict[str, Any] | None) -> CheckpointCheck:
    return CheckpointCheck(
        name=name,
        ok=not problems,
        problems=problems,
        files=len(files),
        size_bytes=sum(files.values()),
        latest=latest is not None and latest["checkpoint_dir_name"] == name,
    )


def _check_older(commit: ReadCommit) -> CommitCheck:
    if commit.record is None:
        return CommitCheck(commit=commit.label, whole=False, problem=commit.problem)
    names = checkpoint_names(commit.record.snapshot)
    there = [name for name in names if name not in commit.lost]
    return CommitCheck(commit=commit.label, whole=there == names, checkpoints=there)


def _check_snapshot(view: RunView, point: ResumePoint) -> str:
    """Hold Ray's file against what it should mirror."""
    data = view.read(layout.SNAPSHOT)
    if data is None:
        return "missing" if point.snapshot is not None else ""
    snapshot = parse_snapshot(data)
    if snapshot is None:
        return "torn"
    # As text, since a metric may be NaN, which equals nothing.
    return "mirrors the newest commit" if json.dumps(snapshot) == json.dumps(point.snapshot) else "differs"


def _torn_records(view: RunView) -> Iterator[str]:
    if decode(RunRecord, view.read(layout.RUN)) is None:
        yield "run.json is torn or missing; a resume writes it anew"
    for number in all_attempts(view):
        if decode(AttemptRecord, view.read(layout.attempt_name(number))) is None:
            yield f"the record of attempt {number} is torn; what it has committed speaks for it"
        ended = view.read(layout.ended_name(number))
        if ended is not None and decode(EndedRecord, ended) is None:
            yield f"the record of the end of attempt {number} is torn; it counts as not ended"
    beat = view.read(layout.HEARTBEAT)
    if beat is not None and decode(Heartbeat, beat) is None:
        yield "heartbeat.json is torn; the next beat replaces it"


def _in_words(point: ResumePoint) -> str:
    if point.snapshot is None:
        return "begins from the beginning"
    return f"starts from checkpoint {point.checkpoint} of commit {commit_label(point.base)}"


def _candidates(view: RunView, newest: CommitRecord | None) -> dict[str, tuple[str, str]]:
    """Give kind and reason of all that may be left over, by folder."""
    found: dict[str, tuple[str, str]] = {}
    commits = [commit for commit in read_lineage(view) if commit.record is not None]
    named = {name: commit.label for commit in commits if commit.record for name in commit.record.manifest}
    for folder in checkpoint_folders(view, named):
        attempt = written_by(folder)
        # What another run's is copied into is of no attempt.
        begun = f"attempt {attempt} began its upload" if attempt else "its copy was begun"
        found[folder] = ("upload", f"{begun}, and no commit names it")
        if folder in named and newest is not None:
            label = commit_label((newest.attempt, newest.sequence))
            why = f"commit {label} keeps it no longer, and its deletion did not come to its end"
            found[folder] = ("condemned", why)
    for number in all_attempts(view):
        found.update({name: ("dropped", reason) for name, reason in dropped_by(view, number).items()})
    return found


def _needed(view: RunView) -> list[str]:
    """Give the checkpoints that a resume may want.

    Where something must be repaired, these are all that any commit names.
    """
    point = find_resume_point(view)
    names = checkpoint_names(point.snapshot) if point.snapshot is not None else []
    if not point.repairs:
        return names
    mirror = parse_snapshot(view.read(layout.SNAPSHOT))
    names += checkpoint_names(mirror) if mirror is not None else []
    for commit in read_lineage(view):
        names += checkpoint_names(commit.record.snapshot) if commit.record is not None else []
    return list(dict.fromkeys(names))


def _leftover(view: RunView, folder: str, kind: str, reason: str) -> Leftover:
    parent, _, name = folder.rpartition("/")
    there = name in view.folders(parent)
    sizes = (view.file_sizes(folder) if there else None) or {}
    return Leftover(folder=folder, kind=kind, reason=reason, there=there, size_bytes=sum(sizes.values()))


def _overlaps(folder: str, names: Iterable[str]) -> bool:
    """Tell whether a folder is, holds, or is part of one of those."""
    return any(f"{folder}/".startswith(f"{name}/") or f"{name}/".startswith(f"{folder}/") for name in names)
