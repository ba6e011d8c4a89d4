"""Checkpoints between a worker's disk and the run directory: written whole, and fetched once a machine."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import shutil
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from pyarrow import fs
from ray.train import Checkpoint

from prefect_elastic_train.core.checkpoint_names import physical_name
from prefect_elastic_train.core.outcomes import StorageFaultError
from prefect_elastic_train.elastic import checkpoints
from prefect_elastic_train.elastic.checkpoints import (
    RunCheckpoint,
    RunStorageContext,
    open_checkpoint,
    readable,
    run_filesystem,
)
from prefect_elastic_train.runs.commits import FencedOffError
from prefect_elastic_train.storage.object_store import ObjectRunStore
from prefect_elastic_train.storage.objects import ObjectClient
from prefect_elastic_train.storage.opening import Storage
from prefect_elastic_train.storage.retrying_store import RetryingStore
from tests.support.processes import wait_for
from tests.support.s3 import FaultProxy
from tests.unit.ray_storage import Ray
from tests.unit.support import begin, start_from

on_all_storages = pytest.mark.parametrize("storage", ["disk", "memory", "s3"], indirect=True)
on_object_stores = pytest.mark.parametrize("storage", ["memory", "s3"], indirect=True)

COPY = physical_name("from-base-epochs-1", attempt=0)
FILES = {"model.pt": b"weights", "rank-0/optim.pt": b"12", "empty": b""}

_fork = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, which only the test uses."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint as a loop has written it."""
    _write(tmp_path / "source")
    return tmp_path / "source"


def _write(folder: Path | str) -> None:
    for name, data in FILES.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _read(folder: Path | str) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()
    }


def _worker(run: RetryingStore, attempt: int = 1) -> RunStorageContext:
    """Give the storage context that a worker has."""
    return RunStorageContext(Ray(run, attempt).storage)


def _report(run: RetryingStore, source: Path, name: str = "ckpt", attempt: int = 1) -> Checkpoint:
    return _worker(run, attempt).persist_current_checkpoint(Checkpoint(str(source)), name)


# Written


@on_all_storages
def test_what_a_loop_reports_is_read_back_by_whoever_it_is_sent_to(
    run: RetryingStore, source: Path, tmp_path: Path
) -> None:
    begin(run)
    reported = pickle.loads(cloudpickle.dumps(_report(run, source)))
    assert reported.path == f"{run.path}/ckpt"
    assert run.file_sizes("ckpt") == {name: len(data) for name, data in FILES.items()}
    with reported.as_directory() as folder:
        assert _read(folder) == FILES
    assert _read(reported.to_directory(tmp_path / "copy")) == FILES
    copy = reported.to_directory()
    assert _read(copy) == FILES
    assert copy != reported.path
    assert _read(source) == FILES, "the loop's own is as it was"


@pytest.mark.parametrize("storage", ["disk"], indirect=True)
def test_files_keep_their_permissions_in_a_run_and_in_copies(run: RetryingStore, source: Path, tmp_path: Path) -> None:
    begin(run)
    (source / "model.pt").chmod(0o755)
    (source / "empty").chmod(0o400)
    reported = _report(run, source)
    for folder in (reported.path, reported.to_directory(tmp_path / "copy")):
        assert [stat.S_IMODE(Path(folder, name).stat().st_mode) for name in FILES] == [0o755, 0o644, 0o400]


@pytest.mark.parametrize("storage", ["disk"], indirect=True)
def test_a_link_that_leads_nowhere_is_refused_with_where_it_points_and_what_to_do(
    run: RetryingStore, source: Path
) -> None:
    begin(run)
    (source / "rank-0/latest").symlink_to("step-7.pt")
    with pytest.raises(ValueError, match=r"rank-0/latest is a link to 'step-7.pt', where .* or remove"):
        _report(run, source)


@on_all_storages
def test_a_checkpoint_that_is_not_on_the_disk_is_said_by_its_path(run: RetryingStore, tmp_path: Path) -> None:
    begin(run)
    with pytest.raises(FileNotFoundError, match=f"the checkpoint to report is not there: {tmp_path}/none"):
        _report(run, tmp_path / "none")
    assert "ckpt" not in run.folders()


@on_all_storages
def test_one_who_was_taken_over_writes_nothing(run: RetryingStore, source: Path) -> None:
    begin(run)
    begin(run)
    with pytest.raises(FencedOffError):
        _report(run, source, "another")
    assert not run.file_sizes("another")


