"""A spare driver: a process with a driver's imports done, which waits for the attempt that needs it."""

from __future__ import annotations

import os
import signal
import sys
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


def wait_for_spec(framework: str) -> Path:
    """Return the path of a spec, once the supervisor writes it to the standard input; end if that closes before."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    importing = begin_imports(_modules(framework))
    line = sys.stdin.readline()
    if not line:
        os._exit(0)  # imports may be under way
    hurry()
    finish_imports(importing)
    return Path(line.rstrip("\n"))


def _modules(framework: str) -> Iterator[str]:
    yield "ray"
    if memory_left() < 0:
        signal.raise_signal(signal.SIGINT)  # which ends it quietly: no thread but the first may
    yield from (*_MODULES.get(framework, ()), *_OWN_MODULES)
