"""The guard while its flow process lives; its later work is tested with real processes of a training."""

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
    folder = tmp_path / "private"
    with subprocess.Popen([sys.executable, "-c", _PROGRAM, str(folder)], stdin=subprocess.PIPE) as guard:
        yield folder
        guard.kill()


def _write(*files: Path) -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("a line")
        os.utime(file, (_LONG_AGO, _LONG_AGO))


def test_the_files_of_a_training_do_not_grow_old_for_cleaners_and_what_links_lead_to_is_left_alone(
    folder: Path,
) -> None:
    files = [folder / "token", folder / "r0" / "session_1" / "sockets" / "raylet"]
    foreign = folder.with_name("foreign")
    _write(*files, foreign)
    (folder / "link").symlink_to(foreign)
    (folder / "link to nothing").symlink_to(folder / "nothing")
    wait_for(lambda: _LONG_AGO not in [file.stat().st_atime for file in files], 20, "new timestamps")
    assert foreign.stat().st_atime == _LONG_AGO


def test_of_rays_logs_those_of_workers_that_have_exited_are_removed_and_no_other_file(folder: Path) -> None:
    with subprocess.Popen(["true"]) as process:
        dead = process.pid
    logs = folder / "r0" / "session_2026-11-27_01-13-31_126363_18617" / "logs"
    names = ["worker-45f5-01000000-{}.out", "worker-45f5-01000000-{}.err", "python-core-worker-45f5_{}.log"]
    kept = [logs / "raylet.out", logs.parent / "artifacts" / "logs" / f"worker-{dead}.out"]
    kept += [logs / name.format(os.getpid()) for name in names]
    removed = [logs / name.format(dead) for name in names]
    _write(*kept, *removed)
    wait_for(lambda: not any(file.exists() for file in removed), 20, "their removal")
    assert all(file.exists() for file in kept)
