"""The choke point through which Ray Train writes its snapshot and every checkpoint, and through which they are read.

Ray is handed a pyarrow filesystem over :class:`RunFilesystem`, in the controller and in each worker. Writing
the snapshot becomes a commit, and one that was fenced off is told so at the first thing that it wants to change. No
look at the fence protects a checkpoint: its folder's name is never used again, so whoever is late meets nobody.

Uses ``ray.train.v2._internal``: Ray Train writes a checkpoint through its ``StorageContext`` alone, which copies by
streams of 64 MiB a file, repeats nothing, and cannot be configured; and its ``CheckpointManager`` alone knows which
checkpoints are kept, by the order of their scores.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
from fsspec.spec import AbstractBufferedFile
from pyarrow import fs
from pydantic_core import to_jsonable_python
from ray.air._internal.filelock import TempFileLock
from ray.train import Checkpoint, CheckpointConfig
from ray.train.v2._internal.execution import context as rays_context
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.storage import StorageContext

from prefect_elastic_train.core.checkpoint_names import physical_name
from prefect_elastic_train.core.outcomes import ConfigurationError, ElasticTrainError
from prefect_elastic_train.core.scores import rank_of
from prefect_elastic_train.core.storage_settings import LocalStorageSettings, StorageSettings
from prefect_elastic_train.elastic import loop_watch
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.commits import CommitLog, check_fence
from prefect_elastic_train.runs.model import RunDirectory
from prefect_elastic_train.storage.objects import ObjectRunStore
from prefect_elastic_train.storage.opening import open_storage
from prefect_elastic_train.storage.store import LocalRunStore, RunStore

#: Number of checkpoints up to which each commit is full, and the most that an incremental one lists.
_ADDED_AT_MOST = 500
_READ_BYTES = 8 * 2**20  # that a reader asks for at a time
_is_managed_checkpoint = rays_context.is_managed_checkpoint


class RunFilesystem(fs.FileSystemHandler):  # type: ignore[misc]
    """pyarrow filesystem handler of one attempt, which may change the run until another takes over; 0 may only read."""

    def __init__(self, store: RunStore, attempt: int = 0) -> None:
        self.store = store
        self.attempt = attempt
        self.log = CommitLog(store, attempt)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.store, self.attempt)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunFilesystem) and (self.store.uri, self.attempt) == (other.store.uri, other.attempt)

    def get_type_name(self) -> str:
        return "elastic-train"

    def normalize_path(self, path: str) -> str:
        return path

    def name(self, path: str) -> str:
        """Return a path relative to the run directory, empty for itself; whatever is not in it is refused."""
        root = PurePosixPath(self.store.path)
        parts = PurePosixPath(path)
        if not parts.is_relative_to(root) or ".." in parts.parts:
            raise ElasticTrainError(f"{path} is not in {self.store.uri}")
        return "" if parts == root else parts.relative_to(root).as_posix()

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        return [self._describe(path) for path in paths]

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        sizes = self.store.file_sizes(self.name(selector.base_dir))
        if sizes is None and not selector.allow_not_found:
            raise FileNotFoundError(f"{selector.base_dir}: there is no such folder")
        found: dict[str, fs.FileInfo] = {}
        for name, size in (sizes or {}).items():
            for parent in map(str, list(PurePosixPath(name).parents)[:-1]):
                found[parent] = fs.FileInfo(f"{selector.base_dir}/{parent}", type=fs.FileType.Directory)
            found[name] = fs.FileInfo(f"{selector.base_dir}/{name}", type=fs.FileType.File, size=size)
        return [info for name, info in found.items() if selector.recursive or "/" not in name]

    def create_dir(self, path: str, recursive: bool) -> None:
        """Find out whether another attempt has taken over; a folder is there once a file in it is."""
        self._check_fence()

    def delete_dir(self, path: str) -> None:
        self._check_fence()
        name = self.name(path)
        if name.split("/")[0] in ("", layout.STATE_FOLDER):
            raise ElasticTrainError(f"refused to delete {path}, which is no checkpoint of {self.store.uri}")
        if not self.store.delete_folder(name, self._check_fence):
            raise FileNotFoundError(f"{path}: there is no such folder")

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Open a file for reading anywhere; for Ray's snapshot, what this attempt goes on from."""
        name = self.name(path)
        if name == layout.SNAPSHOT:
            if not (data := self._snapshot()):
                raise FileNotFoundError(f"{path}: attempt {self.attempt} starts from the beginning")
            return pa.PythonFile(io.BytesIO(data), mode="r")
        if not isinstance(self.store, ObjectRunStore):
            return fs.LocalFileSystem().open_input_file(path)
        if (size := self.store.size(name)) is None:
            raise FileNotFoundError(f"{self.store.uri}/{name}: there is no such object")
        return pa.PythonFile(_Reader(self.store, name, block_size=_READ_BYTES, size=size), mode="r")

    open_input_stream = open_input_file

    def open_output_stream(self, path: str, metadata: dict[str, str] | None) -> pa.NativeFile:
        """Open a small file for writing, whole or not at all; Ray's snapshot becomes a commit when it is closed."""
        name = self.name(path)

        def keep(data: bytes) -> None:
            self._check_fence()
            self.store.replace(name, data)

        return pa.PythonFile(_Written(self.log.commit if name == layout.SNAPSHOT else keep), mode="w")

    def upload_folder(self, source: str, target: str) -> None:
        """Copy a folder or a file of this machine's disk into the run directory; durable on return."""
        self._check_fence()
        try:
            self.store.upload(source, self.name(target))
        except Exception:
            self._check_fence()  # a successor aborts what it finds unfinished: then that is what went wrong
            raise

    def _refuse(self, *arguments: Any, **more: Any) -> Any:
        raise io.UnsupportedOperation("files of a run are written whole, not moved, copied, deleted or appended to")

    delete_dir_contents = delete_root_dir_contents = delete_file = move = copy_file = open_append_stream = _refuse

    def _describe(self, path: str) -> fs.FileInfo:
        name = self.name(path)
        if not name:
            return fs.FileInfo(path, type=fs.FileType.Directory)
        size = (len(self._snapshot()) or None) if name == layout.SNAPSHOT else self.store.size(name)
        if size is not None:
            return fs.FileInfo(path, type=fs.FileType.File, size=size)
        is_folder = self.store.file_sizes(name) is not None
        return fs.FileInfo(path, type=fs.FileType.Directory if is_folder else fs.FileType.NotFound)

    def _snapshot(self) -> bytes:
        commit = RunDirectory(self.store, self.attempt).newest_commit
        return b"" if commit is None else json.dumps(commit.snapshot).encode()

    def _check_fence(self) -> None:
        if not self.attempt:
            raise io.UnsupportedOperation("this checkpoint can be read only")
        check_fence(self.store, self.attempt)