@on_all_storages
def test_ranks_write_into_one_checkpoint(run: RetryingStore, tmp_path: Path) -> None:
    begin(run)
    for rank in range(3):
        folder = tmp_path / f"rank-{rank}"
        folder.mkdir()
        (folder / f"rank-{rank}.pt").write_bytes(b"1")
        reported = _report(run, folder)
    with reported.as_directory() as found:
        assert _read(found) == {f"rank-{rank}.pt": b"1" for rank in range(3)}


@pytest.mark.parametrize("storage", ["disk", "memory"], indirect=True)
def test_a_checkpoint_of_another_filesystem_is_copied_as_ray_does(run: RetryingStore, source: Path) -> None:
    begin(run)
    elsewhere = Checkpoint(str(source), fs.SubTreeFileSystem("/", fs.LocalFileSystem()))
    reported = _worker(run).persist_current_checkpoint(elsewhere, "ckpt")
    assert reported.path == f"{run.path}/ckpt"
    assert run.file_sizes("ckpt") == {name: len(data) for name, data in FILES.items()}


class Disk:
    """What a power cut would leave: a file as it was when it was synced, a folder with the names that it had then."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self._files: dict[int, int] = {}
        self._folders: dict[int, dict[str, int]] = {}
        self._fsync = os.fsync
        patched.setattr(os, "fsync", self._sync)

    def _sync(self, descriptor: int) -> None:
        self._fsync(descriptor)
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            with os.scandir(descriptor) as entries:
                self._folders[found.st_ino] = {entry.name: entry.inode() for entry in entries}
        else:
            self._files[found.st_ino] = found.st_size

    def left_below(self, folder: str, path: str) -> dict[str, int]:
        """Give path and size of the files that are left of a path in a folder that was always there."""
        inode: int | None = os.stat(folder).st_ino
        for name in path.split("/"):
            inode = self._folders.get(inode or 0, {}).get(name)
        return dict(self._walk(inode or 0, ""))

    def _walk(self, inode: int, path: str) -> Iterator[tuple[str, int]]:
        if inode in self._files:
            yield path, self._files[inode]
        for name, below in self._folders.get(inode, {}).items():
            yield from self._walk(below, f"{path}/{name}".lstrip("/"))


def _by_streams(ray: Ray, source: Path) -> Checkpoint:
    return ray.storage.persist_current_checkpoint(Checkpoint(str(source)), "epochs/1")


def _file_by_file(ray: Ray, source: Path) -> Checkpoint:
    return RunStorageContext(ray.storage).persist_current_checkpoint(Checkpoint(str(source)), "epochs/1")


def _by_a_move(ray: Ray, source: Path) -> Checkpoint:
    filesystem, path = ray.storage.storage_filesystem, ray.storage.build_checkpoint_path_from_name("epochs/1")
    shutil.copytree(source, f"{ray.storage.experiment_fs_path}-outside")
    filesystem.create_dir(os.path.dirname(path))
    filesystem.move(f"{ray.storage.experiment_fs_path}-outside", path)
    return Checkpoint(path, filesystem)


@pytest.mark.parametrize("write", [_file_by_file, _by_streams, _by_a_move])
@pytest.mark.parametrize("storage", ["disk"], indirect=True)
def test_a_checkpoint_is_on_the_disk_before_its_commit(
    storage: Storage, source: Path, write: Callable[[Ray, Path], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    top, disk, link = os.path.dirname(storage.uri), Disk(monkeypatch), os.link
    left = []

    def look_and_link(temporary: Path, target: Path) -> None:
        if target.parent.name == "commits":
            left.append(disk.left_below(top, f"runs/{'base/epochs/1' if not left else f'copy/{COPY}'}"))
        link(temporary, target)

    monkeypatch.setattr(os, "link", look_and_link)
    run, copy = storage.run("base"), storage.run("copy")
    ray = Ray(run, begin(run).attempt).start()
    reported = write(ray, source)
    ray.register(reported)
    copy.create(".elastic_train/run.json", b"{}")
    start_from(storage, "base", copy)
    assert left == [{name: len(data) for name, data in FILES.items()}] * 2
    for name in ("base", "copy"):
        commits = storage.run(name).file_sizes(".elastic_train/commits")
        assert commits is not None
        assert disk.left_below(top, f"runs/{name}/.elastic_train/commits").keys() >= commits.keys(), "nor is it"


# Read


@on_all_storages
def test_a_worker_reads_where_it_is_what_is_on_its_disk_and_a_copy_of_anything_else(
    run: RetryingStore, source: Path, temporary: Path
) -> None:
    begin(run)
    _report(run, source)
    handed = Checkpoint(f"{run.path}/ckpt", run_filesystem(run, 1))
    found = readable(handed)
    assert found is not None
    with found.as_directory() as folder:
        assert _read(folder) == FILES
        assert (folder == handed.path) == (not isinstance(run.inner, ObjectRunStore))
    assert list(temporary.iterdir()) == [], "a copy is left"


@on_object_stores
def test_ranks_of_a_machine_fetch_what_they_are_handed_once(
    run: RetryingStore, source: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(run)
    _report(run, source)
    handed = Checkpoint(f"{run.path}/ckpt", run_filesystem(run, 1))
    ranks = [pickle.loads(pickle.dumps(handed)) for _ in range(4)]
    fetched: list[int] = []
    download = ObjectClient.download if isinstance(run.inner, ObjectRunStore) else None
    assert download is not None
    client_type = type(run.inner.client)
    real = client_type.download

    def count(self: ObjectClient, files: Any) -> None:
        fetched.append(1)
        real(self, files)

    monkeypatch.setattr(client_type, "download", count)
    together = threading.Barrier(len(ranks))

    def read(rank: Checkpoint) -> dict[str, bytes]:
        own = readable(rank)
        assert own is not None
        together.wait(20)
        with own.as_directory() as folder:
            found = _read(folder)
            together.wait(20)  # all are in it
        return found

    with ThreadPoolExecutor(len(ranks)) as pool:
        assert list(pool.map(read, ranks)) == [FILES] * len(ranks)
    assert len(fetched) == 1
    assert list(temporary.iterdir()) == []


@on_all_storages
def test_a_checkpoint_is_opened_by_its_uri(storage: Storage, run: RetryingStore, source: Path, tmp_path: Path) -> None:
    begin(run)
    _report(run, source)
    opened = open_checkpoint(f"{run.uri}/ckpt", storage.settings)
    with opened.as_directory() as folder:
        assert _read(folder) == FILES
    assert _read(opened.to_directory(tmp_path / "copy")) == FILES
    again = pickle.loads(cloudpickle.dumps(opened))
    with again.as_directory() as folder:
        assert _read(folder) == FILES
    with opened.filesystem.open_input_file(f"{opened.path}/model.pt") as file:
        assert file.read() == FILES["model.pt"]


@on_object_stores
def test_a_checkpoint_that_is_gone_is_said_and_leaves_nothing(
    storage: Storage, run: RetryingStore, temporary: Path
) -> None:
    run.create("other/a", b"")
    with (
        pytest.raises(FileNotFoundError, match="ckpt: there is no such checkpoint"),
        open_checkpoint(f"{run.uri}/ckpt", storage.settings).as_directory(),
    ):
        pass
    assert [path for path in temporary.iterdir() if path.is_dir()] == []


def test_a_storage_that_refuses_while_it_is_read_leaves_no_half_of_a_checkpoint(
    s3: Storage, proxy: FaultProxy, source: Path, temporary: Path
) -> None:
    run = s3.run("refused-while-read")
    begin(run)
    checkpoint = _report(run, source)
    proxy.allow_keys({"AKIA" + "Z" * 16})
    with pytest.raises(StorageFaultError, match="credentials"), checkpoint.as_directory():
        pass
    assert [path for path in temporary.iterdir() if path.is_dir()] == []


# Shared by the processes of a machine


def _fill(log: Path, seconds: float = 0.0) -> Callable[[str], None]:
    def fill(folder: str) -> None:
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")
        Path(folder, "half").write_bytes(b"half")
        time.sleep(seconds)
        _write(folder)
        Path(folder, "half").unlink()

    return fill


def _start(work: Callable[[], None]) -> Any:
    """Run something in a process of its own, which ends at once then."""

    def run() -> None:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)

    process = _fork.Process(target=run)
    process.start()
    return process


def test_processes_that_read_at_the_same_time_fetch_once_and_the_last_one_removes_it(
    tmp_path: Path, temporary: Path
) -> None:
    log, seen = tmp_path / "fetched", tmp_path / "seen"
    seen.mkdir()

    def read() -> None:
        with checkpoints._shared_folder("ckpt", _fill(log, 0.3)) as folder:
            assert _read(folder) == FILES
            Path(seen, str(os.getpid())).touch()
            wait_for(lambda: len(list(seen.iterdir())) == 4, 20, "all processes to read")
            time.sleep(random.random() / 10)
            assert _read(folder) == FILES, "removed under a reader"

    processes = [_start(read) for _ in range(4)]
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(log.read_text().split()) == 1
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("killed_while", ["it fetches", "it reads"])
def test_a_process_that_is_killed_blocks_and_confuses_nobody(
    tmp_path: Path, temporary: Path, killed_while: str
) -> None:
    log, reads = tmp_path / "fetched", tmp_path / "reads"

    def read_for_long() -> None:
        with checkpoints._shared_folder("ckpt", _fill(log, 60 if killed_while == "it fetches" else 0)):
            reads.touch()
            time.sleep(60)

    first = _start(read_for_long)
    wait_for(log.exists if killed_while == "it fetches" else reads.exists, 20, "the process to come there")
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(lambda: _read_shared(log))
        if killed_while == "it fetches":
            time.sleep(0.2)
            assert not second.done(), "read while it is fetched"
        os.kill(first.pid, signal.SIGKILL)
        first.join(10)
        assert second.result(10) == FILES
    assert len(log.read_text().split()) == (2 if killed_while == "it fetches" else 1)
    # The next one finds what the killed one left, and the last one removes it.
    assert _read_shared(log) == FILES
    assert list(temporary.iterdir()) == []


def _read_shared(log: Path) -> dict[str, bytes]:
    with checkpoints._shared_folder("ckpt", _fill(log)) as folder:
        return _read(folder)


def test_one_that_fails_to_fetch_leaves_it_to_the_next(tmp_path: Path, temporary: Path) -> None:
    def fail(folder: str) -> None:
        Path(folder, "half").write_bytes(b"half")
        raise StorageFaultError("away", kind="connection", permanent=False)

    with pytest.raises(StorageFaultError), checkpoints._shared_folder("ckpt", fail):
        pass
    assert [path for path in temporary.iterdir() if path.is_dir()] == []
    assert _read_shared(tmp_path / "fetched") == FILES
    assert list(temporary.iterdir()) == []


def test_a_reader_that_waits_for_too_long_fetches_for_itself(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "_SHARE_SECONDS", 0.2)
    fetching, ended = threading.Event(), threading.Event()

    def stuck(folder: str) -> None:
        fetching.set()
        ended.wait(20)
        _write(folder)

    def read_first() -> dict[str, bytes]:
        with checkpoints._shared_folder("ckpt", stuck) as folder:
            return _read(folder)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(read_first)
        fetching.wait(20)
        assert _read_shared(tmp_path / "fetched") == FILES
        ended.set()
        assert first.result(10) == FILES
    assert list(temporary.iterdir()) == []


def test_readers_that_come_and_go_always_find_a_whole_checkpoint(tmp_path: Path, temporary: Path) -> None:
    log = tmp_path / "fetched"

    def come_and_go(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(25):
            with checkpoints._shared_folder("ckpt", _fill(log, chance.random() / 500)) as folder:
                assert _read(folder) == FILES
                time.sleep(chance.random() / 200)
                assert _read(folder) == FILES
            time.sleep(chance.random() / 100)

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(come_and_go, range(5)))
    assert list(temporary.iterdir()) == []
    assert len(log.read_text().split()) > 1, "nobody was ever the last"


def test_only_its_user_can_read_what_is_shared(tmp_path: Path) -> None:
    with checkpoints._shared_folder("ckpt", _fill(tmp_path / "fetched")) as folder:
        assert os.stat(folder).st_mode & 0o077 == 0


def test_a_checkpoint_on_a_disk_that_this_machine_does_not_see_is_said(disk: Storage) -> None:
    run = disk.run("mnist")
    with (
        pytest.raises(FileNotFoundError, match="/nowhere/ckpt"),
        RunCheckpoint("/nowhere/ckpt", run_filesystem(run, 1)).as_directory(),
    ):
        pass
