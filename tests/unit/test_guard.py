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


def test_the_files_of_a_training_do_not_grow_old_for_cleaners_and_what_links_lead_to_is_left_alone(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "private"
    foreign = tmp_path / "foreign"
    files = [folder / "token", folder / "r0" / "session_1" / "sockets" / "raylet"]
    files[1].parent.mkdir(parents=True)
    for file in (*files, foreign):
        file.touch()
        os.utime(file, (_LONG_AGO, _LONG_AGO))
    (folder / "link").symlink_to(foreign)
    (folder / "link to nothing").symlink_to(folder / "nothing")
    with subprocess.Popen([sys.executable, "-c", _PROGRAM, str(folder)], stdin=subprocess.PIPE) as guard:
        wait_for(lambda: _LONG_AGO not in [file.stat().st_atime for file in files], 20, "new timestamps")
        guard.kill()
    assert foreign.stat().st_atime == _LONG_AGO
