"""What a resume writes: the newest whole commit put back as Ray's file, the first commit, and leftovers removed."""

from __future__ import annotations

import json
from typing import Any

from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.records import CommitRecord, encode
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.commits import check_fence, newest_commit
from prefect_elastic_train.runs.model import SEED_COMMIT, ResumePoint, RunDirectory
from prefect_elastic_train.runs.snapshots import checkpoint_names, is_same, without_checkpoints
from prefect_elastic_train.storage.store import RunStore


def attempt_snapshot(store: RunStore, attempt: int) -> dict[str, Any] | None:
    """Snapshot that an attempt goes on from: of its newest commit, else of its base; None for the beginning."""
    commit = newest_commit(store, attempt)
    return commit.snapshot if commit is not None else None


def restore_snapshot(store: RunStore, point: ResumePoint) -> list[str]:
    """Put the resume point back as Ray's file.

    Returns:
        What was wrong with Ray's file, in words; empty if it was what it should be.
    """
    run = RunDirectory(store)
    is_there = run.read(layout.SNAPSHOT) is not None
    if point.snapshot is None:
        store.delete(layout.SNAPSHOT)
        return ["Ray's snapshot belongs to no commit and was removed"] if is_there else []
    if is_same(run.mirror, point.snapshot):
        return []
    store.replace(layout.SNAPSHOT, json.dumps(point.snapshot).encode())
    # A copied checkpoint comes without Ray's file.
    if point.repairs or (not is_there and point.base == SEED_COMMIT):
        return []
    return ["Ray's snapshot was torn, missing or not the newest commit's, and was written anew from that"]


def adopt_snapshot(store: RunStore) -> list[str]:
    """Make the state of a run that raw Ray Train has written the first commit.

    Returns:
        What was adopted and what was dropped, in words.

    Raises:
        AttemptFailedError: Its snapshot is torn, or no checkpoint that it names is left; outcome ``invalid``.
    """
    run = RunDirectory(store)
    snapshot = run.mirror
    names = checkpoint_names(snapshot) if snapshot is not None else []
    missing = [name for name in names if not run.file_sizes(name)]
    usable = without_checkpoints(snapshot, missing) if snapshot is not None else None
    if usable is None:
        raise AttemptFailedError(
            f"{store.uri} holds a run that another program wrote with Ray Train, and its {layout.SNAPSHOT} is torn or "
            "names no checkpoint that is still there; remove that file to begin anew there, or give another run_name",
            outcome=Outcome.INVALID,
        )
    write_first_commit(store, usable)
    notes = [f"checkpoint {name} was dropped: its folder is missing or empty" for name in missing]
    adopted = len(names) - len(missing)
    return [f"the run was written by Ray Train alone; {adopted} of its checkpoints were adopted", *notes]


def write_first_commit(store: RunStore, snapshot: dict[str, Any]) -> None:
    """Make a snapshot whose checkpoints are in place the first commit of a run, unless it has one."""
    manifest = {name: store.file_sizes(name) or {} for name in checkpoint_names(snapshot)}
    attempt, sequence = SEED_COMMIT
    record = CommitRecord(attempt=attempt, sequence=sequence, snapshot=snapshot, manifest=manifest)
    store.create(layout.commit_name(*SEED_COMMIT), encode(record))


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

    def check() -> None:
        check_fence(store, attempt)

    check()
    leftovers = RunDirectory(store, attempt).leftovers
    return {one.folder: one.why for one in leftovers if store.delete_folder(one.folder, check)}
