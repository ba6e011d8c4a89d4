"""Long, elastic, fault-tolerant Ray Train runs, operated from Prefect.

Importing this package imports neither Ray nor torch nor JAX, and Prefect only when a name is used: Prefect's
server imports every registered collection, and the processes of a run import this package at every restart.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefect_elastic_train.blocks import (
        CheckpointPolicy,
        ElasticScaling,
        FailureBudget,
        FsspecStorage,
        LocalStorage,
        RayCluster,
        S3Storage,
    )
    from prefect_elastic_train.core.outcomes import (
        AttemptFailedError,
        CheckpointGoneError,
        ConfigurationError,
        ElasticTrainError,
        Outcome,
        StorageFaultError,
        TrainingTimeoutError,
    )
    from prefect_elastic_train.core.version import __version__
    from prefect_elastic_train.orchestration.result import TrainingResult, checkpoint_directory
    from prefect_elastic_train.orchestration.task import aelastic_train, elastic_train

_MODULES = {
    "AttemptFailedError": "core.outcomes",
    "CheckpointGoneError": "core.outcomes",
    "CheckpointPolicy": "blocks",
    "ConfigurationError": "core.outcomes",
    "ElasticScaling": "blocks",
    "ElasticTrainError": "core.outcomes",
    "FailureBudget": "blocks",
    "FsspecStorage": "blocks",
    "LocalStorage": "blocks",
    "Outcome": "core.outcomes",
    "RayCluster": "blocks",
    "S3Storage": "blocks",
    "StorageFaultError": "core.outcomes",
    "TrainingResult": "orchestration.result",
    "TrainingTimeoutError": "core.outcomes",
    "__version__": "core.version",
    "aelastic_train": "orchestration.task",
    "checkpoint_directory": "orchestration.result",
    "elastic_train": "orchestration.task",
}

__all__ = [
    "AttemptFailedError",
    "CheckpointGoneError",
    "CheckpointPolicy",
    "ConfigurationError",
    "ElasticScaling",
    "ElasticTrainError",
    "FailureBudget",
    "FsspecStorage",
    "LocalStorage",
    "Outcome",
    "RayCluster",
    "S3Storage",
    "StorageFaultError",
    "TrainingResult",
    "TrainingTimeoutError",
    "__version__",
    "aelastic_train",
    "checkpoint_directory",
    "elastic_train",
]


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
