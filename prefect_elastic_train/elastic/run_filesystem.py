"""The choke point through which Ray Train writes its snapshot and every checkpoint.

Ray is handed a pyarrow filesystem over :class:`RunFilesystem`, in the controller and in each worker. Writing
the snapshot becomes a commit, and one that was fenced off is told so at the first thing that it wants to change. No
look at the fence protects a checkpoint: its folder's name is never used again, so whoever is late meets nobody.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
from fsspec.spec import AbstractBufferedFile
from pyarrow import fs

from prefect_elastic_train.core.outcomes import ElasticTrainError
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.commits import CommitLog, check_fence
from prefect_elastic_train.runs.resume import attempt_snapshot
from prefect_elastic_train.runs.snapshots import checkpoint_names
from prefect_elastic_train.storage.objects import ObjectRunStore
from prefect_elastic_train.storage.store import RunStore

#: What a reader asks for at a time.
_READ_BYTES = 8 * 2**20


class StoreFilesystem(fs.FileSystemHandler):  # type: ignore[misc]
    """pyarrow filesystem handler that reads what is below a folder of a storage.

    Args:
        store: The folder.
    """

    attempt = 0

    def __init__(self, store: RunStore) -> None:
        self.store = store

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.store,)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and hash(other) == hash(self)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((self.store.uri, self.attempt))

    def get_type_name(self) -> str:
        """Name of the filesystem in Ray's messages."""
        return "elastic-train"

    def normalize_path(self, path: str) -> str:
        """Return the path, which is as stores write it."""
        return path

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        """Describe some paths."""
        return [self.describe(path) for path in paths]

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        """Describe what a selector finds."""
        sizes = self.store.file_sizes(self.name(selector.base_dir))
        if sizes is None and not selector.allow_not_found:
            raise FileNotFoundError(f"{selector.base_dir}: there is no such folder")
        found: dict[str, fs.FileInfo] = {}
        for name, size in (sizes or {}).items():
            for parent in list(PurePosixPath(name).parents)[:-1]:
                path = f"{selector.base_dir}/{parent}"
                found[str(parent)] = fs.FileInfo(path, type=fs.FileType.Directory)
            found[name] = fs.FileInfo(f"{selector.base_dir}/{name}", type=fs.FileType.File, size=size)
        return [info for name, info in found.items() if selector.recursive or "/" not in name]

    def open_input_stream(self, path: str) -> pa.NativeFile:
        """Open a file for reading from its beginning."""
        return self.open_input_file(path)

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Open a file for reading anywhere."""
        name = self.name(path)
        if not isinstance(self.store, ObjectRunStore):
            return fs.LocalFileSystem().open_input_file(path)
        size = self.store.size(name)
        if size is None:
            raise FileNotFoundError(f"{self.store.uri}/{name}: there is no such object")
        return pa.PythonFile(_Reader(self.store, name, block_size=_READ_BYTES, size=size), mode="r")

    def name(self, path: str) -> str:
        """Return a path relative to the folder; empty for itself.

        Raises:
            ElasticTrainError: It is not inside of it.
        """
        root, parts = PurePosixPath(self.store.path), PurePosixPath(path)
        if not parts.is_relative_to(root) or ".." in parts.parts:
            raise ElasticTrainError(f"{path} is not in {self.store.uri}")
        return "" if parts == root else parts.relative_to(root).as_posix()

    def describe(self, path: str) -> fs.FileInfo:
        """Describe a path."""
        name = self.name(path)
        size = self.store.size(name) if name else None
        if size is not None:
            return fs.FileInfo(path, type=fs.FileType.File, size=size)
        is_folder = not name or self.store.file_sizes(name) is not None
        return fs.FileInfo(path, type=fs.FileType.Directory if is_folder else fs.FileType.NotFound)

    def _refuse(self, *arguments: Any, **more: Any) -> Any:
        raise io.UnsupportedOperation("files of a run are written whole, not moved, copied or appended to")

    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = delete_file = _refuse
    move = copy_file = open_output_stream = open_append_stream = _refuse


class RunFilesystem(StoreFilesystem):
    """pyarrow filesystem handler of one attempt, which may change the run as long as no other has taken over.

    Args:
        store: The run directory.
        attempt: The attempt that holds the fence.
    """

    def __init__(self, store: RunStore, attempt: int) -> None:
        super().__init__(store)
        self.attempt = attempt
        self.log = CommitLog(store, attempt)
        #: Checkpoints of the snapshot that Ray was handed: all were there when the attempt began.
        self._handed: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.store, self.attempt)

    def create_dir(self, path: str, recursive: bool) -> None:
        """Create a folder, unless another attempt has taken over."""
        self._check_fence()
        self.store.make_folder(self.name(path))

    def delete_dir(self, path: str) -> None:
        """Delete a folder, unless another attempt has taken over."""
        self._check_fence()
        name = self.name(path)
        if name.split("/")[0] in ("", layout.STATE_FOLDER):
            raise ElasticTrainError(f"refused to delete {path}, which is no checkpoint of {self.store.uri}")
        self._handed.discard(name)
        if not self.store.delete_folder(name, self._check_fence):
            raise FileNotFoundError(f"{path}: there is no such folder")

    def delete_file(self, path: str) -> None:
        """Delete a file, unless another attempt has taken over."""
        self._check_fence()
        self.store.delete(self.name(path))

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Open a file for reading anywhere; for Ray's snapshot, what this attempt goes on from."""
        if self.name(path) != layout.SNAPSHOT:
            return super().open_input_file(path)
        data = self._snapshot()
        if data is None:
            raise FileNotFoundError(f"{path}: attempt {self.attempt} starts from the beginning")
        return pa.PythonFile(io.BytesIO(data), mode="r")

    def open_output_stream(self, path: str, metadata: dict[str, str] | None) -> pa.NativeFile:
        """Open a file for writing, whole or not at all; Ray's snapshot becomes a commit when the stream is closed."""
        name = self.name(path)
        if name == layout.SNAPSHOT:
            return pa.PythonFile(_Spooled(lambda file: self.log.commit(file.read())), mode="w")
        self._check_fence()
        return pa.PythonFile(_Spooled(lambda file: self.upload_folder(file.name, path)), mode="w")

    def upload_folder(self, source: str, target: str) -> None:
        """Copy a folder or a file of this machine's disk into the run directory, with all below it; durable on return.

        Args:
            source: On the disk.
            target: On this filesystem.

        Raises:
            FencedOffError: Another attempt has taken over.
            StorageFaultError: The storage refuses, or was away for too long.
        """
        self._check_fence()
        try:
            self.store.upload(source, self.name(target))
        except Exception:
            # A successor aborts what it finds unfinished: then that is what went wrong.
            self._check_fence()
            raise

    def describe(self, path: str) -> fs.FileInfo:
        """Describe a path."""
        name = self.name(path)
        if name == layout.SNAPSHOT:
            data = self._snapshot()
            kind = fs.FileType.NotFound if data is None else fs.FileType.File
            return fs.FileInfo(path, type=kind, size=len(data or b""))
        if name in self._handed:  # Ray asks for each of them when it starts, and does not look into them
            return fs.FileInfo(path, type=fs.FileType.Directory)
        return super().describe(path)

    def _snapshot(self) -> bytes | None:
        snapshot = attempt_snapshot(self.store, self.attempt)
        self._handed = set(checkpoint_names(snapshot)) if snapshot is not None else set()
        return None if snapshot is None else json.dumps(snapshot).encode()

    def _check_fence(self) -> None:
        check_fence(self.store, self.attempt)


class _Reader(AbstractBufferedFile):  # type: ignore[misc]
    """Reads an object in ranges, each with retries."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        data: bytes = self.fs.read_range(self.path, start, end)
        return data


class _Spooled(io.RawIOBase):
    """Collects what is written on this machine's disk, for something to be done with it when it is closed."""

    def __init__(self, use: Callable[[Any], object]) -> None:
        self._use = use
        self._file = tempfile.NamedTemporaryFile()  # noqa: SIM115 - closed with this one

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        with self._file as file:
            file.seek(0)
            self._use(file)

    def __del__(self) -> None:
        self._file.close()  # and not the base's, which would use it: a copy that failed is dropped without a word
