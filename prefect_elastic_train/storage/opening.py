"""Opening a storage: from its settings to its run directories."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prefect_elastic_train.core.storage_settings import LocalStorageSettings, StorageSettings
from prefect_elastic_train.storage.object_store import ObjectRunStore
from prefect_elastic_train.storage.objects import ObjectClient
from prefect_elastic_train.storage.retries import Retries
from prefect_elastic_train.storage.retrying_store import RetryingStore
from prefect_elastic_train.storage.store import LocalRunStore, RunStore, sync_tree


@dataclass(frozen=True)
class Storage:
    """A place with run directories.

    Attributes:
        settings: What it was opened with.
        retries: How its operations are repeated.
    """

    settings: StorageSettings
    retries: Retries
    _open: Callable[[str], RunStore]

    @property
    def uri(self) -> str:
        """Where it is, for people and other programs."""
        return self.settings.uri

    def run(self, name: str) -> RetryingStore:
        """Return a run directory, which need not exist."""
        return self.folder(f"{self.settings.root}/{name}")

    def folder(self, path: str) -> RetryingStore:
        """Return a folder on the storage's filesystem."""
        return RetryingStore(self._open(path), self.retries)

    def copy_folder(self, source: str, target: str) -> None:
        """Copy a folder of this storage, with all below it, within it; an object store copies by itself.

        Raises:
            StorageFaultError: The storage refuses, or was away for too long.
        """
        inner = self._open(source)
        if isinstance(inner, ObjectRunStore):
            inner.client.copy_folder(source, target)
            return

        def copy() -> None:
            shutil.copytree(source, target, dirs_exist_ok=True, copy_function=_copy_anew)
            sync_tree(Path(target))

        self.retries.call(f"copy {source}", copy)

    def run_names(self) -> list[str]:
        """Return the names of the folders that may be run directories."""
        return [name for name in self.folder(self.settings.root).folders() if not name.startswith(".")]


def open_storage(settings: StorageSettings, retry_seconds: float | None = None) -> Storage:
    """Open a storage; nothing is connected yet.

    Args:
        settings: Of the storage block.
        retry_seconds: How long operations are repeated; default as the settings say.
    """
    if retry_seconds is not None:
        settings = settings.model_copy(update={"retry_seconds": retry_seconds})
    if isinstance(settings, LocalStorageSettings):
        return Storage(settings, Retries(settings.retry_seconds, settings.uri), lambda path: LocalRunStore(path))
    client = ObjectClient(settings)
    return Storage(settings, client.retries, lambda path: ObjectRunStore(client, path))


def _copy_anew(source: str, target: str) -> None:
    """Copy a file over what an earlier try has left, which may be read-only."""
    Path(target).unlink(missing_ok=True)
    shutil.copy2(source, target)
