"""Ray Train's trainers with our policies and callbacks, and a controller whose worker groups start where they can.

Uses ``ray.train.v2._internal``: ``fit()`` hands policies and callbacks to its controller through
``_initialize_and_run_controller``, and has no public parameter for either, nor for the controller's class.

And where a rank notices the end of another sooner than Ray that of its node, the next group is asked for on a node that
is gone, and Ray's worker group waits a minute for it; if the node goes before its worker is there, it waits for another
node without an end. It takes any slice whose host 0 is free, also one whose other hosts are dead or busy. This one
gives up when a node has gone meanwhile, names the slices, and reserves the head of each, as Ray does, so that others
who look for a slice pass it over. Ray's controller keeps what a lost group held until the next one starts; here it
gives that back before the next is decided.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any

from ray.exceptions import ActorUnschedulableError, RayActorError
from ray.train import WorkerGroupError
from ray.train.constants import JAX_DISTRIBUTED_SHUTDOWN_TIMEOUT_S, TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S
from ray.train.v2._internal.callbacks import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.controller import TrainController as RaysTrainController
from ray.train.v2._internal.execution.controller import controller as rays_controller
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.train.v2._internal.execution.worker_group import placement_group_handle as handles
from ray.train.v2.api import data_parallel_trainer
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.tpu import SlicePlacementGroup, get_tpu_version_from_type

from prefect_elastic_train.core.request import FORK_SERVER_VARIABLE, DriverSpec, Payload
from prefect_elastic_train.elastic import callbacks, loop_watch, standby
from prefect_elastic_train.elastic.checkpoints import RankedCheckpointManager, as_json_values, run_filesystem
from prefect_elastic_train.elastic.cluster import cluster_nodes, demand_of, run_config, scaling_config
from prefect_elastic_train.elastic.loop_callback import LoopCallback, NoDatasetsCallback, RayTrainWorker
from prefect_elastic_train.elastic.policy import RunFailurePolicy, RunScalingPolicy, requester_id
from prefect_elastic_train.elastic.sending import Receiving
from prefect_elastic_train.elastic.sizing import Demand, Slice, head_resource, slices_of
from prefect_elastic_train.loop.context import RunContext
from prefect_elastic_train.storage.store import RunStore

_RELEASE_SECONDS = 15.0  # for slices that the group before has just given back to become free
_HEAD_SECONDS = 10.0  # for the head of a slice that was free a moment ago
_LOOK_SECONDS = 0.5  # between two looks at the nodes
_POLL_SECONDS = 0.1  # between two polls for the cause of broken collectives
_ANSWER_SECONDS = 5.0  # for the ranks to say whether their loops train in a session
#: Seconds from a poll that has found a report to the next one; of so many workers at most, since each costs time.
_SHORTEST_INTERVAL = 0.01
_MANY = 32

#: Ray Train's trainers by framework.
TRAINERS = {
    "torch": "ray.train.torch:TorchTrainer",
    "jax": "ray.train.v2.jax:JaxTrainer",
    "none": "ray.train.v2.api.data_parallel_trainer:DataParallelTrainer",
}

logger = logging.getLogger(__name__)


class RunWorkerGroup(WorkerGroup):  # type: ignore[misc]
    """Starts on nodes that are there, and on slices that are whole and free, or not at all."""

    _worker_cls = RayTrainWorker

    def _poll_workers_and_collect_errors(self, timeout: float | None) -> list[Any]:
        """Poll the workers, and look at what they report before any callback handles it.

        While collectives have lost a peer and nobody has the cause yet, poll again, so that all who decide by the
        failures have the cause among them.
        """
        statuses: list[Any] = super()._poll_workers_and_collect_errors(timeout)
        began = time.monotonic()
        while loop_watch.cause_of(_failures(statuses), len(statuses), time.monotonic() - began).outcome is None:
            self._worker_health_check_timeout_s = loop_watch.SILENT_SECONDS  # of this group, which has failed
            time.sleep(_POLL_SECONDS)
            before = statuses
            statuses = super()._poll_workers_and_collect_errors(timeout)
            for earlier, status in zip(before, statuses, strict=True):
                status.training_report = earlier.training_report or status.training_report
        callbacks.current().look_at_reports(statuses)
        return statuses

    @staticmethod
    def _get_worker_runtime_env(custom_runtime_env: Any) -> Any:
        """Return none of Ray Train's own for processes that have it all from their node."""
        if FORK_SERVER_VARIABLE in os.environ:
            return custom_runtime_env
        return WorkerGroup._get_worker_runtime_env(custom_runtime_env)

    def _start(self) -> None:
        """Start the workers; a start that fails leaves nothing behind.

        A lost node is a failed start, since fewer workers may fit now. A worker that dies on a living node is a failure
        of the worker group, since the next one may die in the same way.
        """
        try:
            super()._start()
        except Exception as error:
            if self.has_started():  # Ray's own shuts down only what has not got as far as this
                callbacks.current().budget.end()
                try:
                    self._worker_group_state.shutdown()
                except Exception:
                    logger.warning("A worker group that did not start was not ended cleanly", exc_info=True)
                self._clear_state()
            cause = error.__cause__ or error  # Ray wraps a worker's error in one of its own
            if not isinstance(cause, RayActorError | ActorUnschedulableError):
                raise
            if _gone(callbacks.current().counted_on):
                raise WorkerGroupStartupFailedError("A node was lost while its workers started.") from error
            raise WorkerGroupError(
                "A worker died while its group started.",  # no rank has started
                dict.fromkeys(range(self._worker_group_context.num_workers), cause),
            ) from error

    def _create_workers(
        self,
        num_workers: int,
        placement_group: PlacementGroup,
        resources_per_worker: dict[str, float],
        placement_group_bundle_indices: list[int] | None = None,
        starting_world_rank: int = 0,
        world_size: int | None = None,
        replica_group_size: int | None = None,
    ) -> Any:
        """Take standbys where there are, boot the others, and rank them as Ray does."""
        callbacks.current().passed("placement")
        indices = placement_group_bundle_indices or list(range(num_workers))
        taken = standby.take(placement_group, indices, resources_per_worker)
        rest = [index for index in indices if index not in taken]
        try:
            with _given_up_without_nodes(placement_group):
                booted = super()._create_workers(len(rest), placement_group, resources_per_worker, rest) if rest else []
        except BaseException:
            standby.end(worker.actor for worker in taken.values())
            raise
        workers = sorted([*taken.values(), *booted], key=lambda worker: worker.placement_group_bundle_index)
        ranked = self._assign_worker_ranks(workers, starting_world_rank, world_size, replica_group_size)
        callbacks.current().passed("workers")
        return ranked

    def _create_placement_group(self, scaling_config: Any, worker_group_context: Any) -> handles.PlacementGroupHandle:
        standby.wait_for_booting()
        callbacks.current().passed("booting workers")
        demand = demand_of(scaling_config)
        if demand.shape is None:
            handle = super()._create_placement_group(scaling_config, worker_group_context)
        else:
            handle = _create_on_slices(demand, worker_group_context)
        handle.wait = _while_nodes_live(handle)
        return handle


