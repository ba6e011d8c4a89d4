"""Recorded run directories: what a version of this package leaves when its flow is killed in mid-training.

``python -m tests.support.recorded_run <version>`` records one for a release whose schema differs from the one before.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.processes import ROOT, FlowProcess, prefect_server, wait_for

RECORDED = ROOT / "tests" / "data" / "runs"
RUN_NAME = "recorded"
#: The configuration of the train loop, as far as it decides about the weights.
CONFIG = {"steps": 60, "save_every": 10}


def array_training(folder: Path, workers: int) -> dict[str, Any]:
    """Return the arguments of a flow that trains a run in a folder, with the same weights for any number of workers."""
    files = {"ledger": str(folder / "ledger.jsonl"), "weights": str(folder / "weights.npz")}
    return {
        "loop": "tests.support.session_loops:array_loop",
        "config": {**CONFIG, **files, "sleep": 0.2, "upload_seconds": 0, "dies": False},
        "scaling": {"min_workers": workers, "max_workers": workers},
        "storage": str(folder / "runs"),
        "run_name": RUN_NAME,
    }


def record(version: str) -> None:
    """Record the run directory of the installed version under ``tests/data/runs/<version>``."""
    with tempfile.TemporaryDirectory() as name, prefect_server(Path(name) / "server") as api_url:
        flow = FlowProcess(Path(name) / "flow", api_url, **array_training(Path(name), workers=1))
        flow.wait_for_commits(3)
        driver = flow.living_driver()
        flow.process.kill()
        driver.kill()
        wait_for(lambda: not flow.marked(), 60, "nothing to be left of it")
        shutil.copytree(Path(name) / "runs" / RUN_NAME, RECORDED / version)


if __name__ == "__main__":
    record(sys.argv[1])
