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
    from prefect_elastic_train.orchestration.task import aelastic_train, elastic_train
    from prefect_elastic_train.orchestration.training_result import TrainingResult, checkpoint_directory
    from prefect_elastic_train.rehearsal.runner import rehearse

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
    "rehearse",
]

#: The modules of these names, in the order of the time that their import takes.
_MODULES = (
    "core.version",
    "core.outcomes",
    "orchestration.training_result",
    "blocks",
    "orchestration.task",
    "rehearsal.runner",
)


def __getattr__(name: str) -> Any:
    for module_name in _MODULES if name in __all__ else ():
        module = import_module(f"{__name__}.{module_name}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
