"""Repair of a run directory: restore Ray's snapshot, adopt a run of raw Ray Train, remove interrupted uploads."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from prefect_elastic_train.core.records import CommitRecord, encode
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.commits import check_fence
from prefect_elastic_train.runs.run_directory import SEED_COMMIT, ResumePoint, RunDirectory, refusal
from prefect_elastic_train.runs.snapshots import checkpoint_names, without_checkpoints
from prefect_elastic_train.storage.store import RunStore


def restore_snapshot(store: RunStore, point: ResumePoint) -> list[str]:
    """Write the snapshot of a resume point into Ray Train's snapshot file, unless the file has this content.

    Without a snapshot in the resume point, delete the file. Return messages about differences that are not expected.
    """
    run = RunDirectory(store)
    exists = run.read(layout.SNAPSHOT) is not None
    if point.snapshot is None:
        store.delete(layout.SNAPSHOT)
        return ["Ray's snapshot belongs to no commit and was removed"] if exists else []
    text = json.dumps(point.snapshot)
    if json.dumps(run.mirror) == text:  # compared as text, because NaN in metrics equals nothing
        return []
    store.replace(layout.SNAPSHOT, text.encode())
    # Ray's file is not written by incremental commits, and not copied with a checkpoint.
    if point.repairs or "since" in point.snapshot or (not exists and point.base == SEED_COMMIT):
        return []
    return ["Ray's snapshot was torn, missing or not the newest commit's, and was rewritten from that"]


def adopt_snapshot(store: RunStore) -> list[str]:
    """Make the first commit of a run that Ray Train wrote without this package, from Ray's snapshot file.

    Returns:
        Messages for the user, also about checkpoints that are missing.

    Raises:
        AttemptFailedError: The snapshot is torn, or names no checkpoint that still exists; outcome ``invalid``.
    """
    run = RunDirectory(store)
    snapshot = run.mirror
    names = checkpoint_names(snapshot)
    missing = [name for name in names if not run.file_sizes(name)]
    usable = without_checkpoints(snapshot, missing) if snapshot is not None else None
    if usable is None:
        raise refusal(
            f"{store.uri} holds a run that another program wrote with Ray Train, and its {layout.SNAPSHOT} is torn or "
            "names no checkpoint that still exists; remove that file to start from scratch, or give another run_name"
        )
    write_first_commit(store, usable)
    notes = [f"checkpoint {name} was dropped: its folder is missing or empty" for name in missing]
    adopted = len(names) - len(missing)
    return [f"the run was written by Ray Train alone; {adopted} of its checkpoints were adopted", *notes]


def write_first_commit(store: RunStore, snapshot: dict[str, Any]) -> None:
    """Write the first commit of a run from a snapshot whose checkpoints exist.

    An existing first commit is not changed.
    """
    manifest = {name: store.file_sizes(name) or {} for name in checkpoint_names(snapshot)}
    attempt, sequence = SEED_COMMIT
    record = CommitRecord(attempt=attempt, sequence=sequence, snapshot=snapshot, manifest=manifest)
    store.create(layout.commit_name(*SEED_COMMIT), encode(record))


def remove_leftovers(store: RunStore, attempt: int) -> list[str]:
    """Delete the checkpoint folders of a run that no commit needs, except those of attempts later than ``attempt``.

    Return the names of the deleted folders. Raise a FencedOffError if the attempt does not hold the fence.
    """
    check = partial(check_fence, store, attempt)
    check()
    return [folder for folder in RunDirectory(store, attempt).leftovers if store.delete_folder(folder, check)]
