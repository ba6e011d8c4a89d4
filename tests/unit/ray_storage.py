"""Ray Train's storage context and our checkpoint manager, on the filesystem that we hand to Ray."""

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import fs
from ray.train import Checkpoint, CheckpointConfig
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.training_report import _TrainingReport
from ray.train.v2.api.reported_checkpoint import ReportedCheckpointStatus

from prefect_elastic_train.controller.checkpoint_manager import RankedCheckpointManager
from prefect_elastic_train.runs.run_filesystem import run_filesystem
from prefect_elastic_train.storage.store import LocalRunStore, RunStore


def raw_ray(store: RunStore) -> CheckpointManager:
    """Return Ray Train's own checkpoint manager as it finds the run directory without us."""
    memory = fs.PyFileSystem(fs.FSSpecHandler(MemoryFileSystem(skip_instance_cache=True)))
    filesystem = fs.LocalFileSystem() if isinstance(store, LocalRunStore) else memory
    path = Path(store.path)
    context = StorageContext(str(path.parent), path.name, storage_filesystem=filesystem)
    return CheckpointManager(CheckpointConfig(), context)


class Ray:
    """Ray Train's own storage context and our checkpoint manager on the filesystem of an attempt."""

    def __init__(self, store: RunStore, attempt: int, **config: Any) -> None:
        path = Path(store.path)
        self.storage = StorageContext(str(path.parent), path.name, storage_filesystem=run_filesystem(store, attempt))
        self._config = CheckpointConfig(**config)
        self.manager: Any = None

    def start(self) -> Any:
        """Load the manager, as a controller does when it starts."""
        self.manager = RankedCheckpointManager(self._config, self.storage)
        return self

    @property
    def latest(self) -> str:
        """Name of the checkpoint that workers are handed."""
        result = self.manager.latest_checkpoint_result
        return Path(result.checkpoint.path).name if result else ""

    @property
    def checkpoints(self) -> list[str]:
        """Names of all checkpoints that the manager knows, in its order."""
        return [Path(result.checkpoint.path).name for result in self.manager._checkpoint_results]

    def upload(self, name: str, files: dict[str, bytes]) -> Checkpoint:
        """Persist a checkpoint as a worker does when the loop reports."""
        with tempfile.TemporaryDirectory(prefix="elastic-train-worker-") as folder:
            for file, data in files.items():
                path = Path(folder, file)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            return self.storage.persist_current_checkpoint(Checkpoint(folder), name)

    def report(self, name: str, files: dict[str, bytes] | None = None, **metrics: Any) -> None:
        """Report a checkpoint, as all ranks have."""
        self.register(self.upload(name, files or {"model.pt": name.encode(), "rank-0/optim.pt": b"12"}), **metrics)

    def register(self, checkpoint: Checkpoint, validation: bool = False, **metrics: Any) -> None:
        """Take a checkpoint that is in the run directory as reported by all ranks."""
        report = _TrainingReport(checkpoint, metrics, validation=validation)
        asyncio.run(_call(self.manager.register_checkpoint, report))

    def validate(self, checkpoint: Checkpoint, **metrics: Any) -> None:
        """Register the metrics of a successful validation."""
        validated = {checkpoint: (metrics, ReportedCheckpointStatus.VALIDATED)}
        asyncio.run(_call(self.manager.update_checkpoints_with_validation_result, validated))


async def _call(function: Callable[[Any], None], argument: Any) -> None:
    """Call a function that needs an event loop."""
    function(argument)
