"""Files of this machine's disk on their way to a storage or from one."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

from prefect_elastic_train.core.outcomes import ElasticTrainError, StorageFaultError

#: What an operating system says of its own disk, and no connection.
_OF_THE_DISK = (errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EPERM)


class LocalDiskError(ElasticTrainError):
    """This machine's own disk failed while data went to or came from a storage. That one is not to blame."""


def files_below(folder: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield each folder at and below a path, relative to it, with its folders and its files; links are followed.

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


def run_all(pool: ThreadPoolExecutor, futures: Sequence[Future[Any]]) -> None:
    """Wait for transfers; when one fails, those that wait are left out and its error is raised."""
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    failed = next((future for future in done if future.exception() is not None), None)
    if failed is not None:
        pool.shutdown(wait=True, cancel_futures=True)
        failed.result()


@contextmanager
def local_disk(path: str) -> Iterator[None]:
    """Keep errors of this machine's disk apart from those of the storage, which come from the network.

    Raises:
        LocalDiskError: In place of the disk's.
    """
    try:
        yield
    except OSError as error:
        # What the store has answered is the cause of what s3fs makes of it.
        if isinstance(error, StorageFaultError) or error.__cause__ is not None or error.errno not in _OF_THE_DISK:
            raise
        failed = error
    else:
        return
    # Without the cause, which would be taken for the storage's.
    raise LocalDiskError(f"this machine's own disk failed at {path}: {failed}")
