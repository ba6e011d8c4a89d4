"""A run directory in an object store that fsspec supports, where exclusive creation and plain puts are atomic.

Belongs to all processes.
"""

import errno
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from prefect_elastic_train.core.outcomes import ElasticTrainError, StorageFaultError

from .fault_classes import diagnose
from .retries import Result, Retries
from .store import NOTHING, RunStore, for_each, retried

logger = logging.getLogger("prefect_elastic_train.storage")

#: Size in bytes of a part of a multipart upload.
PART_BYTES = 16 * 2**20
_FILES_AT_ONCE = 8
_LARGE_FILES_AT_ONCE = 2  # those of several parts, which are in memory during the upload


class ObjectStorage(Protocol):
    """The storage that an :class:`ObjectRunStore` belongs to."""

    uri: str
    retries: Retries

    @property
    def filesystem(self) -> Any:
        """The fsspec filesystem of the object store."""


class ObjectRunStore(RunStore):
    """A run directory in an object store. ``path`` begins with the bucket."""

    def __init__(self, path: str, storage: ObjectStorage) -> None:
        super().__init__(path.strip("/"), storage.retries)
        self.storage = storage
        self.uri = f"{storage.uri.partition('://')[0]}://{self.path}"

    @retried("read")
    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Return the bytes of an object in the run directory, from position ``start`` up to ``end``."""
        return bytes(self.storage.filesystem.cat_file(self._key(name), start=start, end=end))

    def abort_uploads(self) -> None:
        if not hasattr(self.storage.filesystem, "abort_uploads"):
            return
        try:
            self.retries.call("remove unfinished uploads", lambda: self.storage.filesystem.abort_uploads(self.path))
        except StorageFaultError as error:
            if not error.permanent:
                raise
            logger.info("unfinished uploads cannot be removed and take up space: %s", error)

    def download(self, name: str, target: str) -> None:
        sizes = self.file_sizes(name)
        if not sizes:
            raise FileNotFoundError(f"{self.uri}/{name}".rstrip("/") + ": there is no such checkpoint")
        for file in sizes:
            if any(part in ("", ".", "..") for part in file.split("/")):
                raise ElasticTrainError(f"{self.uri}/{name} contains {file!r}, which points outside of it")
        os.makedirs(target, exist_ok=True)
        sizes.pop(NOTHING, None)
        for_each(sizes, lambda file: self._download(f"{name}/{file}", Path(target, file), sizes[file]), _FILES_AT_ONCE)

    def copy_folder(self, source: str, name: str) -> None:
        # The store copies the objects itself.
        files = ObjectRunStore(source, self.storage).file_sizes("") or {}
        for_each(files, lambda file: self._copy(f"{name}/{file}", f"{source}/{file}"), _FILES_AT_ONCE)

    @retried("copy")
    def _copy(self, name: str, source: str) -> None:
        self.storage.filesystem.cp_file(source, self._key(name))

    @retried("create")
    def create(self, name: str, data: bytes) -> bool:
        try:
            self.storage.filesystem.pipe_file(self._key(name), data, mode="create")
            return True
        except OSError as error:
            # s3fs raises FileExistsError only if the response names the condition: AWS's does, MinIO's does not.
            if diagnose(error) is not None or error.errno not in (None, errno.EEXIST, errno.EINVAL):
                raise
        return self.read(name) == data

    @retried("write")
    def replace(self, name: str, data: bytes) -> None:
        self.storage.filesystem.pipe_file(self._key(name), data)

    @retried("read")
    def read(self, name: str) -> bytes | None:
        return self._find(lambda files: bytes(files.cat_file(self._key(name))))

    @retried("list")
    def entries(self, folder: str) -> list[tuple[str, bool]]:
        key = self._key(folder)
        return [
            (name, entry["type"] == "directory")
            for entry in self._find(lambda files: files.ls(key, detail=True, refresh=True)) or []
            if (name := _below(key, entry["name"])) and "/" not in name
        ]

    @retried("list")
    def file_sizes(self, folder: str) -> dict[str, int] | None:
        key = self._key(folder)
        entries = self._find(lambda files: files.find(key, detail=True)) or {}
        # Some programs mark a folder with an empty object of its name.
        sizes = {
            _below(key, path): int(entry["size"] or 0)
            for path, entry in entries.items()
            if entry["type"] == "file" and entry["name"][-1] != "/"
        }
        sizes.pop("", None)
        return sizes or None  # a store has no empty folders

    @retried("get the size of")
    def size(self, name: str) -> int | None:
        info = self._find(lambda files: files.info(self._key(name))) or {}
        return int(info["size"] or 0) if info.get("type") == "file" else None

    @retried("delete")
    def delete(self, name: str) -> None:
        self._find(lambda files: files.rm_file(self._key(name)))

    def _delete_folder(self, name: str) -> None:
        # No retries here: the caller retries, and checks the fence before each try.
        key = self._key(name)
        paths = [path for path in self._find(lambda files: files.find(key)) or [] if _below(key, path)]
        for_each(paths, lambda path: self._find(lambda files: files.rm_file(path)), _FILES_AT_ONCE)

    def _upload_files(self, files: Sequence[tuple[str, str]]) -> None:
        large = {file for file in files if os.path.getsize(file[0]) > PART_BYTES}
        for some, at_once in ((large, _LARGE_FILES_AT_ONCE), ({*files} - large, _FILES_AT_ONCE)):
            for_each(some, lambda file: self._upload(file[1], file[0]), at_once)

    @retried("upload")
    def _upload(self, name: str, source: str) -> None:
        self.storage.filesystem.put_file(source, self._key(name))

    @retried("download")
    def _download(self, name: str, path: Path, size: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.storage.filesystem.get_file(self._key(name), str(path))
        if (received := path.stat().st_size) != size:
            raise ConnectionError(f"{name}: got {received} bytes instead of {size}")

    def _find(self, operation: Callable[[Any], Result]) -> Result | None:
        """Run an operation on the fsspec filesystem and return its result; None if the object does not exist.

        A missing bucket raises an error.
        """
        try:
            return operation(self.storage.filesystem)
        except FileNotFoundError as error:
            if diagnose(error) is not None:
                raise
            return None

    def _key(self, name: str) -> str:
        return f"{self.path}/{name.strip('/')}".rstrip("/")


def _below(folder: str, key: str) -> str:
    """Return the key of an object relative to a folder; empty if the object is not in the folder."""
    prefix = f"{folder.strip('/')}/"
    key = key.strip("/")
    return key.removeprefix(prefix) if key.startswith(prefix) else ""
