"""A pre-started driver: a process that has a driver's imports done, and waits for the attempt that needs it."""

import os
import select
import signal
import sys
from pathlib import Path

from prefect_elastic_train.worker.preimports import import_ahead, memory_left

#: Command-line option of a pre-started driver, in place of the path of a spec.
PRESTARTED = "--prestarted"
#: The module that a driver imports for the framework of its run.
FRAMEWORK_MODULES = {
    "torch": "ray.train.torch",
    "jax": "jax",
    "xgboost": "ray.train.xgboost",
    "lightgbm": "ray.train.lightgbm",
    "none": "ray.train",
}
_OWN_MODULES = (
    "prefect_elastic_train.controller.controller",
    "prefect_elastic_train.report.run_report",
    "prefect_elastic_train.runs.inspecting",
    "prefect_elastic_train.storage.s3",
)


def wait_for_spec(framework: str) -> Path:
    """Do the imports of a driver, wait for the path of a spec file on the standard input, and return the path.

    The supervisor writes the path when it needs the pre-started driver. The process exits if the standard input is
    closed instead, or if the machine is short of memory.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if memory_left() < 0 and not select.select([sys.stdin], [], [], 0)[0]:
        os._exit(0)
    import_ahead((FRAMEWORK_MODULES[framework], *_OWN_MODULES))
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    return Path(line.rstrip("\n"))
