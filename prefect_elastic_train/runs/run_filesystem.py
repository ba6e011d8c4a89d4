"""The pyarrow filesystem through which Ray Train writes its snapshot and every checkpoint, and reads them.

It runs in the controller and in each worker. Writing Ray's snapshot becomes a commit. An attempt that another one has
replaced gets an error at the first change that it tries. Checkpoint uploads need no look at the fence before each file:
the name of a checkpoint's folder is never used twice, so a late upload overwrites nothing.
"""

import io
import json
import posixpath
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
from fsspec.spec import AbstractBufferedFile
from pyarrow import fs

from prefect_elastic_train.core.outcomes import ElasticTrainError
from prefect_elastic_train.storage.object_store import ObjectRunStore
from prefect_elastic_train.storage.store import RunStore

from . import layout
from .commits import CommitLog, check_fence

_READ_BYTES = 8 * 2**20  # size of a read request


class RunFilesystem(fs.FileSystemHandler):  # type: ignore[misc]
    """pyarrow filesystem handler of one attempt on a run directory.

    Attributes:
        store: The run directory.
        attempt: The attempt, which may change the run until another one replaces it; 0 for reading only.
        commits: Writes the commits of the attempt.
    """

    def __init__(self, store: RunStore, attempt: int) -> None:
        self.store = store
        self.attempt = attempt
        self.commits = CommitLog(store, attempt)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.store, self.attempt)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunFilesystem) and (self.store.uri, self.attempt) == (other.store.uri, other.attempt)

    def get_type_name(self) -> str:
        return "elastic-train"

    def normalize_path(self, path: str) -> str:
        return path

    def relative_path(self, path: str) -> str:
        """Return a path relative to the run directory; empty for the directory itself.

        Raise an ElasticTrainError for a path outside of it.
        """
        name = posixpath.relpath(f"/{path}", f"/{self.store.path}")
        if name.startswith(".."):
            raise ElasticTrainError(f"{path} is not in {self.store.uri}")
        return "" if name == "." else name

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        return [self._file_info(path) for path in paths]

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        base = selector.base_dir
        sizes = self.store.file_sizes(self.relative_path(base))
        if sizes is None and not selector.allow_not_found:
            raise FileNotFoundError(f"{base}: there is no such folder")
        files = sizes or {}
        folders = {str(parent) for name in files for parent in PurePosixPath(name).parents} - {"."}
        infos = [fs.FileInfo(f"{base}/{name}", type=fs.FileType.Directory) for name in folders]
        infos += [fs.FileInfo(f"{base}/{name}", type=fs.FileType.File, size=size) for name, size in files.items()]
        return [info for info in infos if selector.recursive or "/" not in info.path.removeprefix(f"{base}/")]

    def create_dir(self, path: str, recursive: bool) -> None:
        """Check that the attempt holds the fence, and create nothing: a folder exists once a file in it does."""
        self._check_fence()

    def delete_dir(self, path: str) -> None:
        self._check_fence()
        name = self.relative_path(path)
        if name.split("/")[0] in ("", layout.STATE_FOLDER):
            raise ElasticTrainError(f"refused to delete {path}, which is no checkpoint of {self.store.uri}")
        self.store.delete_folder(name, self._check_fence)

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Open a file of the run for reading. For Ray Train's snapshot file, this is the snapshot in the newest commit.

        Only commits of the lineage up to this attempt are read.
        """
        name = self.relative_path(path)
        if name == layout.SNAPSHOT:
            data = self._snapshot()
            if not data:
                raise FileNotFoundError(f"{path}: attempt {self.attempt} starts from the beginning")
            return pa.BufferReader(data)
        if not isinstance(self.store, ObjectRunStore):
            return fs.LocalFileSystem().open_input_file(path)
        size = self.store.size(name)
        if size is None:
            raise FileNotFoundError(f"{self.store.uri}/{name}: there is no such object")
        return pa.PythonFile(_ObjectReader(self.store, name, block_size=_READ_BYTES, size=size), mode="r")

    open_input_stream = open_input_file

    def open_output_stream(self, path: str, metadata: dict[str, str] | None) -> pa.NativeFile:
        """Open a small file of the run for writing. It is written when it is closed.

        Ray Train's snapshot is written as a commit.
        """
        name = self.relative_path(path)

        def replace(data: bytes) -> None:
            self._check_fence()
            self.store.replace(name, data)

        return pa.PythonFile(_WriteOnClose(self.commits.commit if name == layout.SNAPSHOT else replace), mode="w")

    def upload_folder(self, source: str, target: str) -> None:
        """Copy a folder or a file from this machine's disk into the run directory; it is durable on return.

        Raise a FencedOffError if the attempt no longer holds the fence.
        """
        self._check_fence()
        try:
            self.store.upload(source, self.relative_path(target))
        except Exception:
            self._check_fence()  # the next attempt aborts unfinished uploads: then report that instead
            raise

    def _refuse(self, *arguments: Any, **options: Any) -> Any:
        raise io.UnsupportedOperation("files of a run are written whole, not moved, copied, deleted or appended to")

    delete_dir_contents = delete_root_dir_contents = delete_file = move = copy_file = open_append_stream = _refuse

    def _file_info(self, path: str) -> fs.FileInfo:
        name = self.relative_path(path)
        size = len(self._snapshot()) or None if name == layout.SNAPSHOT else self.store.size(name)
        if size is not None:
            return fs.FileInfo(path, type=fs.FileType.File, size=size)
        is_folder = not name or self.store.file_sizes(name) is not None
        return fs.FileInfo(path, type=fs.FileType.Directory if is_folder else fs.FileType.NotFound)

    def _snapshot(self) -> bytes:
        commit = self.commits.newest_commit()
        return json.dumps(commit.snapshot).encode() if commit else b""

    def _check_fence(self) -> None:
        if not self.attempt:
            raise io.UnsupportedOperation("this checkpoint is open for reading only")
        check_fence(self.store, self.attempt)


class _ObjectReader(AbstractBufferedFile):  # type: ignore[misc]
    """File for reading an object of an object store in ranges, each with retries."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        return bytes(self.fs.read_range(self.path, start, end))


class _WriteOnClose(io.BytesIO):
    """Collects the content of a file and passes it to a function when the file is closed."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        super().__init__()
        self._write = write

    def close(self) -> None:
        if not self.closed:
            data = self.getvalue()
            super().close()
            self._write(data)

    def __del__(self) -> None:
        """Drop an unfinished file; the base class would close it and so write it."""


def run_filesystem(store: RunStore, attempt: int = 0) -> fs.PyFileSystem:
    """Return the pyarrow filesystem through which Ray Train reads and writes a run directory in one attempt.

    ``attempt`` 0 stands for a reader without an attempt: the filesystem is read-only.
    """
    return fs.PyFileSystem(RunFilesystem(store, attempt))
