"""Reading and repairing Ray Train's checkpoint manager snapshot, as plain JSON on Ray's schema."""

from __future__ import annotations

import json
from collections.abc import Collection
from copy import deepcopy
from typing import Any

_LISTS = (
    "validated_checkpoint_dir_names",
    "timed_out_validation_checkpoint_dir_names",
    "failed_validation_checkpoint_dir_names",
)


def parse_snapshot(data: bytes | str | None) -> dict[str, Any] | None:
    """Give a snapshot whose parts fit together, or None for anything else."""
    if data is None:
        return None
    try:
        snapshot = json.loads(data)
    except ValueError:
        return None
    return snapshot if isinstance(snapshot, dict) and fits_together(snapshot) else None


def fits_together(snapshot: dict[str, Any]) -> bool:
    """Whether a snapshot's parts fit together."""
    results, indices = snapshot.get("checkpoint_results"), snapshot.get("checkpoint_report_indices")
    if not isinstance(results, list) or not isinstance(indices, list) or len(results) != len(indices):
        return False
    if not all(isinstance(index, int) for index in indices):
        return False
    if not all(isinstance(r, dict) and isinstance(r.get("checkpoint_dir_name"), str) for r in results):
        return False
    if not isinstance(snapshot.get("current_report_index"), int):
        return False
    latest = snapshot.get("latest_checkpoint_result")
    names = {result["checkpoint_dir_name"] for result in results}
    return latest is None or (isinstance(latest, dict) and latest.get("checkpoint_dir_name") in names)


def checkpoint_names(snapshot: dict[str, Any]) -> list[str]:
    """Give the names of the checkpoint folders, in the order of their reports."""
    ordered = sorted(
        zip(snapshot["checkpoint_report_indices"], snapshot["checkpoint_results"], strict=True),
        key=lambda pair: pair[0],
    )
    return [result["checkpoint_dir_name"] for _, result in ordered]


def latest_checkpoint(snapshot: dict[str, Any]) -> dict[str, Any] | None:
    """Give the result that a restart resumes from: ``checkpoint_dir_name`` and ``metrics``."""
    latest = snapshot.get("latest_checkpoint_result")
    return latest if isinstance(latest, dict) else None


def without_checkpoints(snapshot: dict[str, Any], dropped: Collection[str]) -> dict[str, Any] | None:
    """Give the snapshot without some checkpoints, None if no checkpoint is left.

    Results and report indices stay parallel; the latest result and the pending validations point into the
    results; the newest checkpoint is the one with the highest report index, whatever its place in the list.
    """
    if not dropped:
        return snapshot
    kept = [
        (result, index)
        for result, index in zip(snapshot["checkpoint_results"], snapshot["checkpoint_report_indices"], strict=True)
        if result["checkpoint_dir_name"] not in dropped
    ]
    if not kept:
        return None
    repaired = deepcopy(snapshot)
    repaired["checkpoint_results"] = [result for result, _ in kept]
    repaired["checkpoint_report_indices"] = [index for _, index in kept]
    repaired["latest_checkpoint_result"] = max(kept, key=lambda pair: pair[1])[0]
    names = {result["checkpoint_dir_name"] for result, _ in kept}
    pending = [
        (result, spec)
        for result, spec in zip(
            snapshot.get("pending_training_results", []),
            snapshot.get("pending_validation_specs", []),
            strict=False,
        )
        if result.get("checkpoint_dir_name") in names
    ]
    repaired["pending_training_results"] = [result for result, _ in pending]
    repaired["pending_validation_specs"] = [spec for _, spec in pending]
    for field in _LISTS:
        repaired[field] = [name for name in snapshot.get(field, []) if name in names]
    return repaired


def seed_snapshot(checkpoint_name: str, metrics: dict[str, Any], ray_version: str) -> dict[str, Any]:
    """Give the snapshot of a new run that starts from one checkpoint."""
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
