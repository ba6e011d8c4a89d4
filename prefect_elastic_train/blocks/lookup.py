"""Saved blocks by name: those that a person names, those of a profile, those that the settings name as default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from prefect.exceptions import ObjectNotFound

from prefect_elastic_train import blocks
from prefect_elastic_train.blocks._common import TrainingBlock
from prefect_elastic_train.core import storage_settings
from prefect_elastic_train.core.operator_settings import default_block_name, variable_of
from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.core.settings import plain

AnyBlock = TypeVar("AnyBlock", bound=TrainingBlock)

StorageBlock = blocks.LocalStorage | blocks.S3Storage | blocks.FsspecStorage

#: Each storage block and the plain settings in it.
STORAGE_TYPES: dict[type[StorageBlock], type[storage_settings.StorageSettings]] = {
    blocks.LocalStorage: storage_settings.LocalStorageSettings,
    blocks.S3Storage: storage_settings.S3StorageSettings,
    blocks.FsspecStorage: storage_settings.FsspecStorageSettings,
}
#: The types of blocks that each argument of ``elastic_train`` takes.
BLOCK_TYPES: dict[str, Sequence[type[TrainingBlock]]] = {
    "scaling": [blocks.ElasticScaling],
    "failures": [blocks.FailureBudget],
    "checkpoints": [blocks.CheckpointPolicy],
    "storage": [*STORAGE_TYPES],
    "cluster": [blocks.RayCluster],
}


def find_saved(kinds: Sequence[type[AnyBlock]], name: str) -> AnyBlock | None:
    """Load a saved block of some types by ``"<block type>/<name>"``, or by the name alone; None if there is none.

    Raises:
        ConfigurationError: There are several, or it cannot be loaded, or its data are not allowed.
    """
    slug, _, short = name.rpartition("/")
    found: list[AnyBlock] = []
    for kind in [kind for kind in kinds if slug in ("", kind.get_block_type_slug())]:
        try:
            found.append(kind.load(short, _sync=True))  # type: ignore[call-arg, arg-type]
        except ConfigurationError:
            raise
        except ValueError as error:
            if not isinstance(error.__cause__, ObjectNotFound):
                raise ConfigurationError(f"cannot load block {kind.get_block_type_slug()}/{short}: {error}") from error
    if len(found) > 1:
        raise ConfigurationError(f"{name!r} names several blocks: give one of {', '.join(map(saved_name, found))}")
    return found[0] if found else None


def load_saved(kinds: Sequence[type[AnyBlock]], name: str) -> AnyBlock:
    """Load a saved block that must be there, see :func:`find_saved`."""
    block = find_saved(kinds, name)
    if block is None:
        short = name.rpartition("/")[2]
        tried = " or ".join(f"{kind.get_block_type_slug()}/{short}" for kind in kinds)
        hint = f"; a directory is given as ./{short}" if kinds[0] in STORAGE_TYPES else ""
        raise ConfigurationError(
            f"cannot load block {name!r}: there is no {tried}. See `prefect block ls`, or save one with "
            f"{kinds[0].__name__}(...).save({short!r}){hint}"
        )
    return block


def saved_name(block: TrainingBlock) -> str:
    """Return what loads a block elsewhere, ``"<block type>/<name>"``; empty if it is not a saved one."""
    name = block._block_document_name
    return f"{block.get_block_type_slug()}/{name}" if name and not block._is_anonymous else ""


def reference_to(block: TrainingBlock) -> dict[str, dict[str, str]]:
    """Return what stands for a saved block among the parameters of a flow run, as the UI makes it."""
    return {"$ref": {"block_document_id": str(block._block_document_id)}}


def values_of(block: TrainingBlock, **options: Any) -> dict[str, Any]:
    """Return a block's values as JSON has them, secrets as asterisks, without what Prefect adds."""
    return block.model_dump(mode="json", include=set(type(block).model_fields), **options)


def plain_storage(block: StorageBlock) -> storage_settings.StorageSettings:
    """Return a storage block's values as the plain settings that everything else reads."""
    return plain(STORAGE_TYPES[type(block)], block)


def chosen_block(argument: str, name: str = "", profile: str = "") -> TrainingBlock:
    """Load the block of a training that stands for an argument of ``elastic_train``.

    That is the one of this name, as ``training-storage-s3/prod`` or ``prod``; a storage may also be a directory
    (``./runs``) or a URL (``s3://bucket/runs``, ambient credentials). Without a name it is the one that is saved under
    the profile's, else what the settings say, else the default.

    Raises:
        ConfigurationError: There is no such block, or it cannot be loaded.
    """
    kinds = BLOCK_TYPES[argument]
    if name and argument == "storage" and (settings := storage_settings.storage_at(name)):
        [kind] = [kind for kind, plain_kind in STORAGE_TYPES.items() if type(settings) is plain_kind]
        return kind(**dict(settings))
    if name:
        return load_saved(kinds, name)
    if profile and (block := find_saved(kinds, profile)):
        return block
    if default := default_block_name(argument):
        try:
            return load_saved(kinds, default)
        except ConfigurationError as error:  # say who names it: nobody has typed it just now
            raise ConfigurationError(f"{variable_of(f'default_{argument}')}={default!r}: {error}") from error
    return blocks.LocalStorage(path=storage_settings.DEFAULT_STORAGE) if argument == "storage" else kinds[0]()


def chosen_blocks(names: Mapping[str, str], profile: str = "") -> dict[str, TrainingBlock]:
    """Load all blocks of a training, by argument; see :func:`chosen_block`."""
    chosen = {argument: chosen_block(argument, names.get(argument, ""), profile) for argument in BLOCK_TYPES}
    if profile and not any(block._block_document_name == profile for block in chosen.values()):
        raise ConfigurationError(f"--profile {profile}: no block of a training has this name. See `prefect block ls`")
    return chosen
