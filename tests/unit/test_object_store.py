"""Run directories on a disk, in fsspec's memory and in S3 by the same rules; and what only a real S3 protocol has.

Each storage is the one of a whole session, so tests look at a run directory of their own.
"""

import os
import uuid
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from pyarrow import fs
from s3fs import S3FileSystem

from prefect_elastic_train.core.checkpoint_names import physical_name
from prefect_elastic_train.core.outcomes import ElasticTrainError, StorageFaultError
from prefect_elastic_train.core.settings import S3StorageSettings
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.commits import FencedOffError
from prefect_elastic_train.runs.run_directory import RunDirectory
from prefect_elastic_train.runs.run_filesystem import run_filesystem
from prefect_elastic_train.storage import s3 as s3_module
from prefect_elastic_train.storage.opening import Storage
from prefect_elastic_train.storage.store import RunStore
from tests.support.s3 import FaultProxy, MotoServer
from tests.unit.ray_storage import Ray
from tests.unit.support import SteppedStore, Training, begin, private_folder

on_all_storages = pytest.mark.parametrize("storage", ["disk", "memory", "s3"], indirect=True)
on_object_stores = pytest.mark.parametrize("storage", ["memory", "s3"], indirect=True)
on_s3 = pytest.mark.parametrize("storage", ["s3"], indirect=True)

KIB = 1024


def read_tree(folder: Path) -> dict[str, bytes]:
    """Read all files below a folder, hidden ones too."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def content(run: RunStore, name: str) -> dict[str, bytes]:
    """Read what is below a folder of the run."""
    return {file: run.read(f"{name}/{file}") or b"" for file in run.file_sizes(name) or {}}


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have files sent in parts from 64 KiB on."""
    monkeypatch.setattr(s3_module, "PART_BYTES", 64 * KIB)


def unfinished(server: MotoServer, run: RunStore) -> list[str]:
    """Return the objects of a run whose uploads are neither completed nor aborted."""
    return server.incomplete_uploads("training", f"{run.path.partition('/')[2]}/")


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
    for _ in range(2):
        run.delete("a/b.json")
        run.delete_folder("c")
    assert run.read("a/b.json") is run.size("a/b.json") is run.file_sizes("c") is run.read("a/b.json/below") is None
    assert run.names("c") == run.folders("c") == []
    for name in ("f", "b", "d/x", "c/x", "c/y/z"):
        assert run.create(name, b"12")
    assert run.create("empty", b"")
    assert run.read("empty") == b""
    assert (run.names(""), run.folders("c")) == (["b", "empty", "f"], ["y"])
    assert (run.names("c"), run.file_sizes("c")) == (["x"], {"x": 2, "y/z": 2})


@on_all_storages
def test_a_folder_goes_with_all_below_it_and_nothing_beside_it_unless_it_shall_stay(run: RunStore) -> None:
    for name in ("ckpt-1/a", "ckpt-1/b/c", "ckpt-10/a", "ckpt-1.txt"):
        run.create(name, b"x")

    def refuse():
        assert run.file_sizes("ckpt-1") == {"a": 1, "b/c": 1}, "deleted before it was asked"
        raise FencedOffError("taken over")

    with pytest.raises(FencedOffError):
        run.delete_folder("ckpt-1", refuse)
    assert run.read("ckpt-1/a") == b"x"
    run.delete_folder("ckpt-1")
    assert (run.names(""), run.folders()) == (["ckpt-1.txt"], ["ckpt-10"])
    run.delete_folder("")
    assert run.file_sizes("") is None


@on_all_storages
def test_the_runs_of_a_storage_are_its_folders_but_hidden_ones_and_travel_to_other_processes(storage: Storage) -> None:
    name = uuid.uuid4().hex
    run = storage.run(name)
    run.create("a", b"x")
    storage.run(f".{name}").create("a", b"")
    assert name in storage.run_names()
    assert f".{name}" not in storage.run_names()
    copy = cloudpickle.loads(cloudpickle.dumps(run))
    assert (copy.uri, copy.retries, copy.read("a")) == (run.uri, run.retries, b"x")
    for filesystem in (run_filesystem(run, 1), run_filesystem(run)):
        assert cloudpickle.loads(cloudpickle.dumps(filesystem)) == filesystem
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
    run.delete_folder("commits")
    assert run.file_sizes("commits") is None
    run.create("taken", b"x")
    proxy.refuse("PreconditionFailed", status=412, methods=["PUT"])  # which condition is not said
    assert not run.create("taken", b"y")
    proxy.refuse("AccessDenied", methods=["DELETE"])
    with pytest.raises(StorageFaultError, match="credentials"):
        run.delete_folder("")


# Files of checkpoints


