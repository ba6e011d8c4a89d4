"""Ray Train's controller with our policies, callbacks and worker groups.

Uses ``ray.train.v2._internal``: Ray has no public way to replace the controller.
"""

import logging
import os
from typing import Any

from ray.train.constants import JAX_DISTRIBUTED_SHUTDOWN_TIMEOUT_S, TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S
from ray.train.v2._internal.execution.controller import controller as rays_controller

from prefect_elastic_train.worker.loop_inspection import has_session

from .callbacks import RunCallback
from .checkpoint_manager import RankedCheckpointManager
from .controller_state import ControllerSettings, ControllerState
from .failure_policy import RunFailurePolicy
from .scaling_policy import RunScalingPolicy
from .worker_group import RunWorkerGroup
from .worker_queries import query_workers

#: Seconds from a poll that found a report to the next one; with at most so many workers, since each poll costs time.
_SHORTEST_INTERVAL = 0.01
_MAX_FAST_POLLED = 32

logger = logging.getLogger(__name__)


def limit_process_group_shutdown() -> None:
    """Set the time limit for the shutdown of a worker group's process group to 5 s, unless the user has set it.

    A hung rank does not take part in the shutdown, and the surviving ranks would wait for it.
    """
    for name in (TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S, JAX_DISTRIBUTED_SHUTDOWN_TIMEOUT_S):
        os.environ.setdefault(name, "5")


class TrainController(rays_controller.TrainController):  # type: ignore[misc]
    """Ray Train's controller with this package's scaling policy, failure policy, callbacks and worker groups.

    It shuts down a lost worker group before it decides about the next one: Ray moves the bundles of a lost node to
    another node, where they would take the resources that the next worker group waits for. It has the name of Ray's
    class, which appears in process titles and logs.
    """

    _health_check_interval_s: float

    def __init__(
        self, settings: ControllerSettings, train_run_context: Any, callbacks: list[Any], **others: Any
    ) -> None:
        rays_controller.CheckpointManager = RankedCheckpointManager
        limit_process_group_shutdown()
        run_config = train_run_context.run_config
        state = ControllerState(settings)
        run_config.storage_context.storage_filesystem.handler.commits = state.commits
        callback = RunCallback(state)
        self.worker_group_cls = type("RunWorkerGroup", (RunWorkerGroup,), {"state": state, "callback": callback})
        others["scaling_policy"] = RunScalingPolicy(train_run_context.scaling_config, state)
        others["failure_policy"] = RunFailurePolicy(run_config.failure_config, state)
        super().__init__(
            train_run_context=train_run_context,
            callbacks=[*callbacks, callback, callback.hooks, state.standbys, state.keepers],
            **others,
        )
        self._longest_interval = self._health_check_interval_s

    async def _poll_workers(self) -> Any:
        """Poll the workers, and return the worker group's status. After a poll with a report, the next one comes soon.

        A train loop cannot make its next report before a poll has taken the previous one.
        """
        status = await super()._poll_workers()
        statuses = status.worker_statuses.values()
        has_reports = len(statuses) <= _MAX_FAST_POLLED and any(worker.training_report for worker in statuses)
        interval = _SHORTEST_INTERVAL if has_reports else 1.5 * self._health_check_interval_s
        self._health_check_interval_s = min(interval, self._longest_interval)
        return status

    def _relax_collectives_during_preemption(self, preemption_info: Any) -> None:
        """Let the ranks that a drain does not affect commit a checkpoint without the ranks of the draining node.

        Do nothing if the user has not configured this, if a loop trains in a session, or if no rank answers.
        """
        if self._run_config.failure_config.relax_collectives_on_preemption:
            sessions = query_workers(self.get_worker_group().get_workers(), has_session)
            if sessions and not any(sessions.values()):
                super()._relax_collectives_during_preemption(preemption_info)

    def _make_and_handle_scaling_decision_for_non_running_worker_group(self, controller_state: Any) -> Any:
        if self.get_worker_group() is not None:
            try:
                self._shutdown_worker_group()
            except Exception:
                logger.warning("Cannot shut down a lost worker group", exc_info=True)
                self._worker_group = None
        return super()._make_and_handle_scaling_decision_for_non_running_worker_group(controller_state)
