"""Which checks there are, what they look at, and in which order they are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prefect_elastic_train.blocks.lookup import (
    BLOCK_TYPES,
    StorageBlock,
    chosen_block,
    find_saved,
    load_saved,
    plain_storage,
)
from prefect_elastic_train.core.operator_settings import DEFAULT_BLOCKS, default_block_name, naming_the_setting
from prefect_elastic_train.core.outcomes import ConfigurationError
from prefect_elastic_train.core.settings import ClusterSettings, plain
from prefect_elastic_train.core.storage_settings import storage_at
from prefect_elastic_train.doctor.clusters import check_cluster
from prefect_elastic_train.doctor.findings import Check, Finding, fail, ok, skip
from prefect_elastic_train.doctor.machine import check_leftovers, check_settings, check_storage, check_versions
from prefect_elastic_train.doctor.prefect_server import check_blocks, check_server

_QUICK_SECONDS = 10.0
_SLOW_SERVER = "see what is slow: the Prefect server and its database, or the network to PREFECT_API_URL"


def examine(storage: str = "", cluster: str = "", profile: str = "", seconds: float = 45.0) -> Iterator[Finding]:
    """Run all checks beside each other; those that look up saved blocks once the server has answered.

    What is not named here is what the settings name as default, else what trainings use without one: a directory in
    the home folder, and a local cluster.

    Args:
        storage: A directory, a URL, or a saved storage block.
        cluster: A saved ``RayCluster``.
        profile: Name that blocks of several types are saved under; those of them stand before the settings.
        seconds: How long each check may take.
    """
    quick = min(_QUICK_SECONDS, seconds)
    server = Check("server", check_server, quick, _SLOW_SERVER)

    def after_server(look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
        if server.is_good():
            yield from look()
        else:
            yield skip("saved blocks cannot be looked up without the server")

    def saved(name: str, look: Callable[[], Iterator[Finding]], is_saved: bool) -> Check:
        return Check(name, lambda: after_server(look), quick + seconds) if is_saved else Check(name, look, seconds)

    def try_storage() -> Iterator[Finding]:
        block = chosen_block("storage", storage, profile)
        assert isinstance(block, StorageBlock)
        return check_storage(plain_storage(block), seconds)

    def try_cluster() -> Iterator[Finding]:
        return check_cluster(plain(ClusterSettings, chosen_block("cluster", cluster, profile)), seconds)

    checks = [
        Check("versions", check_versions, quick),
        Check("settings", check_settings, quick),
        server,
        saved("blocks", lambda: _look_at_blocks(profile), True),
        saved("storage", try_storage, _is_saved_storage(storage) if storage else bool(profile or _default("storage"))),
        saved("cluster", try_cluster, bool(cluster or profile or _default("cluster"))),
        Check("leftovers", check_leftovers, quick),
    ]
    for check in checks:
        yield from check.findings()


def _look_at_blocks(profile: str) -> Iterator[Finding]:
    yield from check_blocks()
    for argument in DEFAULT_BLOCKS:
        if name := _default(argument):
            try:
                with naming_the_setting(argument):
                    load_saved(BLOCK_TYPES[argument], name)
                yield ok(f"default {argument} {name!r} is there")
            except ConfigurationError as error:
                yield fail(str(error))
    if profile:
        kinds = [kind for kinds in BLOCK_TYPES.values() for kind in kinds]
        found = [kind.get_block_type_slug() for kind in kinds if find_saved([kind], profile)]
        if found:
            yield ok(f"profile {profile!r} has {', '.join(found)}")
        else:
            yield fail(
                f"no block is saved as {profile!r}",
                "see `prefect block ls` for the names that there are, or run the file that saves your blocks",
            )


def _default(argument: str) -> str:
    """Return the name of a default block; none if the settings cannot be read, which the check of those tells."""
    try:
        return default_block_name(argument)
    except ConfigurationError:
        return ""


def _is_saved_storage(storage: str) -> bool:
    try:
        return storage_at(storage) is None
    except ConfigurationError:  # which the check of the storage tells
        return False