class TrainController(RaysTrainController):  # type: ignore[misc]
    """Ray's controller with our worker groups, which gives up what a lost one held before it decides about the next.

    Ray moves the bundles of a lost node to another one, where the run would have to wait for itself. The name is that
    of Ray's own, by which its process and its lines in the log are known.
    """

    worker_group_cls = RunWorkerGroup
    _longest_interval = 0.0
    _health_check_interval_s: float

    def __init__(self, *arguments: Any, **more: Any) -> None:
        rays_controller.CheckpointManager = RankedCheckpointManager
        super().__init__(*arguments, **more)
        # A rank that hangs does not part from the others either.
        for name in (TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S, JAX_DISTRIBUTED_SHUTDOWN_TIMEOUT_S):
            os.environ.setdefault(name, "5")

    async def _poll_workers(self) -> Any:
        """Poll, and soon again after a report: loops wait for the poll that takes their report before the next one."""
        self._longest_interval = self._longest_interval or self._health_check_interval_s
        status = await super()._poll_workers()
        statuses = status.worker_statuses.values()
        has_reports = len(statuses) <= _MANY and any(one.training_report is not None for one in statuses)
        interval = _SHORTEST_INTERVAL if has_reports else 1.5 * self._health_check_interval_s
        self._health_check_interval_s = min(interval, self._longest_interval)
        return status

    def _relax_collectives_during_preemption(self, preemption_info: Any) -> None:
        """Let the surviving ranks commit without the others, unless they train in a session or do not answer."""
        if self._run_config.failure_config.relax_collectives_on_preemption:
            answers = loop_watch.ask(self.get_worker_group().get_workers(), loop_watch.has_session, _ANSWER_SECONDS)
            if answers and not any(answers.values()):
                super()._relax_collectives_during_preemption(preemption_info)

    def _make_and_handle_scaling_decision_for_non_running_worker_group(self, controller_state: Any) -> Any:
        if self.get_worker_group() is not None:
            try:
                self._shutdown_worker_group()
            except Exception:
                logger.warning("A lost worker group was not ended cleanly", exc_info=True)
                self._worker_group = None
        return super()._make_and_handle_scaling_decision_for_non_running_worker_group(controller_state)


