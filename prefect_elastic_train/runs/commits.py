"""Commits: what a run has durably reached, written by the attempt that holds the fence.

The protocol, with ``list`` and exclusive ``create`` as its only primitives:

- A holder writes its commit, then looks at the attempts, and only then deletes what the commit no longer names.
- A successor creates its attempt, then looks at the commits again, and begins anew if a newer one has appeared.

Whoever acts second sees the other. So a checkpoint that a living lineage needs is never deleted, and a commit
that was written after the successor's second look belongs to an older attempt and counts for nothing.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prefect_elastic_train.core.checkpoint_names import written_by
from prefect_elastic_train.core.outcomes import ElasticTrainError, StorageFaultError
from prefect_elastic_train.core.records import AttemptRecord, CommitRecord, decode, encode
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.layout import RunReader, RunView
from prefect_elastic_train.runs.snapshots import checkpoint_names, fits_together, parse_snapshot, without_checkpoints
from prefect_elastic_train.storage.store import RunStore

#: Commits of one attempt that are kept; older ones only matter if the newest are damaged.
_COMMITS_KEPT = 5
#: How long this machine's view of a shared mount may be behind; NFS keeps listings for up to a minute.
_SEEN_SECONDS = 75.0


class FencedOffError(ElasticTrainError):
    """Another attempt has taken the run over; this one must stop and leave the run directory alone."""


def all_attempts(store: RunReader) -> list[int]:
    """Return the numbers of all attempts that ever began, ascending."""
    found = (layout.parse_numbers(name) for name in store.names(layout.ATTEMPTS))
    return sorted(numbers[0] for numbers in found if len(numbers) == 1)


def newest_attempt(store: RunReader) -> int:
    """Return the number of the attempt that holds the fence, 0 if none ever began."""
    return max(all_attempts(store), default=0)


def read_attempt(store: RunReader, attempt: int) -> AttemptRecord | None:
    """Return the record of an attempt; None if there is none, or a torn one."""
    return decode(AttemptRecord, store.read(layout.attempt_name(attempt)))


def check_fence(store: RunReader, attempt: int) -> None:
    """Return if the attempt still holds the fence.

    Raises:
        FencedOffError: A later attempt has begun.
        StorageFaultError: This machine does not see that the attempt has begun.
    """
    newest = newest_attempt(store)
    if newest < attempt and not _is_seen(store, attempt):
        raise StorageFaultError(
            f"{store.uri}: {socket.gethostname()} does not see attempt {attempt} of this run, which another machine "
            "has begun there. To go on, mount the directory on all nodes of the cluster, or use an object store",
            kind="not shared",
            permanent=True,
        )
    if newest > attempt:
        record = read_attempt(store, newest)
        holder = f" for {record.owner.describe()}" if record else ""
        raise FencedOffError(
            f"attempt {attempt} of {store.uri} was taken over by attempt {newest}{holder}; it stops here"
        )


def _is_seen(store: RunReader, attempt: int) -> bool:
    """Whether an attempt's record is there; a mount may show an old listing for some time."""
    deadline = time.monotonic() + _SEEN_SECONDS
    while store.read(layout.attempt_name(attempt)) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(min(1.0, _SEEN_SECONDS / 10))
    return True


def all_commits(store: RunReader) -> list[tuple[int, int]]:
    """Return attempt and sequence number of all commits, ascending."""
    found = (layout.parse_numbers(name) for name in store.names(layout.COMMITS))
    return sorted((numbers[0], numbers[1]) for numbers in found if len(numbers) == 2)


