"""Checkpoints between a worker's disk and the run directory: written whole, and fetched once a machine."""

from __future__ import annotations

import os
import pickle
import shutil
import stat
import tempfile
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import pytest
from pyarrow import fs
from ray.train import Checkpoint
from ray.train.v2._internal.execution import context

from prefect_elastic_train.core.outcomes import StorageFaultError
from prefect_elastic_train.runs.run_directory import RunDirectory
from prefect_elastic_train.runs.run_filesystem import run_filesystem
from prefect_elastic_train.runs.seeding import copy_source
from prefect_elastic_train.storage.object_store import ObjectRunStore
from prefect_elastic_train.storage.opening import Storage
from prefect_elastic_train.storage.store import LocalRunStore, RunStore
from prefect_elastic_train.worker import loop_inspection
from prefect_elastic_train.worker.checkpoints import (
    RunStorageContext,
    open_checkpoint,
    tracked_checkpoint,
    use_unique_folders,
)
from tests.support.s3 import FaultProxy
from tests.unit.ray_storage import Ray
from tests.unit.support import begin, claim

on_all_storages = pytest.mark.parametrize("storage", ["disk", "memory", "s3"], indirect=True)
on_object_stores = pytest.mark.parametrize("storage", ["memory", "s3"], indirect=True)
on_a_disk = pytest.mark.parametrize("storage", ["disk"], indirect=True)

FILES = {"model.pt": b"weights", "rank-0/optim.pt": b"12", "empty": b""}


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
    for name, data in FILES.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "source"


def _read(folder: Path | str) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()
    }


def _report(run: RunStore, source: Path, name: str = "ckpt") -> Checkpoint:
    return RunStorageContext(Ray(run, 1).storage).persist_current_checkpoint(Checkpoint(str(source)), name)


def _readable(handed: Checkpoint) -> Checkpoint:
    found = tracked_checkpoint(handed)
    assert found is not None
    return found


# Written


@on_all_storages
@pytest.mark.parametrize("filesystem", [None, fs.SubTreeFileSystem("/", fs.LocalFileSystem())], ids=["", "as Ray does"])
def test_what_a_loop_reports_is_read_back_by_whoever_it_is_sent_to_or_opens_its_uri(
    storage: Storage, run: RunStore, source: Path, tmp_path: Path, filesystem: fs.FileSystem | None
) -> None:
    begin(run)
    reported = RunStorageContext(Ray(run, 1).storage).persist_current_checkpoint(
        Checkpoint(str(source), filesystem), "ckpt"
    )
    assert reported.path == f"{run.path}/ckpt"
    assert run.file_sizes("ckpt") == {name: len(data) for name, data in FILES.items()}
    for number, found in enumerate((reported, open_checkpoint(f"{run.uri}/ckpt", storage.settings))):
        sent = pickle.loads(cloudpickle.dumps(found))
        with sent.as_directory() as folder:
            assert _read(folder) == FILES
        assert _read(sent.to_directory(tmp_path / f"copy-{number}")) == FILES
        with sent.filesystem.open_input_file(f"{sent.path}/model.pt") as file:
            assert file.read() == FILES["model.pt"]
    copy = reported.to_directory()
    assert _read(copy) == FILES
    assert copy != reported.path
    assert _read(source) == FILES, "the loop's own is as it was"


@on_a_disk
def test_files_keep_their_permissions_in_a_run_and_in_copies(run: RunStore, source: Path, tmp_path: Path) -> None:
    begin(run)
    (source / "model.pt").chmod(0o755)
    (source / "empty").chmod(0o400)
    reported = _report(run, source)
    for folder in (reported.path, reported.to_directory(tmp_path / "copy")):
        assert [stat.S_IMODE(Path(folder, name).stat().st_mode) for name in FILES] == [0o755, 0o644, 0o400]


@on_a_disk
def test_what_is_no_checkpoint_on_this_machines_disk_is_refused_by_its_path(run: RunStore, source: Path) -> None:
    begin(run)
    (source / "rank-0/latest").symlink_to("step-7.pt")
    with pytest.raises(ValueError, match=r"rank-0/latest is not a file, but a link to 'step-7.pt'; remove"):
        _report(run, source)
    (source / "rank-0/latest").unlink()
    (source / "rank-1").mkdir()
    for name, target in {"rank-0/other": "../rank-1", "rank-1/other": "../rank-0"}.items():
        (source / name).symlink_to(target)
    with pytest.raises(ValueError, match=r"other/other is a link to one of its parent folders"):
        _report(run, source)
    with pytest.raises(FileNotFoundError, match=f"the reported checkpoint does not exist: {source}/none"):
        _report(run, source / "none", "another")
    assert "another" not in run.folders()


