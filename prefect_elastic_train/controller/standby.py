"""Standby workers: for each worker a second one, booted and warmed up, which the next worker group uses.

Most of a recovery is the boot of processes and the import of frameworks in them. Both can be done before a failure. A
standby is an actor of Ray's worker class on the node of its worker, outside of the placement group, which is removed
with the old worker group. It holds no logical resources: the placement group holds those of its bundle.

Uses ``ray.train.v2._internal``, since Ray has no public way to replace the actors of a worker group.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray._private import ray_constants
from ray.exceptions import GetTimeoutError
from ray.train.constants import ENABLE_SHARE_CUDA_VISIBLE_DEVICES_ENV
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.execution.worker_group.worker import Worker
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from prefect_elastic_train.core.events import Publish, StandbysParked
from prefect_elastic_train.core.settings import ScalingSettings
from prefect_elastic_train.worker.standby_process import (
    assigned_devices,
    memory_and_threads,
    process_state,
    set_assigned_devices,
    warm_up,
)

from .sizing import DEVICES
from .worker_queries import query_workers

logger = logging.getLogger(__name__)

#: Seconds after which the standbys of a worker group boot if it has not reported by then. Until it reports, its own
#: imports may need the processors.
_BOOT_AFTER_SECONDS = 30.0
_CHECK_SECONDS = 10.0  # between two checks of the standbys
_MAX_PAUSE_SECONDS = 3600.0  # longest time between two checks, which grows after losses
_STANDBY_QUERY_SECONDS = 1.0  # for answers of workers and standbys
_DEVICES_SECONDS = 30.0  # for the tasks that look up the devices of a placement group
_EXPECTED_BYTES = 3 * 2**28  # memory of a standby with torch for CUDA


@dataclass
class Standby:
    """A standby worker in the controller's list.

    Attributes:
        actor: Ray's actor.
        worker: The worker on the same node for which it was booted.
        visible_devices: ``CUDA_VISIBLE_DEVICES`` of its process, which cannot be changed later.
        pending: Ray's reference to its next :class:`ProcessState`, by which the controller notices its death.
        metadata: Ray Train's ActorMetadata of its process; None until it is warm.
    """

    actor: Any
    worker: Worker
    visible_devices: str
    pending: Any
    metadata: Any = None


def can_use_standbys(scaling: ScalingSettings, framework: str) -> bool:
    """Return True if standby workers can replace the workers of the run.

    On GPUs they can only with torch, whose workers see all GPUs of a node; on other accelerators they cannot.
    """
    if scaling.accelerator == "gpu":
        return framework == "torch" and ray_constants.env_bool(ENABLE_SHARE_CUDA_VISIBLE_DEVICES_ENV, True)
    return not {*DEVICES} & {*scaling.resources_per_worker, scaling.accelerator.upper()}


def kill_actors(actors: Iterable[Any]) -> None:
    """Kill the actors of standby workers, or of workers that were standby workers. Errors are ignored."""
    for actor in actors:
        with suppress(Exception):
            ray.kill(actor)


class Standbys(WorkerGroupCallback):  # type: ignore[misc]
    """Callback of Ray Train in the controller, which boots, keeps and kills the standby workers of a run.

    Args:
        framework: The framework of the run.
        mode: ``"off"``, ``"auto"`` (where a node has memory for them) or ``"on"``.
        publish: Function that publishes an event.
    """

    _size_bytes = 0  # memory of a standby worker

    def __init__(self, framework: str, mode: str, publish: Publish) -> None:
        self._framework = framework
        self._mode = mode
        self._publish = publish
        self._parked: list[Standby] = []

    def after_worker_group_training_start(self, worker_group: Any) -> None:
        self._group = worker_group
        self._pause_seconds = _CHECK_SECONDS
        self._has_reported = False
        self._published = (0, 0)  # numbers of standbys and workers
        self._next_check = time.monotonic() + _BOOT_AFTER_SECONDS

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Boot missing standby workers if a worker group trains and none of its nodes drains.

        Ray Train calls this after each poll; the standby workers are checked each `_CHECK_SECONDS`. After each loss of
        a standby worker, for example by lack of memory, the time between two checks doubles, up to an hour.
        """
        now = time.monotonic()
        statuses = worker_group_status.worker_statuses.values()
        if not self._has_reported and any(status.training_report for status in statuses):
            self._has_reported = True
            self._next_check = now
        if self._mode == "off" or worker_group_status.get_preemption_info() or now < self._next_check:
            return
        try:
            self._boot_missing()
        except Exception:
            logger.warning("Cannot boot standby workers; training goes on", exc_info=True)
            self._pause_seconds *= 2
        self._next_check = now + min(self._pause_seconds, _MAX_PAUSE_SECONDS)

    def release(self, keep: Collection[Any] = ()) -> None:
        """Kill all standby workers, except those with an actor in ``keep``. Afterwards none is registered."""
        kill_actors(standby.actor for standby in self._parked if standby.actor not in keep)
        self._parked = []

    def assign(self, group: PlacementGroup, indices: list[int], resources: dict[str, float]) -> dict[int, Worker]:
        """Return warm standby workers as workers of a placement group, by bundle index; kill all unused ones.

        A standby worker that is still booting would take processor time from the workers of the worker group.

        Args:
            group: The placement group of the next worker group.
            indices: Indices of the bundles that need a worker.
            resources: Resources of each worker.
        """
        self._collect()
        workers: dict[int, Worker] = {}
        try:
            warm = [standby for standby in self._parked if standby.metadata]
            if warm:
                workers = _assign(warm, group, indices, resources)
        except Exception:
            logger.warning("Cannot use standby workers; booting others", exc_info=True)
        self.release(keep=[worker.actor for worker in workers.values()])
        return workers

    def _boot_missing(self) -> None:
        """Boot a standby worker for each worker that has none, if the worker's node has memory for it."""
        self._collect()
        workers = self._group.get_workers()
        missing = [worker for worker in workers if worker not in [standby.worker for standby in self._parked]]
        visible = _visible_devices((worker.metadata.node_id, worker.metadata.accelerator_ids) for worker in workers)
        answers = query_workers(missing, memory_and_threads, _STANDBY_QUERY_SECONDS)
        for rank, (free_bytes, threads) in answers.items():
            node_id = missing[rank].metadata.node_id
            booting = sum(
                node_id == standby.worker.metadata.node_id for standby in self._parked if not standby.metadata
            )
            if self._mode == "on" or free_bytes >= (booting + 1) * _EXPECTED_BYTES:
                self._parked.append(self._boot(missing[rank], visible[node_id], threads))
        is_settled = len(answers) == len(missing) and all(standby.metadata for standby in self._parked)
        numbers = (len(self._parked), len(workers))
        if is_settled and self._published != numbers:
            self._published = numbers
            self._publish(StandbysParked(parked=len(self._parked), wanted=len(workers), size_bytes=self._size_bytes))

    def _collect(self) -> None:
        """Mark the standby workers that have become warm, and drop those that have died."""
        for standby in [*self._parked]:
            try:
                self._size_bytes, standby.metadata = ray.get(standby.pending, timeout=0)
                standby.pending = standby.actor.execute.remote(process_state)
            except GetTimeoutError:
                continue  # it boots
            except Exception as error:  # noqa: BLE001 - it is replaced
                logger.info("A standby worker died: %s", error)
                self._pause_seconds *= 2
                self._parked.remove(standby)
                kill_actors([standby.actor])

    def _boot(self, worker: Worker, visible_devices: str, threads: str) -> Standby:
        """Start a standby worker on the node of a worker, and return it without waiting until it is warm."""
        group = self._group
        affinity = NodeAffinitySchedulingStrategy(worker.metadata.node_id, soft=False)
        environment = group._get_worker_runtime_env(group._train_run_context.run_config.worker_runtime_env)
        remote_class = ray.remote(num_cpus=0, runtime_env=environment, scheduling_strategy=affinity)(group._worker_cls)
        actor = remote_class.remote()
        pending = actor.execute.remote(warm_up, visible_devices, self._framework, threads)
        return Standby(actor, worker, visible_devices, pending)


