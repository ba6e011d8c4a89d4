"""The run filesystem on a disk or on a shared mount: a file has its name once all of it is on the disk."""

from __future__ import annotations

import io
import os
import shutil
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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
    sync_folder,
    sync_tree,
)

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
        self._check_fence_of(path)
        self._inner.delete_file(path)

    def move(self, src: str, dest: str) -> None:
        """Move a file or folder, unless another attempt has taken over. It may come from outside of the run."""
        self._check_fence_of(src)
        self._check_fence_of(dest)
        self._inner.move(src, dest)
        sync_tree(Path(dest))
        sync_folder(Path(src).parent)

    def copy_file(self, src: str, dest: str) -> None:
        """Copy a file, unless another attempt has taken over."""
        self._check_fence_of(dest)
        self._copy(src, dest)
        sync_folder(Path(dest).parent)

    def upload_folder(self, source: str, target: str) -> None:
        """See :meth:`RunFilesystem.upload_folder`. The kernel copies; a file has its name once it is on the disk."""
        if os.path.isfile(source):
            self.copy_file(source, target)
            return
        self._check_fence_of(target)
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
        unfinished = _temporary(target)

        def copy() -> None:
            try:
                shutil.copyfile(source, unfinished)
                with open(unfinished, "rb+") as file:
                    with suppress(OSError):  # some mounts know no modes
                        os.fchmod(file.fileno(), os.stat(source).st_mode & 0o777)
                    # In here: after an error of the disk all of it is to be written anew.
                    os.fsync(file.fileno())
                os.replace(unfinished, target)
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
        self._check_fence_of(path)
        return pa.PythonFile(_PartialFile(path, self._retries), mode="w")


class _PartialFile(io.RawIOBase):
    """A file that gets its name when it is closed, and none if it never comes to that."""

    def __init__(self, path: str, retries: Retries) -> None:
        self._path = path
        self._retries = retries
        self._offset = 0
        self._descriptor = -1
        self._unfinished = _temporary(path)
        self._descriptor = os.open(self._unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

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
            os.fsync(self._descriptor)
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)  # a network mount says here what it could not write
            self._retries.call(f"write {self._path}", lambda: os.replace(self._unfinished, self._path))
            sync_folder(Path(self._path).parent)
        finally:
            self._discard()

    def __del__(self) -> None:
        # Not the base's, which would close it: a copy that failed is dropped without a word.
        self._discard()

    def _discard(self) -> None:
        """Close what is open, and remove the file if it still has its temporary name."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        with suppress(OSError):
            os.unlink(self._unfinished)


def _temporary(path: str) -> str:
    """Return a name for a file that is not finished, beside its own."""
    return f"{path.rpartition('/')[0]}/{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
