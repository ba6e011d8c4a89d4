"""Whether the storage does all that a run needs, and has room."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prefect_elastic_train.core.storage_settings import LocalStorageSettings, StorageSettings
from prefect_elastic_train.doctor.findings import Finding, ok, warn
from prefect_elastic_train.report.words import size
from prefect_elastic_train.storage.preflight import preflight

__all__ = ["check_storage"]

#: Share of a check's time in which an operation is repeated. A connection that nobody answers takes ten seconds before
#: the first failure, and again at the end of that.
_RETRY_SHARE = 1 / 6
#: A training's checkpoints rarely take less.
_LITTLE_ROOM = 2**30


def check_storage(settings: StorageSettings, seconds: float) -> Iterator[Finding]:
    """Write, read, list, create exclusively and delete in a storage, and leave nothing there.

    Args:
        settings: Of the storage.
        seconds: How long that may take.

    Raises:
        StorageFaultError: It does not do what a run needs; the message says what to do.
        OSError: The directory cannot be used.
    """
    with _restored(settings), preflight(settings, _RETRY_SHARE * seconds):
        room = shutil.disk_usage(settings.root).free if isinstance(settings, LocalStorageSettings) else None
    yield ok(f"{settings.uri} can be written, read, created in exclusively and deleted from")
    if room is None:
        return
    if room < _LITTLE_ROOM:
        yield warn(
            f"{settings.uri} has {size(room)} left",
            "make room with `elastic-train runs prune`, keep fewer checkpoints (CheckpointPolicy), or use another disk",
        )
    else:
        yield ok(f"{settings.uri} has {size(room)} left")


@contextmanager
def _restored(settings: StorageSettings) -> Iterator[None]:
    """Remove afterwards the folders that a trial makes on its way to the storage's own."""
    made: list[Path] = []
    if isinstance(settings, LocalStorageSettings):
        path = Path(settings.path)
        made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        yield
    finally:
        with suppress(OSError):  # a training may have begun there meanwhile
            for folder in made:
                os.rmdir(folder)
