"""Reading and repairing Ray Train's checkpoint manager snapshot, as plain JSON on Ray's schema."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

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
    return snapshot if isinstance(snapshot, dict) and fits_together(snapshot) else None


def fits_together(snapshot: dict[str, Any]) -> bool:
    """Whether a snapshot's parts fit together."""
    results, indices = snapshot.get("checkpoint_results"), snapshot.get("checkpoint_report_indices")
    if not isinstance(results, list) or not isinstance(indices, list) or len(results) != len(indices):
        return False
    if not all(isinstance(index, int) for index in [*indices, snapshot.get("current_report_index")]):
        return False
    names = [result.get("checkpoint_dir_name") if isinstance(result, dict) else None for result in results]
    latest = snapshot.get("latest_checkpoint_result")
    is_known = latest is None or (isinstance(latest, dict) and latest.get("checkpoint_dir_name") in names)
    return is_known and all(isinstance(name, str) for name in names)


def checkpoint_names(snapshot: dict[str, Any]) -> list[str]:
    """Return the names of the checkpoint folders, in the order of their reports."""
    return [result["checkpoint_dir_name"] for _, result in reported(snapshot)]


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
    pairs = zip(snapshot["checkpoint_results"], snapshot["checkpoint_report_indices"], strict=True)
    kept = [(result, index) for result, index in pairs if result["checkpoint_dir_name"] not in dropped]
    if not kept:
        return None
    names = {result["checkpoint_dir_name"] for result, _ in kept}
    validations = zip(
        snapshot.get("pending_training_results", []), snapshot.get("pending_validation_specs", []), strict=False
    )
    pending = [(result, spec) for result, spec in validations if result.get("checkpoint_dir_name") in names]
    return {
        **snapshot,
        "checkpoint_results": [result for result, _ in kept],
        "checkpoint_report_indices": [index for _, index in kept],
        "latest_checkpoint_result": max(kept, key=lambda pair: pair[1])[0],
        "pending_training_results": [result for result, _ in pending],
        "pending_validation_specs": [spec for _, spec in pending],
        **{field: [name for name in snapshot.get(field, []) if name in names] for field in _LISTS},
    }


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
