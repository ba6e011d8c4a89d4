"""Credentials and certificates of a bucket: none at all, and a server that is not trusted."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from prefect_elastic_train import StorageFaultError
from prefect_elastic_train.core.settings import S3StorageSettings
from prefect_elastic_train.storage.opening import Storage
from tests.support.s3 import FaultProxy, MotoServer

#: Makes a certificate for 127.0.0.1.
_OPENSSL = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=test -addext subjectAltName=IP:127.0.0.1"


def _settings(bucket: str, proxy: FaultProxy, **more: Any) -> S3StorageSettings:
    options = {"endpoint_url": proxy.endpoint_url, "region": "us-east-1", "retry_seconds": 5, **more}
    return S3StorageSettings(bucket_path=f"{bucket}/runs", **options)


def test_without_any_credentials_that_is_said_at_once(
    bucket: str, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with pytest.raises(StorageFaultError, match="credentials") as caught:
        Storage(_settings(bucket, proxy)).run("ambient").read("small")
    assert caught.value.permanent
    (tmp_path / "credentials").write_text("[default]\naws_access_key_id = AKIA\naws_secret_access_key = secret\n")
    proxy.allow_keys({"AKIA"})
    assert Storage(_settings(bucket, proxy)).run("ambient").read("small") is None, "those of the machine"


@pytest.mark.parametrize("trust", ["the bundle", "anything", "nobody"])
def test_a_certificate_is_trusted_by_the_bundle_or_not_at_all(
    server: MotoServer, tmp_path: Path, bucket: str, trust: str
) -> None:
    trusted, pair = tmp_path / "trusted.pem", tmp_path / "pair.pem"
    subprocess.run([*_OPENSSL.split(), "-keyout", pair, "-out", trusted], check=True, capture_output=True)
    pair.write_bytes(pair.read_bytes() + trusted.read_bytes())
    bundle = str(trusted) if trust == "the bundle" else ""
    keys = {"access_key_id": "AKIATLS", "secret_access_key": "secret"}
    with FaultProxy(server.endpoint_url, certificate=pair) as proxy:
        settings = _settings(bucket, proxy, ca_bundle=bundle, verify_tls=trust != "anything", **keys)
        store = Storage(settings).run("tls")
        if trust == "nobody":
            with pytest.raises(StorageFaultError, match=r"TLS.*ca_bundle"):
                store.read("small")
        else:
            store.replace("small", b"small")
            assert store.read("small") == b"small"
