"""Storages by their place: a directory or a URL. Reads no saved block, so that it needs no Prefect."""

from __future__ import annotations

from prefect_elastic_train.core.masking import without_credentials
from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.core.storage_settings import (
    FsspecStorageSettings,
    LocalStorageSettings,
    S3StorageSettings,
    StorageSettings,
)

__all__ = ["storage_at"]


def storage_at(text: str) -> StorageSettings | None:
    """Give the storage at a place, with the ambient credentials.

    Args:
        text: A directory (``./runs``, ``~/runs``, ``/mnt/runs``) or a URL (``s3://bucket/runs``).

    Returns:
        None if it names no place but, perhaps, a saved block.

    Raises:
        ConfigurationError: It is a place that cannot be a storage.
    """
    try:
        if text.startswith(("s3://", "s3a://")):
            return S3StorageSettings(bucket_path=text)
        if text.startswith(("file://", "/", ".", "~")):
            return LocalStorageSettings(path=text)
        if "://" in text:
            return FsspecStorageSettings(url=text)
    except ValueError as error:
        raise ConfigurationError(f"storage {without_credentials(text)!r}: {error}") from error
    return None
