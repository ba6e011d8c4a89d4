"""A run directory for those who only look: each thing is read once, and nothing can be written."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeAlias

from prefect_elastic_train.storage.store import RunStore


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

    def file_sizes(self, folder: str) -> dict[str, int] | None:
        """See :meth:`RunStore.file_sizes`; the run is listed once as a whole, and a folder without a file is none."""
        return self._files().get(folder)


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
