"""The filesystem that Ray Train writes a run through, as Ray uses it: over a real pyarrow filesystem."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from pyarrow import fs
from ray.train.v2._internal.execution.training_report import _TrainingReport

from prefect_elastic_train.filesystems import run_filesystem, uploading
from prefect_elastic_train.outcomes import ElasticTrainError
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.commits import FencedOffError, all_commits, unquote_mark
from prefect_elastic_train.runs.records import CommitRecord, decode
from prefect_elastic_train.runs.resume import find_resume_point
from prefect_elastic_train.runs.store import LocalRunStore
from tests.unit.ray_storage import Ray
from tests.unit.support import begin, empty_snapshot, with_result


def _marks(store: LocalRunStore) -> list[str]:
    return [unquote_mark(mark) for mark in store.names(layout.UPLOADS)]


def _write_snapshot(store: LocalRunStore, attempt: int, data: bytes) -> None:
    filesystem = run_filesystem(store.path, attempt)
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
    assert find_resume_point(store).base == (2, 1)


def test_ray_keeps_so_many_checkpoints_and_their_commits_stay_whole(store: LocalRunStore) -> None:
    ray = Ray(store, begin(store).attempt, num_to_keep=2, checkpoint_score_attribute="acc").start()
    for number, accuracy in enumerate([0.9, 0.1, 0.8, 0.2, 0.3]):
        ray.report(f"checkpoint-{number}", acc=accuracy)
    assert store.folders() == [layout.STATE_FOLDER, "checkpoint-0", "checkpoint-2", "checkpoint-4"]
    point = find_resume_point(store)
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
    assert find_resume_point(store).checkpoint == "a"
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
    filesystem = run_filesystem(store.path, 1)
    with filesystem.open_output_stream(f"{store.path}/{layout.SNAPSHOT}") as stream:
        for start in range(0, len(data), 7):
            stream.write(data[start : start + 7])
    assert all_commits(store) == [(1, 1)]
    assert store.read(layout.SNAPSHOT) == data
    with filesystem.open_input_stream(f"{store.path}/{layout.SNAPSHOT}") as stream:
        assert stream.read() == data


def test_a_crash_in_the_middle_of_a_snapshot_commits_nothing(store: LocalRunStore) -> None:
    begin(store)
    filesystem = run_filesystem(store.path, 1)

    def crash() -> None:
        with filesystem.open_output_stream(f"{store.path}/{layout.SNAPSHOT}") as stream:
            stream.write(b'{"checkpoint_results": [')
            raise RuntimeError("the controller failed while it wrote")

    with pytest.raises((RuntimeError, ElasticTrainError)):
        crash()
    assert all_commits(store) == []
    assert store.read(layout.SNAPSHOT) is None


def test_folders_are_marked_as_uploads_only_while_one_uploads(store: LocalRunStore) -> None:
    filesystem = run_filesystem(store.path, begin(store).attempt)
    filesystem.create_dir(f"{store.path}/scratch")
    assert _marks(store) == []
    with uploading():
        filesystem.create_dir(f"{store.path}/checkpoint_1")
        with uploading():
            filesystem.create_dir(f"{store.path}/checkpoint_2")
        filesystem.create_dir(f"{store.path}/checkpoint_3")
    filesystem.create_dir(f"{store.path}/scratch2")
    assert _marks(store) == ["checkpoint_1", "checkpoint_2", "checkpoint_3"]


def test_an_upload_of_another_thread_does_not_mark_the_folders_of_this_one(store: LocalRunStore) -> None:
    filesystem = run_filesystem(store.path, begin(store).attempt)

    async def play() -> None:
        with uploading():
            await asyncio.to_thread(filesystem.create_dir, f"{store.path}/not-an-upload")
            filesystem.create_dir(f"{store.path}/upload")

    asyncio.run(play())
    assert _marks(store) == ["upload"]


def test_folders_inside_of_a_checkpoint_and_outside_of_the_run_are_not_marked(
    store: LocalRunStore, tmp_path: Path
) -> None:
    ray = Ray(store, begin(store).attempt)
    ray.upload("checkpoint_1", {"a/b/c.pt": b"1", "d.pt": b"2"})
    with uploading():
        for path in (f"{store.path}/checkpoint_1/e", store.path, f"{store.path}/.elastic_train/x", f"{tmp_path}/y"):
            ray.storage.storage_filesystem.create_dir(path)
    assert _marks(store) == ["checkpoint_1"]
    assert store.file_sizes("checkpoint_1") == {"a/b/c.pt": 1, "d.pt": 1}


def test_several_ranks_upload_into_one_checkpoint(store: LocalRunStore) -> None:
    begin(store)
    for rank in range(3):
        Ray(store, 1).upload("checkpoint_1", {f"rank-{rank}.pt": b"1"})
    assert _marks(store) == ["checkpoint_1"]
    assert store.file_sizes("checkpoint_1") == {f"rank-{rank}.pt": 1 for rank in range(3)}


def test_a_checkpoint_in_a_folder_of_folders_is_marked_by_its_whole_name(store: LocalRunStore) -> None:
    ray = Ray(store, begin(store).attempt).start()
    ray.report("epochs/1")
    assert _marks(store) == ["epochs/1"]
    ray.report("epochs/2")
    assert _marks(store) == ["epochs/2"]
    resumed = Ray(store, begin(store).attempt).start().manager.latest_checkpoint_result
    assert resumed.checkpoint.path == f"{store.path}/epochs/2"


def test_a_committed_checkpoint_is_not_overwritten(store: LocalRunStore) -> None:
    ray = Ray(store, begin(store).attempt).start()
    ray.report("epoch-1")
    with pytest.raises(ElasticTrainError) as refused:
        ray.upload("epoch-1", {"model.pt": b"other"})
    assert "'epoch-1' is committed already" in str(refused.value)
    assert "checkpoint_dir_name" in str(refused.value)
    assert store.read("epoch-1/model.pt") == b"epoch-1"


def test_a_name_that_only_begins_like_a_committed_one_is_free(store: LocalRunStore) -> None:
    ray = Ray(store, begin(store).attempt).start()
    ray.report("epoch-1")
    ray.report("epoch-10")
    assert find_resume_point(store).checkpoint == "epoch-10"


DELETIONS: list[Callable[[Any, str], None]] = [
    lambda filesystem, run: filesystem.delete_dir(f"{run}/a"),
    lambda filesystem, run: filesystem.delete_dir_contents(f"{run}/a"),
    lambda filesystem, run: filesystem.delete_dir(run),
    lambda filesystem, run: filesystem.delete_file(f"{run}/a/model.pt"),
    lambda filesystem, run: filesystem.move(f"{run}/b", f"{run}/a"),
    lambda filesystem, run: filesystem.move(f"{run}/a", f"{run}/../gone"),
]


@pytest.mark.parametrize("delete", DELETIONS, ids=["folder", "contents", "run", "file", "move onto", "move away"])
def test_a_fenced_off_attempt_deletes_nothing(store: LocalRunStore, delete: Callable[[Any, str], None]) -> None:
    Ray(store, begin(store).attempt).start().report("a")
    begin(store)
    filesystem = run_filesystem(store.path, 1)
    with pytest.raises(FencedOffError):
        delete(filesystem, store.path)
    assert store.file_sizes("a") == {"model.pt": 1, "rank-0/optim.pt": 2}


def test_the_holder_of_the_fence_deletes(store: LocalRunStore) -> None:
    begin(store)
    for name in ("folder/f", "contents/f", "file"):
        store.create(name, b"")
    filesystem = run_filesystem(store.path, 1)
    filesystem.delete_dir(f"{store.path}/folder")
    filesystem.delete_dir_contents(f"{store.path}/contents")
    filesystem.delete_file(f"{store.path}/file")
    assert store.folders() == [layout.STATE_FOLDER, "contents"]
    assert store.names("") == []
    assert store.names("contents") == []


def test_the_root_is_never_emptied(store: LocalRunStore) -> None:
    filesystem = run_filesystem(store.path, 1)
    with pytest.raises(ElasticTrainError, match="refused to empty the root"):
        filesystem.delete_dir_contents("", accept_root_dir=True)


def test_everything_else_goes_to_the_disk(store: LocalRunStore, tmp_path: Path) -> None:
    begin(store)
    filesystem = run_filesystem(store.path, 1)
    with filesystem.open_output_stream(f"{store.path}/file") as stream:
        stream.write(b"12")
    with filesystem.open_append_stream(f"{store.path}/file") as stream:
        stream.write(b"34")
    with filesystem.open_input_file(f"{store.path}/file") as stream:
        assert stream.read_at(2, 1) == b"23"
    filesystem.copy_file(f"{store.path}/file", f"{store.path}/copy")
    filesystem.move(f"{store.path}/copy", f"{store.path}/moved")
    assert filesystem.get_file_info(f"{store.path}/moved").size == 4
    assert filesystem.get_file_info(f"{store.path}/copy").type is fs.FileType.NotFound
    found = filesystem.get_file_info(fs.FileSelector(store.path))
    assert {Path(info.path).name for info in found} == {"file", "moved", layout.STATE_FOLDER}
    assert filesystem.type_name == "py::elastic-train"
    assert filesystem.normalize_path(f"{store.path}/file") == f"{store.path}/file"


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
def test_it_travels_to_the_workers_with_path_and_attempt(store: LocalRunStore, pickler: Any) -> None:
    begin(store)
    store.create("a/model.pt", b"1")
    copy = pickle.loads(pickler.dumps(run_filesystem(store.path, 1)))
    assert copy == run_filesystem(store.path, 1)
    assert copy.handler == run_filesystem(store.path, 1).handler
    assert hash(copy.handler) == hash(run_filesystem(store.path, 1).handler)
    assert copy.handler != run_filesystem(store.path, 2).handler
    assert copy.handler != run_filesystem(f"{store.path}x", 1).handler
    with copy.open_output_stream(f"{store.path}/{layout.SNAPSHOT}") as stream:
        stream.write(json.dumps(with_result(empty_snapshot(), "a", {})).encode())
    assert all_commits(store) == [(1, 1)]


def test_a_checkpoint_that_ray_hands_out_can_be_read_after_pickling(store: LocalRunStore) -> None:
    ray = Ray(store, begin(store).attempt).start()
    ray.report("a")
    checkpoint = pickle.loads(pickle.dumps(ray.manager.latest_checkpoint_result.checkpoint))
    with checkpoint.as_directory() as folder:
        assert (Path(folder) / "model.pt").read_bytes() == b"a"
