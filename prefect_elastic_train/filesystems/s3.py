"""The client of S3: small objects and listings through s3fs, bulk data through botocore in threads.

Threads upload more than twice as fast as s3fs, which hashes and sends in one (``benchmarks/checkpoint.py``), and a
part is held in memory only while it is sent. botocore comes with s3fs.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from prefect_elastic_train.filesystems.faults import diagnose
from prefect_elastic_train.filesystems.objects import (
    TRANSFERS,
    ObjectClient,
    TransferFile,
    check_size,
    partial_file,
    run_all,
)
from prefect_elastic_train.outcomes import ConfigurationError

__all__ = ["S3Client"]

logger = logging.getLogger("prefect_elastic_train.storage")

_MIB = 2**20
#: Size of the parts of an upload; what is no larger goes in one put. S3 takes at most 10,000 parts.
PART_BYTES = 16 * _MIB
_MAX_PARTS = 10_000
#: An object is read in up to so many ranges at a time, of at least so many bytes.
_RANGES = 4
_RANGE_BYTES = 128 * _MIB
_READ_BYTES = _MIB
_DELETE_AT_ONCE = 1000
_CONNECT_SECONDS = 10
_READ_SECONDS = 60


class S3Client(ObjectClient):
    """Objects of a bucket. See :class:`ObjectClient`."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._botocore: Any = None

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
        for begin in range(0, len(listed), _DELETE_AT_ONCE):
            self._delete(listed[begin : begin + _DELETE_AT_ONCE])

    def upload(self, files: Sequence[TransferFile], on_exists: Callable[[], object]) -> None:
        """Write files: small ones in one put, large ones in parts, several at a time.

        Nothing is overwritten before ``on_exists`` was asked; a file that fails leaves no parts behind.
        """
        with ThreadPoolExecutor(TRANSFERS, thread_name_prefix="elastic-train-upload") as pool:
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
                for upload in uploads:
                    upload.abort()
                raise

    def download(self, files: Sequence[TransferFile]) -> None:
        """Read objects into files, large ones in several ranges at a time."""
        with ThreadPoolExecutor(TRANSFERS, thread_name_prefix="elastic-train-download") as pool:
            downloads = [_RangesDownload(self, file) for file in files]
            try:
                run_all(pool, [pool.submit(job) for download in downloads for job in download.jobs()])
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                for download in downloads:
                    download.abandon()
                raise

    def abandon_uploads(self, folder: str) -> int:
        """Abort the unfinished uploads of parts below a folder. A key that may not list them leaves them."""
        bucket, _, prefix = folder.partition("/")
        try:
            return self._abort_all(bucket, f"{prefix}/")
        except Exception as error:
            fault = diagnose(error)
            if fault is None or not fault.kind.startswith("credentials"):
                raise
            logger.debug("Unfinished uploads below %s stay: %s", folder, error)
            return 0

    def call(self, what: str, method: str, **arguments: Any) -> Any:
        """Call a method of botocore's client, with retries."""
        return self.retries.call(what, lambda: self.try_once(method, **arguments))

    def try_once(self, method: str, **arguments: Any) -> Any:
        """Call a method of botocore's client."""
        return self._renewing(lambda: getattr(self._client(), method)(**arguments))

    def abort_others(self, bucket: str, key: str, upload_id: str) -> None:
        """Abort unfinished uploads of an object, of whose beginning the answer was lost, but one."""
        self._abort_all(bucket, key, lambda found: found["Key"] == key and found["UploadId"] != upload_id)

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

    def abort(self, bucket: str, key: str, upload_id: str) -> None:
        """Abort an upload of parts; nothing happens if there is none."""
        try:
            self.call(f"abort an upload of {key}", "abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload_id)
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
            if not is_taken(error):
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
        return botocore.session.Session().create_client(
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
        except ImportError as error:
            raise _not_installed(error) from error
        settings = self._settings
        client_arguments: dict[str, Any] = {}
        if settings.region:
            client_arguments["region_name"] = settings.region
        if self._verify() is not None:
            client_arguments["verify"] = self._verify()
        filesystem = s3fs.S3FileSystem(
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
            "max_pool_connections": 2 * TRANSFERS,
        }
        if self._settings.addressing_style != "auto":
            config["s3"] = {"addressing_style": self._settings.addressing_style}
        elif self._settings.endpoint_url:
            config["s3"] = {"addressing_style": "path"}
        if self._settings.endpoint_url:
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
        self._file = file
        self._on_exists = on_exists
        self._bucket, _, self._key = file.key.partition("/")
        self._part_bytes = max(PART_BYTES, -(-file.size // _MAX_PARTS))
        self.parts = -(-file.size // self._part_bytes)
        self._sent: dict[int, str] = {}
        self._lock = threading.Lock()
        self._upload_id = ""
        self._ended = False
        self._begun_again = False

    def send(self, number: int) -> None:
        """Send a part, counted from 1."""
        upload_id = self._begin()
        what = f"upload part {number} of {self._file.key}"
        data = self._read(number)
        answer = self._client.call(
            what,
            "upload_part",
            Bucket=self._bucket,
            Key=self._key,
            UploadId=upload_id,
            PartNumber=number,
            Body=data,
        )
        del data
        with self._lock:
            self._sent[number] = answer["ETag"]
            if len(self._sent) < self.parts:
                return
        self._complete()

    def abort(self) -> None:
        """Leave no parts behind, as far as the store can be reached."""
        if self._upload_id and not self._ended:
            try:
                self._client.abort(self._bucket, self._key, self._upload_id)
            except Exception as error:  # noqa: BLE001 - what the upload failed with is what shall be told
                logger.warning("Parts of %s stay until the run starts workers again: %s", self._file.key, error)

    def _begin(self) -> str:
        with self._lock:
            if not self._upload_id:

                def begin(tries: int) -> str:
                    self._begun_again = tries > 0
                    answer = self._client.try_once("create_multipart_upload", Bucket=self._bucket, Key=self._key)
                    return str(answer["UploadId"])

                self._upload_id = self._client.retries.call_counted(f"begin an upload of {self._file.key}", begin)
            return self._upload_id

    def _read(self, number: int) -> bytes:
        offset = (number - 1) * self._part_bytes
        wanted = min(self._part_bytes, self._file.size - offset)
        with open(self._file.path, "rb", buffering=0) as opened:
            data = os.pread(opened.fileno(), wanted, offset)
        if len(data) != wanted:
            raise ValueError(
                f"{self._file.path} has changed while it was uploaded; report a checkpoint that is complete"
            )
        return data

    def _complete(self) -> None:
        try:
            self._try_to_complete(IfNoneMatch="*")
        except Exception as error:
            if not is_taken(error):
                raise
            self._on_exists()
            self._try_to_complete()
        self._ended = True
        if self._begun_again:
            # The answer to an earlier beginning may have been lost.
            self._client.abort_others(self._bucket, self._key, self._upload_id)

    def _try_to_complete(self, **condition: str) -> None:
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in sorted(self._sent.items())]

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
                # After a lost answer the upload is gone, and the object is there.
                gone = is_missing(error) or (tries > 0 and is_taken(error))
                if not gone or self._client.size(self._file.key) != self._file.size:
                    raise

        self._client.retries.call_counted(f"complete the upload of {self._file.key}", complete)


class _RangesDownload:
    """An object that is read into a file, in ranges; each goes on where it was cut off.

    Whichever thread reads the last of them gives the file its name.
    """

    def __init__(self, client: S3Client, file: TransferFile) -> None:
        self._client = client
        self._file = file
        self._bucket, _, self._key = file.key.partition("/")
        self._partial = partial_file(file.path)
        self._lock = threading.Lock()
        count = min(_RANGES, max(1, file.size // _RANGE_BYTES))
        self._length = max(1, -(-file.size // count))
        self._left = max(1, -(-file.size // self._length))
        self._path = ""

    def jobs(self) -> list[Callable[[], None]]:
        """Give what reads the ranges."""
        return [
            lambda number=number: self._fetch(number * self._length)  # type: ignore[misc]
            for number in range(self._left)
        ]

    def abandon(self) -> None:
        """Leave nothing behind of a file that is not whole. No job may be running."""
        if self._path and self._left:
            self._partial.__exit__(RuntimeError)

    def _fetch(self, begin: int) -> None:
        with self._lock:
            self._path = self._path or self._partial.__enter__()
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            self._read(descriptor, begin, min(begin + self._length, self._file.size))
        finally:
            os.close(descriptor)
        with self._lock:
            if self._left == 1:
                check_size(self._path, self._file)
                self._partial.__exit__(None)
            self._left -= 1

    def _read(self, descriptor: int, begin: int, end: int) -> None:
        offset = begin

        def read() -> None:
            nonlocal offset
            wanted = {} if (offset, end) == (0, self._file.size) else {"Range": f"bytes={offset}-{end - 1}"}
            body = self._client.try_once("get_object", Bucket=self._bucket, Key=self._key, **wanted)["Body"]
            try:
                while data := body.read(_READ_BYTES):
                    _write_all(descriptor, data, offset)
                    offset += len(data)
            finally:
                body.close()
            if offset != end:
                raise ConnectionError(f"{self._file.key} ended at {offset} instead of {end}")

        if begin < end:
            self._client.retries.call(f"download {self._file.key}", read)


def _not_installed(error: ImportError) -> ConfigurationError:
    return ConfigurationError(
        f"S3Storage needs a package that is not installed here ({error}); install it with `pip install "
        "'prefect-elastic-train[s3]'` where the flow runs and on every node"
    )


def is_taken(error: BaseException) -> bool:
    """Tell whether an object was not written because there is one of its name."""
    response = getattr(error, "response", None)
    code = response.get("Error", {}).get("Code") if isinstance(response, dict) else ""
    return isinstance(error, FileExistsError) or code in ("PreconditionFailed", "412")


def is_missing(error: BaseException) -> bool:
    """Tell whether what was asked for is not there."""
    response = getattr(error, "response", None)
    code = response.get("Error", {}).get("Code") if isinstance(response, dict) else ""
    return isinstance(error, FileNotFoundError) or code in ("NoSuchKey", "NoSuchUpload", "404")


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
