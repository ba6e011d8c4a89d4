"""Run directories in object stores, and on a disk by the same rules: a real S3 protocol, and fsspec's memory.

Each storage is the one of a whole session, so tests look at a run directory of their own.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import gc
import io
import os
import pickle
import socket
import threading
import uuid
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from aiobotocore.response import AioStreamingBody
from botocore.exceptions import ClientError, FlexibleChecksumError
from pyarrow import fs
from s3fs import S3FileSystem
from s3fs.errors import translate_boto_error

from prefect_elastic_train.core.checkpoint_names import loop_name, physical_name
from prefect_elastic_train.core.outcomes import ConfigurationError, ElasticTrainError, StorageFaultError
from prefect_elastic_train.core.records import CommitRecord, encode
from prefect_elastic_train.core.storage_settings import FsspecStorageSettings, S3StorageSettings
from prefect_elastic_train.elastic import object_filesystem
from prefect_elastic_train.elastic.checkpoints import run_filesystem
from prefect_elastic_train.elastic.object_filesystem import ObjectFilesystem
from prefect_elastic_train.runs import commits, layout
from prefect_elastic_train.runs.commits import CommitLog, FencedOffError, all_commits
from prefect_elastic_train.runs.model import RunDirectory
from prefect_elastic_train.runs.resume import remove_interrupted_uploads
from prefect_elastic_train.storage import objects as objects_module
from prefect_elastic_train.storage import s3 as s3_module
from prefect_elastic_train.storage.files import LocalDiskError
from prefect_elastic_train.storage.object_store import ObjectRunStore
from prefect_elastic_train.storage.objects import ObjectClient, TransferFile
from prefect_elastic_train.storage.opening import Storage, open_storage
from prefect_elastic_train.storage.retries import Retries
from prefect_elastic_train.storage.retrying_store import RetryingStore
from tests.support.processes import wait_for
from tests.support.s3 import ACCESS_KEY, FaultProxy, MotoServer, Which
from tests.unit.ray_storage import Ray
from tests.unit.support import Training, begin, claim, start_from, with_result

on_all_storages = pytest.mark.parametrize("storage", ["disk", "memory", "s3"], indirect=True)
on_object_stores = pytest.mark.parametrize("storage", ["memory", "s3"], indirect=True)
on_s3 = pytest.mark.parametrize("storage", ["s3"], indirect=True)
on_a_disk = pytest.mark.parametrize("storage", ["disk"], indirect=True)

KIB = 1024


def client_of(run: RetryingStore) -> ObjectClient:
    """Give the client that a run directory is reached by."""
    assert isinstance(run.inner, ObjectRunStore)
    return run.inner.client


def write_tree(folder: Path, files: dict[str, bytes]) -> Path:
    """Write files on this machine's disk."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def read_tree(folder: Path) -> dict[str, bytes]:
    """Read all files below a folder, hidden ones too."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def upload(run: RetryingStore, source: Path, name: str, attempt: int = 1) -> None:
    """Upload a folder as a worker does."""
    filesystem = run_filesystem(run, attempt)
    filesystem.create_dir(f"{run.path}/{name}")
    filesystem.handler.upload_folder(str(source), f"{run.path}/{name}")


def content(run: RetryingStore, name: str) -> dict[str, bytes]:
    """Read what is below a folder of the run."""
    return {file: run.read(f"{name}/{file}") or b"" for file in run.file_sizes(name) or {}}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have files sent in parts from 64 KiB on."""
    monkeypatch.setattr(objects_module, "PART_BYTES", 64 * KIB)


Arguments = dict[str, Any]


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Arguments]]:
    """What s3fs asks the store for, in order: methods of botocore's client with their arguments."""
    asked: list[tuple[str, Arguments]] = []
    call = S3FileSystem._call_s3

    async def look(self: Any, method: str, *more: Any, **arguments: Any) -> Any:
        asked.append((method, arguments))
        return await call(self, method, *more, **arguments)

    monkeypatch.setattr(S3FileSystem, "_call_s3", look)
    return asked


def unfinished(server: MotoServer, run: RetryingStore) -> list[str]:
    """Give the objects of a run whose uploads are neither completed nor aborted."""
    prefix = run.path.partition("/")[2]
    return [key for key, _ in server.incomplete_uploads("training") if key.startswith(f"{prefix}/")]


def tree(folder: Path) -> dict[str, bytes]:
    """Write files of all sizes that matter for small parts, and give them."""
    sizes = {"empty": 0, "one": 1, "a/part": 64 * KIB, "a/b/more": 64 * KIB + 1, "large": 300 * KIB, "c/d/e/f": 100}
    files = {name: os.urandom(size) for name, size in sizes.items()}
    write_tree(folder, files)
    return files


@pytest.mark.parametrize("storage", ["memory", "s3"], indirect=True)
def test_a_checkpoint_without_files_is_committed_and_read_back_empty(run: RetryingStore, tmp_path: Path) -> None:
    training, name = Training(run, begin(run).attempt), physical_name("a", 1)
    (tmp_path / "empty").mkdir()
    upload(run, tmp_path / "empty", name)
    training.commit(name)
    assert RunDirectory(run).resume_point.checkpoint == name
    run_filesystem(run, 1).handler.download_folder(f"{run.path}/{name}", str(tmp_path / "back"))
    assert list((tmp_path / "back").iterdir()) == []


# Small objects


@on_all_storages
def test_an_object_is_created_once_replaced_and_deleted(run: RetryingStore) -> None:
    assert run.create("a/b.json", b"first")
    assert not run.create("a/b.json", b"second")
    assert run.read("a/b.json") == b"first"
    run.replace("a/b.json", b"third")
    assert run.read("a/b.json") == b"third"
    run.delete("a/b.json")
    run.delete("a/b.json")
    assert run.read("a/b.json") is None
    assert run.create("a/b.json", b"")
    assert run.read("a/b.json") == b""


@on_all_storages
def test_what_is_not_there_reads_as_nothing(run: RetryingStore) -> None:
    run.create("there", b"")
    assert run.read("a/b") is None
    assert run.names("a") == run.folders("a") == []
    assert run.file_sizes("a") is None
    assert run.delete_folder("a") is False
    assert run.empty_folder("a") is False
    assert run.read("there/below") is None


@on_all_storages
def test_names_are_objects_and_folders_are_folders_both_sorted(run: RetryingStore) -> None:
    for name in ("b", "a", "d/x", "c/x", "c/y/z"):
        run.create(name, b"12")
    assert (run.names(""), run.folders()) == (["a", "b"], ["c", "d"])
    assert (run.names("c"), run.folders("c")) == (["x"], ["y"])
    assert run.file_sizes("c") == {"x": 2, "y/z": 2}