def _failures(statuses: list[Any]) -> dict[int, Exception]:
    return {rank: status.error for rank, status in enumerate(statuses) if status.error is not None}


def _while_nodes_live(handle: handles.PlacementGroupHandle) -> Callable[[float], bool]:
    """Return how to wait for a placement group: only while all nodes are there that its size was decided from."""
    wait = handle.wait

    def wait_or_give_up(timeout_seconds: float = 30) -> bool:
        deadline = time.monotonic() + timeout_seconds
        while not wait(_LOOK_SECONDS):
            if time.monotonic() > deadline:
                return False
            if gone := _gone(callbacks.current().counted_on):
                handle.shutdown()
                raise WorkerGroupStartupFailedError(f"{len(gone)} node(s) went while workers were to be placed")
        return True

    return wait_or_give_up


@contextmanager
def _given_up_without_nodes(group: PlacementGroup) -> Iterator[None]:
    """Remove a placement group, and with it what waits for a place in it, if a node of it goes while workers boot."""
    nodes = frozenset(placement_group_table(group)["bundles_to_node_id"].values())
    are_there = threading.Event()

    def watch() -> None:
        while not are_there.wait(_LOOK_SECONDS):
            if _gone(nodes):
                remove_placement_group(group)
                return

    watching = threading.Thread(target=watch, name="watch nodes", daemon=True)
    watching.start()
    try:
        yield
    finally:
        are_there.set()
        watching.join()


def _gone(nodes: frozenset[str]) -> frozenset[str]:
    """Return which of these nodes are gone, or about to go."""
    try:
        return nodes - {node.id for node in cluster_nodes() if not node.draining}
    except Exception:
        logger.warning("The nodes cannot be seen; they are waited for", exc_info=True)
        return frozenset()


def _create_on_slices(demand: Demand, context: Any) -> handles.PlacementGroupHandle:
    """Reserve slices that are whole and free, by their names."""
    shape = demand.shape
    assert shape is not None
    chosen = _free_slices(demand, context.num_slices)
    heads = list[PlacementGroup]()
    if len(chosen) < context.num_slices:
        raise WorkerGroupStartupTimeoutError(num_workers=context.num_workers)
    selectors: list[dict[str, str]] = []
    try:
        for found in chosen:
            # A single host is no slice by name, and one of a larger slice would do for Ray.
            selector = {"ray.io/node-id": found.nodes[0].id}
            if len(found.nodes) > 1:
                selector = {"ray.io/tpu-slice-name": found.name}
                # Ray's own function to reserve a head asks a task on its host for the slice's name, without a bound.
                heads.append(
                    placement_group(
                        [{head_resource(shape.pod_type): 1}],
                        bundle_label_selector=[selector | {"ray.io/tpu-worker-id": "0"}],
                    )
                )
                if not heads[-1].wait(_HEAD_SECONDS):
                    raise WorkerGroupStartupTimeoutError(num_workers=context.num_workers)
            selectors += [selector] * shape.workers
        group = SlicePlacementGroup(
            topology=shape.topology,
            accelerator_version=get_tpu_version_from_type(shape.accelerator_type),
            num_slices=len(chosen),
            resources_per_bundle=context.resources_per_worker,
            strategy=context.placement_strategy,
            head_reservation_timeout_s=_HEAD_SECONDS,
            bundle_label_selector=selectors,
        )
    except Exception:
        for reserved in heads:
            remove_placement_group(reserved)
        raise
    group._head_pgs += heads  # which it gives back with the rest
    return handles.SlicePlacementGroupHandle(group)


