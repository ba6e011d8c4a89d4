"""Standby workers: beside each worker a second one, booted and warmed up, which the next worker group takes.

Most of a recovery is the boot of processes and the import of frameworks in them, and both can be done before anything
dies. A standby is an actor of Ray's own worker class on the node of its worker, outside of the placement group, which
goes with the old worker group. It holds no logical resources: those of the bundle are held by the placement group.

Uses ``ray.train.v2._internal``, which has no public way to bring the worker group's actors.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray._private import ray_constants
from ray.train.constants import ENABLE_SHARE_CUDA_VISIBLE_DEVICES_ENV
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.worker_group.worker import ActorMetadata, RayTrainWorker, Worker
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from prefect_elastic_train.core.events import StandbysParked
from prefect_elastic_train.elastic import callbacks
from prefect_elastic_train.elastic.loop_watch import ask

logger = logging.getLogger(__name__)

#: Seconds that a worker group has trained when its standbys are booted, and between two looks whether they live.
_BOOT_AFTER_SECONDS, _LOOK_SECONDS = 10.0, 10.0
#: How long workers and standbys may take to answer; and those that boot.
_ANSWER_SECONDS, _BOOT_SECONDS = 1.0, 300.0
#: A node has room if this share of its memory is left beside standbys as large as its workers are.
_LEFT_FREE = 0.15
#: What the first steps of a loop import.
_MODULES = {
    "torch": (
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "torch.nn.parallel.distributed",
        "ray.train.torch",
        "prefect_elastic_train.loop.torch_state",
    ),
    "jax": ("jax.numpy", "orbax.checkpoint"),
}


@dataclass
class Standby:
    """A worker that is parked, or will be once it has answered."""

    actor: Any
    node_id: str
    #: The devices that it may see, of those on its node; a process cannot be given others.
    visible: str
    #: What :func:`warm_up` returns; then what :func:`_about` does, again and again, to see whether it lives.
    asked: Any
    #: Known once it is warm.
    metadata: ActorMetadata | None = None


_may_idle: list[bool] = []  # of a standby

#: Of this controller process.
_current: Standbys | None = None


def take(group: PlacementGroup, indices: list[int], resources: dict[str, float]) -> dict[int, Worker]:
    """Return a warm worker for each bundle that one is parked for."""
    try:
        return _current.take(group, indices, resources) if _current is not None else {}
    except Exception:
        logger.warning("Standby workers could not be taken; others are booted", exc_info=True)
        return {}


def release() -> None:
    """End what is parked: the next worker group is far."""
    if _current is not None:
        _current.release()


def may_replace(accelerator: str, framework: str) -> bool:
    """Return whether a standby can take a worker's place; with torch alone the workers of a node see all its GPUs."""
    shares = ray_constants.env_bool(ENABLE_SHARE_CUDA_VISIBLE_DEVICES_ENV, True)
    return accelerator == "cpu" or (accelerator == "gpu" and framework == "torch" and shares)


def end(actors: Iterable[Any]) -> None:
    """End standbys, or workers that were."""
    for actor in actors:
        with suppress(Exception):
            ray.kill(actor)