@on_all_storages
def test_a_folder_comes_back_as_it_was(run: RunStore, source: Path, tmp_path: Path) -> None:
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
    ("fault", "method", "contains"),
    [
        ("lost_answer", "POST", "large?uploads"),
        ("lost_answer", "POST", "large?uploadId="),
        ("lost_answer", "PUT", "partNumber=2"),
        ("503", "PUT", "partNumber=3"),
        ("lost_answer", "PUT", "ckpt/one"),
    ],
)
def test_a_request_that_fails_leaves_whole_objects_and_no_other_part_is_sent_again(
    run: RunStore, source: Path, server: MotoServer, proxy: FaultProxy, fault: str, method: str, contains: str
) -> None:
    proxy.faults(1, [fault], methods=[method], contains=contains, times=1)
    run.upload(str(source), "ckpt")
    assert proxy.faults_given == {fault: 1}
    assert content(run, "ckpt") == read_tree(source)
    if method == "PUT":
        assert proxy.count("partNumber=") == 5 + ("partNumber" in contains)
    # Nobody knows the one whose beginning was not answered, and the end of the attempt removes it.
    assert len(unfinished(server, run)) == ("uploads" in contains)
    run.abort_uploads()
    assert unfinished(server, run) == []


@on_s3
@pytest.mark.parametrize(
    ("where", "code", "status"), [("?uploads", "NotImplemented", 501), ("partNumber=", "InvalidRequest", 400)]
)
def test_parts_are_sent_with_their_checksums_and_without_to_a_store_that_takes_none(
    run: Any, source: Path, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, where: str, code: str, status: int
) -> None:
    parts, call = [], S3FileSystem._call_s3

    async def note(self, method, *more, **arguments):
        parts.extend(arguments.get("MultipartUpload", {}).get("Parts", []))
        return await call(self, method, *more, **arguments)

    with monkeypatch.context() as patched:
        patched.setattr(S3FileSystem, "_call_s3", note)
        run.upload(str(source), "first")
    assert [bool(part["ChecksumCRC32"]) for part in parts] == [True] * 5
    proxy.refuse(code, status, contains=where, checksum=True)
    for name in ("second", "third"):
        proxy.reset_counters()
        run.upload(str(source), name)
        assert bool(proxy.faults_given["refused"]) == (name == "second"), "it is remembered"
        assert content(run, name) == read_tree(source)
    run.storage.filesystem._checksum = {"ChecksumAlgorithm": "CRC32"}  # the client is the one of all tests


@on_s3
def test_an_upload_that_is_refused_in_the_middle_leaves_no_parts_and_says_what_was_refused(
    run: RunStore, source: Path, server: MotoServer, proxy: FaultProxy
) -> None:
    proxy.refuse("AccessDenied", methods=["PUT"], contains="partNumber=4")
    for is_aborted in (True, False):
        if not is_aborted:
            proxy.refuse("AccessDenied", methods=["DELETE"])
        with pytest.raises(StorageFaultError, match="large") as refused:
            run.upload(str(source), "ckpt")
        assert (refused.value.kind, refused.value.permanent) == ("credentials", True)
        assert run.read("ckpt/large") is None
        assert bool(unfinished(server, run)) != is_aborted


@on_s3
def test_a_download_that_is_cut_goes_on(run: RunStore, tmp_path: Path, proxy: FaultProxy) -> None:
    data = os.urandom(1000 * KIB)
    run.create("ckpt/a", data)
    proxy.faults(1, ["cut"], methods=["GET"], contains="ckpt/a", times=1)
    run.download("ckpt", str(tmp_path))
    assert (proxy.faults_given, read_tree(tmp_path)) == ({"cut": 1}, {"a": data})


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


