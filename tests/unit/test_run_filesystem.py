"""The filesystem that Ray Train writes a run through, as Ray uses it: over a real pyarrow filesystem."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from ray.train.v2._internal.execution.training_report import _TrainingReport

from prefect_elastic_train.core.checkpoint_names import physical_name
from prefect_elastic_train.core.outcomes import ElasticTrainError
from prefect_elastic_train.core.records import CommitRecord, decode
from prefect_elastic_train.elastic.checkpoints import run_filesystem
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.commits import FencedOffError, all_commits
from prefect_elastic_train.runs.model import RunDirectory
from prefect_elastic_train.runs.resume import remove_interrupted_uploads
from prefect_elastic_train.storage.store import LocalRunStore
from tests.unit.ray_storage import Ray
from tests.unit.support import begin, empty_snapshot, with_result


def _write_snapshot(store: LocalRunStore, attempt: int, data: bytes) -> None:
    filesystem = run_filesystem(store, attempt)
    with filesystem.open_output_stream(f"{store.path}/{layout.SNAPSHOT}") as stream:
        stream.write(data)


def test_each_report_to_ray_becomes_a_commit_and_a_mirror(store: LocalRunStore) -> None:
    ray = Ray(store, begin(store).attempt).start()
    ray.report("a", loss=0.5)
    ray.report("b", loss=0.25)
    assert all_commits(store) == [(1, 1), (1, 2)]
    record = decode(CommitRecord, store.read(layout.commit_name(1, 2)))
    assert record is not None
    assert record.manifest == {name: {"model.pt": 1, "rank-0/optim.pt": 2} for name in "ab"}
    assert json.loads(store.read(layout.SNAPSHOT) or b"") == record.snapshot
    assert record.snapshot["latest_checkpoint_result"]["metrics"] == {"loss": 0.25}


def test_ray_goes_on_from_the_last_commit_in_the_next_attempt(store: LocalRunStore) -> None:
    first = Ray(store, begin(store).attempt).start()
    first.report("a")
    first.report("b")
    second = Ray(store, begin(store).attempt).start()
    assert second.latest == "b"
    second.report("c")
    assert RunDirectory(store).resume_point.base == (2, 1)


def test_ray_keeps_so_many_checkpoints_and_their_commits_stay_whole(store: LocalRunStore) -> None:
    ray = Ray(store, begin(store).attempt, num_to_keep=2, checkpoint_score_attribute="acc").start()
    for number, accuracy in enumerate([0.9, 0.1, 0.8, 0.2, 0.3]):
        ray.report(f"checkpoint-{number}", acc=accuracy)
    assert store.folders() == [layout.STATE_FOLDER, "checkpoint-0", "checkpoint-2", "checkpoint-4"]
    point = RunDirectory(store).resume_point
    assert (point.checkpoint, point.repairs) == ("checkpoint-4", [])


def test_a_fenced_off_controller_is_stopped_by_its_own_snapshot(store: LocalRunStore) -> None:
    old = Ray(store, begin(store).attempt).start()
    old.report("a")
    checkpoint = old.upload("b", {"model.pt": b"b"})
    begin(store)

    async def register() -> None:
        old.manager.register_checkpoint(_TrainingReport(checkpoint, {}, validation=False))

    with pytest.raises(FencedOffError, match="taken over by attempt 2"):
        asyncio.run(register())
    assert RunDirectory(store).resume_point.checkpoint == "a"
    with pytest.raises(FencedOffError):
        old.upload("c", {"model.pt": b"c"})
    assert "c" not in store.folders()


def test_a_fenced_off_controller_deletes_no_checkpoint_although_it_keeps_one(store: LocalRunStore) -> None:
    old = Ray(store, begin(store).attempt, num_to_keep=1).start()
    old.report("a")
    checkpoint = old.upload("b", {"model.pt": b"b"})
    successor = Ray(store, begin(store).attempt, num_to_keep=1).start()

    async def register() -> None:
        old.manager.register_checkpoint(_TrainingReport(checkpoint, {}, validation=False))

    with pytest.raises(FencedOffError):
        asyncio.run(register())
    assert successor.latest == "a"
    assert store.file_sizes("a") == {"model.pt": 1, "rank-0/optim.pt": 2}


def test_a_torn_snapshot_is_refused_when_it_is_closed_and_changes_nothing(store: LocalRunStore) -> None:
    ray = Ray(store, begin(store).attempt).start()
    ray.report("a")
    whole = store.read(layout.SNAPSHOT)
    assert whole is not None
    for torn in (whole[: len(whole) // 2], b""):
        with pytest.raises(ElasticTrainError, match="torn snapshot"):
            _write_snapshot(store, 1, torn)
    assert store.read(layout.SNAPSHOT) == whole
    assert all_commits(store) == [(1, 1)]


def test_a_snapshot_written_in_pieces_is_one_commit(store: LocalRunStore) -> None:
    begin(store)
    store.create("a/model.pt", b"1")
    data = json.dumps(with_result(empty_snapshot(), "a", {})).encode()
    filesystem = run_filesystem(store, 1)
    with filesystem.open_output_stream(f"{store.path}/{layout.SNAPSHOT}") as stream:
        for start in range(0, len(data), 7):
            stream.write(data[start : start + 7])
    assert all_commits(store) == [(1, 1)]
    assert store.read(layout.SNAPSHOT) == data
    with filesystem.open_input_stream(f"{store.path}/{layout.SNAPSHOT}") as stream:
        assert stream.read() == data


def test_a_crash_in_the_middle_of_a_snapshot_commits_nothing(store: LocalRunStore) -> None:
    begin(store)
    filesystem = run_filesystem(store, 1)

    def crash() -> None:
        with filesystem.open_output_stream(f"{store.path}/{layout.SNAPSHOT}") as stream:
            stream.write(b'{"checkpoint_results": [')
            raise RuntimeError("the controller failed while it wrote")

    with pytest.raises((RuntimeError, ElasticTrainError)):
        crash()
    assert all_commits(store) == []
    assert store.read(layout.SNAPSHOT) is None


def test_a_checkpoint_in_a_folder_of_folders_is_resumed_from(store: LocalRunStore) -> None:
    ray = Ray(store, begin(store).attempt).start()
    ray.report("epochs/1")
    ray.report("epochs/2")
    resumed = Ray(store, begin(store).attempt).start().manager.latest_checkpoint_result
    assert resumed.checkpoint.path == f"{store.path}/epochs/2"


def _write(filesystem: Any, path: str) -> None:
    with filesystem.open_output_stream(path) as stream:
        stream.write(b"late")


CHANGES: dict[str, Callable[[Any, str], None]] = {
    "delete a folder": lambda filesystem, run: filesystem.delete_dir(f"{run}/a"),
    "delete the run": lambda filesystem, run: filesystem.delete_dir(run),
    "delete a file": lambda filesystem, run: filesystem.delete_file(f"{run}/a/model.pt"),
    "write": lambda filesystem, run: _write(filesystem, f"{run}/a/model.pt"),
    "write another": lambda filesystem, run: _write(filesystem, f"{run}/a/another.pt"),
    "create a folder": lambda filesystem, run: filesystem.create_dir(f"{run}/a/folder"),
    "upload": lambda filesystem, run: filesystem.handler.upload_folder(__file__, f"{run}/a/model.pt"),
}
REFUSED: dict[str, Callable[[Any, str], None]] = {
    "empty a folder": lambda filesystem, run: filesystem.delete_dir_contents(f"{run}/a"),
    "empty all": lambda filesystem, run: filesystem.delete_dir_contents("", accept_root_dir=True),
    "move": lambda filesystem, run: filesystem.move(f"{run}/a", f"{run}/b"),
    "copy": lambda filesystem, run: filesystem.copy_file(f"{run}/a/model.pt", f"{run}/a/copy"),
    "append": lambda filesystem, run: filesystem.open_append_stream(f"{run}/a/model.pt"),
    "delete the run": lambda filesystem, run: filesystem.delete_dir(run),
    "delete the records": lambda filesystem, run: filesystem.delete_dir(f"{run}/{layout.COMMITS}"),
    "delete elsewhere": lambda filesystem, run: filesystem.delete_dir(f"{run}-other"),
    "delete above": lambda filesystem, run: filesystem.delete_dir(f"{run}/a/../../other"),
    "write elsewhere": lambda filesystem, run: _write(filesystem, f"{run}/../other/a"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_fenced_off_attempt_changes_nothing(store: LocalRunStore, change: Callable[[Any, str], None]) -> None:
    Ray(store, begin(store).attempt).start().report("a")
    begin(store)
    filesystem = run_filesystem(store, 1)
    with pytest.raises(FencedOffError):
        change(filesystem, store.path)
    assert store.file_sizes("a") == {"model.pt": 1, "rank-0/optim.pt": 2}
    assert sorted(path.name for path in Path(store.path, "a").iterdir()) == ["model.pt", "rank-0"]
    assert sorted(path.name for path in Path(store.path).parent.iterdir()) == [Path(store.path).name]


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_what_no_training_needs_is_refused(store: LocalRunStore, change: Callable[[Any, str], None]) -> None:
    Ray(store, begin(store).attempt).start().report("a")
    before = store.file_sizes("")
    with pytest.raises((io.UnsupportedOperation, ElasticTrainError), match=r"refused|is not in|not moved, copied"):
        change(run_filesystem(store, 1), store.path)
    assert store.file_sizes("") == before


class Died(BaseException):
    """The process was killed."""


def _die_in_the_next_deletion(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: Any, **__: Any) -> bool:
        monkeypatch.undo()
        raise Died

    monkeypatch.setattr(LocalRunStore, "delete_folder", die)


PING, PONG = physical_name("ping", 1, report=1), physical_name("pong", 1, report=2)


def _dies_between_commit_and_deletion(store: LocalRunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a run of two checkpoints that keeps one, in which the first was not deleted any more."""
    ray = Ray(store, begin(store).attempt, num_to_keep=1).start()
    ray.report(PING)
    _die_in_the_next_deletion(monkeypatch)
    with pytest.raises(Died):
        ray.report(PONG)
    assert store.folders() == [layout.STATE_FOLDER, PING, PONG]


