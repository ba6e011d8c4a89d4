"""Run directories on a disk, in fsspec's memory and in S3 by the same rules; and what only a real S3 protocol has.

Each storage is the one of a whole session, so tests look at a run directory of their own.
"""

from __future__ import annotations

import base64
import errno
import os
import pickle
import socket
import threading
import uuid
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from aiobotocore.response import AioStreamingBody
from pyarrow import fs
from s3fs import S3FileSystem

from prefect_elastic_train.core.checkpoint_names import physical_name
from prefect_elastic_train.core.outcomes import ElasticTrainError, StorageFaultError
from prefect_elastic_train.core.records import CommitRecord, encode
from prefect_elastic_train.core.storage_settings import S3StorageSettings
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.commits import FencedOffError
from prefect_elastic_train.runs.repair import remove_leftovers
from prefect_elastic_train.runs.run_directory import RunDirectory
from prefect_elastic_train.runs.run_filesystem import run_filesystem
from prefect_elastic_train.storage import object_store as objects_module
from prefect_elastic_train.storage import s3 as s3_module
from prefect_elastic_train.storage.object_store import ObjectRunStore
from prefect_elastic_train.storage.opening import Storage, open_storage
from prefect_elastic_train.storage.store import RunStore
from tests.support.processes import wait_for
from tests.support.s3 import FaultProxy, MotoServer, Which
from tests.unit.ray_storage import Ray
from tests.unit.support import Training, begin, with_result

on_all_storages = pytest.mark.parametrize("storage", ["disk", "memory", "s3"], indirect=True)
on_object_stores = pytest.mark.parametrize("storage", ["memory", "s3"], indirect=True)
on_s3 = pytest.mark.parametrize("storage", ["s3"], indirect=True)

KIB = 1024
Request = tuple[str, dict[str, Any]]


def files_of(run: RunStore) -> Any:
    """Return the filesystem of fsspec that a run directory is reached by."""
    assert isinstance(run, ObjectRunStore)
    return run.storage.filesystem


def read_tree(folder: Path) -> dict[str, bytes]:
    """Read all files below a folder, hidden ones too."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def content(run: RunStore, name: str) -> dict[str, bytes]:
    """Read what is below a folder of the run."""
    return {file: run.read(f"{name}/{file}") or b"" for file in run.file_sizes(name) or {}}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have files sent in parts from 64 KiB on."""
    monkeypatch.setattr(objects_module, "PART_BYTES", 64 * KIB)


@pytest.fixture
def on_request(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Request], dict[str, Callable[[dict[str, Any]], None]]]:
    """What s3fs asks the store for, in order; and what is done before a request of a method."""
    asked: list[Request] = []
    before: dict[str, Callable[[dict[str, Any]], None]] = {}
    call = S3FileSystem._call_s3

    async def look(self: Any, method: str, *more: Any, **arguments: Any) -> Any:
        asked.append((method, arguments))
        if method in before:
            before[method](arguments)
        return await call(self, method, *more, **arguments)

    monkeypatch.setattr(S3FileSystem, "_call_s3", look)
    return asked, before