@on_all_storages
def test_a_folder_goes_with_all_below_it_and_nothing_beside_it(run: RetryingStore) -> None:
    for name in ("ckpt-1/a", "ckpt-1/b/c", "ckpt-10/a", "ckpt-1.txt"):
        run.create(name, b"x")
    seen: list[Any] = []
    assert run.delete_folder("ckpt-1", lambda: seen.append(run.file_sizes("ckpt-1")))
    assert seen == [{"a": 1, "b/c": 1}], "deleted before it was asked, or never asked"
    assert (run.names(""), run.folders()) == (["ckpt-1.txt"], ["ckpt-10"])
    assert run.empty_folder("ckpt-10")
    assert not run.file_sizes("ckpt-10")


@on_all_storages
def test_a_folder_that_shall_stay_stays(run: RetryingStore) -> None:
    run.create("ckpt/a", b"x")

    def refuse() -> None:
        raise FencedOffError("taken over")

    for delete in (run.delete_folder, run.empty_folder):
        with pytest.raises(FencedOffError):
            delete("ckpt", refuse)
    assert run.read("ckpt/a") == b"x"


@on_all_storages
def test_the_runs_of_a_storage_are_its_folders_but_hidden_ones(storage: Storage) -> None:
    name = uuid.uuid4().hex
    storage.run(name).create("a", b"")
    storage.run(f".{name}").create("a", b"")
    assert name in storage.run_names()
    assert f".{name}" not in storage.run_names()
    assert storage.run(name).uri == f"{storage.uri}/{name}"


@on_all_storages
def test_a_run_travels_to_other_processes(run: RetryingStore) -> None:
    run.create("a", b"x")
    for pickler in (pickle, cloudpickle):
        copy = pickle.loads(pickler.dumps(run))
        assert (copy.uri, copy.retries) == (run.uri, run.retries)
        filesystem = run_filesystem(run, 1)
        assert pickle.loads(pickler.dumps(filesystem)) == filesystem
    assert copy.read("a") == b"x"


@on_s3
def test_many_objects_go_in_few_requests(
    run: RetryingStore, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_module, "_DELETE_AT_ONCE", 10)
    for number in range(25):
        run.create(f"ckpt/{number}", b"")
    proxy.reset_counters()
    assert run.delete_folder("ckpt")
    assert run.file_sizes("ckpt") is None
    assert proxy.count("POST", "delete") == 3


