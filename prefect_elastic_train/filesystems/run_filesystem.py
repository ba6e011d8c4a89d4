"""The choke point through which Ray Train writes its snapshot and every checkpoint.

Ray is handed a pyarrow filesystem over :class:`RunFilesystem`, in the controller and in each worker. Writing
the snapshot becomes a commit, uploads are marked until they are committed, writes and deletions are fenced. Reads
go straight to the filesystem below, and bulk data through its native streams.

A process may be stopped between its look at the fence and what it does then. So what is written or deleted is
reached through its folder, opened before the look: should a successor have removed that folder meanwhile, nothing
happens to the one that has its name now.
"""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
from pyarrow import fs

from prefect_elastic_train.outcomes import ElasticTrainError
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.commits import CommitLog, Mark, check_fence, is_there, marks
from prefect_elastic_train.runs.resume import attempt_commit, attempt_snapshot
from prefect_elastic_train.runs.snapshots import checkpoint_names
from prefect_elastic_train.runs.store import LocalRunStore, open_folder

__all__ = ["RunFilesystem", "run_filesystem", "uploading"]


class _Upload(threading.local):
    depth = 0


_upload = _Upload()


@contextmanager
def uploading() -> Iterator[None]:
    """Mark folders that this thread creates in the run directory as checkpoints being uploaded."""
    _upload.depth += 1
    try:
        yield
    finally:
        _upload.depth -= 1


def run_filesystem(run_path: str, attempt: int) -> fs.PyFileSystem:
    """Give the filesystem for one attempt on a run directory on disk."""
    return fs.PyFileSystem(RunFilesystem(run_path, attempt))


class _SnapshotSink(io.RawIOBase):
    """Collects Ray's snapshot and commits it when it is closed whole."""

    def __init__(self, log: CommitLog) -> None:
        self._log = log
        self._buffer = io.BytesIO()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._buffer.write(data)

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        self._log.commit(self._buffer.getvalue())


