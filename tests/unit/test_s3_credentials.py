"""Credentials and certificates of a bucket: ambient ones that are renewed, and a server that is not trusted."""

from __future__ import annotations

import datetime
import http.server
import json
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefect_elastic_train import StorageFaultError
from prefect_elastic_train.core.storage_settings import S3StorageSettings
from prefect_elastic_train.storage.opening import open_storage
from prefect_elastic_train.storage.store import RunStore
from tests.support.certificates import make_certificate
from tests.support.s3 import FaultProxy, MotoServer

BUCKET = "credentials"


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without credentials of its own."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


@pytest.fixture
def ambient(server: MotoServer, proxy: FaultProxy) -> RunStore:
    """A run in a bucket that is reached with the credentials of the environment."""
    if BUCKET not in [found["Name"] for found in server.client().list_buckets()["Buckets"]]:
        server.create_bucket(BUCKET)
    settings = S3StorageSettings(bucket_path=f"{BUCKET}/runs", endpoint_url=proxy.endpoint_url, region="us-east-1")
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


def test_a_credentials_file_that_somebody_renews_is_read_anew(
    ambient: RunStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id = AKIAOLD\naws_secret_access_key = old\n")
    proxy.allow_keys({"AKIAOLD"})
    _use_everything(ambient, tmp_path)
    file.write_text("[default]\naws_access_key_id = AKIANEW\naws_secret_access_key = new\n")
    proxy.allow_keys({"AKIANEW"})
    _use_everything(ambient, tmp_path)
    proxy.allow_keys({"AKIAOTHER"})
    for requests in (1, 1):  # they were read anew a moment ago
        proxy.reset_counters()
        with pytest.raises(StorageFaultError, match="credentials") as caught:
            ambient.read("small")
        assert caught.value.permanent
        assert len(proxy.requests) == requests, "they are read anew again and again"


def test_many_transfers_that_find_out_at_once_have_credentials_read_anew_once(
    ambient: RunStore, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAOLD")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    for number in range(12):
        ambient.replace(f"many/{number}", b"x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIANEW")
    proxy.allow_keys({"AKIANEW"})
    ambient.download("many", str(tmp_path))
    assert [(tmp_path / str(number)).read_bytes() for number in range(12)] == [b"x"] * 12


class _Role(http.server.ThreadingHTTPServer):
    """Gives credentials that end soon, new ones each time it is asked, as a role of a container does."""

    def __init__(self, proxy: FaultProxy) -> None:
        self.given = 0

        class Answer(http.server.BaseHTTPRequestHandler):
            def do_GET(handler: http.server.BaseHTTPRequestHandler) -> None:
                self.given += 1
                proxy.allow_keys({f"AKIAROLE{self.given}"})
                ends = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=2)
                body = {
                    "AccessKeyId": f"AKIAROLE{self.given}",
                    "SecretAccessKey": "secret",
                    "Token": "token",
                    "Expiration": ends.strftime("%Y-%m-%dT%H:%M:%SZ"),
                }
                handler.send_response(200)
                handler.end_headers()
                handler.wfile.write(json.dumps(body).encode())

            def log_message(handler, *arguments: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Answer)
        threading.Thread(target=self.serve_forever, daemon=True).start()


def test_credentials_of_a_role_are_renewed_for_as_long_as_the_training_takes(
    ambient: RunStore, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = _Role(proxy)
    try:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://127.0.0.1:{role.server_port}/role")
        for _ in range(4):
            _use_everything(ambient, tmp_path)
        assert role.given > 2, "they were renewed in between"
    finally:
        role.shutdown()
        role.server_close()


@pytest.fixture
def tls(server: MotoServer, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The server behind a certificate of its own: its URL, and the file that makes it trusted."""
    trusted, pair = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair)
    listener = socket.create_server(("127.0.0.1", 0))
    done = threading.Event()

    def pass_on(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(data)
        except OSError:
            pass
        finally:
            for end in (source, target):
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def serve() -> None:
        while not done.is_set():
            try:
                plain, _ = listener.accept()
                secure = context.wrap_socket(plain, server_side=True)
            except OSError:
                continue
            upstream = socket.create_connection(("127.0.0.1", server.port))
            for ends in ((secure, upstream), (upstream, secure)):
                threading.Thread(target=pass_on, args=ends, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield f"https://127.0.0.1:{listener.getsockname()[1]}", trusted
    done.set()
    listener.close()


@pytest.mark.parametrize("trust", ["the bundle", "anything", "nobody"])
def test_a_certificate_is_trusted_by_the_bundle_or_not_at_all(
    tls: tuple[str, Path], tmp_path: Path, server: MotoServer, trust: str
) -> None:
    url, bundle = tls
    if BUCKET not in [found["Name"] for found in server.client().list_buckets()["Buckets"]]:
        server.create_bucket(BUCKET)
    settings = S3StorageSettings(
        bucket_path=f"{BUCKET}/runs",
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
