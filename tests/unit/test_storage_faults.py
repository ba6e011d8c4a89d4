"""What the exceptions of a storage's clients say of it, and what is repeated because of them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import http.client
import itertools
import logging
import pickle
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import aiohttp
import botocore.exceptions
import cloudpickle
import fsspec.exceptions
import pytest
import urllib3.exceptions
from botocore.exceptions import ClientError
from s3fs.errors import translate_boto_error

from prefect_elastic_train.core.outcomes import ElasticTrainError, StorageFaultError, is_passing
from prefect_elastic_train.core.storage_settings import FsspecStorageSettings, S3StorageSettings
from prefect_elastic_train.storage import retries as retries_module
from prefect_elastic_train.storage.faults import Fault, diagnose
from prefect_elastic_train.storage.objects import ObjectClient, retries_of
from prefect_elastic_train.storage.retries import Retries, Waits, take_waits, waiting_since
from tests.support.processes import wait_for


@pytest.fixture(autouse=True)
def _no_waits_so_far() -> None:
    take_waits()


def _refusal(code: str, status: int, operation: str = "PutObject", **more: str) -> ClientError:
    error = {"Code": code, "Message": "as the store says", **more}
    return ClientError({"Error": error, "ResponseMetadata": {"HTTPStatusCode": status}}, operation)


def _told(code: str, status: int) -> list[Exception]:
    """Give a refusal as botocore raises it, and as s3fs does."""
    error = _refusal(code, status)
    return [error, translate_boto_error(error)]


PASSING = [
    ("SlowDown", 503),
    ("ServiceUnavailable", 503),
    ("InternalError", 500),
    ("RequestTimeout", 400),
    ("TooManyRequests", 429),
    ("Throttling", 400),
    ("BadDigest", 400),
    ("IncompleteBody", 400),
    ("OperationAborted", 409),
    ("ConditionalRequestConflict", 409),
    ("XMinioServerNotInitialized", 503),
    ("408", 408),
    ("429", 429),
    ("500", 500),
    ("502", 502),
    ("503", 503),
    ("504", 504),
]

LASTING = [
    ("AccessDenied", 403, "credentials"),
    ("InvalidAccessKeyId", 403, "credentials"),
    ("SignatureDoesNotMatch", 403, "credentials"),
    ("InvalidToken", 400, "credentials"),
    ("403", 403, "credentials"),
    ("401", 401, "credentials"),
    ("ExpiredToken", 400, "credentials expired"),
    ("TokenRefreshRequired", 400, "credentials expired"),
    ("RequestTimeTooSkewed", 403, "clock"),
    ("NoSuchBucket", 404, "no such bucket"),
    ("PermanentRedirect", 301, "wrong region"),
    ("301", 301, "wrong region"),
    ("AuthorizationHeaderMalformed", 400, "wrong region"),
    ("XMinioStorageFull", 507, "no space"),
    ("QuotaExceeded", 403, "no space"),
    ("400", 400, "credentials or request refused"),  # all that the answer to a HEAD says of an expired token
    ("InvalidArgument", 400, "refused (InvalidArgument)"),
]

NO_FAULT = [("NoSuchKey", 404), ("404", 404), ("PreconditionFailed", 412), ("412", 412), ("409", 409), ("416", 416)]


@pytest.mark.parametrize(("code", "status"), PASSING)
def test_throttling_and_what_a_server_gets_wrong_pass(code: str, status: int) -> None:
    for error in _told(code, status):
        kind = f"HTTP {status}" if code.isdecimal() or code.startswith("XMinio") else code
        assert diagnose(error) == Fault(kind, permanent=False), "the original knows more than its translation"


@pytest.mark.parametrize(("code", "status", "kind"), LASTING)
def test_what_a_person_must_mend_is_permanent_and_says_what_to_do(code: str, status: int, kind: str) -> None:
    for error in _told(code, status):
        _assert_lasts(diagnose(error), kind)


def _assert_lasts(fault: Fault | None, kind: str) -> None:
    assert fault is not None
    assert (fault.kind, fault.permanent) == (kind, True)
    assert fault.advice


def test_what_is_not_there_or_taken_says_nothing_of_the_storage() -> None:
    for code, status in NO_FAULT:
        assert [diagnose(error) for error in _told(code, status)] == [None, None], code


_url = {"endpoint_url": "https://minio:9000"}

CONNECTIONS: list[Exception] = [
    botocore.exceptions.EndpointConnectionError(**_url, error="refused"),
    botocore.exceptions.ReadTimeoutError(**_url),
    botocore.exceptions.ConnectTimeoutError(**_url),
    botocore.exceptions.ConnectionClosedError(**_url),
    botocore.exceptions.ProxyConnectionError(proxy_url="http://proxy"),
    botocore.exceptions.ResponseStreamingError(error="cut"),
    botocore.exceptions.IncompleteReadError(actual_bytes=1, expected_bytes=2),
    botocore.exceptions.HTTPClientError(error="cut"),
    botocore.exceptions.CredentialRetrievalError(provider="role", error_msg="the metadata service is away"),
    botocore.exceptions.MetadataRetrievalError(error_msg="time-out"),
    aiohttp.ClientConnectionError(),
    aiohttp.ServerDisconnectedError(),
    aiohttp.ServerTimeoutError(),
    aiohttp.ClientPayloadError("cut"),
    aiohttp.http_exceptions.ContentLengthError("not enough data"),
    aiohttp.ClientOSError(errno.ECONNRESET, "reset"),
    urllib3.exceptions.ProtocolError("cut"),
    urllib3.exceptions.ReadTimeoutError(None, "/", "slow"),  # type: ignore[arg-type]
    urllib3.exceptions.IncompleteRead(1, 2),
    http.client.IncompleteRead(b""),
    http.client.RemoteDisconnected("gone"),
    fsspec.exceptions.FSTimeoutError(),
    TimeoutError(),
    concurrent.futures.TimeoutError(),
    ConnectionResetError(),
    ConnectionRefusedError(),
    BrokenPipeError(),
]


def test_a_connection_that_fails_passes() -> None:
    for error in CONNECTIONS:
        assert diagnose(error) == Fault("connection", permanent=False), type(error)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (botocore.exceptions.NoCredentialsError(), "credentials"),
        (botocore.exceptions.PartialCredentialsError(provider="env", cred_var="secret"), "credentials"),
        (botocore.exceptions.ProfileNotFound(profile="none"), "credentials"),
        (botocore.exceptions.TokenRetrievalError(provider="sso", error_msg="expired"), "credentials expired"),
        (botocore.exceptions.SSOTokenLoadError(error_msg="expired"), "credentials expired"),
        (botocore.exceptions.NoRegionError(), "wrong region"),
        (botocore.exceptions.SSLError(**_url, error="self-signed certificate"), "TLS"),
        (ssl.SSLCertVerificationError("self-signed certificate"), "TLS"),
        (PermissionError("the store says no"), "credentials"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_no_credentials_and_a_certificate_that_nobody_trusts_are_permanent(error: Exception, kind: str) -> None:
    _assert_lasts(diagnose(error), kind)


@contextmanager
def _tls_server(answer: bytes) -> Iterator[str]:
    """Give the URL of a server that breaks off each TLS handshake, with an answer that is none."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                connection.recv(65536)
                connection.sendall(answer)
                connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield f"https://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize(
    ("answer", "permanent"),
    [(b"", False), (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", True)],
    ids=["cut off", "no TLS"],
)
def test_a_handshake_that_is_cut_off_passes_and_one_with_what_speaks_no_tls_does_not(
    answer: bytes, permanent: bool
) -> None:
    with _tls_server(answer) as url:
        settings = S3StorageSettings(
            bucket_path="bucket/runs",
            endpoint_url=url,
            region="us-east-1",
            access_key_id="AKIA",
            secret_access_key="secret",
        )
        with pytest.raises(botocore.exceptions.BotoCoreError) as caught:
            ObjectClient(settings).get("bucket/runs/a")
        fault = diagnose(caught.value)
        assert fault is not None
        assert (fault.kind, fault.permanent) == ("TLS" if permanent else "connection", permanent)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EIO, None),
        (errno.ESTALE, None),
        (errno.EAGAIN, None),
        (errno.EBUSY, None),
        (errno.ENOTCONN, None),
        (errno.EHOSTUNREACH, None),
        (errno.ENOSPC, "no space"),
        (errno.EDQUOT, "no space"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "read-only"),
        (errno.EPERM, "read-only"),
    ],
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else "",
)
def test_an_error_of_a_mount_passes_and_no_room_or_permission_does_not(number: int, kind: str | None) -> None:
    fault = diagnose(OSError(number, "as the kernel says"))
    assert fault is not None
    assert (fault.kind, fault.permanent) == (kind or errno.errorcode[number], kind is not None)


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError(errno.ENOENT, "none"), FileExistsError(), IsADirectoryError(), ValueError(), KeyError("a")],
    ids=lambda error: type(error).__name__,
)
def test_what_is_not_about_the_storage_is_no_fault_of_it(error: Exception) -> None:
    assert diagnose(error) is None
    with pytest.raises(type(error)) as caught:
        Retries(5).call("do it", lambda: _fail(error))
    assert caught.value is error
    assert take_waits().tries == 0