class _Reader(AbstractBufferedFile):  # type: ignore[misc]
    """Reads an object in ranges, each with retries."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        return bytes(self.fs.read_range(self.path, start, end))


class _Written(io.BytesIO):
    """What is written to a file, for something to be done with it when that is closed."""

    def __init__(self, use: Callable[[bytes], object]) -> None:
        super().__init__()
        self._use = use

    def close(self) -> None:
        if not self.closed:
            data = self.getvalue()
            super().close()
            self._use(data)

    def __del__(self) -> None:
        """Not the base's, which closes it: what failed half-way is dropped without a word."""


def run_filesystem(store: RunStore, attempt: int = 0) -> fs.PyFileSystem:
    """Return the filesystem that Ray is handed for one attempt on a run directory, or one to read only."""
    return fs.PyFileSystem(RunFilesystem(store, attempt))


class RunStorageContext(StorageContext):  # type: ignore[misc]
    """Ray's ``original``, which writes checkpoints by the run filesystem: file by file in parallel, with retries."""

    def __init__(self, original: StorageContext) -> None:
        self.__dict__.update(original.__dict__)

    def persist_current_checkpoint(self, checkpoint: Checkpoint, checkpoint_dir_name: str) -> Checkpoint:
        """Write a checkpoint into the run directory, from this machine's disk or from another filesystem."""
        path = self.build_checkpoint_path_from_name(checkpoint_dir_name)
        with checkpoint.as_directory() as folder:
            if not os.path.exists(folder):
                raise FileNotFoundError(f"the checkpoint to report is not there: {folder}")
            self.storage_filesystem.handler.upload_folder(folder, path)
        return RunCheckpoint(path, self.storage_filesystem)


def as_json_values(metrics: Any) -> Any:
    """Return metrics as JSON values: arrays as numbers or lists, other objects as text."""
    return to_jsonable_python(
        metrics,
        bytes_mode="base64",
        fallback=lambda value: (
            value.item() if getattr(value, "size", 0) == 1 else getattr(value, "tolist", lambda: str(value))()
        ),
    )


def name_folders(context: rays_context.TrainContext, attempt: int, group: int) -> None:
    """Have a worker's checkpoints, however uploaded, written into folders whose names are never used again.

    Rank 0's name is that of all ranks; ``group`` is how many worker groups the attempt has started.
    """
    agree = context._sync_checkpoint_dir_name_across_ranks
    reports = itertools.count(1)

    def agree_on_folder(name: str | None = None) -> str:
        name = name or context.storage_context.make_default_checkpoint_dir_name()
        if ".." in name.split("/"):
            raise ConfigurationError(f"checkpoint_dir_name={name!r} is refused: give one without '..'")
        return str(agree(physical_name(name.rstrip("/"), attempt, group, next(reports))))

    context._sync_checkpoint_dir_name_across_ranks = agree_on_folder
    rays_context.is_managed_checkpoint = is_managed_checkpoint


