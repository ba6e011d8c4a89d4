"""The two names of a checkpoint: the loop's own, which people see, and its folder's, which is never used twice.

A folder carries attempt, worker group and report, too, so no two reports write into one, whoever is late.
"""

from __future__ import annotations

import re

_MAX_COMPONENT = 255  # bytes
_PHYSICAL = re.compile(r"^(.+)\.a(\d{4,})\.g(\d{2,})\.r(\d{4,})$", re.DOTALL)


def physical_name(name: str, attempt: int, group: int = 0, report: int = 0) -> str:
    """Return a checkpoint's folder, ``epoch-3.a0002.g01.r0004``, cut to fit a disk; attempt 0 is before the first."""
    suffix = f".a{attempt:04d}.g{group:02d}.r{report:04d}"
    parent, slash, last = name.rpartition("/")
    fitting = last.encode()[: _MAX_COMPONENT - len(suffix)].decode(errors="ignore")
    return f"{parent}{slash}{fitting}{suffix}"


def loop_name(folder: str) -> str:
    """Return the loop's own name of a checkpoint; the folder itself, if it is none that :func:`physical_name` made."""
    match = _PHYSICAL.match(folder)
    return match[1] if match else folder


def age_of(folder: str) -> tuple[int, int, int]:
    """Return attempt, worker group and report of a checkpoint's folder: the newest is highest, any other lowest."""
    match = _PHYSICAL.match(folder)
    return (int(match[2]), int(match[3]), int(match[4])) if match else (-1, -1, -1)


def written_by(folder: str) -> int | None:
    """Return the attempt that wrote a checkpoint's folder, or None for one that :func:`physical_name` did not make."""
    return attempt if (attempt := age_of(folder)[0]) >= 0 else None