@pytest.mark.parametrize("status", [503, 403])
def test_the_statuses_of_other_stores_clients_are_read(status: int) -> None:
    class AzureLike(Exception):
        status_code = status
        error_code = "AsAzureSays"

    class GcsLike(Exception):
        code = status

    for error in (AzureLike(), GcsLike(), aiohttp.ClientResponseError(None, (), status=status)):  # type: ignore[arg-type]
        fault = diagnose(error)
        assert fault is not None
        assert fault.permanent == (status == 403)


def _chained(*errors: Exception) -> Exception:
    for error in errors:
        error.__cause__ = None
    for error, cause in itertools.pairwise(errors):
        error.__cause__ = cause
    return errors[0]


def test_what_is_permanent_wins_over_what_passes_wherever_it_is_in_the_chain() -> None:
    denied, busy, cut = _refusal("AccessDenied", 403), _refusal("SlowDown", 503), OSError(errno.EIO, "x")
    full = OSError(errno.ENOSPC, "full")
    answers = [(denied, busy), (busy, denied), (ValueError(), busy, denied, busy)]
    without = [(full, cut), (cut, full), (TimeoutError(), full, cut)]
    for errors, kind in [(errors, "credentials") for errors in answers] + [(errors, "no space") for errors in without]:
        _assert_lasts(diagnose(_chained(*errors)), kind)


