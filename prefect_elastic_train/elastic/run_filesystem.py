"""The choke point through which Ray Train writes its snapshot and every checkpoint.

Ray is handed a pyarrow filesystem over :class:`RunFilesystem`, in the controller and in each worker. Writing
the snapshot becomes a commit, and one that was fenced off is told so at the first thing that it wants to change. No
look at the fence protects a checkpoint: its folder's name is never used again, so whoever is late meets nobody. What
differs between a disk and an object store is in :mod:`local_filesystem` and :mod:`object_filesystem`, which
:func:`prefect_elastic_train.elastic.checkpoints.run_filesystem` chooses from.
"""

from __future__ import annotations

import abc
import io
import json
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
from pyarrow import fs

from prefect_elastic_train.core.outcomes import ElasticTrainError
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.commits import CommitLog, check_fence
from prefect_elastic_train.runs.resume import attempt_snapshot
from prefect_elastic_train.runs.snapshots import checkpoint_names
from prefect_elastic_train.storage.retries import Retries
from prefect_elastic_train.storage.retrying_store import RetryingStore
from prefect_elastic_train.storage.store import RunStore


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


class RunFilesystem(fs.FileSystemHandler, abc.ABC):  # type: ignore[misc]
    """pyarrow filesystem handler of one attempt.

    Args:
        store: The run directory.
        attempt: The attempt that holds the fence.
    """

    def __init__(self, store: RunStore, attempt: int) -> None:
        self._store = store
        self._run_path = store.path.rstrip("/")
        self._attempt = attempt
        self._log = CommitLog(store, attempt)
        #: Checkpoints of the snapshot that Ray was handed: all were there when the attempt began.
        self._handed: set[str] = set()
        # A plain store repeats nothing, and neither does what is built on it.
        self._retries = store.retries if isinstance(store, RetryingStore) else Retries(0)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._store, self._attempt)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunFilesystem) and other._identity() == self._identity()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[str, int]:
        return self._store.uri, self._attempt

    def get_type_name(self) -> str:
        """Name of the filesystem in Ray's messages."""
        return "elastic-train"

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        """Describe some paths."""
        return [self._snapshot_info() if self._is_snapshot(path) else self._info(path) for path in paths]

    def create_dir(self, path: str, recursive: bool) -> None:
        """Create a folder, unless another attempt has taken over."""
        self._check_fence_of(path)
        self._make_folder(path, recursive)

    def delete_dir(self, path: str) -> None:
        """Delete a folder, unless another attempt has taken over."""
        self._delete_folder(path, self._store.delete_folder, with_itself=True)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        """Empty a folder, unless another attempt has taken over."""
        self._delete_folder(path, self._store.empty_folder, with_itself=False, missing_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> None:
        """Refused: nobody means that."""
        raise ElasticTrainError("refused to empty the root of the filesystem")

    def open_input_stream(self, path: str) -> pa.NativeFile:
        """Open a file for reading from its beginning; for Ray's snapshot, what this attempt goes on from."""
        if self._is_snapshot(path):
            return pa.PythonFile(io.BytesIO(self._snapshot() or self._missing_snapshot()), mode="r")
        return self._open_input(path)

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Open a file for reading anywhere."""
        return self._open_input(path)

    def open_output_stream(self, path: str, metadata: dict[str, str] | None) -> pa.NativeFile:
        """Open a file for writing, whole or not at all; Ray's snapshot becomes a commit when the stream is closed."""
        if self._is_snapshot(path):
            return pa.PythonFile(_SnapshotSink(self._log), mode="w")
        return self._open_output(path)

    def open_append_stream(self, path: str, metadata: dict[str, str] | None) -> pa.NativeFile:
        """Refused: files of a run are written as a whole."""
        raise io.UnsupportedOperation(f"nothing is appended to {path}, as files are written whole; write another file")

    @abc.abstractmethod
    def upload_folder(self, source: str, target: str) -> None:
        """Copy a folder or a file of this machine's disk into the run directory, with all below it; durable on return.

        Args:
            source: On the disk.
            target: On this filesystem; its folder was made by :meth:`create_dir`.

        Raises:
            FencedOffError: Another attempt has taken over.
            StorageFaultError: The storage refuses, or was away for too long.
        """

    @abc.abstractmethod
    def _info(self, path: str) -> fs.FileInfo: ...

    @abc.abstractmethod
    def _make_folder(self, path: str, recursive: bool) -> None: ...

    @abc.abstractmethod
    def _delete_outside(self, path: str, *, with_itself: bool, missing_ok: bool) -> None:
        """Delete or empty a folder that is not in the run directory, or is all of it."""

    @abc.abstractmethod
    def _open_input(self, path: str) -> pa.NativeFile: ...

    @abc.abstractmethod
    def _open_output(self, path: str) -> pa.NativeFile: ...

    def _delete_folder(
        self,
        path: str,
        in_run: Callable[[str, Callable[[], object]], bool],
        *,
        with_itself: bool,
        missing_ok: bool = False,
    ) -> None:
        self._check_fence_of(path)
        child = self._child(path)
        self._handed.discard(child)
        if not child:
            self._delete_outside(path, with_itself=with_itself, missing_ok=missing_ok)
        elif not in_run(child, self._check_fence) and not missing_ok:
            raise FileNotFoundError(f"{path}: there is no such folder")

    def _is_snapshot(self, path: str) -> bool:
        return path == f"{self._run_path}/{layout.SNAPSHOT}"

    def _snapshot(self) -> bytes | None:
        snapshot = attempt_snapshot(self._store, self._attempt)
        self._handed = set(checkpoint_names(snapshot)) if snapshot is not None else set()
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

    def _check_fence(self) -> None:
        check_fence(self._store, self._attempt)

    def _check_fence_of(self, path: str) -> None:
        if self._is_in_run(path):
            self._check_fence()

    def _is_in_run(self, path: str) -> bool:
        return path == self._run_path or path.startswith(f"{self._run_path}/")
