"""Writes of the attempt that holds the fence: commits, Ray's snapshot file, and the removal of what no commit needs.

The protocol of commits uses only ``list`` and exclusive ``create``:

- The holder writes its commit, then lists the attempts, and only then deletes checkpoints that are no longer kept.
- A successor creates its attempt, then lists the commits again, and starts over if there is a newer one.

The second of the two sees the first. So no checkpoint is deleted that the lineage needs, and a commit that is written
after the successor listed the commits again belongs to an older attempt and does not count.
"""

import json
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from prefect_elastic_train.core.checkpoint_names import written_by
from prefect_elastic_train.core.outcomes import AttemptFailedError, ElasticTrainError, StorageFaultError
from prefect_elastic_train.core.records import CommitRecord, encode
from prefect_elastic_train.loop.rank_files import missing_rank_files_message
from prefect_elastic_train.storage.store import RunStore

from . import layout
from .run_directory import RunDirectory, newest_attempt_number
from .snapshots import checkpoint_names, parse_snapshot, without_checkpoints

_COMMITS_KEPT = 5  # commits of one attempt that are kept; older ones only matter if the newest are damaged
#: Time after which this machine sees what another one wrote to a shared mount; NFS caches listings for up to a minute.
_SEEN_SECONDS = 75.0


class FencedOffError(ElasticTrainError):
    """A later attempt has taken over the run.

    The attempt that gets this error must stop and not write the run directory.
    """


def check_fence(store: RunStore, attempt: int) -> None:
    """Check that an attempt still holds the fence of its run.

    Raises:
        FencedOffError: A later attempt has begun.
        StorageFaultError: This machine does not see the attempt in the storage, which is not shared between machines.
    """
    newest = newest_attempt_number(store)
    if newest < attempt and not any(store.read(layout.attempt_name(attempt)) is not None for _ in _polls()):
        raise StorageFaultError(
            f"{store.uri}: {socket.gethostname()} does not see attempt {attempt} of this run, which another machine "
            "has begun there. To go on, mount the directory on all nodes of the cluster, or use an object store",
            kind="not shared",
            permanent=True,
        )
    if newest > attempt:
        raise FencedOffError(f"attempt {attempt} of {store.uri} was taken over by attempt {newest}; it stops here")


def _polls() -> Iterator[None]:
    """Yield at once, then about once a second, until a shared mount has had time to show another machine's files."""
    deadline = time.monotonic() + _SEEN_SECONDS
    yield
    while time.monotonic() < deadline:
        time.sleep(_SEEN_SECONDS / 75)
        yield


