"""The two names of a checkpoint: the loop's name, which users see, and its folder's name, which is never used twice.

A folder's name also has attempt, worker group and report, so no two reports write into the same folder.

Belongs to all processes.
"""

import re

_MAX_COMPONENT = 255  # bytes
_PHYSICAL = re.compile(r"^(.+)\.a(\d{4,})\.g(\d{2,})\.r(\d{4,})\Z", re.DOTALL)


def physical_name(name: str, attempt: int, group: int = 0, report: int = 0) -> str:
    """Return the name of a checkpoint's folder, such as ``epoch-3.a0002.g01.r0004``.

    It has the loop's name of the checkpoint, the attempt, the worker group and the report. Attempt 0 marks a copy from
    another run. The loop's name is shortened where the folder's name would be too long for a file system.
    """
    suffix = f".a{attempt:04d}.g{group:02d}.r{report:04d}"
    parent, slash, last = name.rpartition("/")
    fitting = last.encode()[: _MAX_COMPONENT - len(suffix)].decode(errors="ignore")
    return f"{parent}{slash}{fitting}{suffix}"


def loop_name(folder: str) -> str:
    """Return the loop's name of the checkpoint in a folder, from the folder's name.

    Return the folder's name if :func:`physical_name` did not make it.
    """
    return _PHYSICAL.sub(r"\1", folder)


def age_of(folder: str) -> tuple[int, ...]:
    """Return attempt, worker group and report of the checkpoint in a folder, from the folder's name.

    A later checkpoint of a run compares as greater. Return -1 for each if :func:`physical_name` did not make the name,
    so that the checkpoint compares as the lowest.
    """
    match = _PHYSICAL.match(folder)
    return tuple(map(int, match.groups()[1:])) if match else (-1, -1, -1)


def written_by(folder: str) -> int:
    """Return the number of the attempt that wrote the checkpoint in a folder, from the folder's name.

    Return -1 for a name that :func:`physical_name` did not make.
    """
    return age_of(folder)[0]