def is_managed_checkpoint(storage_context: StorageContext, checkpoint: Checkpoint) -> Any:
    """Return whether a checkpoint is in the run directory; if its path is, give it the run filesystem.

    Ray compares filesystems too, and ``Checkpoint(path)`` and ``Checkpoint.from_directory(path)`` have different ones.
    """
    if PurePosixPath(checkpoint.path).is_relative_to(storage_context.experiment_fs_path):
        checkpoint.filesystem = storage_context.storage_filesystem
    return _is_managed_checkpoint(storage_context, checkpoint)


class RunCheckpoint(Checkpoint):  # type: ignore[misc]
    """A checkpoint in a storage: read where it is on a disk, or fetched once for all readers on a machine.

    As Ray's, in its temporary folder and under its locks, but with retries, and a copy is there whole or not at all.
    """

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copy the checkpoint to a directory, by default one that the readers on a machine share, and return that."""
        handler: RunFilesystem = self.filesystem.handler
        name = handler.name(self.path)
        if path is not None:
            handler.store.download(name, os.path.expanduser(path))
            return os.fspath(path)
        shared = str(self._get_temporary_checkpoint_dir())
        with TempFileLock(shared):
            if not os.path.isdir(shared):
                partial = f"{shared}.partial"
                shutil.rmtree(partial, ignore_errors=True)  # of one that died while it fetched it
                os.makedirs(partial, mode=0o700)
                handler.store.download(name, partial)
                os.rename(partial, shared)
        return shared

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        """Yield the checkpoint as a directory to read from, which is gone after the ``with`` unless it is its own."""
        if isinstance(self.filesystem.handler.store, LocalRunStore) and os.path.isdir(self.path):
            yield self.path
        else:
            with super().as_directory() as folder:
                yield folder


class RankedCheckpointManager(CheckpointManager):  # type: ignore[misc]
    """Ray's manager, in which a checkpoint without a score is worse than all that have one, in both orders.

    Ray's own takes it for the best if lower is better, and a metric that is no number ends the run.
    """

    _listed = 0  # number of checkpoints that the last full commit lists; 0: the next one is full

    def _get_checkpoint_score(self, result: Any) -> tuple[bool, float, int]:
        config = self._checkpoint_config
        rank = rank_of(result.metrics, config.checkpoint_score_attribute or "", config.checkpoint_score_order)
        return *rank, self._checkpoint_to_report_index[result.checkpoint]

    def _write_state_to_storage(self) -> None:
        """Commit the list of all checkpoints; if it is long and only grows, mostly only what was added to it."""
        results = self._checkpoint_results
        # No checkpoint is removed, reordered, or given other metrics by a validation.
        only_grows = self._checkpoint_config == CheckpointConfig() and not self._validated_checkpoints
        if only_grows and max(_ADDED_AT_MOST, self._listed) < len(results) <= self._listed + _ADDED_AT_MOST:
            self._checkpoint_results: list[Any] = results[self._listed :]
            added = self._save_state().encode()
            self._checkpoint_results = results
            self._storage_context.storage_filesystem.handler.log.commit(added, is_full=False)
        else:
            super()._write_state_to_storage()
            self._listed = len(results)

    def _assert_checkpoints_exist(self) -> None:
        """Check nothing: all were there when the attempt began, and Ray's check makes a request for each."""

    def _load_state(self, json_state: str) -> None:
        """Load, and rank what another version or policy may have ranked."""
        super()._load_state(json_state)
        self._checkpoint_results.sort(key=self._get_checkpoint_score)


class _OfferedCheckpoint(RunCheckpoint):
    """The checkpoint that a loop may start from, which notes whether the loop looks into it."""

    def __getattribute__(self, name: str) -> Any:
        # Whatever reads a checkpoint asks for its path; whoever gets a copy may read that.
        if name in ("path", "__reduce_ex__"):
            loop_watch.state.opened = True
        return super().__getattribute__(name)


def readable(checkpoint: Checkpoint | None) -> Checkpoint | None:
    """Return the checkpoint that a worker starts from in the form that its loop reads best."""
    if checkpoint is None:
        return None
    found = _OfferedCheckpoint(checkpoint.path, checkpoint.filesystem)
    found._uuid = checkpoint._uuid  # one for all ranks, by which those of a machine share what they fetch
    return found


def open_checkpoint(uri: str, settings: StorageSettings) -> Checkpoint:
    """Return a checkpoint of a run to read, from wherever the storage that it is in can be reached."""
    if isinstance(settings, LocalStorageSettings):
        return Checkpoint(uri)
    path = uri.partition("://")[2].rstrip("/")
    return RunCheckpoint(path, run_filesystem(open_storage(settings).folder(path)))
