"""Some of what `make soak` plays for as long as it is told."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT, end_tree, spawn

FAULTS, SECONDS = 30, 2400
#: From this seed on, torch and JAX are trained, in all three places; and Ray loses no calls, which would take minutes
#: more.
SEED = 30895


@pytest.mark.timeout(SECONDS + 100)
def test_random_faults_on_random_trainings_lose_nothing_and_leave_nothing(tmp_path: Path) -> None:
    limit = ("--faults", str(FAULTS), "--minutes", str(SECONDS / 60))
    log = tmp_path / "log"
    soak = spawn(sys.executable, "-m", "tests.soak", "--seed", str(SEED), *limit, log=log, folder=ROOT)
    try:
        soak.wait(SECONDS + 60)
    except subprocess.TimeoutExpired:
        pytest.fail(f"not done after {SECONDS + 60} s:\n{log.read_text()}")
    finally:
        end_tree(soak)
    episodes = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    assert [one for one in episodes if one["problems"]] == []
    assert soak.returncode == 0, log.read_text()[-4000:]
    assert sum(len(one["faults"]) for one in episodes) >= FAULTS
