"""Settings of a training as Prefect blocks."""

from prefect_elastic_train.blocks.checkpoints import CheckpointPolicy
from prefect_elastic_train.blocks.cluster import RayCluster
from prefect_elastic_train.blocks.failures import FailureBudget
from prefect_elastic_train.blocks.scaling import ElasticScaling
from prefect_elastic_train.blocks.storage import FsspecStorage, LocalStorage, S3Storage

__all__ = [
    "CheckpointPolicy",
    "ElasticScaling",
    "FailureBudget",
    "FsspecStorage",
    "LocalStorage",
    "RayCluster",
    "S3Storage",
]
