"""Checkpoints between a worker's disk and the run directory.

Uses ``ray.train.v2._internal``: Ray Train writes a checkpoint through its ``StorageContext`` alone, which copies by
streams of 64 MiB a file, repeats nothing, and cannot be configured.
"""

from __future__ import annotations

import fcntl
import glob
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyarrow import fs
from ray.train import Checkpoint
from ray.train.v2._internal.execution.context import TrainContext
from ray.train.v2._internal.execution.storage import StorageContext

from prefect_elastic_train.core.checkpoint_names import physical_name
from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.core.storage_settings import LocalStorageSettings, StorageSettings
from prefect_elastic_train.elastic.local_filesystem import LocalRunFilesystem
from prefect_elastic_train.elastic.loop_state import note_opened
from prefect_elastic_train.elastic.object_filesystem import ObjectFilesystem, ObjectRunFilesystem
from prefect_elastic_train.elastic.run_filesystem import RunFilesystem
from prefect_elastic_train.storage.object_store import ObjectRunStore
from prefect_elastic_train.storage.objects import ObjectClient
from prefect_elastic_train.storage.retrying_store import RetryingStore
from prefect_elastic_train.storage.store import RunStore

#: How long a reader waits for another one on its machine to fetch the checkpoint, before it does so itself.
_SHARE_SECONDS = 3600.0


def run_filesystem(store: RunStore, attempt: int) -> fs.PyFileSystem:
    """Return the filesystem that Ray is handed for one attempt on a run directory."""
    inner = store.inner if isinstance(store, RetryingStore) else store
    filesystem_type = ObjectRunFilesystem if isinstance(inner, ObjectRunStore) else LocalRunFilesystem
    return fs.PyFileSystem(filesystem_type(store, attempt))


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


class _NotedCheckpoint(Checkpoint):  # type: ignore[misc]
    """A checkpoint that notes, once it is offered to a loop, whether that looks into it."""

    is_offered = False

    @property
    def path(self) -> str:
        """Where it is; whatever reads a checkpoint asks for that."""
        if self.is_offered:
            note_opened()
        return self._path

    @path.setter
    def path(self, path: str) -> None:
        self._path = path

    def __getstate__(self) -> dict[str, Any]:
        """Whoever gets a copy may read that."""
        if self.is_offered:
            note_opened()
        return {**self.__dict__, "is_offered": False}


class RunCheckpoint(_NotedCheckpoint):
    """A checkpoint in a run directory: read where it is, or fetched once for all readers on a machine.

    Ray fetches it from any filesystem but pyarrow's own local one into a folder that the ranks of a machine share,
    and one that is done may delete it under another that begins.
    """

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copy the checkpoint to a directory, by default a new temporary one, and give that."""
        target = os.fspath(path) if path is not None else tempfile.mkdtemp(prefix="checkpoint-")
        self._fetch(os.path.normpath(os.path.expanduser(target)))
        return target

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        """Give the checkpoint as a directory to read from, which is gone after the ``with`` unless it is its own."""
        handler = getattr(self.filesystem, "handler", None)
        if isinstance(handler, LocalRunFilesystem) and os.path.isdir(self.path):
            yield self.path
            return
        with _shared_folder(self._uuid.hex, self._fetch) as folder:
            yield folder

    def _fetch(self, target: str) -> None:
        handler = getattr(self.filesystem, "handler", None)
        if isinstance(handler, ObjectRunFilesystem | ObjectFilesystem):
            handler.download_folder(self.path, target)
        else:
            shutil.copytree(self.path, target, dirs_exist_ok=True)


def readable(checkpoint: Checkpoint | None) -> Checkpoint | None:
    """Give the checkpoint that a worker starts from in the form that its loop reads best."""
    handler = getattr(checkpoint.filesystem, "handler", None) if checkpoint is not None else None
    if checkpoint is None or not isinstance(handler, RunFilesystem):
        return checkpoint
    if isinstance(handler, LocalRunFilesystem):
        if not os.path.isdir(checkpoint.path):
            return checkpoint
        found = _NotedCheckpoint(checkpoint.path, fs.LocalFileSystem())
    else:
        found = RunCheckpoint(checkpoint.path, checkpoint.filesystem)
        found._uuid = checkpoint._uuid  # one for all ranks, by which those of a machine share what they fetch
    found.is_offered = True
    return found


def open_checkpoint(uri: str, settings: StorageSettings) -> Checkpoint:
    """Give a checkpoint of a run to read, from wherever its storage can be reached.

    Args:
        uri: Of the checkpoint.
        settings: Of the storage that it is in.
    """
    if isinstance(settings, LocalStorageSettings):
        return Checkpoint(uri)
    filesystem = fs.PyFileSystem(ObjectFilesystem(ObjectClient(settings)))
    return RunCheckpoint(uri.partition("://")[2], filesystem)


@contextmanager
def _shared_folder(name: str, fill: Callable[[str], None]) -> Iterator[str]:
    """Give a temporary folder for all processes of this machine that ask for the same name.

    The first one fills it while the others wait, the last one removes it. The locks are the kernel's, so a process
    that dies holds none.
    """
    prefix = os.path.join(tempfile.gettempdir(), f"elastic-train-{os.getuid()}-")
    folder = f"{prefix}{name}"
    _remove_what_the_dead_left(prefix)
    lock = _lock_filled(folder, fill)
    if lock is None:  # whoever fills it takes too long, and may be stuck
        with tempfile.TemporaryDirectory(prefix="checkpoint-") as own:
            fill(own)
            yield own
        return
    try:
        yield folder
    finally:
        _remove_if_last(lock, folder)


def _lock_filled(folder: str, fill: Callable[[str], None]) -> int | None:
    """Give a shared lock on a folder that is filled; None if that takes another process too long."""
    whole = Path(f"{folder}.whole")
    deadline = time.monotonic() + _SHARE_SECONDS
    while time.monotonic() < deadline:
        lock = os.open(f"{folder}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if _try_lock(lock, fcntl.LOCK_EX) and _is_still(lock, f"{folder}.lock") and not whole.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of one that died while it filled it
                os.makedirs(folder, mode=0o700)
                try:
                    fill(folder)
                except BaseException:
                    shutil.rmtree(folder, ignore_errors=True)
                    raise
                whole.touch()
            # Between the two locks, or while this one waits, a last reader may remove it all.
            if _try_lock(lock, fcntl.LOCK_SH) and _is_still(lock, f"{folder}.lock") and whole.exists():
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
        time.sleep(0.05)
    return None


def _remove_what_the_dead_left(prefix: str) -> None:
    """Remove folders that nobody reads any more: whoever was killed did not."""
    for path in glob.glob(f"{glob.escape(prefix)}*.lock"):
        try:
            lock = os.open(path, os.O_RDWR)
        except OSError:
            continue
        _remove_if_last(lock, path.removesuffix(".lock"))


def _remove_if_last(lock: int, folder: str) -> None:
    try:
        if _try_lock(lock, fcntl.LOCK_EX) and _is_still(lock, f"{folder}.lock"):
            Path(f"{folder}.whole").unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            Path(f"{folder}.lock").unlink(missing_ok=True)
    finally:
        os.close(lock)


def _try_lock(lock: int, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still(lock: int, path: str) -> bool:
    """Tell whether the lock is on the file that has the name now."""
    try:
        return os.path.samestat(os.fstat(lock), os.stat(path))
    except FileNotFoundError:
        return False
