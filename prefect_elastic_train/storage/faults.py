"""What is wrong with a storage: what passes is repeated here, below Ray, and what does not is said at once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import http.client
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import tenacity

from prefect_elastic_train.core.outcomes import StorageFaultError

__all__ = ["Fault", "Retries", "Waits", "diagnose", "take_waits", "waiting_since"]

logger = logging.getLogger("prefect_elastic_train.storage")

Answer = TypeVar("Answer")

#: Longest pause between two tries, in seconds; there is jitter in each.
_MAX_PAUSE_SECONDS = 10.0
_BACK_OFF = tenacity.wait_random_exponential(multiplier=0.25, max=_MAX_PAUSE_SECONDS)
#: An operation that has failed for so long is told, and again after so long.
_TELL_SECONDS = (3.0, 60.0)

_TRANSIENT_STATUS = {408, 429}
#: Of the server's own errors, those that stay; all others pass, also those that only some proxy knows.
_UNSUPPORTED_STATUS = {501, 505}
#: Codes of S3 and its kin, whatever the HTTP status.
_TRANSIENT_CODES = {
    "BadDigest",
    "BandwidthLimitExceeded",
    "ConditionalRequestConflict",
    "IDPCommunicationError",
    "IncompleteBody",
    "InternalError",
    "OperationAborted",
    "PriorRequestNotComplete",
    "RequestLimitExceeded",
    "RequestThrottled",
    "RequestTimeout",
    "RequestTimeoutException",
    "ServerBusy",
    "ServiceUnavailable",
    "SlowDown",
    "TooManyRequests",
    "TooManyRequestsException",
    "TransactionInProgressException",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
}
_CREDENTIALS = (
    "credentials",
    "give the storage block credentials that are valid and may read, write, list and delete here",
)
_EXPIRED = (
    "credentials expired",
    "renew them in the storage block, or use ambient credentials, which renew themselves",
)
_NO_BUCKET = ("no such bucket", "create the bucket, or mend the name in the storage block")
_REGION = ("wrong region", "give the storage block the bucket's region")
_NO_SPACE = ("no space", "make room or raise the quota; `elastic-train runs prune` finds what no resume needs")
_READ_ONLY = ("read-only", "give this user write permission, or another path")
_PERMANENT_CODES = {
    "AccessDenied": _CREDENTIALS,
    "AccountProblem": _CREDENTIALS,
    "AllAccessDisabled": _CREDENTIALS,
    "AuthorizationHeaderMalformed": _REGION,
    "ExpiredToken": _EXPIRED,
    "ExpiredTokenException": _EXPIRED,
    "RequestExpired": _EXPIRED,
    "IllegalLocationConstraintException": _REGION,
    "InvalidAccessKeyId": _CREDENTIALS,
    "InvalidToken": _CREDENTIALS,
    "NoSuchBucket": _NO_BUCKET,
    "PermanentRedirect": _REGION,
    "QuotaExceeded": _NO_SPACE,
    "RequestTimeTooSkewed": ("clock", "set this machine's clock"),
    "SignatureDoesNotMatch": _CREDENTIALS,
    "TokenRefreshRequired": _EXPIRED,
    "XMinioStorageFull": _NO_SPACE,
}
_PERMANENT_STATUS = {301: _REGION, 401: _CREDENTIALS, 403: _CREDENTIALS, 507: _NO_SPACE}
#: Not there, taken, or cut off: what that means is the caller's to say.
_NO_FAULT_STATUS = {409, 412, 416}
_NOT_THERE_CODES = {"", "404", "NoSuchKey", "NoSuchUpload", "NoSuchVersion", "NotFound", "BlobNotFound"}
_TRANSIENT_ERRNO = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.EINTR,
    errno.EIO,
    errno.ENETDOWN,
    errno.ENETRESET,
    errno.ENETUNREACH,
    errno.ENOTCONN,
    errno.EPIPE,
    errno.EREMOTEIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
}
_PERMANENT_ERRNO = {
    errno.EACCES: _READ_ONLY,
    errno.EDQUOT: _NO_SPACE,
    errno.ENOSPC: _NO_SPACE,
    errno.EPERM: _READ_ONLY,
    errno.EROFS: _READ_ONLY,
}
#: Of HTTP clients, which are not imported for that: by the names of their exceptions, and of their packages.
_TRANSIENT_NAMES = {
    "ChecksumError",
    "ClientConnectionError",
    "ClientPayloadError",
    "ConnectTimeoutError",
    "ConnectionClosedError",
    "ConnectionError",
    "CredentialRetrievalError",
    "EndpointConnectionError",
    "FSTimeoutError",
    "FlexibleChecksumError",
    "HTTPClientError",
    "HttpProcessingError",
    "IncompleteReadError",
    "MetadataRetrievalError",
    "ProtocolError",
    "ProxyConnectionError",
    "ReadTimeoutError",
    "ResponseParserError",
    "ResponseStreamingError",
    "ServerDisconnectedError",
    "ServerTimeoutError",
    "ServiceRequestError",
    "ServiceResponseError",
    "TransportError",
}
_PERMANENT_NAMES = {
    "ConfigNotFound": _CREDENTIALS,
    "ConnectorCertificateError": ("TLS", "give the storage block the ca_bundle of its certificate"),
    "DefaultCredentialsError": _CREDENTIALS,
    "ClientAuthenticationError": _CREDENTIALS,
    "InvalidRegionError": _REGION,
    "NoCredentialsError": _CREDENTIALS,
    "NoRegionError": _REGION,
    "PartialCredentialsError": _CREDENTIALS,
    "ProfileNotFound": _CREDENTIALS,
    "SSLCertVerificationError": ("TLS", "give the storage block the ca_bundle of its certificate"),
    "SSLError": ("TLS", "give the storage block the ca_bundle of its certificate, and the right endpoint_url"),
    "SSOTokenLoadError": _EXPIRED,
    "TokenRetrievalError": _EXPIRED,
    "UnauthorizedSSOTokenError": _EXPIRED,
}
#: What an error of TLS says when the other side has gone in the middle, as a load balancer does that is restarted.
_CUT_TLS = ("EOF occurred", "UNEXPECTED_EOF", "timed out")


@dataclass(frozen=True)
class Fault:
    """What an exception says of the storage.

    Attributes:
        kind: In a word or two.
        permanent: It stays until a person mends it.
        advice: What the person may do.
    """

    kind: str
    permanent: bool
    advice: str = ""


def diagnose(error: BaseException) -> Fault | None:
    """Tell what an exception says of the storage; None if it says nothing of it, such as a file that is not there.

    What is permanent wins over what passes, in the exception and in those that it was raised from.
    """
    if isinstance(error, StorageFaultError):
        return Fault(error.kind, error.permanent)
    chain = list(_chain(error))
    # Where the store has answered, that is what counts, and not what a client has made of it.
    answered = [one for one in chain if any(_http_answer(one))]
    found = [fault for one in answered or chain if (fault := _diagnose_one(one)) is not None]
    # The original knows more than its translation.
    return next((fault for fault in reversed(found) if fault.permanent), found[-1] if found else None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Give the exception and what it was raised from; a translation of fsspec's names the original so."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        inner = getattr(current, "error", None)
        current = current.__cause__ or (inner if isinstance(inner, BaseException) else None)


def _diagnose_one(error: BaseException) -> Fault | None:
    code, status = _http_answer(error)
    if code in _TRANSIENT_CODES or "Throttl" in code:
        return Fault(code, permanent=False)
    if code in _PERMANENT_CODES:
        return Fault(_PERMANENT_CODES[code][0], True, _PERMANENT_CODES[code][1])
    if status in _PERMANENT_STATUS:
        return Fault(_PERMANENT_STATUS[status][0], True, _PERMANENT_STATUS[status][1])
    if status in _UNSUPPORTED_STATUS or code == "NotImplemented":
        return Fault("not supported", True, "use a store that does, such as AWS S3, MinIO, Ceph, R2, GCS or Azure")
    if status in _TRANSIENT_STATUS or status >= 500:
        return Fault(f"HTTP {status}", permanent=False)
    if status == 400 and code in ("", "400"):  # the answer to a HEAD has no body that could say more
        return Fault("credentials or request refused", True, _EXPIRED[1])
    if status == 404 and code in _NOT_THERE_CODES:
        return None
    if 400 <= status < 500 and status not in _NO_FAULT_STATUS:
        return Fault(
            f"refused ({code or status})", True, "see whether the credentials are valid, and the storage's log"
        )
    for base in type(error).__mro__:
        if base.__name__ in _PERMANENT_NAMES:
            kind, advice = _PERMANENT_NAMES[base.__name__]
            if kind == "TLS" and any(words in str(error) for words in _CUT_TLS):
                return Fault("connection", permanent=False)
            return Fault(kind, True, advice)
    for base in type(error).__mro__:
        if base.__name__ in _TRANSIENT_NAMES and base.__module__ != "builtins":
            return Fault("connection", permanent=False)
    # Before Python 3.11 these were three classes.
    timeouts = (TimeoutError, asyncio.TimeoutError, concurrent.futures.TimeoutError)
    if isinstance(error, (*timeouts, ConnectionError, http.client.HTTPException, socket.gaierror)):
        return Fault("connection", permanent=False)
    if isinstance(error, OSError) and error.errno is not None:
        if error.errno in _TRANSIENT_ERRNO:
            return Fault(errno.errorcode[error.errno], permanent=False)
        if error.errno in _PERMANENT_ERRNO:
            kind, advice = _PERMANENT_ERRNO[error.errno]
            return Fault(kind, True, advice)
    if isinstance(error, PermissionError):
        return Fault(_CREDENTIALS[0], True, _CREDENTIALS[1])
    return None


def _http_answer(error: BaseException) -> tuple[str, int]:
    """Give error code and HTTP status that an exception of a store's client carries."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        code = str(response.get("Error", {}).get("Code", ""))
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0
        return code, int(status) or (int(code) if code.isdecimal() else 0)
    code = str(getattr(error, "error_code", None) or "")  # azure
    for name in ("status_code", "status", "code"):  # azure, aiohttp, gcsfs
        value = getattr(error, name, None)
        if isinstance(value, int | str) and str(value).isdecimal():
            return code, int(value)
    return code, 0