def test_what_the_store_has_answered_counts_and_not_what_a_client_makes_of_it() -> None:
    assert diagnose(_chained(OSError(errno.EIO, "x"), _refusal("SlowDown", 503))) == Fault("SlowDown", False)
    assert diagnose(_chained(OSError(errno.ENOSPC, "x"), _refusal("SlowDown", 503))) == Fault("SlowDown", False)
    assert diagnose(_chained(OSError(errno.EIO, "x"), _refusal("NoSuchKey", 404))) is None
    circle = OSError(errno.EIO, "x")
    assert diagnose(_chained(circle, ValueError(), circle)) is not None


def _fail(error: BaseException) -> Any:
    raise error


class _Flaky:
    """An operation that fails so many times."""

    def __init__(self, times: float, error: Exception | None = None) -> None:
        self.calls = 0
        self._times = times
        self._error = error or TimeoutError("slow")

    def __call__(self, *_: Any) -> str:
        self.calls += 1
        if self.calls <= self._times:
            raise self._error
        return "done"


def test_what_passes_is_repeated_until_it_succeeds() -> None:
    operation = _Flaky(3)
    assert Retries(30).call("do it", operation) == "done"
    assert operation.calls == 4


def test_an_operation_is_told_how_many_tries_have_failed() -> None:
    told: list[int] = []

    def operation(tries: int) -> int:
        told.append(tries)
        if tries < 3:
            raise ConnectionResetError
        return tries

    assert Retries(30).call_counted("do it", operation) == 3
    assert told == [0, 1, 2, 3]


