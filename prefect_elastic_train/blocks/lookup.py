"""Finding saved blocks by name, and a storage by what a person types: a directory, a URL, or the name of a block."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from prefect.exceptions import ObjectNotFound

from prefect_elastic_train.blocks._common import TrainingBlock
from prefect_elastic_train.blocks.storage import FsspecStorage, LocalStorage, S3Storage
from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.core.places import storage_at
from prefect_elastic_train.core.settings import plain
from prefect_elastic_train.core.storage_settings import (
    FsspecStorageSettings,
    LocalStorageSettings,
    S3StorageSettings,
    StorageSettings,
)

__all__ = [
    "STORAGE_TYPES",
    "StorageBlock",
    "load_block",
    "load_if_saved",
    "load_storage",
    "plain_storage",
    "saved_name",
    "storage_block_named",
    "storage_named",
]

AnyBlock = TypeVar("AnyBlock", bound=TrainingBlock)

StorageBlock = LocalStorage | S3Storage | FsspecStorage

#: Each storage block and the plain settings in it.
STORAGE_TYPES: dict[type[StorageBlock], type[StorageSettings]] = {
    LocalStorage: LocalStorageSettings,
    S3Storage: S3StorageSettings,
    FsspecStorage: FsspecStorageSettings,
}


def load_if_saved(kind: type[AnyBlock], name: str) -> AnyBlock | None:
    """Load a saved block; None if there is none of this type and name.

    Raises:
        ConfigurationError: Its data are not allowed.
        ValueError: It cannot be loaded, such as without an API to ask.
    """
    try:
        return kind.load(name, _sync=True)  # type: ignore[call-arg, return-value]
    except ValueError as error:
        if isinstance(error.__cause__, ObjectNotFound):
            return None
        raise


def load_block(kind: type[AnyBlock], name: str) -> AnyBlock:
    """Load a saved block of a type.

    Args:
        kind: The type.
        name: ``"<name>"`` or ``"<block type>/<name>"``.

    Raises:
        ConfigurationError: There is no such block, or it cannot be loaded, or its data are not allowed.
    """
    slug = kind.get_block_type_slug()
    short = name.removeprefix(f"{slug}/")
    hint = f"See `prefect block ls`, or save one with {kind.__name__}(...).save({short!r})"
    try:
        block = load_if_saved(kind, short)
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(f"cannot load block {slug}/{short}: {error}. {hint}") from error
    if block is None:
        raise ConfigurationError(f"cannot load block {slug}/{short}: there is none. {hint}")
    return block


def saved_name(block: TrainingBlock) -> str:
    """Give what loads a block elsewhere, ``"<block type>/<name>"``; empty if it is not a saved one."""
    name = block._block_document_name
    return f"{block.get_block_type_slug()}/{name}" if name and not block._is_anonymous else ""


def load_storage(name: str) -> StorageBlock:
    """Load a saved storage block.

    Args:
        name: ``"<block type>/<name>"``, or the name alone if no two types have it.

    Raises:
        ConfigurationError: There is no such block, or several; or its data are not allowed.
    """
    slug, slash, short = name.rpartition("/")
    types = [kind for kind in STORAGE_TYPES if not slash or kind.get_block_type_slug() == slug]
    try:
        found: list[StorageBlock] = [block for kind in types if (block := load_if_saved(kind, short)) is not None]
    except ConfigurationError:
        raise
    except ValueError as error:
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


def storage_block_named(text: str) -> StorageBlock:
    """Give the storage that a person names, as a block: the saved one, or one that holds no more than the place.

    Takes and raises the same as :func:`storage_named`.
    """
    settings = storage_at(text)
    if settings is None:
        return _load_named(text)
    [kind] = [kind for kind, plain_kind in STORAGE_TYPES.items() if type(settings) is plain_kind]
    return kind(**{name: getattr(settings, name) for name in type(settings).model_fields})


def storage_named(text: str) -> StorageSettings:
    """Give the storage that a person names.

    Args:
        text: A directory (``./runs``, ``/mnt/runs``), a URL (``s3://bucket/runs`` with the ambient credentials), or a
            saved block (``training-storage-s3/prod``, or ``prod``).

    Raises:
        ConfigurationError: It is none of these.
    """
    return storage_at(text) or plain_storage(_load_named(text))


def _load_named(name: str) -> StorageBlock:
    try:
        return load_storage(name)
    except ConfigurationError as error:
        hint = f". For the directory of this name give ./{name}" if Path(name).is_dir() else ""
        raise ConfigurationError(f"{error}{hint}") from error
