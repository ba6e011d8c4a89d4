"""Rank files of a session's checkpoint. Each rank stores its own last, so with all of them a checkpoint is complete."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_RANK_FILE = re.compile(r"rank-(\d{5,})-of-(\d{5,})\.npz")


def rank_file(directory: str | Path, rank: int, world_size: int) -> Path:
    """Return the file that a rank stores after all others of its part."""
    return Path(directory) / f"rank-{rank:05}-of-{world_size:05}.npz"


def is_rank_file(name: str) -> bool:
    """True for the name of a :func:`rank_file`."""
    return _RANK_FILE.fullmatch(name) is not None


def missing_parts(names: Iterable[str]) -> str:
    """Return a message about missing rank files, from the names of a checkpoint's files; empty if none is missing.

    A checkpoint without any rank file was not written by a session, and counts as complete.
    """
    files = set(names)
    sizes = {int(match[2]) for match in map(_RANK_FILE.fullmatch, files) if match is not None}
    expected = {rank_file("", rank, size).name for size in sizes for rank in range(size)}
    missing = sorted(expected - files)
    return f"{len(missing)} of {len(expected)} ranks did not store their part, first {missing[0]}" if missing else ""
