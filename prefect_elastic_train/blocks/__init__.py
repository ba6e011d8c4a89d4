"""Settings of a training as Prefect blocks."""

from prefect_elastic_train.blocks.settings import (
    CheckpointPolicy,
    ElasticScaling,
    FailureBudget,
    FsspecStorage,
    LocalStorage,
    RayCluster,
    S3Storage,
)

__all__ = [
    "CheckpointPolicy",
    "ElasticScaling",
    "FailureBudget",
    "FsspecStorage",
    "LocalStorage",
    "RayCluster",
    "S3Storage",
]
