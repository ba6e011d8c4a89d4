"""The run filesystem on a disk or on a shared mount.

A process may be stopped between its look at the fence and what it does then. So what is written or deleted is
reached through its folder, opened before the look: should a successor have removed that folder meanwhile, nothing
happens to the one that has its name now.
"""

from __future__ import annotations

import io
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

from prefect_elastic_train.elastic.run_filesystem import RunFilesystem
from prefect_elastic_train.storage.files import files_below, run_all
from prefect_elastic_train.storage.retries import Retries
from prefect_elastic_train.storage.store import (
    TEMPORARY_PREFIX,
    RunStore,
    make_folder,
    open_folder,
    sync_folder,
    sync_tree,
)

__all__ = ["LocalRunFilesystem"]

#: Files copied at a time.
_COPIES = 4


class LocalRunFilesystem(RunFilesystem):
    """See :class:`RunFilesystem`. Reads go straight to pyarrow's local filesystem."""

    def __init__(self, store: RunStore, attempt: int) -> None:
        super().__init__(store, attempt)
        self._inner = fs.LocalFileSystem()

    def normalize_path(self, path: str) -> str:
        """Give the path in the form of the filesystem below."""
        return str(self._inner.normalize_path(path))

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        """Describe what a selector finds."""
        found = self._retries.call(f"list {selector.base_dir}", lambda: self._inner.get_file_info(selector))
        return [info for info in found if not info.base_name.startswith(TEMPORARY_PREFIX)]

    def delete_file(self, path: str) -> None:
        """Delete a file, unless another attempt has taken over."""
        with self._fenced(path) as file:
            self._inner.delete_file(file)

    def move(self, src: str, dest: str) -> None:
        """Move a file or folder, unless another attempt has taken over. It may come from outside of the run."""
        with self._fenced(src) as source, self._fenced(dest) as target:
            self._inner.move(source, target)
            sync_tree(Path(target))
            sync_folder(Path(source).parent)

    def copy_file(self, src: str, dest: str) -> None:
        """Copy a file, unless another attempt has taken over."""
        self._copy(src, dest)
        sync_folder(Path(dest).parent)

    def upload_folder(self, source: str, target: str) -> None:
        """See :meth:`RunFilesystem.upload_folder`. The kernel copies; a file has its name once it is on the disk."""
        if os.path.isfile(source):
            self.copy_file(source, target)
            return
        jobs: list[Callable[[], None]] = []
        made = []
        for relative, folders, files in files_below(source):
            parent, below = (f"{root}/{relative}".rstrip("/") for root in (source, target))
            made.append(below)
            for path in (f"{below}/{folder}" for folder in folders):
                self._retries.call(f"make {path}", partial(self._inner.create_dir, path))
            jobs += [
                lambda file=f"{parent}/{file}", path=f"{below}/{file}": self._copy(file, path)  # type: ignore[misc]
                for file in files
            ]
        with ThreadPoolExecutor(_COPIES, thread_name_prefix="elastic-train-copy") as pool:
            run_all(pool, [pool.submit(job) for job in jobs])
            run_all(pool, [pool.submit(sync_folder, folder) for folder in made])

    def _copy(self, source: str, target: str) -> None:
        def copy() -> None:
            with self._fenced_folder(target) as (folder, name):
                unfinished = f"/proc/self/fd/{folder}/{_temporary_name()}"
                try:
                    shutil.copyfile(source, unfinished)
                    with open(unfinished, "rb+") as file:
                        with suppress(OSError):  # some mounts know no modes
                            os.fchmod(file.fileno(), os.stat(source).st_mode & 0o777)
                        # In here: after an error of the disk all of it is to be written anew.
                        os.fsync(file.fileno())
                    os.replace(unfinished, f"/proc/self/fd/{folder}/{name}")
                except BaseException:
                    with suppress(OSError):
                        os.unlink(unfinished)
                    raise

        self._retries.call(f"write {target}", copy)

    def _info(self, path: str) -> fs.FileInfo:
        info: fs.FileInfo = self._retries.call(f"look at {path}", lambda: self._inner.get_file_info(path))
        return info

    def _make_folder(self, path: str, recursive: bool) -> None:
        self._retries.call(f"make {path}", lambda: make_folder(Path(path)))

    def _delete_outside(self, path: str, *, with_itself: bool, missing_ok: bool) -> None:
        if with_itself:
            self._inner.delete_dir(path)
        else:
            self._inner.delete_dir_contents(path, missing_dir_ok=missing_ok)

    def _open_input(self, path: str) -> pa.NativeFile:
        return self._retries.call(f"open {path}", lambda: self._inner.open_input_file(path))

    def _open_output(self, path: str) -> pa.NativeFile:
        return pa.PythonFile(_PartialFile(self, path, self._retries), mode="w")

    @contextmanager
    def _fenced(self, path: str) -> Iterator[str]:
        """Check the fence and give a path to the same file that stays with its folder, whoever takes its name."""
        with self._fenced_folder(path) as (folder, name):
            yield f"/proc/self/fd/{folder}/{name}" if self._is_in_run(path) else path

    @contextmanager
    def _fenced_folder(self, path: str) -> Iterator[tuple[int, str]]:
        """Open a file's folder, then check the fence; give the folder's descriptor and the file's name in it."""
        parent, _, name = path.rpartition("/")
        folder = open_folder(parent)
        try:
            with _naming(path):
                self._check_fence_of(path)
                yield folder, name
        finally:
            os.close(folder)


class _PartialFile(io.RawIOBase):
    """A file that gets its name when it is closed, and none if it never comes to that."""

    def __init__(self, filesystem: LocalRunFilesystem, path: str, retries: Retries) -> None:
        self._path = path
        self._retries = retries
        self._offset = 0
        self._name = _temporary_name()
        self._descriptor = self._folder = -1
        # Kept open: whoever takes the folder's name is not written into.
        with filesystem._fenced_folder(path) as (folder, self._final_name):
            self._folder = os.dup(folder)
            self._descriptor = os.open(self._name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=folder)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        size = len(view)
        while view:
            written = self._retries.call(
                f"write {self._path}",
                lambda view=view: os.pwrite(self._descriptor, view, self._offset),  # type: ignore[misc]
            )
            self._offset += written
            view = view[written:]
        return size

    def tell(self) -> int:
        return self._offset

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        try:
            with _naming(self._path):
                os.fsync(self._descriptor)
                descriptor, self._descriptor = self._descriptor, -1
                os.close(descriptor)  # a network mount says here what it could not write
                self._retries.call(
                    f"write {self._path}",
                    lambda: os.replace(self._name, self._final_name, src_dir_fd=self._folder, dst_dir_fd=self._folder),
                )
                sync_folder(f"/proc/self/fd/{self._folder}")
        finally:
            self._discard()

    def __del__(self) -> None:
        # Not the base's, which would close it: a copy that failed is dropped without a word.
        self._discard()

    def _discard(self) -> None:
        """Close what is open, and remove the file if it still has its temporary name."""
        descriptor, self._descriptor = self._descriptor, -1
        folder, self._folder = self._folder, -1
        if descriptor >= 0:
            os.close(descriptor)
        if folder >= 0:
            with suppress(OSError):
                os.unlink(self._name, dir_fd=folder)
            os.close(folder)


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Have errors name a file as it is known, not as it was reached."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), path) from error


def _temporary_name() -> str:
    return f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