class Standbys(ControllerCallback, WorkerGroupCallback):  # type: ignore[misc]
    """Boots, parks and ends the standbys of a run's worker groups."""

    def __init__(self, framework: str, in_any_case: bool) -> None:
        self._framework, self._in_any_case = framework, in_any_case
        self._parked: list[Standby] = []
        self._group: Any = None
        self._looks_at = 0.0
        self._has_told, self._size_bytes, self._losses = "", 0, 0

    def after_controller_start(self, train_run_context: Any) -> None:
        global _current
        _current = self

    def after_worker_group_training_start(self, worker_group: Any) -> None:
        self._group, self._losses = worker_group, 0
        self._looks_at = time.monotonic() + _BOOT_AFTER_SECONDS

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Boot what is missing, in a group that has trained for a while and is not about to be restarted."""
        now = time.monotonic()
        if self._group is None or now < self._looks_at or callbacks.current().is_draining:
            return
        try:
            self._look()
        except Exception:
            logger.warning("Standby workers could not be booted; training goes on", exc_info=True)
            self._losses += 1
        # What dies again and again, as for want of memory, is booted ever more seldom.
        self._looks_at = now + _LOOK_SECONDS * 2.0 ** min(self._losses, 10)

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        self._group = None

    def after_controller_finish(self, result: Any) -> None:
        self.release()

    def before_controller_abort(self) -> None:
        self.release()

    def release(self) -> None:
        """End what is parked."""
        parked, self._parked = self._parked, []
        end(one.actor for one in parked)

    def take(self, group: PlacementGroup, indices: list[int], resources: dict[str, float]) -> dict[int, Worker]:
        """Return a worker for each bundle of a placement group that has a standby on its node; the rest are ended.

        None of them boots on while the others of the group do.
        """
        self._settle()
        parked, self._parked, self._has_told = self._parked, [], ""
        warm = [one for one in parked if one.metadata is not None]
        taken: dict[int, Worker] = {}
        try:
            nodes = placement_group_table(group)["bundles_to_node_id"] if warm else {}
            found = _devices(group, indices, resources) if warm and resources.get("GPU") else {}
            visible = _visible({index: nodes[index] for index in indices if warm}, found)
            for index in indices:
                while one := next((w for w in warm if (w.node_id, w.visible) == _place(nodes, visible, index)), None):
                    warm.remove(one)
                    if _use_devices_of(one, found.get(index, {})):
                        parked.remove(one)
                        taken[index] = _worker(one, found.get(index, {}), resources, index)
                        break
        finally:
            end(one.actor for one in parked)
        return taken

    def _look(self) -> None:
        """Take in which standbys are warm and which are gone, and boot one for each worker that has none."""
        self._settle()
        workers = self._group.get_workers()
        lacking = list(workers)
        for one in self._parked:
            beside = next((worker for worker in lacking if worker.metadata.node_id == one.node_id), None)
            if beside is not None:
                lacking.remove(beside)
        devices = _visible(
            {rank: worker.metadata.node_id for rank, worker in enumerate(workers)},
            {rank: worker.metadata.accelerator_ids for rank, worker in enumerate(workers)},
        )
        for rank, (used, free, total, threads) in ask(lacking, _memory, _ANSWER_SECONDS).items():
            node = lacking[rank].metadata.node_id
            parked = sum(one.node_id == node for one in self._parked)  # which become as large, too
            if self._in_any_case or free - _LEFT_FREE * total >= (parked + 1) * used:
                self._boot(node, threads, devices[node])
        if not any(one.metadata is None for one in self._parked):
            self._tell(len(workers))

    def _settle(self) -> None:
        """Take in what the standbys have said; one that is gone is no more."""
        asked = [one.asked for one in self._parked]
        ready = set(ray.wait(asked, num_returns=len(asked), timeout=0)[0]) if asked else set()
        for one in [one for one in self._parked if one.asked in ready]:
            try:
                self._size_bytes, one.metadata = ray.get(one.asked, timeout=_ANSWER_SECONDS)
                one.asked = one.actor.execute.remote(_about)
            except Exception as error:  # noqa: BLE001 - it is replaced
                logger.info("A standby worker is gone: %s", error)
                self._losses += 1
                self._parked.remove(one)
                end([one.actor])

    def _boot(self, node_id: str, threads: str, visible: str) -> None:
        group = self._group
        worker_class = ray.remote(
            num_cpus=0,
            runtime_env=group._get_worker_runtime_env(group._train_run_context.run_config.worker_runtime_env),
        )(group._worker_cls)
        affinity = NodeAffinitySchedulingStrategy(node_id, soft=False)
        actor = worker_class.options(scheduling_strategy=affinity).remote()
        asked = actor.execute.remote(warm_up, self._framework, threads, visible)
        self._parked.append(Standby(actor, node_id, visible, asked))

    def _tell(self, wanted: int) -> None:
        parked = len(self._parked)
        words = f"{parked} of {wanted}"
        if words != self._has_told:
            self._has_told = words
            callbacks.current().tell(StandbysParked(parked=parked, wanted=wanted, size_bytes=self._size_bytes))


def _worker(standby: Standby, devices: Mapping[str, list[Any]], resources: dict[str, float], index: int) -> Worker:
    assert standby.metadata is not None
    metadata = replace(standby.metadata, accelerator_ids={**standby.metadata.accelerator_ids, **devices})
    return Worker(standby.actor, metadata, resources, placement_group_bundle_index=index)


def _place(nodes: Mapping[int, str], visible: Mapping[str, str], index: int) -> tuple[str, str]:
    return nodes[index], visible[nodes[index]]


def _visible(nodes: Mapping[int, str], devices: Mapping[int, Mapping[str, list[Any]]]) -> defaultdict[str, str]:
    """Return which GPUs the workers on each node see: those of all of them, as Ray Train lets them."""
    seen: defaultdict[str, set[str]] = defaultdict(set)
    for index, node_id in nodes.items():
        seen[node_id].update(map(str, devices.get(index, {}).get("GPU", [])))
    return defaultdict(str, {node_id: ",".join(sorted(gpus)) for node_id, gpus in seen.items()})


def _devices(
    group: PlacementGroup, indices: list[int], resources: Mapping[str, float]
) -> dict[int, dict[str, list[Any]]]:
    """Return which devices Ray has given to each bundle, as a task in it sees them."""
    tell = ray.remote(num_cpus=0, num_gpus=resources["GPU"], max_retries=0)(_own_devices)
    asked = []
    for index in indices:
        where = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
        asked.append(tell.options(scheduling_strategy=where).remote())
    return dict(zip(indices, ray.get(asked, timeout=30 * _ANSWER_SECONDS), strict=True))


def _use_devices_of(standby: Standby, devices: Mapping[str, list[Any]]) -> bool:
    """Return whether a standby answers, and has taken over the devices of a bundle."""
    try:
        ray.get(standby.actor.execute.remote(_use_devices, dict(devices)), timeout=_ANSWER_SECONDS)
    except Exception as error:  # noqa: BLE001 - another worker is booted for it
        logger.info("A standby worker is gone: %s", error)
        return False
    return True


# What runs in a standby, or in a task.


def warm_up(framework: str, threads: str, visible: str) -> tuple[int, ActorMetadata]:
    """Do what comes before the first step of a loop, and return what :func:`_about` does.

    The loop itself is left alone: what its module does when it is imported may depend on the rank, or be meant for a
    process that has joined the others.
    """
    if threads:  # Ray gives an actor without CPUs one, before torch reads it
        os.environ["OMP_NUM_THREADS"] = threads
    if visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    if framework == "jax":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # read when JAX is imported; on GPUs there is no standby
    importing = threading.Thread(target=_import, args=(framework,))
    importing.start()
    importing.join(_BOOT_SECONDS)
    if importing.is_alive():
        raise TimeoutError(f"a standby worker was not warm after {_BOOT_SECONDS:g} s")
    _end_idling()
    if framework == "torch":
        _step_of_torch()
    return _about()


def _import(framework: str) -> None:
    with suppress(OSError, AttributeError):
        trial = threading.Thread(target=_idle_and_back)
        trial.start()
        trial.join()
        if _may_idle:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # this thread
    for module in _MODULES.get(framework, ()):
        try:
            importlib.import_module(module)
        except Exception:
            logger.info("A standby worker does not import %s", module, exc_info=True)


def _idle_and_back() -> None:
    """Find out whether this process may take the lowest priority back, which not everybody may."""
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        _may_idle.append(True)


def _end_idling() -> None:
    """Take it back from the threads that were begun meanwhile, which serve the training, too."""
    for thread in os.listdir("/proc/self/task") if _may_idle else ():
        with suppress(ProcessLookupError):
            os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))


def _step_of_torch() -> None:
    """Do a first step, in the main thread: what torch starts with it serves the training, too."""
    import torch

    state = torch.get_rng_state()
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())  # others ask for the state of a GPU
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.set_rng_state(state)


def _memory() -> tuple[int, int, int, str]:
    """Return the memory that this process takes, what is free of its node's, all, in bytes, and its OpenMP threads."""
    import psutil
    from ray._private.utils import get_system_memory, get_used_memory

    used, total = psutil.Process().memory_info().rss, get_system_memory()
    return used, total - get_used_memory(), total, os.environ.get("OMP_NUM_THREADS", "")


def _about() -> tuple[int, ActorMetadata]:
    return _memory()[0], RayTrainWorker().get_metadata()


def _own_devices() -> dict[str, list[Any]]:
    return {name: ids for name, ids in ray.get_runtime_context().get_accelerator_ids().items() if ids}


def _use_devices(devices: dict[str, list[Any]]) -> None:
    """Have Ray say that these are this process's own; raise if it does not see them."""
    if devices:
        torch: Any = sys.modules.get("torch")
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        is_real = torch is not None and (torch.version.cuda or torch.version.hip)  # else they are pretended ones
        if is_real and torch.cuda.device_count() < len(seen):
            raise RuntimeError(f"of the devices {', '.join(seen)} it sees {torch.cuda.device_count()}")
        worker = ray._private.worker.global_worker
        worker.get_accelerator_ids_for_accelerator_resource = lambda name, regex: list(devices.get(name, []))
