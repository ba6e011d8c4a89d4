"""Preflight of a storage: a test before training starts, instead of hours later with the first checkpoint.

Runs in the driver and in a worker on each node.
"""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from prefect_elastic_train.core.outcomes import ConfigurationError, StorageFaultError
from prefect_elastic_train.core.storage_settings import StorageSettings
from prefect_elastic_train.storage.opening import Storage
from prefect_elastic_train.storage.store import RunStore

PREFIX = ".preflight-"  # names the test folder, which is beside the run directories
_RETRY_SECONDS = 15.0  # per operation: an unreachable storage is reported early
_DRIVER_FILE = "driver"
_OTHER_STORE = "use a store that does, such as AWS S3, MinIO, Ceph, R2, GCS or Azure"


@dataclass(frozen=True)
class Probe:
    """A test of the storage, from the driver and from other nodes.

    It uses a folder of its own, in which the driver has written ``id`` into a file that all nodes must be able to read.
    """

    store: RunStore
    id: str

    def try_from(self, machine: str) -> None:
        """Test the storage from this machine: read, write, list, create exclusively, replace, delete.

        ``machine`` names this machine in the error, and in the name of the test object.

        Raises:
            StorageFaultError: The driver's file is not visible, or an operation that a run needs does not work.
        """
        store = self.store
        name = f"{machine}-{uuid.uuid4().hex[:8]}"
        if store.read(_DRIVER_FILE) != self.id.encode():
            advice = "mount the directory on all nodes of the cluster, or use an object store"
            raise self._fault(f"{machine} cannot read the file that the driver wrote there", advice, "not shared")
        if not store.create(name, b"1") or store.read(name) != b"1":
            raise self._fault("a written object is not read back")
        if name not in store.names(""):
            raise self._fault("a written object is not listed")
        if store.create(name, b"2"):
            raise self._fault("an existing object can be created again, so two drivers could use one run")
        store.replace(name, b"3")
        store.delete(name)

    def _fault(self, problem: str, advice: str = _OTHER_STORE, kind: str = "unfit") -> StorageFaultError:
        message = f"{self.store.retries.storage}: {problem}. To go on, {advice}"
        return StorageFaultError(message, kind=kind, permanent=True)


@contextmanager
def preflight(settings: StorageSettings) -> Iterator[Probe]:
    """Test a storage from this machine, and yield the probe that tests it from other nodes.

    The probe is valid until the ``with`` block ends, which deletes the test folder.

    Raises:
        StorageFaultError: An operation that a run needs does not work, or the storage does not answer.
        OSError: The directory cannot be used for another reason.
    """
    probe_id = uuid.uuid4().hex
    store = Storage(settings).folder(f"{settings.root}/{PREFIX}{probe_id}").with_retry_limit(_RETRY_SECONDS)
    probe = Probe(store, probe_id)
    is_reachable = True
    try:
        store.replace(_DRIVER_FILE, probe_id.encode())
        probe.try_from("this machine")
        yield probe
    except StorageFaultError as error:
        is_reachable = error.permanent
        raise
    finally:
        # Without retries: the remains are small, and they are never taken for a run.
        if is_reachable:
            with suppress(OSError, ConfigurationError):
                store.with_retry_limit(0).delete_folder("")
