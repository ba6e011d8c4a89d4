"""Which checks there are, what they look at, and in which order they begin and are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

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
from prefect_elastic_train.core.storage_settings import StorageSettings, storage_at
from prefect_elastic_train.doctor.clusters import check_cluster
from prefect_elastic_train.doctor.findings import Finding, fail, ok, skip
from prefect_elastic_train.doctor.leftovers import check_leftovers
from prefect_elastic_train.doctor.looking import Look
from prefect_elastic_train.doctor.operator_settings import check_settings
from prefect_elastic_train.doctor.prefect_server import check_server, has_server
from prefect_elastic_train.doctor.saved_blocks import check_blocks
from prefect_elastic_train.doctor.storage import check_storage
from prefect_elastic_train.doctor.versions import check_versions

__all__ = ["Examination"]

_QUICK_SECONDS = 10.0
_TOO_SLOW = "see what is slow, or give more --timeout"
_SLOW_MACHINE = "see what keeps this machine busy"
_SLOW_SERVER = "see what is slow: the Prefect server and its database, or the network to PREFECT_API_URL"


@dataclass(frozen=True)
class Examination:
    """What a training here would use.

    What is not named here is what the settings name as default, else what trainings use without one: a directory in
    the home folder, and a local cluster.

    Attributes:
        storage: A directory, a URL, or a saved storage block.
        cluster: A saved ``RayCluster``.
        profile: Name that blocks of several types are saved under; those of them stand before the settings.
        seconds: How long each check may take.
    """

    storage: str = ""
    cluster: str = ""
    profile: str = ""
    seconds: float = 45.0

    def findings(self) -> Iterator[Finding]:
        """Run all checks, beside each other as far as they need nothing of each other, and give what they find."""
        quick = min(_QUICK_SECONDS, self.seconds)
        server = Look("server", check_server, quick, _SLOW_SERVER)
        free = {
            "versions": Look("versions", check_versions, quick, _SLOW_MACHINE),
            "settings": Look("settings", check_settings, quick, _SLOW_MACHINE),
            "leftovers": Look("leftovers", check_leftovers, quick, _SLOW_MACHINE),
        }
        tried = {
            "storage": (self._storage_is_saved(), self._try_storage),
            "cluster": (self._cluster_is_saved(), self._try_cluster),
        }
        looks = {name: self._begin(name, look) for name, (is_saved, look) in tried.items() if not is_saved}
        yield from free["versions"].findings()
        yield from free["settings"].findings()
        yield from server.findings()
        if server.is_good():
            looks |= {name: self._begin(name, look) for name, (is_saved, look) in tried.items() if is_saved}
            looks["blocks"] = self._begin("blocks", self._look_at_blocks)
        for name in ("blocks", *tried):
            if name in looks:
                yield from looks[name].findings()
            else:
                yield skip("saved blocks cannot be looked up without the server", check=name)
        yield from free["leftovers"].findings()

    def _begin(self, name: str, check: Callable[[], Iterator[Finding]]) -> Look:
        return Look(name, check, self.seconds, _TOO_SLOW)

    def _look_at_blocks(self) -> Iterator[Finding]:
        if has_server():
            yield from check_blocks()
        else:
            yield skip("saved blocks are looked at on a server that stays: set PREFECT_API_URL")
        for argument in DEFAULT_BLOCKS:
            if name := _default(argument):
                yield _look_up(argument, name)
        if self.profile:
            kinds = [kind for kinds in BLOCK_TYPES.values() for kind in kinds]
            found = [kind.get_block_type_slug() for kind in kinds if find_saved([kind], self.profile)]
            if found:
                yield ok(f"profile {self.profile!r} has {', '.join(found)}")
            else:
                yield fail(
                    f"no block is saved as {self.profile!r}",
                    "see `prefect block ls` for the names that there are, or run the file that saves your blocks",
                )

    def _storage_is_saved(self) -> bool:
        if self.storage:
            return _is_no_place(self.storage)
        return bool(self.profile or _default("storage"))

    def _cluster_is_saved(self) -> bool:
        return bool(self.cluster or self.profile or _default("cluster"))

    def _try_storage(self) -> Iterator[Finding]:
        return check_storage(self._storage(), self.seconds)

    def _try_cluster(self) -> Iterator[Finding]:
        block = chosen_block("cluster", self.cluster, self.profile)
        return check_cluster(plain(ClusterSettings, block), self.seconds)

    def _storage(self) -> StorageSettings:
        block = chosen_block("storage", self.storage, self.profile)
        assert isinstance(block, StorageBlock)
        return plain_storage(block)


def _default(argument: str) -> str:
    """Give the name of a default block; none if the settings cannot be read, which the check of those tells."""
    try:
        return default_block_name(argument)
    except ConfigurationError:
        return ""


def _is_no_place(storage: str) -> bool:
    try:
        return storage_at(storage) is None
    except ConfigurationError:  # which the check of the storage tells
        return False


def _look_up(argument: str, name: str) -> Finding:
    """Load a default block, as a training does that gives none."""
    try:
        with naming_the_setting(argument):
            load_saved(BLOCK_TYPES[argument], name)
    except ConfigurationError as error:
        return fail(str(error))
    return ok(f"default {argument} {name!r} is there")
