"""The run filesystem in an object store, and how a finished run's checkpoints are read from one."""

from __future__ import annotations

import io
import os
import tempfile
from typing import Any

import pyarrow as pa
from pyarrow import fs

from prefect_elastic_train.core.outcomes import ElasticTrainError
from prefect_elastic_train.elastic.run_filesystem import RunFilesystem
from prefect_elastic_train.storage.files import files_below
from prefect_elastic_train.storage.object_store import ObjectRunStore
from prefect_elastic_train.storage.objects import ObjectClient, TransferFile
from prefect_elastic_train.storage.retrying_store import RetryingStore
from prefect_elastic_train.storage.store import RunStore

#: What a stream holds in memory before it goes to this machine's disk.
_SPOOL_BYTES = 16 * 2**20
#: What a reader asks for at a time.
_READ_BYTES = 8 * 2**20
#: Shows that a folder without files was uploaded: a store has no folders. It is not downloaded.
_NOTHING = ".elastic-train-nothing"


class _Objects:
    """What reading and writing filesystems have in common: files by a client, folders by their names only."""

    _client: ObjectClient

    def normalize_path(self, path: str) -> str:
        """Return the path as keys are written."""
        return path.strip("/")

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        """Describe what a selector finds."""
        base = selector.base_dir.strip("/")
        call = self._client.retries.call
        if selector.recursive:
            files = call(f"list {base}", lambda: self._client.find(base))
            folders = sorted({parent for name in files for parent in _parents(name)})
        else:
            files, folders = call(f"list {base}", lambda: self._client.ls(base))
        if not files and not folders and not selector.allow_not_found:
            raise FileNotFoundError(f"{base}: there is no such folder")
        found = [fs.FileInfo(f"{base}/{name}", type=fs.FileType.Directory) for name in folders]
        return found + [fs.FileInfo(f"{base}/{name}", type=fs.FileType.File, size=size) for name, size in files.items()]

    def download_folder(self, source: str, target: str) -> None:
        """Copy all below a folder to this machine's disk.

        Raises:
            FileNotFoundError: There is nothing.
            StorageFaultError: The storage refuses, or was away for too long.
        """
        source = source.strip("/")
        sizes = self._client.retries.call(f"list {source}", lambda: self._client.find(source))
        if not sizes:
            raise FileNotFoundError(f"{self._client.scheme}{source}: there is no such checkpoint")
        for name in sizes:
            if any(part in ("", ".", "..") for part in name.split("/")):
                raise ElasticTrainError(f"{self._client.scheme}{source} holds {name!r}, which leads out of it")
        os.makedirs(target, exist_ok=True)
        self._client.download(
            [
                TransferFile(os.path.join(target, name), f"{source}/{name}", size)
                for name, size in sizes.items()
                if name != _NOTHING
            ]
        )

    def _describe(self, path: str) -> fs.FileInfo:
        key = path.strip("/")
        size = self._client.retries.call(f"look at {key}", lambda: self._client.size(key))
        if size is not None:
            return fs.FileInfo(path, type=fs.FileType.File, size=size)
        files, folders = self._client.retries.call(f"list {key}", lambda: self._client.ls(key))
        return fs.FileInfo(path, type=fs.FileType.Directory if files or folders else fs.FileType.NotFound)

    def _open_for_reading(self, path: str) -> pa.NativeFile:
        key = path.strip("/")
        size = self._client.retries.call(f"look at {key}", lambda: self._client.size(key))
        if size is None:
            raise FileNotFoundError(f"{self._client.scheme}{key}: there is no such object")
        raw = _ObjectReader(self._client, key, size)
        return pa.PythonFile(io.BufferedReader(raw, min(_READ_BYTES, max(size, 1))), mode="r")


