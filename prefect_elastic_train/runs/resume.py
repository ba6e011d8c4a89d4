"""Where a new attempt resumes: the newest whole checkpoint of the valid lineage, put back as Ray's file."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from prefect_elastic_train.core.checkpoint_names import loop_name, written_by
from prefect_elastic_train.core.events import CheckpointCommitted
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.records import AttemptRecord, CommitRecord, decode, encode
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.commits import (
    all_attempts,
    all_commits,
    check_fence,
    checkpoint_folders,
    newest_commit,
    read_lineage,
)
from prefect_elastic_train.runs.history import read_history
from prefect_elastic_train.runs.snapshots import (
    checkpoint_names,
    latest_checkpoint,
    parse_snapshot,
    seed_snapshot,
    without_checkpoints,
)
from prefect_elastic_train.runs.view import RunReader, RunView
from prefect_elastic_train.storage.store import RunStore

__all__ = [
    "SEED_COMMIT",
    "ResumePoint",
    "adopt_snapshot",
    "attempt_snapshot",
    "find_resume_point",
    "remove_interrupted_uploads",
    "restore_snapshot",
    "seed_run",
]

#: Attempt and number of the commit that a run begins with that starts from another's checkpoint.
SEED_COMMIT = (0, 0)
#: How Ray Train calls a checkpoint that the loop gives no name.
_RAYS_NAME = re.compile(r"checkpoint_\d")


@dataclass(frozen=True)
class ResumePoint:
    """What an attempt starts from.

    Attributes:
        commit: The commit, as far as it is whole; None for the beginning.
        dropped: Names of damaged checkpoints on the way there.
        repairs: What was repaired or dropped to get there, in words.
        regained: The commit's object is lost, and was put together again from Ray's file.
    """

    commit: CommitRecord | None = None
    dropped: list[str] = field(default_factory=list)
    repairs: list[str] = field(default_factory=list)
    regained: bool = False

    @property
    def base(self) -> tuple[int, int] | None:
        """Attempt and sequence of the commit; None for the beginning."""
        return (self.commit.attempt, self.commit.sequence) if self.commit is not None else None

    @property
    def snapshot(self) -> dict[str, Any] | None:
        """Ray's snapshot to start from; None for the beginning."""
        return self.commit.snapshot if self.commit is not None else None

    @property
    def checkpoint(self) -> str:
        """Name of the checkpoint folder that training resumes from, empty for the beginning."""
        latest = latest_checkpoint(self.snapshot) if self.snapshot else None
        return latest["checkpoint_dir_name"] if latest else ""


def find_resume_point(store: RunReader) -> ResumePoint:
    """Find the newest commit of the valid lineage with a whole checkpoint, and drop what is damaged.

    Raises:
        AttemptFailedError: No commit can be read, and there are checkpoints; outcome ``invalid``.
    """
    view = store if isinstance(store, RunView) else RunView(store)
    repairs: list[str] = []
    dropped: list[str] = []
    for read in read_lineage(view, whole=True):
        if read.record is None:
            repairs.append(f"commit {read.label} is {read.problem} and was passed over")
            continue
        if read.problem:
            repairs.append(
                f"commit {read.label} was {read.problem} and was written anew from Ray's snapshot; the files of "
                f"{loop_name(checkpoint_names(read.record.snapshot)[-1])} could not be checked"
            )
        dropped += read.damaged
        repairs += [f"checkpoint {loop_name(name)} was dropped: {why}" for name, why in read.damaged.items()]
        usable = read.usable
        if usable is not None:
            return ResumePoint(usable, dropped, repairs, regained=bool(read.problem))
        repairs.append(f"commit {read.label} has no whole checkpoint left and was passed over")
    if not any(decode(CommitRecord, view.read(layout.commit_name(*commit))) for commit in all_commits(view)):
        _check_nothing_is_given_up(view)
    return ResumePoint(None, dropped, repairs)


def _check_nothing_is_given_up(store: RunReader) -> None:
    """Refuse to begin anew over checkpoints that only lost commits could tell apart from interrupted uploads."""
    rays_file = store.read(layout.SNAPSHOT)
    left = [folder for folder in store.folders() if folder != layout.STATE_FOLDER and store.file_sizes(folder)]
    snapshot = parse_snapshot(rays_file)
    named = {name.split("/")[0] for name in checkpoint_names(snapshot)} if snapshot is not None else set()
    if named.isdisjoint(left) and not _has_ever_committed(store):
        # Folders that a person or the loop itself has made, and uploads that were interrupted.
        left = [folder for folder in left if _RAYS_NAME.match(folder) and written_by(folder) is None]
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


def _has_ever_committed(store: RunReader) -> bool:
    """Look for traces of commits, which may be lost by now."""
    if all_commits(store):
        return True
    records = (decode(AttemptRecord, store.read(layout.attempt_name(number))) for number in all_attempts(store))
    if any(record is not None and record.base is not None for record in records):
        return True
    return any(isinstance(event, CheckpointCommitted) for event in read_history(store))


def attempt_snapshot(store: RunStore, attempt: int) -> dict[str, Any] | None:
    """Snapshot that an attempt goes on from: of its newest commit, else of its base; None for the beginning."""
    commit = newest_commit(store, attempt)
    return commit.snapshot if commit is not None else None


def restore_snapshot(store: RunStore, point: ResumePoint) -> list[str]:
    """Put the resume point back as Ray's file, and its commit if that was lost.

    Returns:
        What was wrong with Ray's file, in words; empty if it was what it should be.
    """
    if point.regained and point.commit is not None:
        store.replace(layout.commit_name(point.commit.attempt, point.commit.sequence), encode(point.commit))
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
    view = RunView(store)
    sizes = {name: view.file_sizes(name) for name in checkpoint_names(snapshot)} if snapshot else {}
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

    No worker may be running.

    Args:
        store: The run directory.
        attempt: The attempt that is about to start workers; what later ones upload is left alone.

    Returns:
        By the names of the folders, why each was there and not needed.

    Raises:
        FencedOffError: Another attempt has taken over; nothing that it needs was removed.
    """
    check_fence(store, attempt)  # after the attempt's last commit: a successor sees that, and needs no more
    commit = newest_commit(store, attempt)
    needed = set(checkpoint_names(commit.snapshot)) if commit is not None else set()
    newest = next(read_lineage(store, attempt), None)
    if newest is not None and newest.record is None:  # the very commit that the attempt goes on from
        snapshot = parse_snapshot(store.read(layout.SNAPSHOT))
        if snapshot is None:
            return {}
        needed.update(checkpoint_names(snapshot))
    begun = [folder for folder in checkpoint_folders(store, needed) if (written_by(folder) or 0) <= attempt]
    unneeded = [folder for folder in begun if folder not in needed]
    why = _reasons(store, attempt) if unneeded else {}
    removed = {}
    for folder in unneeded:
        if store.delete_folder(folder):
            removed[folder] = why.get(folder, "upload interrupted")
    return removed


def _reasons(store: RunStore, attempt: int) -> dict[str, str]:
    """Return why checkpoints are not needed that were committed once."""
    found = {}
    for read in read_lineage(store, attempt):
        found.update(dict.fromkeys(checkpoint_names(read.record.snapshot) if read.record else [], "no longer kept"))
        found.update(dict.fromkeys(read.gone, "damaged"))
    return found