class RunFilesystem(fs.FileSystemHandler):  # type: ignore[misc]
    """pyarrow filesystem handler of one attempt.

    Args:
        run_path: The run directory, absolute.
        attempt: The attempt that holds the fence.
    """

    def __init__(self, run_path: str, attempt: int) -> None:
        self._run_path = run_path.rstrip("/")
        self._attempt = attempt
        self._inner = fs.LocalFileSystem()
        self._store = LocalRunStore(self._run_path)
        self._log = CommitLog(self._store, attempt)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._run_path, self._attempt)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunFilesystem) and other.__reduce__() == self.__reduce__()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((self._run_path, self._attempt))

    def get_type_name(self) -> str:
        """Name of the filesystem in Ray's messages."""
        return "elastic-train"

    def normalize_path(self, path: str) -> str:
        """Give the path in the form of the filesystem below."""
        return str(self._inner.normalize_path(path))

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        """Describe some paths."""
        return [self._snapshot_info() if self._is_snapshot(path) else self._inner.get_file_info(path) for path in paths]

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        """Describe what a selector finds."""
        return list(self._inner.get_file_info(selector))

    def create_dir(self, path: str, recursive: bool) -> None:
        """Create a folder, unless another attempt has taken over; in an upload, the folder of a checkpoint."""
        self._check_fence_of(path)
        checkpoint = self._child(path)
        if checkpoint and _upload.depth:
            self._begin_upload(checkpoint)
        self._inner.create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        """Delete a folder, unless another attempt has taken over."""
        self._delete_folder(path, self._store.delete_folder, self._inner.delete_dir)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        """Empty a folder, unless another attempt has taken over."""
        self._delete_folder(
            path,
            self._store.empty_folder,
            lambda outside: self._inner.delete_dir_contents(outside, missing_dir_ok=missing_dir_ok),
            missing_ok=missing_dir_ok,
        )

    def delete_root_dir_contents(self) -> None:
        """Refused: nobody means that."""
        raise ElasticTrainError("refused to empty the root of the filesystem")

    def delete_file(self, path: str) -> None:
        """Delete a file, unless another attempt has taken over."""
        with self._fenced(path) as file:
            self._inner.delete_file(file)

    def move(self, src: str, dest: str) -> None:
        """Move a file or folder, unless another attempt has taken over."""
        with self._fenced(src) as source, self._fenced(dest) as target:
            self._inner.move(source, target)

    def copy_file(self, src: str, dest: str) -> None:
        """Copy a file, unless another attempt has taken over."""
        with self._fenced(dest) as target:
            self._inner.copy_file(src, target)

    def open_input_stream(self, path: str) -> pa.NativeFile:
        """Open a file for reading from its beginning; for Ray's snapshot, what this attempt goes on from."""
        if self._is_snapshot(path):
            return pa.PythonFile(io.BytesIO(self._snapshot() or self._missing_snapshot()), mode="r")
        return self._inner.open_input_stream(path)

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Open a file for reading anywhere."""
        return self._inner.open_input_file(path)

    def open_output_stream(self, path: str, metadata: dict[str, str] | None) -> pa.NativeFile:
        """Open a file for writing; Ray's snapshot becomes a commit when the stream is closed."""
        if self._is_snapshot(path):
            return pa.PythonFile(_SnapshotSink(self._log), mode="w")
        with self._fenced(path) as file:
            return self._inner.open_output_stream(file, metadata=metadata)

    def open_append_stream(self, path: str, metadata: dict[str, str] | None) -> pa.NativeFile:
        """Open a file for appending."""
        with self._fenced(path) as file:
            return self._inner.open_append_stream(file, metadata=metadata)

    @contextmanager
    def _fenced(self, path: str) -> Iterator[str]:
        """Check the fence and give a path to the same file that stays with its folder, whoever takes its name."""
        if not self._is_in_run(path):
            yield path
            return
        folder, _, name = path.rpartition("/")
        handle = open_folder(folder)
        try:
            check_fence(self._store, self._attempt)
            yield f"/proc/self/fd/{handle}/{name}"
        except OSError as error:
            if error.errno is None:
                raise
            raise OSError(error.errno, os.strerror(error.errno), path) from error
        finally:
            os.close(handle)

    def _delete_folder(
        self,
        path: str,
        in_run: Callable[[str, Callable[[], object]], bool],
        outside: Callable[[str], object],
        *,
        missing_ok: bool = False,
    ) -> None:
        self._check_fence_of(path)
        child = self._child(path)
        if not child:
            outside(path)
        elif not in_run(child, lambda: check_fence(self._store, self._attempt)) and not missing_ok:
            raise FileNotFoundError(f"{path}: there is no such folder")

    def _is_snapshot(self, path: str) -> bool:
        return path == f"{self._run_path}/{layout.SNAPSHOT}"

    def _snapshot(self) -> bytes | None:
        snapshot = attempt_snapshot(self._store, self._attempt)
        return None if snapshot is None else json.dumps(snapshot).encode()

    def _snapshot_info(self) -> fs.FileInfo:
        data = self._snapshot()
        path = f"{self._run_path}/{layout.SNAPSHOT}"
        if data is None:
            return fs.FileInfo(path, type=fs.FileType.NotFound)
        return fs.FileInfo(path, type=fs.FileType.File, size=len(data))

    def _missing_snapshot(self) -> bytes:
        raise FileNotFoundError(
            f"{self._run_path}/{layout.SNAPSHOT}: attempt {self._attempt} starts from the beginning"
        )

    def _child(self, path: str) -> str:
        """Give a path relative to the run directory, empty if it is not inside of it or is our own state."""
        try:
            relative = PurePosixPath(path).relative_to(self._run_path).as_posix()
        except ValueError:
            return ""
        return "" if relative == "." or relative.split("/")[0] == layout.STATE_FOLDER else relative

    def _begin_upload(self, checkpoint: str) -> None:
        commit = attempt_commit(self._store, self._attempt)
        committed = checkpoint_names(commit.snapshot) if commit is not None else []
        for name in committed:
            if checkpoint == name or checkpoint.startswith(f"{name}/"):
                if checkpoint == name:
                    raise ElasticTrainError(
                        f"checkpoint {name!r} is committed already and will not be overwritten; report a new "
                        "checkpoint_dir_name for each checkpoint"
                    )
                return
        if commit is not None and checkpoint in commit.condemned:
            self._check_is_deleted(checkpoint)
        if any(checkpoint.startswith(f"{begun}/") for begun in self._begun_uploads()):
            return  # a folder inside the checkpoint
        Mark(self._attempt, checkpoint).set(self._store)

    def _check_is_deleted(self, checkpoint: str) -> None:
        """Refuse a name whose old folder is still there, unless another rank has begun the new one."""
        if is_there(self._store, checkpoint) and checkpoint not in self._begun_uploads():
            raise ElasticTrainError(
                f"the earlier checkpoint {checkpoint!r} is being deleted, or could not be; report a new "
                "checkpoint_dir_name for each checkpoint"
            )

    def _begun_uploads(self) -> list[str]:
        return [mark.checkpoint for mark in marks(self._store) if mark.attempt == self._attempt]

    def _check_fence_of(self, path: str) -> None:
        if self._is_in_run(path):
            check_fence(self._store, self._attempt)

    def _is_in_run(self, path: str) -> bool:
        return path == self._run_path or path.startswith(f"{self._run_path}/")
