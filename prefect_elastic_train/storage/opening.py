"""Opening a storage: from its settings to its run directories."""

from __future__ import annotations

from dataclasses import dataclass, field

from prefect_elastic_train.core.storage_settings import LocalStorageSettings, StorageSettings
from prefect_elastic_train.storage.objects import ObjectClient, ObjectRunStore, retries_of
from prefect_elastic_train.storage.retries import Retries
from prefect_elastic_train.storage.store import LocalRunStore, RunStore


@dataclass(frozen=True)
class Storage:
    """A place with run directories.

    Attributes:
        settings: What it was opened with.
        retries: How its operations are repeated.
    """

    settings: StorageSettings
    retries: Retries
    _client: ObjectClient | None = field(default=None, repr=False)

    @property
    def uri(self) -> str:
        """Where it is, for people and other programs."""
        return self.settings.uri

    def run(self, name: str) -> RunStore:
        """Return a run directory, which need not exist."""
        return self.folder(f"{self.settings.root}/{name}")

    def folder(self, path: str) -> RunStore:
        """Return a folder on the storage's filesystem."""
        if self._client is None:
            return LocalRunStore(path, self.retries)
        return ObjectRunStore(path, self.retries, self._client)

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
        return Storage(settings, Retries(settings.retry_seconds, settings.uri))
    return Storage(settings, retries_of(settings), ObjectClient(settings))
