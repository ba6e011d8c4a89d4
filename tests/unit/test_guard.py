"""The guard while its flow process lives; its later work is tested with real processes of a training."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.processes import wait_for

_PROGRAM = """
import os, sys
from prefect_elastic_train.supervisor import guard
guard._MAINTENANCE_SECONDS = 0.5
guard.main(sys.argv[1], os.getppid())
"""
_LONG_AGO = 1_000_000_000


def test_the_files_of_a_training_do_not_grow_old_for_cleaners_and_the_logs_of_exited_workers_are_removed(
    tmp_path: Path,
) -> None:
    with subprocess.Popen(["true"]) as process:
        dead = process.pid
    folder = tmp_path / "private"
    foreign = tmp_path / "foreign"
    logs = folder / "r0" / "session_2026-11-27_01-13-31_126363_18617" / "logs"
    names = ["worker-45f5-01000000-{}.out", "python-core-worker-45f5_{}.log"]
    files = [logs / name.format(os.getpid()) for name in names]
    files += [folder / "token", logs / "raylet.out", logs.parent / "artifacts" / "logs" / f"worker-{dead}.out"]
    exited = [logs / name.format(dead) for name in names]
    for file in (*files, *exited, foreign):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        os.utime(file, (_LONG_AGO, _LONG_AGO))
    (folder / "link").symlink_to(foreign)
    (folder / "link to nothing").symlink_to(folder / "nothing")
    with subprocess.Popen([sys.executable, "-c", _PROGRAM, str(folder)], stdin=subprocess.PIPE) as guard:
        wait_for(lambda: _LONG_AGO not in [file.stat().st_atime for file in files], 20, "new timestamps")
        wait_for(lambda: not any(log.exists() for log in exited), 20, "their removal")
        guard.kill()
    assert foreign.stat().st_atime == _LONG_AGO
