"""A real S3 protocol server on this machine, and a proxy in front of it that disturbs what passes.

The proxy runs in a process of its own: it goes on, and its faults come in time, while the tests' process is busy or
waits for something, and its copying takes none of the tests' interpreter. As a script, this module is that process;
it takes orders over a pipe until the other end closes.

Bytes pass as they are, both ways, in pieces: no body is held as a whole, and signatures, `Expect: 100-continue`,
chunked bodies and checksums stay right. One header is left out: the server closes its connection after each answer
and says so, while connections of clients are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from typing_extensions import Self

from tests.support.processes import ROOT, free_port, wait_for

ACCESS_KEY = "AKIAIOSFODNN7EXAMPLE"
FAULT_KINDS = ("503", "reset", "stall")
WRITES = ("PUT", "POST", "DELETE")

_PIECE = 1 << 18
_LIMIT = 1 << 20  # bytes read ahead of the other side; also the longest head
_MAX_SEEN = 50_000
_session_lock = threading.Lock()  # making clients of one session is not thread-safe, using them is


def s3_client(endpoint_url: str, access_key: str = ACCESS_KEY, token: str | None = None, **config: Any) -> Any:
    """Give a boto3 client of a server: path style, and not a single retry.

    Args:
        endpoint_url: Where the server or the proxy listens.
        access_key: Sent with each request; moto wants 20 capital letters and digits.
        token: Session token of temporary credentials.
        config: More settings of `botocore.config.Config`, or other values for those set here.
    """
    from botocore.config import Config

    settings: dict[str, Any] = {
        "retries": {"total_max_attempts": 1},
        "connect_timeout": 2,
        "read_timeout": 10,
        "s3": {"addressing_style": "path"},
        **config,
    }
    with _session_lock:
        return _session().client(
            "s3",
            endpoint_url=endpoint_url,
            region_name="us-east-1",
            aws_access_key_id=access_key,
            aws_secret_access_key="secret",
            aws_session_token=token,
            config=Config(**settings),
        )


@cache
def _session() -> Any:
    """Give the session that makes all clients: reading the model of S3 anew takes each of them a third of a second."""
    import boto3

    return boto3.session.Session()


class MotoServer:
    """An S3 server in a process of its own, empty at first; its objects go with it.

    Args:
        log: Where its output goes; default nowhere.
        environment: More variables for it, such as ``S3_UPLOAD_PART_MIN_SIZE`` (bytes, 5 MiB unless told).
    """

    def __init__(self, log: Path | None = None, **environment: str) -> None:
        self.port = free_port()
        self.endpoint_url = f"http://127.0.0.1:{self.port}"
        output = log.open("ab") if log else None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
                env={**_quiet_environment(), **environment},
                stdin=subprocess.DEVNULL,
                stdout=output or subprocess.DEVNULL,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        finally:
            if output:
                output.close()
        self.pid = self._process.pid
        try:
            wait_for(self._answers, 30, "the S3 server")
        except BaseException:
            self.close()
            raise

    def _answers(self) -> bool:
        from botocore.exceptions import BotoCoreError

        if self._process.poll() is not None:
            raise AssertionError(f"the S3 server ended with {self._process.returncode} as it started")
        try:
            self.client(read_timeout=5).list_buckets()
        except BotoCoreError:
            return False
        return True

    def client(self, **options: Any) -> Any:
        """Give a boto3 client of the server itself, past any proxy; options are those of `s3_client`."""
        return s3_client(self.endpoint_url, **options)

    def create_bucket(self, name: str) -> str:
        """Make a bucket and give its name."""
        self.client().create_bucket(Bucket=name)
        return name

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        """Give the keys of all objects below a prefix, in order."""
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return [str(item["Key"]) for page in pages for item in page.get("Contents", [])]

    def incomplete_uploads(self, bucket: str) -> list[tuple[str, str]]:
        """Give key and upload id of each multipart upload that was neither completed nor aborted."""
        pages = self.client().get_paginator("list_multipart_uploads").paginate(Bucket=bucket)
        return [(str(item["Key"]), str(item["UploadId"])) for page in pages for item in page.get("Uploads", [])]

    def close(self) -> None:
        """End the server, gently first."""
        _end(self._process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Which:
    """Tells which requests something is about; empty fields take all.

    Attributes:
        methods: HTTP methods.
        key_prefix: How the object's key begins. Keys in a body, as of `delete_objects`, are not looked at.
        contains: Occurs in path and query, such as ``uploadId=``.
        checksum: A checksum is announced or given: how the name of a header for it begins.
    """

    methods: tuple[str, ...] = ()
    key_prefix: str = ""
    contains: str = ""
    checksum: str = ""

    def takes(self, request: SeenRequest) -> bool:
        """Tell whether a request is one of them."""
        return (
            (not self.methods or request.method in self.methods)
            and request.path.lstrip("/").partition("/")[2].startswith(self.key_prefix)
            and self.contains in f"{request.path}?{request.query}"
            and (not self.checksum or any(name.startswith(self.checksum) for name in request.checksums))
        )


@dataclass
class SeenRequest:
    """A request that came to the proxy.

    Attributes:
        method: HTTP method.
        path: Bucket and key, not quoted.
        query: Query as sent.
        access_key: Whose request it is; empty for an anonymous one.
        checksums: What its headers say of checksums, by their names.
        status: Status of the answer that was passed on or given; 0 while there is none, and if none was given.
        fault: What was done to it: a kind of `FaultProxy.faults_given`, empty for nothing.
    """

    method: str
    path: str
    query: str
    access_key: str = ""
    checksums: dict[str, str] = field(default_factory=dict)
    status: int = 0
    fault: str = ""


class FaultProxy:
    """A proxy in front of an S3 server whose faults are set while it runs, from any thread.

    Args:
        upstream: URL of the server.
        log: Where the output of its process goes; default nowhere. It says something only if the proxy has an error.
    """

    def __init__(self, upstream: str, log: Path | None = None) -> None:
        self._lock = threading.Lock()
        self._orders, theirs = Pipe()
        output = log.open("ab") if log else None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.s3", str(theirs.fileno()), upstream],
                cwd=ROOT,
                env={**_quiet_environment(), "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=output or subprocess.DEVNULL,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        finally:
            theirs.close()
            if output:
                output.close()
        self.pid = self._process.pid
        try:
            self.port = int(self._answer(30))
        except BaseException:
            self.close()
            raise
        self.endpoint_url = f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> Any:
        """Give a boto3 client of the server through the proxy; options are those of `s3_client`."""
        return s3_client(self.endpoint_url, **options)

    def faults(
        self,
        rate: float | None = 0.1,
        kinds: Iterable[str] = FAULT_KINDS,
        stall_seconds: float = 5.0,
        seed: int = 0,
        when: Which | None = None,
    ) -> None:
        """Disturb a share of the requests from now on.

        Args:
            rate: Share, 0 to 1; None ends it.
            kinds: Some of ``503`` (answered with SlowDown), ``stall`` (carried out after a wait, even if the client
                has given up by then) and ``reset`` (the connection is reset, in half of the cases before the server
                sees the request and in the other half after it was carried out; ``reset_before`` and ``reset_after``
                are one of the two only).
            stall_seconds: How long a stall takes.
            seed: Of the choices; the same order of requests has the same faults.
            when: Only such requests.
        """
        chosen = tuple(kinds)
        unknown = set(chosen) - {*FAULT_KINDS, "reset_before", "reset_after"}
        assert chosen, "no kind of fault"
        assert not unknown, f"no such kind of fault: {unknown}"
        self._ask("faults", rate, chosen, stall_seconds, seed, when or Which())

    def refuse(self, code: str, message: str = "refused", status: int = 403, when: Which | None = None) -> None:
        """Answer requests with an error of S3 until `calm`; of several that were set, the first that fits counts.

        Args:
            code: Code of the error, such as ``AccessDenied`` (403), ``NoSuchBucket`` (404), ``ExpiredToken`` (400).
            message: What the error says.
            status: HTTP status.
            when: Only such requests; ``Which(WRITES)`` makes the storage read-only.
        """
        self._ask("refuse", code, message, status, when or Which())

    def lose_answer_of(self, method: str, contains: str, times: int = 1) -> None:
        """Have the next such request carried out by the server, and its answer lost with its connection.

        Args:
            method: HTTP method.
            contains: Occurs in path and query.
            times: How many requests.
        """
        self._ask("lose_answers", Which((method,), contains=contains), times)

    def latency(self, seconds: float) -> None:
        """Hold each request back for so long before it is passed on; 0 ends it."""
        self._ask("latency", seconds)

    def allow_keys(self, access_keys: Iterable[str] | None) -> None:
        """Answer requests of other access keys with InvalidAccessKeyId and anonymous ones with AccessDenied.

        Args:
            access_keys: The keys that are let in; None ends the check.
        """
        self._ask("allow_keys", None if access_keys is None else frozenset(access_keys))

    def allow_tokens(self, tokens: Iterable[str] | None) -> None:
        """Answer requests with other session tokens with ExpiredToken.

        Args:
            tokens: The tokens that are let in, with "" for requests without one; None ends the check.
        """
        self._ask("allow_tokens", None if tokens is None else frozenset(tokens))

    def begin_outage(self, how: str = "reset") -> None:
        """Reset all connections now, and every new one.

        Args:
            how: ``reset`` accepts new connections and resets them, ``refuse`` does not accept them.
        """
        assert how in ("reset", "refuse"), how
        self._ask("begin_outage", how)

    def end_outage(self) -> None:
        """Let connections in again."""
        self._ask("end_outage")

    @contextlib.contextmanager
    def outage(self, how: str = "reset") -> Iterator[None]:
        """Be out of reach for the length of a block."""
        self.begin_outage(how)
        try:
            yield
        finally:
            self.end_outage()

    def calm(self) -> None:
        """End faults, refusals, latency, lost answers and an outage; allowed keys and tokens stay as they are."""
        self._ask("calm")

    @property
    def requests(self) -> list[SeenRequest]:
        """The requests that came since the last reset of the counters, in order; at most the last 50,000."""
        seen: list[SeenRequest] = self._ask("requests")
        return seen

    @property
    def faults_given(self) -> Counter[str]:
        """How many requests had which fault: 503, stall, reset_before, reset_after, lost_answer, refused, outage.

        An outage counts each connection that it reset or did not let in, but not those refused.
        """
        given: Counter[str] = self._ask("given")
        return given

    def count(self, method: str = "", contains: str = "") -> int:
        """Count the requests of a method whose path and query contain something."""
        which = Which((method,) if method else (), contains=contains)
        return sum(which.takes(seen) for seen in self.requests)

    def reset_counters(self) -> None:
        """Forget the requests and faults so far."""
        self._ask("reset_counters")

    def close(self) -> None:
        """End the proxy, and connections through it."""
        self._orders.close()
        _end(self._process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, name: str, *arguments: Any) -> Any:
        with self._lock:
            self._orders.send((name, arguments))
            return self._answer(30)

    def _answer(self, timeout: float) -> Any:
        if not self._orders.poll(timeout):
            raise AssertionError(f"the proxy did not answer within {timeout:g} s")
        try:
            answer = self._orders.recv()
        except (EOFError, OSError) as error:
            raise AssertionError(f"the proxy is gone, with {self._process.poll()}") from error
        if isinstance(answer, BaseException):
            raise answer
        return answer


def _quiet_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "PREFECT_"))}


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait(10)


# What follows runs in the process of the proxy.


class _ResetError(Exception):
    """The client's connection is to be reset."""