@dataclass
class Waits:
    """What this process has waited for its storage.

    Attributes:
        seconds: From first failure to success or surrender, of all operations; those at one time count once.
        tries: Tries that failed.
        last: What was wrong, last.
    """

    seconds: float = 0.0
    tries: int = 0
    last: str = ""


class _Record:
    """The waits of this process. Operations that wait at the same time wait for one storage: their time counts once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting = 0
        self._since = 0.0
        self._waits = Waits()

    def begin(self) -> None:
        with self._lock:
            if not self._waiting:
                self._since = time.monotonic()
            self._waiting += 1

    def failed(self, what: str) -> None:
        with self._lock:
            self._waits.tries += 1
            self._waits.last = what

    def end(self) -> None:
        with self._lock:
            self._waiting -= 1
            if not self._waiting:
                self._waits.seconds += time.monotonic() - self._since

    def take(self) -> Waits:
        with self._lock:
            taken, self._waits = self._waits, Waits()
            if self._waiting:  # what goes on is counted up to now, and from now on again
                now = time.monotonic()
                taken.seconds += now - self._since
                self._since = now
            return taken

    def since(self) -> float | None:
        with self._lock:
            return self._since if self._waiting else None


_record = _Record()


def take_waits() -> Waits:
    """Give what this process has waited for its storage since this was asked last."""
    return _record.take()


def waiting_since() -> float | None:
    """Give when the wait began that goes on now, on the monotonic clock; None if nothing waits."""
    return _record.since()


@dataclass(frozen=True)
class Retries:
    """Repeats what fails with a passing fault, with exponential back-off and jitter, for a bounded time.

    Attributes:
        seconds: From the first failure on; after that the fault is raised. 0: nothing is repeated.
        where: The storage, for messages.
        hidden: Secrets that no message may show.
    """

    seconds: float = 300.0
    where: str = "the storage"
    hidden: tuple[str, ...] = field(default=(), repr=False)

    def call(self, what: str, operation: Callable[[], Answer]) -> Answer:
        """Carry out an operation.

        Args:
            what: The operation, for messages, such as ``"write runs/a/b.json"``.
            operation: May be carried out several times, also after it has succeeded and its answer was lost.

        Raises:
            StorageFaultError: It failed for good, or for too long.
            Exception: What says nothing of the storage, as it is.
        """
        return self.call_counted(what, lambda tries: operation())

    def call_counted(self, what: str, operation: Callable[[int], Answer]) -> Answer:
        """Carry out an operation that is told how many tries have failed before."""
        return _Effort(self, what).carry_out(operation)


class _Effort:
    """One operation and its tries."""

    def __init__(self, retries: Retries, what: str) -> None:
        self._retries = retries
        self._what = what
        self._first_failure = 0.0
        self._tries = 0
        self._tell_at = 0.0

    def carry_out(self, operation: Callable[[int], Answer]) -> Answer:
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(self._passes),
            wait=self._pause,
            stop=self._is_over,
            after=self._failed,
            reraise=True,
        )
        try:
            answer: Answer = retrying(lambda: operation(self._tries))
        except Exception as error:
            told = self._told(error)
            if told is error:
                raise
            # Where it was raised from is shown with it.
            raise told from (None if self._holds_a_secret(error) else error)
        finally:
            if self._tries:
                _record.end()
        if self._tries and self._tell_at > self._first_failure + _TELL_SECONDS[0]:
            logger.warning("%s is back after %.0f s (%s)", self._retries.where, self._elapsed(), self._what)
        return answer

    def _passes(self, error: BaseException) -> bool:
        if isinstance(error, StorageFaultError):
            return False  # of an operation within this one, which was repeated long enough
        fault = diagnose(error) if isinstance(error, Exception) else None
        return fault is not None and not fault.permanent

    def _is_over(self, state: tenacity.RetryCallState) -> bool:
        return (bool(self._tries) and self._elapsed() >= self._retries.seconds) or self._retries.seconds <= 0

    def _pause(self, state: tenacity.RetryCallState) -> float:
        """Give a pause before the next try, the last of which comes when the time is over."""
        return min(_BACK_OFF(state), max(0.0, self._retries.seconds - self._elapsed()))

    def _failed(self, state: tenacity.RetryCallState) -> None:
        now = time.monotonic()
        if not self._tries:
            _record.begin()
            self._first_failure = now
            self._tell_at = now + _TELL_SECONDS[0]
        self._tries += 1
        error = state.outcome.exception() if state.outcome is not None else None
        summary = self._summary(error)
        _record.failed(summary)
        if now >= self._tell_at:
            self._tell_at = now + _TELL_SECONDS[1]
            logger.warning(
                "%s does not answer for %.0f s, tried %d times to %s, goes on for up to %.0f s: %s",
                self._retries.where,
                self._elapsed(),
                self._tries,
                self._what,
                self._retries.seconds,
                summary,
            )

    def _elapsed(self) -> float:
        return time.monotonic() - self._first_failure

    def _told(self, error: Exception) -> Exception:
        """Give a fault of the storage in our words; anything else as it is."""
        fault = diagnose(error)
        if isinstance(error, StorageFaultError) or (fault is None and not self._holds_a_secret(error)):
            return error
        where, what = self._retries.where, self._what
        if fault is None:
            return StorageFaultError(f"{where}: cannot {what}: {self._summary(error)}", kind="unknown", permanent=True)
        if fault.permanent:
            message = f"{where}: cannot {what}: {fault.kind}: {self._summary(error)}. To go on, {fault.advice}"
        else:
            message = (
                f"{where}: cannot {what}, tried {max(self._tries, 1)} times for {self._elapsed():.0f} s: "
                f"{self._summary(error)}. Is it up and reachable from this machine?"
            )
        return StorageFaultError(message, kind=fault.kind, permanent=fault.permanent)

    def _holds_a_secret(self, error: BaseException) -> bool:
        texts = [f"{one} {one!r}" for one in _chain(error)]
        return any(secret in text for secret in self._retries.hidden for text in texts)

    def _summary(self, error: BaseException | None) -> str:
        text = f"{type(error).__name__}: {error!s}" if error is not None else ""
        for secret in self._retries.hidden:
            text = text.replace(secret, "***")
        return text[:400]
