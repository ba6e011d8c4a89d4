"""Reading and repairing Ray Train's snapshot, as plain JSON and in Ray's own checkpoint manager."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import fs
from ray.train import CheckpointConfig
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import (
    CheckpointManager,
    _CheckpointManagerState,
    _TrainingResultState,
)
from ray.train.v2._internal.execution.storage import StorageContext

from prefect_elastic_train.runs import snapshots
from prefect_elastic_train.runs.run_directory import RunDirectory
from prefect_elastic_train.storage.store import LocalRunStore
from tests.unit.ray_storage import Ray
from tests.unit.support import begin, empty_snapshot, examples, private_folder, with_result

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
    return json.loads(state.json())


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
    for field in ("checkpoint_results", "pending_training_results"):
        assert repaired[field] == [result for result in snapshot[field] if result["checkpoint_dir_name"] in kept]
    steps = [result["metrics"]["step"] for result in repaired["checkpoint_results"]]
    assert repaired["checkpoint_report_indices"] == steps
    latest = repaired["latest_checkpoint_result"]
    assert latest["checkpoint_dir_name"] == kept[-1]
    assert len(repaired["pending_validation_specs"]) == len(repaired["pending_training_results"])
    for untouched in ("ray_version", "current_report_index", *_STATUS_LISTS):
        assert repaired[untouched] == snapshot[untouched]
    with private_folder() as folder:
        manager = _ray_loads(repaired, Path(folder))
    assert manager.latest_checkpoint_result.metrics == latest["metrics"]
    assert len(manager._checkpoint_results) == len(kept)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("checkpoint_results", [{"checkpoint_dir_name": 7}]),
        ("checkpoint_report_indices", ["0"]),
        ("checkpoint_report_indices", [0, 1]),
        ("current_report_index", None),
        ("latest_checkpoint_result", {"checkpoint_dir_name": "elsewhere", "metrics": {}}),
        ("latest_checkpoint_result", None),
    ],
)
def test_a_snapshot_whose_parts_do_not_fit_together_is_none(field: str, value: Any) -> None:
    snapshot = with_result(empty_snapshot(), "a", {})
    assert snapshots.parse_snapshot(json.dumps(snapshot)) is not None
    assert snapshots.parse_snapshot(json.dumps({**snapshot, field: value})) is None
    assert [snapshots.parse_snapshot(data) for data in (None, b"", b"{", b"[]", b"null", b"\xff\xfe")] == [None] * 6


def test_a_seeded_run_is_one_that_ray_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    seeded = snapshots.seed_snapshot("from-other", {"loss": 0.5})
    manager = _ray_loads(seeded, tmp_path)
    assert Path(manager.latest_checkpoint_result.checkpoint.path).name == "from-other"
    assert manager.latest_checkpoint_result.metrics == {"loss": 0.5}


_NO_SCORES = st.sampled_from([math.nan, math.inf, -math.inf, None, "0.5", [0.5], {"loss": 1}, 10**400])
_SCORES = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"loss": st.integers(-2, 2) | st.floats(-1, 1) | _NO_SCORES}),
)


@examples(30)
@given(
    reports=st.lists(_SCORES, min_size=1, max_size=8),
    keep=st.integers(1, 4),
    order=st.sampled_from(["min", "max"]),
)
def test_the_best_scored_checkpoints_and_the_newest_are_kept_and_one_without_a_score_is_never_the_best(
    reports: list[dict[str, Any]], keep: int, order: Any
) -> None:
    scored = []
    for number, metrics in enumerate(reports):
        loss = metrics.get("loss")
        if isinstance(loss, int | float) and loss != 10**400 and math.isfinite(loss):
            scored.append((loss if order == "max" else -loss, number))
    best = [number for _, number in sorted(scored)]
    without = [number for number in range(len(reports)) if number not in best]
    expected = {*[*without, *best][-keep:], len(reports) - 1}
    policy = {"checkpoint_score_attribute": "loss", "checkpoint_score_order": order}
    with private_folder() as name:
        store = LocalRunStore(f"{name}/run")
        ray = Ray(store, begin(store).attempt, num_to_keep=keep, **policy).start()
        for number, metrics in enumerate(reports):
            ray.report(f"checkpoint_{number}", **metrics)
        assert {*store.folders()[1:]} == {f"checkpoint_{number}" for number in expected}
        commit = RunDirectory(store).newest_commit
        assert commit.checkpoint == f"checkpoint_{len(reports) - 1}", "a restart resumes from the newest"
        ranked = [int(one["checkpoint_dir_name"].rpartition("_")[2]) for one in commit.snapshot["checkpoint_results"]]
        assert ranked == [number for number in [*without, *best] if number in expected], "the best last"
        # Another policy, as after a change of the block: what was loaded is ranked by it.
        policy["checkpoint_score_attribute"] = "other"
        numbers = [name.rpartition("_")[2] for name in Ray(store, 1, num_to_keep=1, **policy).start().checkpoints]
        assert numbers == sorted(numbers)
