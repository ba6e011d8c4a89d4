"""A run directory: small objects, which the fence and the commits stand on, and the files of checkpoints.

The fence needs no locks and no clocks, only exclusive creation and atomic replacement. A directory gives both
through ``link`` and ``rename``; an object store gives them through conditional and plain puts.
"""

from __future__ import annotations

import abc
import copy
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from typing_extensions import Self

from prefect_elastic_train.loop.parts import is_rank_file
from prefect_elastic_train.storage.retries import Retries

Item = TypeVar("Item")

#: Temporary names, left behind only by a crash in the middle of a write; readers pass over them.
TEMPORARY_PREFIX = ".tmp-"
NOTHING = ".elastic-train-nothing"  # shows that a folder without files was uploaded; it is not downloaded
_FILES_AT_ONCE = 4


class RunStore(abc.ABC):
    """Operations on one run directory, repeated while they fail with a passing fault.

    Names are relative, with forward slashes. A store can be pickled. What a kind of storage has of its own are the
    methods with an underscore, which repeat nothing.

    Args:
        path: Where the run directory is on its filesystem: a directory, or bucket and prefix.
        retries: How operations are repeated.

    Raises:
        StorageFaultError: By all methods: the storage refuses, or was away for too long.
    """

    def __init__(self, path: str, retries: Retries) -> None:
        self.path = path
        self.retries = retries
        #: Where the run directory is, for people and for other programs.
        self.uri = path

    def impatient(self, seconds: float) -> Self:
        """Return the same store for those who rather do without than wait."""
        same = copy.copy(self)
        same.retries = self.retries.at_most(seconds)
        return same

    def create(self, name: str, data: bytes) -> bool:
        """Create an object that does not exist yet, whole or not at all; durable on return.

        Returns:
            False if the name is taken by other content. Exactly one of several creators gets True.
        """
        # A try whose answer was lost may have made it, and clients of HTTP and NFS repeat by themselves. What two
        # creators write is never the same: records hold an id or a time.
        return self.retries.call(f"create {name}", lambda: self._create(name, data) or self._read(name) == data)

    def replace(self, name: str, data: bytes) -> None:
        """Write an object so that a reader sees the old or the new content, never a mixture."""
        self.retries.call(f"write {name}", lambda: self._replace(name, data))

    def read(self, name: str) -> bytes | None:
        """Return an object's content, or None if it does not exist."""
        return self.retries.call(f"read {name}", lambda: self._read(name))

    def names(self, folder: str) -> list[str]:
        """Return the names of the objects directly in a folder, sorted; empty if there is no such folder."""
        return sorted(self.retries.call(f"list {folder}", lambda: self._list(folder))[0])

    def folders(self, folder: str = "") -> list[str]:
        """Return the names of the folders directly in a folder, sorted."""
        return sorted(self.retries.call(f"list {folder or 'the run'}", lambda: self._list(folder))[1])

    def file_sizes(self, folder: str) -> dict[str, int] | None:
        """Return path (relative to the folder) and size in bytes of every file below it, or None without it."""
        return self.retries.call(f"list {folder or 'the run'}", lambda: self._file_sizes(folder))

    def size(self, name: str) -> int | None:
        """Return the size of an object in bytes, or None if it does not exist."""
        return self.retries.call(f"look at {name}", lambda: self._size(name))

    def delete(self, name: str) -> None:
        """Delete an object; nothing happens if it does not exist."""
        self.retries.call(f"delete {name}", lambda: self._delete(name))

    def delete_folder(self, name: str, check: Callable[[], object] | None = None) -> bool:
        """Delete a folder and all below it; nothing happens if it does not exist.

        Args:
            name: The folder.
            check: Called before anything is deleted; raises if the folder shall stay.

        Returns:
            Whether there was one.
        """
        has_begun = False

        def delete() -> bool:
            nonlocal has_begun
            if check is not None:
                check()
            may_be_gone, has_begun = has_begun, True  # a try that failed may have deleted all of it
            return self._delete_folder(name) or may_be_gone

        return self.retries.call(f"delete {name}", delete)

    def abandon_uploads(self) -> int:
        """Remove what unfinished uploads left behind out of sight, and return how many there were.

        No worker of this run may be uploading, bar those of attempts that were fenced off.
        """
        return 0

    def upload(self, source: str, name: str) -> None:
        """Copy a file, or all files below a folder, of this machine's disk into the run directory; durable on return.

        A session's rank file, which shows that the rank has stored all others, is copied last.

        Raises:
            ValueError: Something in it is neither a file nor a folder.
        """
        if os.path.isfile(source):
            self._upload_files([(source, name)])
        elif files := [(path, f"{name}/{os.path.relpath(path, source)}") for path in _files_below(source)]:
            last = [file for file in files if is_rank_file(os.path.relpath(file[0], source))]
            self._upload_files([file for file in files if file not in last])
            self._upload_files(last)
        else:
            self.replace(f"{name}/{NOTHING}", b"")

    @abc.abstractmethod
    def download(self, name: str, target: str) -> None:
        """Copy all below a folder to this machine's disk.

        Raises:
            FileNotFoundError: There is nothing.
        """

    def copy_folder(self, source: str, name: str) -> None:
        """Copy a folder of the same storage, by its path, into the run directory."""
        self.upload(source, name)

    @abc.abstractmethod
    def _create(self, name: str, data: bytes) -> bool: ...

    @abc.abstractmethod
    def _replace(self, name: str, data: bytes) -> None: ...

    @abc.abstractmethod
    def _read(self, name: str) -> bytes | None: ...

    @abc.abstractmethod
    def _list(self, folder: str) -> tuple[list[str], list[str]]:
        """Return the names of the objects in a folder, and of the folders."""

    @abc.abstractmethod
    def _file_sizes(self, folder: str) -> dict[str, int] | None: ...

    @abc.abstractmethod
    def _size(self, name: str) -> int | None: ...

    @abc.abstractmethod
    def _delete(self, name: str) -> None: ...

    @abc.abstractmethod
    def _delete_folder(self, name: str) -> bool: ...

    @abc.abstractmethod
    def _upload_files(self, files: Sequence[tuple[str, str]]) -> None:
        """Copy files of this machine's disk to names, with retries."""


