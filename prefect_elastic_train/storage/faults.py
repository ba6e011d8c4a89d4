"""What the exceptions of a storage's clients and of the kernel say: one table of words.

A word is a store's error code, an HTTP status, an errno, or the name of an exception's class: no client is imported.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any, NamedTuple

from prefect_elastic_train.core.outcomes import StorageFaultError


class Fault(NamedTuple):
    """What an exception says of the storage: in a word or two, whether a person must mend it, and what they may do."""

    kind: str
    permanent: bool
    advice: str = ""


_AWAY = Fault("connection", permanent=False)
_BUSY = Fault("busy", permanent=False)
_CREDENTIALS = Fault(
    "credentials", True, "give the storage block credentials that are valid and may read, write, list and delete here"
)
_EXPIRED = Fault(
    "credentials expired", True, "renew them in the storage block, or use ambient credentials, which renew themselves"
)
_TLS = Fault("TLS", True, "give the storage block the ca_bundle of its certificate, and the right endpoint_url")

_WORDS: dict[Fault | None, str] = {
    # Not there, taken, or cut off: what that means is the caller's to say.
    None: "404 409 412 416 NoSuchKey NoSuchUpload NoSuchVersion NotFound BlobNotFound PreconditionFailed InvalidRange",
    # Names of classes of HTTP clients and of Python.
    _AWAY: """ChecksumError ClientConnectionError ClientPayloadError ConnectTimeoutError ConnectionError
        CredentialRetrievalError FlexibleChecksumError HTTPClientError HTTPException HttpProcessingError
        IncompleteReadError MetadataRetrievalError ProtocolError ResponseParserError ResponseStreamingError
        ServiceRequestError ServiceResponseError TimeoutError TransportError gaierror""",
    _BUSY: """408 429 BadDigest BandwidthLimitExceeded ConditionalRequestConflict IDPCommunicationError IncompleteBody
        InternalError OperationAborted PriorRequestNotComplete RequestLimitExceeded RequestTimeout
        RequestTimeoutException ServerBusy ServiceUnavailable SlowDown TooManyRequests TooManyRequestsException
        TransactionInProgressException XAmzContentChecksumMismatch XAmzContentSHA256Mismatch EAGAIN EBUSY
        EHOSTDOWN EHOSTUNREACH EINTR EIO ENETDOWN ENETRESET ENETUNREACH ENOTCONN EREMOTEIO ESTALE""",
    _CREDENTIALS: """401 403 AccessDenied AccountProblem AllAccessDisabled InvalidAccessKeyId InvalidToken
        SignatureDoesNotMatch ClientAuthenticationError ConfigNotFound DefaultCredentialsError NoCredentialsError
        PartialCredentialsError ProfileNotFound""",
    _EXPIRED: """ExpiredToken ExpiredTokenException RequestExpired TokenRefreshRequired SSOTokenLoadError
        TokenRetrievalError UnauthorizedSSOTokenError""",
    # All that the answer to a HEAD says of an expired token: it has no body.
    _EXPIRED._replace(kind="credentials or request refused"): "400",
    _TLS: "ClientConnectorCertificateError SSLCertVerificationError SSLError",
    Fault("clock", True, "set this machine's clock"): "RequestTimeTooSkewed",
    Fault("no such bucket", True, "create the bucket, or correct its name in the storage block"): "NoSuchBucket",
    Fault("wrong region", True, "give the storage block the bucket's region"): """301 AuthorizationHeaderMalformed
        IllegalLocationConstraintException PermanentRedirect InvalidRegionError NoRegionError""",
    Fault(
        "no space", True, "make room or raise the quota; `elastic-train runs prune` finds what no resume needs"
    ): "507 QuotaExceeded XMinioStorageFull EDQUOT ENOSPC",
    Fault("read-only", True, "give this user write permission, or another path"): "EACCES EPERM EROFS",
    Fault(
        "not supported", True, "use a disk, NFS, or a store such as AWS S3, MinIO, Ceph, R2, GCS or Azure"
    ): "501 505 NotImplemented ENOSYS ENOTSUP EOPNOTSUPP",
}
_FAULTS = {word: fault for fault, words in _WORDS.items() for word in words.split()}
#: What an error of TLS says when the other side has gone in the middle, as a load balancer does that is restarted.
_CUT_TLS = ("EOF occurred", "UNEXPECTED_EOF", "timed out")


def diagnose(error: BaseException) -> Fault | None:
    """Return what an exception and its causes say of the storage, first what is permanent; None if that is nothing."""
    if isinstance(error, StorageFaultError):
        return Fault(error.kind, error.permanent)
    errors = list(chain(error))
    # Where the store has answered, that is what counts, and not what a client has made of it.
    answered = [one for one in errors if any(_http_answer(one))]
    found = [fault for one in answered or errors if (fault := _diagnose_one(one)) is not None]
    # The original knows more than its translation.
    return next((fault for fault in reversed(found) if fault.permanent), found[-1] if found else None)


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception and what it was raised from; a translation of fsspec's names the original so."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        inner = getattr(current, "error", None)
        current = current.__cause__ or (inner if isinstance(inner, BaseException) else None)


def _diagnose_one(error: BaseException) -> Fault | None:
    code, status = _http_answer(error)
    if code or status:
        return _of_answer(code, status)
    names = [base.__name__ for base in type(error).__mro__]
    fault = next((_FAULTS[name] for name in names if name in _FAULTS), None)
    if fault is _TLS and any(words in str(error) for words in _CUT_TLS):
        return _AWAY
    if fault is None and isinstance(error, OSError) and error.errno is not None:
        fault = _FAULTS.get(errno.errorcode.get(error.errno, ""))
    return _CREDENTIALS if fault is None and isinstance(error, PermissionError) else fault


def _of_answer(code: str, status: int) -> Fault | None:
    word = str(status) if not code or code.isdecimal() else code
    if word in _FAULTS:
        return _FAULTS[word]
    if "Throttl" in code:
        return _BUSY
    if status not in (400, 404) and str(status) in _FAULTS:  # those two say less than the code
        return _FAULTS[str(status)]
    if status >= 500:  # also those that only some proxy knows
        return _BUSY
    advice = "see whether the credentials are valid, and the storage's log"
    return Fault(f"refused ({code or status})", True, advice) if status >= 400 else None


def _http_answer(error: BaseException) -> tuple[str, int]:
    """Return error code and HTTP status that an exception of a store's client carries."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        code = str(response.get("Error", {}).get("Code", ""))
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0
        return code, int(status) or (int(code) if code.isdecimal() else 0)
    if any(base.__name__ == "HttpProcessingError" for base in type(error).__mro__):
        return "", 0  # aiohttp's of an answer that was cut off; the status in it is of aiohttp's own making
    code = str(getattr(error, "error_code", None) or "")  # azure
    for name in ("status_code", "status", "code"):  # azure, aiohttp, gcsfs
        value = getattr(error, name, None)
        if isinstance(value, int | str) and str(value).isdecimal():
            return code, int(value)
    return code, 0
