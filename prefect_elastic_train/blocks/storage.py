"""Where run directories live."""

from __future__ import annotations

from prefect_elastic_train.blocks._common import TrainingBlock
from prefect_elastic_train.config import LocalStorageSettings


class LocalStorage(TrainingBlock, LocalStorageSettings):
    """Run directories in a directory: on this machine's disk, or on a mount that all nodes share.

    Attributes:
        path: The directory (required). ``~`` is expanded, relative paths are made absolute.

    Example:
        Keep run directories on a shared mount::

            from prefect_elastic_train import LocalStorage

            storage = LocalStorage(path="/mnt/shared/runs")
            storage.save("BLOCK_NAME")
            storage = LocalStorage.load("BLOCK_NAME")
    """

    _block_type_name = "Training Storage (directory)"
    _block_type_slug = "training-storage-directory"
    _description = "Run directories and checkpoints in a local or shared directory."
