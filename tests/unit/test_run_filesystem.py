"""The filesystem that Ray Train writes a run through, as Ray uses it, on a disk."""

import errno
import io
import json
import pickle
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from functools import partial
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
from prefect_elastic_train.loop import context as run_context
from prefect_elastic_train.loop import recovery_points
from prefect_elastic_train.loop.context import RunContext
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.commits import FencedOffError, remove_leftovers
from prefect_elastic_train.runs.run_directory import RunDirectory
from prefect_elastic_train.runs.run_filesystem import run_filesystem
from prefect_elastic_train.runs.snapshots import checkpoint_names
from prefect_elastic_train.storage.store import LocalRunStore
from prefect_elastic_train.worker import worker_callbacks
from prefect_elastic_train.worker.worker_callbacks import WorkerHooks
from tests.unit.ray_storage import Ray
from tests.unit.support import begin, empty_snapshot, tear, with_result


def _write(filesystem: Any, path: str, data: bytes = b"late") -> None:
    with filesystem.open_output_stream(path) as stream:
        stream.write(data)


def test_a_worker_has_the_context_of_its_run_and_metrics_of_any_type_are_reported_as_json_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported = []
    worker = SimpleNamespace(
        report=lambda metrics, *more: reported.append(metrics),
        get_all_reported_checkpoints=None,
        checkpoint=None,
        storage_context=SimpleNamespace(),
        get_world_rank=lambda: 0,
        _sync_checkpoint_dir_name_across_ranks=None,
    )
    monkeypatch.setattr(context, "_train_context", worker)
    monkeypatch.setattr(run_context, "current", None)  # put back afterwards
    monkeypatch.setattr(worker_callbacks, "silence_ray_train", lambda: None)  # other tests of this process log
    monkeypatch.setattr(worker_callbacks, "WorkerMemory", lambda *_: None)  # without a cluster
    monkeypatch.setattr(recovery_points, "memory", None)
    run = RunContext("mnist", "1", 1, "", "")
    pickle.loads(pickle.dumps(WorkerHooks(run))).after_init_train_context()
    assert run_context.run_context() == run
    arrays = [np.int64(3), np.array([7]), np.arange(3), torch.tensor(1.5), {np.int64(2): np.float64(0.25)}]
    objects = [Path("/data/rows"), date(2026, 1, 31), b"\xff", object]
    metrics = {"loss": np.float32(0.5), "best": np.bool_(True), "arrays": arrays, "objects": objects}
    DistributedTrainFnUtils().report({True: 1, (1, 2): None, **metrics})
    [plain] = reported
    assert plain.pop("objects") == ["/data/rows", "2026-01-31", "_w==", "<class 'object'>"]
    assert plain.pop("arrays") == [3, 7, [0, 1, 2], 1.5, {"2": 0.25}]
    assert plain == {"true": 1, "1,2": None, "loss": 0.5, "best": True}
    assert (type(plain["loss"]), type(plain["best"])) == (float, bool)


def _listed(store: LocalRunStore, sequence: int) -> int:
    """Return the number of checkpoints in the own list of a commit of the first attempt."""
    return len(json.loads(store.read(layout.commit_name((1, sequence))) or b"")["manifest"])


def test_of_many_checkpoints_that_all_stay_a_commit_lists_what_was_added_and_the_next_attempt_finds_them_all(
    store: LocalRunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_manager, "_MAX_ADDED", 4)
    ray = Ray(store, begin(store).attempt).start()
    names = [f"checkpoint_{number}" for number in range(16)]
    listed = []
    for number, name in enumerate(names):
        ray.report(name, epoch=number)
        listed.append(_listed(store, number + 1))
        commit = RunDirectory(store).newest_commit
        assert checkpoint_names(commit.snapshot) == list(commit.manifest) == names[: number + 1]
        kept = RunDirectory(store).commit_ids
        assert len(kept) <= 7, "full commits on which nothing builds any more are left"
        assert all(RunDirectory(store).commit(one) for one in kept[-5:]), "one has lost its full commit"
    assert listed == [1, 2, 3, 4, 1, 2, 3, 4, 9, 1, 2, 3, 4, 14, 1, 2]
    store.delete(layout.SNAPSHOT)
    begun = begin(store)
    assert (begun.point.base, begun.point.repairs, begun.notes) == ((1, 16), [], [])
    assert remove_leftovers(store, begun.attempt) == []
    second = Ray(store, begun.attempt).start()
    assert (second.latest, second.checkpoints) == (names[-1], names)
    assert checkpoint_names(RunDirectory(store).mirror) == names, "Ray's own file is not up to date"
    second.report("last")
    point = RunDirectory(store).resume_point
    assert (point.base, point.repairs, checkpoint_names(point.commit.snapshot)) == ((2, 1), [], [*names, "last"])


