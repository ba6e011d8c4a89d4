"""A spare driver: a process with a driver's imports done, which waits for the attempt that needs it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from prefect_elastic_train.elastic.warming import begin_imports, finish_imports, hurry, memory_left

#: Stands in for the path of a spec on the command line of a spare.
SPARE = "--spare"
_MODULES = {"torch": ("ray.train.torch",), "jax": ("jax",)}
_OWN_MODULES = (
    "prefect_elastic_train.elastic.controller",
    "prefect_elastic_train.report.run_report",
    "prefect_elastic_train.runs.inspecting",
    "prefect_elastic_train.storage.s3",
)


def wait_for_spec(framework: str) -> tuple[Path, float]:
    """Return the path of a spec, once the supervisor writes it to the standard input, and when that was.

    Ends this process if the standard input closes before.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    told = threading.Event()
    importing = begin_imports(_modules(framework, told))
    line = sys.stdin.readline()
    told_at = time.time()
    if not line:
        os._exit(0)  # imports may be under way
    told.set()
    hurry()
    finish_imports(importing)
    return Path(line.rstrip("\n")), told_at


def _modules(framework: str, told: threading.Event) -> Iterator[str]:
    yield "ray"
    if memory_left() < 0 and not told.is_set():
        os._exit(0)
    yield from (*_MODULES.get(framework, ()), *_OWN_MODULES)
