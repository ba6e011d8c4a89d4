"""The filesystem that Ray Train writes a run through."""

from prefect_elastic_train.filesystems.run_filesystem import RunFilesystem, run_filesystem, uploading

__all__ = ["RunFilesystem", "run_filesystem", "uploading"]
