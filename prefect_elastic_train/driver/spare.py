"""A spare driver: a process with a driver's imports done, which waits for the attempt that needs it."""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path

from prefect_elastic_train.elastic.warming import import_ahead, memory_left

#: Stands in for the path of a spec on the command line of a spare.
SPARE = "--spare"
_MODULES = {"torch": ("ray.train.torch",), "jax": ("jax",)}
_OWN_MODULES = (
    "prefect_elastic_train.elastic.controller",
    "prefect_elastic_train.report.run_report",
    "prefect_elastic_train.runs.inspecting",
    "prefect_elastic_train.storage.s3",
)


def wait_for_spec(framework: str) -> Path:
    """Return the path of a spec, once the supervisor has written it to the standard input.

    Ends this process if the standard input is closed instead, or if the machine is short of memory.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    import_ahead(["ray"])
    if memory_left() < 0 and not select.select([sys.stdin], [], [], 0)[0]:
        os._exit(0)
    import_ahead((*_MODULES.get(framework, ()), *_OWN_MODULES))
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    return Path(line.rstrip("\n"))
