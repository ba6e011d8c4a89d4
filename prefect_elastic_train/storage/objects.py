"""The client of an object store: small objects and listings through fsspec, bulk data file by file.

Nothing is repeated here but the transfer of bulk data; whoever asks for small objects repeats that as a whole.
"""

from __future__ import annotations

import abc
import errno
import io
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from prefect_elastic_train.core.outcomes import ConfigurationError, ElasticTrainError
from prefect_elastic_train.core.storage_settings import FsspecStorageSettings, S3StorageSettings
from prefect_elastic_train.storage.faults import Retries, diagnose
from prefect_elastic_train.storage.store import TEMPORARY_PREFIX

__all__ = [
    "LocalDiskError",
    "ObjectClient",
    "RangeReader",
    "TransferFile",
    "files_below",
    "local_disk",
    "open_client",
    "partial_file",
    "retries_of",
]

Answer = TypeVar("Answer")

#: Transfers at a time, of whole files or of parts of them.
TRANSFERS = 8
#: Credentials of the environment are read anew at most once in so many seconds.
_RENEW_SECONDS = 60.0
#: How long ambient credentials are waited for where there seem to be none.
_CREDENTIALS_SECONDS = 8.0


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
    """Give how operations on a storage are repeated."""
    if isinstance(settings, S3StorageSettings):
        secrets = [settings.access_key_id, settings.secret_access_key, settings.session_token]
        hidden = tuple(secret.get_secret_value() for secret in secrets)
    else:
        hidden = tuple(_strings_in(settings.hidden_options))
    return Retries(settings.retry_seconds, settings.uri, tuple(secret for secret in hidden if len(secret) > 3))


def open_client(settings: S3StorageSettings | FsspecStorageSettings) -> ObjectClient:
    """Give the client of a storage; nothing is connected or imported yet."""
    if isinstance(settings, S3StorageSettings):
        from prefect_elastic_train.storage.s3 import S3Client

        return S3Client(settings)
    return ObjectClient(settings)


