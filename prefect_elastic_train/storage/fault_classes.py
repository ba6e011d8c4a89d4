"""Faults of a storage, recognized in exceptions of its client and of the kernel by one table of codes.

A code is a store's error code, an HTTP status, an errno, or the name of an exception class, so no client is imported.

Belongs to all processes.
"""

import errno
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from prefect_elastic_train.core.outcomes import StorageFaultError


class Fault(NamedTuple):
    """A fault of a storage: its short name, the remedy, and whether a person must fix it."""

    kind: str
    advice: str = ""
    permanent: bool = True


_UNREACHABLE = Fault("connection", permanent=False)
_BUSY = Fault("busy", permanent=False)
_CREDENTIALS = Fault(
    "credentials", "set valid credentials in the storage block, which may read, write, list and delete here"
)
_EXPIRED = Fault(
    "credentials expired", "renew them in the storage block, or use ambient credentials, which are renewed"
)
_TLS = Fault("TLS", "set ca_bundle for its certificate and the right endpoint_url in the storage block")

_CODES: dict[Fault | None, str] = {
    # No fault of the storage: an object does not exist, exists, or is shorter than requested.
    None: "404 409 412 416 NoSuchKey NoSuchUpload NoSuchVersion NotFound BlobNotFound PreconditionFailed InvalidRange",
    # Exception classes of HTTP clients and of Python.
    _UNREACHABLE: """ChecksumError ClientConnectionError ClientPayloadError ConnectTimeoutError ConnectionError
        CredentialRetrievalError FlexibleChecksumError HTTPClientError HTTPException HttpProcessingError
        IncompleteReadError MetadataRetrievalError ProtocolError ResponseParserError ResponseStreamingError
        ServiceRequestError ServiceResponseError TimeoutError TransportError gaierror""",
    _BUSY: """408 429 BadDigest BandwidthLimitExceeded ConditionalRequestConflict IDPCommunicationError IncompleteBody
        InternalError OperationAborted PriorRequestNotComplete RequestLimitExceeded RequestTimeout
        RequestTimeoutException ServerBusy ServiceUnavailable SlowDown Throttling ThrottlingException ThrottledException
        RequestThrottled RequestThrottledException TooManyRequests TooManyRequestsException
        TransactionInProgressException XAmzContentChecksumMismatch XAmzContentSHA256Mismatch EAGAIN EBUSY
        ENOTEMPTY EHOSTDOWN EHOSTUNREACH EINTR EIO ENETDOWN ENETRESET ENETUNREACH ENOTCONN EREMOTEIO ESTALE""",
    _CREDENTIALS: """401 403 AccessDenied AccountProblem AllAccessDisabled InvalidAccessKeyId InvalidToken
        SignatureDoesNotMatch ClientAuthenticationError ConfigNotFound DefaultCredentialsError NoCredentialsError
        PartialCredentialsError ProfileNotFound""",
    _EXPIRED: """ExpiredToken ExpiredTokenException RequestExpired TokenRefreshRequired SSOTokenLoadError
        TokenRetrievalError UnauthorizedSSOTokenError""",
    # The response to a HEAD has no body, so an expired token has no other code.
    _EXPIRED._replace(kind="credentials or request refused"): "400",
    _TLS: "ClientConnectorCertificateError SSLCertVerificationError SSLError",
    Fault("clock", "set this machine's clock"): "RequestTimeTooSkewed",
    Fault("no such bucket", "create the bucket, or correct its name in the storage block"): "NoSuchBucket",
    Fault("wrong region", "set the bucket's region in the storage block"): """301 AuthorizationHeaderMalformed
        IllegalLocationConstraintException PermanentRedirect InvalidRegionError NoRegionError""",
    Fault(
        "no space", "make room or raise the quota; `elastic-train runs prune` deletes files that no resume needs"
    ): "507 QuotaExceeded XMinioStorageFull EDQUOT ENOSPC",
    Fault("read-only", "give this user write permission, or use another path"): "EACCES EPERM EROFS",
    Fault(
        "not supported", "use a disk, NFS, or a store such as AWS S3, MinIO, Ceph, R2, GCS or Azure"
    ): "501 505 NotImplemented ENOSYS ENOTSUP EOPNOTSUPP",
}
_FAULTS = {code: fault for fault, codes in _CODES.items() for code in codes.split()}
#: Texts of TLS errors when the connection was closed, for example by a load balancer that restarts.
_CLOSED_TLS = re.compile("EOF occurred|UNEXPECTED_EOF|timed out")


def diagnose(error: BaseException) -> Fault | None:
    """Return the fault of the storage in an exception or in those that it was raised from; None if there is none.

    If there are several faults, a permanent one has priority.
    """
    if isinstance(error, StorageFaultError):
        return Fault(error.kind, permanent=error.permanent)
    errors = list(chain(error))
    # An HTTP response is more reliable than the exceptions that a client derives from it.
    responses = [item for item in errors if any(_http_response(item))]
    faults = [*filter(None, map(_diagnose_single, responses or errors))]
    # The original exception is more specific than those raised from it, so the last one counts.
    return max(reversed(faults), key=lambda fault: fault.permanent, default=None)


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those it was raised from, with the originals that fsspec attaches as ``error``."""
    for _ in range(20):  # the chain may be a circle
        yield error
        inner = error.__cause__ or getattr(error, "error", None)
        if not isinstance(inner, BaseException):
            return
        error = inner


def _diagnose_single(error: BaseException) -> Fault | None:
    fault = next((_FAULTS[base.__name__] for base in type(error).__mro__ if base.__name__ in _FAULTS), None)
    if fault is not None:
        return _UNREACHABLE if fault is _TLS and _CLOSED_TLS.search(str(error)) else fault
    code, status = _http_response(error)
    if code or status:
        specific = code or str(status)
        # The statuses 400 and 404 are less specific than the code.
        for key in [specific] if status in (400, 404) else [specific, str(status)]:
            if key in _FAULTS:
                return _FAULTS[key]
        if status >= 500:  # also unofficial ones of proxies
            return _BUSY
        return Fault(f"refused ({specific})", "check the credentials, and the storage's log") if status >= 400 else None
    if isinstance(error, OSError) and error.errno is not None:
        fault = _FAULTS.get(errno.errorcode.get(error.errno, ""))
    return _CREDENTIALS if fault is None and isinstance(error, PermissionError) else fault


def _http_response(error: BaseException) -> tuple[str, int]:
    """Return the error code and the HTTP status in an exception of a store's client; empty and 0 if it has none."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        code = str(response.get("Error", {}).get("Code", ""))
        return code, int(response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)
    code = str(getattr(error, "error_code", None) or "")  # azure
    texts = (str(getattr(error, name, "")) for name in ("status_code", "status", "code"))  # azure, aiohttp, gcsfs
    return code, next((int(text) for text in texts if text.isdecimal()), 0)
