"""Finding a storage by what a person types: a directory, a URL, or the name of a saved block."""

from __future__ import annotations

from prefect.exceptions import ObjectNotFound

from prefect_elastic_train.blocks.storage import FsspecStorage, LocalStorage, S3Storage
from prefect_elastic_train.config import plain
from prefect_elastic_train.outcomes import ConfigurationError
from prefect_elastic_train.places import storage_at
from prefect_elastic_train.storages import (
    FsspecStorageSettings,
    LocalStorageSettings,
    S3StorageSettings,
    StorageSettings,
)

__all__ = ["STORAGE_TYPES", "StorageBlock", "load_storage", "plain_storage", "storage_named"]

StorageBlock = LocalStorage | S3Storage | FsspecStorage

#: Each storage block and the plain settings in it.
STORAGE_TYPES: dict[type[StorageBlock], type[StorageSettings]] = {
    LocalStorage: LocalStorageSettings,
    S3Storage: S3StorageSettings,
    FsspecStorage: FsspecStorageSettings,
}


def load_storage(name: str) -> StorageBlock:
    """Load a saved storage block.

    Args:
        name: ``"<block type>/<name>"``, or the name alone if no two types have it.

    Raises:
        ConfigurationError: There is no such block, or several; or its data are not allowed.
    """
    slug, slash, short = name.rpartition("/")
    types = [kind for kind in STORAGE_TYPES if not slash or kind.get_block_type_slug() == slug]
    found: list[StorageBlock] = []
    for kind in types:
        try:
            found.append(kind.load(short, _sync=True))  # type: ignore[call-arg, arg-type]
        except ConfigurationError:
            raise
        except ValueError as error:
            if not isinstance(error.__cause__, ObjectNotFound):  # such as that there is no API to ask
                raise ConfigurationError(f"cannot load storage block {name!r}: {error}") from error
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(f"{block.get_block_type_slug()}/{short}" for block in found)
        raise ConfigurationError(f"several storage blocks are called {short!r}: give one of {names}")
    slugs = ", ".join(kind.get_block_type_slug() for kind in STORAGE_TYPES)
    raise ConfigurationError(
        f"cannot load storage block {name!r}: there is none among {slugs}. See `prefect block ls`, or save one with "
        f"S3Storage(...).save({short!r})"
    )


def plain_storage(block: StorageBlock) -> StorageSettings:
    """Give a storage block's values as the plain settings that everything else reads."""
    return plain(STORAGE_TYPES[type(block)], block)


def storage_named(text: str) -> StorageSettings:
    """Give the storage that a person names.

    Args:
        text: A directory (``./runs``, ``/mnt/runs``), a URL (``s3://bucket/runs`` with the ambient credentials), or a
            saved block (``training-storage-s3/prod``, or ``prod``).

    Raises:
        ConfigurationError: It is none of these.
    """
    return storage_at(text) or plain_storage(load_storage(text))
