"""Settings of a training as Prefect blocks."""

from prefect_elastic_train.blocks.checkpoints import CheckpointPolicy
from prefect_elastic_train.blocks.cluster import RayCluster
from prefect_elastic_train.blocks.failures import FailureBudget
from prefect_elastic_train.blocks.scaling import ElasticScaling
from prefect_elastic_train.blocks.storage import LocalStorage

__all__ = ["CheckpointPolicy", "ElasticScaling", "FailureBudget", "LocalStorage", "RayCluster"]