@on_s3
def test_what_a_store_refuses_of_many_deletions_is_raised(run: RetryingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    call = S3FileSystem._call_s3
    refusals: list[dict[str, str]] = []

    async def refuse_some(self: Any, method: str, *more: Any, **arguments: Any) -> Any:
        answer = await call(self, method, *more, **arguments)
        return {**answer, "Errors": refusals} if method == "delete_objects" and refusals else answer

    monkeypatch.setattr(S3FileSystem, "_call_s3", refuse_some)  # moto refuses all or nothing
    patient = RetryingStore(run.inner, Retries(0, run.uri))
    for code, permanent in (("SlowDown", False), ("AccessDenied", True)):
        run.create("ckpt/a", b"")
        run.create("ckpt/b", b"")
        refusals[:] = [{"Key": "ckpt/b", "Code": code, "Message": "it is locked"}]
        with pytest.raises(StorageFaultError, match="it is locked") as told:
            patient.delete_folder("ckpt")
        assert told.value.permanent == permanent
    refusals.clear()
    run.create("ckpt/a", b"")
    assert patient.delete_folder("ckpt")


@on_s3
def test_a_store_that_cannot_delete_many_at_once_is_asked_for_each(run: RetryingStore, proxy: FaultProxy) -> None:
    for name in "abc":
        run.create(f"ckpt/{name}", b"")
    proxy.refuse("NotImplemented", status=501, when=Which(("POST",), contains="delete"))
    assert run.delete_folder("ckpt")
    assert run.file_sizes("ckpt") is None


@on_s3
def test_exactly_one_of_several_threads_creates_an_object(run: RetryingStore) -> None:
    names, threads = 12, 6
    together = threading.Barrier(threads)

    def create(me: int) -> list[int]:
        won = []
        for number in range(names):
            together.wait(30)
            if run.create(f"attempts/{number}", b"%d" % me):
                won.append(number)
        return won

    with ThreadPoolExecutor(threads) as pool:
        won = list(pool.map(create, range(threads)))
    assert sorted(number for numbers in won for number in numbers) == list(range(names))
    for me, numbers in enumerate(won):
        assert all(run.read(f"attempts/{number}") == b"%d" % me for number in numbers)


@on_s3
def test_a_creation_whose_answer_was_lost_has_succeeded(run: RetryingStore, proxy: FaultProxy) -> None:
    proxy.lose_answer_of("PUT", "commits/1")
    assert run.create("commits/1", b"mine")
    assert proxy.faults_given == {"lost_answer": 1}
    assert not run.create("commits/1", b"yours")
    assert run.read("commits/1") == b"mine"


@on_s3
def test_a_creation_that_was_overtaken_between_its_tries_has_failed(run: RetryingStore, proxy: FaultProxy) -> None:
    proxy.faults(rate=1, kinds=["reset_before"], when=Which(("PUT",)))
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(run.create, "commits/1", b"late")
        wait_for(lambda: proxy.faults_given["reset_before"], 20, "the first try")
        direct = S3StorageSettings(**{**dict(client_of(run).settings), "retry_seconds": 0})
        proxy.faults(None)
        mine = open_storage(direct).folder(run.path).create("commits/1", b"mine")
        assert mine != late.result(30), "both have won, or none"
    assert run.read("commits/1") == (b"mine" if mine else b"late")


@on_s3
def test_a_store_that_does_not_say_which_condition_failed_is_understood(run: RetryingStore, proxy: FaultProxy) -> None:
    run.create("taken", b"x")
    proxy.refuse("PreconditionFailed", status=412, when=Which(("PUT",)))
    assert run.create("taken", b"y") is False


@on_s3
@pytest.mark.parametrize(("names", "lost"), [("a", ("DELETE", "ckpt/a")), ("abc", ("POST", "delete"))])
def test_a_deletion_whose_answer_was_lost_has_found_something(
    run: RetryingStore, proxy: FaultProxy, names: str, lost: tuple[str, str]
) -> None:
    for name in names:
        run.create(f"ckpt/{name}", b"")
    proxy.lose_answer_of(*lost)
    assert run.delete_folder("ckpt")
    assert run.file_sizes("ckpt") is None
    assert proxy.faults_given == {"lost_answer": 1}


# Checkpoints


@on_all_storages
def test_a_folder_comes_back_as_it_was(run: RetryingStore, tmp_path: Path, small_parts: None) -> None:
    files = tree(tmp_path / "source")
    begin(run)
    upload(run, tmp_path / "source", "ckpt")
    assert content(run, "ckpt") == files
    assert run.file_sizes("ckpt") == {name: len(data) for name, data in files.items()}
    filesystem = run_filesystem(run, 1)
    fs.copy_files(f"{run.path}/ckpt", str(tmp_path / "by-pyarrow"), filesystem, fs.LocalFileSystem())
    assert read_tree(tmp_path / "by-pyarrow") == files
    if isinstance(run.inner, ObjectRunStore):
        filesystem.handler.download_folder(f"{run.path}/ckpt", str(tmp_path / "target"))
        assert read_tree(tmp_path / "target") == files


@on_all_storages
def test_a_single_file_is_uploaded_by_its_name(run: RetryingStore, tmp_path: Path) -> None:
    begin(run)
    (tmp_path / "model.pt").write_bytes(b"weights")
    filesystem = run_filesystem(run, 1)
    filesystem.create_dir(f"{run.path}/ckpt")
    filesystem.handler.upload_folder(str(tmp_path / "model.pt"), f"{run.path}/ckpt/model.pt")
    assert run.read("ckpt/model.pt") == b"weights"


@on_s3
def test_forty_megabytes_pass_in_parts(run: RetryingStore, tmp_path: Path, proxy: FaultProxy) -> None:
    data = os.urandom(40 << 20)
    write_tree(tmp_path / "source", {"model.pt": data})
    begin(run)
    proxy.reset_counters()
    upload(run, tmp_path / "source", "ckpt")
    assert proxy.count("PUT", "partNumber=") == 3
    run_filesystem(run, 1).handler.download_folder(f"{run.path}/ckpt", str(tmp_path / "target"))
    assert (tmp_path / "target" / "model.pt").read_bytes() == data


@on_s3
def test_each_part_is_sent_with_its_checksum_which_the_end_of_the_upload_repeats(
    run: RetryingStore, tmp_path: Path, proxy: FaultProxy, small_parts: None, requests: list[tuple[str, Arguments]]
) -> None:
    large = tree(tmp_path)["large"]
    begin(run)
    proxy.reset_counters()
    upload(run, tmp_path, "ckpt")
    parts = [large[begin : begin + 64 * KIB] for begin in range(0, len(large), 64 * KIB)]
    expected = {
        number: base64.b64encode(zlib.crc32(part).to_bytes(4, "big")).decode()
        for number, part in enumerate(parts, start=1)
    }
    sent = {
        int(seen.query.partition("partNumber=")[2].partition("&")[0]): seen.checksums["x-amz-checksum-crc32"]
        for seen in proxy.requests
        if seen.path.endswith("ckpt/large") and "partNumber=" in seen.query
    }
    (ended,) = [arguments for method, arguments in requests if method == "complete_multipart_upload"]
    assert {part["PartNumber"]: part["ChecksumCRC32"] for part in ended["MultipartUpload"]["Parts"]} == expected
    assert sent == expected


@on_s3
def test_a_copy_in_parts_promises_no_checksums_that_it_does_not_know(
    run: RetryingStore, monkeypatch: pytest.MonkeyPatch, requests: list[tuple[str, Arguments]]
) -> None:
    monkeypatch.setattr("s3fs.core.MANAGED_COPY_THRESHOLD", KIB)
    data = os.urandom(2 * KIB)
    run.create("ckpt/model.pt", data)
    client_of(run).copy_folder(f"{run.path}/ckpt", f"{run.path}/copy")
    assert content(run, "copy") == {"model.pt": data}
    (begun,) = [arguments for method, arguments in requests if method == "create_multipart_upload"]
    assert "ChecksumAlgorithm" not in begun


@on_s3
@pytest.mark.parametrize(("where", "code"), [("?uploads", "NotImplemented"), ("partNumber=", "InvalidRequest")])
def test_a_store_that_takes_no_checksums_gets_the_parts_without(
    run: RetryingStore,
    tmp_path: Path,
    server: MotoServer,
    proxy: FaultProxy,
    small_parts: None,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    code: str,
) -> None:
    files = tree(tmp_path)
    begin(run)
    monkeypatch.setattr(client_of(run)._files(), "sends_checksums", True)  # the client is the one of all tests
    proxy.refuse(code, status=501 if code == "NotImplemented" else 400, when=Which(contains=where, checksum="x-amz-"))
    upload(run, tmp_path, "first")
    assert proxy.faults_given["refused"] >= 1
    proxy.reset_counters()
    upload(run, tmp_path, "second")
    assert proxy.faults_given["refused"] == 0, "it is remembered"
    assert content(run, "first") == content(run, "second") == files
    assert unfinished(server, run) == []


@on_s3
@pytest.mark.parametrize(
    ("method", "contains"),
    [
        ("POST", "large?uploads"),
        ("PUT", "partNumber=2"),
        ("POST", "large?uploadId="),
        ("PUT", "ckpt/one"),
    ],
    ids=["beginning of an upload", "part", "end of an upload", "small file"],
)
def test_a_lost_answer_leaves_whole_objects(
    run: RetryingStore,
    tmp_path: Path,
    server: MotoServer,
    proxy: FaultProxy,
    small_parts: None,
    method: str,
    contains: str,
) -> None:
    files = tree(tmp_path)
    begin(run)
    proxy.lose_answer_of(method, contains)
    upload(run, tmp_path, "ckpt")
    assert proxy.faults_given == {"lost_answer": 1}
    assert content(run, "ckpt") == files
    # Nobody knows the one whose beginning was not answered, and the end of the attempt removes it.
    assert run.abandon_uploads() == ("uploads" in contains)
    assert unfinished(server, run) == []


@on_s3
def test_a_part_that_fails_is_sent_again_and_no_other(
    run: RetryingStore, tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large").write_bytes(os.urandom(1000 * KIB))
    begin(run)
    call = S3FileSystem._call_s3
    sent: list[int] = []

    async def be_busy_once(self: Any, method: str, *more: Any, **arguments: Any) -> Any:
        if method == "upload_part":
            sent.append(arguments["PartNumber"])
            if sent.count(11) == 1 and sent[-1] == 11:  # a connection that is cut aiohttp makes good by itself
                raise OSError(errno.EBUSY, "Please reduce your request rate")
        return await call(self, method, *more, **arguments)

    monkeypatch.setattr(S3FileSystem, "_call_s3", be_busy_once)
    upload(run, tmp_path, "ckpt")
    assert sorted(sent) == sorted([*range(1, 17), 11])


@on_s3
def test_an_upload_that_is_refused_in_the_middle_leaves_no_parts(
    run: RetryingStore, tmp_path: Path, server: MotoServer, proxy: FaultProxy, small_parts: None
) -> None:
    tree(tmp_path)
    begin(run)
    proxy.refuse("AccessDenied", when=Which(("PUT",), contains="partNumber=4"))
    with pytest.raises(StorageFaultError) as refused:
        upload(run, tmp_path, "ckpt")
    assert (refused.value.kind, refused.value.permanent) == ("credentials", True)
    assert "large" in str(refused.value)
    assert run.read("ckpt/large") is None
    assert unfinished(server, run) == []


def test_an_upload_is_aborted_when_nobody_sends_a_part_of_it_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    async def call(self: Any, method: str, **arguments: Any) -> None:
        seen.append(method)
        try:
            await asyncio.sleep(60 if method == "upload_part" else 0)
        finally:
            seen.append(f"end of {method}")

    async def once(what: str, work: Callable[[], Any]) -> Any:
        return await work()

    async def fail() -> None:
        files = s3_module.S3Files(repeated=once, asynchronous=True, skip_instance_cache=True)
        upload = {"Bucket": "training", "Key": "large", "UploadId": "one"}
        part = asyncio.ensure_future(files._call_s3("upload_part", PartNumber=2, **upload))
        await asyncio.sleep(0)
        await files._call_s3("abort_multipart_upload", **upload)
        assert part.cancelled()

    monkeypatch.setattr(s3_module.S3Files, "_call_bounded", call)
    asyncio.run(fail())
    assert seen == ["upload_part", "end of upload_part", "abort_multipart_upload", "end of abort_multipart_upload"]


@on_s3
def test_a_file_that_shrinks_while_it_is_uploaded_is_said(
    run: RetryingStore, tmp_path: Path, small_parts: None
) -> None:
    path = tmp_path / "large"
    path.write_bytes(bytes(150 * KIB))
    with pytest.raises(ValueError, match="large has changed while it was uploaded"):
        client_of(run).upload([TransferFile(str(path), f"{run.path}/large", 200 * KIB)])


@on_s3
def test_a_storm_of_faults_costs_nothing_but_time(
    run: RetryingStore, tmp_path: Path, server: MotoServer, proxy: FaultProxy, small_parts: None
) -> None:
    files = tree(tmp_path / "source")
    begin(run)
    proxy.faults(rate=0.3, stall_seconds=0.1, seed=5)
    upload(run, tmp_path / "source", "ckpt")
    assert run.create("commits/1", b"mine")
    run.replace("state", b"new")
    found = (run.read("commits/1"), run.read("state"), run.names("commits"))
    sizes = run.file_sizes("ckpt")
    run_filesystem(run, 1).handler.download_folder(f"{run.path}/ckpt", str(tmp_path / "target"))
    given = proxy.faults_given
    proxy.calm()
    assert sum(given.values()) >= 5
    assert found == (b"mine", b"new", ["1"])
    assert sizes == {name: len(data) for name, data in files.items()}
    assert content(run, "ckpt") == read_tree(tmp_path / "target") == files
    run.abandon_uploads()
    assert unfinished(server, run) == []


@on_s3
def test_a_download_goes_on_where_its_connection_was_cut(
    run: RetryingStore, tmp_path: Path, proxy: FaultProxy, requests: list[tuple[str, Arguments]]
) -> None:
    data = os.urandom(24 << 20)  # more than is on its way at a time
    run.create("ckpt/model.pt", data)

    class Cutting(io.FileIO):
        """The file that is read into; what comes first cuts the connection."""

        def write(self, piece: Any) -> int:
            if not self.tell():
                with proxy.outage():
                    pass
            return super().write(piece) or 0

    requests.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(s3_module, "open", Cutting, raising=False)
        run_filesystem(run, 1).handler.download_folder(f"{run.path}/ckpt", str(tmp_path))
    assert read_tree(tmp_path) == {"model.pt": data}
    ranges = [arguments.get("Range", "all") for method, arguments in requests if method == "get_object"]
    assert ranges[0] == "all"
    assert len(ranges) > 1
    assert all(int(asked.removeprefix("bytes=").split("-")[0]) > 0 for asked in ranges[1:])


@on_s3
@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (ConnectionResetError(), ["all"]),
        (FlexibleChecksumError(error_msg="wrong"), ["all", "all"]),
    ],
    ids=["cut off", "wrong checksum"],
)
def test_a_download_that_fails_after_its_last_byte_asks_for_no_range_after_it(
    run: RetryingStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    requests: list[tuple[str, Arguments]],
    error: Exception,
    asked: list[str],
) -> None:
    run.create("ckpt/a", b"123")
    failed: list[bytes] = []
    read = AioStreamingBody.read

    async def fail_at_the_end(self: Any, *size: Any) -> bytes:
        data = await read(self, *size)
        if not data and not failed:
            failed.append(data)
            raise error
        return data

    monkeypatch.setattr(AioStreamingBody, "read", fail_at_the_end)
    requests.clear()
    client_of(run).download([TransferFile(str(tmp_path / "a"), f"{run.path}/ckpt/a", 3)])
    assert read_tree(tmp_path) == {"a": b"123"}
    assert [found.get("Range", "all") for method, found in requests if method == "get_object"] == asked


