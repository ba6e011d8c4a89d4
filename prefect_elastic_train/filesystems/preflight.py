"""Trying a storage before anything is trained on it: seconds, instead of hours until the first checkpoint fails."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from prefect_elastic_train.filesystems.opening import open_storage
from prefect_elastic_train.outcomes import ConfigurationError, StorageFaultError
from prefect_elastic_train.runs.retrying_store import RetryingStore
from prefect_elastic_train.storages import StorageSettings

__all__ = ["PREFIX", "Probe", "preflight"]

#: Of the folder beside the run directories in which the storage is tried.
PREFIX = ".preflight-"
#: How long an operation is repeated here: whoever waits for a start rather hears at once that a storage is away.
_RETRY_SECONDS = 15.0
_OF_THE_DRIVER = "driver"


@dataclass(frozen=True)
class Probe:
    """What the driver has left in the storage, for the nodes to find.

    Attributes:
        settings: Of the storage.
        id: Names the folder, and is what its file says.
    """

    settings: StorageSettings
    id: str

    def try_from(self, machine: str) -> None:
        """Try the storage from another machine.

        Raises:
            StorageFaultError: It does not see what the driver has written, or may not do all that a run needs.
        """
        store = self._folder()
        if store.read(_OF_THE_DRIVER) != self.id.encode():
            raise StorageFaultError(
                f"{self.settings.uri}: {machine} does not see what the driver has written there. To go on, mount the "
                "directory on all nodes of the cluster, or use an object store",
                kind="not shared",
                permanent=True,
            )
        _try(store, f"{machine}-{uuid.uuid4().hex[:8]}", self.settings.uri)

    def _folder(self) -> RetryingStore:
        storage = open_storage(self.settings, min(_RETRY_SECONDS, self.settings.retry_seconds))
        return storage.folder(f"{self.settings.root}/{PREFIX}{self.id}")


@contextmanager
def preflight(settings: StorageSettings) -> Iterator[Probe]:
    """Try a storage from this machine: write, read back, list, create exclusively, delete.

    Gives what the same is tried with from other machines, until the ``with`` ends.

    Raises:
        StorageFaultError: It may not do all that a run needs, or does not answer.
        OSError: The directory cannot be used, for a reason of its own.
    """
    probe = Probe(settings, uuid.uuid4().hex)
    store = probe._folder()
    try:
        _try(store, _OF_THE_DRIVER, settings.uri, keep=probe.id.encode())
        yield probe
    finally:
        # What is left behind is small, and no run takes it for one.
        with suppress(OSError, ConfigurationError):
            store.delete(_OF_THE_DRIVER)
            open_storage(settings, 0).folder(settings.root).delete_folder(f"{PREFIX}{probe.id}")


def _try(store: RetryingStore, name: str, uri: str, keep: bytes = b"") -> None:
    first, second = keep or b"1", b"2"

    def check(holds: bool, what: str, advice: str) -> None:
        if not holds:
            raise StorageFaultError(f"{uri}: {what}. To go on, {advice}", kind="unfit", permanent=True)

    other = "use a storage that does"
    check(store.create(name, first), f"an object that was never written is said to exist ({name})", other)
    check(store.read(name) == first, "what was written is not read back", other)
    check(name in store.names(""), "what was written is not listed", other)
    check(
        not store.create(name, second),
        "an object that exists is created again, so that two drivers could take one run (no If-None-Match)",
        "use a store that creates exclusively, such as AWS S3, MinIO, Ceph, R2, GCS or Azure",
    )
    if keep:
        return
    store.replace(name, second)
    check(store.read(name) == second, "what was written anew is not read back", other)
    store.delete(name)
    check(store.read(name) is None, "what was deleted is still read", other)
