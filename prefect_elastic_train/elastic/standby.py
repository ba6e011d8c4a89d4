"""Standby workers: beside each worker a second one, booted and warmed up, which the next worker group takes.

Most of a recovery is the boot of processes and the import of frameworks in them, and both can be done before anything
dies. A standby is an actor of Ray's own worker class on the node of its worker, outside of the placement group, which
goes with the old worker group. It holds no logical resources: those of the bundle are held by the placement group.

Uses ``ray.train.v2._internal``, which has no public way to bring the worker group's actors.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.worker_group.worker import ActorMetadata, Worker
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
_MIB = 2**20


@dataclass
class Standby:
    """A worker that is parked, or will be once it has answered."""

    actor: Any
    node_id: str
    #: The devices that it may see, of those on its node; a process cannot be given others.
    visible: str
    #: Its memory, once it is warm; then asked for again and again, to see whether it lives.
    warming: Any
    #: Known once it is warm.
    metadata: ActorMetadata | None = None


#: Of this controller process.
_current: Standbys | None = None


def take(group: PlacementGroup, indices: list[int], resources: dict[str, float]) -> dict[int, Worker]:
    """Return a warm worker for each bundle that one is parked for."""
    try:
        return _current.take(group, indices, resources) if _current is not None else {}
    except Exception:
        logger.warning("Standby workers could not be taken; others are booted", exc_info=True)
        return {}


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
        self._has_told, self._size_bytes = "", 0

    def after_controller_start(self, train_run_context: Any) -> None:
        global _current
        _current = self

    def after_worker_group_training_start(self, worker_group: Any) -> None:
        self._group = worker_group
        self._looks_at = time.monotonic() + _BOOT_AFTER_SECONDS

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Boot what is missing, in a group that has trained for a while and is not about to be restarted."""
        now = time.monotonic()
        if self._group is None or now < self._looks_at or callbacks.current().is_draining:
            return
        self._looks_at = now + _LOOK_SECONDS
        try:
            self._look()
        except Exception:
            logger.warning("Standby workers could not be booted; training goes on", exc_info=True)
            self._looks_at = now + 30 * _LOOK_SECONDS

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        self._group = None

    def after_controller_finish(self, result: Any) -> None:
        end(one.actor for one in self._parked)

    def before_controller_abort(self) -> None:
        end(one.actor for one in self._parked)

    def take(self, group: PlacementGroup, indices: list[int], resources: dict[str, float]) -> dict[int, Worker]:
        """Return a worker for each bundle of a placement group that has a standby on its node; the rest are ended.

        None of them boots on while the others of the group do.
        """
        self._settle()
        parked, self._parked, self._has_told = self._parked, [], ""
        warm = [one for one in parked if one.metadata is not None]
        taken: dict[int, Worker] = {}
        try:
            if warm:
                nodes = placement_group_table(group)["bundles_to_node_id"]
                found = _devices(group, indices, resources) if resources.get("GPU") else {}
                visible = _visible({index: nodes[index] for index in indices}, found)
                for index in indices:
                    where = nodes[index], visible[nodes[index]]
                    one = next((one for one in warm if (one.node_id, one.visible) == where), None)
                    if one is not None and _use_devices_of(one, found.get(index, {})):
                        warm.remove(one)
                        parked.remove(one)
                        taken[index] = _worker(one, found.get(index, {}), resources, index)
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
        room = self._room(lacking)
        devices = _visible(
            {rank: worker.metadata.node_id for rank, worker in enumerate(workers)},
            {rank: worker.metadata.accelerator_ids for rank, worker in enumerate(workers)},
        )
        for worker in lacking:
            if room[worker.metadata.node_id] > 0:
                room[worker.metadata.node_id] -= 1
                self._boot(worker.metadata.node_id, worker.resources, devices[worker.metadata.node_id])
        if not any(one.metadata is None for one in self._parked):
            self._tell(len(workers))

    def _settle(self) -> None:
        """Take in what the standbys have said: one that is gone is no more, one that does not answer is ended."""
        for one in list(self._parked):
            if not ray.wait([one.warming], timeout=0)[0]:
                continue
            try:
                self._size_bytes = ray.get(one.warming, timeout=_ANSWER_SECONDS)
                one.metadata = ray.get(one.actor.get_metadata.remote(), timeout=_ANSWER_SECONDS)
                one.warming = one.actor.execute.remote(_size)
            except Exception as error:  # noqa: BLE001 - it is replaced
                logger.info("A standby worker is gone: %s", error)
                self._parked.remove(one)
                end([one.actor])

    def _boot(self, node_id: str, resources: Mapping[str, float], visible: str) -> None:
        group = self._group
        worker_class = ray.remote(
            num_cpus=0,
            runtime_env=group._get_worker_runtime_env(group._train_run_context.run_config.worker_runtime_env),
        )(group._worker_cls)
        affinity = NodeAffinitySchedulingStrategy(node_id, soft=False)
        actor = worker_class.options(scheduling_strategy=affinity).remote()
        threads = max(1, int(resources.get("CPU", 0)))
        loop = group._worker_group_context.train_fn_ref
        warming = actor.execute.remote(warm_up, self._framework, threads, visible, loop)
        self._parked.append(Standby(actor, node_id, visible, warming))

    def _room(self, workers: list[Any]) -> defaultdict[str, int]:
        """Return for how many standbys each node has memory, as its workers see it."""
        answers = ask(workers, _memory, _ANSWER_SECONDS)
        room: defaultdict[str, int] = defaultdict(int)
        for rank, (used, free, total) in answers.items():
            node = workers[rank].metadata.node_id
            fits = int((free - _LEFT_FREE * total) // max(used, 100 * _MIB))
            parked = sum(one.node_id == node for one in self._parked)  # which become as large, too
            room[node] = len(workers) if self._in_any_case else fits - parked
        return room

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


def warm_up(framework: str, threads: int, visible: str, loop: Any) -> int:
    """Do what comes before the first step of a loop, at the lowest priority; return the memory that it takes."""
    os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(threads))
    if visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    thread = threading.Thread(target=_warm_up, args=(framework, loop))
    thread.start()
    thread.join(_BOOT_SECONDS)
    return _size()


