"""Kills this process at a chosen step of a commit, once: on ``PYTHONPATH`` of the processes of a test only.

The file that ``CRASH_FILE`` names holds the name of the step. Who takes the file away, dies there.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

CRASH_FILE = Path(os.environ.get("CRASH_FILE", "/nowhere"))
_link, _replace, _copyfile = os.link, os.replace, shutil.copyfile


def _die_at(step: str) -> None:
    try:
        if CRASH_FILE.read_text().strip() == step:
            os.rename(CRASH_FILE, f"{CRASH_FILE}.done")
            os.kill(os.getpid(), signal.SIGKILL)
    except OSError:
        pass  # nobody is to die, or another process has


def link(source: Any, target: Any, **options: Any) -> None:
    if "/commits/" in str(target):
        _die_at("in the middle of the commit")
    _link(source, target, **options)


def replace(source: Any, target: Any, **options: Any) -> None:
    _replace(source, target, **options)
    if str(target).endswith("checkpoint_manager_snapshot.json"):
        _die_at("after Ray's file")


def copyfile(source: Any, target: Any, **options: Any) -> Any:
    if str(source).endswith("state.json") and CRASH_FILE.exists():
        whole = Path(source).read_bytes()
        Path(target).write_bytes(whole[: len(whole) // 2])
        _die_at("mid-upload")
    return _copyfile(source, target, **options)


if "CRASH_FILE" in os.environ:
    os.link, os.replace, shutil.copyfile = link, replace, copyfile  # type: ignore[assignment]
