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
from collections.abc import Collection, Coroutine, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import aiohttp
from aiohttp import web
from yarl import URL

from tests.support.processes import free_port, wait_for

ACCESS_KEY = "AKIAIOSFODNN7EXAMPLE"
WRITES = ("PUT", "POST", "DELETE")

#: Headers of one connection, which are not passed on.
_OF_A_CONNECTION = ("connection", "expect", "keep-alive", "transfer-encoding", "date", "server")


class MotoServer(contextlib.AbstractContextManager["MotoServer"]):
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
            self.__exit__()
            raise

    def _answers(self) -> bool:
        assert self._process.poll() is None, "the S3 server ended as it started"
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port)).close()
            return True
        return False

    @cache
    def client(self) -> Any:
        """Return a boto3 client of the server itself, past any proxy: path style, and hardly a retry."""
        import boto3
        from botocore.config import Config

        style = {"addressing_style": "path"}
        config = Config(retries={"total_max_attempts": 3}, connect_timeout=2, read_timeout=10, s3=style)
        keys = {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": "secret", "region_name": "us-east-1"}
        return boto3.session.Session().client("s3", endpoint_url=self.endpoint_url, config=config, **keys)

    def create_bucket(self, name: str) -> str:
        """Make a bucket and return its name."""
        self.client().create_bucket(Bucket=name)
        return name

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        """Return the keys of all objects below a prefix, in order."""
        return self._keys("list_objects_v2", "Contents", bucket, prefix)

    def incomplete_uploads(self, bucket: str, prefix: str = "") -> list[str]:
        """Return the key of each multipart upload below a prefix that was neither completed nor aborted."""
        return self._keys("list_multipart_uploads", "Uploads", bucket, prefix)

    def _keys(self, operation: str, field: str, bucket: str, prefix: str) -> list[str]:
        pages = self.client().get_paginator(operation).paginate(Bucket=bucket, Prefix=prefix)
        return [str(item["Key"]) for page in pages for item in page.get(field, [])]

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(10)


@dataclass
class SeenRequest:
    """A request that came to the proxy, and what was done to it: a kind of `FaultProxy.faults_given`, or nothing."""

    method: str
    path: str
    """Bucket and key with the query, not quoted."""
    has_checksum: bool = False
    fault: str = ""


@dataclass
class Rule:
    """What the proxy does to some requests: those of some methods, with a text in the path, or with checksums."""

    kinds: Collection[str]
    methods: Collection[str] = ()
    contains: str = ""
    checksum: bool = False
    rate: float = 1.0
    times: float = float("inf")
    stall_seconds: float = 5.0
    status: int = 503
    code: str = "SlowDown"

    def takes(self, request: SeenRequest) -> bool:
        """Return whether a request is one of them."""
        is_of_these = (not self.methods or request.method in self.methods) and self.contains in request.path
        return is_of_these and self.times > 0 and (request.has_checksum or not self.checksum)


class FaultProxy(contextlib.AbstractContextManager["FaultProxy"]):
    """A proxy in front of an HTTP server, in a thread of its own, whose faults are set while it runs, from any thread.

    With a file that has a certificate and its key it speaks TLS.
    """

    def __init__(self, upstream: str, certificate: Path | None = None) -> None:
        self._upstream = upstream
        self.reset_counters()
        self.calm()
        self._keys: Collection[str] | None = None
        self._tokens: Collection[str] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()
        port = self._do(self._listen(certificate))
        self.endpoint_url = f"{'https' if certificate else 'http'}://127.0.0.1:{port}"

    def faults(self, rate: float | None, kinds: Collection[str] = (), seed: int = 0, **rule: Any) -> None:
        """Disturb a share of such requests from now on, and end what was there before; None only ends it.

        Kinds are ``503`` (answered with SlowDown), ``stall`` (carried out after a wait, even if the client has given up
        by then), ``cut`` (half of the answer comes before the connection is reset) and ``reset`` (the connection is
        reset, in half of the cases before the server sees the request and in the other half after it was carried out;
        ``reset_before`` is the first only).
        """
        self._random = random.Random(seed)
        self._rules = [] if rate is None else [Rule(kinds, rate=rate, **rule)]

    def refuse(self, code: str, status: int = 403, **rule: Any) -> None:
        """Answer such requests with an error of S3 until `calm`; of several, the first that fits counts."""
        self._rules.append(Rule(("refused",), status=status, code=code, **rule))

    def lose_answer_of(self, method: str, contains: str) -> None:
        """Have the next such request carried out by the server, and its answer lost with its connection."""
        self._rules.append(Rule(("lost_answer",), (method,), contains, times=1))

    def latency(self, seconds: float) -> None:
        """Hold each request back for so long before it is passed on; 0 ends it."""
        self._latency = seconds

    def allow_keys(self, access_keys: Collection[str] | None) -> None:
        """Let requests of these access keys in, and answer others as S3 does; None lets in all."""
        self._keys = access_keys

    def allow_tokens(self, tokens: Collection[str] | None) -> None:
        """Let requests with these session tokens in, "" for none; answer others with ExpiredToken; None lets in all."""
        self._tokens = tokens

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        """Be out of reach for the length of a block: all connections are reset, and every new one."""
        outage = Rule(("outage",))
        self._rules.insert(0, outage)
        self._do(self._reset_all())
        try:
            yield
        finally:
            self._rules.remove(outage)

    def calm(self) -> None:
        """End faults, refusals, latency, lost answers and an outage; allowed keys and tokens stay as they are."""
        self.faults(None)
        self._latency = 0.0

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

    def __exit__(self, *_: object) -> None:
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
        has_checksum = any("checksum" in name.lower() for name in request.headers)
        seen = SeenRequest(request.method, unquote(request.raw_path), has_checksum)
        rule = self._rule_for(seen, request.headers)
        seen.fault = self._random.choice(tuple(rule.kinds)) if rule else ""
        if seen.fault == "reset":
            seen.fault = self._random.choice(("reset_before", "reset_after"))
        self.requests.append(seen)
        try:
            body = await request.read()
            await asyncio.sleep(self._latency)
            if rule and seen.fault in ("refused", "503"):
                return _refused(rule)
            if rule and seen.fault == "stall":
                await asyncio.sleep(rule.stall_seconds)
            if seen.fault not in ("reset_before", "outage"):
                return await self._pass_on(request, seen, body)
        except (OSError, aiohttp.ClientError):
            pass
        _reset(request.transport)
        raise asyncio.CancelledError

    def _rule_for(self, seen: SeenRequest, headers: Any) -> Rule | None:
        """Decide what is done to a request."""
        scope = headers.get("Authorization", "").partition("Credential=")[2]
        if self._keys is not None and scope.split("/")[0] not in self._keys:
            return Rule(("refused",), status=403, code="InvalidAccessKeyId")
        if self._tokens is not None and headers.get("x-amz-security-token", "") not in self._tokens:
            return Rule(("refused",), status=400, code="ExpiredToken")
        for rule in self._rules:
            if rule.takes(seen) and self._random.random() < rule.rate:
                rule.times -= 1
                return rule
        return None

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


def _refused(rule: Rule) -> web.Response:
    error = f"<Code>{rule.code}</Code><Message>as told</Message><RequestId>0</RequestId>"
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error>{error}</Error>'
    return web.Response(status=rule.status, text=text, content_type="application/xml")


def _reset(transport: Any) -> None:
    """Close a connection with RST, whatever is still to be sent."""
    if transport is not None:
        with contextlib.suppress(OSError, AttributeError):
            taken = transport.get_extra_info("socket")
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
