"""Checkpoints as a train worker reads and writes them: through the run filesystem, into folders with unique names.

Uses ``ray.train.v2._internal``: Ray Train writes a checkpoint through its ``StorageContext`` alone, which copies each
file as one stream, does not retry, and cannot be configured.
"""

import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any

from pydantic_core import to_jsonable_python
from ray.air._internal.filelock import TempFileLock
from ray.train import Checkpoint
from ray.train.v2._internal.execution import context as rays_context
from ray.train.v2._internal.execution.storage import StorageContext

from prefect_elastic_train.core.checkpoint_names import physical_name
from prefect_elastic_train.core.settings import LocalStorageSettings, StorageSettings
from prefect_elastic_train.runs.run_filesystem import run_filesystem
from prefect_elastic_train.storage.opening import Storage
from prefect_elastic_train.storage.store import LocalRunStore

from . import loop_inspection

_rays_is_managed_checkpoint = rays_context.is_managed_checkpoint


class RunStorageContext(StorageContext):  # type: ignore[misc]
    """Ray's ``StorageContext``, but it writes checkpoints through the run filesystem: in parallel, with retries."""

    def __init__(self, original: StorageContext) -> None:
        self.__dict__.update(original.__dict__)

    def persist_current_checkpoint(self, checkpoint: Checkpoint, checkpoint_dir_name: str) -> Checkpoint:
        """Upload a reported checkpoint into the run directory, and return the checkpoint there.

        The reported checkpoint is on this machine's disk or on another filesystem.

        Raises:
            FileNotFoundError: The folder of the reported checkpoint does not exist.
        """
        path = self.build_checkpoint_path_from_name(checkpoint_dir_name)
        with checkpoint.as_directory() as folder:
            if not os.path.exists(folder):
                raise FileNotFoundError(f"the reported checkpoint does not exist: {folder}")
            self.storage_filesystem.handler.upload_folder(folder, path)
        return RunCheckpoint(path, self.storage_filesystem)


class RunCheckpoint(Checkpoint):  # type: ignore[misc]
    """A checkpoint in a storage: read in place on a disk, or downloaded once for all readers on a machine.

    Like Ray's checkpoint class, it uses a shared temporary folder and locks. Unlike Ray's, it retries, and a copy is
    never partial.
    """

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copy the checkpoint to a directory, by default one that all readers on the machine share; return its path."""
        handler = self.filesystem.handler
        name = handler.relative_path(self.path)
        if path is not None:
            handler.store.download(name, os.path.expanduser(path))
            return os.fspath(path)
        shared = str(self._get_temporary_checkpoint_dir())
        with TempFileLock(shared):
            if not os.path.isdir(shared):
                partial = f"{shared}.partial"
                shutil.rmtree(partial, ignore_errors=True)  # left by a reader that died
                os.makedirs(partial, mode=0o700)
                handler.store.download(name, partial)
                os.rename(partial, shared)
        return shared

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        """Yield a directory with the files of the checkpoint; a downloaded copy is deleted after the ``with``."""
        if isinstance(self.filesystem.handler.store, LocalRunStore) and os.path.isdir(self.path):
            yield self.path
        else:
            with super().as_directory() as folder:
                yield folder


class TrackedCheckpoint(RunCheckpoint):
    """The checkpoint that a train loop may restore. It records in ``loop_inspection.state`` if the loop reads it.

    It is a copy of Ray's object with the same id, by which the ranks of a machine share one download.
    """

    def __init__(self, original: Checkpoint) -> None:
        self.__dict__.update(original.__dict__)

    def __getattribute__(self, name: str) -> Any:
        # Every read uses the path, and a copy of this object may read later.
        if name in ("path", "__reduce_ex__"):
            loop_inspection.state.opened = True
        return super().__getattribute__(name)


def open_checkpoint(uri: str, settings: StorageSettings) -> Checkpoint:
    """Return the checkpoint at a URI as Ray's object, for reading from any machine that reaches its storage."""
    if isinstance(settings, LocalStorageSettings):
        return Checkpoint(uri)
    path = uri.partition("://")[2].rstrip("/")
    return RunCheckpoint(path, run_filesystem(Storage(settings).folder(path)))


def use_unique_folders(context: rays_context.TrainContext, attempt: int, group: int) -> None:
    """Patch a worker's train context to write each checkpoint into a folder whose name is never used twice.

    This holds for all upload modes of Ray Train. All ranks use the name of rank 0. Each worker calls this once.

    Args:
        context: Ray Train's train context of the worker.
        attempt: Number of the attempt.
        group: Number of worker groups that the attempt has started.
    """
    agree = context._sync_checkpoint_dir_name_across_ranks
    reports = itertools.count(1)

    def agree_on_folder(name: str | None = None) -> Any:
        name = name or context.storage_context.make_default_checkpoint_dir_name()
        return agree(physical_name(name.rstrip("/"), attempt, group, next(reports)))

    context._sync_checkpoint_dir_name_across_ranks = agree_on_folder
    rays_context.is_managed_checkpoint = _adopt_managed_checkpoint


def _adopt_managed_checkpoint(storage_context: StorageContext, checkpoint: Checkpoint) -> Any:
    """Return True if a checkpoint is in the run directory. Set its filesystem to the run filesystem before.

    This function replaces Ray's, which also compares filesystems: ``Checkpoint(path)`` and
    ``Checkpoint.from_directory(path)`` have another filesystem.
    """
    if PurePosixPath(checkpoint.path).is_relative_to(storage_context.experiment_fs_path):
        checkpoint.filesystem = storage_context.storage_filesystem
    return _rays_is_managed_checkpoint(storage_context, checkpoint)


def to_json_values(metrics: Any) -> Any:
    """Return metrics as JSON values: arrays as numbers or lists, other objects as text."""

    def convert(value: Any) -> Any:
        if getattr(value, "size", 0) == 1:
            return value.item()
        return value.tolist() if hasattr(value, "tolist") else str(value)

    return to_jsonable_python(metrics, bytes_mode="base64", fallback=convert)