def _free_slices(demand: Demand, slices: int) -> list[Slice]:
    """Return so many free slices, or fewer if they do not become free."""
    deadline = time.monotonic() + _RELEASE_SECONDS
    while True:
        free = [found for found in slices_of(cluster_nodes(), demand) if not found.problem]
        if len(free) >= slices or time.monotonic() > deadline:
            return free[:slices]
        time.sleep(_LOOK_SECONDS)


class _NoVariables(dict[str, str]):
    """The environment of a controller that has it from its node; Ray Train would add a variable of its own."""

    def setdefault(self, name: str, value: str = "", /) -> str:
        return value


class _ElasticTrainerMixin:
    """Puts the policies and callbacks of a run into the controller of a Ray Train trainer."""

    _policies: dict[str, Any]
    _callbacks: list[Any]
    datasets: Any

    def _initialize_and_run_controller(self, **controller_arguments: Any) -> Any:
        data_parallel_trainer.TrainController = TrainController
        if FORK_SERVER_VARIABLE in os.environ:
            data_parallel_trainer.get_env_vars_to_propagate = _NoVariables
        return super()._initialize_and_run_controller(**controller_arguments | self._policies)  # type: ignore[misc]

    def _get_train_func(self) -> Callable[[], None]:
        """Return the loop without its return value, which is not used, and which Ray Train may be unable to send."""
        loop = super()._get_train_func()  # type: ignore[misc]

        def train() -> None:
            value = loop()
            if isinstance(value, Coroutine | Generator):
                raise TypeError(
                    f"the train loop returned a {type(value).__name__}, which has not run; run it in the loop"
                )

        return train

    def _create_default_callbacks(self) -> list[Any]:
        # Placement groups go with the job of their driver; the cleaner may ask another cluster on the same host whether
        # the controller lives, and remove a living group. Without datasets, no start need wait for their manager.
        unwanted = [PlacementGroupCleanerCallback]
        ours = self._callbacks
        if not self.datasets:
            unwanted.append(DatasetsCallback)
            ours = [*ours, NoDatasetsCallback()]
        rays = super()._create_default_callbacks()  # type: ignore[misc]
        return [callback for callback in rays if not isinstance(callback, tuple(unwanted))] + ours


def make_trainer(
    spec: DriverSpec,
    payload: Payload,
    datasets: dict[str, Any],
    store: RunStore,
    context: RunContext,
    receiving: Receiving,
) -> DataParallelTrainer:
    """Return the trainer of the framework that a run is for, with our parts in its controller."""
    framework = spec.request.framework
    scaling = spec.scaling
    if payload.validation_config is not None:
        validate = payload.validation_config.fn
        payload.validation_config.fn = lambda *given, **more: as_json_values(validate(*given, **more))
    arguments: dict[str, Any] = {
        "train_loop_per_worker": payload.train_loop,
        "train_loop_config": payload.train_loop_config,
        "scaling_config": scaling_config(scaling),
        "run_config": run_config(spec, store.path.rpartition("/")[0], run_filesystem(store, context.attempt)),
        "datasets": datasets,
        "dataset_config": payload.dataset_config,
        "validation_config": payload.validation_config,
    }
    if framework == "jax":
        from prefect_elastic_train.elastic.jax_backend import run_jax_config

        arguments["jax_config"] = run_jax_config(payload.jax_config, arguments["scaling_config"])
    else:
        arguments["torch_config" if framework == "torch" else "backend_config"] = payload.torch_config
    base = resolve_name(TRAINERS[framework])
    callback = callbacks.RunCallback(receiving, store, context.attempt, spec.failures, spec.checkpoints.score_attribute)
    ours: list[Any] = [callback, LoopCallback(context)]
    if scaling.standby != "off" and not spec.is_forked and standby.may_replace(scaling, framework):
        ours.append(standby.Standbys(framework, in_any_case=scaling.standby == "on"))
    trainer: Any = type(f"Elastic{base.__name__}", (_ElasticTrainerMixin, base), {})(**arguments)
    requester = "" if spec.is_alone else requester_id(store)
    trainer._callbacks = ours
    trainer._policies = {
        "scaling_policy": RunScalingPolicy(arguments["scaling_config"], requester, scaling),
        "failure_policy": RunFailurePolicy(arguments["run_config"].failure_config),
    }
    return trainer
