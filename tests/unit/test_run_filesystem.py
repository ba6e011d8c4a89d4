"""The filesystem that Ray Train writes a run through, as Ray uses it, on a disk."""

from __future__ import annotations

import errno
import io
import json
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ray.train.v2._internal.execution import context
from ray.train.v2._internal.execution.train_fn_utils import DistributedTrainFnUtils

from prefect_elastic_train.controller import checkpoint_manager
from prefect_elastic_train.core.checkpoint_names import physical_name
from prefect_elastic_train.core.outcomes import AttemptFailedError, ElasticTrainError
from prefect_elastic_train.core.records import CommitRecord, decode
from prefect_elastic_train.loop import context as run_context
from prefect_elastic_train.loop.context import RunContext
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.commits import FencedOffError
from prefect_elastic_train.runs.repair import remove_leftovers
from prefect_elastic_train.runs.run_directory import RunDirectory
from prefect_elastic_train.runs.run_filesystem import run_filesystem
from prefect_elastic_train.runs.snapshots import checkpoint_names, is_consistent, latest_checkpoint
from prefect_elastic_train.storage.store import LocalRunStore
from prefect_elastic_train.worker import worker_callbacks
from prefect_elastic_train.worker.worker_callbacks import WorkerHooks
from tests.unit.ray_storage import Ray
from tests.unit.support import begin, empty_snapshot, tear, with_result


