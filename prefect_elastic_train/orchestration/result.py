"""What a training gives back, with ways to read its checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from prefect_elastic_train.core.outcomes import CheckpointGoneError, ConfigurationError
from prefect_elastic_train.core.result import RunResult
from prefect_elastic_train.core.storage_settings import LocalStorageSettings, StorageSettings, storage_at
from prefect_elastic_train.runs import layout
from prefect_elastic_train.storage.opening import open_storage

if TYPE_CHECKING:
    import pandas as pd
    from ray.train import Checkpoint

    from prefect_elastic_train.blocks.lookup import StorageBlock


class TrainingResult(RunResult):
    __doc__ = RunResult.__doc__

    def checkpoint(self, *, best: bool = False, storage: StorageBlock | str | None = None) -> Checkpoint:
        """Return the newest checkpoint as Ray's type. It can be read wherever its storage can be reached.

        Args:
            best: Return the kept checkpoint with the best score instead; the newest if the checkpoint policy has no
                ``score_attribute``.
            storage: The storage block, or the name of one. Default: :attr:`storage_block`; for a storage that was
                given inline, its URI with the ambient credentials.

        Raises:
            FileNotFoundError: The loop reported no checkpoint, or with ``best`` none with the score.
            ConfigurationError: The storage block cannot be loaded, or holds another place.
        """
        from prefect_elastic_train.elastic.checkpoints import open_checkpoint

        uri = self._checkpoint_uri(best)
        return open_checkpoint(uri, _storage_of(uri, storage or self.storage_block))

    @contextmanager
    def checkpoint_directory(self, *, best: bool = False, storage: StorageBlock | str | None = None) -> Iterator[Path]:
        """Yield the newest checkpoint as a directory to read, for as long as the ``with`` lasts. Needs no Ray.

        Takes the arguments of :meth:`checkpoint`, and raises the same.
        """
        with checkpoint_directory(self._checkpoint_uri(best), storage or self.storage_block) as directory:
            yield directory

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
        """Return the history of what was reported, over all attempts, one row a report."""
        import pandas as pd

        return pd.DataFrame(self.history)


@contextmanager
def checkpoint_directory(uri: str, storage: StorageBlock | str | None = None) -> Iterator[Path]:
    """Yield a checkpoint of a run as a directory to read, for as long as the ``with`` lasts. Needs no Ray.

    Args:
        uri: Of the checkpoint, as :attr:`TrainingResult.checkpoint_uri` gives it.
        storage: The storage block that it is in, or the name of one. Default: the URI with the ambient credentials.

    Yields:
        The checkpoint itself on a disk; a copy that is removed afterwards from anywhere else.

    Raises:
        CheckpointGoneError: The run has no such checkpoint, or no longer.
        FileNotFoundError: There is no such run.
        ConfigurationError: The storage block cannot be loaded, or holds another place.
        StorageFaultError: The storage refuses, or was away for too long.
    """
    settings = _storage_of(uri, storage)
    if isinstance(settings, LocalStorageSettings):
        if not Path(uri).is_dir():
            raise _missing(uri, Path(uri).parent.joinpath(layout.RUN).exists())
        yield Path(uri)
        return
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as directory:
        run, _, name = uri.partition("://")[2].strip("/").rpartition("/")
        store = open_storage(settings).folder(run)
        try:
            store.download(name, directory)
        except FileNotFoundError as error:
            raise _missing(uri, store.size(layout.RUN) is not None) from error
        yield Path(directory)


def _missing(uri: str, is_of_run: bool) -> FileNotFoundError:
    if is_of_run:
        return CheckpointGoneError(f"{uri}: the run has no such checkpoint, or no longer")
    return FileNotFoundError(f"{uri}: there is no such checkpoint, and no run that it could be of")


def _storage_of(uri: str, given: StorageBlock | str | None) -> StorageSettings:
    if not given:
        if (found := storage_at(uri)) is None:
            raise ConfigurationError(f"checkpoint {uri!r} is no directory and no URL")
        return found
    from prefect_elastic_train.blocks.lookup import STORAGE_TYPES, load_saved, plain_storage

    settings = plain_storage(load_saved([*STORAGE_TYPES], given) if isinstance(given, str) else given)
    if not uri.startswith(f"{settings.uri.rstrip('/')}/"):
        raise ConfigurationError(f"checkpoint {uri} is not in storage {settings.uri}; give the storage that it is in")
    return settings