@pytest.mark.parametrize("to", ["upload", "download"])
@on_object_stores
def test_a_full_disk_of_this_machine_is_not_the_storages_fault(
    run: RetryingStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"123")
    run.create("ckpt/a", b"123")
    files = client_of(run)._files()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "put_file" if to == "upload" else "get_file", fail)
    with pytest.raises(LocalDiskError, match=f"this machine's own disk failed at {path}"):
        getattr(client_of(run), to)([TransferFile(str(path), f"{run.path}/ckpt/a", 3)])


@on_s3
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_a_disk_of_this_machine_that_fails_in_the_middle_of_a_download_is_not_the_storages_fault(
    run: RetryingStore, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(io.FileIO):
        def write(self, piece: Any) -> int:
            raise OSError(number, os.strerror(number))

    run.create("ckpt/a", bytes(300 * KIB))
    monkeypatch.setattr(s3_module, "open", Failing, raising=False)
    with pytest.raises(LocalDiskError, match="this machine's own disk failed at "):
        client_of(run).download([TransferFile(str(tmp_path / "a"), f"{run.path}/ckpt/a", 300 * KIB)])


@on_object_stores
def test_a_download_that_fails_leaves_no_half_of_a_file(run: RetryingStore, tmp_path: Path) -> None:
    run.create("ckpt/whole", b"123")
    storage = open_storage(client_of(run).settings, retry_seconds=0.3)
    client = client_of(storage.folder(run.path))
    files = [TransferFile(str(tmp_path / name), f"{run.path}/ckpt/{name}", 3) for name in ("whole", "missing")]
    with pytest.raises(FileNotFoundError, match=r"ckpt/missing: there is no such object"):
        client.download(files)
    assert read_tree(tmp_path) in ({}, {"whole": b"123"})
    run.replace("ckpt/whole", b"12")  # shorter than it was said to be
    with pytest.raises(Exception, match=r"2|InvalidRange"):
        client.download(files[:1])
    assert [path.name for path in tmp_path.iterdir()] in ([], ["whole"])


@on_object_stores
def test_a_checkpoint_that_is_not_there_cannot_be_downloaded(run: RetryingStore, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="ckpt: there is no such checkpoint"):
        run_filesystem(run, 1).handler.download_folder(f"{run.path}/ckpt", str(tmp_path))


@on_object_stores
def test_a_name_that_leads_out_of_the_checkpoint_is_refused(
    run: RetryingStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ObjectClient, "find", lambda self, folder: {"../../escaped": 1})
    with pytest.raises(ElasticTrainError, match="leads out of it"):
        run_filesystem(run, 1).handler.download_folder(f"{run.path}/ckpt", str(tmp_path / "a" / "b"))
    assert list(tmp_path.rglob("escaped")) == []


# The fence


@on_all_storages
def test_a_fenced_off_attempt_uploads_nothing(run: RetryingStore, tmp_path: Path) -> None:
    write_tree(tmp_path, {"model.pt": b"old"})
    begin(run)
    begin(run)
    filesystem = run_filesystem(run, 1)
    run_filesystem(run, 2).create_dir(f"{run.path}/ckpt")
    for change in (
        lambda: filesystem.handler.upload_folder(str(tmp_path), f"{run.path}/ckpt"),
        lambda: filesystem.open_output_stream(f"{run.path}/ckpt/other").close(),
        lambda: filesystem.delete_dir(f"{run.path}/ckpt"),
        lambda: filesystem.delete_file(f"{run.path}/ckpt/model.pt"),
        lambda: filesystem.create_dir(f"{run.path}/ckpt-2"),
    ):
        with pytest.raises(FencedOffError):
            change()
    assert not run.file_sizes("ckpt")


@on_s3
def test_one_whose_unfinished_upload_a_successor_abandons_is_told_that_it_was_taken_over(
    run: RetryingStore,
    tmp_path: Path,
    server: MotoServer,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
    small_parts: None,
) -> None:
    write_tree(tmp_path, {"large": b"o" * 300 * KIB})
    begin(run)
    call = S3FileSystem._call_s3

    async def be_taken_over(self: Any, method: str, *more: Any, **arguments: Any) -> Any:
        answer = await call(self, method, *more, **arguments)
        if method == "create_multipart_upload":
            await asyncio.to_thread(take_over)
        return answer

    def take_over() -> None:
        begin(run)
        assert run.abandon_uploads() == 1
        # As S3 says it; moto fails at that.
        proxy.refuse("NoSuchUpload", status=404, when=Which(("PUT",), contains="partNumber="))

    monkeypatch.setattr(S3FileSystem, "_call_s3", be_taken_over)
    with pytest.raises(FencedOffError):
        upload(run, tmp_path, "ckpt")
    assert run.file_sizes("ckpt") is None
    assert unfinished(server, run) == []


@on_s3
@pytest.mark.parametrize("heeds_prefix", [True, False])
def test_unfinished_uploads_of_a_run_are_abandoned_and_those_of_others_are_not(
    run: RetryingStore, server: MotoServer, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, heeds_prefix: bool
) -> None:
    client, prefix = server.client(), run.path.partition("/")[2]
    others = [f"{prefix}-other/ckpt/a", f"above/{prefix}/ckpt/a"]
    for key in (f"{prefix}/ckpt/a", f"{prefix}/ckpt/b", *others):
        client.create_multipart_upload(Bucket="training", Key=key)
    call = S3FileSystem._call_s3

    async def list_all(self: Any, method: str, *more: Any, **arguments: Any) -> Any:
        if method == "list_multipart_uploads" and not heeds_prefix:
            arguments["Prefix"] = ""
        return await call(self, method, *more, **arguments)

    monkeypatch.setattr(S3FileSystem, "_call_s3", list_all)
    proxy.refuse("AccessDenied", when=Which(contains="uploads"))
    assert run.abandon_uploads() == 0, "a key that may not list uploads leaves them"
    proxy.calm()
    assert run.abandon_uploads() == 2
    assert run.abandon_uploads() == 0
    left = [(key, upload) for key, upload in server.incomplete_uploads("training") if prefix in key]
    assert sorted(key for key, _ in left) == sorted(others)
    for key, upload_id in left:
        client.abort_multipart_upload(Bucket="training", Key=key, UploadId=upload_id)


@on_s3
def test_an_abort_that_is_refused_is_told_and_no_upload_that_is_gone_counts(
    run: RetryingStore, server: MotoServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client, prefix = server.client(), run.path.partition("/")[2]
    keys = [f"{prefix}/ckpt/{name}" for name in "ab"]
    uploads = [(key, client.create_multipart_upload(Bucket="training", Key=key)["UploadId"]) for key in keys]
    call = S3FileSystem._call_s3
    listings = 0
    refusal = "AccessDenied"

    async def refuse(self: Any, method: str, *more: Any, **arguments: Any) -> Any:
        nonlocal listings
        if method == "abort_multipart_upload" and arguments["Key"] == keys[0]:
            error = {"Error": {"Code": refusal, "Message": "as the store says"}}
            raise translate_boto_error(ClientError(error, "AbortMultipartUpload"))
        answer = await call(self, method, *more, **arguments)
        if method == "list_multipart_uploads":
            listings += 1
            assert listings < 9, "asked without end"
            answer = {**{name: answer[name] for name in answer if "Next" not in name}, "IsTruncated": True}
        return answer

    monkeypatch.setattr(S3FileSystem, "_call_s3", refuse)
    with caplog.at_level("INFO"):
        assert run.abandon_uploads() == 0
    assert "as the store says" in caplog.text
    refusal = "NoSuchUpload"
    assert run.abandon_uploads() == 1
    assert listings == 2
    client.abort_multipart_upload(Bucket="training", Key=uploads[0][0], UploadId=uploads[0][1])


# What goes wrong for good


@pytest.fixture
def nowhere(s3_settings: S3StorageSettings) -> Storage:
    """A storage in a bucket that does not exist."""
    settings = s3_settings.model_copy(update={"bucket_path": "no-such-bucket/runs"})
    return open_storage(settings)


def test_a_bucket_that_does_not_exist_is_no_empty_run(nowhere: Storage, tmp_path: Path) -> None:
    run = nowhere.run("mnist")
    (tmp_path / "model.pt").write_bytes(b"x")
    asked: list[Callable[[], Any]] = [
        lambda: run.read("a"),
        lambda: run.names("a"),
        lambda: run.folders(),
        lambda: run.file_sizes("a"),
        lambda: run.create("a", b""),
        lambda: run.replace("a", b""),
        lambda: run.delete("a"),
        lambda: run.delete_folder("a"),
        lambda: run.abandon_uploads(),
        lambda: nowhere.run_names(),
        lambda: RunDirectory(run).resume_point,
        lambda: run_filesystem(run, 1).get_file_info(f"{run.path}/ckpt"),
        lambda: run_filesystem(run, 1).handler.download_folder(f"{run.path}/ckpt", str(tmp_path / "target")),
        lambda: run_filesystem(run, 1).handler.upload_folder(str(tmp_path), f"{run.path}/ckpt"),
    ]
    for ask in asked:
        with pytest.raises(StorageFaultError, match="no such bucket") as refused:
            ask()
        assert refused.value.permanent
        assert "s3://no-such-bucket/runs" in str(refused.value)


@on_s3
def test_wrong_keys_are_said_at_once_and_are_not_in_the_message(run: RetryingStore, proxy: FaultProxy) -> None:
    proxy.allow_keys({"AKIA" + "Z" * 16})
    for ask in (lambda: run.read("a"), lambda: run.delete("a"), lambda: run.create("a", b"")):
        proxy.reset_counters()
        with pytest.raises(StorageFaultError) as refused:
            ask()
        assert (refused.value.kind, refused.value.permanent) == ("credentials", True)
        assert len(proxy.requests) == 1, "repeated"
        assert ACCESS_KEY not in str(refused.value)
        assert "secret-of-the-tests" not in str(refused.value)


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 100 Continue\r\n\r\n"], ids=["nothing", "go on"])
def test_a_store_that_takes_a_connection_and_reads_no_body_is_not_waited_for_without_end(
    s3_settings: S3StorageSettings, monkeypatch: pytest.MonkeyPatch, says: bytes
) -> None:
    monkeypatch.setattr(s3_module, "_CALL_SECONDS", 0.5)
    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    taken.append(listening.accept()[0])
                    taken[-1].sendall(says)

        threading.Thread(target=serve, daemon=True).start()
        settings = s3_settings.model_copy(
            update={"endpoint_url": f"http://127.0.0.1:{listening.getsockname()[1]}", "bucket_path": "bucket/runs"}
        )
        run = open_storage(settings, retry_seconds=0.3).run("mnist")
        told: list[StorageFaultError] = []

        def write(put: Callable[[str, bytes], object]) -> None:
            try:
                put("a", bytes(1000))
            except StorageFaultError as error:
                told.append(error)

        writers = [threading.Thread(target=write, args=(put,), daemon=True) for put in (run.replace, run.create)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(15)
        for connection in taken:
            connection.close()
    assert [(error.kind, error.permanent) for error in told] == [("connection", False)] * 2
    assert ["no answer to put_object" in str(error) for error in told] == [True] * 2, told


def test_a_package_of_fsspec_that_is_missing_is_named() -> None:
    storage = open_storage(FsspecStorageSettings(url="gs://my-bucket/runs"))
    with pytest.raises(ConfigurationError, match=r"fsspec cannot open gs:// here.*gcsfs"):
        storage.run("mnist").read("a")


# Streams


@on_all_storages
def test_a_stream_becomes_a_file_when_it_is_closed(run: RetryingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_filesystem, "_SPOOL_BYTES", 1000)
    begin(run)
    filesystem = run_filesystem(run, 1)
    filesystem.create_dir(f"{run.path}/ckpt")
    data = os.urandom(10_000)
    with filesystem.open_output_stream(f"{run.path}/ckpt/model.pt") as stream:
        for start in range(0, len(data), 777):
            stream.write(data[start : start + 777])
        assert stream.tell() == len(data)
        assert not run.file_sizes("ckpt")
        assert run.names("ckpt") == []
        assert filesystem.get_file_info(fs.FileSelector(f"{run.path}/ckpt", allow_not_found=True)) == []
    assert content(run, "ckpt") == {"model.pt": data}
    with filesystem.open_output_stream(f"{run.path}/ckpt/model.pt") as stream:
        stream.write(b"anew")
    assert content(run, "ckpt") == {"model.pt": b"anew"}


@on_all_storages
def test_a_stream_that_is_dropped_writes_nothing(run: RetryingStore) -> None:
    begin(run)
    filesystem = run_filesystem(run, 1)
    filesystem.create_dir(f"{run.path}/ckpt")
    stream = filesystem.open_output_stream(f"{run.path}/ckpt/model.pt")
    stream.write(b"half")
    del stream
    assert not run.file_sizes("ckpt")
    if not isinstance(run.inner, ObjectRunStore):
        assert os.listdir(f"{run.path}/ckpt") == []


@on_all_storages
def test_a_file_is_read_anywhere_and_in_pieces(run: RetryingStore) -> None:
    data = os.urandom(100_000)
    run.create("ckpt/model.pt", data)
    filesystem = run_filesystem(run, 1)
    with filesystem.open_input_file(f"{run.path}/ckpt/model.pt") as file:
        assert file.size() == len(data)
        assert file.read(10) == data[:10]
        file.seek(50_000)
        assert (file.tell(), file.read(20)) == (50_000, data[50_000:50_020])
        assert file.read_at(7, 99_990) == data[99_990:99_997]
        file.seek(-5, 2)
        assert file.read() == data[-5:]
        assert file.read() == b""
    with filesystem.open_input_stream(f"{run.path}/ckpt/model.pt") as stream:
        assert b"".join(iter(lambda: stream.read(7_777), b"")) == data
    with pytest.raises(FileNotFoundError):
        filesystem.open_input_file(f"{run.path}/ckpt/missing").read()


@on_all_storages
def test_files_and_folders_are_described_as_pyarrow_expects(run: RetryingStore) -> None:
    for name in ("ckpt/model.pt", "ckpt/rank-0/a", "ckpt/rank-0/b/c"):
        run.create(name, b"123")
    begin(run)
    filesystem, base = run_filesystem(run, 1), f"{run.path}/ckpt"
    kinds = [info.type for info in filesystem.get_file_info([base, f"{base}/model.pt", f"{base}/none", run.path])]
    assert kinds == [fs.FileType.Directory, fs.FileType.File, fs.FileType.NotFound, fs.FileType.Directory]
    assert filesystem.get_file_info(f"{base}/model.pt").size == 3

    def found(**options: Any) -> dict[str, Any]:
        selector = fs.FileSelector(base, **options)
        return {
            info.path.removeprefix(f"{base}/"): info.type == fs.FileType.File
            for info in filesystem.get_file_info(selector)
        }

    assert found() == {"model.pt": True, "rank-0": False}
    assert found(recursive=True) == {
        "model.pt": True,
        "rank-0": False,
        "rank-0/a": True,
        "rank-0/b": False,
        "rank-0/b/c": True,
    }
    with pytest.raises(FileNotFoundError):
        filesystem.get_file_info(fs.FileSelector(f"{run.path}/none"))
    assert filesystem.get_file_info(fs.FileSelector(f"{run.path}/none", allow_not_found=True)) == []


@on_object_stores
def test_what_an_object_store_cannot_do_is_refused_in_words(run: RetryingStore) -> None:
    begin(run)
    filesystem = run_filesystem(run, 1)
    with pytest.raises(io.UnsupportedOperation, match="nothing is appended to"):
        filesystem.open_append_stream(f"{run.path}/a")
    for path in (run.path, f"{run.path}/{layout.STATE_FOLDER}", "elsewhere"):
        with pytest.raises(ElasticTrainError, match="refused to delete"):
            filesystem.delete_dir(path)
    run.create("ckpt/a", b"x")
    for refused in (filesystem.copy_file, filesystem.move):
        with pytest.raises(io.UnsupportedOperation, match="is not moved or copied within the store"):
            refused(f"{run.path}/ckpt/a", f"{run.path}/ckpt/b")
    filesystem.delete_file(f"{run.path}/ckpt/a")
    assert not run.file_sizes("ckpt")


@on_object_stores
def test_a_reader_changes_nothing(run: RetryingStore) -> None:
    run.create("ckpt/a", b"x")
    reader = fs.PyFileSystem(ObjectFilesystem(client_of(run)))
    with reader.open_input_file(f"{run.path}/ckpt/a") as file:
        assert file.read() == b"x"
    for change in (
        lambda: reader.delete_file(f"{run.path}/ckpt/a"),
        lambda: reader.delete_dir(f"{run.path}/ckpt"),
        lambda: reader.open_output_stream(f"{run.path}/ckpt/b"),
        lambda: reader.create_dir(f"{run.path}/ckpt/c"),
        lambda: reader.move(f"{run.path}/ckpt/a", f"{run.path}/b"),
    ):
        with pytest.raises(io.UnsupportedOperation, match="changes nothing"):
            change()
    assert content(run, "ckpt") == {"a": b"x"}
    assert pickle.loads(pickle.dumps(reader)) == reader
    assert reader != fs.PyFileSystem(ObjectFilesystem(ObjectClient(FsspecStorageSettings(url="memory://other/runs"))))


# What the run directory is for


@on_all_storages
def test_ray_commits_resumes_and_keeps_so_many_checkpoints(run: RetryingStore) -> None:
    first = Ray(run, begin(run).attempt, num_to_keep=1).start()
    first.report("a", loss=0.5)
    first.report("b", loss=0.25)
    assert all_commits(run) == [(1, 1), (1, 2)]
    assert [name for name in run.folders() if run.file_sizes(name)] == [layout.STATE_FOLDER, "b"]
    half = physical_name("c", 1)
    interrupted = first.upload(half, {"model.pt": b"half"})
    assert interrupted.path == f"{run.path}/{half}"
    begun = begin(run)
    second = Ray(run, begun.attempt, num_to_keep=1).start()
    assert second.latest == begun.point.checkpoint == "b"
    assert remove_interrupted_uploads(run, begun.attempt) == {half: "upload interrupted"}
    with pytest.raises(FencedOffError):
        first.report("d")
    second.report("c")
    assert (RunDirectory(run).resume_point.base, RunDirectory(run).resume_point.checkpoint) == ((2, 1), "c")
    assert run.file_sizes("c") == {"model.pt": 1, "rank-0/optim.pt": 2}


@on_s3
def test_a_commit_whose_answer_was_lost_is_made_once(run: RetryingStore, proxy: FaultProxy) -> None:
    training = Training(run, begin(run).attempt)
    training.upload("a")
    proxy.lose_answer_of("PUT", layout.COMMITS)
    training.commit("a")
    assert proxy.faults_given == {"lost_answer": 1}
    assert all_commits(run) == [(1, 1)]
    # A controller that starts again, as after a crash, goes on from there.
    log = CommitLog(run, 1)
    training.log = log
    training.report("b")
    assert all_commits(run) == [(1, 1), (1, 2)]


@on_s3
def test_a_restart_and_a_commit_cost_the_same_requests_however_many_checkpoints_are_kept(
    storage: Storage, server: MotoServer, proxy: FaultProxy
) -> None:
    asked: list[dict[str, int]] = []
    for kept in (10, 300):
        run = storage.run(f"kept-{kept}-{uuid.uuid4().hex[:8]}")
        begin(run)
        keep(run, kept, server)
        proxy.reset_counters()
        begun = begin(run)
        asked.append({"begin": len(proxy.requests)})
        assert begun.point.checkpoint == f"c{kept - 1}"
        proxy.reset_counters()
        assert len(Ray(run, begun.attempt).start().checkpoints) == kept
        asked[-1]["Ray's start"] = len(proxy.requests)
        training = Training(run, begun.attempt, keep=3)
        training.upload("more")
        proxy.reset_counters()
        assert len(training.commit("more").manifest) == 3
        asked[-1]["commit"] = len(proxy.requests)
    assert asked[0] == asked[1]
    assert max(asked[1].values()) <= 30


def keep(run: RetryingStore, kept: int, server: MotoServer) -> None:
    """Commit so many checkpoints of one file at once, as if they had come one by one."""
    training = Training(run, 1)
    bucket, _, prefix = run.path.partition("/")
    client = server.client()
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(lambda n: client.put_object(Bucket=bucket, Key=f"{prefix}/c{n}/model.pt", Body=b"1"), range(kept))
        )
    snapshot = training.snapshot
    for number in range(kept):
        snapshot = with_result(snapshot, f"c{number}", {"loss": 1.0})
    manifest = {f"c{number}": {"model.pt": 1} for number in range(kept)}
    record = CommitRecord(attempt=1, sequence=1, snapshot=snapshot, manifest=manifest)
    assert run.create(layout.commit_name(1, 1), encode(record))


@on_all_storages
def test_a_new_run_starts_from_a_copy_of_another_runs_checkpoint(storage: Storage, run: RetryingStore) -> None:
    name = f"base-{uuid.uuid4().hex[:8]}"
    base = storage.run(name)
    training = Training(base, begin(base, claim(name=name)).attempt)
    training.upload("a", {"model.pt": b"weights", "rank-0/optim.pt": b"12"})
    training.commit("a", {"acc": 0.5})
    begun = start_from(storage, name, run)
    assert loop_name(begun.point.checkpoint) == f"from-{name}-a"
    assert content(run, begun.point.checkpoint) == {"model.pt": b"weights", "rank-0/optim.pt": b"12"}


# On a disk


@pytest.fixture
def on_disk(disk: Storage) -> RetryingStore:
    """A run on a disk whose first attempt holds the fence, with an empty checkpoint folder."""
    run = disk.run("mnist")
    begin(run)
    run_filesystem(run, 1).create_dir(f"{run.path}/ckpt")
    return run


class Failing:
    """A function that fails so many times, before or after it has done its work."""

    def __init__(self, real: Any, number: int, times: int, after: bool = False) -> None:
        self.real, self.number, self.times, self.after, self.calls = real, number, times, after, 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls > self.times:
            return self.real(*arguments, **options)
        if self.after:
            self.real(*arguments, **options)
        raise OSError(self.number, os.strerror(self.number))


def _upload_files(run: RetryingStore, source: Path) -> None:
    run_filesystem(run, 1).handler.upload_folder(str(source), f"{run.path}/ckpt")


def _write_stream(run: RetryingStore, source: Path) -> None:
    with run_filesystem(run, 1).open_output_stream(f"{run.path}/ckpt/model.pt") as stream:
        stream.write((source / "model.pt").read_bytes())


FAILING = [
    ("shutil.copyfile", _upload_files),
    ("os.replace", _upload_files),
    ("os.pwrite", _write_stream),
    ("os.replace", _write_stream),
]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE], ids=["EIO", "ESTALE"])
@pytest.mark.parametrize(("function", "write"), FAILING, ids=lambda value: getattr(value, "__name__", value))
def test_a_passing_error_of_the_disk_is_absorbed(
    on_disk: RetryingStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    write: Callable[[RetryingStore, Path], None],
    number: int,
) -> None:
    write_tree(tmp_path, {"model.pt": b"weights"})
    module, _, name = function.partition(".")
    real = getattr({"os": os, "shutil": __import__("shutil")}[module], name)
    failing = Failing(real, number, times=2)
    monkeypatch.setattr(function, failing)
    write(on_disk, tmp_path)
    assert failing.calls >= 3
    monkeypatch.undo()
    assert read_tree(Path(on_disk.path, "ckpt")) == {"model.pt": b"weights"}, "or a temporary file is left"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=["ENOSPC", "EDQUOT"])
