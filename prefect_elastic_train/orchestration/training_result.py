"""The result of a training, with methods that read its checkpoints."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from prefect_elastic_train.core.outcomes import CheckpointGoneError, ConfigurationError
from prefect_elastic_train.core.result import RunResult
from prefect_elastic_train.core.settings import LocalStorageSettings, StorageSettings, storage_at
from prefect_elastic_train.runs import layout
from prefect_elastic_train.storage.opening import Storage

if TYPE_CHECKING:
    import pandas as pd
    from ray.train import Checkpoint

    from prefect_elastic_train.blocks.lookup import StorageBlock


class TrainingResult(RunResult):
    __doc__ = RunResult.__doc__

    def checkpoint(self, *, best: bool = False, storage: StorageBlock | str | None = None) -> Checkpoint:
        """Return the newest checkpoint as a ``ray.train.Checkpoint``. It can be read wherever its storage is reachable.

        Args:
            best: Return the best of the kept checkpoints instead; the newest if the checkpoint policy has no
                ``score_attribute``.
            storage: The storage block, or the name of one. Default: :attr:`storage_block`; for a storage without a
                saved block, its URI with ambient credentials.

        Raises:
            FileNotFoundError: The loop reported no checkpoint, or, with ``best``, no kept checkpoint has the score.
            ConfigurationError: The storage block cannot be loaded, or is not the storage of the checkpoint.
        """
        from prefect_elastic_train.worker.checkpoints import open_checkpoint

        uri = self._checkpoint_uri(best)
        return open_checkpoint(uri, _storage_settings(uri, storage or self.storage_block))

    def checkpoint_directory(
        self, *, best: bool = False, storage: StorageBlock | str | None = None
    ) -> AbstractContextManager[Path]:
        """Return a context manager that yields the newest checkpoint as a readable directory. Needs no Ray.

        Takes the arguments of :meth:`checkpoint`, and raises the same.
        """
        return checkpoint_directory(self._checkpoint_uri(best), storage or self.storage_block)

    def _checkpoint_uri(self, best: bool) -> str:
        if not self.checkpoint_uri:
            raise FileNotFoundError(f"run {self.run_name!r} has no checkpoint: its loop reported none")
        if best and not self.best_checkpoint_uri:
            raise FileNotFoundError(
                f"run {self.run_name!r} has no best checkpoint: none of those it kept has the score_attribute of its "
                "CheckpointPolicy as a number. Report it with a checkpoint, or read the newest one without best=True"
            )
        return self.best_checkpoint_uri if best else self.checkpoint_uri

    def metrics_dataframe(self) -> pd.DataFrame:
        """Return :attr:`history` as a pandas DataFrame: the metrics of all attempts, one row for each report.

        A long run has a row only for every second report, every fourth, and so on.
        """
        import pandas as pd

        return pd.DataFrame(self.history)


@contextmanager
def checkpoint_directory(uri: str, storage: StorageBlock | str | None = None) -> Iterator[Path]:
    """Yield a checkpoint of a run as a readable directory until the ``with`` block ends. Needs no Ray.

    Args:
        uri: URI of the checkpoint, such as :attr:`TrainingResult.checkpoint_uri`.
        storage: The storage block of the checkpoint, or its saved name. Default: the URI with ambient credentials.

    Yields:
        The checkpoint itself if it is in a directory; else a copy, which is removed afterwards.

    Raises:
        CheckpointGoneError: The run has no such checkpoint; it may have been deleted.
        FileNotFoundError: There is no such run.
        ConfigurationError: The storage block cannot be loaded, or is not the storage of the checkpoint.
        StorageFaultError: The storage refuses, or does not answer for too long.
    """
    settings = _storage_settings(uri, storage)
    run_uri, _, name = uri.rstrip("/").rpartition("/")
    run = Storage(settings).folder(run_uri.partition("://")[2] or run_uri)
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as directory:
        try:
            if not isinstance(settings, LocalStorageSettings):
                run.download(name, directory)
            elif Path(uri).is_dir():
                directory = uri
            else:
                raise FileNotFoundError(uri)
        except FileNotFoundError as error:
            if run.size(layout.RUN) is not None:
                raise CheckpointGoneError(f"{uri}: the run has no such checkpoint; it may have been deleted") from error
            raise FileNotFoundError(f"{uri}: no such checkpoint, and its parent folder is not a run") from error
        yield Path(directory)


def _storage_settings(uri: str, storage: StorageBlock | str | None) -> StorageSettings:
    """Return the storage settings for reading a checkpoint: those of the block; without one, those of its URI."""
    if not storage:
        settings = storage_at(uri)
        if settings is None:
            raise ConfigurationError(f"checkpoint {uri!r} is no directory and no URL")
        return settings
    from prefect_elastic_train.blocks.lookup import STORAGE_TYPES, load_saved

    block = load_saved(STORAGE_TYPES, storage) if isinstance(storage, str) else storage
    if not uri.startswith(f"{block.uri.rstrip('/')}/"):
        raise ConfigurationError(f"checkpoint {uri} is not in storage {block.uri}; pass the storage that it is in")
    plain: StorageSettings = block.plain()
    return plain