class LocalRunStore(RunStore):
    """A run directory on a disk or on a shared mount such as NFS, which must know hard links."""

    def __init__(self, path: str, retries: Retries | None = None) -> None:
        super().__init__(path, retries or Retries(0, path))
        self._root = Path(path)

    def download(self, name: str, target: str) -> None:
        shutil.copytree(self._root / name, target, ignore=shutil.ignore_patterns(NOTHING), dirs_exist_ok=True)

    def _create(self, name: str, data: bytes) -> bool:
        # link() fails if the target exists, on NFS too, and the content is there from the first moment.
        with _temporary(self._root / name, data) as temporary, suppress(FileExistsError):
            os.link(temporary, self._root / name)
            return True
        return False

    def _replace(self, name: str, data: bytes = b"", source: str = "") -> None:
        # Ranks may write files of one name at the same time: one of them stays, and whole.
        with _temporary(self._root / name, data, source) as temporary:
            os.replace(temporary, self._root / name)

    def _read(self, name: str) -> bytes | None:
        try:
            return (self._root / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def _list(self, folder: str) -> tuple[list[str], list[str]]:
        try:
            with os.scandir(self._root / folder) as found:
                entries = list(found)
        except (FileNotFoundError, NotADirectoryError):
            return [], []
        names = [one.name for one in entries if one.is_file() and not one.name.startswith(TEMPORARY_PREFIX)]
        return names, [one.name for one in entries if one.is_dir()]

    def _file_sizes(self, folder: str) -> dict[str, int] | None:
        root = self._root / folder
        if not root.is_dir():
            return None
        sizes: dict[str, int] = {}
        for parent, _, files in os.walk(root, onerror=_raise_unless_gone):
            for path in (f"{parent}/{file}" for file in files if not file.startswith(TEMPORARY_PREFIX)):
                with suppress(FileNotFoundError):  # deleted while we looked
                    sizes[path.removeprefix(f"{root}/")] = os.stat(path).st_size
        return sizes

    def _size(self, name: str) -> int | None:
        path = self._root / name
        return path.stat().st_size if path.is_file() else None

    def _delete(self, name: str) -> None:
        (self._root / name).unlink(missing_ok=True)

    def _delete_folder(self, name: str) -> bool:
        path = self._root / name
        if not path.is_dir() or path.is_symlink():  # as a run that was put on another disk may be
            return False
        shutil.rmtree(path, ignore_errors=True)
        if path.exists():  # others may delete it, too, and a writer that was stopped may write into it still
            shutil.rmtree(path, onerror=lambda function, name, error: _raise_unless_gone(error[1]))
        _sync_folder(path.parent)
        return True

    def _upload_files(self, files: Sequence[tuple[str, str]]) -> None:
        def copy_file(file: tuple[str, str]) -> None:
            self.retries.call(f"write {file[1]}", lambda: self._replace(file[1], source=file[0]))

        for_each(files, copy_file, _FILES_AT_ONCE)
        for folder in {(self._root / name).parent for _, name in files}:
            _sync_folder(folder)


def for_each(items: Iterable[Item], work: Callable[[Item], object], at_once: int) -> None:
    """Do something with items, several at a time; when one fails, those that wait are left out and its error raised."""
    with ThreadPoolExecutor(at_once, thread_name_prefix="elastic-train-transfer") as pool:
        list(pool.map(work, items))


def _files_below(folder: str) -> Iterator[str]:
    """Yield the paths of all files below a folder; links are followed."""

    def fail(error: OSError) -> None:
        raise error  # what is in a folder that cannot be listed would be missing

    for parent, _, files in os.walk(folder, followlinks=True, onerror=fail):
        if os.path.realpath(parent) in map(os.path.realpath, Path(parent).parents):
            raise ValueError(f"{parent} is a link to a folder that it is in; remove it from the checkpoint")
        for path in (os.path.join(parent, name) for name in files):
            if not os.path.isfile(path):
                what = f"a link to {os.readlink(path)!r}, where there is no file" if os.path.islink(path) else "no file"
                raise ValueError(f"{path} is {what}; put files and folders into the checkpoint only, or remove it")
            yield path


@contextmanager
def _temporary(target: Path, data: bytes = b"", source: str = "") -> Iterator[str]:
    """Write data or copy a file to a temporary one beside a target, which who is in the ``with`` puts in its place."""
    _make_folder(target.parent)
    handle, temporary = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            if source:
                shutil.copyfile(source, temporary)
            file.write(data)
            file.flush()
            with suppress(OSError):  # some mounts know no modes
                os.fchmod(file.fileno(), os.stat(source).st_mode & 0o777 if source else 0o644)
            os.fsync(file.fileno())
        yield temporary
        if not source:  # else once for all that are copied
            _sync_folder(target.parent)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _make_folder(path: Path) -> None:
    """Make a folder and those that it is in, where there are none, so that they outlast a power cut."""
    if path.is_dir():
        return
    _make_folder(path.parent)
    path.mkdir(exist_ok=True)
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    """Write the names in a folder to the disk."""
    with suppress(OSError):  # some network mounts cannot sync a directory; the files in it are synced
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _raise_unless_gone(error: BaseException) -> None:
    """A folder that cannot be listed is not an empty one."""
    if not isinstance(error, FileNotFoundError):
        raise error
