"""Reading and repairing Ray Train's snapshot, as plain JSON and in Ray's own checkpoint manager."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import fs
from ray.train import Checkpoint, CheckpointConfig
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import (
    CheckpointManager,
    _CheckpointManagerState,
    _TrainingResultState,
)
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.training_report import _TrainingReport

from prefect_elastic_train.controller.checkpoint_manager import RankedCheckpointManager
from prefect_elastic_train.runs import snapshots
from tests.unit.support import empty_snapshot, examples, private_folder, with_result

NAMES = [f"checkpoint_{letter}" for letter in "abcdef"]

_STATUS_LISTS = (
    "validated_checkpoint_dir_names",
    "timed_out_validation_checkpoint_dir_names",
    "failed_validation_checkpoint_dir_names",
)


@st.composite
def ray_snapshots(draw: st.DrawFn) -> dict[str, Any]:
    """Snapshots as Ray writes them: scored ones are not in the order of their reports."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    indices = draw(st.lists(st.integers(0, 50), min_size=len(names), max_size=len(names), unique=True))
    results = [
        _TrainingResultState(checkpoint_dir_name=name, metrics={"step": index})
        for name, index in zip(names, indices, strict=True)
    ]
    pending = draw(st.lists(st.sampled_from(results), unique_by=lambda result: result.checkpoint_dir_name))
    state = _CheckpointManagerState(
        checkpoint_results=results,
        checkpoint_report_indices=indices,
        latest_checkpoint_result=results[indices.index(max(indices))],
        pending_training_results=pending,
        pending_validation_specs=[True] * len(pending),
        current_report_index=max(indices) + draw(st.integers(1, 5)),
        # Evicted checkpoints may stay in these lists of Ray.
        **{name: draw(st.lists(st.sampled_from(NAMES), unique=True)) for name in _STATUS_LISTS},
    )
    parsed: dict[str, Any] = json.loads(state.json())
    return parsed


def _ray_loads(snapshot: dict[str, Any], folder: Path) -> CheckpointManager:
    """Load a snapshot into Ray's checkpoint manager, beside the folders of exactly its checkpoints."""
    storage = StorageContext(str(folder), "run", storage_filesystem=fs.LocalFileSystem())
    for name in snapshots.checkpoint_names(snapshot):
        Path(storage.experiment_fs_path, name).mkdir(parents=True, exist_ok=True)
    Path(storage.checkpoint_manager_snapshot_path).write_text(json.dumps(snapshot))
    return CheckpointManager(CheckpointConfig(), storage)


@given(snapshot=ray_snapshots(), dropped=st.sets(st.sampled_from(NAMES)))
def test_a_repaired_snapshot_fits_together_and_ray_loads_it(snapshot: dict[str, Any], dropped: set[str]) -> None:
    before = json.dumps(snapshot)
    assert snapshots.parse_snapshot(before) == snapshots.parse_snapshot(before.encode()) == snapshot
    repaired = snapshots.without_checkpoints(snapshot, dropped)
    assert json.dumps(snapshot) == before, "the original was changed"
    kept = [name for name in snapshots.checkpoint_names(snapshot) if name not in dropped]
    if repaired is None:
        assert not kept
        return
    assert snapshots.checkpoint_names(repaired) == kept
    assert snapshots.parse_snapshot(json.dumps(repaired)) == repaired
    pairs = zip(snapshot["checkpoint_results"], snapshot["checkpoint_report_indices"], strict=True)
    left = [(result, index) for result, index in pairs if result["checkpoint_dir_name"] in kept]
    assert (repaired["checkpoint_results"], repaired["checkpoint_report_indices"]) == tuple(map(list, zip(*left)))
    assert snapshots.latest_checkpoint(repaired)["checkpoint_dir_name"] == kept[-1]
    pending = [one for one in snapshot["pending_training_results"] if one["checkpoint_dir_name"] in kept]
    assert repaired["pending_training_results"] == pending
    assert len(pending) == len(repaired["pending_validation_specs"])
    for name in _STATUS_LISTS if dropped else ():
        assert repaired[name] == [checkpoint for checkpoint in snapshot[name] if checkpoint in kept]
    for untouched in ("ray_version", "current_report_index"):
        assert repaired[untouched] == snapshot[untouched]
    with private_folder() as folder:
        manager = _ray_loads(repaired, Path(folder))
    assert manager.latest_checkpoint_result.metrics == snapshots.latest_checkpoint(repaired)["metrics"]
    loaded = [Path(result.checkpoint.path).name for result in manager._checkpoint_results]
    assert loaded == [result["checkpoint_dir_name"] for result in repaired["checkpoint_results"]]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("checkpoint_results", None),
        ("checkpoint_results", ["a"]),
        ("checkpoint_results", [{"checkpoint_dir_name": 7}]),
        ("checkpoint_report_indices", None),
        ("checkpoint_report_indices", ["0"]),
        ("checkpoint_report_indices", [0, 1]),
        ("current_report_index", None),
        ("latest_checkpoint_result", {"checkpoint_dir_name": "elsewhere", "metrics": {}}),
        ("latest_checkpoint_result", "a"),
    ],
)
def test_a_snapshot_whose_parts_do_not_fit_together_is_none(field: str, value: Any) -> None:
    snapshot = with_result(empty_snapshot(), "a", {})
    assert snapshots.parse_snapshot(json.dumps(snapshot)) is not None
    assert snapshots.parse_snapshot(json.dumps({**snapshot, field: value})) is None
    assert [snapshots.parse_snapshot(data) for data in (None, b"", b"{", b"[]", b"null", b"\xff\xfe")] == [None] * 6