def _warm_up(framework: str, loop: Any) -> None:
    # Only this thread, whose end restores the process for the training.
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    steps: list[Callable[[], Any]] = [loop.get]
    if framework == "torch":
        steps = [_step_of_torch, *steps]
    elif framework == "jax":
        steps = [_import_jax, *steps]
    for step in steps:
        try:
            step()
        except Exception:
            logger.info("A standby worker could not be warmed up", exc_info=True)


def _step_of_torch() -> None:
    """A first step takes seconds, of which the imports are a part only."""
    import torch
    import torch.distributed.checkpoint
    import torch.nn.parallel
    from ray.train import torch as _  # noqa: F401

    from prefect_elastic_train.loop import torch_state  # noqa: F401

    state = torch.get_rng_state()
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.set_rng_state(state)


def _import_jax() -> None:
    """Nothing is computed: the processes of a group find each other before that."""
    import jax.numpy  # noqa: F401
    import orbax.checkpoint  # noqa: F401


def _memory() -> tuple[int, int, int]:
    """Return the memory in bytes that this process takes, what is free of its node's, and all."""
    import psutil
    from ray._private.utils import get_system_memory, get_used_memory

    total = get_system_memory()
    return psutil.Process().memory_info().rss, total - get_used_memory(), total


def _size() -> int:
    return _memory()[0]


def _own_devices() -> dict[str, list[Any]]:
    return {name: ids for name, ids in ray.get_runtime_context().get_accelerator_ids().items() if ids}


def _use_devices(devices: dict[str, list[Any]]) -> None:
    """Have Ray say that these are this process's own; raise if it does not see them."""
    if devices:
        torch, seen = sys.modules.get("torch"), os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if torch is not None and torch.version.cuda and torch.cuda.device_count() < len(seen):
            raise RuntimeError(f"of the devices {', '.join(seen)} it sees {torch.cuda.device_count()}")
        worker = ray._private.worker.global_worker
        worker.get_accelerator_ids_for_accelerator_resource = lambda name, regex: list(devices.get(name, []))