class ObjectRunFilesystem(_Objects, RunFilesystem):
    """See :class:`RunFilesystem`. No two attempts write below one name, so nothing of another's is overwritten."""

    def __init__(self, store: RunStore, attempt: int) -> None:
        super().__init__(store, attempt)
        inner = store.inner if isinstance(store, RetryingStore) else store
        assert isinstance(inner, ObjectRunStore)
        self._client = inner.client

    def delete_file(self, path: str) -> None:
        """Delete an object, unless another attempt has taken over."""
        self._check_fence_of(path)
        self._retries.call(f"delete {path}", lambda: self._client.delete([path.strip("/")]))

    def move(self, src: str, dest: str) -> None:
        """Refused: a store has no such operation."""
        raise io.UnsupportedOperation(f"{src} is not moved or copied within the store; write {dest} itself")

    copy_file = move

    def upload_folder(self, source: str, target: str) -> None:
        """See :meth:`RunFilesystem.upload_folder`."""
        target = target.strip("/")
        if os.path.isfile(source):
            self.upload_file(source, target)
            return
        files = []
        for relative, _, names in files_below(source):
            parent, below = (f"{root}/{relative}".rstrip("/") for root in (source, target))
            for name in names:
                path = f"{parent}/{name}"
                files.append(TransferFile(path, f"{below}/{name}", os.path.getsize(path)))
        if files:
            self._upload(files)
        else:
            self._check_fence()
            self._store.replace(f"{self._child(target)}/{_NOTHING}", b"")

    def upload_file(self, source: str, target: str) -> None:
        """Copy a file of this machine's disk into the run directory."""
        self._upload([TransferFile(source, target.strip("/"), os.path.getsize(source))])

    def _upload(self, files: list[TransferFile]) -> None:
        self._check_fence()
        try:
            self._client.upload(files)
        except Exception:
            # A successor aborts what it finds unfinished: then that is what went wrong.
            self._check_fence()
            raise

    def _info(self, path: str) -> fs.FileInfo:
        if self._child(path) in self._handed:  # Ray asks for each of them when it starts, and does not look into them
            return fs.FileInfo(path, type=fs.FileType.Directory)
        return self._describe(path)

    def _make_folder(self, path: str, recursive: bool) -> None:
        """Nothing: a folder is there when something is in it."""

    def _delete_outside(self, path: str, *, with_itself: bool, missing_ok: bool) -> None:
        raise ElasticTrainError(f"refused to delete {path}, which is no part of a checkpoint of {self._store.uri}")

    def _open_input(self, path: str) -> pa.NativeFile:
        return self._open_for_reading(path)

    def _open_output(self, path: str) -> pa.NativeFile:
        return pa.PythonFile(_SpooledObject(self, path), mode="w")


class ObjectFilesystem(_Objects, fs.FileSystemHandler):  # type: ignore[misc]
    """pyarrow filesystem handler that reads an object store."""

    def __init__(self, client: ObjectClient) -> None:
        self._client = client

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._client,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectFilesystem) and other._client == self._client

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._client)

    def get_type_name(self) -> str:
        """Name of the filesystem in Ray's messages."""
        return "elastic-train-reader"

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        """Describe some paths."""
        return [self._describe(path) for path in paths]

    def open_input_stream(self, path: str) -> pa.NativeFile:
        """Open an object for reading from its beginning."""
        return self._open_for_reading(path)

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Open an object for reading anywhere."""
        return self._open_for_reading(path)

    def _refuse(self, *arguments: Any, **more: Any) -> Any:
        raise io.UnsupportedOperation("this filesystem reads the checkpoints of a run, and changes nothing")

    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = delete_file = _refuse
    move = copy_file = open_output_stream = open_append_stream = _refuse


class _ObjectReader(io.RawIOBase):
    """Reads an object in ranges, each with retries."""

    def __init__(self, client: ObjectClient, key: str, size: int) -> None:
        self._client = client
        self._key = key
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        begin, end = self._position, min(self._position + len(buffer), self._size)
        if begin >= end:
            return 0
        data = self._client.retries.call(f"read {self._key}", lambda: self._client.get(self._key, begin, end))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


class _SpooledObject(io.RawIOBase):
    """Collects what is written, and becomes an object when it is closed; nothing if it never comes to that."""

    def __init__(self, filesystem: ObjectRunFilesystem, path: str) -> None:
        self._filesystem = filesystem
        self._path = path
        self._file = tempfile.SpooledTemporaryFile(_SPOOL_BYTES)  # noqa: SIM115 - closed with this one

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
        try:
            self._file.rollover()
            self._file.flush()
            self._filesystem.upload_file(f"/proc/self/fd/{self._file.fileno()}", self._path)
        finally:
            self._file.close()

    def __del__(self) -> None:
        # Not the base's, which would close it: a copy that failed is dropped without a word.
        self._file.close()


def _parents(name: str) -> list[str]:
    parts = name.split("/")[:-1]
    return ["/".join(parts[: n + 1]) for n in range(len(parts))]