@on_a_disk
def test_what_a_loop_has_put_into_the_run_itself_is_committed_whichever_filesystem_it_names(
    run: RunStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "is_managed_checkpoint", context.is_managed_checkpoint)  # put back afterwards
    begin(run)
    ray = Ray(run, 1).start()
    use_unique_folders(SimpleNamespace(_sync_checkpoint_dir_name_across_ranks=None), 1, 1)  # type: ignore[arg-type]
    placed = ray.storage.build_checkpoint_path_from_name("epoch-3")
    shutil.copytree(source, placed)
    for checkpoint in (Checkpoint(placed), Checkpoint.from_directory(placed)):
        assert context.is_managed_checkpoint(ray.storage, checkpoint)
        assert isinstance(checkpoint.filesystem, fs.PyFileSystem), "whose deletions are fenced"
        ray.register(checkpoint)
    commit = RunDirectory(run, 1).newest_commit
    assert commit is not None
    assert commit.manifest == {"epoch-3": {name: len(data) for name, data in FILES.items()}}
    for path in (source, f"{run.path}/../another"):
        assert not context.is_managed_checkpoint(ray.storage, Checkpoint.from_directory(path))


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
        """Return path and size of the files that are left of a path in a folder that was always there."""
        inode: int | None = os.stat(folder).st_ino
        for name in path.split("/"):
            inode = self._folders.get(inode or 0, {}).get(name)
        return dict(self._walk(inode or 0, ""))

    def _walk(self, inode: int, path: str) -> Iterator[tuple[str, int]]:
        if inode in self._files:
            yield path, self._files[inode]
        for name, below in self._folders.get(inode, {}).items():
            yield from self._walk(below, f"{path}/{name}".lstrip("/"))


@on_a_disk
def test_a_checkpoint_is_on_the_disk_before_its_commit(
    storage: Storage, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top, disk, link = os.path.dirname(storage.uri), Disk(monkeypatch), os.link
    left = []

    def look_and_link(temporary: Path, target: Path) -> None:
        if target.parent.name == "commits":
            folder = "base/epochs/1" if not left else f"copy/{copy.folders()[-1]}"
            left.append(disk.left_below(top, f"runs/{folder}"))
        link(temporary, target)

    monkeypatch.setattr(os, "link", look_and_link)
    run, copy = storage.run("base"), storage.run("copy")
    ray = Ray(run, begin(run).attempt).start()
    ray.register(RunStorageContext(ray.storage).persist_current_checkpoint(Checkpoint(str(source)), "epochs/1"))
    copy.create(".elastic_train/run.json", b"{}")
    wanted = claim(name="copy", resume_from="base")
    begin(copy, wanted, seed=lambda: copy_source(storage, wanted.request, copy))
    assert left == [{name: len(data) for name, data in FILES.items()}] * 2
    for name in ("base", "copy"):
        commits = storage.run(name).file_sizes(".elastic_train/commits")
        assert commits is not None
        assert disk.left_below(top, f"runs/{name}/.elastic_train/commits").keys() >= commits.keys(), "nor is it"


# Read


@on_all_storages
def test_a_worker_reads_where_it_is_what_is_on_its_disk_and_a_copy_of_anything_else(
    run: RunStore, source: Path, temporary: Path
) -> None:
    begin(run)
    _report(run, source)
    handed = Checkpoint(f"{run.path}/ckpt", run_filesystem(run, 1))
    with _readable(handed).as_directory() as folder:
        assert _read(folder) == FILES
        assert (folder == handed.path) == isinstance(run, LocalRunStore), "it is read where it is"
    assert list(temporary.iterdir()) == [], "a copy is left"


def test_whether_a_loop_looks_into_its_checkpoint_is_noted(disk: Storage, source: Path) -> None:
    run = disk.run("mnist")
    begin(run)
    _report(run, source)
    for look in (attrgetter("path"), Checkpoint.to_directory, Checkpoint.get_metadata, pickle.dumps):
        loop_inspection.state.opened = False
        found = _readable(Checkpoint(f"{run.path}/ckpt", run_filesystem(run, 1)))
        assert not loop_inspection.state.opened
        look(found)
        assert loop_inspection.state.opened


@on_object_stores
def test_ranks_of_a_machine_fetch_what_they_are_handed_once(
    run: RunStore, source: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(run)
    _report(run, source)
    handed = Checkpoint(f"{run.path}/ckpt", run_filesystem(run, 1))
    first, second = (_readable(pickle.loads(pickle.dumps(handed))) for _ in range(2))
    fetched: list[str] = []
    download = ObjectRunStore.download
    with monkeypatch.context() as patch:
        patch.setattr(ObjectRunStore, "download", lambda *told: [fetched.append(told[1]), download(*told)])
        patch.setattr(os, "getpid", lambda: 1)
        with first.as_directory() as folder:
            patch.setattr(os, "getpid", lambda: 2)  # Ray counts readers by their processes
            with second.as_directory() as another:
                assert folder == another
                assert _read(another) == FILES
            patch.setattr(os, "getpid", lambda: 1)
            assert _read(folder) == FILES, "removed under a reader"
            assert os.stat(folder).st_mode & 0o077 == 0, "others can read it"
    assert fetched == ["ckpt"]
    assert list(temporary.iterdir()) == []


@on_object_stores
def test_a_process_that_is_killed_while_it_fetches_leaves_no_half_of_a_checkpoint_to_others(
    run: RunStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(run)
    checkpoint = _report(run, source)

    def die(store: RunStore, name: str, target: str) -> None:
        Path(target, "half").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ObjectRunStore, "download", die)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.to_directory()
    assert _read(checkpoint.to_directory()) == FILES


def test_a_storage_that_refuses_while_it_is_read_leaves_no_half_of_a_checkpoint(
    s3: Storage, proxy: FaultProxy, source: Path, temporary: Path
) -> None:
    run = s3.run("refused-while-read")
    begin(run)
    checkpoint = _report(run, source)
    proxy.allow_keys({"AKIA" + "Z" * 16})
    with pytest.raises(StorageFaultError, match="credentials"), checkpoint.as_directory():
        pass
    assert [name for path in temporary.iterdir() for name in _read(path)] == []
