"""Small objects of a run directory, with the few operations that the fence and the commits stand on.

The fence needs no locks and no clocks, only exclusive creation and atomic replacement. A directory gives both
through ``link`` and ``rename``; an object store gives them through conditional and plain puts.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

#: Temporary names, left behind only by a crash in the middle of a write; readers pass over them.
TEMPORARY_PREFIX = ".tmp-"

#: How a folder is opened whose content will be deleted.
_NO_LINK = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class RunStore(Protocol):
    """Operations on one run directory. Names are relative, with forward slashes. A store can be pickled."""

    @property
    def path(self) -> str:
        """Where the run directory is on its filesystem: a directory, or bucket and prefix."""
        ...

    @property
    def uri(self) -> str:
        """Where the run directory is, for people and for other programs."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Create an object that does not exist yet, whole or not at all; durable on return.

        Returns:
            False if the name is taken, by whoever. Exactly one of several creators gets True.
        """
        ...

    def replace(self, name: str, data: bytes) -> None:
        """Write an object so that a reader sees the old or the new content, never a mixture."""
        ...

    def read(self, name: str) -> bytes | None:
        """Return an object's content, or None if it does not exist."""
        ...

    def names(self, folder: str) -> list[str]:
        """Return the names of the objects directly in a folder, sorted; empty if there is no such folder."""
        ...

    def folders(self, folder: str = "") -> list[str]:
        """Return the names of the folders directly in a folder, sorted."""
        ...

    def file_sizes(self, folder: str) -> dict[str, int] | None:
        """Return path (relative to the folder) and size in bytes of every file below it, or None without it."""
        ...

    def delete(self, name: str) -> None:
        """Delete an object; nothing happens if it does not exist."""
        ...

    def delete_folder(self, name: str, check: Callable[[], object] | None = None) -> bool:
        """Delete a folder and all below it; nothing happens if it does not exist.

        Args:
            name: The folder.
            check: Called when the folder is held and nothing is deleted yet; raises if it shall stay. What takes
                the folder's name after the check is not deleted, however long the caller was stopped.

        Returns:
            Whether there was one.
        """
        ...

    def empty_folder(self, name: str, check: Callable[[], object] | None = None) -> bool:
        """Delete all below a folder, under the same conditions as :meth:`delete_folder`."""
        ...

    def abandon_uploads(self) -> int:
        """Remove what unfinished uploads left behind out of sight, and give how many there were.

        No worker of this run may be uploading, bar those of attempts that were fenced off.
        """
        ...