class CommitLog:
    """Writes the commits of one attempt, in the process of Ray Train's controller.

    Attributes:
        trained_seconds: Returns for how long the worker groups of the attempt have trained.
        newest: The newest commit that was read or written; None without one. An incremental commit that was written
            lists only the new checkpoints.
    """

    newest: CommitRecord | None = None
    _full_sequence = 0  # sequence number of the last full commit, which lists all checkpoints that are kept

    def __init__(self, store: RunStore, attempt: int) -> None:
        self.trained_seconds: Callable[[], float] = lambda: 0.0
        self._store = store
        self._attempt = attempt
        self._run = RunDirectory(store, attempt)  # a cached view, replaced after each commit
        self._manifest: dict[str, dict[str, int]] = {}  # file sizes of all checkpoints that are kept
        self._own: dict[int, int] = {}  # kept commits: sequence number, and that of the full commit that it builds on

    def newest_commit(self) -> CommitRecord | None:
        """Return the newest commit of the lineage up to this attempt; None without one.

        It is read from the storage once, until this object writes another one.
        """
        newest = self._run.newest_commit
        if not self._own:  # a later read does not show which full commit each commit builds on
            self._own = {sequence: sequence for attempt, sequence in self._run.commit_ids if attempt == self._attempt}
        if newest:
            self._manifest = newest.manifest
            self.newest = newest
        return newest

    def commit(self, data: bytes, is_full: bool = True) -> None:
        """Write a commit: Ray Train's snapshot, as Ray writes it, with the files of its checkpoints.

        An incremental commit lists only the checkpoints after those of the last full one, all of which are kept. A full
        commit also replaces Ray's snapshot file. Old commits of the attempt are deleted.

        Raises:
            FencedOffError: Another attempt has replaced this one; a commit that was already written does not count.
            ElasticTrainError: The snapshot is torn, or a checkpoint in it is missing or incomplete.
        """
        snapshot = parse_snapshot(data)
        if not snapshot:
            raise ElasticTrainError(f"Ray Train wrote a torn snapshot of {len(data)} bytes; not committed")
        check_fence(self._store, self._attempt)
        if not self._own:
            self.newest_commit()
        record = CommitRecord(
            attempt=self._attempt,
            sequence=max(self._own, default=0) + 1,
            trained=self.trained_seconds(),
            since=0 if is_full else self._full_sequence,
            snapshot=snapshot,
            manifest=self._list_files(snapshot),
        )
        self._run = RunDirectory(self._store, self._attempt)
        while not self._store.create(layout.commit_name(record.id), encode(record)):
            record = record.model_copy(update={"sequence": record.sequence + 1})
        check_fence(self._store, self._attempt)
        if is_full:
            self._store.replace(layout.SNAPSHOT, data)
            self._full_sequence = record.sequence
            self._manifest = {}
        self._manifest |= record.manifest
        self._own[record.sequence] = self._full_sequence
        kept = [*self._own.items()][-_COMMITS_KEPT:]
        for sequence in self._own.keys() - {sequence for pair in kept for sequence in pair}:
            self._store.delete(layout.commit_name((self._attempt, sequence)))
            del self._own[sequence]
        self.newest = record

    def _list_files(self, snapshot: dict[str, Any]) -> dict[str, dict[str, int]]:
        """Return the manifest of the checkpoints in a snapshot: path and size of each file, by checkpoint folder.

        The storage is listed only for checkpoints that are new or may have been rewritten.
        """
        manifest = {}
        names = checkpoint_names(snapshot)
        for name in names:
            # If the loop manages its checkpoints itself, the newest may have been rewritten under the same name.
            is_final = name != names[-1] or written_by(name) >= 0
            manifest[name] = (is_final and self._manifest.get(name)) or self._list_checkpoint(name)
        return manifest

    def _list_checkpoint(self, name: str) -> dict[str, int]:
        """Return path and size in bytes of each file of a checkpoint; raise an error if it is missing or incomplete."""
        for _ in _polls():
            files = self._store.file_sizes(name)
            if files is None:
                raise ElasticTrainError(f"checkpoint {name} is not in {self._store.uri}; not committed")
            missing = missing_rank_files_message(files)
            if not missing:
                return files
        raise ElasticTrainError(f"checkpoint {name} in {self._store.uri} is incomplete, not committed: {missing}")


def restore_snapshot(store: RunStore, commit: CommitRecord | None) -> None:
    """Write the snapshot of a commit into Ray Train's snapshot file; without a commit, delete the file."""
    if commit:
        store.replace(layout.SNAPSHOT, json.dumps(commit.snapshot).encode())
    else:
        store.delete(layout.SNAPSHOT)


def adopt_snapshot(store: RunStore) -> list[str]:
    """Make the first commit of a run that Ray Train wrote without this package, from Ray's snapshot file.

    Returns:
        Messages for the user, also about checkpoints that are missing.

    Raises:
        AttemptFailedError: The snapshot is torn, or names no checkpoint that still exists; outcome ``invalid``.
    """
    snapshot = RunDirectory(store).mirror
    names = checkpoint_names(snapshot)
    manifest = {name: files for name in names if (files := store.file_sizes(name))}
    missing = [name for name in names if name not in manifest]
    usable = without_checkpoints(snapshot, missing) if snapshot else None
    if not usable:
        raise AttemptFailedError(
            f"{store.uri} holds a run that another program wrote with Ray Train, and its {layout.SNAPSHOT} is torn or "
            "names no checkpoint that still exists; remove that file to start from scratch, or give another run_name"
        )
    write_first_commit(store, usable, manifest)
    notes = [f"checkpoint {name} was dropped: its folder is missing or empty" for name in missing]
    return [f"the run was written by Ray Train alone; {len(manifest)} of its checkpoints were adopted", *notes]


def write_first_commit(store: RunStore, snapshot: dict[str, Any], manifest: dict[str, dict[str, int]]) -> None:
    """Write the first commit of a run from a snapshot and the sizes of its checkpoints' files.

    An existing first commit is not changed.
    """
    record = CommitRecord(attempt=0, sequence=0, snapshot=snapshot, manifest=manifest)
    store.create(layout.commit_name(record.id), encode(record))


def remove_leftovers(store: RunStore, attempt: int) -> list[str]:
    """Delete the checkpoint folders of a run that no commit needs, except those of attempts later than ``attempt``.

    Return the names of the deleted folders. Raise a FencedOffError if the attempt does not hold the fence.
    """
    check = partial(check_fence, store, attempt)
    check()
    leftovers = list(RunDirectory(store, attempt).leftovers)
    for folder in leftovers:
        store.delete_folder(folder, check)
    return leftovers
