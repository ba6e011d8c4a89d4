"""The choke point through which Ray Train writes its snapshot and every checkpoint.

Ray is handed a pyarrow filesystem over :class:`RunFilesystem`, in the controller and in each worker. Writing
the snapshot becomes a commit, uploads are marked until they are committed, deletions are fenced. Everything
else goes straight to the filesystem below, and bulk data through its native streams.
"""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
from pyarrow import fs

from prefect_elastic_train.outcomes import ElasticTrainError
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.commits import CommitLog, check_fence, mark_name, unquote_mark
from prefect_elastic_train.runs.records import UploadMark, encode
from prefect_elastic_train.runs.resume import attempt_snapshot
from prefect_elastic_train.runs.snapshots import checkpoint_names
from prefect_elastic_train.runs.store import LocalRunStore

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
        """Create a folder; in the middle of an upload, the folder of a checkpoint."""
        checkpoint = self._child(path)
        if checkpoint and _upload.depth:
            self._begin_upload(checkpoint)
        self._inner.create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        """Delete a folder, unless another attempt has taken over."""
        self._check_fence_of(path)
        self._inner.delete_dir(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        """Empty a folder, unless another attempt has taken over."""
        self._check_fence_of(path)
        self._inner.delete_dir_contents(path, missing_dir_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> None:
        """Refused: nobody means that."""
        raise ElasticTrainError("refused to empty the root of the filesystem")

    def delete_file(self, path: str) -> None:
        """Delete a file, unless another attempt has taken over."""
        self._check_fence_of(path)
        self._inner.delete_file(path)

    def move(self, src: str, dest: str) -> None:
        """Move a file or folder, unless another attempt has taken over."""
        self._check_fence_of(dest)
        self._inner.move(src, dest)

    def copy_file(self, src: str, dest: str) -> None:
        """Copy a file."""
        self._inner.copy_file(src, dest)

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
        return self._inner.open_output_stream(path, metadata=metadata)

    def open_append_stream(self, path: str, metadata: dict[str, str] | None) -> pa.NativeFile:
        """Open a file for appending."""
        return self._inner.open_append_stream(path, metadata=metadata)

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
        check_fence(self._store, self._attempt)
        snapshot = attempt_snapshot(self._store, self._attempt)
        committed = checkpoint_names(snapshot) if snapshot else []
        for name in committed:
            if checkpoint == name or checkpoint.startswith(f"{name}/"):
                if checkpoint == name:
                    raise ElasticTrainError(
                        f"checkpoint {name!r} is committed already and will not be overwritten; report a new "
                        "checkpoint_dir_name for each checkpoint"
                    )
                return
        if any(checkpoint.startswith(f"{mark}/") for mark in self._marks()):
            return  # a folder inside the checkpoint
        self._store.create(mark_name(checkpoint), encode(UploadMark(attempt=self._attempt)))

    def _marks(self) -> list[str]:
        return [unquote_mark(mark) for mark in self._store.names(layout.UPLOADS)]

    def _check_fence_of(self, path: str) -> None:
        if path == self._run_path or path.startswith(f"{self._run_path}/"):
            check_fence(self._store, self._attempt)
