"""Reading and repairing Ray Train's checkpoint manager snapshot, as plain JSON on Ray's schema."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from pydantic import BaseModel, ValidationError


class _Result(BaseModel):
    checkpoint_dir_name: str


class _Snapshot(BaseModel):
    """The parts of a snapshot that are read here."""

    checkpoint_results: list[_Result]
    checkpoint_report_indices: list[int]
    current_report_index: int
    latest_checkpoint_result: _Result | None = None


_LISTS = (
    "validated_checkpoint_dir_names",
    "timed_out_validation_checkpoint_dir_names",
    "failed_validation_checkpoint_dir_names",
)


def parse_snapshot(data: bytes | str | None) -> dict[str, Any] | None:
    """Return a snapshot whose parts fit together, or None for anything else."""
    try:
        snapshot = json.loads(data or b"")
    except ValueError:
        return None
    return snapshot if fits_together(snapshot) else None


def fits_together(snapshot: Any) -> bool:
    """Return whether this is a snapshot whose parts fit together."""
    try:
        parts = _Snapshot.model_validate(snapshot, strict=True)
    except ValidationError:
        return False
    latest, results = parts.latest_checkpoint_result, parts.checkpoint_results
    return len(results) == len(parts.checkpoint_report_indices) and (latest is None or latest in results)


def checkpoint_names(snapshot: dict[str, Any] | None) -> list[str]:
    """Return the names of the checkpoint folders, in the order of their reports; none without a snapshot."""
    return [result["checkpoint_dir_name"] for _, result in reported(snapshot)] if snapshot else []


def reported(snapshot: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """Return report index and result of each checkpoint, in the order of their reports."""
    pairs = zip(snapshot["checkpoint_report_indices"], snapshot["checkpoint_results"], strict=True)
    return sorted(pairs, key=lambda pair: pair[0])


def latest_checkpoint(snapshot: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the result that a restart resumes from: ``checkpoint_dir_name`` and ``metrics``."""
    latest = snapshot.get("latest_checkpoint_result") if snapshot else None
    return latest if isinstance(latest, dict) else None


def without_checkpoints(snapshot: dict[str, Any], dropped: Collection[str]) -> dict[str, Any] | None:
    """Return the snapshot without some checkpoints, None if none is left; the newest has the highest report index."""
    if not dropped:
        return snapshot
    names = set(checkpoint_names(snapshot)).difference(dropped)
    if not names:
        return None

    def kept(results: str, beside: str) -> dict[str, list[Any]]:
        pairs = zip(snapshot.get(results, []), snapshot.get(beside, []), strict=False)
        left = [pair for pair in pairs if pair[0].get("checkpoint_dir_name") in names]
        return {results: [result for result, _ in left], beside: [other for _, other in left]}

    usable = {
        **snapshot,
        **kept("checkpoint_results", "checkpoint_report_indices"),
        **kept("pending_training_results", "pending_validation_specs"),
        **{field: [name for name in snapshot.get(field, []) if name in names] for field in _LISTS},
    }
    return {**usable, "latest_checkpoint_result": reported(usable)[-1][1]}


def seed_snapshot(checkpoint_name: str, metrics: dict[str, Any], ray_version: str) -> dict[str, Any]:
    """Return the snapshot of a new run that starts from one checkpoint."""
    result = {"version": 0, "checkpoint_dir_name": checkpoint_name, "metrics": metrics}
    return {
        "ray_version": ray_version,
        "checkpoint_results": [result],
        "checkpoint_report_indices": [0],
        "latest_checkpoint_result": result,
        "pending_training_results": [],
        "pending_validation_specs": [],
        "current_report_index": 1,
        **{field: [] for field in _LISTS},
    }
