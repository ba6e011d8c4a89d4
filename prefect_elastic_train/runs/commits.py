"""Commits: what a run has durably reached, written by the attempt that holds the fence.

The protocol, with ``list`` and exclusive ``create`` as its only primitives:

- A holder writes its commit, then looks at the attempts, and only then deletes what the commit no longer names.
- A successor creates its attempt, then looks at the commits again, and begins anew if a newer one has appeared.

Whoever acts second sees the other. So a checkpoint that a living lineage needs is never deleted, and a commit
that was written after the successor's second look belongs to an older attempt and counts for nothing.
"""

from __future__ import annotations

import socket
import time
from itertools import chain
from typing import Any

from prefect_elastic_train.core.checkpoint_names import written_by
from prefect_elastic_train.core.outcomes import ElasticTrainError, StorageFaultError
from prefect_elastic_train.core.records import CommitRecord, encode
from prefect_elastic_train.loop.parts import missing_parts
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.model import RunDirectory, newest_attempt
from prefect_elastic_train.runs.snapshots import checkpoint_names, parse_snapshot
from prefect_elastic_train.storage.store import RunStore

_COMMITS_KEPT = 5  # commits of one attempt that are kept; older ones only matter if the newest are damaged
#: How long this machine's view of a shared mount may be behind; NFS keeps listings for up to a minute.
_SEEN_SECONDS = 75.0


class FencedOffError(ElasticTrainError):
    """Another attempt has taken the run over; this one must stop and leave the run directory alone."""


def check_fence(store: RunStore, attempt: int) -> None:
    """Return if the attempt still holds the fence; fail if a later one has begun, or this one is not seen."""
    newest = newest_attempt(store)
    if newest < attempt and not _is_seen(store, attempt):
        raise StorageFaultError(
            f"{store.uri}: {socket.gethostname()} does not see attempt {attempt} of this run, which another machine "
            "has begun there. To go on, mount the directory on all nodes of the cluster, or use an object store",
            kind="not shared",
            permanent=True,
        )
    if newest > attempt:
        record = RunDirectory(store).attempt_record(newest)
        holder = f" for {record.owner.describe()}" if record else ""
        raise FencedOffError(
            f"attempt {attempt} of {store.uri} was taken over by attempt {newest}{holder}; it stops here"
        )


def _is_seen(store: RunStore, attempt: int) -> bool:
    """Whether an attempt's record is there; a mount may show an old listing for some time."""
    deadline = time.monotonic() + _SEEN_SECONDS
    while store.read(layout.attempt_name(attempt)) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(min(1.0, _SEEN_SECONDS / 10))
    return True


def trained_seconds() -> float:
    """Return for how long the worker groups of this attempt have trained: the controller puts its own here."""
    return 0.0


class CommitLog:
    """Writes the commits of one attempt. Lives in the process of Ray Train's controller."""

    def __init__(self, store: RunStore, attempt: int) -> None:
        self._store = store
        self._attempt = attempt
        self._manifest: dict[str, dict[str, int]] = {}  # of all checkpoints that are kept
        self._full = 0  # sequence of the last full commit, which lists them all
        self._own: dict[int, int] = {}  # by kept commit, the full one that it builds on, or itself

    def commit(self, data: bytes, is_full: bool = True) -> CommitRecord:
        """Make Ray's snapshot, as Ray writes it, durable together with the files that its checkpoints consist of.

        An incremental commit lists only the checkpoints after those of the last full one, all of which are kept.

        Raises:
            FencedOffError: Another attempt has taken over; a commit that was already written counts for nothing.
            ElasticTrainError: The snapshot is torn, or a checkpoint that it names is not there or incomplete.
        """
        snapshot = parse_snapshot(data)
        if snapshot is None:
            raise ElasticTrainError(f"Ray Train wrote a torn snapshot of {len(data)} bytes; not committed")
        check_fence(self._store, self._attempt)
        if not self._full:
            run = RunDirectory(self._store, self._attempt)
            newest = run.newest_commit
            self._manifest = newest.manifest if newest is not None else {}
            self._own = {sequence: sequence for attempt, sequence in run.commits if attempt == self._attempt}
        manifest = self._list_files(snapshot)
        record = CommitRecord(
            attempt=self._attempt,
            sequence=max(self._own, default=0) + 1,
            trained=trained_seconds(),
            snapshot=snapshot if is_full else {"added": {**snapshot, "since": self._full}},
            manifest=manifest,
        )
        while not self._store.create(layout.commit_name(self._attempt, record.sequence), encode(record)):
            record = record.model_copy(update={"sequence": record.sequence + 1})
        check_fence(self._store, self._attempt)
        if is_full:
            self._store.replace(layout.SNAPSHOT, data)
            self._full, self._manifest = record.sequence, {}
        self._manifest |= manifest
        self._own[record.sequence] = self._full
        for sequence in self._own.keys() - chain(*[*self._own.items()][-_COMMITS_KEPT:]):
            self._store.delete(layout.commit_name(self._attempt, sequence))
            del self._own[sequence]
        return record

    def _list_files(self, snapshot: dict[str, Any]) -> dict[str, dict[str, int]]:
        """Return the manifest of the checkpoints; earlier ones are taken from an earlier commit."""
        manifest = {}
        names = checkpoint_names(snapshot)
        for name in names:
            # A loop that places its checkpoints itself may have written over the newest.
            is_final = name != names[-1] or written_by(name) is not None
            known = self._manifest.get(name) if is_final else None
            files = known or self._store.file_sizes(name)
            deadline = time.monotonic() + _SEEN_SECONDS
            while files is not None and missing_parts(files) and time.monotonic() < deadline:
                time.sleep(min(1.0, _SEEN_SECONDS / 10))
                files = self._store.file_sizes(name)
            if files is None:
                raise ElasticTrainError(f"checkpoint {name} is not in {self._store.uri}; not committed")
            if missing := missing_parts(files):
                raise ElasticTrainError(
                    f"checkpoint {name} in {self._store.uri} is incomplete, not committed: {missing}"
                )
            manifest[name] = files
        return manifest