def test_what_is_permanent_is_said_at_once_with_what_to_do() -> None:
    operation, started = _Flaky(9, _refusal("InvalidAccessKeyId", 403)), time.monotonic()
    with pytest.raises(StorageFaultError) as caught:
        Retries(60, "s3://bucket/runs").call("write a/b.json", operation)
    assert (operation.calls, time.monotonic() - started < 5) == (1, True)
    assert (caught.value.kind, caught.value.permanent) == ("credentials", True)
    assert not is_passing(caught.value)
    for words in ("s3://bucket/runs", "cannot write a/b.json", "credentials", "as the store says", "To go on, give"):
        assert words in str(caught.value)
    assert isinstance(caught.value.__cause__, ClientError)
    assert take_waits().tries == 0


def test_repeating_ends_when_its_time_is_over() -> None:
    operation, started = _Flaky(1e9), time.monotonic()
    with pytest.raises(StorageFaultError) as caught:
        Retries(1.0, "/mnt/runs").call("list commits", operation)
    assert 1.0 <= time.monotonic() - started < 5
    assert 3 <= operation.calls <= 40
    assert (caught.value.kind, caught.value.permanent) == ("connection", False)
    assert is_passing(caught.value)
    for words in ("/mnt/runs", "cannot list commits", f"tried {operation.calls} times for ", "TimeoutError: slow"):
        assert words in str(caught.value)


def test_nothing_is_repeated_without_time_for_it() -> None:
    operation = _Flaky(1)
    with pytest.raises(StorageFaultError):
        Retries(0).call("do it", operation)
    assert operation.calls == 1


def test_what_was_repeated_long_enough_is_not_repeated_again_around_it() -> None:
    inner, outer = _Flaky(1e9), _Flaky(0)
    retries = Retries(0.3)

    def nested() -> None:
        outer()
        retries.call("look at the fence", inner)

    with pytest.raises(StorageFaultError, match="cannot look at the fence"):
        retries.call("write", nested)
    assert outer.calls == 1


SECRET = "wJalrXUtnFEMI/K7MDENG"


def _shown(error: BaseException | None) -> str:
    """Give all that a look at an error can show: itself, and what it was raised from or while."""
    if error is None:
        return ""
    return f"{error} {error!r} {_shown(error.__cause__)} {_shown(error.__context__)}"


@pytest.mark.parametrize("error", [TimeoutError, PermissionError, ValueError], ids=lambda error: error.__name__)
@pytest.mark.parametrize("where", ["itself", "cause", "context"])
def test_no_secret_is_in_a_message_in_what_it_was_raised_from_or_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, error: type[Exception], where: str
) -> None:
    monkeypatch.setattr(retries_module, "_TELL_SECONDS", (0.0, 0.0))
    settings = S3StorageSettings(
        bucket_path="bucket/runs",
        access_key_id="AKIAIOSFODNN7EXAMPLE",
        secret_access_key=SECRET,
        session_token=f"token-{SECRET}",
    )
    other = FsspecStorageSettings(url="gs://bucket/runs", secret_options=f'{{"token": {{"key": ["{SECRET}"]}}}}')
    says = f"AKIAIOSFODNN7EXAMPLE, {SECRET} and token-{SECRET} are wrong"

    def fail() -> None:
        if where == "itself":
            raise error(says)
        try:
            raise ValueError(says)
        except ValueError as inner:
            if where == "cause":
                raise error("no") from inner
            raise error("no")

    with caplog.at_level(logging.DEBUG):
        for retries in (retries_of(settings), retries_of(other)):
            assert SECRET not in repr(retries)
            with pytest.raises(StorageFaultError) as caught:
                Retries(0.3, retries.where, retries.hidden).call("do it", fail)
            assert SECRET not in _shown(caught.value)
            assert retries.where in str(caught.value)
            assert ("***" in str(caught.value)) == (where == "itself")
            assert SECRET not in take_waits().last
    assert SECRET not in caplog.text
    assert ("does not answer" in caplog.text) == (error is TimeoutError)


