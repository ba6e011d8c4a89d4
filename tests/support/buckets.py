"""Run directories in a bucket, as the tests look at them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from prefect_elastic_train import S3Storage
from prefect_elastic_train.blocks.lookup import plain_storage
from prefect_elastic_train.storage.opening import open_storage
from tests.support.s3 import FaultProxy, MotoServer

BUCKET = "training"


class Bucket:
    """A bucket of a real S3 server, which is reached through a proxy that can make trouble."""

    def __init__(self, moto: MotoServer, proxy: FaultProxy, prefix: str) -> None:
        self.moto, self.proxy, self.prefix = moto, proxy, prefix

    @property
    def block(self) -> dict[str, Any]:
        """The fields of the `S3Storage` that a training gets."""
        return {
            "bucket_path": f"{BUCKET}/{self.prefix}",
            "endpoint_url": self.proxy.endpoint_url,
            "region": "us-east-1",
            "access_key_id": "AKIATESTTESTTEST",
            "secret_access_key": "test-secret-of-the-bucket",
        }

    def records(self, kind: str, run: str = "") -> list[dict[str, Any]]:
        """Give the small objects of a run: ``"attempts"``, ``"commits"``, ``"ended"``."""
        names = [run] if run else self._direct().run_names()
        store = self._direct().run(names[0]) if names else None
        folder = f".elastic_train/{kind}"
        if store is None:
            return []
        found = (store.read(f"{folder}/{name}") for name in store.names(folder))
        return [json.loads(data) for data in found if data is not None]

    def all_keys(self) -> list[str]:
        """Give the keys of all objects below the prefix."""
        return self.moto.keys(BUCKET, f"{self.prefix}/")

    def fetch(self, uri: str, name: str) -> Path:
        """Copy an object of a checkpoint to a file."""
        target = Path(tempfile.mkdtemp(), name)
        key = f"{uri.removeprefix(f's3://{BUCKET}/')}/{name}"
        target.write_bytes(self.moto.client().get_object(Bucket=BUCKET, Key=key)["Body"].read())
        return target

    def _direct(self) -> Any:
        """Look past the proxy."""
        block = S3Storage(**{**self.block, "endpoint_url": self.moto.endpoint_url})
        return open_storage(plain_storage(block))
