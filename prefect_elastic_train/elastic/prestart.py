"""Processes that a local cluster has ready for the next controller and workers, and that outlive a driver.

Ray boots processes of no job yet: when a node starts, and when it is asked to. The first actor without a runtime
environment of its own gets one, and what that prints is told to its job. Before it is to be had, Ray imports a module
in it: ours, which imports the rest if the process is one of those that are wanted. For each of these a file is in the
training's private folder, and tells by its name how far it is: ``wanted-…``, ``boots-<pid>``, ``ready-<pid>``.

Uses ``ray._private.grpc_utils`` and ``ray.core.generated``, since a node cannot be asked for processes otherwise, and
``ray.train.v2._internal``, which gives each actor a runtime environment.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil

from prefect_elastic_train.core.request import MARK_VARIABLE, DriverSpec
from prefect_elastic_train.elastic.warming import (
    WARM_BYTES,
    WORKER_MODULES,
    begin_imports,
    finish_imports,
    memory_left,
    step_of_torch,
)

_MODULE, _MODULES = "prefect_elastic_train.elastic.prestarted", "RAY_preload_python_modules"
_FRAMEWORKS = {"torch": ("ray.train.torch",), "jax": ("jax",)}
BESIDE_WORKERS = 2  # the controller, and the actor that a worker group meets at
_FOLDER, _FRAMEWORK, _CPUS = "prestart", "ELT_PRESTART_FRAMEWORK", "ELT_PRESTART_CPUS"
_NEEDED = "needed"  # a file that is there while those that boot shall hurry
_KEEP_SECONDS, _ASK_SECONDS = 10**8, 5.0
_PATIENCE_SECONDS = 9.0  # for those that were asked for to say that they boot


def environment(spec: DriverSpec, folder: Path, cpus: int) -> dict[str, str]:
    """Return what the environment of a local cluster has for such processes, and want those of the first attempt.

    What Ray Train gives its actors by a runtime environment is in it, too.
    """
    place, workers = folder / _FOLDER, min(spec.scaling.max_workers, cpus)
    place.mkdir(exist_ok=True)
    _want(place, workers + 1, in_a_hurry=True)  # the first group meets at one that boots while it comes up
    return {
        _MODULES: _MODULE,
        _FRAMEWORK: spec.request.framework,
        _CPUS: str(spec.scaling.resources_per_worker.get("CPU", 1)),
        "RAY_num_workers_soft_limit": str(cpus + 2 * (workers + BESIDE_WORKERS)),  # else Ray ends those beyond its CPUs
        **({"JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")} if spec.request.framework == "jax" else {}),
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": str(spec.poll_interval_seconds),
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": os.environ.get("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0"),
        "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": os.environ.get("RAY_WARN_BLOCKING_GET_INSIDE_ASYNC", "0"),
    }


def get_ready() -> None:
    """Warm this process up, if it is one of those that are wanted."""
    place = _place()
    mine = place / f"boots-{os.getpid()}"
    for wanted in place.glob("wanted-*"):
        with suppress(OSError):  # another one has it
            wanted.rename(mine)
            break
    else:
        return
    framework, is_needed = os.environ[_FRAMEWORK], (place / _NEEDED).exists
    # Ray gives one to what is no worker yet, before torch reads it.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, int(float(os.environ[_CPUS])))))
    try:
        finish_imports(begin_imports(_modules(framework, is_needed)), is_needed)
        if framework == "torch" and not is_needed():
            step_of_torch()
        mine.rename(place / f"ready-{os.getpid()}")
    except BaseException:
        mine.unlink(missing_ok=True)
        raise


def _modules(framework: str, is_needed: Callable[[], bool]) -> Iterator[str]:
    """What a controller imports, and then what a worker does, which is left to it where others wait."""
    yield from (*_FRAMEWORKS.get(framework, ()), "prefect_elastic_train.elastic.controller")
    yield from takewhile(lambda _: not is_needed(), WORKER_MODULES.get(framework, ()))


def are_kept() -> bool:
    """Return whether the cluster of this process has such processes."""
    return _place().is_dir()


def hurry() -> None:
    """Have those that boot take the priority of others: they are needed now."""
    if are_kept():
        (_place() / _NEEDED).touch()


def worker_runtime_env(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the runtime environment of workers: none beside processes that have it all from their node."""
    from ray.train.v2._internal.execution.worker_group import WorkerGroup

    return dict(own) if are_kept() else WorkerGroup._get_worker_runtime_env(own)


class NoVariables(dict[str, str]):
    """The variables of a controller that has them from its node; Ray Train would add one."""

    def setdefault(self, name: str, value: str = "", /) -> str:
        return value


class Prestarted:
    """Keeps processes ready in the local cluster of this one."""

    def __init__(self) -> None:
        self._place, self._asked_at = _place(), float("-inf")

    def fill(self, number: int, in_any_case: bool) -> list[int] | None:
        """Have so many ready, as far as there is memory for them or in any case.

        Returns:
            How many bytes each takes; None while some boot.
        """
        boot, sizes = 0, list[int]()
        for file in self._place.glob("[br]*-*"):
            state, _, pid = file.name.partition("-")
            with suppress(psutil.Error):
                process = psutil.Process(int(pid))
                if state == "boots":
                    boot += 1
                    continue
                if process.cmdline()[:1] == ["ray::IDLE"]:
                    sizes.append(process.memory_info().rss)
                    continue
            file.unlink(missing_ok=True)  # somebody has it, or it is gone
        lacking = number - len(sizes)
        if not in_any_case:
            lacking = min(lacking, int(memory_left() / WARM_BYTES))
        # Ray starts no more at once than it has CPUs, and forgets of the others that it was asked for them.
        if lacking > 0 and not boot and time.monotonic() > self._asked_at + _PATIENCE_SECONDS:
            self._asked_at = time.monotonic()
            _want(self._place, lacking, in_a_hurry=False)
            _ask_node(lacking)
        return None if boot or lacking > 0 else sizes


def _place() -> Path:
    return Path(os.environ.get(MARK_VARIABLE, os.devnull)) / _FOLDER


def _want(place: Path, number: int, in_a_hurry: bool) -> None:
    for file in place.glob("wanted-*"):
        file.unlink(missing_ok=True)
    needed = place / _NEEDED
    needed.touch() if in_a_hurry else needed.unlink(missing_ok=True)
    for index in range(number):
        (place / f"wanted-{time.time_ns()}-{index}").touch()


def _ask_node(number: int) -> None:
    """Ask this node for processes of no job."""
    import ray
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import common_pb2, node_manager_pb2, node_manager_pb2_grpc

    here = ray.get_runtime_context().get_node_id()
    node = next(one for one in ray.nodes() if one["NodeID"] == here)
    asked = {"language": common_pb2.PYTHON, "num_workers": number, "keep_alive_duration_secs": _KEEP_SECONDS}
    with init_grpc_channel(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}") as channel:
        stub = node_manager_pb2_grpc.NodeManagerServiceStub(channel)
        stub.PrestartWorkers(node_manager_pb2.PrestartWorkersRequest(**asked), timeout=_ASK_SECONDS)
