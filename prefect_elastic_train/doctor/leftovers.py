"""Private folders of trainings whose processes are gone, as a power cut or two kills at once leave behind."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from prefect_elastic_train.core.spec import MARK_VARIABLE
from prefect_elastic_train.doctor.findings import Finding, ok, warn

__all__ = ["check_leftovers"]

#: A training that begins just now has a folder before it has processes.
_YOUNG_SECONDS = 60.0
_NAMED = 5


def check_leftovers(bases: Sequence[str] = ()) -> Iterator[Finding]:
    """Find private folders that no process belongs to.

    Args:
        bases: Folders to look in. Default: those that private folders are made in.
    """
    places = dict.fromkeys(os.path.realpath(base) for base in bases or ("/tmp", tempfile.gettempdir()))
    old = [folder for base in places for folder in Path(base).glob("elt-*") if _is_old_and_ours(folder)]
    used = _used() if old else set()
    left = [str(folder) for folder in old if str(folder) not in used]
    if left:
        more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
        yield warn(
            f"nobody uses {', '.join(left[:_NAMED])}{more}: the private folders of trainings that were killed together "
            "with their guard",
            f"`rm -r {' '.join(left[:_NAMED])}`",
        )
    else:
        yield ok(f"no training has left anything in {', '.join(places)}")


def _is_old_and_ours(folder: Path) -> bool:
    """Tell whether a folder is this user's, the only one whose processes can be seen, and not just being made."""
    try:
        found = folder.stat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and time.time() - found.st_mtime > _YOUNG_SECONDS


def _used() -> set[str]:
    """Give the private folders that living processes carry as their mark, or guard."""
    used: set[str] = set()
    for process in psutil.process_iter():
        try:
            mark = process.environ().get(MARK_VARIABLE)
            guarded = [word.removeprefix("--folder=") for word in process.cmdline() if word.startswith("--folder=")]
        except (psutil.Error, OSError):
            continue
        used.update(folder for folder in (mark, *guarded) if folder)
    return used
