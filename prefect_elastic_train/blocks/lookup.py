"""Saved blocks by name: those that a person names, those of a profile, those that the settings name as default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from prefect.exceptions import ObjectNotFound

from prefect_elastic_train.blocks._common import TrainingBlock
from prefect_elastic_train.blocks.settings import (
    CheckpointPolicy,
    ElasticScaling,
    FailureBudget,
    FsspecStorage,
    LocalStorage,
    RayCluster,
    S3Storage,
)
from prefect_elastic_train.core.operator_settings import default_block_name, naming_the_setting
from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.core.settings import plain
from prefect_elastic_train.core.storage_settings import (
    DEFAULT_STORAGE,
    FsspecStorageSettings,
    LocalStorageSettings,
    S3StorageSettings,
    StorageSettings,
    storage_at,
)

AnyBlock = TypeVar("AnyBlock", bound=TrainingBlock)

StorageBlock = LocalStorage | S3Storage | FsspecStorage

#: Each storage block and the plain settings in it.
STORAGE_TYPES: dict[type[StorageBlock], type[StorageSettings]] = {
    LocalStorage: LocalStorageSettings,
    S3Storage: S3StorageSettings,
    FsspecStorage: FsspecStorageSettings,
}
#: The types of blocks that each argument of ``elastic_train`` takes.
BLOCK_TYPES: dict[str, Sequence[type[TrainingBlock]]] = {
    "scaling": [ElasticScaling],
    "failures": [FailureBudget],
    "checkpoints": [CheckpointPolicy],
    "storage": [*STORAGE_TYPES],
    "cluster": [RayCluster],
}


def find_saved(kinds: Sequence[type[AnyBlock]], name: str) -> AnyBlock | None:
    """Load a saved block of one of some types.

    Args:
        kinds: The types.
        name: ``"<block type>/<name>"``, or the name alone if no two of the types have it.

    Returns:
        The block; None if there is none.

    Raises:
        ConfigurationError: There are several, or it cannot be loaded, or its data are not allowed.
    """
    slug, slash, short = name.rpartition("/")
    found: list[AnyBlock] = []
    for kind in kinds:
        if slash and slug != kind.get_block_type_slug():
            continue
        try:
            found.append(kind.load(short, _sync=True))  # type: ignore[call-arg, arg-type]
        except ConfigurationError:
            raise
        except ValueError as error:
            if not isinstance(error.__cause__, ObjectNotFound):
                raise ConfigurationError(f"{_failure(kinds, name)}: {error}") from error
    if len(found) > 1:
        raise ConfigurationError(f"{name!r} are several blocks: say which of {', '.join(map(saved_name, found))}")
    return found[0] if found else None


def load_saved(kinds: Sequence[type[AnyBlock]], name: str) -> AnyBlock:
    """Load a saved block that must be there, see :func:`find_saved`.

    Raises:
        ConfigurationError: There is no such block, or several, or it cannot be loaded, or its data are not allowed.
    """
    block = find_saved(kinds, name)
    if block is None:
        raise ConfigurationError(
            f"{_failure(kinds, name)}: there is none. See `prefect block ls`, or save one with "
            f"{kinds[-1].__name__}(...).save({name.rpartition('/')[2]!r})"
        )
    return block


def _failure(kinds: Sequence[type[TrainingBlock]], name: str) -> str:
    slugs = [kind.get_block_type_slug() for kind in kinds]
    if len(slugs) == 1:
        return f"cannot load block {slugs[0]}/{name.rpartition('/')[2]}"
    return f"cannot load storage block {name!r} (a {' or '.join(slugs)})"


def load_block(kind: type[AnyBlock], name: str) -> AnyBlock:
    """Load a saved block of one type, see :func:`load_saved`."""
    return load_saved([kind], name)


def load_storage(name: str) -> StorageBlock:
    """Load a saved storage block of whatever type, see :func:`load_saved`."""
    return load_saved([*STORAGE_TYPES], name)


def saved_name(block: TrainingBlock) -> str:
    """Return what loads a block elsewhere, ``"<block type>/<name>"``; empty if it is not a saved one."""
    name = block._block_document_name
    return f"{block.get_block_type_slug()}/{name}" if name and not block._is_anonymous else ""


def plain_storage(block: StorageBlock) -> StorageSettings:
    """Return a storage block's values as the plain settings that everything else reads."""
    return plain(STORAGE_TYPES[type(block)], block)


def storage_named(text: str) -> StorageSettings:
    """Return the storage that a person names.

    Args:
        text: A directory (``./runs``, ``/mnt/runs``), a URL (``s3://bucket/runs`` with the ambient credentials), or a
            saved block (``training-storage-s3/prod``, or ``prod``).

    Raises:
        ConfigurationError: It is none of these.
    """
    return plain_storage(_storage_block_named(text))


def chosen_block(argument: str, name: str = "", profile: str = "") -> TrainingBlock:
    """Load one block of a training.

    Args:
        argument: The argument of ``elastic_train`` that it is for.
        name: Its name; a storage may also be a directory or a URL. Empty for what comes next:
        profile: A name that some blocks are saved under. Without one of this type there: as the settings say, else the
            default.

    Raises:
        ConfigurationError: There is no such block, or it cannot be loaded.
    """
    if name:
        return _storage_block_named(name) if argument == "storage" else load_saved(BLOCK_TYPES[argument], name)
    try:
        block = find_saved(BLOCK_TYPES[argument], profile) if profile else None
    except ConfigurationError as error:
        raise ConfigurationError(f"--profile {profile}: {error}; name the one with --{argument}") from error
    if block is not None:
        return block
    if name := default_block_name(argument):
        with naming_the_setting(argument):
            return load_saved(BLOCK_TYPES[argument], name)
    return LocalStorage(path=DEFAULT_STORAGE) if argument == "storage" else BLOCK_TYPES[argument][0]()


def chosen_blocks(names: Mapping[str, str], profile: str = "") -> dict[str, TrainingBlock]:
    """Load all blocks of a training.

    Args:
        names: Names by arguments, as :func:`chosen_block` takes them.
        profile: See there.

    Returns:
        A block for each of ``scaling``, ``failures``, ``checkpoints``, ``storage`` and ``cluster``.

    Raises:
        ConfigurationError: There is no such block, no block of that profile, or one that cannot be loaded.
    """
    blocks = {argument: chosen_block(argument, names.get(argument, ""), profile) for argument in BLOCK_TYPES}
    left = [argument for argument in blocks if not names.get(argument)]
    if profile and left and not any(blocks[argument]._block_document_name == profile for argument in left):
        wanted = ", ".join(f"{kind.get_block_type_slug()}/{profile}" for one in left for kind in BLOCK_TYPES[one])
        raise ConfigurationError(f"--profile {profile}: there is none of the blocks {wanted}. See `prefect block ls`")
    return blocks


def _storage_block_named(text: str) -> StorageBlock:
    """Return the storage that a person names, as a block: the saved one, or one that holds no more than the place."""
    settings = storage_at(text)
    if settings is not None:
        [kind] = [kind for kind, plain_kind in STORAGE_TYPES.items() if type(settings) is plain_kind]
        return kind(**{name: getattr(settings, name) for name in type(settings).model_fields})
    try:
        return load_storage(text)
    except ConfigurationError as error:
        hint = f". For the directory of this name give ./{text}" if Path(text).is_dir() else ""
        raise ConfigurationError(f"{error}{hint}") from error
