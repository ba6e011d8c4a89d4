"""The operations that the fence and the commits stand on, on a real disk, and what a disk gets wrong."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
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


class Failing:
    """A function that fails so many times, before or after it has done its work."""

    def __init__(self, real: Any, number: int, times: float, after: bool = False) -> None:
        self.real, self.number, self.times, self.after, self.calls = real, number, times, after, 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls > self.times:
            return self.real(*arguments, **options)
        if self.after:
            self.real(*arguments, **options)
        raise OSError(self.number, os.strerror(self.number))


def _create(run: RunStore, source: Path) -> None:
    assert run.create("ckpt/model.pt", source.read_bytes())
    assert not run.create("ckpt/model.pt", b"another's")


def _replace(run: RunStore, source: Path) -> None:
    run.replace("ckpt/model.pt", source.read_bytes())


def _upload(run: RunStore, source: Path) -> None:
    source.chmod(0o400)
    run.upload(str(source), "ckpt/model.pt")


FAILING: list[tuple[str, bool, Callable[[RunStore, Path], None]]] = [
    ("link", False, _create),
    ("link", True, _create),  # its answer was lost
    ("fsync", False, _create),
    ("replace", False, _replace),
    ("fsync", False, _replace),
    ("copyfile", False, _upload),
    ("copyfile", True, _upload),
    ("fsync", False, _upload),
]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize(("function", "after", "write"), FAILING)
def test_a_passing_error_of_the_disk_is_absorbed_and_a_full_one_told_at_once(
    disk: Storage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    after: bool,
    write: Callable[[RunStore, Path], None],
    number: int,
) -> None:
    run, source = disk.run("mnist"), tmp_path / "model.pt"
    source.write_bytes(b"weights")
    run.replace("ckpt/other", b"")
    passes = number == errno.EIO
    module: Any = shutil if function == "copyfile" else os
    failing = Failing(getattr(module, function), number, 2 if passes else 100, after)
    with monkeypatch.context() as patched:
        patched.setattr(module, function, failing)
        if passes:
            write(run, source)
            assert failing.calls >= (1 if after else 3)
        else:
            with pytest.raises(StorageFaultError, match=r"cannot \w+ ckpt/model.pt: no space") as told:
                write(run, source)
            assert (told.value.kind, told.value.permanent, failing.calls) == ("no space", True, 1)
    if passes:
        assert run.read("ckpt/model.pt") == b"weights"
        assert _everything(run) == ["ckpt", "ckpt/model.pt", "ckpt/other"], "a temporary file is left"
    else:
        assert not [name for name in _everything(run) if ".tmp-" in name]


def test_files_of_one_name_that_ranks_write_at_one_time_are_one_whole(store: LocalRunStore, tmp_path: Path) -> None:
    whole = [bytes([rank]) * 100_000 * (rank + 1) for rank in range(4)]
    for rank, data in enumerate(whole):
        (tmp_path / str(rank)).write_bytes(data)
    for name in [f"c{number}/weights" for number in range(50)]:
        for_each(range(4), lambda rank, name=name: store.upload(str(tmp_path / str(rank)), name), 4)
        assert store.read(name) in whole
    assert {one.name for one in Path(store.path).rglob("*") if one.is_file()} == {"weights"}


def test_a_failed_replace_keeps_the_old_content(store: LocalRunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.replace("a.json", b"old")
    store.create("folder/a", b"")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", Failing(None, errno.ENOSPC, 100))
        with pytest.raises(OSError, match="No space left"):
            store.replace("a.json", b"new")
    with pytest.raises(IsADirectoryError):
        store.replace("folder", b"new")
    assert store.read("a.json") == b"old"
    assert _everything(store) == ["a.json", "folder", "folder/a"]


def test_objects_can_be_read_by_others_and_only_files_are_objects_and_only_folders_are_listed(
    store: LocalRunStore,
) -> None:
    store.create("attempts/0001.json", b"{}")
    assert stat.S_IMODE(Path(store.path, "attempts/0001.json").stat().st_mode) == 0o644
    Path(store.path, "attempts/.tmp-abc").write_bytes(b"{")
    assert store.names("attempts") == ["0001.json"]
    assert store.file_sizes("attempts") == {"0001.json": 2}, "what a crash left behind counts"
    store.create("folder/file", b"")
    Path(store.path, "empty").mkdir()
    assert store.read("folder") is store.size("folder") is store.file_sizes("folder/file") is None
    assert store.names("folder/file") == []
    assert store.file_sizes("empty") == {}


def test_a_folder_that_cannot_be_listed_is_an_error_and_not_an_empty_one(
    store: LocalRunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create("ckpt/model.pt", b"12345")
    scandir = os.scandir

    def fail(path: str) -> object:
        if str(path).endswith("ckpt"):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", fail)
    for ask in (store.file_sizes, store.names):
        with pytest.raises(OSError, match="Input/output error"):
            ask("ckpt")
    with pytest.raises(OSError, match="Input/output error"):
        store.upload(f"{store.path}/ckpt", "copy")


def test_a_folder_is_deleted_that_somebody_still_writes_into_and_links_are_not_followed(
    store: LocalRunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_bytes(b"x")
    store.create("ckpt/a/b", b"")
    store.create("other", b"")
    Path(store.path, "ckpt/link").symlink_to(tmp_path / "outside")
    rmdir, late = os.rmdir, iter([Path(store.path, "ckpt/late")])

    def write_late(*arguments: Any, **options: Any) -> None:
        for path in late:
            path.write_bytes(b"late")
        rmdir(*arguments, **options)

    monkeypatch.setattr(os, "rmdir", write_late)
    assert store.delete_folder("ckpt")
    assert _everything(store) == ["other"]
    Path(store.path, "link").symlink_to(tmp_path / "outside")
    assert not store.delete_folder("link")
    assert (tmp_path / "outside" / "precious").read_bytes() == b"x"


def test_a_link_whose_answer_was_lost_counts_for_its_creator_and_for_nobody_else(
    store: LocalRunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def link_twice(source: Any, target: Any) -> None:
        """What an NFS client does when the server's answer to its first try was lost."""
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", link_twice)
    assert store.create("attempts/0001.json", b"mine")
    assert not store.create("attempts/0001.json", b"yours")

    def exists_since_a_moment(source: Any, target: Any) -> None:
        Path(target).write_bytes(b"theirs")
        raise FileExistsError(target)

    monkeypatch.setattr(os, "link", exists_since_a_moment)
    assert not store.create("attempts/0002.json", b"mine")
    assert store.read("attempts/0002.json") == b"theirs"


def test_what_shows_that_a_rank_has_stored_its_part_is_stored_after_all_the_rest(
    store: LocalRunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, replace, order = tmp_path / "checkpoint", os.replace, list[str]()
    (folder / "jax" / "ocdbt").mkdir(parents=True)
    files = [".metadata", "__1_0.distcp", "jax/ocdbt/manifest", "rank-00001-of-00002.npz", "zero.npz"]
    for name in files:
        (folder / name).write_bytes(b"x")

    def note(source: Any, target: Any) -> None:
        order.append(os.path.relpath(target, Path(store.path, "ckpt")))
        if order[-1] == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", note)
    failing = "zero.npz"
    with pytest.raises(OSError, match="No space"):
        store.upload(str(folder), "ckpt")
    assert "rank-00001-of-00002.npz" not in (store.file_sizes("ckpt") or {})
    failing = ""
    order.clear()
    store.upload(str(folder), "ckpt")
    assert (sorted(order), order[-1]) == (sorted(files), "rank-00001-of-00002.npz")
