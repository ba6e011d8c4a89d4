"""Names of the rank files in a session's checkpoint.

Each rank stores its rank file after its other files, so a checkpoint with all rank files is complete.
"""

import re
from collections.abc import Collection
from pathlib import Path

#: Pattern of the name of a rank file (:func:`rank_file`). Groups: rank and world size.
RANK_FILE_PATTERN = re.compile(r"rank-(\d{5,})-of-(\d{5,})\.npz")


def rank_file(directory: str | Path, rank: int, world_size: int) -> Path:
    """Return the path of a rank file: the file with a rank's random state and ledger in a session's checkpoint."""
    return Path(directory) / f"rank-{rank:05}-of-{world_size:05}.npz"


def missing_rank_files_message(names: Collection[str]) -> str:
    """Return a message about the rank files that a session's checkpoint lacks; empty if none is missing.

    A checkpoint without any rank file was not written by a session, and counts as complete.

    Args:
        names: Names of the checkpoint's files.
    """
    sizes = {int(match[2]) for match in map(RANK_FILE_PATTERN.fullmatch, names) if match}
    expected = {rank_file("", rank, size).name for size in sizes for rank in range(size)}
    missing = sorted(expected.difference(names))
    return f"{len(missing)} of {len(expected)} ranks did not store their part, first {missing[0]}" if missing else ""
