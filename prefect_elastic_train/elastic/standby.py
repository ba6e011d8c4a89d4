"""Standby workers: beside each worker a second one, booted and warmed up, which the next worker group takes.

Most of a recovery is the boot of processes and the import of frameworks in them, and both can be done before anything
dies. A standby is an actor of Ray's own worker class on the node of its worker, outside of the placement group, which
goes with the old worker group. It holds no logical resources: those of the bundle are held by the placement group.

Uses ``ray.train.v2._internal``, which has no public way to bring the worker group's actors.
"""

from __future__ import annotations

import logging
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
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.train.v2._internal.execution.worker_group.worker import ActorMetadata, Worker
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from prefect_elastic_train.core.events import StandbysParked
from prefect_elastic_train.core.settings import ScalingSettings
from prefect_elastic_train.elastic import callbacks
from prefect_elastic_train.elastic.loop_watch import answered, ask
from prefect_elastic_train.elastic.sizing import DEVICES
from prefect_elastic_train.elastic.standby_process import about, own_devices, use_devices, warm_up
from prefect_elastic_train.elastic.warming import memory_left

logger = logging.getLogger(__name__)

#: Seconds after which the standbys of a worker group boot if it has not reported by then: until it has, its own imports
#: may need the processors.
_BOOT_AFTER_SECONDS = 30.0
_LOOK_SECONDS = 10.0  # between two looks whether they live
_ANSWER_SECONDS = 1.0  # that workers and standbys may take
_EXPECTED_BYTES = 3 * 2**28  # of a standby, with a torch for CUDA; it becomes as large as its worker when that is gone
_GROWTH_SECONDS = 60.0  # that a growth waits for its workers to boot
_BOOTING_SECONDS = 15.0  # that a worker group waits for those of its workers that boot already


@dataclass
class Standby:
    """A worker that is parked, or will be once it has answered."""

    actor: Any
    node_id: str
    #: The devices that it may see, of those on its node; a process cannot be given others.
    visible: str
    #: What :func:`warm_up` returns; then what :func:`about` does, again and again, to see whether it lives.
    asked: Any
    #: Known once it is warm.
    metadata: ActorMetadata | None = None
    #: For a larger group than there is.
    is_beyond: bool = False


#: Of this controller process.
_current: Standbys | None = None


def take(group: PlacementGroup, indices: list[int], resources: dict[str, float]) -> dict[int, Worker]:
    """Return a warm worker for each bundle that one is parked for."""
    try:
        return _current.take(group, indices, resources) if _current is not None else {}
    except Exception:
        logger.warning("Standby workers could not be taken; others are booted", exc_info=True)
        return {}


def wait_for_booting() -> None:
    """Wait for workers that boot by now, before Ray boots what they need later than they do."""
    with suppress(Exception):
        if _current is not None:
            _current.wait_for_booting()


def prepare(beyond: Mapping[str, int]) -> bool:
    """Boot so many workers on each node for a larger group; return whether it need wait for them no more."""
    try:
        return _current is None or _current.prepare(beyond)
    except Exception:
        logger.warning("No workers boot ahead of a growth", exc_info=True)
        return True


def release() -> None:
    """End what is parked: the next worker group is far."""
    if _current is not None:
        _current.release()


def may_replace(scaling: ScalingSettings, framework: str) -> bool:
    """Return whether a standby can take a worker's place; with torch alone the workers of a node see all its GPUs."""
    shares = ray_constants.env_bool(ENABLE_SHARE_CUDA_VISIBLE_DEVICES_ENV, True)
    if scaling.accelerator == "gpu":
        return framework == "torch" and shares
    return not {*DEVICES} & {*scaling.resources_per_worker, scaling.accelerator.upper()}


def end(actors: Iterable[Any]) -> None:
    """End standbys, or workers that were."""
    for actor in actors:
        with suppress(Exception):
            ray.kill(actor)


