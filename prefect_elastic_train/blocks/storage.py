"""Where run directories live."""

from __future__ import annotations

from prefect_elastic_train.blocks._common import TrainingBlock
from prefect_elastic_train.core.storage_settings import FsspecStorageSettings, LocalStorageSettings, S3StorageSettings

__all__ = ["FsspecStorage", "LocalStorage", "S3Storage"]


class LocalStorage(TrainingBlock, LocalStorageSettings):
    """Run directories in a directory: on this machine's disk, or on a mount that all nodes share.

    Attributes:
        path: The directory (required). ``~`` is expanded, relative paths are made absolute.
        retry_seconds: How long an operation is repeated on a passing error such as ``EIO`` or ``ESTALE``. Default 300.
        preflight: Try the directory from each node before training starts. Default True.

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


class S3Storage(TrainingBlock, S3StorageSettings):
    """Run directories in a bucket of AWS S3 or of a store that speaks its protocol.

    The store must create exclusively (``If-None-Match: *``), as AWS, MinIO, Ceph and R2 do.

    Attributes:
        bucket_path: Bucket and prefix (required), such as ``my-bucket/runs``.
        endpoint_url: Of an S3-compatible store. Default: AWS.
        region: Region of the bucket. Default: as the environment says.
        access_key_id: Key, if it is not the ambient AWS credentials of each node that serve. Those are renewed as
            botocore does, for as long as a training takes.
        secret_access_key: Its secret.
        session_token: Token of temporary credentials.
        addressing_style: ``"auto"``, ``"path"`` or ``"virtual"``. Default ``"auto"``.
        verify_tls: Whether certificates are verified. Default True.
        ca_bundle: File with the certificates to trust. Default: the system's.
        retry_seconds: How long an operation is repeated on time-outs, resets, 429, 5xx and throttling. Default 300.
        preflight: Try the bucket from each node before training starts. Default True.

    Example:
        Keep run directories in a bucket, with the credentials that each node has::

            from prefect_elastic_train import S3Storage

            storage = S3Storage(bucket_path="my-bucket/runs", region="eu-central-1")
            storage.save("BLOCK_NAME")
            storage = S3Storage.load("BLOCK_NAME")
    """

    _block_type_name = "Training Storage (S3)"
    _block_type_slug = "training-storage-s3"
    _description = "Run directories and checkpoints in an S3 bucket, on AWS or elsewhere."


class FsspecStorage(TrainingBlock, FsspecStorageSettings):
    """Run directories in another object store that fsspec knows, such as Google's or Azure's.

    Its fsspec package must be installed on each node (``gcsfs``, ``adlfs``), and the store must create exclusively:
    one that does not is refused before training starts.

    Attributes:
        url: URL below which runs are (required), such as ``gs://my-bucket/runs``.
        options: Arguments of the fsspec filesystem that are no secrets. Default none.
        secret_options: More of them, as a JSON object. Default: the ambient credentials.
        retry_seconds: How long an operation is repeated on passing errors. Default 300.
        preflight: Try the store from each node before training starts. Default True.

    Example:
        Keep run directories in a bucket of Google Cloud Storage::

            from prefect_elastic_train import FsspecStorage

            storage = FsspecStorage(url="gs://my-bucket/runs")
            storage.save("BLOCK_NAME")
            storage = FsspecStorage.load("BLOCK_NAME")
    """

    _block_type_name = "Training Storage (fsspec)"
    _block_type_slug = "training-storage-fsspec"
    _description = "Run directories and checkpoints in an object store such as Google Cloud Storage or Azure Blob."