def test_an_upload_that_a_successor_has_abandoned_is_told_that_it_was_taken_over(
    store: RunStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(store)

    def lose(*_):
        begin(store)
        raise StorageFaultError("NoSuchUpload", kind="refused", permanent=True)

    monkeypatch.setattr(store, "upload", lose)
    with pytest.raises(FencedOffError):
        run_filesystem(store, 1).handler.upload_folder(str(source), f"{store.path}/ckpt")


@on_s3
def test_unfinished_uploads_of_a_run_are_abandoned_and_those_of_others_are_not(
    run: RunStore, server: MotoServer, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, call = run.path.partition("/")[2], S3FileSystem._call_s3
    others = [f"{prefix}-other/ckpt/a", f"above/{prefix}/ckpt/a"]
    for key in (f"{prefix}/ckpt/a", f"{prefix}/ckpt/b", *others):
        server.client().create_multipart_upload(Bucket="training", Key=key)

    async def list_all(self, method, *more, **arguments):
        """What a store does that heeds no prefix and lists one upload at a time."""
        response = await call(self, method, *more, **{**arguments, **({"Prefix": ""} if "Prefix" in arguments else {})})
        if method == "list_multipart_uploads":
            uploads = sorted(response["Uploads"], key=lambda upload: not upload["Key"].startswith(f"{prefix}/"))[:1]
            response |= {"Uploads": uploads, "IsTruncated": True}
        return response

    monkeypatch.setattr(S3FileSystem, "_call_s3", list_all)
    proxy.refuse("AccessDenied", contains="uploads")
    run.abort_uploads()
    assert len(unfinished(server, run)) == 2, "a key that may not list uploads leaves them"
    proxy.calm()
    run.abort_uploads()
    assert sorted(key for key in server.incomplete_uploads("training") if prefix in key) == sorted(others)


# What goes wrong for good


def test_a_bucket_that_does_not_exist_is_no_empty_run(s3_settings: S3StorageSettings, tmp_path: Path) -> None:
    nowhere = Storage(s3_settings.model_copy(update={"bucket_path": "no-such-bucket/runs"}))
    run = nowhere.run("mnist")
    (tmp_path / "model.pt").write_bytes(b"x")
    requests = [
        *((ask, "a") for ask in (run.read, run.size, run.names, run.file_sizes, run.delete, run.delete_folder)),
        *((ask, "a", b"") for ask in (run.create, run.replace)),
        (run.download, "ckpt", str(tmp_path / "target")),
        (run.upload, str(tmp_path), "ckpt"),
    ]
    for ask, *arguments in requests:
        with pytest.raises(StorageFaultError, match=r"s3://no-such-bucket/runs.*no such bucket") as refused:
            ask(*arguments)
        assert refused.value.permanent


@on_s3
def test_a_store_that_does_not_answer_is_not_waited_for_without_end(
    run: RunStore, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_module, "_CALL_SECONDS", 0.3)
    proxy.faults(1, ["stall"])
    with pytest.raises(StorageFaultError, match="no answer to put_object within") as told:
        run.with_retry_limit(0.1).replace("a", bytes(1000))
    assert (told.value.kind, told.value.permanent) == ("connection", False)


# Streams


@on_all_storages
def test_a_stream_becomes_a_file_that_is_read_in_pieces_once_it_is_closed_and_nothing_if_it_is_dropped(
    run: RunStore,
) -> None:
    begin(run)
    filesystem = run_filesystem(run, 1)
    filesystem.create_dir(f"{run.path}/ckpt")
    data = os.urandom(100_000)
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
    # It is read anywhere and in pieces.
    with filesystem.open_input_file(f"{run.path}/ckpt/model.pt") as file:
        assert (file.size(), file.read(10)) == (len(data), data[:10])
        file.seek(50_000)
        assert (file.tell(), file.read(20)) == (50_000, data[50_000:50_020])
        assert file.read_at(7, 99_990) == data[99_990:99_997]
        file.seek(-5, 2)
        assert (file.read(), file.read()) == (data[-5:], b"")
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

    def found(**options):
        infos = filesystem.get_file_info(fs.FileSelector(base, **options))
        return {info.path.removeprefix(f"{base}/"): info.type == fs.FileType.File for info in infos}

    top = {"model.pt": True, "rank-0": False}
    assert found() == top
    assert found(recursive=True) == {**top, "rank-0/a": True, "rank-0/b": False, "rank-0/b/c": True}
    with pytest.raises(FileNotFoundError):
        filesystem.get_file_info(fs.FileSelector(f"{run.path}/none"))
    assert filesystem.get_file_info(fs.FileSelector(f"{run.path}/none", allow_not_found=True)) == []


# What the run directory is for


@on_object_stores
def test_ray_commits_resumes_and_keeps_so_many_checkpoints(run: RunStore) -> None:
    first = Ray(run, begin(run).attempt, num_to_keep=1).start()
    first.report("a", loss=0.5)
    first.report("b", loss=0.25)
    assert run.folders() == [layout.STATE_FOLDER, "b"]
    second = Ray(run, begin(run).attempt, num_to_keep=1).start()
    assert second.latest == "b"
    with pytest.raises(FencedOffError):
        first.report("d")
    second.report("c")
    assert RunDirectory(run).resume_point.checkpoint == "c"


def test_a_restart_and_a_commit_cost_the_same_requests_however_many_checkpoints_are_kept() -> None:
    needed = []
    for kept in (4, 40):
        requests = []
        with private_folder() as folder:
            store = SteppedStore(f"{folder}/runs/mnist", requests.append)
            training = Training(store, begin(store).attempt)
            for number in range(kept):
                training.report(f"c{number}")
            requests.clear()
            attempt = begin(store).attempt
            begun = len(requests)
            Ray(store, attempt).start().report("more")
        needed.append(len(requests))
        # The commit may be large: a controller reads it once, also for the first commit.
        asked = [requests[begun:].count(one) for one in (f"read {layout.commit_name((1, kept))}", "sizes more")]
        assert asked == [1, 1]
    assert needed[0] == needed[1] <= 40