def test_a_fault_without_a_secret_shows_what_it_was_raised_from() -> None:
    error = TimeoutError("slow")
    with pytest.raises(StorageFaultError) as caught:
        Retries(0, hidden=(SECRET,)).call("do it", lambda: _fail(error))
    assert caught.value.__cause__ is error


def test_a_storage_that_is_away_is_told_of_and_that_it_is_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries_module, "_TELL_SECONDS", (0.2, 60.0))

    def operation() -> None:
        if not caplog.records:
            raise OSError(errno.EIO, "Input/output error")

    with caplog.at_level(logging.WARNING):
        Retries(30, "/mnt/runs").call("write a", operation)
    away, back = (record.getMessage() for record in caplog.records)
    assert away.startswith("/mnt/runs does not answer for ")
    assert "write a" in away
    assert "Input/output error" in away
    assert back.startswith("/mnt/runs is back after ")


def test_a_hiccup_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    Retries(30).call("do it", _Flaky(1))
    assert caplog.records == []


def test_operations_that_wait_at_the_same_time_wait_once() -> None:
    started = time.monotonic()

    def operation() -> None:
        if time.monotonic() - started < 0.8:
            raise TimeoutError

    assert waiting_since() is None
    threads = [threading.Thread(target=Retries(30).call, args=("do it", operation)) for _ in range(8)]
    for thread in threads:
        thread.start()
    wait_for(lambda: waiting_since() is not None, 1, "the wait to begin")
    for thread in threads:
        thread.join()
    took = time.monotonic() - started
    waits = take_waits()
    assert 0.3 <= waits.seconds <= took, "counted more than once"
    assert waits.tries >= 2
    assert waits.last.startswith("TimeoutError")
    assert waiting_since() is None
    assert take_waits() == Waits()


def test_a_wait_that_goes_on_is_counted_up_to_now_and_from_now_on() -> None:
    ended = threading.Event()

    def operation() -> None:
        if not ended.is_set():
            raise TimeoutError

    started = time.monotonic()
    thread = threading.Thread(target=Retries(30).call, args=("do it", operation))
    thread.start()
    wait_for(lambda: waiting_since() is not None, 1, "the wait to begin")
    time.sleep(0.3)
    first = take_waits()
    ended.set()
    thread.join()
    second = take_waits()
    assert first.seconds >= 0.25
    assert first.seconds + second.seconds <= time.monotonic() - started


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
def test_a_fault_keeps_what_it_says_on_its_way_between_processes(pickler: Any) -> None:
    for permanent in (True, False):
        error = StorageFaultError("s3://b: no space", kind="no space", permanent=permanent)
        copy = pickle.loads(pickler.dumps(error))
        assert type(copy) is StorageFaultError
        assert (str(copy), copy.kind, copy.permanent) == ("s3://b: no space", "no space", permanent)
        assert isinstance(copy, OSError)
        assert isinstance(copy, ElasticTrainError)
        assert diagnose(copy) == Fault("no space", permanent)
        assert is_passing(copy) != permanent


def test_an_operation_of_an_event_loop_is_repeated_by_the_same_rules() -> None:
    passing, lasting = _Flaky(2), _Flaky(9, _refusal("AccessDenied", 403))

    async def ask(operation: _Flaky) -> str:
        return operation()

    assert asyncio.run(Retries(30).call_async("do it", lambda: ask(passing))) == "done"
    with pytest.raises(StorageFaultError, match="cannot do it: credentials"):
        asyncio.run(Retries(30).call_async("do it", lambda: ask(lasting)))
    assert (passing.calls, lasting.calls) == (3, 1)
    assert waiting_since() is None