class ObjectClient:
    """Objects of a store that fsspec knows. Keys begin with their bucket. Safe for threads, and picklable.

    Args:
        settings: The storage.
    """

    def __init__(self, settings: Any) -> None:
        self._settings = settings
        self.retries = retries_of(settings)
        self._filesystem: Any = None
        self._lock = threading.RLock()
        self._renewed_at = -_RENEW_SECONDS

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._settings,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectClient) and other._settings == self._settings

    def __hash__(self) -> int:
        return hash(self._settings.uri)

    @property
    def settings(self) -> Any:
        """The storage."""
        return self._settings

    @property
    def scheme(self) -> str:
        """What makes a URI of a key."""
        return f"{self._settings.uri.partition('://')[0]}://"

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
        self._renewing(lambda: self._fs().pipe_file(key, data, **mode))

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        """Give an object's content, or its bytes from ``start`` up to ``end``.

        Raises:
            FileNotFoundError: There is no such object.
        """
        data: bytes = self._renewing(lambda: self._fs().cat_file(key, start=start, end=end))
        return data

    def size(self, key: str) -> int | None:
        """Give an object's size in bytes; None if there is none."""
        try:
            info = self._renewing(lambda: self._fs().info(key))
        except FileNotFoundError as error:
            _pass_unless_missing(error)
            return None
        return int(info["size"] or 0) if info.get("type") == "file" else None

    def ls(self, folder: str) -> tuple[dict[str, int], list[str]]:
        """Give the names and sizes of the objects directly in a folder, and the names of the folders in it."""
        try:
            entries = self._renewing(lambda: self._fs().ls(folder, detail=True, refresh=True))
        except FileNotFoundError as error:
            _pass_unless_missing(error)
            return {}, []
        files: dict[str, int] = {}
        folders: set[str] = set()
        for entry in entries:
            name = self._below(folder, entry["name"])
            if not name or "/" in name:
                continue
            if entry.get("type") == "directory":
                folders.add(name)
            else:
                files[name] = int(entry.get("size") or 0)
        return files, sorted(folders)

    def find(self, folder: str) -> dict[str, int]:
        """Give path (relative to the folder) and size in bytes of every object below a folder."""
        try:
            found = self._renewing(lambda: self._fs().find(folder, detail=True))
        except FileNotFoundError as error:
            _pass_unless_missing(error)
            return {}
        sizes: dict[str, int] = {}
        for key, entry in found.items():
            name = self._below(folder, key)
            # Some programs mark a folder with an empty object of its name.
            if name and entry.get("type") == "file" and not str(entry.get("name", key)).endswith("/"):
                sizes[name] = int(entry.get("size") or 0)
        return sizes

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; those that are not there are passed over."""

        def delete_one(key: str) -> None:
            try:
                self._renewing(lambda: self._fs().rm_file(key))
            except FileNotFoundError as error:
                _pass_unless_missing(error)

        _all_of([lambda key=key: delete_one(key) for key in keys])  # type: ignore[misc]

    def upload(self, files: Sequence[TransferFile], on_exists: Callable[[], object]) -> None:
        """Write files, each whole or not at all; with retries.

        Args:
            files: What to write.
            on_exists: Called before an object is overwritten, if the store can tell; raises if it shall stay.
        """

        def put(file: TransferFile, **mode: str) -> None:
            self.retries.call(
                f"upload {file.key}", lambda: self._renewing(lambda: self._fs().put_file(file.path, file.key, **mode))
            )

        def upload_one(file: TransferFile) -> None:
            try:
                put(file, mode="create")
            except FileExistsError:
                on_exists()
                put(file)

        _all_of([lambda file=file: upload_one(file) for file in files])  # type: ignore[misc]

    def download(self, files: Sequence[TransferFile]) -> None:
        """Read objects into files, each whole or not at all; with retries."""

        def download_one(file: TransferFile) -> None:
            with partial_file(file.path) as path:

                def get() -> None:
                    self._renewing(lambda: self._fs().get_file(file.key, path))
                    check_size(path, file)

                self.retries.call(f"download {file.key}", get)

        _all_of([lambda file=file: download_one(file) for file in files])  # type: ignore[misc]

    def abandon_uploads(self, folder: str) -> int:
        """Remove what unfinished uploads below a folder left behind, and give how many there were."""
        return 0

    def _fs(self) -> Any:
        with self._lock:
            if self._filesystem is None:
                self._filesystem = self._connect()
            return self._filesystem

    def _connect(self) -> Any:
        import fsspec

        protocol = self._settings.url.partition("://")[0]
        try:
            return fsspec.filesystem(
                protocol, skip_instance_cache=True, use_listings_cache=False, **self._settings.all_options
            )
        except Exception as error:  # noqa: BLE001 - each store has its own, and none of them means a missing object
            text = str(error)
            for secret in self.retries.hidden:
                text = text.replace(secret, "***")
            raise ConfigurationError(
                f"fsspec cannot open {protocol}:// here: {type(error).__name__}: {text}. Install the package that it "
                "needs on every node, and mend the options of the storage block"
            ) from None

    def _forget_connections(self) -> None:
        with self._lock:
            self._filesystem = None

    def _renewing(self, operation: Callable[[], Answer]) -> Answer:
        """Carry out an operation; once more with credentials read anew, where the environment gives them."""
        begun = time.monotonic()
        try:
            return self._with_credentials(operation)
        except Exception as error:
            fault = diagnose(error)
            if fault is None or not fault.kind.startswith("credentials") or not self._renewed_since(begun):
                raise
            return operation()

    def _with_credentials(self, operation: Callable[[], Answer]) -> Answer:
        """Carry out an operation; where ambient credentials seem to be missing, ask for them for some seconds more.

        Whoever gives them limits how often, and many workers that start together are too many.
        """
        deadline = time.monotonic() + _CREDENTIALS_SECONDS
        while True:
            try:
                return operation()
            except Exception as error:
                missing = type(error).__name__ == "NoCredentialsError" and getattr(self._settings, "is_ambient", False)
                if not missing or time.monotonic() > deadline:
                    raise
            time.sleep(1.0)
            self._forget_connections()

    def _renewed_since(self, begun: float) -> bool:
        """Have credentials read anew, unless another thread has done so since an operation began; tell if so."""
        if not getattr(self._settings, "is_ambient", False):
            return False
        with self._lock:
            if self._renewed_at < begun and time.monotonic() - self._renewed_at >= _RENEW_SECONDS:
                self._renewed_at = time.monotonic()
                self._forget_connections()
            return self._renewed_at >= begun

    @staticmethod
    def _below(folder: str, key: str) -> str:
        folder, key = folder.strip("/"), key.strip("/")
        return key[len(folder) + 1 :] if key.startswith(f"{folder}/") else ""


def _strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _strings_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings_in(inner)


class LocalDiskError(ElasticTrainError):
    """This machine's own disk failed while data went to or came from a storage. That one is not to blame."""


