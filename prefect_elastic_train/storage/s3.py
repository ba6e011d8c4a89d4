"""s3fs as checkpoints need it: parts that are repeated alone, one stream down, and errors that s3fs would swallow.

Overrides methods of s3fs that begin with an underscore. Figures are in ``benchmarks/checkpoint.py``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any

import s3fs
from aiobotocore.session import AioSession
from botocore.exceptions import ClientError, FlexibleChecksumError
from fsspec.asyn import sync_wrapper
from s3fs.errors import translate_boto_error

from prefect_elastic_train.core.storage_settings import S3StorageSettings
from prefect_elastic_train.storage.faults import error_code
from prefect_elastic_train.storage.files import local_disk
from prefect_elastic_train.storage.retries import Retries

_DELETE_AT_ONCE = 1000
_READ_BYTES = 2**18
#: A request may take so long, and longer by its body at so many bytes a second. botocore bounds the wait for an answer
#: only from when the body is sent, which a store may never read.
_CALL_SECONDS, _SLOWEST_BYTES = 75.0, 64 * 2**10
#: What a store may be at for minutes, sending blanks meanwhile.
_AT_LENGTH = ("complete_multipart_upload", "copy_object", "delete_objects", "upload_part_copy")
_AT_LENGTH_SECONDS = 600.0
#: Answers of stores that cannot delete several objects in one request as botocore asks them to.
_NO_BULK_DELETE = ("MissingContentMD5", "NotImplemented", "InvalidRequest", "InvalidDigest", "MalformedXML", "501")
#: Where botocore itself looks for a store that is not AWS.
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
#: For the metadata service of an instance, which limits how often it answers: many workers start together.
_METADATA = {"metadata_service_num_attempts": 4, "metadata_service_timeout": 2}


def open_s3(settings: S3StorageSettings, retries: Retries) -> S3Files:
    """Return the filesystem of a bucket, with connections and a session of its own; nothing is connected yet."""
    config: dict[str, Any] = {
        "retries": {"total_max_attempts": 1},
        "connect_timeout": 10,
        "read_timeout": 60,
        "max_pool_connections": 32,
    }
    elsewhere = settings.endpoint_url or any(os.environ.get(name) for name in _ENDPOINT_VARIABLES)
    if settings.addressing_style != "auto":
        config["s3"] = {"addressing_style": settings.addressing_style}
    elif elsewhere:
        config["s3"] = {"addressing_style": "path"}
    if elsewhere:
        # Many stores do not know the checksums that botocore adds by itself for AWS.
        config |= {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
    session = AioSession()
    for name, value in _METADATA.items():
        session.set_config_variable(name, value)
    client: dict[str, Any] = {
        "region_name": settings.region or None,
        "verify": (settings.verify_tls and settings.ca_bundle) or None,
    }
    if not settings.verify_tls:
        client["verify"] = False
    return S3Files(
        repeated=retries.call_async,
        session=session,
        key=settings.access_key_id.get_secret_value() or None,
        secret=settings.secret_access_key.get_secret_value() or None,
        token=settings.session_token.get_secret_value() or None,
        endpoint_url=settings.endpoint_url or None,
        client_kwargs={name: value for name, value in client.items() if value is not None},
        config_kwargs=config,
        skip_instance_cache=True,
        use_listings_cache=False,
        max_concurrency=1,  # no size is asked for before an object is read
    )


class S3Files(s3fs.S3FileSystem):  # type: ignore[misc]
    """See :class:`s3fs.S3FileSystem`.

    Args:
        repeated: Carries out an operation that has a name, again and again while it fails with what passes.
        options: As s3fs takes them.
    """

    retries = 1  # one layer repeats, and it is ours

    def __init__(self, *, repeated: Callable[[str, Callable[[], Awaitable[Any]]], Awaitable[Any]], **options: Any):
        super().__init__(**options)
        self._repeated = repeated
        #: Whether parts are sent with their checksums, which the store verifies.
        self.sends_checksums = True
        #: What the store has said of the checksums of parts, by upload and number.
        self._checksums: dict[tuple[str, int], str] = {}
        #: Who is sending a part, by upload.
        self._sending: dict[str, set[asyncio.Task[Any] | None]] = {}

    async def _call_s3(self, method: str, *more: Any, **arguments: Any) -> Any:
        call = self._call_bounded
        if method in ("create_multipart_upload", "upload_part") and self.sends_checksums:
            arguments.setdefault("ChecksumAlgorithm", "CRC32")
        if not arguments.get("ChecksumAlgorithm", "none"):
            del arguments["ChecksumAlgorithm"]
        if method == "upload_part":
            number = arguments["PartNumber"]
            what = f"upload part {number} of {arguments['Bucket']}/{arguments['Key']}"
            sending, task = self._sending.setdefault(arguments["UploadId"], set()), asyncio.current_task()
            sending.add(task)
            try:
                answer = await self._repeated(what, lambda: call(method, *more, **arguments))
            finally:
                sending.discard(task)
            if "ChecksumCRC32" in answer:
                self._checksums[arguments["UploadId"], number] = answer["ChecksumCRC32"]
            return answer
        if method == "complete_multipart_upload":
            self._sending.pop(arguments["UploadId"], None)
            # S3 wants the checksums of the parts once more, if the upload was begun with one.
            for part in arguments["MultipartUpload"]["Parts"]:
                checksum = self._checksums.pop((arguments["UploadId"], part["PartNumber"]), None)
                part |= {"ChecksumCRC32": checksum} if checksum else {}
        if method == "abort_multipart_upload":
            # A part that arrives after the abort may be kept, and paid for.
            others = [task for task in self._sending.pop(arguments["UploadId"], ()) if task is not None]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            with suppress(Exception):  # what the upload failed with is what shall be told
                await call(method, *more, **arguments)
            return None
        answer = await call(method, *more, **arguments)
        if method == "delete_objects" and answer.get("Errors"):
            raise translate_boto_error(ClientError({"Error": answer["Errors"][0]}, "DeleteObjects"))
        return answer

    async def _copy_managed(self, *where: Any, **more: Any) -> None:
        """Copy an object in parts; no checksums of those are known here, which the end of the upload would repeat."""
        await super()._copy_managed(*where, ChecksumAlgorithm="", **more)

    async def _call_bounded(self, method: str, *more: Any, **arguments: Any) -> Any:
        seconds = _AT_LENGTH_SECONDS if method in _AT_LENGTH else _CALL_SECONDS
        seconds += len(arguments.get("Body", b"")) / _SLOWEST_BYTES
        try:
            return await asyncio.wait_for(super()._call_s3(method, *more, **arguments), seconds)
        except asyncio.TimeoutError as error:  # in whose place fsspec would raise one without words
            raise ConnectionError(f"no answer to {method} within {seconds:.0f} s") from error

    async def _get_file(self, rpath: str, lpath: str, **_: Any) -> None:
        """Read an object in one stream, which goes on where it was cut off."""
        bucket, key, _version = self.split_path(rpath)
        size: int | None = None
        with open(lpath, "wb") as file:

            async def read() -> None:
                nonlocal size
                begin = file.tell()
                if begin and begin == size:
                    return  # it was cut off after the last byte, and there is no range after that
                wanted = {"Range": f"bytes={begin}-"} if begin else {}
                answer = await self._call_s3("get_object", Bucket=bucket, Key=key, **wanted)
                if "ContentLength" in answer:
                    size = begin + answer["ContentLength"]
                try:
                    async with answer["Body"] as body:
                        while data := await body.read(_READ_BYTES):
                            with local_disk(lpath):
                                file.write(data)
                except FlexibleChecksumError:  # all of it has come, and is wrong
                    file.seek(0)
                    file.truncate()
                    raise

            await self._repeated(f"download {rpath}", read)

    async def _delete_all(self, keys: Iterable[str]) -> bool:
        """Delete objects, many in a request; return False if the store cannot."""
        listed = list(keys)
        try:
            for begin in range(0, len(listed), _DELETE_AT_ONCE):
                await self._bulk_delete(listed[begin : begin + _DELETE_AT_ONCE])
        except OSError as error:
            if error_code(error) not in _NO_BULK_DELETE:
                raise
            return False
        return True

    async def _abort_uploads(self, folder: str) -> int:
        """Abort the unfinished uploads below a folder, and return how many there were."""
        bucket, _, prefix = folder.partition("/")
        aborted, page = 0, {"IsTruncated": True}
        while page.get("IsTruncated"):
            marker = {name: page[f"Next{name}"] for name in ("KeyMarker", "UploadIdMarker") if f"Next{name}" in page}
            page = await self._call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/", **marker)
            for found in page.get("Uploads") or []:
                if found["Key"].startswith(f"{prefix}/"):  # not every store heeds the prefix
                    upload = {"Bucket": bucket, "Key": found["Key"], "UploadId": found["UploadId"]}
                    with suppress(FileNotFoundError):  # another one has ended it
                        await self._call_bounded("abort_multipart_upload", **upload)
                        aborted += 1
            if "NextKeyMarker" not in page:
                break  # a store that says no more than that there is more
        return aborted

    delete_all = sync_wrapper(_delete_all)
    abort_uploads = sync_wrapper(_abort_uploads)
