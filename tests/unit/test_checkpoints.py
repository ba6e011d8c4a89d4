"""Checkpoints between a worker's disk and the run directory: written whole, and fetched once a machine."""

import os
import pickle
import shutil
import stat
import tempfile
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import pytest
from pyarrow import fs
from ray.train import Checkpoint
from ray.train.v2._internal.execution import context

from prefect_elastic_train.runs.run_directory import RunDirectory
from prefect_elastic_train.runs.run_filesystem import run_filesystem
from prefect_elastic_train.runs.seeding import copy_source
from prefect_elastic_train.storage.object_store import ObjectRunStore
from prefect_elastic_train.storage.opening import Storage
from prefect_elastic_train.storage.store import LocalRunStore, RunStore
from prefect_elastic_train.worker import loop_inspection
from prefect_elastic_train.worker.checkpoints import (
    RunStorageContext,
    TrackedCheckpoint,
    open_checkpoint,
    use_unique_folders,
)
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
def run(run: RunStore) -> RunStore:
    """A run directory in which an attempt has begun."""
    begin(run)
    return run


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


# Written


@on_all_storages
@pytest.mark.parametrize("filesystem", [None, fs.SubTreeFileSystem("/", fs.LocalFileSystem())], ids=["", "as Ray does"])
def test_what_a_loop_reports_is_read_back_by_whoever_it_is_sent_to_or_opens_its_uri(
    storage: Storage, run: RunStore, source: Path, tmp_path: Path, filesystem: fs.FileSystem | None
) -> None:
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
    (source / "model.pt").chmod(0o755)
    (source / "empty").chmod(0o400)
    reported = _report(run, source)
    for folder in (reported.path, reported.to_directory(tmp_path / "copy")):
        assert [stat.S_IMODE(Path(folder, name).stat().st_mode) for name in FILES] == [0o755, 0o644, 0o400]


@on_a_disk
def test_what_is_no_checkpoint_on_this_machines_disk_is_refused_by_its_path(run: RunStore, source: Path) -> None:
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
    ray = Ray(run, 1).start()
    use_unique_folders(SimpleNamespace(_sync_checkpoint_dir_name_across_ranks=None), 1, 1)  # type: ignore[arg-type]
    placed = ray.storage.build_checkpoint_path_from_name("epoch-3")
    shutil.copytree(source, placed)
    for checkpoint in (Checkpoint(placed), Checkpoint.from_directory(placed)):
        assert context.is_managed_checkpoint(ray.storage, checkpoint)
        assert isinstance(checkpoint.filesystem, fs.PyFileSystem), "whose deletions are fenced"
        ray.register(checkpoint)
    commit = RunDirectory(run, 1).newest_commit
    assert commit.manifest == {"epoch-3": {name: len(data) for name, data in FILES.items()}}
    for path in (source, f"{run.path}/../another"):
        assert not context.is_managed_checkpoint(ray.storage, Checkpoint.from_directory(path))


@on_a_disk
def test_a_checkpoint_is_on_the_disk_before_its_commit(
    storage: Storage, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: dict[int, int] = {}  # of the synced files, by inode
    names: dict[int, list[str]] = {}  # in the synced folders
    checked: list[bool] = []
    fsync, link = os.fsync, os.link

    def sync(descriptor: int) -> None:
        fsync(descriptor)
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            names[found.st_ino] = os.listdir(descriptor)
        else:
            sizes[found.st_ino] = found.st_size

    def is_durable(path: Path) -> bool:
        """A power cut would leave a file or folder as it is, with all folders on the way to it."""
        if path == Path(storage.uri).parent:
            return True
        is_whole = path.is_dir() or sizes.get(path.stat().st_ino) == path.stat().st_size
        return is_whole and path.name in names.get(path.parent.stat().st_ino, []) and is_durable(path.parent)

    def look_and_link(temporary: str, target: Path) -> None:
        if target.parent.name == "commits":
            files = [path for path in target.parents[2].rglob("[!.]*") if ".elastic_train" not in path.parts]
            checked.extend(is_durable(path) for path in files if path.is_file())
        link(temporary, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "link", look_and_link)
    run, copy = storage.run("base"), storage.run("copy")
    ray = Ray(run, begin(run).attempt).start()
    ray.register(RunStorageContext(ray.storage).persist_current_checkpoint(Checkpoint(str(source)), "epochs/1"))
    copy.create(".elastic_train/run.json", b"{}")
    wanted = claim(name="copy", resume_from="base")
    begin(copy, wanted, seed=lambda: copy_source(storage, wanted.request, copy))
    assert checked == [True] * len(FILES) * 2
    assert all(is_durable(commit) for commit in Path(storage.uri).rglob("commits/*")), "nor is it"


# Read


@on_all_storages
def test_a_worker_reads_where_it_is_what_is_on_its_disk_and_a_copy_of_anything_else(
    run: RunStore, source: Path, temporary: Path
) -> None:
    _report(run, source)
    handed = Checkpoint(f"{run.path}/ckpt", run_filesystem(run, 1))
    with TrackedCheckpoint(handed).as_directory() as folder:
        assert _read(folder) == FILES
        assert (folder == handed.path) == isinstance(run, LocalRunStore), "it is read where it is"
    assert list(temporary.iterdir()) == [], "a copy is left"


def test_whether_a_loop_looks_into_its_checkpoint_is_noted(disk: Storage, source: Path) -> None:
    run = disk.run("mnist")
    begin(run)
    _report(run, source)
    for look in (attrgetter("path"), Checkpoint.to_directory, Checkpoint.get_metadata, pickle.dumps):
        loop_inspection.state.opened = False
        found = TrackedCheckpoint(Checkpoint(f"{run.path}/ckpt", run_filesystem(run, 1)))
        assert not loop_inspection.state.opened
        look(found)
        assert loop_inspection.state.opened


@on_object_stores
def test_ranks_of_a_machine_fetch_what_they_are_handed_once(
    run: RunStore, source: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _report(run, source)
    handed = Checkpoint(f"{run.path}/ckpt", run_filesystem(run, 1))
    first, second = (TrackedCheckpoint(pickle.loads(pickle.dumps(handed))) for _ in range(2))
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
    checkpoint = _report(run, source)

    def die(store: RunStore, name: str, target: str) -> None:
        Path(target, "half").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ObjectRunStore, "download", die)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.to_directory()
    assert _read(checkpoint.to_directory()) == FILES