def _assign(
    warm: list[Standby], group: PlacementGroup, indices: list[int], resources: dict[str, float]
) -> dict[int, Worker]:
    """Return standby workers, with their devices, as workers of a placement group, by bundle index.

    A standby worker is used for a bundle on its node, if its process sees the GPUs that workers on the node have to
    see, and answers.
    """
    nodes = placement_group_table(group)["bundles_to_node_id"]
    gpus = resources.get("GPU")
    devices = _bundle_devices(group, indices, gpus) if gpus else {index: {} for index in indices}
    visible = _visible_devices((nodes[index], devices[index]) for index in indices)
    workers = {}
    for index in indices:
        location = (nodes[index], visible[nodes[index]])
        for standby in [standby for standby in warm if (standby.metadata.node_id, standby.visible_devices) == location]:
            warm.remove(standby)
            try:
                ray.get(
                    standby.actor.execute.remote(set_assigned_devices, devices[index]), timeout=_STANDBY_QUERY_SECONDS
                )
            except Exception as error:  # noqa: BLE001 - another worker is booted instead
                logger.info("A standby worker died: %s", error)
                continue
            metadata = replace(standby.metadata, accelerator_ids=standby.metadata.accelerator_ids | devices[index])
            workers[index] = Worker(standby.actor, metadata, resources, placement_group_bundle_index=index)
            break
    return workers


def _visible_devices(locations: Iterable[tuple[str, Mapping[str, list[Any]]]]) -> dict[str, str]:
    """Return ``CUDA_VISIBLE_DEVICES`` by node: with Ray Train, each worker sees the GPUs of all workers of its node."""
    gpus_by_node = defaultdict[str, set[str]](set)
    for node_id, devices in locations:
        gpus_by_node[node_id].update(map(str, devices.get("GPU", [])))
    return {node_id: ",".join(sorted(gpus)) for node_id, gpus in gpus_by_node.items()}


def _bundle_devices(group: PlacementGroup, indices: list[int], gpus: float) -> dict[int, dict[str, list[Any]]]:
    """Return the ids of the devices that Ray assigned to each bundle of a placement group, by bundle index.

    A task in each bundle looks them up.
    """
    task = ray.remote(num_cpus=0, num_gpus=gpus, max_retries=0)(assigned_devices)
    references = [
        task.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)).remote() for index in indices
    ]
    return dict(zip(indices, ray.get(references, timeout=_DEVICES_SECONDS), strict=True))
