"""The objects of a store, by fsspec: small ones and listings at once, files of checkpoints several at a time.

Nothing is repeated here but the transfer of files; whoever asks for small objects repeats that as a whole.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from prefect_elastic_train.core.outcomes import ConfigurationError, StorageFaultError
from prefect_elastic_train.core.storage_settings import FsspecStorageSettings, S3StorageSettings
from prefect_elastic_train.storage.faults import diagnose, error_code
from prefect_elastic_train.storage.files import local_disk, run_all
from prefect_elastic_train.storage.retries import Retries
from prefect_elastic_train.storage.store import TEMPORARY_PREFIX

logger = logging.getLogger("prefect_elastic_train.storage")

Answer = TypeVar("Answer")
Item = TypeVar("Item")

#: Size of the parts of an upload, and how many of a file are sent at a time. S3 takes at most 10,000 parts.
PART_BYTES = 16 * 2**20
_PARTS_AT_ONCE = 4
_MAX_PARTS = 10_000
#: Files at a time: those of one part, and those of many, whose parts are in memory while they are sent.
_FILES_AT_ONCE, _LARGE_FILES_AT_ONCE = 8, 2
#: Credentials of the environment are read anew at most once in so many seconds.
_RENEW_SECONDS = 60.0
#: Faults of stores that do not take the checksums of the parts of an upload.
_NO_CHECKSUMS = ("not supported", "refused (InvalidRequest)", "refused (InvalidArgument)")


@dataclass(frozen=True)
class TransferFile:
    """A file and its object.

    Attributes:
        path: On this machine's disk.
        key: Of the object, with its bucket.
        size: In bytes.
    """

    path: str
    key: str
    size: int


def retries_of(settings: S3StorageSettings | FsspecStorageSettings) -> Retries:
    """Return how operations on a storage are repeated."""
    if isinstance(settings, S3StorageSettings):
        secrets = [settings.access_key_id, settings.secret_access_key, settings.session_token]
        hidden: Iterable[str] = (secret.get_secret_value() for secret in secrets)
    else:
        hidden = _strings_in(settings.hidden_options)
    return Retries(settings.retry_seconds, settings.uri, tuple(secret for secret in hidden if len(secret) > 3))


class ObjectClient:
    """Objects of a store that fsspec knows. Keys begin with their bucket. Safe for threads, and picklable.

    Nothing is connected or imported before it is used.

    Args:
        settings: The storage.
    """

    def __init__(self, settings: S3StorageSettings | FsspecStorageSettings) -> None:
        self.settings = settings
        self.retries = retries_of(settings)
        self._filesystem: Any = None
        self._lock = threading.RLock()
        self._renewed_at = -_RENEW_SECONDS

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.settings,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectClient) and other.settings == self.settings

    def __hash__(self) -> int:
        return hash(self.settings.uri)

    @property
    def scheme(self) -> str:
        """What makes a URI of a key."""
        return f"{self.settings.uri.partition('://')[0]}://"

    def put(self, key: str, data: bytes, *, create: bool = False) -> None:
        """Write a small object.

        Args:
            key: The object.
            data: Its content.
            create: Only if there is none of this name; exactly one of several creators succeeds.

        Raises:
            FileExistsError: There is one already.
        """
        mode = {"mode": "create"} if create else {}
        try:
            self._do(lambda files: files.pipe_file(key, data, **mode))
        except OSError as error:
            # s3fs tells it so only where the answer names the condition: AWS does, MinIO does not.
            if create and error_code(error) in ("PreconditionFailed", "412"):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), key) from error
            raise

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return an object's content, or its bytes from ``start`` up to ``end``.

        Raises:
            FileNotFoundError: There is no such object.
        """
        data: bytes = self._do(lambda files: files.cat_file(key, start=start, end=end))
        return data

    def size(self, key: str) -> int | None:
        """Return an object's size in bytes; None if there is none."""
        info = self._unless_missing(lambda files: files.info(key)) or {}
        return int(info["size"] or 0) if info.get("type") == "file" else None

    def ls(self, folder: str) -> tuple[dict[str, int], list[str]]:
        """Return the names and sizes of the objects directly in a folder, and the names of the folders in it."""
        files: dict[str, int] = {}
        folders: set[str] = set()
        for entry in self._unless_missing(lambda files: files.ls(folder, detail=True, refresh=True)) or []:
            name = _below(folder, entry["name"])
            if not name or "/" in name:
                continue
            if entry.get("type") == "directory":
                folders.add(name)
            else:
                files[name] = int(entry.get("size") or 0)
        return files, sorted(folders)

    def find(self, folder: str) -> dict[str, int]:
        """Return path (relative to the folder) and size in bytes of every object below a folder."""
        found = self._unless_missing(lambda files: files.find(folder, detail=True)) or {}
        # Some programs mark a folder with an empty object of its name.
        return {
            name: int(entry.get("size") or 0)
            for key, entry in found.items()
            if (name := _below(folder, key))
            and entry.get("type") == "file"
            and not str(entry.get("name", key)).endswith("/")
        }

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects, many in a request where the store can; those that are not there are passed over."""
        listed = list(keys)
        if len(listed) > 1 and self._do(lambda files: hasattr(files, "delete_all") and files.delete_all(listed)):
            return
        self._for_each(listed, lambda key: self._unless_missing(lambda files: files.rm_file(key)), _FILES_AT_ONCE)

    def upload(self, files: Sequence[TransferFile]) -> None:
        """Write files, each whole or not at all; with retries. What is there of their names is overwritten."""
        large = [file for file in files if file.size > PART_BYTES]
        self._for_each(large, self._upload, _LARGE_FILES_AT_ONCE)
        self._for_each([file for file in files if file.size <= PART_BYTES], self._upload, _FILES_AT_ONCE)

    def download(self, files: Sequence[TransferFile]) -> None:
        """Read objects into files, each whole or not at all; with retries."""
        self._for_each(files, self._download, _FILES_AT_ONCE)

    def copy_folder(self, source: str, target: str) -> None:
        """Copy all objects below a folder to below another one of this store; with retries."""
        names = self.retries.call(f"list {source}", lambda: self.find(source))

        def copy(name: str) -> None:
            paths = f"{source}/{name}", f"{target}/{name}"
            self.retries.call(f"copy {paths[0]}", lambda: self._do(lambda files: files.cp_file(*paths)))

        self._for_each(list(names), copy, _FILES_AT_ONCE)

    def abort_uploads(self, folder: str) -> int:
        """Remove what unfinished uploads below a folder left behind, and return how many there were."""
        try:
            return int(self._do(lambda files: files.abort_uploads(folder) if hasattr(files, "abort_uploads") else 0))
        except Exception as error:
            fault = diagnose(error)
            if fault is None or not fault.kind.startswith(("credentials", "not supported", "refused")):
                raise
            # A key that may not list or abort them.
            what = self.retries.without_secrets(str(error))
            logger.info("Unfinished uploads below %s stay, and take room: %s: %s", folder, fault.kind, what)
            return 0

    def _upload(self, file: TransferFile) -> None:
        part = max(PART_BYTES, -(-file.size // _MAX_PARTS))
        sizes: dict[str, int] = {}
        if isinstance(self.settings, S3StorageSettings):
            # The parts of huge files are larger, and fewer of them are held at a time.
            sizes = {"chunksize": part, "max_concurrency": max(1, _PARTS_AT_ONCE * PART_BYTES // part)}

        def put(files: Any) -> None:
            with local_disk(file.path):
                files.put_file(file.path, file.key, **sizes)

        def upload() -> None:
            self.retries.call(f"upload {file.key}", lambda: self._do(put))

        sends_checksums = getattr(self._files(), "sends_checksums", False)
        try:
            upload()
        except StorageFaultError as error:
            if not sends_checksums or error.kind not in _NO_CHECKSUMS:
                raise
            self._files().sends_checksums = False
            upload()
        if os.path.getsize(file.path) != file.size:
            raise ValueError(f"{file.path} has changed while it was uploaded; report a checkpoint that is complete")

    def _download(self, file: TransferFile) -> None:
        path = Path(file.path)
        partial = path.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}")

        def get(files: Any) -> None:
            with local_disk(file.path):
                path.parent.mkdir(parents=True, exist_ok=True)
                files.get_file(file.key, str(partial))
                size = partial.stat().st_size
            if size != file.size:
                raise ConnectionError(errno.ECONNABORTED, f"{file.key}: got {size} bytes instead of {file.size}")

        try:
            self.retries.call(f"download {file.key}", lambda: self._do(get))
            partial.replace(path)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self.scheme}{file.key}: there is no such object") from error
        finally:
            partial.unlink(missing_ok=True)

    @staticmethod
    def _for_each(items: Sequence[Item], work: Callable[[Item], Any], at_once: int) -> None:
        if not items:
            return
        with ThreadPoolExecutor(at_once, thread_name_prefix="elastic-train-transfer") as pool:
            run_all(pool, [pool.submit(work, item) for item in items])

    def _files(self) -> Any:
        """Return the filesystem that fsspec has made, or makes now."""
        with self._lock:
            if self._filesystem is None:
                self._filesystem = self._connect()
            return self._filesystem

    def _connect(self) -> Any:
        if isinstance(self.settings, S3StorageSettings):
            try:
                from prefect_elastic_train.storage.s3 import open_s3
            except ImportError as error:
                raise ConfigurationError(
                    f"S3Storage needs a package that is not installed here ({error}); install it with "
                    "`pip install 'prefect-elastic-train[s3]'` where the flow runs and on every node"
                ) from error
            return open_s3(self.settings, self.retries)
        import fsspec

        protocol = self.settings.url.partition("://")[0]
        options = {"skip_instance_cache": True, "use_listings_cache": False, **self.settings.all_options}
        try:
            return fsspec.filesystem(protocol, **options)
        except Exception as error:  # noqa: BLE001 - each store has its own, and none of them means a missing object
            failed = f"{type(error).__name__}: {self.retries.without_secrets(str(error))}"
        raise ConfigurationError(
            f"fsspec cannot open {protocol}:// here: {failed}. Install the package that it needs on every node, and "
            "mend the options of the storage block"
        )

    def _do(self, operation: Callable[[Any], Answer]) -> Answer:
        """Carry out an operation; once more with credentials read anew, where the environment gives them."""
        begun = time.monotonic()
        try:
            return operation(self._files())
        except Exception as error:
            fault = diagnose(error)
            if fault is None or not fault.kind.startswith("credentials") or not self._renewed_since(begun):
                raise
            return operation(self._files())

    def _renewed_since(self, begun: float) -> bool:
        """Have credentials read anew, unless another thread has done so since an operation began; tell if so."""
        if not (isinstance(self.settings, S3StorageSettings) and self.settings.is_ambient):
            return False
        with self._lock:
            if self._renewed_at < begun and time.monotonic() - self._renewed_at >= _RENEW_SECONDS:
                self._renewed_at = time.monotonic()
                self._filesystem = None
            return self._renewed_at >= begun

    def _unless_missing(self, operation: Callable[[Any], Answer]) -> Answer | None:
        """Carry out an operation; return None if there is no such object, which no bucket is something else than."""
        try:
            return self._do(operation)
        except FileNotFoundError as error:
            if diagnose(error) is not None:
                raise
            return None


def _below(folder: str, key: str) -> str:
    """Return a key relative to a folder; empty if it is not below it."""
    folder, key = folder.strip("/"), key.strip("/")
    return key[len(folder) + 1 :] if key.startswith(f"{folder}/") else ""


def _strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings_in(inner)
