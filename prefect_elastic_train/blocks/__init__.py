"""Settings of a training as Prefect blocks, for the flow process. Their fields are documented in ``core.settings``."""

from prefect_elastic_train.core.settings import (
    CheckpointSettings,
    ClusterSettings,
    FailureSettings,
    FsspecStorageSettings,
    LocalStorageSettings,
    S3StorageSettings,
    ScalingSettings,
)

from . import _common


class ElasticScaling(_common.TrainingBlock, ScalingSettings):
    """The number of workers of a training, and the resources of each.

    Training requests ``max_workers`` and starts as soon as ``min_workers`` fit. It continues with fewer workers after
    a loss, and grows again when capacity returns.

    Raises:
        ValidationError: A value is not allowed, or values do not fit together: with ``topology``, ``min_workers`` and
            ``max_workers`` must be multiples of the workers that fill a slice.

    Example:
        Train on one to eight GPUs::

            from prefect_elastic_train import ElasticScaling

            scaling = ElasticScaling(min_workers=1, max_workers=8, accelerator="gpu")
            scaling.save("BLOCK_NAME")
            scaling = ElasticScaling.load("BLOCK_NAME")

        Train on one to four TPU slices of four hosts::

            from prefect_elastic_train import ElasticScaling

            ElasticScaling(
                min_workers=4, max_workers=16, accelerator="tpu", topology="4x4", accelerator_type="TPU-V6E"
            )
    """

    _block_type_name = "Elastic Scaling"


class FailureBudget(_common.TrainingBlock, FailureSettings):
    """The failures that a training tolerates, on each level of recovery.

    Example:
        Allow many driver restarts for a run of several weeks::

            from prefect_elastic_train import FailureBudget

            failures = FailureBudget(max_failures=-1, driver_restarts=50)
            failures.save("BLOCK_NAME")
            failures = FailureBudget.load("BLOCK_NAME")
    """

    _block_type_name = "Failure Budget"


class CheckpointPolicy(_common.TrainingBlock, CheckpointSettings):
    """The checkpoints of a training to keep.

    Example:
        Keep the three checkpoints with the lowest validation loss::

            from prefect_elastic_train import CheckpointPolicy

            checkpoints = CheckpointPolicy(keep=3, score_attribute="val_loss", score_order="min")
            checkpoints.save("BLOCK_NAME")
            checkpoints = CheckpointPolicy.load("BLOCK_NAME")
    """

    _block_type_name = "Checkpoint Policy"


class RayCluster(_common.TrainingBlock, ClusterSettings):
    """The Ray cluster of a training: a local one that is started for it, or an existing one.

    Example:
        Join a cluster from one of its nodes::

            from prefect_elastic_train import RayCluster

            cluster = RayCluster(address="10.0.0.5:6379")
            cluster.save("BLOCK_NAME")
            cluster = RayCluster.load("BLOCK_NAME")

        Submit the run to a cluster, with the code of the train loop::

            cluster = RayCluster(address="https://ray.example.com", auth_token="…", working_dir="./project")
    """

    _block_type_name = "Ray Cluster (training)"


class LocalStorage(_common.TrainingBlock, LocalStorageSettings):
    """A directory with run directories: on the disk of this machine, or on a mount that all nodes share.

    Example:
        Keep run directories on a shared mount::

            from prefect_elastic_train import LocalStorage

            storage = LocalStorage(path="/mnt/shared/runs")
            storage.save("BLOCK_NAME")
            storage = LocalStorage.load("BLOCK_NAME")
    """

    _block_type_name = "Training Storage (directory)"


class S3Storage(_common.TrainingBlock, S3StorageSettings):
    """A bucket with run directories, of AWS S3 or of a store with the same protocol.

    The store must support exclusive creation (``If-None-Match: *``), as AWS, MinIO, Ceph and R2 do.

    Example:
        Keep run directories in a bucket, with the credentials that each node has::

            from prefect_elastic_train import S3Storage

            storage = S3Storage(bucket_path="my-bucket/runs", region="eu-central-1")
            storage.save("BLOCK_NAME")
            storage = S3Storage.load("BLOCK_NAME")
    """

    _block_type_name = "Training Storage (S3)"


class FsspecStorage(_common.TrainingBlock, FsspecStorageSettings):
    """Run directories in another object store that fsspec supports, such as Google's or Azure's.

    The store's fsspec package (``gcsfs``, ``adlfs``) must be installed on each node. The store must support exclusive
    creation; otherwise it is refused before training starts.

    Example:
        Keep run directories in a bucket of Google Cloud Storage::

            from prefect_elastic_train import FsspecStorage

            storage = FsspecStorage(url="gs://my-bucket/runs")
            storage.save("BLOCK_NAME")
            storage = FsspecStorage.load("BLOCK_NAME")
    """

    _block_type_name = "Training Storage (fsspec)"