def test_a_seeded_run_is_one_that_ray_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    seeded = snapshots.seed_snapshot("from-other", {"loss": 0.5}, "2.60.0")
    assert set(seeded) == set(json.loads(_CheckpointManagerState.parse_obj(seeded).json()))
    manager = _ray_loads(seeded, tmp_path)
    assert Path(manager.latest_checkpoint_result.checkpoint.path).name == "from-other"
    assert manager.latest_checkpoint_result.metrics == {"loss": 0.5}


_SCORES = st.one_of(
    st.just({}),
    st.sampled_from([math.nan, math.inf, -math.inf, None, "0.5", [0.5], {"loss": 1}, 10**400]).map(
        lambda x: {"loss": x}
    ),
    st.integers(-2, 2).map(lambda x: {"loss": x}),
    st.floats(-1, 1).map(lambda x: {"loss": x}),
)


def _register(manager: RankedCheckpointManager, folder: Path, number: int, metrics: dict[str, Any]) -> None:
    """Have Ray's manager take a checkpoint as reported by all ranks."""
    path = folder / "run" / f"checkpoint_{number}"
    path.mkdir(parents=True)

    async def register() -> None:
        checkpoint = Checkpoint(str(path), filesystem=fs.LocalFileSystem())
        manager.register_checkpoint(_TrainingReport(checkpoint, metrics, validation=False))

    asyncio.run(register())


@examples(30)
@given(
    reports=st.lists(_SCORES, min_size=1, max_size=8),
    keep=st.integers(1, 4),
    order=st.sampled_from(["min", "max"]),
)
def test_the_best_scored_checkpoints_and_the_newest_are_kept_and_one_without_a_score_is_never_the_best(
    reports: list[dict[str, Any]], keep: int, order: Any
) -> None:
    scored: list[tuple[float, int]] = []
    for number, metrics in enumerate(reports):
        loss = metrics.get("loss")
        if isinstance(loss, int | float) and loss != 10**400 and math.isfinite(loss):
            scored.append((loss if order == "max" else -loss, number))
    best = [number for _, number in sorted(scored)]
    without = [number for number in range(len(reports)) if number not in best]
    expected = {*[*without, *best][-keep:], len(reports) - 1}
    config = CheckpointConfig(num_to_keep=keep, checkpoint_score_attribute="loss", checkpoint_score_order=order)
    with private_folder() as name:
        folder = Path(name)
        storage = StorageContext(name, "run", storage_filesystem=fs.LocalFileSystem())
        manager = RankedCheckpointManager(config, storage)
        for number, metrics in enumerate(reports):
            _register(manager, folder, number, metrics)
        snapshot = snapshots.parse_snapshot((folder / "run" / "checkpoint_manager_snapshot.json").read_bytes())
        assert snapshot is not None
        assert {path.name for path in folder.glob("run/checkpoint_*[0-9]")} == {f"checkpoint_{one}" for one in expected}
        latest = snapshots.latest_checkpoint(snapshot)
        assert latest is not None
        assert latest["checkpoint_dir_name"] == f"checkpoint_{len(reports) - 1}", "a restart resumes from the newest"
        ranked = [int(one["checkpoint_dir_name"].rpartition("_")[2]) for one in snapshot["checkpoint_results"]]
        assert ranked == [number for number in [*without, *best] if number in expected], "the best last"
        # Another policy, as after a change of the block: what was loaded is ranked by it.
        other = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="other", checkpoint_score_order=order)
        loaded = RankedCheckpointManager(other, storage)
        indices = [loaded._checkpoint_to_report_index[result.checkpoint] for result in loaded._checkpoint_results]
        assert indices == sorted(indices)
