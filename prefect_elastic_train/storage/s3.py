"""s3fs for checkpoints: calls with time limits, retries of single parts, and downloads as one stream.

Overrides methods of s3fs that begin with an underscore. Figures are in ``benchmarks/checkpoint.py``.

Belongs to all processes.
"""

import asyncio
import os
from contextlib import suppress
from typing import Any

import s3fs
from aiobotocore.session import AioSession
from botocore.loaders import create_loader
from fsspec.asyn import sync_wrapper

from prefect_elastic_train.core.settings import S3StorageSettings

from .fault_classes import diagnose
from .object_store import PART_BYTES
from .retries import Retries

_LOADER = create_loader()  # shared: it takes a third of a second to read the descriptions of AWS
_READ_BYTES = 2**18  # read at a time; s3fs itself reads a quarter of this, which takes a third more CPU time
#: Number of parts of a multipart upload that are sent at a time, and S3's limit for the parts of one upload.
_PARTS_AT_ONCE = 4
_MAX_PARTS = 10_000
#: Time limit of a request without its body. botocore's begins only when the body is sent, which a store may never read.
_CALL_SECONDS = 75.0
_MIN_BYTES_PER_SECOND = 64 * 2**10  # rate of a body
#: Requests that may take a store minutes, during which it sends blanks.
_LONG_CALLS = ("complete_multipart_upload", "copy_object", "upload_part_copy")
_LONG_CALL_SECONDS = 600.0
#: Faults of stores that do not support checksums of the parts of an upload.
_NO_CHECKSUMS = ("not supported", "refused (InvalidRequest)", "refused (InvalidArgument)")


class S3Files(s3fs.S3FileSystem):  # type: ignore[misc]
    """The filesystem of an S3 storage, which retries single parts of uploads and downloads.

    It has an S3 session of its own, and connects when it is used.
    """

    cachable = False
    retries = 1  # only our layer retries, and counts the time

    def __init__(self, settings: S3StorageSettings, retries: Retries, **options: Any) -> None:
        style = "path" if settings.addressing_style == "auto" and settings.endpoint_url else settings.addressing_style
        config: dict[str, Any] = {
            "retries": {"total_max_attempts": 1},
            "connect_timeout": 10,
            "read_timeout": 60,
            "max_pool_connections": 32,
            "s3": {"addressing_style": style},
        }
        if settings.endpoint_url:
            # Many stores do not support the checksums that botocore adds for AWS; they verify its signature.
            config |= {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
        session = AioSession()
        session.register_component("data_loader", _LOADER)
        # The metadata service of an instance limits its rate of responses, and many workers start together.
        session.set_config_variable("metadata_service_num_attempts", 4)
        session.set_config_variable("metadata_service_timeout", 2)
        verify = settings.verify_tls and (settings.ca_bundle or None)
        super().__init__(
            session=session,
            key=settings.access_key_id.get_secret_value() or None,
            secret=settings.secret_access_key.get_secret_value() or None,
            token=settings.session_token.get_secret_value() or None,
            endpoint_url=settings.endpoint_url or None,
            client_kwargs={"region_name": settings.region or None, "verify": verify},
            config_kwargs=config,
            use_listings_cache=False,
            max_concurrency=1,  # else the size is requested before an object is read
            **options,
        )
        self._retries = retries
        #: Arguments that send parts with checksums for the store to verify; empty for one without support.
        self._checksum = {"ChecksumAlgorithm": "CRC32"}

    async def _call_s3(self, method: str, *more: Any, **arguments: Any) -> Any:
        seconds = _LONG_CALL_SECONDS if method in _LONG_CALLS else _CALL_SECONDS
        seconds += len(arguments.get("Body", b"")) / _MIN_BYTES_PER_SECOND
        call = super()._call_s3

        async def bounded() -> Any:
            try:
                return await asyncio.wait_for(call(method, *more, **arguments), seconds)
            except asyncio.TimeoutError as error:  # fsspec would replace it by one without a message
                raise ConnectionError(f"no answer to {method} within {seconds:.0f} s") from error

        if method == "upload_part":
            arguments |= self._checksum
            title = f"upload part {arguments['PartNumber']} of {arguments['Bucket']}/{arguments['Key']}"
            response = await self._retries.call_async(title, bounded)
            # s3fs keeps only the ETag until the end of the upload.
            return {"ETag": {name: response[name] for name in ("ETag", "ChecksumCRC32") if name in response}}
        if method == "complete_multipart_upload":
            for part in arguments["MultipartUpload"]["Parts"]:
                if isinstance(part["ETag"], dict):
                    part.update(part["ETag"])
        return await bounded()

    async def _put_file(self, lpath: str, rpath: str, **more: Any) -> None:
        part = max(PART_BYTES, -(-os.path.getsize(lpath) // _MAX_PARTS))
        # Huge files have larger parts, so fewer of them are in memory at a time.
        more |= {"chunksize": part, "max_concurrency": max(1, _PARTS_AT_ONCE * PART_BYTES // part)}
        try:
            await super()._put_file(lpath, rpath, **self._checksum, **more)
        except OSError as error:
            fault = diagnose(error)
            if fault is None or fault.kind not in _NO_CHECKSUMS:
                raise
            self._checksum = {}
            await super()._put_file(lpath, rpath, **more)

    async def _abort_mpu(self, bucket: str, key: str, mpu: str) -> None:
        with suppress(Exception):  # the error of the upload is raised, not this one
            await super()._abort_mpu(bucket, key, mpu)

    async def _get_file(self, rpath: str, lpath: str, **_: Any) -> None:
        """Download an object to a local file as one stream, which is continued after a connection error."""
        bucket, key, _version = self.split_path(rpath)
        size = 0
        with open(lpath, "wb") as file:

            async def read() -> None:
                nonlocal size
                begin = file.tell()
                if begin >= size:  # the first try, or all bytes arrived and the checksum was wrong
                    begin = file.seek(0)
                    file.truncate()
                options = {"Range": f"bytes={begin}-"} if begin else {}
                response = await self._call_s3("get_object", Bucket=bucket, Key=key, **options)
                size = begin + response.get("ContentLength", 0)
                async with response["Body"] as body:
                    while data := await body.read(_READ_BYTES):
                        file.write(data)

            await self._retries.call_async(f"download {rpath}", read)

    async def _abort_uploads(self, folder: str) -> None:
        """Abort the unfinished multipart uploads below a folder of the bucket."""
        bucket, _, prefix = folder.partition("/")
        has_more = True
        while has_more:
            response = await self._call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/")
            has_more = False
            for upload in response.get("Uploads") or []:
                if upload["Key"].startswith(f"{prefix}/"):  # not every store filters by the prefix
                    with suppress(FileNotFoundError):  # another process has aborted it
                        await super()._abort_mpu(bucket, upload["Key"], upload["UploadId"])
                        has_more = bool(response.get("IsTruncated"))

    abort_uploads = sync_wrapper(_abort_uploads)
