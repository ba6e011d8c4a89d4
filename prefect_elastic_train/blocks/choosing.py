"""The blocks that a command works with: named one by one, by a profile, by the settings, or the defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from prefect_elastic_train.blocks import CheckpointPolicy, ElasticScaling, FailureBudget, LocalStorage, RayCluster
from prefect_elastic_train.blocks._common import TrainingBlock
from prefect_elastic_train.blocks.lookup import (
    STORAGE_TYPES,
    load_block,
    load_if_saved,
    load_storage,
    saved_name,
    storage_block_named,
)
from prefect_elastic_train.core.operator_settings import default_block_name, naming_the_setting
from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.core.storage_settings import DEFAULT_STORAGE

__all__ = ["ARGUMENTS", "chosen_block", "chosen_blocks", "load_for"]

#: The types that each argument of ``elastic_train`` takes, and what loads one of them by its name.
_TYPES: dict[str, tuple[list[type[TrainingBlock]], Callable[[str], TrainingBlock]]] = {
    "scaling": ([ElasticScaling], partial(load_block, ElasticScaling)),
    "failures": ([FailureBudget], partial(load_block, FailureBudget)),
    "checkpoints": ([CheckpointPolicy], partial(load_block, CheckpointPolicy)),
    "storage": ([*STORAGE_TYPES], load_storage),
    "cluster": ([RayCluster], partial(load_block, RayCluster)),
}
#: The arguments of ``elastic_train`` that take blocks.
ARGUMENTS = tuple(_TYPES)


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
        return _named(argument, name)
    found = _of_profile(profile, [argument]) if profile else {}
    return found.get(argument) or _default(argument)


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
    found = {argument: _named(argument, name) for argument, name in names.items() if name}
    left = [argument for argument in ARGUMENTS if argument not in found]
    if profile and left:
        of_profile = _of_profile(profile, left)
        if not of_profile:
            wanted = ", ".join(f"{kind.get_block_type_slug()}/{profile}" for name in left for kind in _TYPES[name][0])
            raise ConfigurationError(
                f"--profile {profile}: there is none of the blocks {wanted}. See `prefect block ls`"
            )
        found |= of_profile
    return {argument: found.get(argument) or _default(argument) for argument in ARGUMENTS}


def load_for(argument: str, name: str) -> TrainingBlock:
    """Load a saved block by its name, of a type that an argument of ``elastic_train`` takes.

    Raises:
        ConfigurationError: There is no such block, or it cannot be loaded.
    """
    return _TYPES[argument][1](name)


def _named(argument: str, name: str) -> TrainingBlock:
    return storage_block_named(name) if argument == "storage" else load_for(argument, name)


def _of_profile(profile: str, arguments: Iterable[str]) -> dict[str, TrainingBlock]:
    """Load the blocks that are saved under one name, as far as there are any."""
    found: dict[str, TrainingBlock] = {}
    for argument in arguments:
        for kind in _TYPES[argument][0]:
            try:
                block = load_if_saved(kind, profile)
            except ConfigurationError:
                raise
            except ValueError as error:
                raise ConfigurationError(f"--profile {profile}: its blocks cannot be loaded: {error}") from error
            if block is None:
                continue
            if argument in found:
                both = f"{saved_name(found[argument])} and {saved_name(block)}"
                raise ConfigurationError(f"--profile {profile} has {both}: say which with --{argument}")
            found[argument] = block
    return found


def _default(argument: str) -> TrainingBlock:
    if name := default_block_name(argument):
        with naming_the_setting(argument):
            return load_for(argument, name)
    kind = _TYPES[argument][0][0]
    return LocalStorage(path=DEFAULT_STORAGE) if argument == "storage" else kind()
