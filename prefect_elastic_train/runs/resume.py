"""Where a new attempt resumes: the newest whole checkpoint of the valid lineage, put back as Ray's file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.commits import lineage, mark_name, unquote_mark
from prefect_elastic_train.runs.records import CommitRecord, decode, encode
from prefect_elastic_train.runs.snapshots import (
    checkpoint_names,
    latest_checkpoint,
    parse_snapshot,
    seed_snapshot,
    without_checkpoints,
)
from prefect_elastic_train.runs.store import RunStore

__all__ = [
    "ResumePoint",
    "adopt_snapshot",
    "find_resume_point",
    "remove_interrupted_uploads",
    "restore_snapshot",
    "seed_run",
]


@dataclass(frozen=True)
class ResumePoint:
    """What an attempt starts from.

    Attributes:
        base: The commit, as ``(attempt, sequence)``; None for the beginning.
        snapshot: Ray's snapshot to start from; None for the beginning.
        repairs: What was repaired or dropped to get there, in words.
    """

    base: tuple[int, int] | None = None
    snapshot: dict[str, Any] | None = None
    repairs: list[str] = field(default_factory=list)

    @property
    def checkpoint(self) -> str:
        """Name of the checkpoint folder that training resumes from, empty for the beginning."""
        latest = latest_checkpoint(self.snapshot) if self.snapshot else None
        return latest["checkpoint_dir_name"] if latest else ""


def find_resume_point(store: RunStore) -> ResumePoint:
    """Find the newest commit of the valid lineage with a whole checkpoint, and drop what is damaged."""
    repairs: list[str] = []
    for attempt, sequence in lineage(store):
        name = f"{attempt:04d}-{sequence:06d}"
        record = decode(CommitRecord, store.read(layout.commit_name(attempt, sequence)))
        snapshot = parse_snapshot(json.dumps(record.snapshot)) if record is not None else None
        if record is None or snapshot is None:
            repairs.append(f"commit {name} is torn and was passed over")
            continue
        damaged = {}
        for checkpoint in checkpoint_names(snapshot):
            damage = _damage(store, checkpoint, record.manifest.get(checkpoint))
            if damage:
                damaged[checkpoint] = damage
        repairs += [f"checkpoint {checkpoint} was dropped: {why}" for checkpoint, why in damaged.items()]
        usable = without_checkpoints(snapshot, damaged)
        if usable is not None:
            return ResumePoint((attempt, sequence), usable, repairs)
        repairs.append(f"commit {name} has no whole checkpoint left and was passed over")
    return ResumePoint(None, None, repairs)


def restore_snapshot(store: RunStore, point: ResumePoint) -> list[str]:
    """Put the resume point back as Ray's file.

    Returns:
        What was wrong with Ray's file, in words; empty if it was what it should be.
    """
    current = store.read(layout.SNAPSHOT)
    if point.snapshot is None:
        store.delete(layout.SNAPSHOT)
        return [] if current is None else ["Ray's snapshot belongs to no commit and was removed"]
    if current is not None and parse_snapshot(current) == point.snapshot:
        return []
    store.replace(layout.SNAPSHOT, json.dumps(point.snapshot).encode())
    if point.repairs:
        return []
    if current is None:
        return ["Ray's snapshot was missing and was written anew from the newest commit"]
    if parse_snapshot(current) is None:
        return ["Ray's snapshot was torn and was written anew from the newest commit"]
    return ["Ray's snapshot differed from the newest commit and was written anew from it"]


def adopt_snapshot(store: RunStore) -> bool:
    """Make the state of a run that raw Ray Train has written the first commit.

    Returns:
        Whether there was anything to adopt: a whole snapshot, with commits of nobody beside it.
    """
    snapshot = parse_snapshot(store.read(layout.SNAPSHOT))
    if snapshot is None or store.names(layout.COMMITS):
        return False
    sizes = {name: store.file_sizes(name) for name in checkpoint_names(snapshot)}
    usable = without_checkpoints(snapshot, [name for name, files in sizes.items() if not files])
    if usable is None:
        return False
    manifest = {name: sizes[name] or {} for name in checkpoint_names(usable)}
    record = CommitRecord(attempt=0, sequence=0, snapshot=usable, manifest=manifest)
    return store.create(layout.commit_name(0, 0), encode(record))


def seed_run(store: RunStore, checkpoint_name: str, metrics: dict[str, Any], ray_version: str) -> bool:
    """Make a checkpoint that was copied into a new run its first commit; False if it has one already."""
    snapshot = seed_snapshot(checkpoint_name, metrics, ray_version)
    manifest = {checkpoint_name: store.file_sizes(checkpoint_name) or {}}
    record = CommitRecord(attempt=0, sequence=0, snapshot=snapshot, manifest=manifest)
    return store.create(layout.commit_name(0, 0), encode(record))


def remove_interrupted_uploads(store: RunStore) -> list[str]:
    """Remove checkpoint folders whose upload began and that no commit names. No worker may be running.

    Returns:
        The names of the folders.
    """
    committed: set[str] = set()
    for attempt, sequence in lineage(store):
        record = decode(CommitRecord, store.read(layout.commit_name(attempt, sequence)))
        if record is not None:
            committed = set(record.manifest)
            break
    current = parse_snapshot(store.read(layout.SNAPSHOT))
    # The restored snapshot may name fewer checkpoints than the commit it came from.
    needed = set(checkpoint_names(current)) if current is not None else committed
    removed = []
    for mark in store.names(layout.UPLOADS):
        name = unquote_mark(mark)
        if name not in needed:
            store.delete_folder(name)
            removed.append(name)
        store.delete(mark_name(name))
    return removed


def _damage(store: RunStore, checkpoint: str, manifest: dict[str, int] | None) -> str:
    """Say what is wrong with a checkpoint's files, or nothing."""
    files = store.file_sizes(checkpoint)
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
