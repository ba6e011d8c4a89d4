"""The operations that the fence and the commits stand on, on a real disk, and what a disk gets wrong."""

import errno
import os
import shutil
import stat
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from prefect_elastic_train.core.outcomes import StorageFaultError
from prefect_elastic_train.storage.opening import Storage
from prefect_elastic_train.storage.store import LocalRunStore, RunStore, for_each
from tests.support.processes import wait_for
from tests.unit.support import REPOSITORY

_CREATE_ALL = """
import os, sys, time
sys.path.append(sys.argv[1])
from prefect_elastic_train.storage.store import LocalRunStore
store, me = LocalRunStore(sys.argv[2]), sys.argv[3]
store.replace(f"ready/{me}", b"")
while not os.path.exists(sys.argv[2] + "/go"):
    time.sleep(0.001)
for number in range(int(sys.argv[4])):
    if store.create(f"attempts/{number:04d}.json", me.encode() * 1000):
        print(number)
"""


def _everything(store: RunStore) -> list[str]:
    """Return all paths below a run directory, hidden ones too."""
    return sorted(str(path.relative_to(store.path)) for path in Path(store.path).rglob("*"))


def test_exactly_one_of_several_processes_creates_an_object(store: LocalRunStore) -> None:
    names = 60
    command = [sys.executable, "-c", _CREATE_ALL, str(REPOSITORY), store.path]
    processes = [
        subprocess.Popen([*command, str(me), str(names)], stdout=subprocess.PIPE, text=True) for me in range(3)
    ]
    wait_for(lambda: len(store.names("ready")) == 3, 30, "all processes to be ready")
    store.replace("go", b"")
    won = {str(me): process.communicate(timeout=30)[0].split() for me, process in enumerate(processes)}
    assert sorted(int(number) for numbers in won.values() for number in numbers) == list(range(names))
    for me, numbers in won.items():
        for number in numbers:
            assert store.read(f"attempts/{int(number):04d}.json") == me.encode() * 1000
    assert sorted(os.listdir(f"{store.path}/attempts")) == store.names("attempts")


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize(
    ("write", "function", "after"),
    [
        ("create", "link", False),
        ("create", "link", True),  # its answer was lost
        ("replace", "replace", False),
        ("upload", "copyfile", False),
        ("upload", "copyfile", True),
        *((write, "fsync", False) for write in ("create", "replace", "upload")),
    ],
)
def test_a_passing_error_of_the_disk_is_absorbed_and_a_full_one_told_at_once(
    disk: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str, function: str, after: bool, number: int
) -> None:
    run, source = disk.run("mnist"), tmp_path / "model.pt"
    source.write_bytes(b"weights")
    source.chmod(0o400)
    run.replace("ckpt/other", b"")
    passes = number == errno.EIO
    module = shutil if function == "copyfile" else os
    real, calls = getattr(module, function), list[Any]()

    def fail(*arguments, **options):
        calls.append(arguments)
        is_last = passes and len(calls) > 2
        done = real(*arguments, **options) if after or is_last else None
        if is_last:
            return done
        raise OSError(number, os.strerror(number))

    what = [str(source), "ckpt/model.pt"] if write == "upload" else ["ckpt/model.pt", b"weights"]
    refusal = pytest.raises(StorageFaultError, match=r"cannot \w+ ckpt/model.pt: no space")
    with monkeypatch.context() as patched, nullcontext() if passes else refusal as told:
        patched.setattr(module, function, fail)
        getattr(run, write)(*what)
    if passes:
        assert len(calls) >= (1 if after else 3)
        assert run.read("ckpt/model.pt") == b"weights"
    else:
        assert (told.value.kind, told.value.permanent, len(calls)) == ("no space", True, 1)
        assert run.read("ckpt/model.pt") is None or function == "link"
    assert {*_everything(run)} <= {"ckpt", "ckpt/model.pt", "ckpt/other"}, "a temporary file is left"


def test_files_of_one_name_that_ranks_write_at_one_time_are_one_whole(store: LocalRunStore, tmp_path: Path) -> None:
    whole = [bytes([rank]) * 100_000 * (rank + 1) for rank in range(4)]
    for rank, data in enumerate(whole):
        (tmp_path / str(rank)).write_bytes(data)
    for name in [f"c{number}/weights" for number in range(50)]:
        for_each(range(4), lambda rank, name=name: store.upload(str(tmp_path / str(rank)), name), 4)
        assert store.read(name) in whole
    assert {one.name for one in Path(store.path).rglob("*") if one.is_file()} == {"weights"}


def test_objects_can_be_read_by_others_and_only_files_are_objects_and_only_folders_are_listed(
    store: LocalRunStore,
) -> None:
    store.create("attempts/0001.json", b"{}")
    assert stat.S_IMODE(Path(store.path, "attempts/0001.json").stat().st_mode) == 0o644
    Path(store.path, "attempts/.tmp-abc").write_bytes(b"{")  # what a crash left behind
    assert (store.names("attempts"), store.file_sizes("attempts")) == (["0001.json"], {"0001.json": 2})
    store.create("folder/file", b"")
    Path(store.path, "empty").mkdir()
    assert store.read("folder") is store.size("folder") is store.file_sizes("folder/file") is None
    assert (store.names("folder/file"), store.file_sizes("empty")) == ([], {})
    with pytest.raises(IsADirectoryError):
        store.replace("folder", b"new")


def test_a_folder_that_cannot_be_listed_is_an_error_and_not_an_empty_one(
    store: LocalRunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create("ckpt/model.pt", b"12345")
    scandir = os.scandir

    def fail(path):
        if str(path).endswith("ckpt"):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", fail)
    for ask in (store.file_sizes, store.names, lambda name: store.upload(f"{store.path}/{name}", "copy")):
        with pytest.raises(OSError, match="Input/output error"):
            ask("ckpt")


def test_a_folder_is_deleted_that_somebody_still_writes_into_and_links_are_not_followed(
    disk: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, precious = disk.run("mnist"), tmp_path / "precious"
    precious.write_bytes(b"x")
    run.create("ckpt/a/b", b"")
    run.create("other", b"")
    Path(run.path, "ckpt/link").symlink_to(tmp_path)
    rmdir, late = os.rmdir, iter([Path(run.path, "ckpt/late")])

    def write_late(*arguments, **options):
        for path in late:
            path.write_bytes(b"late")
        rmdir(*arguments, **options)

    monkeypatch.setattr(os, "rmdir", write_late)
    run.delete_folder("ckpt")
    assert _everything(run) == ["other"]
    Path(run.path, "link").symlink_to(tmp_path)
    run.delete_folder("link")
    assert precious.read_bytes() == b"x"


def test_what_shows_that_a_rank_has_stored_its_part_is_stored_after_all_the_rest(
    store: LocalRunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, order = os.replace, list[str]()
    files = [".metadata", "__1_0.distcp", "rank-00001-of-00002.npz", "zero.npz"]
    for name in files:
        (tmp_path / name).write_bytes(b"x")

    def note(source, target):
        order.append(Path(target).name)
        if len(order) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", note)
    with pytest.raises(OSError, match="No space"):
        store.upload(str(tmp_path), "ckpt")
    assert "rank-00001-of-00002.npz" not in order
    store.upload(str(tmp_path), "ckpt")
    assert (sorted(order[3:]), order[-1]) == (files, "rank-00001-of-00002.npz")