def unfinished(server: MotoServer, run: RunStore) -> list[str]:
    """Return the objects of a run whose uploads are neither completed nor aborted."""
    prefix = run.path.partition("/")[2]
    return [key for key, _ in server.incomplete_uploads("training") if key.startswith(f"{prefix}/")]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with files of all sizes that matter for small parts."""
    sizes = {"empty": 0, "one": 1, "a/part": 64 * KIB, "a/b/more": 64 * KIB + 1, "large": 300 * KIB, "c/d/e/f": 100}
    for name, size in sizes.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size))
    return tmp_path / "source"


# Small objects


@on_all_storages
def test_an_object_is_created_once_replaced_deleted_and_listed_beside_folders(run: RunStore) -> None:
    assert run.create("a/b.json", b"first")
    assert not run.create("a/b.json", b"second")
    assert run.read("a/b.json") == b"first"
    run.replace("a/b.json", b"third")
    assert (run.read("a/b.json"), run.size("a/b.json")) == (b"third", 5)
    run.delete("a/b.json")
    run.delete("a/b.json")
    assert run.read("a/b.json") is run.size("a/b.json") is run.file_sizes("c") is run.read("a/b.json/below") is None
    assert run.names("c") == run.folders("c") == []
    assert run.delete_folder("c") is False
    assert run.create("a/b.json", b"")
    assert run.read("a/b.json") == b""
    assert run.delete_folder("")
    for name in ("b", "a", "d/x", "c/x", "c/y/z"):
        run.create(name, b"12")
    assert (run.names(""), run.folders()) == (["a", "b"], ["c", "d"])
    assert (run.names("c"), run.folders("c")) == (["x"], ["y"])
    assert run.file_sizes("c") == {"x": 2, "y/z": 2}


@on_all_storages
def test_a_folder_goes_with_all_below_it_and_nothing_beside_it_unless_it_shall_stay(run: RunStore) -> None:
    for name in ("ckpt-1/a", "ckpt-1/b/c", "ckpt-10/a", "ckpt-1.txt"):
        run.create(name, b"x")

    def refuse() -> None:
        assert run.file_sizes("ckpt-1") == {"a": 1, "b/c": 1}, "deleted before it was asked"
        raise FencedOffError("taken over")

    with pytest.raises(FencedOffError):
        run.delete_folder("ckpt-1", refuse)
    assert run.read("ckpt-1/a") == b"x"
    assert run.delete_folder("ckpt-1", lambda: None)
    assert (run.names(""), run.folders()) == (["ckpt-1.txt"], ["ckpt-10"])
    assert run.delete_folder("")
    assert run.file_sizes("") is None


@on_all_storages
def test_the_runs_of_a_storage_are_its_folders_but_hidden_ones_and_travel_to_other_processes(storage: Storage) -> None:
    name = uuid.uuid4().hex
    run = storage.run(name)
    run.create("a", b"x")
    storage.run(f".{name}").create("a", b"")
    assert name in storage.run_names()
    assert f".{name}" not in storage.run_names()
    assert run.uri == f"{storage.uri}/{name}"
    for pickler in (pickle, cloudpickle):
        copy = pickle.loads(pickler.dumps(run))
        assert (copy.uri, copy.retries, copy.read("a")) == (run.uri, run.retries, b"x")
        for filesystem in (run_filesystem(run, 1), run_filesystem(run)):
            assert pickle.loads(pickler.dumps(filesystem)) == filesystem
    assert run_filesystem(run, 1) != run_filesystem(run, 2)


@on_s3
def test_a_creation_or_deletion_whose_answer_was_lost_has_succeeded(run: RunStore, proxy: FaultProxy) -> None:
    proxy.lose_answer_of("PUT", "commits/1")
    assert run.create("commits/1", b"mine")
    assert proxy.faults_given == {"lost_answer": 1}
    proxy.lose_answer_of("PUT", "commits/1")
    assert not run.create("commits/1", b"yours"), "another one's is taken for one's own"
    assert run.read("commits/1") == b"mine"
    proxy.lose_answer_of("DELETE", "commits/1")
    assert run.delete_folder("commits")
    assert run.file_sizes("commits") is None
    run.create("taken", b"x")
    proxy.refuse("PreconditionFailed", status=412, when=Which(("PUT",)))  # which condition is not said
    assert not run.create("taken", b"y")
    proxy.refuse("AccessDenied", status=403, when=Which(("DELETE",)))
    with pytest.raises(StorageFaultError, match="credentials"):
        run.delete_folder("")


@on_s3
def test_a_creation_that_was_overtaken_between_its_tries_has_failed(run: RunStore, proxy: FaultProxy) -> None:
    proxy.faults(rate=1, kinds=["reset_before"], when=Which(("PUT",)))
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(run.create, "commits/1", b"late")
        wait_for(lambda: proxy.faults_given["reset_before"], 20, "the first try")
        proxy.faults(None)
        mine = run.with_retry_limit(0).create("commits/1", b"mine")
        assert mine != late.result(30), "both have won, or none"
    assert run.read("commits/1") == (b"mine" if mine else b"late")


# Files of checkpoints


@on_all_storages
def test_a_folder_comes_back_as_it_was(run: RunStore, source: Path, tmp_path: Path, small_parts: None) -> None:
    files = read_tree(source)
    run.upload(str(source), "ckpt")
    assert content(run, "ckpt") == files
    run.download("ckpt", str(tmp_path / "target"))
    assert read_tree(tmp_path / "target") == files
    filesystem = run_filesystem(run)
    fs.copy_files(f"{run.path}/ckpt", str(tmp_path / "by-pyarrow"), filesystem, fs.LocalFileSystem())
    assert read_tree(tmp_path / "by-pyarrow") == files
    run.upload(str(source / "large"), "ckpt/again")
    assert run.read("ckpt/again") == files["large"]
    run.copy_folder(f"{run.path}/ckpt", "copy")
    assert content(run, "copy") == {**files, "again": files["large"]}


@on_object_stores
def test_a_checkpoint_without_files_is_committed_and_read_back_empty(run: RunStore, tmp_path: Path) -> None:
    training, name = Training(run, begin(run).attempt), physical_name("a", 1)
    (tmp_path / "empty").mkdir()
    run.upload(str(tmp_path / "empty"), name)
    training.commit(name)
    assert RunDirectory(run).resume_point.checkpoint == name
    run.download(name, str(tmp_path / "back"))
    assert list((tmp_path / "back").iterdir()) == []


@on_s3
@pytest.mark.parametrize(
    ("method", "contains"),
    [("POST", "large?uploads"), ("PUT", "partNumber=2"), ("POST", "large?uploadId="), ("PUT", "ckpt/one")],
    ids=["beginning of an upload", "part", "end of an upload", "small file"],
)
def test_a_lost_answer_leaves_whole_objects(
    run: RunStore, source: Path, server: MotoServer, proxy: FaultProxy, small_parts: None, method: str, contains: str
) -> None:
    proxy.lose_answer_of(method, contains)
    run.upload(str(source), "ckpt")
    assert proxy.faults_given == {"lost_answer": 1}
    assert content(run, "ckpt") == read_tree(source)
    # Nobody knows the one whose beginning was not answered, and the end of the attempt removes it.
    assert run.abandon_uploads() == ("uploads" in contains)
    assert unfinished(server, run) == []


@on_s3
def test_a_part_that_fails_is_sent_again_and_no_other(
    run: RunStore, source: Path, small_parts: None, on_request: Any
) -> None:
    asked, before = on_request
    busy = iter([OSError(errno.EBUSY, "Please reduce your request rate")])  # a cut connection aiohttp makes good itself

    def be_busy_once(arguments: dict[str, Any]) -> None:
        if arguments["PartNumber"] == 3 and (error := next(busy, None)):
            raise error

    before["upload_part"] = be_busy_once
    run.upload(str(source / "large"), "ckpt/large")
    sent = [arguments["PartNumber"] for method, arguments in asked if method == "upload_part"]
    assert sorted(sent) == [1, 2, 3, 3, 4, 5]
    assert content(run, "ckpt") == {"large": (source / "large").read_bytes()}


@on_s3
@pytest.mark.parametrize(("where", "code"), [("?uploads", "NotImplemented"), ("partNumber=", "InvalidRequest")])
def test_parts_are_sent_with_their_checksums_and_without_to_a_store_that_takes_none(
    run: RunStore, source: Path, proxy: FaultProxy, small_parts: None, on_request: Any, where: str, code: str
) -> None:
    large = (source / "large").read_bytes()
    expected = [zlib.crc32(large[begin : begin + 64 * KIB]) for begin in range(0, len(large), 64 * KIB)]
    asked, _ = on_request
    run.upload(str(source), "first")
    (ended,) = [arguments for method, arguments in asked if method == "complete_multipart_upload"]
    sums = [base64.b64decode(part["ChecksumCRC32"]) for part in ended["MultipartUpload"]["Parts"]]
    assert [int.from_bytes(one, "big") for one in sums] == expected
    files_of(run)._checksum = {"ChecksumAlgorithm": "CRC32"}  # the client is the one of all tests
    proxy.refuse(code, status=501 if code == "NotImplemented" else 400, when=Which(contains=where, checksum=True))
    for name in ("second", "third"):
        proxy.reset_counters()
        run.upload(str(source), name)
        assert bool(proxy.faults_given["refused"]) == (name == "second"), "it is remembered"
        assert content(run, name) == read_tree(source)
    files_of(run)._checksum = {"ChecksumAlgorithm": "CRC32"}


@on_s3
def test_an_upload_that_is_refused_in_the_middle_leaves_no_parts_and_says_what_was_refused(
    run: RunStore, source: Path, server: MotoServer, proxy: FaultProxy, small_parts: None, on_request: Any
) -> None:
    proxy.refuse("AccessDenied", when=Which(("PUT",), contains="partNumber=4"))
    for is_aborted in (True, False):
        if not is_aborted:
            proxy.refuse("AccessDenied", when=Which(("DELETE",)))
        with pytest.raises(StorageFaultError, match="large") as refused:
            run.upload(str(source), "ckpt")
        assert (refused.value.kind, refused.value.permanent) == ("credentials", True)
        assert run.read("ckpt/large") is None
        assert bool(unfinished(server, run)) != is_aborted


@on_s3
@pytest.mark.parametrize("in_the_middle", [True, False])
def test_a_download_goes_on_where_it_was_cut_and_begins_again_after_its_last_byte(
    run: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_request: Any, in_the_middle: bool
) -> None:
    data = os.urandom(1000 * KIB)
    run.create("ckpt/a", data)
    read, cuts, got = AioStreamingBody.read, iter([ConnectionResetError()]), 0

    async def cut_once(self: Any, *size: Any) -> bytes:
        nonlocal got
        piece: bytes = await read(self, *size)
        got += len(piece)
        if (not piece or (in_the_middle and got > len(piece))) and (error := next(cuts, None)):
            raise error
        return piece

    monkeypatch.setattr(AioStreamingBody, "read", cut_once)
    asked, _ = on_request
    run.download("ckpt", str(tmp_path / "target"))
    assert read_tree(tmp_path / "target") == {"a": data}
    first, second = [arguments.get("Range", "") for method, arguments in asked if method == "get_object"]
    assert first == ""
    assert int(second[6:-1]) > 0 if in_the_middle else second == "", second


@on_object_stores
def test_a_checkpoint_that_is_gone_or_leads_out_of_its_folder_is_not_downloaded(
    run: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError, match="ckpt: there is no such checkpoint"):
        run.download("ckpt", str(tmp_path))
    monkeypatch.setattr(run, "file_sizes", lambda name: {"../../escaped": 1})
    with pytest.raises(ElasticTrainError, match="points outside of it"):
        run.download("ckpt", str(tmp_path / "a" / "b"))
    monkeypatch.setattr(run, "file_sizes", lambda name: {"shorter": 3})
    run.create("ckpt/shorter", b"12")
    with pytest.raises(StorageFaultError, match="got 2 bytes instead of 3"):
        run.with_retry_limit(0).download("ckpt", str(tmp_path / "a" / "b"))
    assert list(tmp_path.rglob("escaped")) == []


@on_s3
def test_one_whose_unfinished_upload_a_successor_abandons_is_told_that_it_was_taken_over(
    run: RunStore, source: Path, server: MotoServer, proxy: FaultProxy, small_parts: None, on_request: Any
) -> None:
    begin(run)
    record = run.read(layout.attempt_name(1)) or b""
    _, before = on_request

    def begin_another(arguments: dict[str, Any]) -> None:
        key = f"{run.path.partition('/')[2]}/{layout.attempt_name(2)}"
        server.client().put_object(Bucket="training", Key=key, Body=record)
        proxy.refuse("NoSuchUpload", status=404, when=Which(("PUT",), contains="partNumber="))

    before["upload_part"] = begin_another
    with pytest.raises(FencedOffError):
        run_filesystem(run, 1).handler.upload_folder(str(source), f"{run.path}/ckpt")
    assert run.read("ckpt/large") is None


@on_s3
@pytest.mark.parametrize("heeds_prefix", [True, False])
def test_unfinished_uploads_of_a_run_are_abandoned_and_those_of_others_are_not(
    run: RunStore, server: MotoServer, proxy: FaultProxy, on_request: Any, heeds_prefix: bool
) -> None:
    client, prefix = server.client(), run.path.partition("/")[2]
    others = [f"{prefix}-other/ckpt/a", f"above/{prefix}/ckpt/a"]
    for key in (f"{prefix}/ckpt/a", f"{prefix}/ckpt/b", *others):
        client.create_multipart_upload(Bucket="training", Key=key)
    _, before = on_request
    if not heeds_prefix:
        before["list_multipart_uploads"] = lambda arguments: arguments.update(Prefix="")
    proxy.refuse("AccessDenied", when=Which(contains="uploads"))
    assert run.abandon_uploads() == 0, "a key that may not list uploads leaves them"
    proxy.calm()
    assert run.abandon_uploads() == 2
    assert run.abandon_uploads() == 0
    left = [(key, upload) for key, upload in server.incomplete_uploads("training") if prefix in key]
    assert sorted(key for key, _ in left) == sorted(others)
    for key, upload_id in left:
        client.abort_multipart_upload(Bucket="training", Key=key, UploadId=upload_id)


# What goes wrong for good


def test_a_bucket_that_does_not_exist_is_no_empty_run(s3_settings: S3StorageSettings, tmp_path: Path) -> None:
    nowhere = open_storage(s3_settings.model_copy(update={"bucket_path": "no-such-bucket/runs"}))
    run = nowhere.run("mnist")
    (tmp_path / "model.pt").write_bytes(b"x")
    asked: list[Callable[[], Any]] = [
        *(partial(ask, "a") for ask in (run.read, run.size, run.names, run.file_sizes, run.delete, run.delete_folder)),
        *(partial(ask, "a", b"") for ask in (run.create, run.replace)),
        lambda: run.download("ckpt", str(tmp_path / "target")),
        lambda: run.upload(str(tmp_path), "ckpt"),
        nowhere.run_names,
    ]
    for ask in asked:
        with pytest.raises(StorageFaultError, match=r"s3://no-such-bucket/runs.*no such bucket") as refused:
            ask()
        assert refused.value.permanent


def test_a_store_that_takes_a_connection_and_reads_no_body_is_not_waited_for_without_end(
    s3_settings: S3StorageSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_module, "_CALL_SECONDS", 0.3)
    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    taken.append(listening.accept()[0])
                    taken[-1].sendall(b"HTTP/1.1 100 Continue\r\n\r\n")

        threading.Thread(target=serve, daemon=True).start()
        settings = s3_settings.model_copy(
            update={"endpoint_url": f"http://127.0.0.1:{listening.getsockname()[1]}", "bucket_path": "bucket/runs"}
        )
        with pytest.raises(StorageFaultError, match="no answer to put_object within") as told:
            open_storage(settings, retry_seconds=0.1).run("mnist").replace("a", bytes(1000))
        for connection in taken:
            connection.close()
    assert (told.value.kind, told.value.permanent) == ("connection", False)


# Streams


@on_all_storages
def test_a_stream_becomes_a_file_when_it_is_closed_and_nothing_when_it_is_dropped(run: RunStore) -> None:
    begin(run)
    filesystem = run_filesystem(run, 1)
    filesystem.create_dir(f"{run.path}/ckpt")
    data = os.urandom(10_000)
    with filesystem.open_output_stream(f"{run.path}/ckpt/model.pt") as stream:
        for start in range(0, len(data), 777):
            stream.write(data[start : start + 777])
        assert stream.tell() == len(data)
        assert not run.file_sizes("ckpt")
    assert content(run, "ckpt") == {"model.pt": data}
    dropped = filesystem.open_output_stream(f"{run.path}/ckpt/half.pt")
    dropped.write(b"half")
    del dropped
    assert content(run, "ckpt") == {"model.pt": data}


@on_all_storages
def test_a_file_is_read_anywhere_and_in_pieces(run: RunStore) -> None:
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
def test_files_and_folders_are_described_as_pyarrow_expects(run: RunStore) -> None:
    for name in ("ckpt/model.pt", "ckpt/rank-0/a", "ckpt/rank-0/b/c"):
        run.create(name, b"123")
    begin(run)
    filesystem, base = run_filesystem(run, 1), f"{run.path}/ckpt"
    kinds = [info.type for info in filesystem.get_file_info([base, f"{base}/model.pt", f"{base}/none", run.path])]
    assert kinds == [fs.FileType.Directory, fs.FileType.File, fs.FileType.NotFound, fs.FileType.Directory]
    assert filesystem.get_file_info(f"{base}/model.pt").size == 3

    def found(**options: Any) -> dict[str, Any]:
        infos = filesystem.get_file_info(fs.FileSelector(base, **options))
        return {info.path.removeprefix(f"{base}/"): info.type == fs.FileType.File for info in infos}

    top = {"model.pt": True, "rank-0": False}
    assert found() == top
    assert found(recursive=True) == {**top, "rank-0/a": True, "rank-0/b": False, "rank-0/b/c": True}
    with pytest.raises(FileNotFoundError):
        filesystem.get_file_info(fs.FileSelector(f"{run.path}/none"))
    assert filesystem.get_file_info(fs.FileSelector(f"{run.path}/none", allow_not_found=True)) == []


# What the run directory is for


@on_all_storages
def test_ray_commits_resumes_and_keeps_so_many_checkpoints(run: RunStore) -> None:
    first = Ray(run, begin(run).attempt, num_to_keep=1).start()
    first.report("a", loss=0.5)
    first.report("b", loss=0.25)
    assert RunDirectory(run).commit_ids == [(1, 1), (1, 2)]
    assert [name for name in run.folders() if run.file_sizes(name)] == [layout.STATE_FOLDER, "b"]
    half = physical_name("c", 1)
    interrupted = first.upload(half, {"model.pt": b"half"})
    assert interrupted.path == f"{run.path}/{half}"
    begun = begin(run)
    second = Ray(run, begun.attempt, num_to_keep=1).start()
    assert second.latest == begun.point.checkpoint == "b"
    assert remove_leftovers(run, begun.attempt) == [half]
    with pytest.raises(FencedOffError):
        first.report("d")
    second.report("c")
    assert (RunDirectory(run).resume_point.base, RunDirectory(run).resume_point.checkpoint) == ((2, 1), "c")
    assert run.file_sizes("c") == {"model.pt": 1, "rank-0/optim.pt": 2}


@on_s3
def test_a_restart_and_a_commit_cost_the_same_requests_however_many_checkpoints_are_kept(
    storage: Storage, proxy: FaultProxy
) -> None:
    asked: list[list[int]] = []
    for kept in (4, 40):
        name = f"kept-{kept}-{uuid.uuid4().hex[:8]}"
        run = storage.run(name)
        begin(run)
        snapshot = Training(run, 1).snapshot
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n, run=run: run.replace(f"c{n}/model.pt", b"1"), range(kept)))  # type: ignore[misc]
        for number in range(kept):
            snapshot = with_result(snapshot, f"c{number}", {"loss": 1.0})
        manifest = {f"c{number}": {"model.pt": 1} for number in range(kept)}
        record = CommitRecord(attempt=1, sequence=1, snapshot=snapshot, manifest=manifest)
        assert run.create(layout.commit_name(1, 1), encode(record))
        proxy.reset_counters()
        begun = begin(run)
        assert begun.point.checkpoint == f"c{kept - 1}"
        asked.append([proxy.count(name)])
        assert len(Ray(run, begun.attempt).start_ours().checkpoints) == kept
        asked[-1].append(proxy.count(name))
        training = Training(run, begun.attempt, keep=3)
        training.upload("more")
        assert len(training.commit("more").manifest) == 3
        asked[-1].append(proxy.count(name))
    assert asked[0] == asked[1]
    assert max(asked[1]) <= 60