class Standbys(ControllerCallback, WorkerGroupCallback):  # type: ignore[misc]
    """Boots, parks and ends the standbys of a run's worker groups."""

    def __init__(self, framework: str, in_any_case: bool) -> None:
        self._framework = framework
        self._in_any_case = in_any_case
        self._parked: list[Standby] = []
        self._group: Any = None
        self._has_reported = False
        self._looks_at = 0.0
        self._beyond_since = float("inf")
        self._told = (0, 0)
        self._size_bytes = 0
        self._losses = 0

    def after_controller_start(self, train_run_context: Any) -> None:
        global _current
        _current = self

    def after_worker_group_training_start(self, worker_group: Any) -> None:
        self._group = worker_group
        self._losses = 0
        self._has_reported = False
        self._looks_at = time.monotonic() + _BOOT_AFTER_SECONDS

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Boot what is missing, in a group that trains and is not about to be restarted."""
        now = time.monotonic()
        if not self._has_reported and any(one.training_report for one in worker_group_status.worker_statuses.values()):
            self._has_reported = True
            self._looks_at = now
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

    def wait_for_booting(self) -> None:
        """Wait for workers that boot beside the last ones: no others are sooner ready."""
        booting = [one.asked for one in self._parked if one.metadata is None and not one.is_beyond]
        answered(booting, _BOOTING_SECONDS)

    def prepare(self, beyond: Mapping[str, int]) -> bool:
        """Have so many standbys on each node beside those of the workers; return whether they need not be waited for.

        On GPUs none are booted: which they would see is not known.
        """
        self._settle()
        self._beyond_since = self._beyond_since if beyond else float("inf")
        for one in [one for one in self._parked if one.is_beyond and one.node_id not in beyond]:
            self._parked.remove(one)
            end([one.actor])
        group = self._group
        if group is not None and not group.get_worker_group_context().resources_per_worker.get("GPU"):
            for node_id, number in beyond.items():
                there = sum(one.is_beyond and one.node_id == node_id for one in self._parked)
                self._parked += [self._boot(node_id, "", is_beyond=True) for _ in range(there, number)]
        if beyond and self._beyond_since == float("inf"):
            self._looks_at = 0.0  # those of the workers that are there shall be warm by then, too
        elif not beyond or not any(one.metadata is None for one in self._parked):
            return True
        self._beyond_since = min(self._beyond_since, time.monotonic())
        return time.monotonic() - self._beyond_since > _GROWTH_SECONDS

    def release(self) -> None:
        """End what is parked."""
        parked = self._parked
        self._parked = []
        end(one.actor for one in parked)

    def take(self, group: PlacementGroup, indices: list[int], resources: dict[str, float]) -> dict[int, Worker]:
        """Return a worker for each bundle of a placement group that has a standby on its node; the rest are ended.

        None of them boots on while the others of the group do.
        """
        self._settle()
        parked = self._parked
        self._parked = []
        self._told = (0, 0)
        self._beyond_since = float("inf")
        warm = [one for one in parked if one.metadata is not None]
        taken: dict[int, Worker] = {}
        try:
            if not warm:
                return taken
            nodes = placement_group_table(group)["bundles_to_node_id"]
            found = _devices(group, indices, resources["GPU"]) if resources.get("GPU") else {}
            visible = _visible((nodes[index], found.get(index, {})) for index in indices)
            for index in indices:
                place = nodes[index], visible[nodes[index]]
                for one in [one for one in warm if (one.node_id, one.visible) == place]:
                    warm.remove(one)
                    worker = _worker(one, found.get(index, {}), resources, index)
                    if worker is not None:
                        parked.remove(one)
                        taken[index] = worker
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
            if beside is not None and not one.is_beyond:
                lacking.remove(beside)
        visible = _visible((worker.metadata.node_id, worker.metadata.accelerator_ids) for worker in workers)
        answers = ask(lacking, memory_left, _ANSWER_SECONDS)
        for rank, free in answers.items():
            node = lacking[rank].metadata.node_id
            booting = sum(one.node_id == node and one.metadata is None for one in self._parked)
            if self._in_any_case or free >= (booting + 1) * _EXPECTED_BYTES:
                self._parked.append(self._boot(node, visible[node]))
        parked = [one for one in self._parked if not one.is_beyond]
        found = StandbysParked(parked=len(parked), wanted=len(workers), size_bytes=self._size_bytes)
        is_settled = len(answers) == len(lacking) and all(one.metadata is not None for one in parked)
        if is_settled and self._told != (found.parked, found.wanted):
            self._told = found.parked, found.wanted
            callbacks.current().tell(found)

    def _settle(self) -> None:
        """Take in what the standbys have said; one that is gone is no more."""
        ready = answered([one.asked for one in self._parked], timeout_seconds=0)
        for one in [one for one in self._parked if one.asked in ready]:
            try:
                self._size_bytes, one.metadata = ray.get(one.asked, timeout=_ANSWER_SECONDS)
                one.asked = one.actor.execute.remote(about)
            except Exception as error:  # noqa: BLE001 - it is replaced
                logger.info("A standby worker is gone: %s", error)
                self._losses += 1
                self._parked.remove(one)
                end([one.actor])

    def _boot(self, node_id: str, visible: str, is_beyond: bool = False) -> Standby:
        """Boot a standby, and have it warm up with what it may see."""
        group = self._group
        affinity = NodeAffinitySchedulingStrategy(node_id, soft=False)
        own = group._train_run_context.run_config.worker_runtime_env or {}
        environment = WorkerGroup._get_worker_runtime_env(own)
        worker = ray.remote(num_cpus=0, runtime_env=environment, scheduling_strategy=affinity)(group._worker_cls)
        actor = worker.remote()
        cpus = group.get_worker_group_context().resources_per_worker.get("CPU", 0)
        asked = actor.execute.remote(warm_up, visible, self._framework, cpus)
        return Standby(actor, node_id, visible, asked, is_beyond=is_beyond)


def _visible(places: Iterable[tuple[str, Mapping[str, list[Any]]]]) -> dict[str, str]:
    """Return which GPUs the workers on each node see: those of all of them, as Ray Train lets them."""
    seen: defaultdict[str, set[str]] = defaultdict(set)
    for node_id, devices in places:
        seen[node_id].update(map(str, devices.get("GPU", [])))
    return {node_id: ",".join(sorted(gpus)) for node_id, gpus in seen.items()}


def _devices(group: PlacementGroup, indices: list[int], gpus: float) -> dict[int, dict[str, list[Any]]]:
    """Return which devices Ray has given to each bundle, as a task in it sees them."""
    tell = ray.remote(num_cpus=0, num_gpus=gpus, max_retries=0)(own_devices)
    asked = [
        tell.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index
            )
        ).remote()
        for index in indices
    ]
    return dict(zip(indices, ray.get(asked, timeout=30 * _ANSWER_SECONDS), strict=True))


def _worker(
    standby: Standby, devices: Mapping[str, list[Any]], resources: dict[str, float], index: int
) -> Worker | None:
    """Return a standby as the worker of a bundle, whose devices it has taken over; None if it does not answer."""
    try:
        ray.get(standby.actor.execute.remote(use_devices, dict(devices)), timeout=_ANSWER_SECONDS)
    except Exception as error:  # noqa: BLE001 - another worker is booted for it
        logger.info("A standby worker is gone: %s", error)
        return None
    assert standby.metadata is not None
    metadata = replace(standby.metadata, accelerator_ids={**standby.metadata.accelerator_ids, **devices})
    return Worker(standby.actor, metadata, resources, placement_group_bundle_index=index)
