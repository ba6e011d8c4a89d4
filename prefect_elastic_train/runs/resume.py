"""Where a new attempt resumes: the newest whole checkpoint of the valid lineage, put back as Ray's file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from prefect_elastic_train.driver.events import CheckpointCommitted
from prefect_elastic_train.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.commits import (
    Mark,
    all_attempts,
    all_commits,
    attempt_id,
    check_fence,
    lineage,
    marks,
)
from prefect_elastic_train.runs.history import read_history
from prefect_elastic_train.runs.records import AttemptRecord, CommitRecord, decode, encode
from prefect_elastic_train.runs.snapshots import (
    checkpoint_names,
    latest_checkpoint,
    parse_snapshot,
    seed_snapshot,
    without_checkpoints,
)
from prefect_elastic_train.runs.store import RunStore

__all__ = [
    "SEED_COMMIT",
    "ResumePoint",
    "adopt_snapshot",
    "attempt_commit",
    "attempt_snapshot",
    "damage_of",
    "find_resume_point",
    "mark_dropped",
    "remove_interrupted_uploads",
    "restore_snapshot",
    "seed_run",
]

#: How Ray Train calls a checkpoint that the loop gives no name.
#: Attempt and number of the commit that a run begins with that starts from another's checkpoint.
SEED_COMMIT = (0, 0)
_RAYS_NAME = re.compile(r"checkpoint_\d")


@dataclass(frozen=True)
class ResumePoint:
    """What an attempt starts from.

    Attributes:
        base: The commit, as ``(attempt, sequence)``; None for the beginning.
        snapshot: Ray's snapshot to start from; None for the beginning.
        dropped: Names of damaged checkpoints on the way there.
        repairs: What was repaired or dropped to get there, in words.
        regained: The base, if its object is lost and was put together again from Ray's file.
    """

    base: tuple[int, int] | None = None
    snapshot: dict[str, Any] | None = None
    dropped: list[str] = field(default_factory=list)
    repairs: list[str] = field(default_factory=list)
    regained: CommitRecord | None = None

    @property
    def checkpoint(self) -> str:
        """Name of the checkpoint folder that training resumes from, empty for the beginning."""
        latest = latest_checkpoint(self.snapshot) if self.snapshot else None
        return latest["checkpoint_dir_name"] if latest else ""


def find_resume_point(store: RunStore) -> ResumePoint:
    """Find the newest commit of the valid lineage with a whole checkpoint, and drop what is damaged.

    Raises:
        AttemptFailedError: No commit can be read, and there are checkpoints; outcome ``invalid``.
    """
    if not _has_readable_commit(store):
        _check_nothing_is_given_up(store)
    repairs: list[str] = []
    dropped: list[str] = []
    # What was found damaged, or was dropped by an attempt, is gone for all older commits too: its name may have been
    # that of another checkpoint then, whose files it has overwritten.
    gone: set[str] = set()
    dropped_before = _dropped_by_attempts(store)
    for attempt, sequence in lineage(store):
        name = f"{attempt:04d}-{sequence:06d}"
        record, snapshot = _read_whole(store, (attempt, sequence))
        regained = None
        if record is None or snapshot is None or _is_foreign(store, record, attempt, sequence):
            what = "torn" if record is None or snapshot is None else "another run's"
            record = regained = _mirrored_commit(store, (attempt, sequence))
            if record is None:
                repairs.append(f"commit {name} is {what} and was passed over")
                continue
            snapshot = record.snapshot
            repairs.append(
                f"commit {name} was {what} and was written anew from Ray's snapshot; the files of "
                f"{checkpoint_names(snapshot)[-1]} could not be checked"
            )
        gone.update(checkpoint for later, names in dropped_before if later > attempt for checkpoint in names)
        for checkpoint in checkpoint_names(snapshot):
            damage = "" if checkpoint in gone else damage_of(store, checkpoint, record.manifest.get(checkpoint))
            if damage:
                gone.add(checkpoint)
                dropped.append(checkpoint)
                repairs.append(f"checkpoint {checkpoint} was dropped: {damage}")
        usable = without_checkpoints(snapshot, gone)
        if usable is not None:
            return ResumePoint((attempt, sequence), usable, _once(dropped), _once(repairs), regained)
        repairs.append(f"commit {name} has no whole checkpoint left and was passed over")
    return ResumePoint(None, None, _once(dropped), _once(repairs))


def _has_readable_commit(store: RunStore) -> bool:
    if any(decode(CommitRecord, store.read(layout.commit_name(*commit))) for commit in all_commits(store)):
        return True
    newest = next(lineage(store), None)
    return newest is not None and _mirrored_commit(store, newest) is not None


def _read_whole(store: RunStore, commit: tuple[int, int]) -> tuple[CommitRecord | None, dict[str, Any] | None]:
    """Give a commit and its snapshot; None for what is torn."""
    record = decode(CommitRecord, store.read(layout.commit_name(*commit)))
    return record, parse_snapshot(json.dumps(record.snapshot)) if record is not None else None


def _mirrored_commit(store: RunStore, commit: tuple[int, int]) -> CommitRecord | None:
    """Put the newest commit, which is lost, together again from Ray's file, if that is its mirror beyond doubt.

    Ray's file may also mirror an earlier commit: a crash can come before it is written, and a holder that was
    stopped may write it late. It is this commit's if it is further than the newest earlier commit that can be
    read, names one checkpoint more, and that one was uploaded by this commit's attempt. Its upload mark tells so,
    which stays until the next commit. Of that checkpoint no manifest is left: it is taken as it is.
    """
    ordered = list(lineage(store))
    mirror = parse_snapshot(store.read(layout.SNAPSHOT))
    names = checkpoint_names(mirror) if mirror is not None else []
    if mirror is None or not names or ordered[:1] != [commit]:
        return None
    earlier = (_read_whole(store, other) for other in ordered[1:])
    before = next((record for record, snapshot in earlier if record is not None and snapshot is not None), None)
    known = before.manifest if before is not None else {}
    files = store.file_sizes(names[-1])
    if (
        not files
        or Mark(commit[0], names[-1]) not in marks(store)
        or not known.keys() >= set(names[:-1])
        or (before is not None and mirror["current_report_index"] <= before.snapshot["current_report_index"])
    ):
        return None
    return CommitRecord(
        attempt=commit[0],
        sequence=commit[1],
        attempt_id=attempt_id(store, commit[0]),
        snapshot=mirror,
        manifest={**{name: known[name] for name in names[:-1]}, names[-1]: files},
        condemned=sorted(known.keys() - set(names)),
    )


def _is_foreign(store: RunStore, record: CommitRecord, attempt: int, sequence: int) -> bool:
    known = attempt_id(store, attempt)
    other_attempt = bool(known and record.attempt_id and known != record.attempt_id)
    return other_attempt or (record.attempt, record.sequence) != (attempt, sequence)


def _check_nothing_is_given_up(store: RunStore) -> None:
    """Refuse to begin anew over checkpoints that only lost commits could tell apart from interrupted uploads."""
    rays_file = store.read(layout.SNAPSHOT)
    # A mark alone is no proof of an interrupted upload once Ray's file exists, which is written after a commit.
    marked = {mark.checkpoint.split("/")[0] for mark in marks(store)} if rays_file is None else set()
    left = [
        folder
        for folder in store.folders()
        if folder != layout.STATE_FOLDER and folder not in marked and store.file_sizes(folder)
    ]
    snapshot = parse_snapshot(rays_file)
    named = {name.split("/")[0] for name in checkpoint_names(snapshot)} if snapshot is not None else set()
    if named.isdisjoint(left) and not _has_ever_committed(store):
        # Folders that a person or the loop itself has made.
        left = [folder for folder in left if _RAYS_NAME.match(folder)]
    if not left:
        return
    shown = ", ".join(left[:5]) + (", …" if len(left) > 5 else "")
    ways = [f"bring the files in {layout.COMMITS} back", "move the folders away to begin anew"]
    if snapshot is not None:
        ways.append(f"move {layout.STATE_FOLDER} away and give resume=True to trust Ray's snapshot, which is readable")
    raise AttemptFailedError(
        f"no commit of {store.uri} is left or readable, and it holds {len(left)} folders that may be checkpoints "
        f"({shown}). Nothing was touched. Either {', or '.join(ways)}, or give another run_name",
        outcome=Outcome.INVALID,
    )


def _has_ever_committed(store: RunStore) -> bool:
    """Look for traces of commits, which may be lost by now."""
    if all_commits(store):
        return True
    records = (decode(AttemptRecord, store.read(layout.attempt_name(number))) for number in all_attempts(store))
    if any(record is not None and record.base is not None for record in records):
        return True
    return any(isinstance(event, CheckpointCommitted) for event in read_history(store))


def attempt_commit(store: RunStore, attempt: int) -> CommitRecord | None:
    """Give the commit that an attempt goes on from: its own newest, else its base; None for the beginning.

    Checkpoints that were dropped since the base was written are not among those of its snapshot.
    """
    for commit in _own_commits(store, attempt):
        record = _read_commit(store, commit)
        if record is not None:
            return record
    begun = decode(AttemptRecord, store.read(layout.attempt_name(attempt)))
    base = _read_commit(store, begun.base) if begun is not None and begun.base is not None else None
    if begun is None or begun.base is None or base is None:
        return None
    gone = {
        checkpoint
        for number, names in _dropped_by_attempts(store)
        if begun.base[0] < number <= attempt
        for checkpoint in names
    }
    usable = without_checkpoints(base.snapshot, gone)
    return None if usable is None else base.model_copy(update={"snapshot": usable})


def attempt_snapshot(store: RunStore, attempt: int) -> dict[str, Any] | None:
    """Give the snapshot that an attempt goes on from: of its newest commit, else of its base.

    This, not Ray's file, is what the attempt's own processes read: a holder that was stopped for a while may
    still mirror its last commit there after it was fenced off.
    """
    commit = attempt_commit(store, attempt)
    return commit.snapshot if commit is not None else None


def _own_commits(store: RunStore, attempt: int) -> list[tuple[int, int]]:
    return [commit for commit in reversed(all_commits(store)) if commit[0] == attempt]


def _read_commit(store: RunStore, commit: tuple[int, int]) -> CommitRecord | None:
    return decode(CommitRecord, store.read(layout.commit_name(*commit))) or _mirrored_commit(store, commit)


def mark_dropped(store: RunStore, point: ResumePoint, attempt: int) -> None:
    """Mark the folders of dropped checkpoints, so that they are gone before anything takes their names."""
    for checkpoint in point.dropped:
        Mark(attempt, checkpoint).set(store, damaged=True)


def restore_snapshot(store: RunStore, point: ResumePoint) -> list[str]:
    """Put the resume point back as Ray's file, and its commit if that was lost.

    Returns:
        What was wrong with Ray's file, in words; empty if it was what it should be.
    """
    if point.regained is not None:
        regained = point.regained
        store.replace(layout.commit_name(regained.attempt, regained.sequence), encode(regained))
    current = store.read(layout.SNAPSHOT)
    if point.snapshot is None:
        store.delete(layout.SNAPSHOT)
        return [] if current is None else ["Ray's snapshot belongs to no commit and was removed"]
    # As text, since a metric may be NaN, which equals nothing.
    wanted = json.dumps(point.snapshot)
    if current is not None and json.dumps(parse_snapshot(current)) == wanted:
        return []
    store.replace(layout.SNAPSHOT, wanted.encode())
    if point.repairs or (current is None and point.base == (0, 0)):  # a copied checkpoint comes without Ray's file
        return []
    if current is None:
        return ["Ray's snapshot was missing and was written anew from the newest commit"]
    if parse_snapshot(current) is None:
        return ["Ray's snapshot was torn and was written anew from the newest commit"]
    return ["Ray's snapshot differed from the newest commit and was written anew from it"]


def adopt_snapshot(store: RunStore) -> list[str]:
    """Make the state of a run that raw Ray Train has written the first commit.

    Returns:
        What was adopted and what was dropped, in words.

    Raises:
        AttemptFailedError: Its snapshot is torn, or no checkpoint that it names is left; outcome ``invalid``.
    """
    snapshot = parse_snapshot(store.read(layout.SNAPSHOT))
    sizes = {name: store.file_sizes(name) for name in checkpoint_names(snapshot)} if snapshot else {}
    missing = [name for name, files in sizes.items() if not files]
    usable = without_checkpoints(snapshot, missing) if snapshot else None
    if usable is None:
        what = "names no checkpoint that is still there" if snapshot else "is torn"
        raise AttemptFailedError(
            f"{store.uri} holds a run that another program wrote with Ray Train, and its {layout.SNAPSHOT} {what}; "
            "remove that file to begin anew there, or give another run_name",
            outcome=Outcome.INVALID,
        )
    manifest = {name: sizes[name] or {} for name in checkpoint_names(usable)}
    store.create(
        layout.commit_name(0, 0), encode(CommitRecord(attempt=0, sequence=0, snapshot=usable, manifest=manifest))
    )
    notes = [f"checkpoint {name} was dropped: its folder is missing or empty" for name in missing]
    return [f"the run was written by Ray Train alone; {len(manifest)} of its checkpoints were adopted", *notes]


def seed_run(store: RunStore, checkpoint_name: str, metrics: dict[str, Any], ray_version: str) -> bool:
    """Make a checkpoint that was copied into a new run its first commit; False if it has one already."""
    snapshot = seed_snapshot(checkpoint_name, metrics, ray_version)
    manifest = {checkpoint_name: store.file_sizes(checkpoint_name) or {}}
    attempt, sequence = SEED_COMMIT
    record = CommitRecord(attempt=attempt, sequence=sequence, snapshot=snapshot, manifest=manifest)
    return store.create(layout.commit_name(*SEED_COMMIT), encode(record))


def remove_interrupted_uploads(store: RunStore, attempt: int) -> dict[str, str]:
    """Remove checkpoint folders that no commit needs: interrupted uploads, and what was to be deleted.

    No worker may be running. Marks of what is committed stay until the next commit: should this one be lost, they
    tell whose upload it was.

    Args:
        store: The run directory.
        attempt: The attempt that is about to start workers; what later ones upload is left alone.

    Returns:
        By the names of the folders, why each was there and not needed.

    Raises:
        FencedOffError: Another attempt has taken over; nothing that it needs was removed.
    """

    def check() -> None:
        check_fence(store, attempt)

    check()
    commit = attempt_commit(store, attempt)
    needed = set(checkpoint_names(commit.snapshot)) if commit is not None else set()
    if not _goes_on_from_readable(store, attempt):
        snapshot = parse_snapshot(store.read(layout.SNAPSHOT))
        if snapshot is None:
            return {}
        needed.update(checkpoint_names(snapshot))
    own_marks = [mark for mark in marks(store) if mark.attempt <= attempt]
    condemned = set(commit.condemned if commit is not None else [])
    removed = {}
    for checkpoint in sorted({mark.checkpoint for mark in own_marks} | condemned):
        if _overlaps(checkpoint, needed):
            continue
        of_it = [mark for mark in own_marks if mark.checkpoint == checkpoint]
        damaged = any(mark.is_of_damage(store) for mark in of_it)
        if store.delete_folder(checkpoint, check):
            why = "no longer kept" if checkpoint in condemned else "damaged" if damaged else "upload interrupted"
            removed[checkpoint] = why
        for mark in of_it:
            store.delete(mark.name)
    return removed


def _goes_on_from_readable(store: RunStore, attempt: int) -> bool:
    """Tell whether the very commit that an attempt goes on from can be read; true also for the beginning."""
    begun = decode(AttemptRecord, store.read(layout.attempt_name(attempt)))
    base = begun.base if begun is not None else None
    newest = next(iter(_own_commits(store, attempt)), base)
    return newest is None or _read_commit(store, newest) is not None


def _overlaps(checkpoint: str, needed: Iterable[str]) -> bool:
    """Tell whether a folder is, holds, or is part of a checkpoint that is needed."""
    return any(f"{checkpoint}/".startswith(f"{name}/") or f"{name}/".startswith(f"{checkpoint}/") for name in needed)


def _dropped_by_attempts(store: RunStore) -> list[tuple[int, list[str]]]:
    records = ((n, decode(AttemptRecord, store.read(layout.attempt_name(n)))) for n in all_attempts(store))
    return [(number, record.dropped) for number, record in records if record is not None and record.dropped]


def _once(words: list[str]) -> list[str]:
    return list(dict.fromkeys(words))


def damage_of(store: RunStore, checkpoint: str, manifest: dict[str, int] | None) -> str:
    """Say what is wrong with a checkpoint's files, or nothing."""
    files = store.file_sizes(checkpoint)
    if files is None and manifest == {}:
        return ""  # an object store has no empty folders
    if files is None:
        return "its folder is missing"
    if manifest is None:
        return "" if files else "its folder is empty and its commit does not list it"
    missing = sorted(manifest.keys() - files.keys())
    if missing:
        return f"{len(missing)} of {len(manifest)} files are missing, first {missing[0]}"
    for name, size in sorted(manifest.items()):
        if files[name] != size:
            return f"{name} has {files[name]} bytes instead of {size}"
    return ""
