"""Preflight: the driver tests a storage before training starts, so that faults do not show hours later."""

import uuid
from contextlib import suppress

from prefect_elastic_train.core.outcomes import ConfigurationError, StorageFaultError
from prefect_elastic_train.core.settings import StorageSettings

from .opening import Storage
from .store import RunStore

PREFIX = ".preflight-"  # names the test folder, which is beside the run directories
_RETRY_SECONDS = 15.0  # per operation: an unreachable storage is reported early
_FILE = "test"


def preflight(settings: StorageSettings) -> None:
    """Test a storage from this machine: read, write, list, create exclusively, replace, delete.

    Raises:
        StorageFaultError: An operation that a run needs does not work, or the storage does not answer.
        OSError: The directory cannot be used for another reason.
    """
    store = Storage(settings).run(f"{PREFIX}{uuid.uuid4().hex}").with_retry_limit(_RETRY_SECONDS)
    is_reachable = True
    try:
        problem = _find_problem(store)
        if problem:
            raise StorageFaultError(
                f"{settings.uri}: {problem}. To go on, use a store without this problem, such as AWS S3, MinIO, "
                "Ceph, R2, GCS or Azure",
                kind="unfit",
                permanent=True,
            )
    except StorageFaultError as error:
        is_reachable = error.permanent
        raise
    finally:
        # Without retries: the remains are small, and they are never taken for a run.
        if is_reachable:
            with suppress(OSError, ConfigurationError):
                store.with_retry_limit(0).delete_folder("")


def _find_problem(store: RunStore) -> str:
    """Return the first problem of a storage that prevents a run, as text; empty if there is none."""
    if not store.create(_FILE, b"1") or store.read(_FILE) != b"1":
        return "a written object is not read back"
    if _FILE not in store.names(""):
        return "a written object is not listed"
    if store.create(_FILE, b"2"):
        return "an existing object can be created again, so two drivers could use one run"
    store.replace(_FILE, b"3")
    store.delete(_FILE)
    return ""
