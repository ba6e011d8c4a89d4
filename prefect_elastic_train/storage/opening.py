"""Opening a storage: from its settings to its run directories."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from prefect_elastic_train.core.storage_settings import LocalStorageSettings, S3StorageSettings, StorageSettings
from prefect_elastic_train.storage.objects import ObjectClient, ObjectRunStore
from prefect_elastic_train.storage.retries import Retries
from prefect_elastic_train.storage.store import LocalRunStore, RunStore


@dataclass(frozen=True)
class Storage:
    """A place with run directories."""

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
    """Open a storage, whose operations are repeated for as long as its settings say; nothing is connected yet."""
    if retry_seconds is not None:
        settings = settings.model_copy(update={"retry_seconds": retry_seconds})
    if isinstance(settings, LocalStorageSettings):
        return Storage(settings, Retries(settings.retry_seconds, settings.uri))
    if isinstance(settings, S3StorageSettings):
        keys = [settings.access_key_id, settings.secret_access_key, settings.session_token]
        secrets = [key.get_secret_value() for key in keys]
    else:
        secrets = list(_strings_in(settings.hidden_options))
    retries = Retries(settings.retry_seconds, settings.uri, tuple(secret for secret in secrets if len(secret) > 3))
    return Storage(settings, retries, ObjectClient(settings, retries))


def _strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings_in(inner)
