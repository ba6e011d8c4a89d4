"""Ray Train's checkpoint manager snapshot as plain JSON on Ray's schema: parse, check and repair it."""

import json
from collections.abc import Collection
from itertools import compress
from typing import Any

from pydantic import BaseModel, ValidationError


class _Result(BaseModel):
    checkpoint_dir_name: str


class _Snapshot(BaseModel):
    """The fields of Ray Train's snapshot that this package reads."""

    checkpoint_results: list[_Result]
    checkpoint_report_indices: list[int]
    current_report_index: int
    latest_checkpoint_result: _Result


#: Names of lists of results, each with the name of the list that has one entry for each result.
_PARALLEL_LISTS = {
    "checkpoint_results": "checkpoint_report_indices",
    "pending_training_results": "pending_validation_specs",
}


def parse_snapshot(data: bytes | str | None) -> dict[str, Any] | None:
    """Return Ray Train's snapshot from its JSON; None without data, or if the data is not a consistent snapshot."""
    try:
        snapshot = json.loads(data or b"")
    except ValueError:
        return None
    return snapshot if is_consistent(snapshot) else None


def is_consistent(snapshot: Any) -> bool:
    """Return True if a value is a consistent snapshot of Ray Train.

    It has as many checkpoint results as report indices, and the latest checkpoint is one of the results. Ray writes no
    snapshot before the first checkpoint.
    """
    try:
        parsed = _Snapshot.model_validate(snapshot, strict=True)
    except ValidationError:
        return False
    results = parsed.checkpoint_results
    has_latest = parsed.latest_checkpoint_result in reversed(results)  # without scores it is the last
    return has_latest and len(results) == len(parsed.checkpoint_report_indices)


def checkpoint_names(snapshot: dict[str, Any] | None) -> list[str]:
    """Return the folder names of a snapshot's checkpoints in the order of their reports; empty without a snapshot."""
    return [result["checkpoint_dir_name"] for _, result in reported_results(snapshot)] if snapshot else []


def reported_results(snapshot: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """Return report index and result of each checkpoint in a snapshot, in the order of the reports."""
    pairs = zip(snapshot["checkpoint_report_indices"], snapshot["checkpoint_results"], strict=True)
    return sorted(pairs, key=lambda pair: pair[0])


def without_checkpoints(snapshot: dict[str, Any], dropped: Collection[str]) -> dict[str, Any] | None:
    """Return a snapshot without the checkpoints in the folders ``dropped``; None if no checkpoint is left.

    The latest checkpoint is then the one with the highest report index. Ray's lists of validated checkpoints may name
    checkpoints that are no longer kept.
    """
    if not dropped:
        return snapshot
    remaining = set(checkpoint_names(snapshot)).difference(dropped)
    if not remaining:
        return None

    usable = dict(snapshot)
    for results, parallel in _PARALLEL_LISTS.items():
        is_left = [result["checkpoint_dir_name"] in remaining for result in snapshot.get(results, [])]
        for field in (results, parallel):
            usable[field] = [*compress(snapshot.get(field, []), is_left)]
    usable["latest_checkpoint_result"] = reported_results(usable)[-1][1]
    return usable


def seed_snapshot(checkpoint_name: str, metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the snapshot of a new run whose only checkpoint is a copy of another run's checkpoint."""
    result = {"checkpoint_dir_name": checkpoint_name, "metrics": metrics}
    return {
        "checkpoint_results": [result],
        "checkpoint_report_indices": [0],
        "latest_checkpoint_result": result,
        "pending_training_results": [],
        "pending_validation_specs": [],
        "current_report_index": 1,
        "validated_checkpoint_dir_names": [],
        "timed_out_validation_checkpoint_dir_names": [],
        "failed_validation_checkpoint_dir_names": [],
    }
