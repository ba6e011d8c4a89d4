"""Checkpoints between a worker's disk and the run directory.

Uses ``ray.train.v2._internal``: Ray Train writes a checkpoint through its ``StorageContext`` alone, which copies by
streams of 64 MiB a file, repeats nothing, and cannot be configured.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyarrow import fs
from ray.air._internal.filelock import TempFileLock
from ray.train import Checkpoint
from ray.train.v2._internal.execution.context import TrainContext
from ray.train.v2._internal.execution.storage import StorageContext

from prefect_elastic_train.core.checkpoint_names import physical_name
from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.core.storage_settings import LocalStorageSettings, StorageSettings
from prefect_elastic_train.elastic.loop_state import note_opened
from prefect_elastic_train.elastic.run_filesystem import RunFilesystem, StoreFilesystem
from prefect_elastic_train.storage.opening import open_storage
from prefect_elastic_train.storage.store import LocalRunStore, RunStore


def run_filesystem(store: RunStore, attempt: int) -> fs.PyFileSystem:
    """Return the filesystem that Ray is handed for one attempt on a run directory."""
    return fs.PyFileSystem(RunFilesystem(store, attempt))


class RunStorageContext(StorageContext):  # type: ignore[misc]
    """Ray's, which writes checkpoints by the run filesystem: file by file in parallel, with retries.

    Args:
        original: The one that Ray has made.
    """

    def __init__(self, original: StorageContext) -> None:
        self.__dict__.update(original.__dict__)

    def persist_current_checkpoint(self, checkpoint: Checkpoint, checkpoint_dir_name: str) -> Checkpoint:
        """Write a checkpoint into the run directory.

        Raises:
            FileNotFoundError: There is no such checkpoint on this machine's disk.
            FencedOffError: Another attempt has taken over.
            StorageFaultError: The storage refuses, or was away for too long.
        """
        handler = getattr(self.storage_filesystem, "handler", None)
        if not isinstance(handler, RunFilesystem) or not isinstance(checkpoint.filesystem, fs.LocalFileSystem):
            return super().persist_current_checkpoint(checkpoint, checkpoint_dir_name)
        if not os.path.exists(checkpoint.path):
            raise FileNotFoundError(f"the checkpoint to report is not there: {checkpoint.path}")
        path = self.build_checkpoint_path_from_name(checkpoint_dir_name)
        handler.create_dir(path, recursive=True)
        handler.upload_folder(checkpoint.path, path)
        return RunCheckpoint(path, self.storage_filesystem)


def name_folders(context: TrainContext, attempt: int, group: int) -> None:
    """Have the checkpoints of a worker written into folders whose names are never used again.

    Rank 0's name is that of all ranks, for uploads in the foreground, in the background and by the loop's own function.

    Args:
        context: Of the worker.
        attempt: Its number.
        group: How many worker groups the attempt has started.
    """
    agree, reports = context._sync_checkpoint_dir_name_across_ranks, itertools.count(1)

    def agree_on_folder(name: str | None = None) -> str:
        name = name or context.storage_context.make_default_checkpoint_dir_name()
        if ".." in name.split("/"):
            raise ConfigurationError(f"checkpoint_dir_name={name!r} is refused: give one without '..'")
        folder: str = agree(physical_name(name.rstrip("/"), attempt, group, next(reports)))
        return folder

    context._sync_checkpoint_dir_name_across_ranks = agree_on_folder


class RunCheckpoint(Checkpoint):  # type: ignore[misc]
    """A checkpoint in a storage: read where it is on a disk, or fetched once for all readers on a machine.

    As Ray's, whose locks and temporary folder it uses, but that the files come several at a time and with retries, and
    that a copy is there whole or not at all.
    """

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copy the checkpoint to a directory, by default one that the readers on a machine share, and return that."""
        handler = getattr(self.filesystem, "handler", None)
        if not isinstance(handler, StoreFilesystem):
            return str(super().to_directory(path))
        name = handler.name(self.path)
        if path is not None:
            handler.store.download(name, os.path.normpath(os.path.expanduser(os.fspath(path))))
            return os.fspath(path)
        shared = self._get_temporary_checkpoint_dir()
        with TempFileLock(shared):
            if not os.path.isdir(shared):
                partial = f"{shared}.partial"
                shutil.rmtree(partial, ignore_errors=True)  # of one that died while it fetched it
                os.makedirs(partial, mode=0o700)
                handler.store.download(name, partial)
                os.rename(partial, shared)
        return str(shared)

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        """Yield the checkpoint as a directory to read from, which is gone after the ``with`` unless it is its own."""
        store = getattr(getattr(self.filesystem, "handler", None), "store", None)
        if isinstance(store, LocalRunStore) and os.path.isdir(self.path):
            yield self.path
            return
        with super().as_directory() as folder:
            yield folder


class _OfferedCheckpoint(RunCheckpoint):
    """The checkpoint that a loop may start from, which notes whether the loop looks into it."""

    def __getattribute__(self, name: str) -> Any:
        # Whatever reads a checkpoint asks for its path; whoever gets a copy may read that.
        if name in ("path", "__reduce_ex__"):
            note_opened()
        return super().__getattribute__(name)


def readable(checkpoint: Checkpoint | None) -> Checkpoint | None:
    """Return the checkpoint that a worker starts from in the form that its loop reads best."""
    handler = getattr(checkpoint.filesystem, "handler", None) if checkpoint is not None else None
    if checkpoint is None or not isinstance(handler, RunFilesystem):
        return checkpoint
    is_here = isinstance(handler.store, LocalRunStore) and os.path.isdir(checkpoint.path)
    found = _OfferedCheckpoint(checkpoint.path, fs.LocalFileSystem() if is_here else checkpoint.filesystem)
    found._uuid = checkpoint._uuid  # one for all ranks, by which those of a machine share what they fetch
    return found


def open_checkpoint(uri: str, settings: StorageSettings) -> Checkpoint:
    """Return a checkpoint of a run to read, from wherever its storage can be reached.

    Args:
        uri: Of the checkpoint.
        settings: Of the storage that it is in.
    """
    if isinstance(settings, LocalStorageSettings):
        return Checkpoint(uri)
    path = uri.partition("://")[2].rstrip("/")
    return RunCheckpoint(path, fs.PyFileSystem(StoreFilesystem(open_storage(settings).folder(path))))
