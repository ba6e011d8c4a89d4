"""The files of a checkpoint which show that the parts of all ranks are stored: each rank stores its own last."""

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
    """Return which rank files a checkpoint lacks, from the names of those that it has; empty for none.

    A checkpoint without any is not one of a session, and lacks none.
    """
    files = set(names)
    sizes = {int(match[2]) for match in map(_RANK_FILE.fullmatch, files) if match is not None}
    expected = {rank_file("", rank, size).name for size in sizes for rank in range(size)}
    missing = sorted(expected - files)
    return f"{len(missing)} of {len(expected)} ranks did not store their part, first {missing[0]}" if missing else ""
