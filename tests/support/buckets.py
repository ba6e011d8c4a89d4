"""Run directories in a bucket, as the tests look at them."""

from __future__ import annotations

import json
from typing import Any

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
        """Return the small objects of the only run, or of a named one: ``"attempts"``, ``"commits"``, ``"ended"``."""
        found = [key for key in self.all_keys(f"{run}/" if run else "") if f"/.elastic_train/{kind}/" in key]
        return [json.loads(self.read(key)) for key in found]

    def all_keys(self, below: str = "") -> list[str]:
        """Return the keys of all objects below the prefix, in order."""
        return self.moto.keys(BUCKET, f"{self.prefix}/{below}")

    def read(self, key: str) -> bytes:
        """Return an object by its key or URI."""
        key = key.removeprefix(f"s3://{BUCKET}/")
        data: bytes = self.moto.client().get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return data
