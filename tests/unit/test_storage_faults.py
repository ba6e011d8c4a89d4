"""Faults that exceptions of storage clients show, and the retries because of them."""

import asyncio
import errno
import itertools
import pickle
import pkgutil
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import botocore.exceptions
import pytest
from botocore.exceptions import ClientError
from s3fs.errors import translate_boto_error

from prefect_elastic_train.core.outcomes import Outcome, StorageFaultError
from prefect_elastic_train.core.settings import FsspecStorageSettings, LocalStorageSettings, S3StorageSettings
from prefect_elastic_train.driver.endings import final_event_of_error
from prefect_elastic_train.storage import retries as retries_module
from prefect_elastic_train.storage.fault_classes import Fault, diagnose
from prefect_elastic_train.storage.opening import Storage
from prefect_elastic_train.storage.retries import Retries, Waits, collect_waits, waiting_since
from tests.support.processes import wait_for


@pytest.fixture(autouse=True)
def _no_waits_so_far() -> None:
    # The other parts of an upload that was refused, in a test before, may still wait in this process.
    wait_for(lambda: waiting_since() is None, 30, "operations of other tests to end")
    collect_waits()


def _refusal(code: str, status: int) -> ClientError:
    error = {"Code": code, "Message": "as the store says"}
    return ClientError({"Error": error, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject")


def _as_other_stores_say(status: int) -> list[Exception]:
    """Return a status as the clients of Azure, of GCS and of plain HTTP raise it."""
    azure, gcs = Exception(), Exception()
    vars(azure).update(status_code=status, error_code="AsAzureSays")
    vars(gcs).update(code=status)
    return [azure, gcs, aiohttp.ClientResponseError(None, (), status=status)]  # type: ignore[arg-type]


HERE = LocalStorageSettings(path="/runs")

#: By kind of fault, codes with HTTP statuses, or exceptions.
ANSWERS = {
    "busy": """SlowDown/503 ServiceUnavailable/503 InternalError/500 RequestTimeout/400 TooManyRequests/429
        Throttling/400 ThrottlingException/403 BadDigest/400 IncompleteBody/400 OperationAborted/409
        ConditionalRequestConflict/409 XMinioServerNotInitialized/503 SlowDown/0 408/408 429/429 500/500 502/502""",
    "credentials": """AccessDenied/403 InvalidAccessKeyId/403 SignatureDoesNotMatch/403 InvalidToken/400 AnyOther/403
        403/403 401/401""",
    "credentials expired": "ExpiredToken/400 TokenRefreshRequired/400",
    "credentials or request refused": "400/400",  # all that the answer to a HEAD says of an expired token
    "clock": "RequestTimeTooSkewed/403",
    "no such bucket": "NoSuchBucket/404",
    "wrong region": "PermanentRedirect/301 301/301 AuthorizationHeaderMalformed/400",
    "no space": "XMinioStorageFull/507 QuotaExceeded/403",
    "not supported": "NotImplemented/501",
    "refused (InvalidArgument)": "InvalidArgument/400",
    None: "NoSuchKey/404 404/404 PreconditionFailed/412 412/412 409/409 416/416 NoSuchUpload/404",
}
#: By kind of fault, exceptions with their modules.
CLASSES = {
    "connection": """botocore.exceptions:EndpointConnectionError botocore.exceptions:ConnectTimeoutError
        botocore.exceptions:ProxyConnectionError botocore.exceptions:ResponseStreamingError
        botocore.exceptions:HTTPClientError botocore.exceptions:IncompleteReadError
        botocore.exceptions:CredentialRetrievalError botocore.exceptions:MetadataRetrievalError
        botocore.exceptions:FlexibleChecksumError aiohttp:ClientConnectionError aiohttp:ClientPayloadError
        urllib3.exceptions:ProtocolError http.client:IncompleteRead http.client:RemoteDisconnected socket:gaierror
        fsspec.exceptions:FSTimeoutError builtins:TimeoutError builtins:BrokenPipeError""",
    "credentials": """botocore.exceptions:NoCredentialsError botocore.exceptions:PartialCredentialsError
        botocore.exceptions:ProfileNotFound builtins:PermissionError""",
    "credentials expired": "botocore.exceptions:TokenRetrievalError botocore.exceptions:SSOTokenLoadError",
    "wrong region": "botocore.exceptions:NoRegionError",
    "TLS": "botocore.exceptions:SSLError ssl:SSLCertVerificationError",
    None: "builtins:FileExistsError builtins:ValueError",
}
#: By kind of fault, errors of the kernel.
ERRNOS = {
    "busy": "EIO ESTALE EAGAIN EBUSY ENOTCONN EHOSTUNREACH ENOTEMPTY",
    "no space": "ENOSPC EDQUOT",
    "read-only": "EROFS EACCES EPERM",
    None: "ENOENT",
}
_TLS = botocore.exceptions.SSLError(endpoint_url="https://minio:9000", error="UNEXPECTED_EOF_WHILE_READING")
_TOLD = [
    *(("busy", error) for error in _as_other_stores_say(503)),
    *(("credentials", error) for error in _as_other_stores_say(403)),
    ("connection", _TLS),
    ("connection", aiohttp.http_exceptions.ContentLengthError("not enough data")),
    ("connection", aiohttp.ClientOSError(errno.ECONNRESET, "reset")),
]
_TOLD += [(kind, OSError(getattr(errno, name), "x")) for kind, names in ERRNOS.items() for name in names.split()]
_TOLD += [
    (kind, exception.__new__(exception))
    for kind, names in CLASSES.items()
    for exception in map(pkgutil.resolve_name, names.split())
]
_TOLD += [
    (kind, error)
    for kind, words in ANSWERS.items()
    for code, status in (word.split("/") for word in words.split())
    # As botocore raises it, and as s3fs does: the original knows more than its translation.
    for error in (_refusal(code, int(status)), translate_boto_error(_refusal(code, int(status))))
]


@pytest.mark.parametrize(("kind", "error"), _TOLD)
def test_what_an_exception_says_of_the_storage(kind: str | None, error: Exception) -> None:
    fault = diagnose(error)
    assert (fault.kind if fault is not None else None) == kind
    if fault is not None:
        assert fault.permanent == (kind not in ("connection", "busy"))
        assert bool(fault.advice) == fault.permanent


def _chained(*errors: Exception) -> Exception:
    for error in errors:
        error.__cause__ = None
    for error, cause in itertools.pairwise(errors):
        error.__cause__ = cause
    return errors[0]


def test_what_is_permanent_wins_wherever_it_is_in_the_chain_and_the_stores_answer_over_its_clients_error() -> None:
    denied, busy, cut = _refusal("AccessDenied", 403), _refusal("SlowDown", 503), OSError(errno.EIO, "x")
    full = OSError(errno.ENOSPC, "full")
    chains = {
        "credentials": [(denied, busy), (busy, denied), (ValueError(), busy, denied, busy)],
        "no space": [(full, cut), (cut, full), (TimeoutError(), full, cut)],
        "busy": [(cut, busy), (full, busy), (cut, ValueError(), cut)],  # the last one is a circle
        None: [(cut, _refusal("NoSuchKey", 404))],
    }
    for kind, errors in ((kind, errors) for kind, several in chains.items() for errors in several):
        assert getattr(diagnose(_chained(*errors)), "kind", None) == kind


class _Flaky:
    """An operation that fails so many times."""

    def __init__(self, times: float, error: BaseException | None = None) -> None:
        self.calls = 0
        self._times = times
        self._error = error or TimeoutError("slow")

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self._times:
            raise self._error
        return "done"


def _call_async(retries: Retries, what: str, operation: Callable[[], str]) -> str:
    async def ask() -> str:
        return operation()

    return asyncio.run(retries.call_async(what, ask))


in_both_ways = pytest.mark.parametrize("call", [Retries.call, _call_async])


@in_both_ways
def test_what_passes_is_repeated_until_it_succeeds(call: Any) -> None:
    operation = _Flaky(2)
    assert call(Retries(30), "do it", operation) == "done"
    assert (operation.calls, collect_waits().tries, waiting_since()) == (3, 2, None)


@in_both_ways
def test_what_is_permanent_is_said_at_once_with_what_to_do(call: Any) -> None:
    operation = _Flaky(9, _refusal("InvalidAccessKeyId", 403))
    with pytest.raises(StorageFaultError) as caught:
        call(Retries(60, "s3://bucket/runs"), "write a/b.json", operation)
    assert (operation.calls, caught.value.kind, caught.value.permanent) == (1, "credentials", True)
    assert final_event_of_error(caught.value, HERE).outcome is Outcome.STORAGE_ERROR
    for words in ("s3://bucket/runs", "cannot write a/b.json", "credentials", "as the store says", "To go on, set"):
        assert words in str(caught.value)
    assert isinstance(caught.value.__cause__, ClientError)
    assert collect_waits().tries == 0


@in_both_ways
@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_repeating_ends_when_its_time_is_over(call: Any, seconds: float) -> None:
    operation, started = _Flaky(1e9), time.monotonic()
    with pytest.raises(StorageFaultError) as caught:
        call(Retries(seconds, "/mnt/runs"), "list commits", operation)
    assert seconds <= time.monotonic() - started < 4
    assert 2 <= operation.calls <= 40 if seconds else operation.calls == 1
    assert (caught.value.kind, caught.value.permanent) == ("connection", False)
    assert final_event_of_error(caught.value, HERE).outcome is Outcome.DRIVER_LOST, "which another driver may heal"
    for words in ("/mnt/runs", "cannot list commits", f"tried {operation.calls} times for ", "TimeoutError: slow"):
        assert words in str(caught.value)


@in_both_ways
@pytest.mark.parametrize("error", [FileNotFoundError(), ValueError(), KeyboardInterrupt()])
def test_what_is_not_about_the_storage_is_raised_as_it_is(call: Any, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        call(Retries(5), "do it", _Flaky(1, error))
    assert caught.value is error
    assert collect_waits().tries == 0


def test_what_was_repeated_long_enough_is_not_repeated_again_around_it() -> None:
    retries, outer = Retries(0.2), _Flaky(0)

    def nested():
        outer()
        retries.call("look at the fence", _Flaky(1e9))

    with pytest.raises(StorageFaultError, match="cannot look at the fence"):
        retries.call("write", nested)
    assert outer.calls == 1


SECRET = "wJalrXUtnFEMI/K7MDENG"
KEYS = {"access_key_id": SECRET, "secret_access_key": SECRET, "session_token": f"token-{SECRET}"}
WITH_SECRETS = [
    S3StorageSettings(bucket_path="bucket/runs", **KEYS),
    FsspecStorageSettings(url="gs://bucket/runs", secret_options=f'{{"token": {{"key": ["{SECRET}"]}}}}'),
]


def _shown(error: BaseException | None) -> str:
    """Return all that a look at an error can show: itself, and what it was raised from or while."""
    if error is None:
        return ""
    return f"{error} {error!r} {_shown(error.__cause__)} {_shown(error.__context__)}"


@in_both_ways
@pytest.mark.parametrize("error", [TimeoutError, PermissionError, ValueError])
@pytest.mark.parametrize("where", ["itself", "cause", "context"])
def test_no_secret_is_in_a_message_in_what_it_was_raised_from_or_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, call: Any, error: type[Exception], where: str
) -> None:
    monkeypatch.setattr(retries_module, "_REPORT_SECONDS", 0.0)

    def fail():
        if where == "itself":
            raise error(f"{SECRET} and token-{SECRET} are wrong")
        try:
            raise ValueError(SECRET)
        except ValueError as inner:
            if where == "cause":
                raise error("no") from inner
            raise error("no")

    for settings in WITH_SECRETS:
        retries = Storage(settings).retries
        with pytest.raises(StorageFaultError) as caught:
            call(Retries(0.05, retries.storage, retries.secrets), "do it", fail)
        assert SECRET not in _shown(caught.value)
        assert retries.storage in str(caught.value)
        assert ("***" in str(caught.value)) == (where == "itself")
        assert SECRET not in collect_waits().last
    assert SECRET not in caplog.text
    assert ("does not answer" in caplog.text) == (error is TimeoutError)


def test_a_storage_that_is_away_is_told_of_and_a_hiccup_is_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    Retries(30).call("do it", _Flaky(1))
    assert caplog.records == []
    monkeypatch.setattr(retries_module, "_REPORT_SECONDS", 0.0)
    Retries(30, "/mnt/runs").call("write a", _Flaky(3, OSError(errno.EIO, "Input/output error")))
    (away,) = caplog.messages
    assert re.fullmatch("/mnt/runs does not answer for .*write a.*Input/output error.*", away)


def test_operations_that_wait_at_the_same_time_wait_once_and_what_goes_on_is_counted_up_to_its_last_try() -> None:
    ended, started, calls = threading.Event(), time.monotonic(), []

    def operation():
        calls.append(threading.get_ident())
        if not ended.is_set():
            raise TimeoutError

    assert waiting_since() is None
    threads = [threading.Thread(target=Retries(30).call, args=("do it", operation)) for _ in range(8)]
    for thread in threads:
        thread.start()
    wait_for(lambda: waiting_since() is not None, 20, "the wait to begin")
    wait_for(lambda: len(calls) >= 16, 20, "a second try of each: the first ones are counted then")
    time.sleep(0.3)
    first = collect_waits()
    ended.set()
    for thread in threads:
        thread.join()
    second = collect_waits()
    assert first.seconds >= 0.25
    assert first.seconds + second.seconds <= time.monotonic() - started, "counted more than once"
    assert first.tries >= 8
    assert first.last.startswith("TimeoutError")
    assert waiting_since() is None
    assert collect_waits() == Waits()


@pytest.mark.parametrize("permanent", [True, False])
def test_a_fault_keeps_what_it_says_on_its_way_between_processes(permanent: bool) -> None:
    copy = pickle.loads(pickle.dumps(StorageFaultError("s3://b: no space", kind="no space", permanent=permanent)))
    assert type(copy) is StorageFaultError
    assert (str(copy), copy.kind, copy.permanent) == ("s3://b: no space", "no space", permanent)
    assert diagnose(copy) == Fault("no space", permanent=permanent)