@contextmanager
def local_disk(path: str) -> Iterator[None]:
    """Tell an error of this machine's disk from one of the storage.

    Raises:
        LocalDiskError: In place of any OSError.
    """
    try:
        yield
    except OSError as error:
        # Without its cause, which would be taken for the storage's.
        raise LocalDiskError(f"this machine's own disk failed at {path}: {error}") from None


class partial_file:
    """Context manager that gives a temporary name, whose file gets its own when all went well.

    Args:
        path: Its own name; the folder is made if there is none.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._partial = self._path.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}")

    def __enter__(self) -> str:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return str(self._partial)

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is None:
            os.replace(self._partial, self._path)
        else:
            self._partial.unlink(missing_ok=True)


class RangeReader(io.RawIOBase, abc.ABC):
    """A stream over something that is read in ranges.

    Args:
        size: Of all of it, in bytes.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._position = 0

    @abc.abstractmethod
    def _fetch(self, begin: int, end: int) -> bytes:
        """Give some bytes from ``begin`` on, at most up to ``end``."""

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
        data = self._fetch(begin, end)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def files_below(folder: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Give each folder at and below a path, relative to it, with its folders and its files; links are followed.

    Raises:
        OSError: A folder cannot be listed: then what is in it would be missing.
        ValueError: Something is neither a file nor a folder.
    """

    def fail(error: OSError) -> None:
        raise error

    for parent, folders, files in os.walk(folder, followlinks=True, onerror=fail):
        for path in (os.path.join(parent, name) for name in files):
            if os.path.isfile(path):
                continue
            if os.path.islink(path):
                raise ValueError(
                    f"{path} is a link to {os.readlink(path)!r}, where there is no file; put the file itself "
                    "into the checkpoint, or remove the link"
                )
            raise ValueError(f"{path} is no file; a checkpoint holds files and folders only")
        relative = os.path.relpath(parent, folder)
        yield "" if relative == "." else relative, folders, files


def check_size(path: str, file: TransferFile) -> None:
    """Have a file fetched again that came short.

    Raises:
        ConnectionError: It has another size than its object.
    """
    size = os.path.getsize(path)
    if size != file.size:
        raise ConnectionError(errno.ECONNABORTED, f"{file.key}: got {size} bytes instead of {file.size}")


def run_all(pool: ThreadPoolExecutor, futures: Sequence[Future[None]]) -> None:
    """Wait for transfers; when one fails, those that wait are left out and its error is raised."""
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    failed = next((future for future in done if future.exception() is not None), None)
    if failed is not None:
        pool.shutdown(wait=True, cancel_futures=True)
        failed.result()


def _all_of(jobs: Sequence[Callable[[], None]]) -> None:
    if len(jobs) == 1:
        jobs[0]()
        return
    with ThreadPoolExecutor(TRANSFERS, thread_name_prefix="elastic-train-transfer") as pool:
        run_all(pool, [pool.submit(job) for job in jobs])


def _pass_unless_missing(error: FileNotFoundError) -> None:
    """Let nothing pass for a missing object but that: a missing bucket is told by the same exception."""
    if diagnose(error) is not None:
        raise error
