"""The operations that the fence and the commits stand on, on a real disk."""

from __future__ import annotations

import errno
import itertools
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from prefect_elastic_train.storage.store import LocalRunStore
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


def _everything(store: LocalRunStore) -> list[str]:
    """Give all paths below a run directory, hidden ones too."""
    return sorted(str(path.relative_to(store.path)) for path in Path(store.path).rglob("*"))


def test_exactly_one_of_several_processes_creates_an_object(store: LocalRunStore) -> None:
    names = 60
    command = [sys.executable, "-c", _CREATE_ALL, str(REPOSITORY), store.path]
    processes = [
        subprocess.Popen([*command, str(me), str(names)], stdout=subprocess.PIPE, text=True) for me in range(4)
    ]
    wait_for(lambda: len(store.names("ready")) == 4, 30, "all processes to be ready")
    store.replace("go", b"")
    won = {str(me): process.communicate(timeout=30)[0].split() for me, process in enumerate(processes)}
    assert sorted(int(number) for numbers in won.values() for number in numbers) == list(range(names))
    for me, numbers in won.items():
        for number in numbers:
            assert store.read(f"attempts/{int(number):04d}.json") == me.encode() * 1000
    assert store.names("attempts") == [f"{number:04d}.json" for number in range(names)]
    assert len(os.listdir(f"{store.path}/attempts")) == names


def test_create_is_exclusive_on_a_mount_without_hard_links(
    store: LocalRunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert store.create("a.json", b"first")
    assert not store.create("a.json", b"second")
    assert store.read("a.json") == b"first"
    assert _everything(store) == ["a.json"]


def test_create_passes_on_an_error_of_the_disk_and_leaves_nothing(
    store: LocalRunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(OSError, match="Input/output error"):
        store.create("a.json", b"first")
    assert _everything(store) == []


def test_a_failed_replace_keeps_the_old_content_and_leaves_nothing(
    store: LocalRunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.replace("a.json", b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            store.replace("a.json", b"new")
    assert store.read("a.json") == b"old"
    assert _everything(store) == ["a.json"]


def test_replace_onto_a_folder_fails_and_leaves_nothing(store: LocalRunStore) -> None:
    store.create("folder/a", b"")
    with pytest.raises(IsADirectoryError):
        store.replace("folder", b"new")
    assert _everything(store) == ["folder", "folder/a"]


def test_a_reader_never_sees_a_mixture_while_an_object_is_replaced(store: LocalRunStore) -> None:
    contents = [bytes([65 + number]) * (20_000 + 10_000 * number) for number in range(2)]
    store.replace("a.json", contents[0])
    done = threading.Event()

    def write() -> None:
        for number in itertools.count():
            if number >= 150 and done.is_set():
                break
            store.replace("a.json", contents[number % 2])

    writer = threading.Thread(target=write)
    writer.start()
    seen: set[bytes | None] = set()
    give_up = time.monotonic() + 30
    # The writer may be through with any number of contents before this thread has its turn.
    for reads in itertools.count(1):
        seen.add(store.read("a.json"))
        if (reads >= 150 and len(seen) > 1) or time.monotonic() > give_up:
            break
    done.set()
    writer.join()
    assert seen == set(contents)


def test_objects_can_be_read_by_others(store: LocalRunStore) -> None:
    store.create("created", b"")
    store.replace("replaced", b"")
    for name in ("created", "replaced"):
        assert stat.S_IMODE(Path(store.path, name).stat().st_mode) == 0o644


def test_what_a_crashed_write_left_behind_is_passed_over(store: LocalRunStore) -> None:
    store.create("attempts/0001.json", b"{}")
    Path(store.path, "attempts/.tmp-abc").write_bytes(b"{")
    assert store.names("attempts") == ["0001.json"]


def test_a_file_is_no_folder_and_a_folder_no_file(store: LocalRunStore) -> None:
    store.create("folder/file", b"")
    assert store.read("folder") is None
    assert store.names("folder/file") == []
    assert store.file_sizes("folder/file") is None


def test_file_sizes_are_of_all_files_below_with_forward_slashes(store: LocalRunStore) -> None:
    store.create("ckpt/model.pt", b"12345")
    store.create("ckpt/rank-0/optim/state.pt", b"12")
    Path(store.path, "ckpt/empty").mkdir()
    assert store.file_sizes("ckpt") == {"model.pt": 5, "rank-0/optim/state.pt": 2}
    assert store.file_sizes("ckpt/empty") == {}


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
    with pytest.raises(OSError, match="Input/output error"):
        store.file_sizes("ckpt")


def test_delete_folder_takes_all_below_and_does_not_follow_links(store: LocalRunStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"x")
    store.create("ckpt/a/b", b"")
    store.create("other", b"")
    Path(store.path, "ckpt/link").symlink_to(outside)
    store.delete_folder("ckpt")
    assert _everything(store) == ["other"]
    assert (outside / "precious").read_bytes() == b"x"


def test_the_uri_is_the_plain_path(store: LocalRunStore) -> None:
    assert store.uri == store.path
    assert not store.path.startswith("file:")


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
    assert store.read("attempts/0001.json") == b"mine"

    def exists_since_a_moment(source: Any, target: Any) -> None:
        Path(target).write_bytes(b"theirs")
        raise FileExistsError(target)

    monkeypatch.setattr(os, "link", exists_since_a_moment)
    assert not store.create("attempts/0002.json", b"mine")
    assert store.read("attempts/0002.json") == b"theirs"
