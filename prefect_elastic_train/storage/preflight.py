"""Trying a storage before anything is trained on it: seconds, instead of hours until the first checkpoint fails."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from prefect_elastic_train.core.outcomes import ConfigurationError, StorageFaultError
from prefect_elastic_train.core.storage_settings import StorageSettings
from prefect_elastic_train.storage.opening import open_storage
from prefect_elastic_train.storage.store import RunStore

PREFIX = ".preflight-"  # of the folder beside the run directories in which the storage is tried
#: How long an operation is repeated here: whoever waits for a start rather hears at once that a storage is away.
_RETRY_SECONDS = 15.0
_OF_THE_DRIVER = "driver"


@dataclass(frozen=True)
class Probe:
    """What the driver has left in the storage, for the nodes to find: a folder named by an id, and a file with it."""

    settings: StorageSettings
    id: str

    def try_from(self, machine: str, store: RunStore | None = None) -> None:
        """Try the storage from a machine: read, write, list, create exclusively, replace, delete.

        Raises:
            StorageFaultError: It does not see what the driver has written, or may not do all that a run needs.
        """
        store, name = store or self.folder(), f"{machine}-{uuid.uuid4().hex[:8]}"
        other_store = "use a store that does, such as AWS S3, MinIO, Ceph, R2, GCS or Azure"

        def check(holds: bool, what: str, advice: str = other_store, kind: str = "unfit") -> None:
            if not holds:
                raise StorageFaultError(f"{self.settings.uri}: {what}. To go on, {advice}", kind=kind, permanent=True)

        what = f"{machine} does not see what the driver has written there"
        advice = "mount the directory on all nodes of the cluster, or use an object store"
        check(store.read(_OF_THE_DRIVER) == self.id.encode(), what, advice, "not shared")
        check(store.create(name, b"1") and store.read(name) == b"1", "what was written is not read back")
        check(name in store.names(""), "what was written is not listed")
        what = "an object that exists is created again, so that two drivers could take one run (no If-None-Match)"
        check(not store.create(name, b"2"), what)
        store.replace(name, b"3")
        store.delete(name)

    def folder(self) -> RunStore:
        """Return the folder of the trial."""
        folder = f"{self.settings.root}/{PREFIX}{self.id}"
        return open_storage(self.settings).folder(folder).impatient(_RETRY_SECONDS)


@contextmanager
def preflight(settings: StorageSettings) -> Iterator[Probe]:
    """Try a storage from this machine; yield what the same is tried with from others, until the ``with`` ends.

    Raises:
        StorageFaultError: It may not do all that a run needs, or does not answer.
        OSError: The directory cannot be used, for a reason of its own.
    """
    probe = Probe(settings, uuid.uuid4().hex)
    store, is_away = probe.folder(), False
    try:
        store.replace(_OF_THE_DRIVER, probe.id.encode())
        probe.try_from("this machine", store)
        yield probe
    except StorageFaultError as error:
        is_away = not error.permanent
        raise
    finally:
        # In one try, and none where the storage is away: what is left is small, and no run takes it for one.
        if not is_away:
            with suppress(OSError, ConfigurationError):
                store.impatient(0).delete_folder("")
