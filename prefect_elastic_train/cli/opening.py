"""Opening a storage for a person, who waits for the answer."""

from __future__ import annotations

from prefect_elastic_train.core.storage_settings import StorageSettings
from prefect_elastic_train.storage.opening import Storage, open_storage

#: A storage that is away for longer is said to be.
_RETRY_SECONDS = 20.0


def open_briefly(settings: StorageSettings) -> Storage:
    """Open a storage whose operations are repeated for as long as a person waits, not for as long as a training."""
    return open_storage(settings, min(settings.retry_seconds, _RETRY_SECONDS))
