"""Credentials and certificates of a bucket: ambient ones that are renewed, and a server that is not trusted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefect_elastic_train import StorageFaultError
from prefect_elastic_train.core.storage_settings import S3StorageSettings
from prefect_elastic_train.storage.opening import open_storage
from prefect_elastic_train.storage.store import RunStore
from tests.support.certificates import make_certificate
from tests.support.s3 import FaultProxy, MotoServer


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without credentials of its own."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


@pytest.fixture
def ambient(bucket: str, proxy: FaultProxy) -> RunStore:
    """A run in a bucket that is reached with the credentials of the environment."""
    settings = S3StorageSettings(bucket_path=f"{bucket}/runs", endpoint_url=proxy.endpoint_url, region="us-east-1")
    return open_storage(settings, retry_seconds=5).run("ambient")


def _use_everything(store: RunStore, folder: Path) -> None:
    """Write and read small objects and files."""
    (folder / "bulk").write_bytes(b"bulk")
    store.replace("small", b"small")
    assert store.read("small") == b"small"
    store.upload(str(folder / "bulk"), "ckpt/bulk")
    store.download("ckpt", str(folder / "back"))
    assert (folder / "back" / "bulk").read_bytes() == b"bulk"


def test_without_any_credentials_that_is_said_at_once(ambient: RunStore) -> None:
    with pytest.raises(StorageFaultError, match="credentials") as caught:
        ambient.read("small")
    assert caught.value.permanent


@pytest.fixture
def tls(server: MotoServer, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The server behind a certificate of its own: its URL, and the file that makes it trusted."""
    trusted, pair = make_certificate(tmp_path)
    with FaultProxy(server.endpoint_url, certificate=pair) as proxy:
        yield proxy.endpoint_url, trusted


@pytest.mark.parametrize("trust", ["the bundle", "anything", "nobody"])
def test_a_certificate_is_trusted_by_the_bundle_or_not_at_all(
    tls: tuple[str, Path], tmp_path: Path, bucket: str, trust: str
) -> None:
    url, bundle = tls
    settings = S3StorageSettings(
        bucket_path=f"{bucket}/runs",
        endpoint_url=url,
        region="us-east-1",
        access_key_id="AKIATLS",
        secret_access_key="secret",
        ca_bundle=str(bundle) if trust == "the bundle" else "",
        verify_tls=trust != "anything",
    )
    store = open_storage(settings, retry_seconds=5).run("tls")
    if trust != "nobody":
        _use_everything(store, tmp_path)
        return
    with pytest.raises(StorageFaultError, match=r"TLS.*ca_bundle") as caught:
        store.read("small")
    assert caught.value.permanent
