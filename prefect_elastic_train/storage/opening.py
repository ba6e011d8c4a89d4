"""Opening of a storage, from its settings to its run directories. Belongs to all processes."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from pydantic import SecretStr

from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.core.settings import (
    FsspecStorageSettings,
    LocalStorageSettings,
    S3StorageSettings,
    StorageSettings,
)

from .object_store import ObjectRunStore
from .retries import Retries
from .store import LocalRunStore, RunStore


class Storage:
    """A folder of run directories, on a disk or in an object store.

    Thread-safe and picklable. It connects when it is used.
    """

    def __init__(self, settings: StorageSettings) -> None:
        self.settings = settings
        self.uri = settings.uri
        hidden = [value.get_secret_value() for _, value in settings if isinstance(value, SecretStr)]
        if isinstance(settings, FsspecStorageSettings):
            hidden += _strings_in(settings.hidden_options)
        secrets = tuple(text for text in hidden if len(text) > 3)
        self.retries = Retries(settings.retry_seconds, settings.uri, secrets, settings._outage)

    def __reduce__(self) -> tuple[Any, ...]:
        return Storage, (self.settings,)

    def run(self, name: str) -> RunStore:
        """Return the store of a run directory, by the run's name. The run directory may not exist yet."""
        return self.folder(f"{self.settings.root}/{name}")

    def folder(self, path: str) -> RunStore:
        """Return the store of a folder, by its path on the storage's filesystem."""
        if isinstance(self.settings, LocalStorageSettings):
            return LocalRunStore(path, self.retries)
        return ObjectRunStore(path, self)

    def run_names(self) -> list[str]:
        """Return the names of the folders in the storage that may be run directories."""
        return [name for name in self.folder(self.settings.root).folders() if not name.startswith(".")]

    @cached_property
    def filesystem(self) -> Any:
        """The fsspec filesystem of an object store."""
        scheme = self.uri.partition("://")[0]
        try:
            if isinstance(self.settings, S3StorageSettings):
                from .s3 import S3Files

                return S3Files(self.settings, self.retries)
            import fsspec

            assert isinstance(self.settings, FsspecStorageSettings)
            options = {"skip_instance_cache": True, "use_listings_cache": False}
            return fsspec.filesystem(scheme, **(options | self.settings.options | self.settings.hidden_options))
        except Exception as error:  # noqa: BLE001 - each client has its own exceptions
            problem = self.retries.without_secrets(f"{type(error).__name__}: {error}")
        raise ConfigurationError(
            f"cannot open {scheme}:// here: {problem}. Install the package that it needs on every node "
            "(`pip install 'prefect-elastic-train[s3]'` for S3, gcsfs for Google, adlfs for Azure), and correct the "
            "options of the storage block"
        )


def _strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings_in(inner)
