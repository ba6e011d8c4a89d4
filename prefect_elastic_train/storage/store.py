"""Operations on a run directory: its small objects, which implement fence and commits, and the files of checkpoints.

The fence needs neither locks nor clocks, only exclusive creation and atomic replacement. A directory has both through
``link`` and ``rename``, an object store through conditional and plain puts.

Belongs to all processes.
"""

import copy
import functools
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from typing_extensions import Self

from prefect_elastic_train.loop.rank_files import RANK_FILE_PATTERN

from .retries import Retries

Item = TypeVar("Item")
Method = TypeVar("Method", bound=Callable[..., Any])

#: Prefix of temporary files. They remain only after a crash during a write, and readers skip them.
TEMPORARY_PREFIX = ".tmp-"
NOTHING = ".elastic-train-nothing"  # marks an uploaded folder without files; it is not downloaded
_FILES_AT_ONCE = 4


def retried(verb: str) -> Callable[[Method], Method]:
    """Return a decorator that retries a method of a store while it fails with a transient fault.

    The method's first argument is a name in the run directory. Messages name the operation as ``verb`` and this name.
    """

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(store: RunStore, name: str, *arguments: Any) -> Any:
            return store.retries.call(f"{verb} {name or 'the run'}", lambda: method(store, name, *arguments))

        return cast(Method, call)

    return decorate


class RunStore(ABC):
    """Operations on one run directory. Transient faults are retried (see :func:`retried`).

    Names are relative, with forward slashes. A store can be pickled.

    Args:
        path: Path of the run directory on its filesystem: a directory, or bucket and prefix.
        retries: Policy of retries; None for no retries.

    Raises:
        StorageFaultError: By all methods: the storage refused, or was unreachable for too long.
    """

    def __init__(self, path: str, retries: Retries | None = None) -> None:
        self.path = path
        self.retries = retries or Retries(0, path)
        #: URI of the run directory, for users and other programs.
        self.uri = path

    def with_retry_limit(self, seconds: float) -> Self:
        """Return a copy of this store whose operations are retried for at most ``seconds``."""
        limited = copy.copy(self)
        limited.retries = replace(self.retries, seconds=min(seconds, self.retries.seconds))
        return limited

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Create an object in the run directory that does not exist yet, atomically; it is durable on return.

        Returns:
            False if an object with other content exists. Exactly one of several creators gets True. An earlier try
            whose response was lost may have created it, and HTTP and NFS clients retry on their own, so an object with
            the same content counts as created: two creators never write the same, since records contain an id or a
            time.
        """

    @abstractmethod
    def replace(self, name: str, data: bytes) -> None:
        """Write an object in the run directory atomically, whether it exists or not.

        A reader gets the old or the new content, never a mixture.
        """

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """Return the content of an object in the run directory; None if it does not exist."""

    @abstractmethod
    def entries(self, folder: str) -> list[tuple[str, bool]]:
        """Return the name of each object and folder directly in a folder, and True if it is a folder.

        The list is empty if there is no such folder.
        """

    def names(self, folder: str) -> list[str]:
        """Return the names of the objects directly in a folder of the run directory, sorted."""
        return sorted(name for name, is_folder in self.entries(folder) if not is_folder)

    def folders(self, folder: str = "") -> list[str]:
        """Return the names of the folders directly in a folder of the run directory, sorted."""
        return sorted(name for name, is_folder in self.entries(folder) if is_folder)

    @abstractmethod
    def file_sizes(self, folder: str) -> dict[str, int] | None:
        """Return path and size in bytes of every file below a folder of the run directory.

        Paths are relative to the folder. Return None if there is no such folder.
        """

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Return the size in bytes of an object in the run directory; None if it does not exist."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete an object from the run directory if it exists."""

    def delete_folder(self, name: str, check: Callable[[], object] = lambda: None) -> None:
        """Delete a folder of the run directory with its contents, if it exists.

        Args:
            name: The folder.
            check: Called before anything is deleted; it raises to keep the folder.
        """

        def delete() -> None:
            check()
            self._delete_folder(name)

        self.retries.call(f"delete {name}", delete)

    def abort_uploads(self) -> None:  # noqa: B027 - a disk has none
        """Delete the parts of unfinished uploads, which an object store keeps without listing them.

        No worker of this run may be uploading, except those of fenced-off attempts.
        """

    def upload(self, source: str, name: str) -> None:
        """Copy a local file, or all files below a local folder, into the run directory; durable on return.

        A session's rank file is copied last: it marks the rank's files as complete.

        Raises:
            ValueError: The folder contains something that is neither a file nor a folder.
        """
        if os.path.isfile(source):
            self._upload_files([(source, name)])
        elif files := [(path, f"{name}/{os.path.relpath(path, source)}") for path in _files_below(source)]:
            last = [file for file in files if RANK_FILE_PATTERN.fullmatch(os.path.relpath(file[0], source))]
            self._upload_files([file for file in files if file not in last])
            self._upload_files(last)
        else:
            self.replace(f"{name}/{NOTHING}", b"")

    @abstractmethod
    def download(self, name: str, target: str) -> None:
        """Copy the contents of a folder of the run directory to a local folder.

        Raises:
            FileNotFoundError: The folder does not exist or is empty.
        """

    def copy_folder(self, source: str, name: str) -> None:
        """Copy a folder of the same storage into the run directory, as the folder ``name``.

        ``source`` is its path on the storage's filesystem.
        """
        self.upload(source, name)

    @abstractmethod
    def _delete_folder(self, name: str) -> None: ...

    @abstractmethod
    def _upload_files(self, files: Sequence[tuple[str, str]]) -> None:
        """Copy local files into the run directory, with retries. ``files`` has local path and name of each."""