def lineage(store: RunReader, before: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield the commits that count, newest first.

    These are the commits of the newest attempt (below a number, if that is given), then those up to its base, and so
    on. What an attempt committed after its successor had confirmed its base is passed over.
    """
    commits = [commit for commit in all_commits(store) if before is None or commit[0] < before]
    # An attempt's record may have been removed by hand; its commits still tell that it was there.
    attempts = {n for n in all_attempts(store) if before is None or n < before} | {n for n, _ in commits}
    upto: tuple[int, int] | None = None
    for attempt in sorted(attempts, reverse=True):
        if upto is not None and attempt > upto[0]:
            continue
        yield from (c for c in reversed(commits) if c[0] == attempt and (upto is None or c <= upto))
        record = read_attempt(store, attempt)
        if record is not None and record.confirmed:
            if record.base is None:
                return
            upto = record.base


@dataclass(frozen=True)
class ReadCommit:
    """A commit that counts, and what of it can be used."""

    number: tuple[int, int]
    #: None if it is torn.
    record: CommitRecord | None
    #: Checkpoints that are not as they were committed and were not given up before, each with what is wrong.
    damaged: dict[str, str]
    #: Without the checkpoints that cannot be used; None if none is left.
    usable: CommitRecord | None


def newest_commit(store: RunReader, attempt: int | None = None, *, whole: bool = False) -> CommitRecord | None:
    """Newest commit that counts and has a checkpoint left, without those that were dropped since; or None.

    See :func:`read_lineage` for the arguments.
    """
    return next((read.usable for read in read_lineage(store, attempt, whole=whole) if read.usable is not None), None)


def read_lineage(store: RunReader, attempt: int | None = None, *, whole: bool = False) -> Iterator[ReadCommit]:
    """Yield the commits that count, newest first. Whoever wants to know what is left of one asks here.

    Args:
        store: The run directory.
        attempt: What this attempt goes on from. Ray's file is no answer to that: a holder that was stopped for a
            while may mirror its last commit there after it was fenced off. Default: the newest attempt.
        whole: Tell also which checkpoints are damaged; else nobody looks at their files.
    """
    view = store if isinstance(store, RunView) else RunView(store)
    attempts = [number for number in all_attempts(view) if attempt is None or number <= attempt]
    lost: set[str] = set()
    for number in lineage(view, None if attempt is None else attempt + 1):
        while attempts and attempts[-1] > number[0]:
            later = read_attempt(view, attempts.pop())
            lost.update(later.dropped if later is not None else [])
        record = read_commit(view, number)
        if record is None:
            yield ReadCommit(number, None, {}, None)
            continue
        names = [name for name in checkpoint_names(record.snapshot) if whole and name not in lost]
        damage = {name: damage_of(view, name, record.manifest.get(name, {})) for name in names}
        damaged = {name: why for name, why in damage.items() if why}
        lost.update(damaged)
        snapshot = without_checkpoints(record.snapshot, lost)
        manifest = {name: files for name, files in record.manifest.items() if name not in lost}
        update = {"snapshot": snapshot, "manifest": manifest}
        yield ReadCommit(number, record, damaged, record.model_copy(update=update) if snapshot is not None else None)


def read_commit(store: RunReader, number: tuple[int, int]) -> CommitRecord | None:
    """Return a commit; None if it is torn or another's."""
    record = decode(CommitRecord, store.read(layout.commit_name(*number)))
    is_own = record is not None and (record.attempt, record.sequence) == number and fits_together(record.snapshot)
    return record if is_own else None


def damage_of(store: RunReader, checkpoint: str, manifest: dict[str, int]) -> str:
    """What is wrong with a checkpoint's files, of which the manifest has path and size; empty for nothing."""
    files = store.file_sizes(checkpoint) or {}
    missing = sorted(manifest.keys() - files.keys())
    if missing:
        return f"{len(missing)} of {len(manifest)} files are missing, first {missing[0]}"
    for name, size in sorted(manifest.items()):
        if files[name] != size:
            return f"{name} has {files[name]} bytes instead of {size}"
    return ""


def commit_label(commit: tuple[int, int] | None) -> str:
    """Name of a commit, as its object has it; empty for none."""
    return "" if commit is None else f"{commit[0]:04d}-{commit[1]:06d}"


class CommitLog:
    """Writes the commits of one attempt. Lives in the process of Ray Train's controller."""

    def __init__(self, store: RunStore, attempt: int) -> None:
        self._store = store
        self._attempt = attempt
        self._last: CommitRecord | None = None
        self._lock = threading.Lock()

    def commit(self, data: bytes) -> CommitRecord:
        """Make Ray's snapshot, as Ray writes it, durable together with the files that its checkpoints consist of.

        Raises:
            FencedOffError: Another attempt has taken over. If the commit was already written, it counts for
                nothing; Ray's file is untouched.
            ElasticTrainError: The snapshot is torn, or a checkpoint that it names is not there.
        """
        snapshot = parse_snapshot(data)
        if snapshot is None:
            raise ElasticTrainError(f"Ray Train wrote a torn snapshot of {len(data)} bytes; not committed")
        with self._lock:
            check_fence(self._store, self._attempt)
            last = self._last or newest_commit(self._store, self._attempt)
            manifest = self._list_files(snapshot, last.manifest if last is not None else {})
            own = [sequence for attempt, sequence in all_commits(self._store) if attempt == self._attempt]
            record = CommitRecord(
                attempt=self._attempt, sequence=max(own, default=0), snapshot=snapshot, manifest=manifest
            )
            is_new = False
            while not is_new:  # a listing may be behind
                record = record.model_copy(update={"sequence": record.sequence + 1})
                is_new = self._store.create(layout.commit_name(self._attempt, record.sequence), encode(record))
            check_fence(self._store, self._attempt)
            self._store.replace(layout.SNAPSHOT, data)
            self._last = record
            for sequence in own[: 1 - _COMMITS_KEPT]:
                self._store.delete(layout.commit_name(self._attempt, sequence))
        return record

    def _list_files(self, snapshot: dict[str, Any], known: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
        """Return the manifest of all checkpoints, of earlier ones as the previous commit had it."""
        manifest = {}
        names = checkpoint_names(snapshot)
        for name in names:
            # A loop that places its checkpoints itself may have written over the newest.
            is_final = name != names[-1] or written_by(name) is not None
            files = known.get(name) if is_final else None
            files = self._store.file_sizes(name) if files is None else files
            if files is None:
                raise ElasticTrainError(f"checkpoint {name} is not in {self._store.uri}; not committed")
            manifest[name] = files
        return manifest
