"""Find the block of an argument: a saved one by its name, the profile's, or the default of the settings."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

from prefect.exceptions import ObjectNotFound
from pydantic import SecretStr

from prefect_elastic_train import blocks
from prefect_elastic_train.core.operator_settings import get_settings, variable_of
from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.core.settings import DEFAULT_STORAGE, storage_at

from ._common import TrainingBlock

StorageBlock = blocks.LocalStorage | blocks.S3Storage | blocks.FsspecStorage


class Blocks(NamedTuple):
    """The loaded blocks of a training. Each field is an argument of ``elastic_train``."""

    scaling: blocks.ElasticScaling
    failures: blocks.FailureBudget
    checkpoints: blocks.CheckpointPolicy
    storage: StorageBlock
    cluster: blocks.RayCluster


STORAGE_TYPES: tuple[type[StorageBlock], ...] = get_args(StorageBlock)
#: The block types that each argument of ``elastic_train`` accepts.
BLOCK_TYPES: dict[str, tuple[type[TrainingBlock], ...]] = {
    argument: get_args(accepted) or (accepted,) for argument, accepted in get_type_hints(Blocks).items()
}
ALL_BLOCK_TYPES = [block_type for types in BLOCK_TYPES.values() for block_type in types]


def find_saved(types: Sequence[type[TrainingBlock]], name: str) -> TrainingBlock | None:
    """Return the saved block of one of the types with this name; None if there is none.

    The name is ``"<block type>/<name>"``, or the name alone.

    Raises:
        ConfigurationError: The name is ambiguous, the block cannot be loaded, or it holds a value that is not allowed.
    """
    slug, _, short = name.rpartition("/")
    matches: list[TrainingBlock] = []
    for block_type in types:
        if slug not in ("", block_type.get_block_type_slug()):
            continue
        try:
            matches.append(block_type.load(short, _sync=True))  # type: ignore[call-arg, arg-type]
        except ConfigurationError:
            raise
        except ValueError as error:
            if not isinstance(error.__cause__, ObjectNotFound):
                raise ConfigurationError(
                    f"cannot load block {block_type.get_block_type_slug()}/{short}: {error}"
                ) from error
    if len(matches) > 1:
        raise ConfigurationError(
            f"{name!r} is the name of several blocks; use one of {', '.join(map(saved_name, matches))}"
        )
    return matches[0] if matches else None


def load_saved(types: Sequence[type[TrainingBlock]], name: str) -> Any:
    """Return the saved block of one of the types with this name, ``"<block type>/<name>"`` or the name alone.

    Raises:
        ConfigurationError: There is no such block, the name is ambiguous, or the block cannot be loaded.
    """
    if block := find_saved(types, name):
        return block
    short = name.rpartition("/")[2]
    searched = " or ".join(f"{block_type.get_block_type_slug()}/{short}" for block_type in types)
    hint = f"; a directory is written as ./{short}" if types[0] in STORAGE_TYPES else ""
    raise ConfigurationError(
        f"cannot load block {name!r}: there is no {searched}. See `prefect block ls`, or save one with "
        f"{types[0].__name__}(...).save({short!r}){hint}"
    )


def saved_name(block: TrainingBlock) -> str:
    """Return ``"<block type>/<name>"`` of a saved block; empty if the block is not saved."""
    name = block._block_document_name
    return f"{block.get_block_type_slug()}/{name}" if name and not block._is_anonymous else ""


def reference_to(block: TrainingBlock) -> dict[str, Any]:
    """Return the reference to a saved block for the parameters of a flow run, as Prefect's UI writes it."""
    return {"$ref": {"block_document_id": str(block._block_document_id)}}


def values_of(block: TrainingBlock, **options: Any) -> dict[str, Any]:
    """Return the values of a block's fields as JSON values, secrets as asterisks; ``options`` are pydantic's."""
    return block.model_dump(mode="json", include=set(type(block).model_fields), **options)


def load_block(argument: str, value: TrainingBlock | str | Path | None) -> Any:
    """Return the block for an argument of ``elastic_train``.

    It is ``value`` itself if that is a block. Otherwise :func:`chosen_block` loads the block with the name ``value``,
    the storage in the directory ``value``, or the default block.

    Raises:
        ConfigurationError: The block cannot be loaded, is of another type, or has masked secrets.
    """
    types = BLOCK_TYPES[argument]
    if isinstance(value, Path):
        value = os.path.abspath(value)
    block = chosen_block(argument, value or "") if isinstance(value, str | None) else value
    if not isinstance(block, types):
        names = " or ".join(block_type.__name__ for block_type in types)
        raise ConfigurationError(f"{argument}: expected {names} or the name of one, got {type(value).__name__}")
    for field, content in block:
        if isinstance(content, SecretStr) and {*content.get_secret_value()} == {"*"}:
            raise ConfigurationError(
                f"{type(block).__name__}.{field} is masked: Prefect stores the secrets of a block in the parameters of "
                "a flow run as asterisks. Save the block and pick it by name in the parameter"
            )
    return block


def chosen_block(argument: str, name: str = "", profile: str = "") -> Any:
    """Load the block for an argument of ``elastic_train``.

    With a ``name``, only this block is tried: ``training-storage-s3/prod`` or ``prod``; for a storage also a directory
    such as ``./runs``, or a URL such as ``s3://bucket/runs`` with ambient credentials.

    Without a ``name``, it is the first that exists: the block that is saved under the name ``profile``, the block that
    the settings name as the default, the default of the package.

    Raises:
        ConfigurationError: The block with the name, or the default in the settings, does not exist or cannot be loaded.
    """
    types = BLOCK_TYPES[argument]
    if argument == "storage" and (settings := storage_at(name)):
        block_type = next(block_type for block_type in STORAGE_TYPES if issubclass(block_type, type(settings)))
        return block_type(**dict(settings))
    if name:
        return load_saved(types, name)
    if profile and (block := find_saved(types, profile)):
        return block
    setting = f"default_{argument}"
    if default := getattr(get_settings(), setting):
        try:
            return load_saved(types, default)
        except ConfigurationError as error:  # the user may not know the setting, so name it
            raise ConfigurationError(f"{variable_of(setting)}={default!r}: {error}") from error
    return blocks.LocalStorage(path=DEFAULT_STORAGE) if argument == "storage" else types[0]()


def chosen_blocks(names: Mapping[str, str], profile: str) -> Blocks:
    """Load the blocks for all arguments of ``elastic_train``, each as :func:`chosen_block` does.

    ``names`` has the names of blocks by argument. An argument without a name uses the block that is saved under the
    name ``profile``, else the default one.

    Raises:
        ConfigurationError: A block cannot be loaded, or no block is saved under the name of the profile.
    """
    chosen = Blocks._make(chosen_block(argument, names.get(argument, ""), profile) for argument in Blocks._fields)
    if profile and not any(block._block_document_name == profile for block in chosen):
        raise ConfigurationError(f"--profile {profile}: no block of a training has this name. See `prefect block ls`")
    return chosen
