"""What a resume writes: the newest whole commit put back as Ray's file, the first commit, and leftovers removed."""

from __future__ import annotations

import json
from typing import Any

from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome
from prefect_elastic_train.core.records import CommitRecord, encode
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.commits import check_fence, newest_commit
from prefect_elastic_train.runs.model import MIRRORS, SEED_COMMIT, ResumePoint, RunDirectory, mirror_state
from prefect_elastic_train.runs.snapshots import (
    checkpoint_names,
    parse_snapshot,
    seed_snapshot,
    without_checkpoints,
)
from prefect_elastic_train.runs.view import RunView
from prefect_elastic_train.storage.store import RunStore


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
    state = mirror_state(store, point)
    if point.snapshot is None:
        store.delete(layout.SNAPSHOT)
        return ["Ray's snapshot belongs to no commit and was removed"] if state else []
    if state == MIRRORS:
        return []
    store.replace(layout.SNAPSHOT, json.dumps(point.snapshot).encode())
    # A copied checkpoint comes without Ray's file.
    if point.repairs or (state == "missing" and point.base == SEED_COMMIT):
        return []
    was = "differed from the newest commit" if state == "differs" else f"was {state}"
    return [f"Ray's snapshot {was} and was written anew from {'it' if state == 'differs' else 'the newest commit'}"]


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

    def check() -> None:
        check_fence(store, attempt)

    check()
    whys = {"upload": "upload interrupted", "condemned": "no longer kept", "dropped": "damaged"}
    found = {one.folder: whys[one.kind] for one in RunDirectory(store, attempt).leftovers if one.kind in whys}
    return {folder: why for folder, why in found.items() if store.delete_folder(folder, check)}