class LocalRunStore(RunStore):
    """A run directory on a disk or on a shared mount such as NFS, which must support hard links."""

    @property
    def _root(self) -> Path:
        return Path(self.path)

    def download(self, name: str, target: str) -> None:
        shutil.copytree(self._root / name, target, ignore=shutil.ignore_patterns(NOTHING), dirs_exist_ok=True)

    @retried("create")
    def create(self, name: str, data: bytes) -> bool:
        # link() fails if the target exists, on NFS too, and makes the complete content visible at once.
        with _temporary(self._root / name, data) as temporary, suppress(FileExistsError):
            os.link(temporary, self._root / name)
            return True
        return self.read(name) == data

    @retried("write")
    def replace(self, name: str, data: bytes, source: str = "") -> None:
        # Ranks may write files of the same name concurrently: one of them remains, complete.
        with _temporary(self._root / name, data, source) as temporary:
            os.replace(temporary, self._root / name)

    @retried("read")
    def read(self, name: str) -> bytes | None:
        try:
            return (self._root / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    @retried("list")
    def entries(self, folder: str) -> list[tuple[str, bool]]:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self._root / folder) as entries:
            return [(entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith(TEMPORARY_PREFIX)]
        return []

    @retried("list")
    def file_sizes(self, folder: str) -> dict[str, int] | None:
        root = self._root / folder
        if not root.is_dir():
            return None
        sizes = {}
        for parent, _, files in os.walk(root, onerror=_raise_unless_deleted):
            for path in (f"{parent}/{file}" for file in files if not file.startswith(TEMPORARY_PREFIX)):
                with suppress(FileNotFoundError):  # deleted in the meantime
                    sizes[path.removeprefix(f"{root}/")] = os.stat(path).st_size
        return sizes

    @retried("get the size of")
    def size(self, name: str) -> int | None:
        path = self._root / name
        return path.stat().st_size if path.is_file() else None

    @retried("delete")
    def delete(self, name: str) -> None:
        (self._root / name).unlink(missing_ok=True)

    def _delete_folder(self, name: str) -> None:
        path = self._root / name
        if path.is_dir() and not path.is_symlink():  # a run may be a link to another disk
            # Another process may delete the folder too, or still write into it. If it is not empty, this is retried.
            shutil.rmtree(path, onerror=lambda function, name, error: _raise_unless_deleted(error[1]))
            _sync_folder(path.parent)

    def _upload_files(self, files: Sequence[tuple[str, str]]) -> None:
        for_each(files, lambda file: self.replace(file[1], b"", file[0]), _FILES_AT_ONCE)
        for folder in {(self._root / name).parent for _, name in files}:
            _sync_folder(folder)


def for_each(items: Iterable[Item], work: Callable[[Item], object], at_once: int) -> None:
    """Call ``work`` for each item, ``at_once`` items at a time in threads.

    After the first error, no further item begins.
    """
    with ThreadPoolExecutor(at_once, thread_name_prefix="elastic-train-transfer") as pool:
        list(pool.map(work, items))


def _files_below(folder: str) -> Iterator[str]:
    """Yield the paths of all files below a local folder; links are followed.

    Raises:
        ValueError: The folder contains something that is neither a file nor a folder, or a link to a parent folder.
    """

    def fail(error: OSError) -> None:
        raise error  # files of a folder that cannot be listed must not be left out

    for parent, _, files in os.walk(folder, followlinks=True, onerror=fail):
        if os.path.realpath(parent) in map(os.path.realpath, Path(parent).parents):
            raise ValueError(f"{parent} is a link to one of its parent folders; remove it from the checkpoint")
        for path in (os.path.join(parent, name) for name in files):
            if not os.path.isfile(path):
                link = f", but a link to {os.readlink(path)!r}" if os.path.islink(path) else ""
                raise ValueError(f"{path} is not a file{link}; remove it: a checkpoint has only files and folders")
            yield path


@contextmanager
def _temporary(target: Path, data: bytes, source: str = "") -> Iterator[str]:
    """Write data, or copy a file, to a temporary file beside a target, and yield its path.

    The ``with`` block renames or links the temporary file to the target.
    """
    _make_folder(target.parent)
    handle, temporary = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            if source:
                shutil.copyfile(source, temporary)
            file.write(data)
            file.flush()
            with suppress(OSError):  # some mounts do not support file modes
                os.chmod(temporary, os.stat(source).st_mode & 0o777 if source else 0o644)
            os.fsync(file.fileno())
        yield temporary
        if not source:  # copied files are followed by one sync of their folder
            _sync_folder(target.parent)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _make_folder(path: Path) -> None:
    """Create a local folder and its missing parents, durably."""
    if path.is_dir():
        return
    _make_folder(path.parent)
    path.mkdir(exist_ok=True)
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    """Make new, renamed and deleted entries of a local folder durable."""
    with suppress(OSError):  # some network mounts cannot sync a directory; its files are synced
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _raise_unless_deleted(error: BaseException) -> None:
    """Raise an error that occurred while a local folder was listed or deleted, unless it was deleted meanwhile.

    A folder that cannot be listed must not count as empty.
    """
    if not isinstance(error, FileNotFoundError):
        raise error
