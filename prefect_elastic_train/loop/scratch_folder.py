"""Temporary folders in which checkpoints are written before they are uploaded."""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "elastic-train-loop-"


class ScratchFolder:
    """New temporary folder of this process for the files of a checkpoint.

    It is locked until it is removed or the process exits.

    Attributes:
        path: Path of the folder.
    """

    path = ""

    def __init__(self) -> None:
        while not os.path.exists(self.path):  # another process may remove the folder before it is locked
            self.path = tempfile.mkdtemp(prefix=_PREFIX)
            self._lock = os.open(self.path, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Delete the temporary folder with its files, and release its lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_abandoned_folders() -> None:
    """Delete the temporary checkpoint folders that killed processes left on this machine: no process locks them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # in use, of another user, or already removed
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
