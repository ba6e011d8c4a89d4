"""s3fs as checkpoints need it: bounded calls, parts that are repeated alone, one stream down.

Overrides methods of s3fs that begin with an underscore. Figures are in ``benchmarks/checkpoint.py``.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import s3fs
from aiobotocore.session import AioSession
from botocore.loaders import create_loader
from fsspec.asyn import sync_wrapper

from prefect_elastic_train.core.storage_settings import S3StorageSettings
from prefect_elastic_train.storage.faults import diagnose
from prefect_elastic_train.storage.retries import Retries

_LOADER = create_loader()  # of the descriptions of AWS, which take a third of a second to read
_READ_BYTES = 2**18
#: A request may take so long, and longer by its body at so many bytes a second. botocore bounds the wait for an answer
#: only from when the body is sent, which a store may never read.
_CALL_SECONDS, _SLOWEST_BYTES = 75.0, 64 * 2**10
#: What a store may be at for minutes, sending blanks meanwhile.
_AT_LENGTH = ("complete_multipart_upload", "copy_object", "upload_part_copy")
_AT_LENGTH_SECONDS = 600.0
_ABORT_SECONDS = 5.0
#: Faults of stores that do not take the checksums of the parts of an upload.
_NO_CHECKSUMS = ("not supported", "refused (InvalidRequest)", "refused (InvalidArgument)")


def open_s3(settings: S3StorageSettings, retries: Retries) -> S3Files:
    """Return the filesystem of a bucket, with connections and a session of its own; nothing is connected yet."""
    style = "path" if settings.addressing_style == "auto" and settings.endpoint_url else settings.addressing_style
    config: dict[str, Any] = {
        "retries": {"total_max_attempts": 1},
        "connect_timeout": 10,
        "read_timeout": 60,
        "max_pool_connections": 32,
        "s3": {"addressing_style": style},
    }
    if settings.endpoint_url:
        # Many stores do not know the checksums that botocore adds by itself for AWS; they verify its signature.
        config |= {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
    session = AioSession()
    session.register_component("data_loader", _LOADER)
    # The metadata service of an instance limits how often it answers, and many workers start together.
    session.set_config_variable("metadata_service_num_attempts", 4)
    session.set_config_variable("metadata_service_timeout", 2)
    return S3Files(
        repeats=retries,
        session=session,
        key=settings.access_key_id.get_secret_value() or None,
        secret=settings.secret_access_key.get_secret_value() or None,
        token=settings.session_token.get_secret_value() or None,
        endpoint_url=settings.endpoint_url or None,
        client_kwargs={
            "region_name": settings.region or None,
            "verify": (settings.ca_bundle or None) if settings.verify_tls else False,
        },
        config_kwargs=config,
        skip_instance_cache=True,
        use_listings_cache=False,
        max_concurrency=1,  # no size is asked for before an object is read
    )


class S3Files(s3fs.S3FileSystem):  # type: ignore[misc]
    """An :class:`s3fs.S3FileSystem` whose parts of uploads and downloads are repeated."""

    retries = 1  # one layer repeats, and it is ours

    def __init__(self, *, repeats: Retries, **options: Any) -> None:
        super().__init__(**options)
        self._repeats = repeats
        #: Parts are sent with their checksums, which the store verifies, unless it takes none.
        self._checksum = {"ChecksumAlgorithm": "CRC32"}

    async def _call_s3(self, method: str, *more: Any, **arguments: Any) -> Any:
        seconds = _AT_LENGTH_SECONDS if method in _AT_LENGTH else _CALL_SECONDS
        seconds += len(arguments.get("Body", b"")) / _SLOWEST_BYTES
        call = super()._call_s3

        async def bounded() -> Any:
            try:
                return await asyncio.wait_for(call(method, *more, **arguments), seconds)
            except asyncio.TimeoutError as error:  # in whose place fsspec would raise one without words
                raise ConnectionError(f"no answer to {method} within {seconds:.0f} s") from error

        if method == "upload_part":
            arguments |= self._checksum
            what = f"upload part {arguments['PartNumber']} of {arguments['Bucket']}/{arguments['Key']}"
            answer = await self._repeats.call_async(what, bounded)
            # s3fs keeps the ETag alone for the end of the upload.
            return {"ETag": {name: answer[name] for name in ("ETag", "ChecksumCRC32") if name in answer}}
        if method == "complete_multipart_upload":
            for part in arguments["MultipartUpload"]["Parts"]:
                part.update(part["ETag"] if isinstance(part["ETag"], dict) else {})
        return await bounded()

    async def _put_file(self, lpath: str, rpath: str, **more: Any) -> None:
        try:
            await super()._put_file(lpath, rpath, **self._checksum, **more)
        except OSError as error:
            fault = diagnose(error)
            if fault is None or fault.kind not in _NO_CHECKSUMS:
                raise
            self._checksum = {}
            await super()._put_file(lpath, rpath, **more)

    async def _abort_mpu(self, bucket: str, key: str, mpu: str) -> None:
        abort = super()._abort_mpu
        with suppress(Exception):  # what the upload failed with is what shall be told
            await self._repeats.at_most(_ABORT_SECONDS).call_async(f"abort {key}", lambda: abort(bucket, key, mpu))

    async def _get_file(self, rpath: str, lpath: str, **_: Any) -> None:
        """Read an object in one stream, which goes on where it was cut off."""
        bucket, key, _version = self.split_path(rpath)
        size = 0
        with open(lpath, "wb") as file:

            async def read() -> None:
                nonlocal size
                begin = file.tell()
                if begin >= size:  # it begins, or all of it has come, and its checksum may be wrong
                    begin = file.seek(0)
                    file.truncate()
                wanted = {"Range": f"bytes={begin}-"} if begin else {}
                answer = await self._call_s3("get_object", Bucket=bucket, Key=key, **wanted)
                size = begin + answer.get("ContentLength", 0)
                async with answer["Body"] as body:
                    while data := await body.read(_READ_BYTES):
                        file.write(data)

            await self._repeats.call_async(f"download {rpath}", read)

    async def _abort_uploads(self, folder: str) -> int:
        """Abort the unfinished uploads below a folder, and return how many there were."""
        bucket, _, prefix = folder.partition("/")
        aborted, marker = 0, {"KeyMarker": ""}
        while marker:
            page = await self._call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/", **marker)
            for found in page.get("Uploads") or []:
                if found["Key"].startswith(f"{prefix}/"):  # not every store heeds the prefix
                    with suppress(FileNotFoundError):  # another one has ended it
                        await super()._abort_mpu(bucket, found["Key"], found["UploadId"])
                        aborted += 1
            names = ("KeyMarker", "UploadIdMarker") if page.get("IsTruncated") else ()
            following = {name: page[f"Next{name}"] for name in names if f"Next{name}" in page}
            marker = following if following != marker else {}  # not every store goes on
        return aborted

    abort_uploads = sync_wrapper(_abort_uploads)
