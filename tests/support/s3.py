"""A real S3 protocol server on this machine, and a proxy in front of it that disturbs what passes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import ssl
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import aiohttp
from aiohttp import web
from typing_extensions import Self
from yarl import URL

from tests.support.processes import free_port, wait_for

ACCESS_KEY = "AKIAIOSFODNN7EXAMPLE"
WRITES = ("PUT", "POST", "DELETE")

#: Headers of one connection, which are not passed on.
_OF_A_CONNECTION = ("connection", "expect", "keep-alive", "transfer-encoding", "date", "server")


class _Served:
    """What is closed at the end of a block."""

    def close(self) -> None:
        """End it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MotoServer(_Served):
    """An S3 server in a process of its own, empty at first; its objects go with it.

    Args:
        environment: More variables for it, such as ``S3_UPLOAD_PART_MIN_SIZE`` (bytes, 5 MiB unless told).
    """

    def __init__(self, **environment: str) -> None:
        self.port = free_port()
        self.endpoint_url = f"http://127.0.0.1:{self.port}"
        quiet = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "PREFECT_"))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            env={**quiet, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            wait_for(self._answers, 30, "the S3 server")
        except BaseException:
            self.close()
            raise

    def _answers(self) -> bool:
        assert self._process.poll() is None, "the S3 server ended as it started"
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port)).close()
            return True
        return False

    @cache
    def client(self) -> Any:
        """Return a boto3 client of the server itself, past any proxy: path style, and not a single retry."""
        import boto3
        from botocore.config import Config

        once = Config(
            retries={"total_max_attempts": 3}, connect_timeout=2, read_timeout=10, s3={"addressing_style": "path"}
        )
        keys = {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": "secret", "region_name": "us-east-1"}
        return boto3.session.Session().client("s3", endpoint_url=self.endpoint_url, config=once, **keys)

    def create_bucket(self, name: str) -> str:
        """Make a bucket and return its name."""
        self.client().create_bucket(Bucket=name)
        return name

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        """Return the keys of all objects below a prefix, in order."""
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return [str(item["Key"]) for page in pages for item in page.get("Contents", [])]

    def incomplete_uploads(self, bucket: str) -> list[tuple[str, str]]:
        """Return key and upload id of each multipart upload that was neither completed nor aborted."""
        pages = self.client().get_paginator("list_multipart_uploads").paginate(Bucket=bucket)
        return [(str(item["Key"]), str(item["UploadId"])) for page in pages for item in page.get("Uploads", [])]

    def close(self) -> None:
        """End the server."""
        self._process.kill()
        self._process.wait(10)


@dataclass
class SeenRequest:
    """A request that came to the proxy, and what was done to it: a kind of `FaultProxy.faults_given`, or nothing."""

    method: str
    path: str
    """Bucket and key with the query, not quoted."""
    access_key: str = ""
    has_checksum: bool = False
    fault: str = ""


class Which(NamedTuple):
    """Tells which requests something is about: HTTP methods, what path and query contain, and only with checksums."""

    methods: tuple[str, ...] = ()
    contains: str = ""
    checksum: bool = False

    def takes(self, request: SeenRequest) -> bool:
        """Return whether a request is one of them."""
        is_of_these = (not self.methods or request.method in self.methods) and self.contains in request.path
        return is_of_these and (request.has_checksum or not self.checksum)


class _Refusal(NamedTuple):
    status: int
    code: str
    message: str
    when: Which = Which()


class _Faults(NamedTuple):
    rate: float
    kinds: tuple[str, ...]
    stall_seconds: float
    when: Which


_SLOW_DOWN = _Refusal(503, "SlowDown", "Please reduce your request rate.")
_NO_KEY = _Refusal(403, "AccessDenied", "Access Denied")
_WRONG_KEY = _Refusal(403, "InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist in our records.")
_WRONG_TOKEN = _Refusal(400, "ExpiredToken", "The provided token has expired.")


class FaultProxy(_Served):
    """A proxy in front of an HTTP server, in a thread of its own, whose faults are set while it runs, from any thread.

    With a file that has a certificate and its key it speaks TLS.
    """

    def __init__(self, upstream: str, certificate: Path | None = None) -> None:
        self._upstream = upstream
        self.reset_counters()
        self.calm()
        self._keys: frozenset[str] | None = None
        self._tokens: frozenset[str] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()
        port = self._do(self._listen(certificate))
        self.endpoint_url = f"{'https' if certificate else 'http'}://127.0.0.1:{port}"

    def faults(
        self,
        rate: float | None,
        kinds: Iterable[str] = (),
        stall_seconds: float = 5.0,
        seed: int = 0,
        when: Which | None = None,
    ) -> None:
        """Disturb a share of such requests from now on; None ends it.

        Kinds are ``503`` (answered with SlowDown), ``stall`` (carried out after a wait, even if the client has given up
        by then), ``cut`` (half of the answer comes before the connection is reset) and ``reset`` (the connection is
        reset, in half of the cases before the server sees the request and in the other half after it was carried out;
        ``reset_before`` is the first only).
        """
        self._random = random.Random(seed)
        self._faults = None if rate is None else _Faults(rate, tuple(kinds), stall_seconds, when or Which())

    def refuse(self, code: str, message: str = "refused", status: int = 403, when: Which | None = None) -> None:
        """Answer such requests with an error of S3 until `calm`; of several, the first that fits counts."""
        self._refusals.append(_Refusal(status, code, message, when or Which()))

    def lose_answer_of(self, method: str, contains: str) -> None:
        """Have the next such request carried out by the server, and its answer lost with its connection."""
        self._lost_answers.append(Which((method,), contains))

    def latency(self, seconds: float) -> None:
        """Hold each request back for so long before it is passed on; 0 ends it."""
        self._latency = seconds

    def allow_keys(self, access_keys: Iterable[str] | None) -> None:
        """Let requests of these access keys in, and answer others as S3 does; None lets in all."""
        self._keys = None if access_keys is None else frozenset(access_keys)

    def allow_tokens(self, tokens: Iterable[str] | None) -> None:
        """Let requests with these session tokens in, "" for none; answer others with ExpiredToken; None lets in all."""
        self._tokens = None if tokens is None else frozenset(tokens)

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        """Be out of reach for the length of a block: all connections are reset, and every new one."""
        self._is_out = True
        self._do(self._reset_all())
        try:
            yield
        finally:
            self._is_out = False

    def calm(self) -> None:
        """End faults, refusals, latency, lost answers and an outage; allowed keys and tokens stay as they are."""
        self.faults(None)
        self._refusals: list[_Refusal] = []
        self._lost_answers: list[Which] = []
        self._latency = 0.0
        self._is_out = False

    @property
    def faults_given(self) -> Counter[str]:
        """How many requests had which: 503, stall, cut, reset_before, reset_after, lost_answer, refused, outage."""
        return Counter(seen.fault for seen in self.requests if seen.fault)

    def count(self, contains: str) -> int:
        """How many requests had this in their path or query."""
        return sum(contains in seen.path for seen in self.requests)

    def reset_counters(self) -> None:
        """Forget the requests and faults so far."""
        self.requests: list[SeenRequest] = []

    def close(self) -> None:
        """End the proxy, and connections through it."""
        self._do(self._runner.cleanup())
        self._do(self._session.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    # In the proxy's thread

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _listen(self, certificate: Path | None) -> int:
        self._writing = asyncio.Lock()
        self._session = aiohttp.ClientSession(
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(None),
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
        )
        application = web.Application(client_max_size=2**40)
        application.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if certificate else None
        if context and certificate:
            context.load_cert_chain(certificate)
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=context).start()
        return int(self._runner.addresses[0][1])

    async def _reset_all(self) -> None:
        for connection in self._runner.server.connections if self._runner.server else []:
            _reset(connection.transport)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        """Carry out one request, or not."""
        seen, refusal, seconds = self._judge(request)
        self.requests.append(seen)
        try:
            body = await request.read()
            await asyncio.sleep(seconds)
            if refusal:
                return _refused(refusal)
            if seen.fault not in ("reset_before", "outage"):
                return await self._pass_on(request, seen, body)
        except (OSError, aiohttp.ClientError):
            pass
        _reset(request.transport)
        raise asyncio.CancelledError

    def _judge(self, request: web.Request) -> tuple[SeenRequest, _Refusal | None, float]:
        """Decide about a request: what it is and has done to it, how it is refused, how many seconds it waits."""
        scope = request.headers.get("Authorization", "").partition("Credential=")[2]
        has_checksum = any("checksum" in name.lower() for name in request.headers)
        seen = SeenRequest(request.method, unquote(request.raw_path), scope.split("/")[0], has_checksum)
        refusal = next((refusal for refusal in self._refusals if refusal.when.takes(seen)), None)
        if self._keys is not None and seen.access_key not in self._keys:
            refusal = _WRONG_KEY if seen.access_key else _NO_KEY
        elif self._tokens is not None and request.headers.get("x-amz-security-token", "") not in self._tokens:
            refusal = _WRONG_TOKEN
        lost = next((which for which in self._lost_answers if which.takes(seen)), None)
        faults, seconds = self._faults, self._latency
        if self._is_out:
            seen.fault = "outage"
        elif refusal:
            seen.fault = "refused"
            return seen, refusal, seconds
        elif lost:
            self._lost_answers.remove(lost)
            seen.fault = "lost_answer"
        elif faults and faults.when.takes(seen) and self._random.random() < faults.rate:
            kind = self._random.choice(faults.kinds)
            seen.fault = self._random.choice(("reset_before", "reset_after")) if kind == "reset" else kind
            seconds += faults.stall_seconds if kind == "stall" else 0
        return seen, _SLOW_DOWN if seen.fault == "503" else None, seconds

    async def _pass_on(self, request: web.Request, seen: SeenRequest, body: bytes) -> web.StreamResponse:
        headers = {name: text for name, text in request.headers.items() if name.lower() not in _OF_A_CONNECTION}
        # The server looks at conditions first and writes then, with nothing to keep others out in between: so one write
        # follows the other. Parts of uploads are not to be seen yet.
        in_turn = seen.method in WRITES and "partNumber=" not in seen.path
        async with self._writing if in_turn else contextlib.nullcontext():
            url = URL(f"{self._upstream}{request.raw_path}", encoded=True)
            answer = await self._session.request(
                request.method, url, headers=headers, data=body or None, allow_redirects=False
            )
        async with answer:
            if seen.fault in ("reset_after", "lost_answer"):
                raise ConnectionResetError
            response = web.StreamResponse(status=answer.status, reason=answer.reason)
            for name, text in answer.headers.items():
                if name.lower() not in _OF_A_CONNECTION:
                    response.headers.add(name, text)
            await response.prepare(request)
            if request.method != "HEAD":
                length = int(answer.headers.get("Content-Length", 0))
                if seen.fault == "cut":
                    await response.write(await answer.content.read(length // 2))
                    raise ConnectionResetError
                async for piece in answer.content.iter_chunked(2**18):
                    await response.write(piece)
            await response.write_eof()
            return response


def _refused(refusal: _Refusal) -> web.Response:
    error = f"<Code>{refusal.code}</Code><Message>{refusal.message}</Message><RequestId>0</RequestId>"
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error>{error}</Error>'
    return web.Response(status=refusal.status, text=text, content_type="application/xml")


def _reset(transport: Any) -> None:
    """Close a connection with RST, whatever is still to be sent."""
    if transport is not None:
        with contextlib.suppress(OSError, AttributeError):
            taken = transport.get_extra_info("socket")
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