@dataclass(frozen=True)
class _Head:
    """First line and headers of a request or an answer."""

    raw: bytes
    first: list[str]
    headers: dict[str, str]

    @property
    def chunked(self) -> bool:
        return "chunked" in self.headers.get("transfer-encoding", "").lower()

    @property
    def length(self) -> int:
        return int(self.headers.get("content-length", 0))

    @property
    def status(self) -> int:
        return int(self.first[1])

    @property
    def closes(self) -> bool:
        return self.headers.get("connection", "").lower() == "close"

    def kept_open(self) -> bytes:
        """Give the bytes without what they say about the connection."""
        return b"\r\n".join(line for line in self.raw.split(b"\r\n") if not line.lower().startswith(b"connection:"))


@dataclass(frozen=True)
class _Refusal:
    status: int
    code: str
    message: str
    when: Which = Which()

    def answer(self, method: str, close: bool) -> bytes:
        body = (
            '<?xml version="1.0" encoding="UTF-8"?>\n'
            f"<Error><Code>{self.code}</Code><Message>{self.message}</Message><RequestId>0</RequestId></Error>"
        ).encode()
        lines = [f"HTTP/1.1 {self.status} {self.code}", "Content-Type: application/xml", "x-amz-request-id: 0"]
        lines += [f"Content-Length: {0 if method == 'HEAD' else len(body)}", *(["Connection: close"] if close else [])]
        return "\r\n".join([*lines, "", ""]).encode() + (b"" if method == "HEAD" else body)


