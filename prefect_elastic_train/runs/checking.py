"""Whether a run's records and checkpoints are whole, and what a resume would make of them. Nothing is written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from prefect_elastic_train.outcomes import AttemptFailedError
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.commits import all_attempts, all_commits, attempt_id, is_there, lineage, marks
from prefect_elastic_train.runs.records import (
    AttemptRecord,
    CommitRecord,
    EndedRecord,
    Heartbeat,
    RunRecord,
    decode,
)
from prefect_elastic_train.runs.resume import ResumePoint, find_resume_point
from prefect_elastic_train.runs.snapshots import (
    checkpoint_names,
    latest_checkpoint,
    parse_snapshot,
    without_checkpoints,
)
from prefect_elastic_train.runs.store import RunStore
from prefect_elastic_train.runs.view import RunView

__all__ = [
    "CheckpointCheck",
    "CommitCheck",
    "Leftover",
    "ReadCommit",
    "Verification",
    "commit_label",
    "file_problems",
    "find_leftovers",
    "newest_whole_commit",
    "read_commits",
    "usable_commit",
    "verify",
]

#: A run that is being trained goes on while it is looked at: then it is looked at anew, so often.
_LOOKS = 3
#: Files of a checkpoint that are named one by one.
_NAMED_FILES = 5


@dataclass(frozen=True)
class ReadCommit:
    """A commit of the lineage, as far as it can be read.

    Attributes:
        number: Attempt and sequence.
        record: What it holds, None if that is of no use.
        problem: Why it is of no use: ``"torn"`` or ``"another run's"``; empty if it is whole.
    """

    number: tuple[int, int]
    record: CommitRecord | None
    problem: str = ""

    @property
    def label(self) -> str:
        """Its name."""
        return commit_label(self.number)


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


def commit_label(commit: tuple[int, int] | None) -> str:
    """Name a commit as its object is; empty for none."""
    return "" if commit is None else f"{commit[0]:04d}-{commit[1]:06d}"


def read_commits(store: RunStore) -> Iterator[ReadCommit]:
    """Give the commits that count, newest first, and what is wrong with those that cannot be used."""
    for number in lineage(store):
        record = decode(CommitRecord, store.read(layout.commit_name(*number)))
        if record is None or parse_snapshot(json.dumps(record.snapshot)) is None:
            yield ReadCommit(number, None, "torn")
        elif not _belongs(store, record, number):
            yield ReadCommit(number, None, "another run's")
        else:
            yield ReadCommit(number, record)


def newest_whole_commit(store: RunStore) -> CommitRecord | None:
    """Give the newest commit that counts and can be read."""
    return next((commit.record for commit in read_commits(store) if commit.record is not None), None)


def usable_commit(store: RunStore) -> CommitRecord | None:
    """Give the newest commit that counts and can be read, without the checkpoints that attempts have given up since."""
    view = store if isinstance(store, RunView) else RunView(store)
    record = newest_whole_commit(view)
    given_up = _dropped(view, record) if record is not None else {}
    if record is None or not given_up:
        return record
    nothing: dict[str, Any] = {
        "checkpoint_results": [],
        "checkpoint_report_indices": [],
        "latest_checkpoint_result": None,
    }
    snapshot = without_checkpoints(record.snapshot, given_up) or {**record.snapshot, **nothing}
    manifest = {name: files for name, files in record.manifest.items() if name not in given_up}
    return record.model_copy(update={"snapshot": snapshot, "manifest": manifest})


def file_problems(manifest: dict[str, int] | None, files: dict[str, int] | None) -> list[str]:
    """Say what is wrong with a checkpoint's files.

    Args:
        manifest: Path and size in bytes of each file, as committed; None if its commit does not list them.
        files: The same as they are now; None if there is no folder.
    """
    if files is None:
        return ["its folder is missing"]
    if manifest is None:
        return [] if files else ["its folder is empty and its commit does not list it"]
    problems = []
    for name, size in sorted(manifest.items()):
        if name not in files:
            problems.append(f"{name} is missing")
        elif files[name] != size:
            problems.append(f"{name} has {files[name]} bytes instead of {size}")
    more = len(problems) - _NAMED_FILES
    return [*problems[:_NAMED_FILES], f"and {more} more files"] if more > 0 else problems


def verify(store: RunStore, name: str) -> Verification | None:
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


def find_leftovers(store: RunStore, *, unnamed: bool = True) -> list[Leftover]:
    """Find folders that no commit needs.

    Args:
        store: The run directory.
        unnamed: Look also for folders of which nothing tells whose they are.

    Raises:
        AttemptFailedError: The commits are lost, and with them what tells a checkpoint from what is left over.
    """
    view = store if isinstance(store, RunView) else RunView(store)
    newest = newest_whole_commit(view)
    kept = checkpoint_names(newest.snapshot) if newest is not None else []
    candidates = {name: why for name, why in _candidates(view, newest).items() if not _overlaps(name, kept)}
    dropped = _dropped(view, newest)
    candidates.update({name: why for name, why in dropped.items() if name in kept})
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


def _look(store: RunStore, name: str) -> tuple[RunView, Verification | None]:
    view = RunView(store)
    begun = bool(all_attempts(view) or all_commits(view) or view.read(layout.RUN) is not None)
    if not begun:
        return view, _look_at_foreign(view, name) if view.read(layout.SNAPSHOT) is not None else None
    commits = list(read_commits(view))
    newest = next((commit for commit in commits if commit.record is not None), None)
    found = Verification(
        name=name,
        uri=view.uri,
        whole=False,
        commit=newest.label if newest is not None else "",
        older_commits=[_check_older(view, commit) for commit in commits if commit is not newest],
        torn_records=list(_torn_records(view)),
    )
    try:
        point = find_resume_point(view)
        leftovers = find_leftovers(view)
    except AttemptFailedError as error:
        record = newest.record if newest is not None else None
        return view, found.model_copy(
            update={"resume": f"is refused: {error}", "checkpoints": _check_newest(view, record, None)}
        )
    return view, found.model_copy(
        update={
            "whole": not point.repairs,
            "checkpoints": _check_newest(view, newest.record if newest is not None else None, point),
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


def _check_newest(view: RunView, record: CommitRecord | None, point: ResumePoint | None) -> list[CheckpointCheck]:
    if record is None:
        return []
    given_up = _dropped(view, record)
    latest = latest_checkpoint(record.snapshot)
    checks = []
    for name in checkpoint_names(record.snapshot):
        manifest = record.manifest.get(name)
        problems = [given_up[name][1]] if name in given_up else file_problems(manifest, view.file_sizes(name))
        checks.append(_check(name, manifest or {}, problems, latest))
    return checks


def _check(name: str, files: dict[str, int], problems: list[str], latest: dict[str, Any] | None) -> CheckpointCheck:
    return CheckpointCheck(
        name=name,
        ok=not problems,
        problems=problems,
        files=len(files),
        size_bytes=sum(files.values()),
        latest=latest is not None and latest["checkpoint_dir_name"] == name,
    )


def _check_older(view: RunView, commit: ReadCommit) -> CommitCheck:
    if commit.record is None:
        return CommitCheck(commit=commit.label, whole=False, problem=commit.problem)
    names = checkpoint_names(commit.record.snapshot)
    given_up = _dropped(view, commit.record)
    there = [
        name
        for name in names
        if name not in given_up and not file_problems(commit.record.manifest.get(name), view.file_sizes(name))
    ]
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
    for mark in marks(view):
        # A checkpoint that another run's is copied into has the mark of no attempt.
        begun = f"attempt {mark.attempt} began its upload" if mark.attempt else "its copy was begun"
        found[mark.checkpoint] = ("upload", f"{begun}, and no commit names it")
    for name in newest.condemned if newest is not None else []:
        label = commit_label((newest.attempt, newest.sequence)) if newest is not None else ""
        found[name] = ("condemned", f"commit {label} keeps it no longer, and its deletion did not come to its end")
    found.update(_dropped(view, None))
    return found


def _dropped(view: RunView, since: CommitRecord | None) -> dict[str, tuple[str, str]]:
    """Give what attempts have given up as damaged; with a commit, those that began after it was written."""
    found = {}
    for number in all_attempts(view):
        record = decode(AttemptRecord, view.read(layout.attempt_name(number)))
        if record is None or (since is not None and number <= since.attempt):
            continue
        for name in record.dropped:
            found[name] = ("dropped", f"it was damaged, and attempt {number} gave it up")
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
    for commit in read_commits(view):
        names += checkpoint_names(commit.record.snapshot) if commit.record is not None else []
    return list(dict.fromkeys(names))


def _leftover(view: RunView, folder: str, kind: str, reason: str) -> Leftover:
    there = is_there(view, folder)
    sizes = (view.file_sizes(folder) if there else None) or {}
    return Leftover(folder=folder, kind=kind, reason=reason, there=there, size_bytes=sum(sizes.values()))


def _belongs(store: RunStore, record: CommitRecord, number: tuple[int, int]) -> bool:
    """Tell whether a commit is this run's, and in its place."""
    known = attempt_id(store, number[0])
    own = not known or not record.attempt_id or known == record.attempt_id
    return own and (record.attempt, record.sequence) == number


def _overlaps(folder: str, names: Iterable[str]) -> bool:
    """Tell whether a folder is, holds, or is part of one of those."""
    return any(f"{folder}/".startswith(f"{name}/") or f"{name}/".startswith(f"{folder}/") for name in names)
