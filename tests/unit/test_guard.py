"""The guard while its flow process lives; its later work is tested with real processes of a training."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import wait_for

_PROGRAM = """
import os, sys
from prefect_elastic_train.supervisor import guard
guard._MAINTENANCE_SECONDS = 0.5
guard.main(sys.argv[1], os.getppid())
"""
_LONG_AGO = 1_000_000_000


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A private folder that a guard maintains several times a second."""
    guard = subprocess.Popen([sys.executable, "-c", _PROGRAM, str(tmp_path)], stdin=subprocess.PIPE)
    yield tmp_path
    guard.kill()
    guard.communicate(timeout=10)


def test_the_files_of_a_training_do_not_grow_old_for_cleaners_and_what_links_lead_to_is_left_alone(
    folder: Path,
) -> None:
    token, socket_like = folder / "token", folder / "r0" / "session_1" / "sockets" / "raylet"
    foreign = folder.with_name(f"{folder.name}-foreign")
    socket_like.parent.mkdir(parents=True)
    for file in (token, socket_like, foreign):
        file.write_text("secret")
        os.utime(file, (_LONG_AGO, _LONG_AGO))
    (folder / "link").symlink_to(foreign)
    (folder / "link to nothing").symlink_to(folder / "nothing")
    wait_for(lambda: _LONG_AGO not in (token.stat().st_mtime, socket_like.stat().st_atime), 20, "new timestamps")
    assert foreign.stat().st_atime == _LONG_AGO


def test_of_rays_logs_those_of_workers_that_have_exited_are_removed_and_no_other_file(folder: Path) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    dead, living = process.pid, os.getpid()
    logs = folder / "r0" / "session_2026-11-27_01-13-31_126363_18617" / "logs"
    names = ["worker-45f5-01000000-{}.out", "worker-45f5-01000000-{}.err", "python-core-worker-45f5_{}.log"]
    kept = [logs / "raylet.out", logs.parent / "artifacts" / "logs" / f"worker-{dead}.out"]
    kept += [logs / name.format(living) for name in names]
    removed = [logs / name.format(dead) for name in names]
    for file in [*kept, *removed]:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("a line")
    wait_for(lambda: not any(file.exists() for file in removed), 20, "their removal")
    assert [file for file in kept if not file.exists()] == []
