"""Ray's worker group, which starts on nodes that live, uses standby workers, and fails fast.

When peers notice a dead rank before Ray notices the dead node, Ray places the next group on that node and blocks for up
to 60 s, or without a limit if the node is lost before its worker has booted. This worker group gives up as soon as a
node is lost.

Uses ``ray.train.v2._internal``: Ray has no public way to replace the worker group.
"""

import logging
import os
import threading
import time
from dataclasses import replace
from typing import Any

from ray.exceptions import ActorUnschedulableError, RayActorError
from ray.train import WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.util.placement_group import PlacementGroup, placement_group_table

from prefect_elastic_train.core.request import FORK_SERVER_VARIABLE
from prefect_elastic_train.core.threads import start_thread
from prefect_elastic_train.worker.train_worker import RayTrainWorker

from . import failures, standby
from .callbacks import RunCallback
from .controller_state import ControllerState
from .nodes import cluster_nodes, demand_of

_NODES_SECONDS = 0.5  # between two checks of the nodes
_POLL_SECONDS = 0.1  # between two polls for the cause of broken collectives

logger = logging.getLogger(__name__)


class RunWorkerGroup(WorkerGroup):  # type: ignore[misc]
    """Ray Train's worker group, which uses standby workers and gives up its start as soon as a node is lost.

    A controller makes a subclass with its own state and callback.
    """

    state: ControllerState
    callback: RunCallback
    _handle: Any = None  # of the placement group
    _node_ids: set[str]  # of the nodes on which it will be or is placed
    _worker_cls = RayTrainWorker

    def _poll_workers_and_collect_errors(self, timeout: float | None) -> list[Any]:
        """Poll the workers, check their reports before Ray's callbacks handle them, and return the status of each rank.

        While only collectives have failed and the cause is not known yet, poll again, so that all decisions about the
        failure include its cause.

        Raises:
            WorkerGroupError: The loop hangs or has ignored its checkpoint.
        """
        statuses: list[Any] = super()._poll_workers_and_collect_errors(timeout)
        began = time.monotonic()
        while failures.must_await_cause([status.error for status in statuses], time.monotonic() - began):
            self._worker_health_check_timeout_s = failures.CAUSE_POLL_SECONDS  # only in this group, which has failed
            time.sleep(_POLL_SECONDS)
            before = statuses
            statuses = super()._poll_workers_and_collect_errors(timeout)
            for earlier, status in zip(before, statuses, strict=True):
                status.training_report = earlier.training_report or status.training_report
        self.callback.check_reports(statuses)
        return statuses

    @staticmethod
    def _get_worker_runtime_env(custom_runtime_env: Any) -> Any:
        """Return the workers' runtime environment; without Ray Train's variables if the node passes them on."""
        if FORK_SERVER_VARIABLE in os.environ:
            return custom_runtime_env
        return WorkerGroup._get_worker_runtime_env(custom_runtime_env)

    def _start(self) -> None:
        """Start the workers of this worker group. If that fails, shut down all that was started.

        Raises:
            WorkerGroupStartupFailedError: A node was lost. A smaller worker group may start now.
            WorkerGroupError: A worker died on a living node. The next worker group may die in the same way.
        """
        is_started = threading.Event()
        watcher = start_thread(self._watch_nodes, is_started)
        try:
            super()._start()
        except Exception as error:
            if self.has_started():  # Ray cleans up after earlier failures only
                self.state.budget.end_group()
                try:
                    self._worker_group_state.shutdown()
                except Exception:
                    logger.warning("Cannot shut down a worker group that did not start", exc_info=True)
                self._clear_state()
            if _lost_or_draining_nodes(self.state.assumed_nodes):
                raise WorkerGroupStartupFailedError("A node was lost while workers started.") from error
            cause = error.__cause__ or error  # Ray wraps the error of a worker
            if not isinstance(cause, RayActorError | ActorUnschedulableError):
                raise
            raise WorkerGroupError(
                "A worker died while its group started.",  # the ranks are not known yet
                dict.fromkeys(range(self._worker_group_context.num_workers), cause),
            ) from error
        finally:
            is_started.set()
            watcher.join()

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
        """Return ranked workers for a placement group: warm standby workers where possible, else newly booted ones."""
        self.state.mark_phase("placement")
        indices = placement_group_bundle_indices or list(range(num_workers))
        warm = self.state.standbys.assign(placement_group, indices, resources_per_worker)
        rest = [index for index in indices if index not in warm]
        self._node_ids = {*placement_group_table(placement_group)["bundles_to_node_id"].values()}
        try:
            booted = super()._create_workers(len(rest), placement_group, resources_per_worker, rest) if rest else []
        except BaseException:
            standby.kill_actors(worker.actor for worker in warm.values())
            raise
        workers = sorted([*warm.values(), *booted], key=lambda worker: worker.placement_group_bundle_index)
        ranked = self._assign_worker_ranks(workers, starting_world_rank, world_size, replica_group_size)
        self.state.mark_phase("workers")
        return ranked

    def _create_placement_group(self, scaling_config: Any, worker_group_context: Any) -> Any:
        demand = demand_of(scaling_config)
        left_out = self.state.left_out
        if demand.shape is None:
            if left_out:
                others = {"ray.io/node-id": f"!in({','.join(left_out)})"}
                selectors = worker_group_context.label_selector or [{}] * worker_group_context.num_workers
                selectors = [others | selector for selector in selectors]
                worker_group_context = replace(worker_group_context, label_selector=selectors)
            handle = super()._create_placement_group(scaling_config, worker_group_context)
        else:
            from .tpu_placement import place_on_slices

            handle = place_on_slices(demand, worker_group_context, left_out)
        self._node_ids = self.state.assumed_nodes
        self._handle = handle
        return handle

    def _watch_nodes(self, is_started: threading.Event) -> None:
        """Remove the placement group once one of its nodes is lost, so that waits for it and for its workers end."""
        while not is_started.wait(_NODES_SECONDS):
            if self._handle and _lost_or_draining_nodes(self._node_ids):
                self._handle.shutdown()
                return


def _lost_or_draining_nodes(node_ids: set[str]) -> set[str]:
    """Return the ids in `node_ids` whose nodes are dead or draining; none if the cluster's nodes cannot be listed."""
    try:
        return node_ids - {node.id for node in cluster_nodes()}
    except Exception:
        logger.warning("Cannot list the nodes of the cluster; waiting for them", exc_info=True)
        return set()