@pytest.mark.parametrize(("function", "write"), FAILING[:3], ids=lambda v: getattr(v, "__name__", v))
def test_a_full_disk_is_told_at_once_and_leaves_nothing(
    on_disk: RetryingStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    write: Callable[[RetryingStore, Path], None],
    number: int,
) -> None:
    write_tree(tmp_path, {"model.pt": b"weights"})
    module, _, name = function.partition(".")
    failing = Failing(getattr({"os": os, "shutil": __import__("shutil")}[module], name), number, times=100)
    monkeypatch.setattr(function, failing)

    def fail_and_drop() -> None:
        filesystem = run_filesystem(on_disk, 1)
        if write is _upload_files:
            _upload_files(on_disk, tmp_path)
        else:
            stream = filesystem.open_output_stream(f"{on_disk.path}/ckpt/model.pt")
            stream.write(b"weights")

    with pytest.raises(StorageFaultError, match="no space") as told:
        fail_and_drop()
    monkeypatch.undo()
    assert (told.value.kind, told.value.permanent, failing.calls) == ("no space", True, 1)
    assert f"{on_disk.path}/ckpt/model.pt" in str(told.value)
    del told  # with it, the stream
    if write is _write_stream:
        gc.collect()
    assert os.listdir(f"{on_disk.path}/ckpt") == []