@dataclass(frozen=True)
class _Faults:
    rate: float
    kinds: tuple[str, ...]
    stall_seconds: float
    when: Which


_SLOW_DOWN = _Refusal(503, "SlowDown", "Please reduce your request rate.")
_NO_KEY = _Refusal(403, "AccessDenied", "Access Denied")
_WRONG_KEY = _Refusal(403, "InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist in our records.")
_WRONG_TOKEN = _Refusal(400, "ExpiredToken", "The provided token has expired.")


class _Proxy:
    """The proxy itself; all but the constructor runs in its event loop."""

    def __init__(self, upstream: str) -> None:
        url = urlsplit(upstream)
        self._upstream = (url.hostname or "127.0.0.1", url.port or 80)
        self._random = random.Random(0)
        self._faults: _Faults | None = None
        self._refusals: list[_Refusal] = []
        self._lost_answers: list[Which] = []
        self._latency = 0.0
        self._keys: frozenset[str] | None = None
        self._tokens: frozenset[str] | None = None
        self._outage = False
        self._seen: deque[SeenRequest] = deque(maxlen=_MAX_SEEN)
        self._given: Counter[str] = Counter()
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._writing = asyncio.Lock()
        self._listener: asyncio.Server | None = None
        # Holds the port while nothing listens there.
        self._holder = _bound_socket(0)
        self.port = int(self._holder.getsockname()[1])

    # Orders

    def faults(self, rate: float | None, kinds: tuple[str, ...], stall_seconds: float, seed: int, when: Which) -> None:
        self._random = random.Random(seed)
        self._faults = None if rate is None else _Faults(rate, kinds, stall_seconds, when)

    def refuse(self, code: str, message: str, status: int, when: Which) -> None:
        self._refusals.append(_Refusal(status, code, message, when))

    def lose_answers(self, which: Which, times: int) -> None:
        self._lost_answers += [which] * times

    def latency(self, seconds: float) -> None:
        self._latency = seconds

    def allow_keys(self, keys: frozenset[str] | None) -> None:
        self._keys = keys

    def allow_tokens(self, tokens: frozenset[str] | None) -> None:
        self._tokens = tokens

    def requests(self) -> list[SeenRequest]:
        return list(self._seen)

    def given(self) -> Counter[str]:
        return self._given

    def reset_counters(self) -> None:
        self._seen.clear()
        self._given.clear()

    async def begin_outage(self, how: str) -> None:
        self._outage = True
        if how == "refuse" and self._listener:
            self._listener.close()
            self._listener = None
        tasks = list(self._connections)
        for task, client in list(self._connections.items()):
            self._given["outage"] += 1
            _reset(client)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def end_outage(self) -> None:
        self._outage = False
        await self.listen()

    async def calm(self) -> None:
        self._faults = None
        self._refusals.clear()
        self._lost_answers.clear()
        self._latency = 0.0
        await self.end_outage()

    # Connections

    async def listen(self) -> None:
        """Accept connections, if nothing does."""
        if self._listener is None:
            taken = _bound_socket(self.port)
            self._listener = await asyncio.start_server(self._connected, sock=taken, limit=_LIMIT, backlog=128)

    async def _connected(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        if self._outage:
            self._given["outage"] += 1
            _reset(client)
            return
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = client
        client.transport.set_write_buffer_limits(high=_LIMIT)
        try:
            while await self._exchange(reader, client):
                pass
        except (_ResetError, OSError, EOFError, ValueError, asyncio.LimitOverrunError):
            _reset(client)
        except asyncio.CancelledError:
            # An outage, which has reset the connection.
            pass
        finally:
            del self._connections[task]
            client.close()

    async def _exchange(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> bool:
        """Carry out one request of a connection, or not; tell whether the connection stays open."""
        head = await _read_head(reader)
        if head is None:
            return False
        seen, refusal, seconds = self._judge(head)
        self._seen.append(seen)
        if seen.fault:
            self._given[seen.fault] += 1
        try:
            if seconds:
                await asyncio.sleep(seconds)
            if seen.fault == "reset_before":
                raise _ResetError
            if refusal:
                return await self._refuse(refusal, head, seen, reader, client)
            async with contextlib.AsyncExitStack() as turn:
                return await self._pass_on(head, seen, reader, client, turn)
        except asyncio.CancelledError:
            seen.fault = seen.fault or "outage"
            raise

    def _judge(self, head: _Head) -> tuple[SeenRequest, _Refusal | None, float]:
        """Decide about a request: what it is and has done to it, how it is refused, how many seconds it waits."""
        target = urlsplit(head.first[1])
        access_key, token = _credentials(head, target.query)
        checksums = {name: text for name, text in head.headers.items() if "checksum" in name}
        seen = SeenRequest(head.first[0], unquote(target.path), target.query, access_key, checksums)
        refusal = next((refusal for refusal in self._refusals if refusal.when.takes(seen)), None)
        if self._keys is not None and access_key not in self._keys:
            refusal = _WRONG_KEY if access_key else _NO_KEY
        elif self._tokens is not None and token not in self._tokens:
            refusal = _WRONG_TOKEN
        if refusal:
            seen.fault = "refused"
            return seen, refusal, self._latency
        lost = next((which for which in self._lost_answers if which.takes(seen)), None)
        if lost:
            self._lost_answers.remove(lost)
            seen.fault = "lost_answer"
            return seen, None, self._latency
        faults = self._faults
        if faults and faults.when.takes(seen) and self._random.random() < faults.rate:
            kind = self._random.choice(faults.kinds)
            seen.fault = self._random.choice(("reset_before", "reset_after")) if kind == "reset" else kind
            if kind == "stall":
                return seen, None, self._latency + faults.stall_seconds
        return seen, _SLOW_DOWN if seen.fault == "503" else None, self._latency

    async def _refuse(
        self,
        refusal: _Refusal,
        head: _Head,
        seen: SeenRequest,
        reader: asyncio.StreamReader,
        client: asyncio.StreamWriter,
    ) -> bool:
        seen.status = refusal.status
        if "expect" in head.headers:
            # The client has its body still, or sends it for want of an answer.
            client.write(refusal.answer(seen.method, close=True))
            await _half_close(reader, client)
            return False
        await _copy_body(head, reader, None)
        client.write(refusal.answer(seen.method, close=head.closes))
        await client.drain()
        return not head.closes

    async def _pass_on(
        self,
        head: _Head,
        seen: SeenRequest,
        reader: asyncio.StreamReader,
        client: asyncio.StreamWriter,
        turn: contextlib.AsyncExitStack,
    ) -> bool:
        async def wait_for_turn() -> None:
            # The server looks at conditions first and writes then, with nothing to keep others out in between: so
            # one write after the other gets its last byte and its answer. Parts of uploads are not to be seen yet.
            if seen.method in WRITES and "partNumber=" not in seen.query:
                await turn.enter_async_context(self._writing)

        from_server, server = await asyncio.open_connection(*self._upstream, limit=_LIMIT)
        server.transport.set_write_buffer_limits(high=_LIMIT)
        body = asyncio.create_task(_send(head, reader, server, wait_for_turn))
        try:
            answer = await _read_answer(from_server)
            while answer.status < 200:
                client.write(answer.raw)
                answer = await _read_answer(from_server)
            await turn.aclose()
            if seen.fault in ("reset_after", "lost_answer"):
                raise _ResetError
            seen.status = answer.status
            bodiless = seen.method == "HEAD" or answer.status in (204, 304)
            if not (bodiless or answer.chunked or "content-length" in answer.headers):
                client.write(answer.raw)
                await _copy(from_server, client, None)
                return False
            client.write(answer.kept_open())
            if not bodiless:
                await _copy_body(answer, from_server, client)
            await client.drain()
            # An answer can come before the end of its request.
            await asyncio.wait([body], timeout=1)
            if body.done() and body.exception() is None:
                return not head.closes
            await _cancel(body)
            await _half_close(reader, client)
            return False
        finally:
            await _cancel(body)
            server.transport.abort()


def _bound_socket(port: int) -> socket.socket:
    # Named, for asyncio switches the delay of small packets off only then.
    bound = socket.socket(proto=socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind(("127.0.0.1", port))
    return bound


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection with RST, whatever is still to be sent."""
    with contextlib.suppress(OSError):
        taken = writer.get_extra_info("socket")
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _half_close(reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
    """End the answers of a connection and take in what the client still sends, so that no reset overtakes the last."""
    await client.drain()
    with contextlib.suppress(OSError, asyncio.TimeoutError):
        client.write_eof()
        await asyncio.wait_for(_copy(reader, None, None), 5)


async def _read_head(reader: asyncio.StreamReader) -> _Head | None:
    """Read up to the empty line; None at the end of the connection."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    first, *lines = raw[:-4].decode("latin-1").split("\r\n")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return _Head(raw, first.split(" ", 2), headers)


async def _read_answer(reader: asyncio.StreamReader) -> _Head:
    head = await _read_head(reader)
    if head is None:
        raise EOFError("the server closed the connection without an answer")
    return head


async def _send(
    head: _Head, reader: asyncio.StreamReader, server: asyncio.StreamWriter, before_end: Callable[[], Awaitable[None]]
) -> None:
    """Pass on a request; a client that goes away in the middle takes the server's connection with it."""
    try:
        if not head.chunked and not head.length:
            await before_end()
        server.write(head.raw)
        await _copy_body(head, reader, server, before_end)
    except (OSError, EOFError, ValueError):
        if reader.at_eof() or reader.exception():
            server.transport.abort()
        raise


async def _nothing() -> None:
    pass


async def _copy_body(
    head: _Head,
    source: asyncio.StreamReader,
    to: asyncio.StreamWriter | None,
    before_end: Callable[[], Awaitable[None]] = _nothing,
) -> None:
    """Copy the body that follows a head, and wait for something before its last byte or line is passed on."""
    if head.chunked:
        size = -1
        while size:
            line = await _copy_line(source, to)
            size = int(line.split(b";")[0], 16)
            if size:
                await _copy(source, to, size + 2)
        while (last := await source.readuntil(b"\r\n")) != b"\r\n":
            if to:
                to.write(last)  # a trailer
    elif head.length:
        await _copy(source, to, head.length - 1)
        last = await source.readexactly(1)
    else:
        return
    await before_end()
    if to:
        to.write(last)
        await to.drain()


async def _copy_line(source: asyncio.StreamReader, to: asyncio.StreamWriter | None) -> bytes:
    line = await source.readuntil(b"\r\n")
    if to:
        to.write(line)
        await to.drain()
    return line


async def _copy(source: asyncio.StreamReader, to: asyncio.StreamWriter | None, count: int | None) -> None:
    """Copy so many bytes, or all until the end of the connection, to somewhere or nowhere."""
    while count is None or count > 0:
        piece = await source.read(_PIECE if count is None else min(count, _PIECE))
        if not piece:
            if count is None:
                return
            raise EOFError("the connection ended in the middle of a body")
        if to:
            to.write(piece)
            await to.drain()
        if count is not None:
            count -= len(piece)


def _credentials(head: _Head, query: str) -> tuple[str, str]:
    """Give access key and session token of a request, from its headers or, if it is presigned, its query."""
    fields = {name.lower(): values[0] for name, values in parse_qs(query).items()}
    scope = head.headers.get("authorization", "").partition("Credential=")[2] or fields.get("x-amz-credential", "")
    token = head.headers.get("x-amz-security-token") or fields.get("x-amz-security-token", "")
    return scope.split("/")[0], token


async def _serve(orders: Connection, upstream: str) -> None:
    proxy = _Proxy(upstream)
    await proxy.listen()
    orders.send(proxy.port)
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(orders.fileno(), readable.set)
    while True:
        await readable.wait()
        readable.clear()
        if not orders.poll():
            continue
        try:
            name, arguments = orders.recv()
        except (EOFError, OSError):
            return
        try:
            answer = getattr(proxy, name)(*arguments)
            if asyncio.iscoroutine(answer):
                answer = await answer
        except Exception as error:
            answer = error
        orders.send(answer)


def serve(descriptor: int, upstream: str) -> None:
    """Be the proxy of a server until the other end of the pipe closes."""
    asyncio.run(_serve(Connection(descriptor), upstream))


if __name__ == "__main__":
    # Under its own name, so that both ends of the pipe know the same classes.
    from tests.support import s3

    s3.serve(int(sys.argv[1]), sys.argv[2])