def test_a_checkpoint_whose_deletion_a_crash_prevented_goes_before_the_next_workers_start(
    store: LocalRunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _dies_between_commit_and_deletion(store, monkeypatch)
    begin(store)  # dies at once
    begun = begin(store)
    assert (begun.point.checkpoint, begun.notes) == (PONG, [])
    assert remove_interrupted_uploads(store, begun.attempt) == {PING: "no longer kept"}
    assert store.folders() == [layout.STATE_FOLDER, PONG]
    assert remove_interrupted_uploads(store, begun.attempt) == {}


def test_a_deletion_that_fails_is_made_up_for(store: LocalRunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray(store, begin(store).attempt, num_to_keep=1).start()
    ray.report(PING)

    def fail(*_: Any, **__: Any) -> bool:
        monkeypatch.undo()
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(LocalRunStore, "delete_folder", fail)
    for number in range(3):
        ray.report(f"epoch-{number}")  # Ray logs the error and goes on
    assert store.folders() == [layout.STATE_FOLDER, "epoch-2", PING]
    assert remove_interrupted_uploads(store, 1) == {PING: "no longer kept"}


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
def test_it_travels_to_the_workers_with_path_and_attempt(store: LocalRunStore, pickler: Any) -> None:
    begin(store)
    store.create("a/model.pt", b"1")
    copy = pickle.loads(pickler.dumps(run_filesystem(store, 1)))
    assert copy == run_filesystem(store, 1)
    assert copy.handler == run_filesystem(store, 1).handler
    assert hash(copy.handler) == hash(run_filesystem(store, 1).handler)
    assert copy.handler != run_filesystem(store, 2).handler
    assert copy.handler != run_filesystem(LocalRunStore(f"{store.path}x"), 1).handler
    with copy.open_output_stream(f"{store.path}/{layout.SNAPSHOT}") as stream:
        stream.write(json.dumps(with_result(empty_snapshot(), "a", {})).encode())
    assert all_commits(store) == [(1, 1)]