def _write(filesystem: Any, path: str, data: bytes = b"late", pieces: int = 1) -> None:
    with filesystem.open_output_stream(path) as stream:
        for start in range(0, max(len(data), 1), len(data) // pieces or 1):
            stream.write(data[start : start + (len(data) // pieces or 1)])


def test_each_report_to_ray_becomes_a_commit_and_a_mirror_from_which_the_next_attempt_goes_on(
    store: LocalRunStore,
) -> None:
    ray = Ray(store, begin(store).attempt).start()
    ray.report("epochs/1", loss=0.5)
    ray.report("epochs/2", loss=0.25)
    assert RunDirectory(store).commit_ids == [(1, 1), (1, 2)]
    record = decode(CommitRecord, store.read(layout.commit_name(1, 2)))
    assert record is not None
    assert record.manifest == {f"epochs/{number}": {"model.pt": 8, "rank-0/optim.pt": 2} for number in (1, 2)}
    assert json.loads(store.read(layout.SNAPSHOT) or b"") == record.snapshot
    assert record.snapshot["latest_checkpoint_result"]["metrics"] == {"loss": 0.25}
    second = Ray(store, begin(store).attempt).start()
    assert second.manager.latest_checkpoint_result.checkpoint.path == f"{store.path}/epochs/2"
    second.report("c")
    assert RunDirectory(store).resume_point.base == (2, 1)


def test_metrics_of_any_type_are_reported_as_json_values_and_kept_with_their_checkpoint(
    store: LocalRunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[dict[str, Any]] = []
    worker = SimpleNamespace(
        report=lambda metrics, *more: reported.append(metrics),
        get_all_reported_checkpoints=None,
        checkpoint=None,
        storage_context=SimpleNamespace(),
        _sync_checkpoint_dir_name_across_ranks=None,
    )
    monkeypatch.setattr(context, "_train_context", worker)
    monkeypatch.setattr(run_context, "current", None)  # put back afterwards
    monkeypatch.setattr(worker_callbacks, "silence_ray_train", lambda: None)  # other tests of this process log
    WorkerHooks(RunContext("mnist", "1", 1, "", "")).after_init_train_context()
    metrics: dict[Any, Any] = {
        "loss": np.float32(0.5),
        "step": np.int64(3),
        "best": np.bool_(True),
        "one": np.array([7]),
        "many": np.arange(3),
        "tensor": torch.tensor(1.5),
        "by class": {np.int64(2): np.float64(0.25)},
        "file": Path("/data/rows"),
        "day": date(2026, 1, 31),
        "bytes": b"\xff",
        "object": object,
        True: 1,
        (1, 2): None,
    }
    DistributedTrainFnUtils().report(metrics)
    [plain] = reported
    assert plain == {
        "loss": 0.5,
        "step": 3,
        "best": True,
        "one": 7,
        "many": [0, 1, 2],
        "tensor": 1.5,
        "by class": {"2": 0.25},
        "file": "/data/rows",
        "day": "2026-01-31",
        "bytes": "_w==",
        "object": "<class 'object'>",
        "true": 1,
        "1,2": None,
    }
    assert (type(plain["loss"]), type(plain["best"])) == (float, bool)
    ray = Ray(store, begin(store).attempt).start()
    ray.report("checkpoint", **plain)
    commit = RunDirectory(store).newest_commit
    assert commit is not None
    assert commit.snapshot["latest_checkpoint_result"]["metrics"] == plain
    assert Ray(store, begin(store).attempt).start().latest == "checkpoint"


def _listed(store: LocalRunStore, sequence: int) -> int:
    """Return the number of checkpoints in the own list of a commit of the first attempt."""
    return len(json.loads(store.read(layout.commit_name(1, sequence)) or b"")["manifest"])


def test_of_many_checkpoints_that_all_stay_a_commit_lists_what_was_added_and_the_next_attempt_finds_them_all(
    store: LocalRunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_manager, "_MAX_ADDED", 4)
    ray = Ray(store, begin(store).attempt).start_ours()
    names = [f"checkpoint_{number}" for number in range(16)]
    listed = []
    for number, name in enumerate(names):
        ray.report(name, epoch=number)
        listed.append(_listed(store, number + 1))
        commit = RunDirectory(store).newest_commit
        assert commit is not None
        assert checkpoint_names(commit.snapshot) == list(commit.manifest) == names[: number + 1]
        assert latest_checkpoint(commit.snapshot) == commit.snapshot["checkpoint_results"][-1]
        kept = RunDirectory(store).commit_ids
        assert kept[-5:] == [(1, number + 1 - ago) for ago in range(min(5, number + 1))][::-1]
        assert len(kept) <= 7, "full commits on which nothing builds any more are left"
        assert all(RunDirectory(store).commit(one) for one in kept[-5:]), "one has lost its full commit"
    assert listed == [1, 2, 3, 4, 1, 2, 3, 4, 9, 1, 2, 3, 4, 14, 1, 2]
    added = json.loads(store.read(layout.commit_name(1, 16)) or b"")
    assert not is_consistent(added["snapshot"]), "another version would take it for a full one"
    store.delete(layout.SNAPSHOT)
    begun = begin(store)
    assert (begun.point.base, begun.point.repairs, begun.notes) == ((1, 16), [], [])
    assert remove_leftovers(store, begun.attempt) == []
    second = Ray(store, begun.attempt).start_ours()
    assert (second.latest, second.checkpoints) == (names[-1], names)
    assert checkpoint_names(RunDirectory(store).mirror) == names, "Ray's own file is not up to date"
    second.report("last")
    point = RunDirectory(store).resume_point
    assert (point.base, point.repairs, checkpoint_names(point.snapshot)) == ((2, 1), [], [*names, "last"])


def test_what_a_validation_adds_to_a_checkpoint_that_was_listed_before_is_committed(
    store: LocalRunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_manager, "_MAX_ADDED", 2)
    ray = Ray(store, begin(store).attempt).start_ours()
    first = ray.upload("checkpoint_0", {"model.pt": b"1"})
    ray.register(first, validation=True)
    for number in range(1, 6):
        ray.report(f"checkpoint_{number}")
    assert _listed(store, 6) < 6
    ray.validate(first, accuracy=0.5)
    commit = RunDirectory(store).newest_commit
    assert commit is not None
    assert (len(commit.manifest), commit.snapshot["pending_training_results"]) == (6, [])
    assert commit.snapshot["checkpoint_results"][0]["metrics"] == {"accuracy": 0.5}
    assert commit.snapshot["validated_checkpoint_dir_names"] == ["checkpoint_0"]


@pytest.mark.parametrize("lose", [LocalRunStore.delete, tear], ids=["removed", "torn"])
def test_nothing_is_begun_or_removed_while_the_list_that_the_newest_commit_adds_to_is_lost(
    store: LocalRunStore, monkeypatch: pytest.MonkeyPatch, lose: Callable[[LocalRunStore, str], object]
) -> None:
    monkeypatch.setattr(checkpoint_manager, "_MAX_ADDED", 6)
    ray = Ray(store, begin(store).attempt).start_ours()
    ray.report("of-another-attempt")
    ray = Ray(store, begin(store).attempt).start_ours()
    for number in range(11):
        ray.report(physical_name("epoch", 2, report=number))
    assert RunDirectory(store).commit_ids[1:] == [(2, sequence) for sequence in (5, 7, 8, 9, 10, 11)]
    lose(store, layout.commit_name(2, 5))
    words = r"commit 0002-000011 of .* adds to commit 5 of its attempt, which is torn or missing .* Nothing was changed"
    for look in (begin, lambda store: remove_leftovers(store, 2)):
        with pytest.raises(AttemptFailedError, match=words):
            look(store)
    assert (len(store.folders()), RunDirectory(store).attempt_numbers) == (13, [1, 2])


def test_ray_keeps_so_many_checkpoints_and_their_commits_stay_whole(store: LocalRunStore) -> None:
    ray = Ray(store, begin(store).attempt, num_to_keep=2, checkpoint_score_attribute="acc").start()
    for number, accuracy in enumerate([0.9, 0.1, 0.8, 0.2, 0.3]):
        ray.report(f"checkpoint-{number}", acc=accuracy)
    assert store.folders() == [layout.STATE_FOLDER, "checkpoint-0", "checkpoint-2", "checkpoint-4"]
    point = RunDirectory(store).resume_point
    assert (point.checkpoint, point.repairs) == ("checkpoint-4", [])


def test_a_fenced_off_controller_is_stopped_by_its_own_snapshot_and_deletes_nothing(store: LocalRunStore) -> None:
    old = Ray(store, begin(store).attempt, num_to_keep=1).start()
    old.report("a")
    checkpoint = old.upload("b", {"model.pt": b"b"})
    assert Ray(store, begin(store).attempt, num_to_keep=1).start().latest == "a"
    with pytest.raises(FencedOffError, match="taken over by attempt 2"):
        old.register(checkpoint)
    assert RunDirectory(store).resume_point.checkpoint == "a"
    assert store.file_sizes("a") == {"model.pt": 1, "rank-0/optim.pt": 2}
    with pytest.raises(FencedOffError):
        old.upload("c", {"model.pt": b"c"})
    assert "c" not in store.folders()


def test_a_snapshot_is_a_commit_once_it_is_closed_and_whole(store: LocalRunStore) -> None:
    begin(store)
    store.create("a/model.pt", b"1")
    whole = json.dumps(with_result(empty_snapshot(), "a", {})).encode()
    filesystem, path = run_filesystem(store, 1), f"{store.path}/{layout.SNAPSHOT}"
    for torn in (whole[: len(whole) // 2], b""):
        with pytest.raises(ElasticTrainError, match="torn snapshot"):
            _write(filesystem, path, torn)
    dropped = filesystem.open_output_stream(path)
    dropped.write(whole)
    del dropped  # as by an exception of the controller
    assert (RunDirectory(store).commit_ids, store.read(layout.SNAPSHOT)) == ([], None)
    _write(filesystem, path, whole, pieces=7)
    assert (RunDirectory(store).commit_ids, store.read(layout.SNAPSHOT)) == ([(1, 1)], whole)
    with filesystem.open_input_stream(path) as stream:
        assert stream.read() == whole


Change = Callable[[Any, str], None]
CHANGES: dict[str, Change] = {
    "delete a folder": lambda filesystem, run: filesystem.delete_dir(f"{run}/a"),
    "delete the run": lambda filesystem, run: filesystem.delete_dir(run),
    "write": lambda filesystem, run: _write(filesystem, f"{run}/a/model.pt"),
    "write another": lambda filesystem, run: _write(filesystem, f"{run}/a/another.pt"),
    "create a folder": lambda filesystem, run: filesystem.create_dir(f"{run}/a/folder"),
    "upload": lambda filesystem, run: filesystem.handler.upload_folder(__file__, f"{run}/a/model.pt"),
}
REFUSED: dict[str, Change] = {
    "empty a folder": lambda filesystem, run: filesystem.delete_dir_contents(f"{run}/a"),
    "empty all": lambda filesystem, run: filesystem.delete_dir_contents("", accept_root_dir=True),
    "move": lambda filesystem, run: filesystem.move(f"{run}/a", f"{run}/b"),
    "copy": lambda filesystem, run: filesystem.copy_file(f"{run}/a/model.pt", f"{run}/a/copy"),
    "delete a file": lambda filesystem, run: filesystem.delete_file(f"{run}/a/model.pt"),
    "append": lambda filesystem, run: filesystem.open_append_stream(f"{run}/a/model.pt"),
    "delete the run": lambda filesystem, run: filesystem.delete_dir(run),
    "delete the records": lambda filesystem, run: filesystem.delete_dir(f"{run}/{layout.COMMITS}"),
    "delete elsewhere": lambda filesystem, run: filesystem.delete_dir(f"{run}-other"),
    "delete above": lambda filesystem, run: filesystem.delete_dir(f"{run}/a/../../other"),
    "write elsewhere": lambda filesystem, run: _write(filesystem, f"{run}/../other/a"),
}


@pytest.mark.parametrize(
    ("change", "attempt", "says"),
    [
        *((change, 1, "taken over") for change in CHANGES.values()),
        *((change, 2, r"refused|is not in|not moved, copied") for change in REFUSED.values()),
        *((CHANGES[name], None, "reading only") for name in ("write", "upload", "delete a folder")),
    ],
)
def test_a_fenced_off_attempt_changes_nothing_and_no_attempt_what_is_no_checkpoint_and_who_has_none_only_reads(
    store: LocalRunStore, change: Change, attempt: int | None, says: str
) -> None:
    Ray(store, begin(store).attempt).start().report("a")
    begin(store)
    before = store.file_sizes("")
    expected = FencedOffError if attempt == 1 else (io.UnsupportedOperation, ElasticTrainError)
    with pytest.raises(expected, match=says):
        change(run_filesystem(store, attempt), store.path)
    assert store.file_sizes("") == before


PING, PONG = physical_name("ping", 1, report=1), physical_name("pong", 1, report=2)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "Input/output error")])
def test_a_checkpoint_whose_deletion_failed_goes_before_the_next_workers_start(
    store: LocalRunStore, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    ray = Ray(store, begin(store).attempt, num_to_keep=1).start()
    ray.report(PING)

    def fail(*_: Any, **__: Any) -> bool:
        monkeypatch.undo()
        raise error

    monkeypatch.setattr(LocalRunStore, "delete_folder", fail)
    with suppress(KeyboardInterrupt):
        ray.report(PONG)  # Ray logs an error and goes on
    assert store.folders() == [layout.STATE_FOLDER, PING, PONG]
    begun = begin(store)
    assert (begun.point.checkpoint, begun.notes) == (PONG, [])
    assert remove_leftovers(store, begun.attempt) == [PING]
    assert store.folders() == [layout.STATE_FOLDER, PONG]
