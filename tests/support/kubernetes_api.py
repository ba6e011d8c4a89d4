"""An API server of Kubernetes with KubeRay's RayClusters, on loopback, as a pod of a flow run sees it.

It is a kube-apiserver if that program and etcd are on the PATH. Otherwise it is a stand-in, which answers requests for
custom objects as kube-apiserver 1.20 does: create, read, merge patch, delete, and the subresource ``status``. Neither
has an operator or nodes.
"""

from __future__ import annotations

import json
import secrets
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import requests
import yaml

from prefect_elastic_train.core.settings import FailureSettings, KubeRaySettings, ScalingSettings
from prefect_elastic_train.kubernetes.manifests import render
from tests.support.processes import ROOT, free_port, wait_for

IS_REAL = bool(shutil.which("kube-apiserver") and shutil.which("etcd"))
NAMESPACE = "training"
PATH = f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayclusters"
_OPENSSL = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=test -addext subjectAltName=IP:127.0.0.1"


@dataclass
class ApiServer:
    """A running API server: its port, a file with its certificate, and files with tokens of users."""

    port: int
    certificate: Path
    admin_token: Path
    #: The service account of flow runs, with the rights of the rendered ``run-clusters.yaml``.
    flows_token: Path
    #: HTTP statuses of the next answers of the stand-in.
    failures: list[int] = field(default_factory=list)

    def request(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> Any:
        """Send a request as an administrator, and return the answer's content."""
        headers = {"Authorization": f"Bearer {self.admin_token.read_text()}", "Content-Type": content_type}
        data = None if body is None else json.dumps(body)
        url = f"https://127.0.0.1:{self.port}{path}"
        answer = requests.request(method, url, headers=headers, data=data, verify=str(self.certificate), timeout=10)
        if not answer.ok:
            raise requests.RequestException(answer.text)
        return answer.json()

    def clusters(self) -> list[Any]:
        """Return the RayClusters."""
        return list(self.request("GET", PATH)["items"])

    def change(self, name: str, subresource: str = "", **changes: Any) -> None:
        """Change a RayCluster, as KubeRay's operator does, or Ray's autoscaler."""
        self.request("PATCH", f"{PATH}/{name}{subresource}", changes, "application/merge-patch+json")


@contextmanager
def kubernetes_api(folder: Path) -> Iterator[ApiServer]:
    """Start an API server; it is stopped at the end."""
    admin = folder / "admin"
    flows = folder / "flows"
    for file in (admin, flows):
        file.write_text(secrets.token_hex(16))
    with ExitStack() as stack:
        if IS_REAL:
            server = stack.enter_context(_real(folder, admin, flows))
        else:
            server = stack.enter_context(_stand_in(folder, admin, flows))
        yield server


@contextmanager
def _real(folder: Path, admin: Path, flows: Path) -> Iterator[ApiServer]:
    [etcd_port, peer_port, port] = [free_port() for _ in range(3)]
    etcd_url = f"http://127.0.0.1:{etcd_port}"
    peer_url = f"http://127.0.0.1:{peer_port}"
    (folder / "tokens.csv").write_text(
        f'{admin.read_text()},admin,1,"system:masters"\n'
        f"{flows.read_text()},system:serviceaccount:{NAMESPACE}:training-flows,2\n"
    )
    subprocess.run(["openssl", "genrsa", "-out", folder / "sa.key", "2048"], check=True, capture_output=True)
    etcd = ["etcd", f"--data-dir={folder / 'etcd'}", f"--listen-client-urls={etcd_url}"]
    etcd += [f"--advertise-client-urls={etcd_url}", f"--listen-peer-urls={peer_url}"]
    etcd += [f"--initial-advertise-peer-urls={peer_url}", f"--initial-cluster=default={peer_url}"]
    api = ["kube-apiserver", f"--etcd-servers={etcd_url}", f"--cert-dir={folder}", f"--secure-port={port}"]
    api += ["--bind-address=127.0.0.1", "--service-account-issuer=https://kubernetes.default.svc"]
    api += [
        f"--service-account-key-file={folder / 'sa.key'}",
        f"--service-account-signing-key-file={folder / 'sa.key'}",
    ]
    api += [f"--token-auth-file={folder / 'tokens.csv'}", "--authorization-mode=RBAC"]
    api += ["--service-cluster-ip-range=10.0.0.0/24", "--disable-admission-plugins=ServiceAccount"]
    with ExitStack() as stack:
        for command in (etcd, api):
            log = stack.enter_context((folder / f"{command[0]}.log").open("wb"))
            process = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(process.wait, 20)
            stack.callback(process.kill)
        server = ApiServer(port, folder / "apiserver.crt", admin, flows)
        wait_for(partial(_answers, server, "/api/v1/namespaces/default"), 60)
        server.request("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        definition = json.loads((ROOT / "tests" / "data" / "kuberay" / "rayclusters.json").read_text())
        server.request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
        kuberay = KubeRaySettings(image="image", namespace=NAMESPACE)
        rights = render(ScalingSettings(), FailureSettings(), kuberay)["run-clusters.yaml"]
        for document in yaml.safe_load_all(rights):
            group = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/{document['kind'].lower()}s"
            server.request("POST", group, document)
        wait_for(partial(_answers, server, PATH), 60)
        time.sleep(2)  # a new kind may be missing from an answer for a moment after the first one
        yield server


def _answers(server: ApiServer, path: str) -> bool:
    try:
        server.request("GET", path)
    except (OSError, requests.RequestException):
        return False
    return True


@contextmanager
def _stand_in(folder: Path, admin: Path, flows: Path) -> Iterator[ApiServer]:
    key = folder / "key.pem"
    certificate = folder / "apiserver.crt"
    subprocess.run([*_OPENSSL.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.objects = {}  # type: ignore[attr-defined]
    server.tokens = {admin.read_text(), flows.read_text()}  # type: ignore[attr-defined]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    running = ApiServer(server.server_port, certificate, admin, flows)
    server.failures = running.failures  # type: ignore[attr-defined]
    try:
        yield running
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def _merge(old: Any, new: Any) -> Any:
    """Return an object after a JSON merge patch."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{key: _merge(old.get(key), value) for key, value in new.items()}}
    return new


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == PATH:
            self._answer(200, {"items": list(self._objects.values())})
        else:
            self._with_object(lambda name: self._objects[name])

    def do_DELETE(self) -> None:
        self._with_object(self._objects.pop)

    def do_POST(self) -> None:
        body = self._body()
        name = body["metadata"]["name"]
        if name in self._objects:
            self._answer(409, {"message": f"rayclusters.ray.io {name!r} already exists"})
        else:
            self._answer(201, self._objects.setdefault(name, body))

    def do_PATCH(self) -> None:
        assert self.headers["Content-Type"] == "application/merge-patch+json"
        body = self._body()
        self._with_object(lambda name: self._objects.update({name: _merge(self._objects[name], body)}) or body)

    def _body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    @property
    def _objects(self) -> dict[str, Any]:
        objects: dict[str, Any] = self.server.objects  # type: ignore[attr-defined]
        return objects

    def _with_object(self, act: Any) -> None:
        name = self.path.partition("?")[0].removeprefix(f"{PATH}/").removesuffix("/status")
        if name in self._objects:
            self._answer(200, act(name))
        else:
            self._answer(404, {"message": f"rayclusters.ray.io {name!r} not found"})

    def _answer(self, status: int, content: Any) -> None:
        if self.headers["Authorization"].split()[-1] not in self.server.tokens:  # type: ignore[attr-defined]
            status = 401
            content = {"message": "Unauthorized"}
        elif self.server.failures:  # type: ignore[attr-defined]
            status = self.server.failures.pop()  # type: ignore[attr-defined]
            content = {"message": "the server is busy"}
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass
