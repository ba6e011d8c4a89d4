"""Folders in which checkpoints are written before they are uploaded; those of killed processes are removed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "elastic-train-loop-"


class ScratchFolder:
    """A new folder at ``path``, which is locked while its process lives."""

    def __init__(self) -> None:
        self.path, self._lock = "", -1
        while not os.path.exists(self.path):  # else another process took it for one that was left, in that moment
            self.path = tempfile.mkdtemp(prefix=_PREFIX)
            self._lock = os.open(self.path, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_left_folders() -> None:
    """Remove the folders of processes that are gone."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # in use, of another user, or gone
            lock = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)
