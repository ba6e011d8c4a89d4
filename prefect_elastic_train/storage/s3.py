"""The client of S3: small objects and listings through s3fs, bulk data through botocore in threads.

A part is read while it is sent, so that memory stays small however large a checkpoint is, and a transfer goes on where
it was cut off; s3fs does neither (figures in ``benchmarks/checkpoint.py``). botocore comes with s3fs.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import io
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from prefect_elastic_train.core.outcomes import ConfigurationError, StorageFaultError
from prefect_elastic_train.storage.objects import (
    TRANSFERS,
    ObjectClient,
    RangeReader,
    TransferFile,
    check_size,
    local_disk,
    partial_file,
    run_all,
)

__all__ = ["S3Client"]

logger = logging.getLogger("prefect_elastic_train.storage")

_T = TypeVar("_T")

_MIB = 2**20
#: Size of the parts of an upload; what is no larger goes in one put. S3 takes at most 10,000 parts.
PART_BYTES = 16 * _MIB
_MAX_PARTS = 10_000
#: What is left of an object after so many seconds is read in so many ranges, if that is more than so many bytes and
#: one stream would take longer than as many seconds again.
_LOOK_SECONDS = 1.0
_RANGES = 4
_RANGE_BYTES = 32 * _MIB
_READ_BYTES = _MIB
_DELETE_AT_ONCE = 1000
#: How long aborting the uploads of a transfer that failed may take.
_ABORT_SECONDS = 10.0
#: Where botocore itself looks for a store that is not AWS.
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
#: Answers of stores that cannot delete several objects in one request as botocore asks them to.
_NO_BULK_DELETE = ("MissingContentMD5", "NotImplemented", "InvalidRequest", "InvalidDigest", "MalformedXML", "501")
#: Answers of stores that do not take the checksums of the parts of an upload.
_NO_CHECKSUMS = ("not supported", "refused (InvalidRequest)", "refused (InvalidArgument)")
#: Tries and seconds a try at the metadata service of an instance, which limits how often it answers.
_METADATA_TRIES, _METADATA_SECONDS = 4, 2
_CONNECT_SECONDS = 10
_READ_SECONDS = 60


class S3Client(ObjectClient):
    """Objects of a bucket. See :class:`ObjectClient`."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._botocore: Any = None
        self._deletes_one_by_one = False
        #: Whether parts are sent with their checksums, which the store verifies; not if it has refused one.
        self.sends_checksums = True

    def put(self, key: str, data: bytes, *, create: bool = False) -> None:
        """Write a small object. See :meth:`ObjectClient.put`."""
        try:
            super().put(key, data, create=create)
        except OSError as error:
            # s3fs tells it so only where the answer names the condition: AWS does, MinIO does not.
            if create and error.__cause__ is not None and is_taken(error.__cause__):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), key) from error
            raise

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects, up to a thousand a request."""
        listed = list(keys)
        if len(listed) == 1 or self._deletes_one_by_one:
            super().delete(listed)
            return
        try:
            for begin in range(0, len(listed), _DELETE_AT_ONCE):
                self._delete(listed[begin : begin + _DELETE_AT_ONCE])
        except Exception as error:
            if _code(error) not in _NO_BULK_DELETE:
                raise
            self._deletes_one_by_one = True
            super().delete(listed)

    def upload(self, files: Sequence[TransferFile], on_exists: Callable[[], object]) -> None:
        """Write files: small ones in one put, large ones in parts, several at a time.

        Nothing is overwritten before ``on_exists`` was asked; a file that fails leaves no parts behind.
        """
        # The parts of huge files are larger, and fewer of them are held at a time.
        largest = max([_part_bytes(file.size) for file in files], default=PART_BYTES)
        threads = max(2, TRANSFERS * PART_BYTES // largest)
        with ThreadPoolExecutor(threads, thread_name_prefix="elastic-train-upload") as pool:
            uploads: list[_PartsUpload] = []
            futures: list[Future[None]] = []
            try:
                for file in sorted(files, key=lambda file: file.size, reverse=True):
                    if file.size <= PART_BYTES:
                        futures.append(pool.submit(self._put_file, file, on_exists))
                    else:
                        upload = _PartsUpload(self, file, on_exists)
                        uploads.append(upload)
                        futures += [pool.submit(upload.send, number) for number in range(1, upload.parts + 1)]
                run_all(pool, futures)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                deadline = time.monotonic() + _ABORT_SECONDS
                for upload in uploads:
                    upload.abort(max(0.0, deadline - time.monotonic()))
                raise
            for upload in uploads:
                if upload.is_lost:  # somebody aborted it, and what is there is not what was sent
                    on_exists()
                    self._send_again(upload.file, on_exists)

    def _send_again(self, file: TransferFile, on_exists: Callable[[], object]) -> None:
        upload = _PartsUpload(self, file, on_exists)
        try:
            for number in range(1, upload.parts + 1):
                upload.send(number)
            if upload.is_lost:
                raise ConnectionError(f"the upload of {file.key} was aborted twice by somebody else")
        except BaseException:
            upload.abort(_ABORT_SECONDS)
            raise

    def download(self, files: Sequence[TransferFile]) -> None:
        """Read objects into files, large ones in several ranges at a time where one stream is slow."""
        with ThreadPoolExecutor(TRANSFERS, thread_name_prefix="elastic-train-download") as pool:
            try:
                run_all(pool, [pool.submit(_Download(self, file).fetch) for file in files])
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def abandon_uploads(self, folder: str) -> int:
        """Abort the unfinished uploads of parts below a folder. A key that may not list them leaves them."""
        bucket, _, prefix = folder.partition("/")
        try:
            return self._abort_all(bucket, f"{prefix}/")
        except StorageFaultError as error:
            if not error.kind.startswith(("credentials", "not supported", "refused")):
                raise
            logger.debug("Unfinished uploads below %s stay: %s", folder, error)
            return 0

    def call(self, what: str, method: str, **arguments: Any) -> Any:
        """Call a method of botocore's client, with retries."""
        return self.retries.call(what, lambda: self.try_once(method, **arguments))

    def try_once(self, method: str, **arguments: Any) -> Any:
        """Call a method of botocore's client."""
        return self._renewing(lambda: getattr(self._client(), method)(**arguments))

    def with_checksums_or_without(self, transfer: Callable[[bool], _T]) -> _T:
        """Call what sends checksums if it is told so, and once more without them where the store refuses them."""
        if self.sends_checksums:
            try:
                return transfer(True)
            except StorageFaultError as error:
                if error.kind not in _NO_CHECKSUMS:
                    raise
                logger.debug("Parts are sent without checksums, which the store refuses: %s", error)
                self.sends_checksums = False
        return transfer(False)

    def abort_others(self, bucket: str, key: str, upload_id: str) -> None:
        """Abort unfinished uploads of an object, of whose beginning the answer was lost, but one."""
        try:
            self._abort_all(bucket, key, lambda found: found["Key"] == key and found["UploadId"] != upload_id)
        except Exception as error:  # noqa: BLE001 - it is only tidying up: the object is there
            logger.debug("An upload of %s that was begun and not used may stay: %s", key, error)

    def _abort_all(self, bucket: str, prefix: str, which: Callable[[dict[str, Any]], bool] = lambda _: True) -> int:
        aborted = 0
        markers: dict[str, str] = {}
        while True:
            page = self.call(
                f"list uploads below {prefix}", "list_multipart_uploads", Bucket=bucket, Prefix=prefix, **markers
            )
            for found in page.get("Uploads") or []:
                # Not every store heeds the prefix.
                if found["Key"].startswith(prefix) and which(found):
                    self.abort(bucket, found["Key"], found["UploadId"])
                    aborted += 1
            if not page.get("IsTruncated") or not page.get("NextKeyMarker"):
                return aborted
            markers = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page.get("NextUploadIdMarker", "")}

    def abort(self, bucket: str, key: str, upload_id: str, seconds: float | None = None) -> None:
        """Abort an upload of parts; nothing happens if there is none."""
        try:
            retries = self.retries if seconds is None else replace(self.retries, seconds=seconds)
            retries.call(
                f"abort an upload of {key}",
                lambda: self.try_once("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload_id),
            )
        except Exception as error:
            if not is_missing(error):
                raise

    def _put_file(self, file: TransferFile, on_exists: Callable[[], object]) -> None:
        bucket, _, key = file.key.partition("/")
        with open(file.path, "rb") as opened:
            data = opened.read()
        what = f"upload {file.key}"
        try:
            self.call(what, "put_object", Bucket=bucket, Key=key, Body=data, IfNoneMatch="*")
        except Exception as error:
            if not (is_taken(error) or _is_unsupported(error)):
                raise
            on_exists()
            self.call(what, "put_object", Bucket=bucket, Key=key, Body=data)

    def _delete(self, keys: Sequence[str]) -> None:
        if not keys:
            return
        bucket = keys[0].partition("/")[0]
        objects = [{"Key": key.partition("/")[2]} for key in keys]
        answer = self.try_once("delete_objects", Bucket=bucket, Delete={"Objects": objects, "Quiet": True})
        errors = answer.get("Errors") or []
        if errors:
            from botocore.exceptions import ClientError

            raise ClientError({"Error": errors[0]}, "DeleteObjects")

    def _client(self) -> Any:
        with self._lock:
            if self._botocore is None:
                self._botocore = self._connect_botocore()
            return self._botocore

    def _connect_botocore(self) -> Any:
        try:
            import botocore.session
            from botocore.config import Config
        except ImportError as error:
            raise _not_installed(error) from error

        settings = self._settings
        session = botocore.session.Session()
        _be_patient(session)
        return session.create_client(
            "s3",
            endpoint_url=settings.endpoint_url or None,
            region_name=settings.region or None,
            aws_access_key_id=settings.access_key_id.get_secret_value() or None,
            aws_secret_access_key=settings.secret_access_key.get_secret_value() or None,
            aws_session_token=settings.session_token.get_secret_value() or None,
            verify=self._verify(),
            config=Config(**self._config()),
        )

    def _connect(self) -> Any:
        try:
            import s3fs
            from aiobotocore.session import AioSession
        except ImportError as error:
            raise _not_installed(error) from error
        settings = self._settings
        client_arguments: dict[str, Any] = {}
        if settings.region:
            client_arguments["region_name"] = settings.region
        if self._verify() is not None:
            client_arguments["verify"] = self._verify()
        session = AioSession()
        _be_patient(session)
        filesystem = s3fs.S3FileSystem(
            session=session,
            key=settings.access_key_id.get_secret_value() or None,
            secret=settings.secret_access_key.get_secret_value() or None,
            token=settings.session_token.get_secret_value() or None,
            endpoint_url=settings.endpoint_url or None,
            client_kwargs=client_arguments,
            config_kwargs=self._config(),
            max_concurrency=1,  # no size is asked for before an object is read
            skip_instance_cache=True,
            use_listings_cache=False,
        )
        filesystem.retries = 1  # one layer repeats, and it is ours
        return filesystem

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "retries": {"total_max_attempts": 1},
            "connect_timeout": _CONNECT_SECONDS,
            "read_timeout": _READ_SECONDS,
            "max_pool_connections": TRANSFERS * (1 + _RANGES),
        }
        elsewhere = self._settings.endpoint_url or any(os.environ.get(name) for name in _ENDPOINT_VARIABLES)
        if self._settings.addressing_style != "auto":
            config["s3"] = {"addressing_style": self._settings.addressing_style}
        elif elsewhere:
            config["s3"] = {"addressing_style": "path"}
        if elsewhere:
            # Many stores do not know the checksums that botocore adds by itself for AWS.
            config |= {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
        return config

    def _verify(self) -> bool | str | None:
        if not self._settings.verify_tls:
            return False
        return self._settings.ca_bundle or None

    def _forget_connections(self) -> None:
        super()._forget_connections()
        with self._lock:
            self._botocore = None


class _PartsUpload:
    """A file that is sent in parts. Whichever thread sends the last of them completes the object."""

    def __init__(self, client: S3Client, file: TransferFile, on_exists: Callable[[], object]) -> None:
        self._client = client
        self.file = self._file = file
        self._on_exists = on_exists
        self._bucket, _, self._key = file.key.partition("/")
        self._part_bytes = _part_bytes(file.size)
        self.parts = -(-file.size // self._part_bytes)
        #: What the store said of each part, as the end of the upload repeats it.
        self._sent: dict[int, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._upload_id = ""
        self._ended = False
        self._begun_again = False
        self._not_begun: Exception | None = None
        #: The upload was aborted by somebody else before it was completed.
        self.is_lost = False

    def send(self, number: int) -> None:
        """Send a part, counted from 1."""
        upload_id = self._begin()
        what = f"upload part {number} of {self._file.key}"
        with self._part(number) as part:

            def send(with_checksum: bool) -> Any:
                checksum = {"ChecksumAlgorithm": "CRC32", "ChecksumCRC32": _crc32(part)} if with_checksum else {}
                part.seek(0)
                return self._client.try_once(
                    "upload_part",
                    Bucket=self._bucket,
                    Key=self._key,
                    UploadId=upload_id,
                    PartNumber=number,
                    Body=part,
                    **checksum,
                )

            answer = self._client.with_checksums_or_without(
                lambda wanted: self._client.retries.call(what, lambda: send(wanted))
            )
        with self._lock:
            self._sent[number] = {name: answer[name] for name in ("ETag", "ChecksumCRC32") if name in answer}
            if len(self._sent) < self.parts:
                return
        self._complete()

    def abort(self, seconds: float) -> None:
        """Leave no parts behind, as far as the store can be reached in so many seconds."""
        if self._upload_id and not self._ended:
            try:
                self._client.abort(self._bucket, self._key, self._upload_id, seconds)
            except Exception as error:  # noqa: BLE001 - what the upload failed with is what shall be told
                logger.warning("Parts of %s stay until the run starts workers again: %s", self._file.key, error)

    def _begin(self) -> str:
        with self._lock:
            if self._not_begun is not None:
                raise self._not_begun  # it was tried for long enough, for all parts
            if not self._upload_id:

                def begin(with_checksums: bool, tries: int) -> str:
                    self._begun_again = tries > 0
                    algorithm = {"ChecksumAlgorithm": "CRC32"} if with_checksums else {}
                    answer = self._client.try_once(
                        "create_multipart_upload", Bucket=self._bucket, Key=self._key, **algorithm
                    )
                    return str(answer["UploadId"])

                try:
                    self._upload_id = self._client.with_checksums_or_without(
                        lambda wanted: self._client.retries.call_counted(
                            f"begin an upload of {self._file.key}", partial(begin, wanted)
                        )
                    )
                except Exception as error:
                    self._not_begun = error
                    raise
            return self._upload_id

    def _part(self, number: int) -> io.BufferedReader:
        offset = (number - 1) * self._part_bytes
        part = _FilePart(self._file.path, offset, min(self._part_bytes, self._file.size - offset))
        return io.BufferedReader(part, _READ_BYTES)

    def _complete(self) -> None:
        try:
            try:
                self._try_to_complete(IfNoneMatch="*")
            except Exception as error:
                if not (is_taken(error) or _is_unsupported(error)):
                    raise
                self._on_exists()
                self._try_to_complete()
        except Exception as error:
            if not is_missing(error):
                raise
            self.is_lost = True
        self._ended = True
        if self._begun_again:
            # The answer to an earlier beginning may have been lost.
            self._client.abort_others(self._bucket, self._key, self._upload_id)

    def _try_to_complete(self, **condition: str) -> None:
        parts = [{"PartNumber": number, **said} for number, said in sorted(self._sent.items())]

        def complete(tries: int) -> None:
            try:
                self._client.try_once(
                    "complete_multipart_upload",
                    Bucket=self._bucket,
                    Key=self._key,
                    UploadId=self._upload_id,
                    MultipartUpload={"Parts": parts},
                    **condition,
                )
            except Exception as error:
                if _code(error) == "ConditionalRequestConflict":
                    raise FileExistsError(f"{self._file.key} is being written by somebody else") from None
                # After a lost answer the upload is gone, and the object is there.
                if not (is_missing(error) or is_taken(error)) or not self._is_there():
                    raise

        self._client.retries.call_counted(f"complete the upload of {self._file.key}", complete)

    def _is_there(self) -> bool:
        """Tell whether the object is the one that these parts make: its tag is made of theirs."""
        try:
            tags = [bytes.fromhex(said["ETag"].strip('"')) for _, said in sorted(self._sent.items())]
            found = self._client.try_once("head_object", Bucket=self._bucket, Key=self._key)
        except Exception as error:
            if isinstance(error, ValueError) or is_missing(error):
                return False  # a store whose tags say nothing, or no object
            raise
        expected = f"{hashlib.md5(b''.join(tags), usedforsecurity=False).hexdigest()}-{len(tags)}"
        return bool(found["ETag"].strip('"') == expected)


class _FilePart(RangeReader):
    """A part of a file as a body to send: read while it is sent, so that it is never in memory as a whole."""

    def __init__(self, path: str, offset: int, size: int) -> None:
        super().__init__(size)
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed with this one
        self._path, self._offset = path, offset

    def _fetch(self, begin: int, end: int) -> bytes:
        data = os.pread(self._file.fileno(), end - begin, self._offset + begin)
        if not data:
            raise ValueError(f"{self._path} has changed while it was uploaded; report a checkpoint that is complete")
        return data

    def close(self) -> None:
        super().close()
        self._file.close()


class _Download:
    """An object that is read into a file: in one stream while that is quick, in several ranges where it is not.

    Each stream goes on where it was cut off.
    """

    def __init__(self, client: S3Client, file: TransferFile) -> None:
        self._client = client
        self._file = file
        self._bucket, _, self._key = file.key.partition("/")

    def fetch(self) -> None:
        """Read all of it."""
        with ExitStack() as stack:
            with local_disk(self._file.path):
                path = stack.enter_context(partial_file(self._file.path))
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
            stack.callback(os.close, descriptor)
            reached = self._read(descriptor, 0, self._file.size, may_split=True)
            if reached < self._file.size:
                length = -(-(self._file.size - reached) // _RANGES)
                with ThreadPoolExecutor(_RANGES, thread_name_prefix="elastic-train-range") as pool:
                    ranges = (
                        (begin, min(begin + length, self._file.size))
                        for begin in range(reached, self._file.size, length)
                    )
                    run_all(pool, [pool.submit(self._read_all, descriptor, *limits) for limits in ranges])
            check_size(path, self._file)

    def _read_all(self, descriptor: int, begin: int, end: int) -> None:
        self._read(descriptor, begin, end, may_split=False)

    def _read(self, descriptor: int, begin: int, end: int, *, may_split: bool) -> int:
        """Read a range and give how far that came: less than all of it if it is worth several streams."""
        offset, since = begin, time.monotonic()

        def is_slow() -> bool:
            seconds, left = time.monotonic() - since, end - offset
            return (
                may_split
                and seconds > _LOOK_SECONDS
                and left > _RANGE_BYTES
                and left * seconds > _LOOK_SECONDS * (offset - begin)
            )

        def read() -> None:
            nonlocal offset
            wanted = {} if (offset, end) == (0, self._file.size) else {"Range": f"bytes={offset}-{end - 1}"}
            try:
                body = self._client.try_once("get_object", Bucket=self._bucket, Key=self._key, **wanted)["Body"]
            except Exception as error:
                if is_missing(error):
                    raise FileNotFoundError(f"s3://{self._file.key}: there is no such object") from None
                raise
            try:
                while data := body.read(_READ_BYTES):
                    with local_disk(self._file.path):
                        _write_all(descriptor, data, offset)
                    offset += len(data)
                    if is_slow():
                        return
            finally:
                body.close()
            if offset != end:
                raise ConnectionError(f"{self._file.key} ended at {offset} instead of {end}")

        if begin < end:
            self._client.retries.call(f"download {self._file.key}", read)
        return offset


def _not_installed(error: ImportError) -> ConfigurationError:
    return ConfigurationError(
        f"S3Storage needs a package that is not installed here ({error}); install it with `pip install "
        "'prefect-elastic-train[s3]'` where the flow runs and on every node"
    )


def is_taken(error: BaseException) -> bool:
    """Tell whether an object was not written because there is one of its name."""
    return isinstance(error, FileExistsError) or _code(error) in ("PreconditionFailed", "412")


def is_missing(error: BaseException) -> bool:
    """Tell whether what was asked for is not there."""
    return isinstance(error, FileNotFoundError) or _code(error) in ("NoSuchKey", "NoSuchUpload", "404")


def _is_unsupported(error: BaseException) -> bool:
    """Tell whether a store does not know what it was asked for, such as a condition at the end of an upload."""
    return isinstance(error, StorageFaultError) and error.kind == "not supported"


def _code(error: BaseException) -> str:
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def _part_bytes(size: int) -> int:
    return max(PART_BYTES, -(-size // _MAX_PARTS))


def _crc32(part: io.BufferedReader) -> str:
    part.seek(0)
    checksum = 0
    while data := part.read(_READ_BYTES):
        checksum = zlib.crc32(data, checksum)
    return base64.b64encode(checksum.to_bytes(4, "big")).decode()


def _be_patient(session: Any) -> None:
    """Ask the metadata service of an instance more than once: many workers that start together are too many for it."""
    session.set_config_variable("metadata_service_num_attempts", _METADATA_TRIES)
    session.set_config_variable("metadata_service_timeout", _METADATA_SECONDS)


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