@pytest.mark.parametrize(
    ("function", "after"),
    [("os.link", False), ("os.link", True), ("os.fsync", False)],
    ids=["link", "link, after", "fsync"],
)
def test_a_creation_that_a_mount_failed_at_is_tried_again_and_counts_once(
    on_disk: RetryingStore, monkeypatch: pytest.MonkeyPatch, function: str, after: bool
) -> None:
    failing = Failing(getattr(os, function.partition(".")[2]), errno.EIO, times=1, after=after)
    monkeypatch.setattr(function, failing)
    assert on_disk.create("a/b.json", b"mine")
    assert failing.calls >= 2 - after
    assert not on_disk.create("a/b.json", b"yours")
    assert os.listdir(f"{on_disk.path}/a") == ["b.json"]


@on_a_disk
def test_what_a_crash_left_half_written_is_no_part_of_a_checkpoint(run: RetryingStore) -> None:
    training = Training(run, begin(run).attempt)
    training.upload("a", {"model.pt": b"12345"})
    Path(run.path, "a", ".tmp-0123").write_bytes(b"half")
    assert training.commit("a").manifest == {"a": {"model.pt": 5}}
    found = run_filesystem(run, 1).get_file_info(fs.FileSelector(f"{run.path}/a"))
    assert [info.base_name for info in found] == ["model.pt"]
    assert run.file_sizes("a") == {"model.pt": 5}


def test_a_machine_that_does_not_see_the_attempt_is_told_that_the_directory_is_not_shared(
    disk: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits, "_SEEN_SECONDS", 0.2)
    begin(disk.run("mnist"))
    elsewhere = open_storage(disk.settings.model_copy(update={"path": str(tmp_path)})).run("mnist")
    (tmp_path / "model.pt").write_bytes(b"x")
    with pytest.raises(StorageFaultError, match="does not see attempt 1") as told:
        run_filesystem(elsewhere, 1).create_dir(f"{elsewhere.path}/ckpt")
    assert (told.value.kind, told.value.permanent) == ("not shared", True)
