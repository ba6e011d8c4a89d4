"""Trying a storage before anything is trained on it: seconds, instead of hours until the first checkpoint fails."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from prefect_elastic_train.core.outcomes import ConfigurationError, StorageFaultError
from prefect_elastic_train.core.storage_settings import StorageSettings
from prefect_elastic_train.storage.opening import open_storage
from prefect_elastic_train.storage.retrying_store import RetryingStore

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
        name = f"{machine}-{uuid.uuid4().hex[:8]}"
        _create(store, name, b"1", self.settings.uri)
        _look_at(store, name, b"1", self.settings.uri)
        store.replace(name, b"2")
        _check(store.read(name) == b"2", self.settings.uri, "what was written anew is not read back")
        store.delete(name)
        _check(store.read(name) is None, self.settings.uri, "what was deleted is still read")

    def _folder(self, seconds: float | None = None) -> RetryingStore:
        bound = _RETRY_SECONDS if seconds is None else min(seconds, _RETRY_SECONDS)
        storage = open_storage(self.settings, min(bound, self.settings.retry_seconds))
        return storage.folder(f"{self.settings.root}/{PREFIX}{self.id}")


@contextmanager
def preflight(settings: StorageSettings, retry_seconds: float | None = None) -> Iterator[Probe]:
    """Try a storage from this machine: write, read back, list, create exclusively, delete.

    Gives what the same is tried with from other machines, until the ``with`` ends.

    Args:
        settings: Of the storage.
        retry_seconds: How long an operation is repeated, for those who wait less than a training does.

    Raises:
        StorageFaultError: It may not do all that a run needs, or does not answer.
        OSError: The directory cannot be used, for a reason of its own.
    """
    probe = Probe(settings, uuid.uuid4().hex)
    store = probe._folder(retry_seconds)
    try:
        _create(store, _OF_THE_DRIVER, probe.id.encode(), settings.uri)
    except StorageFaultError as error:
        if error.permanent:  # a disk without room has made the folder
            _clear_away(store, probe)
        raise  # a storage that is away is not waited for once more
    try:
        _look_at(store, _OF_THE_DRIVER, probe.id.encode(), settings.uri)
        yield probe
    finally:
        _clear_away(store, probe)


def _clear_away(store: RetryingStore, probe: Probe) -> None:
    """Delete what was tried, in one try: what is left behind is small, and no run takes it for one."""
    with suppress(OSError, ConfigurationError):
        store.impatient(0).delete(_OF_THE_DRIVER)
        open_storage(probe.settings, 0).folder(probe.settings.root).delete_folder(f"{PREFIX}{probe.id}")


def _create(store: RetryingStore, name: str, data: bytes, uri: str) -> None:
    _check(store.create(name, data), uri, f"an object that was never written is said to exist ({name})")


def _look_at(store: RetryingStore, name: str, data: bytes, uri: str) -> None:
    """Check that what was created is there, and cannot be created again."""
    _check(store.read(name) == data, uri, "what was written is not read back")
    _check(name in store.names(""), uri, "what was written is not listed")
    _check(
        not store.create(name, data + b"2"),
        uri,
        "an object that exists is created again, so that two drivers could take one run (no If-None-Match)",
        "use a store that creates exclusively, such as AWS S3, MinIO, Ceph, R2, GCS or Azure",
    )


def _check(holds: bool, uri: str, what: str, advice: str = "use a storage that does") -> None:
    if not holds:
        raise StorageFaultError(f"{uri}: {what}. To go on, {advice}", kind="unfit", permanent=True)
