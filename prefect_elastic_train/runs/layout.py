"""Names inside a run directory, and a view of one in which nothing can be written."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import TypeAlias

from prefect_elastic_train.storage.store import RunStore

#: Ray Train's own file; ours is a mirror of the newest commit.
SNAPSHOT = "checkpoint_manager_snapshot.json"
STATE_FOLDER = ".elastic_train"
RUN = f"{STATE_FOLDER}/run.json"
ATTEMPTS = f"{STATE_FOLDER}/attempts"
ENDED = f"{STATE_FOLDER}/ended"
COMMITS = f"{STATE_FOLDER}/commits"
EVENTS = f"{STATE_FOLDER}/events"
HEARTBEAT = f"{STATE_FOLDER}/heartbeat.json"
LOGS = f"{STATE_FOLDER}/logs"

_NUMBERS = re.compile(r"^(\d{4,})(?:-(\d{6,}))?\.json$")


def attempt_name(attempt: int) -> str:
    """Return the object that fences off all attempts before this one."""
    return f"{ATTEMPTS}/{attempt:04d}.json"


def ended_name(attempt: int) -> str:
    """Return the object that tells how an attempt ended."""
    return f"{ENDED}/{attempt:04d}.json"


def details_name(attempt: int) -> str:
    """Return the object with what Ray said itself in an attempt in which something failed."""
    return f"{LOGS}/{attempt:04d}.log"


def commit_name(attempt: int, sequence: int) -> str:
    """Return the object that holds an attempt's commit."""
    return f"{COMMITS}/{attempt:04d}-{sequence:06d}.json"


def parse_numbers(name: str) -> tuple[int, ...]:
    """Return attempt and, of a commit, sequence number of an object's name; nothing for a foreign object."""
    match = _NUMBERS.match(name)
    return tuple(int(number) for number in match.groups() if number) if match else ()


class RunView:
    """A run directory as it was when it was first asked for each thing. See :class:`RunStore` for the methods.

    Args:
        store: The run directory, for whoever looks again.
    """

    def __init__(self, store: RunReader) -> None:
        self.store = store
        self.path: str = store.path
        self.uri: str = store.uri
        self.read: Callable[[str], bytes | None] = cache(store.read)
        self.names: Callable[[str], list[str]] = cache(store.names)
        self.folders: Callable[..., list[str]] = cache(store.folders)
        self._files = cache(lambda: _by_folder(store.file_sizes("") or {}))
        if not getattr(store, "has_folders", True):
            self.folders = self._folders_with_files

    def file_sizes(self, folder: str) -> dict[str, int] | None:
        """See :meth:`RunStore.file_sizes`; the run is listed once as a whole, and a folder without a file is none."""
        return self._files().get(folder)

    def _folders_with_files(self, folder: str = "") -> list[str]:
        """Return the folders in a folder, without asking for each anew what is in it."""
        below = (name.rpartition("/") for name in self._files() if name)
        return sorted(name for parent, _, name in below if parent == folder)


def _by_folder(sizes: dict[str, int]) -> dict[str, dict[str, int]]:
    """Return the files below each folder, by their paths relative to it."""
    files: dict[str, dict[str, int]] = {}
    for name, size in sizes.items():
        parts = name.split("/")
        for depth in range(len(parts)):
            files.setdefault("/".join(parts[:depth]), {})["/".join(parts[depth:])] = size
    return files


#: The half of a :class:`RunStore` that writes nothing is all that a look takes.
RunReader: TypeAlias = RunStore | RunView