def test_what_a_validation_adds_to_a_checkpoint_that_was_listed_before_is_committed(
    store: LocalRunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_manager, "_MAX_ADDED", 2)
    ray = Ray(store, begin(store).attempt).start()
    first = ray.upload("checkpoint_0", {"model.pt": b"1"})
    ray.register(first, validation=True)
    for number in range(1, 6):
        ray.report(f"checkpoint_{number}")
    assert _listed(store, 6) < 6
    ray.validate(first, accuracy=0.5)
    commit = RunDirectory(store).newest_commit
    assert (len(commit.manifest), commit.snapshot["pending_training_results"]) == (6, [])
    assert commit.snapshot["checkpoint_results"][0]["metrics"] == {"accuracy": 0.5}
    assert commit.snapshot["validated_checkpoint_dir_names"] == ["checkpoint_0"]


@pytest.mark.parametrize("lose", [LocalRunStore.delete, tear])
def test_nothing_is_begun_or_removed_while_the_list_that_the_newest_commit_adds_to_is_lost(
    store: LocalRunStore, monkeypatch: pytest.MonkeyPatch, lose: Callable[[LocalRunStore, str], object]
) -> None:
    monkeypatch.setattr(checkpoint_manager, "_MAX_ADDED", 6)
    ray = Ray(store, begin(store).attempt).start()
    ray.report("of-another-attempt")
    ray = Ray(store, begin(store).attempt).start()
    for number in range(11):
        ray.report(physical_name("epoch", 2, report=number))
    assert RunDirectory(store).commit_ids[1:] == [(2, sequence) for sequence in (5, 7, 8, 9, 10, 11)]
    lose(store, layout.commit_name((2, 5)))
    words = r"commit 0002-000011 of .* adds to commit 5 of its attempt, which is torn or missing .* Nothing was changed"
    for look in (begin, lambda store: remove_leftovers(store, 2)):
        with pytest.raises(AttemptFailedError, match=words):
            look(store)
    assert (len(store.folders()), RunDirectory(store).attempt_numbers) == (13, [1, 2])


def test_a_snapshot_is_a_commit_once_it_is_closed_and_whole(store: LocalRunStore) -> None:
    begin(store)
    store.create("a/model.pt", b"1")
    whole = json.dumps(with_result(empty_snapshot(), "a", {}), indent=3).encode()
    filesystem, path = run_filesystem(store, 1), f"{store.path}/{layout.SNAPSHOT}"
    for torn in (whole[: len(whole) // 2], b""):
        with pytest.raises(ElasticTrainError, match="torn snapshot"):
            _write(filesystem, path, torn)
    dropped = filesystem.open_output_stream(path)
    dropped.write(whole)
    del dropped  # as by an exception of the controller
    assert (RunDirectory(store).commit_ids, store.read(layout.SNAPSHOT)) == ([], None)
    _write(filesystem, path, whole)
    assert (RunDirectory(store).commit_ids, store.read(layout.SNAPSHOT)) == ([(1, 1)], whole)


#: Methods of pyarrow's filesystem, and what follows the run's path in their arguments; and two ways to write.
CHANGES = ["delete_dir /a", "write /a/model.pt", "write /a/another.pt", "create_dir /a/folder", "upload /a/model.pt"]
REFUSED = [
    "delete_dir_contents /a",
    "move /a /b",
    "copy_file /a/model.pt /a/copy",
    "delete_file /a/model.pt",
    "open_append_stream /a/model.pt",
    "delete_dir /",
    f"delete_dir /{layout.COMMITS}",
    "delete_dir -other",
    "delete_dir /a/../../other",
    "write /../other/a",
]


@pytest.mark.parametrize(
    ("change", "attempt", "says"),
    [
        *((change, 1, "taken over") for change in (*CHANGES, "delete_dir /")),
        *((change, 2, r"refused|is not in|not moved, copied") for change in REFUSED),
        *((change, 0, "reading only") for change in CHANGES),
    ],
)
def test_a_fenced_off_attempt_changes_nothing_and_no_attempt_what_is_no_checkpoint_and_who_has_none_only_reads(
    store: LocalRunStore, change: str, attempt: int, says: str
) -> None:
    Ray(store, begin(store).attempt).start().report("a")
    begin(store)
    before = store.file_sizes("")
    expected = FencedOffError if attempt == 1 else (io.UnsupportedOperation, ElasticTrainError)
    filesystem = run_filesystem(store, attempt)
    ways = {"write": partial(_write, filesystem), "upload": partial(filesystem.handler.upload_folder, __file__)}
    method, *paths = change.split()
    with pytest.raises(expected, match=says):
        (ways.get(method) or getattr(filesystem, method))(*(f"{store.path}{path}" for path in paths))
    assert store.file_sizes("") == before


PING, PONG = physical_name("ping", 1, report=1), physical_name("pong", 1, report=2)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "Input/output error")])
def test_a_checkpoint_whose_deletion_failed_goes_before_the_next_workers_start(
    store: LocalRunStore, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    ray = Ray(store, begin(store).attempt, num_to_keep=1).start()
    ray.report(PING)

    def fail(*_, **__):
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