class LocalRunStore:
    """A run directory on a disk or on a shared mount such as NFS."""

    #: So often a folder is swept into which somebody still writes.
    _SWEEPS = 10

    def __init__(self, path: str) -> None:
        self._root = Path(path)

    @property
    def path(self) -> str:
        """The directory."""
        return str(self._root)

    @property
    def uri(self) -> str:
        """The directory; Ray, pandas and torch all take a plain path."""
        return str(self._root)

    def create(self, name: str, data: bytes) -> bool:
        """See :meth:`RunStore.create`."""
        target = self._root / name
        if target.exists():
            return False
        temporary = self._write_temporary(target, data)
        try:
            # link() fails if the target exists, on NFS too, and the content is there from the first moment.
            os.link(temporary, target)
        except FileExistsError:
            # NFS may have linked it and lost the answer, and the client's second try then finds its own work.
            if not _is_same_file(temporary, target):
                return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS):
                raise
            return self._create_without_links(target, data)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(target.parent)
        return True

    def replace(self, name: str, data: bytes) -> None:
        """See :meth:`RunStore.replace`."""
        target = self._root / name
        temporary = self._write_temporary(target, data)
        try:
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(target.parent)

    def read(self, name: str) -> bytes | None:
        """See :meth:`RunStore.read`."""
        try:
            return (self._root / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def names(self, folder: str) -> list[str]:
        """See :meth:`RunStore.names`."""
        return sorted(
            entry.name
            for entry in self._entries(folder)
            if entry.is_file() and not entry.name.startswith(TEMPORARY_PREFIX)
        )

    def folders(self, folder: str = "") -> list[str]:
        """See :meth:`RunStore.folders`."""
        return sorted(entry.name for entry in self._entries(folder) if entry.is_dir())

    def file_sizes(self, folder: str) -> dict[str, int] | None:
        """See :meth:`RunStore.file_sizes`."""
        root = self._root / folder
        if not root.is_dir():
            return None
        sizes: dict[str, int] = {}
        for parent, _, files in os.walk(root, onerror=_raise_unless_gone):
            for file in files:
                if file.startswith(TEMPORARY_PREFIX):
                    continue
                path = Path(parent, file)
                try:
                    sizes[path.relative_to(root).as_posix()] = path.stat().st_size
                except FileNotFoundError:  # deleted while we looked
                    continue
        return sizes

    def delete(self, name: str) -> None:
        """See :meth:`RunStore.delete`."""
        (self._root / name).unlink(missing_ok=True)

    def delete_folder(self, name: str, check: Callable[[], object] | None = None) -> bool:
        """See :meth:`RunStore.delete_folder`.

        All is deleted through the open folder, which stays the same one whoever takes its name. By name only an
        empty folder can go.
        """
        return self._delete_folder(name, check, with_itself=True)

    def empty_folder(self, name: str, check: Callable[[], object] | None = None) -> bool:
        """See :meth:`RunStore.empty_folder`."""
        return self._delete_folder(name, check, with_itself=False)

    def abandon_uploads(self) -> int:
        """See :meth:`RunStore.abandon_uploads`. On a disk they lie in the checkpoint's folder, and go with it."""
        return 0

    def _delete_folder(self, name: str, check: Callable[[], object] | None, *, with_itself: bool) -> bool:
        path = self._root / name
        try:
            handle = os.open(path, _NO_LINK)
        except (FileNotFoundError, NotADirectoryError):
            return False
        try:
            if check is not None:
                check()
            for turns_left in reversed(range(self._SWEEPS)):
                self._empty(handle)
                if not with_itself or not _is_still(handle, path):
                    break
                try:
                    self._remove_empty(path)
                    break
                except FileNotFoundError:
                    break
                except OSError as error:
                    # A writer that was stopped until now may have created a file since the folder was swept.
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not turns_left:
                        raise
        finally:
            os.close(handle)
        sync_folder(path.parent)
        return True

    def _empty(self, handle: int) -> None:
        """Delete all below an open folder. Others may do the same."""
        with os.scandir(handle) as found:
            entries = list(found)
        for entry in entries:
            with suppress(FileNotFoundError):
                if not entry.is_dir(follow_symlinks=False):
                    self._unlink(entry.name, handle)
                    continue
                child = os.open(entry.name, _NO_LINK, dir_fd=handle)
                try:
                    self._empty(child)
                finally:
                    os.close(child)
                os.rmdir(entry.name, dir_fd=handle)

    def _unlink(self, name: str, handle: int) -> None:
        os.unlink(name, dir_fd=handle)

    def _remove_empty(self, path: Path) -> None:
        path.rmdir()

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self._root / folder) as entries:
                return list(entries)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _write_temporary(self, target: Path, data: bytes) -> Path:
        make_folder(target.parent)
        handle, temporary = tempfile.mkstemp(prefix=TEMPORARY_PREFIX, dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                os.fchmod(file.fileno(), 0o644)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        return Path(temporary)

    def _create_without_links(self, target: Path, data: bytes) -> bool:
        """Create exclusively on a mount without hard links; a crash in between leaves a torn file."""
        try:
            handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(target.parent)
        return True


def make_folder(path: Path) -> None:
    """Make a folder and those that it is in, where there are none, so that they outlast a power cut."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)


def sync_folder(path: str | Path) -> None:
    """Write the names in a folder to the disk."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:  # some network mounts cannot sync a directory; the files in it are synced
        pass
    finally:
        os.close(handle)


def sync_tree(path: Path) -> None:
    """Write a file, or a folder with all below it, to the disk, then its own name.

    Raises:
        OSError: The disk has lost some of it. A second try would not notice: write it anew.
    """
    for entry in [*sorted(path.rglob("*"), reverse=True), path]:  # what is in a folder comes before it
        mode = entry.lstat().st_mode
        if stat.S_ISDIR(mode):
            sync_folder(entry)
        elif stat.S_ISREG(mode):  # a link is part of its folder
            with entry.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(path.parent)


def _is_still(handle: int, path: Path) -> bool:
    """Return whether a path still leads to an open folder."""
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False


def _is_same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except FileNotFoundError:
        return False


def _raise_unless_gone(error: OSError) -> None:
    """A folder that cannot be listed is not an empty one."""
    if not isinstance(error, FileNotFoundError):
        raise error
