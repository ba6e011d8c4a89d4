"""The controller's callback: turns Ray Train's callbacks into events, and deletes interrupted uploads.

An exception in a callback ends the training. So this callback logs and counts its own exceptions and raises only those
that end the attempt or fail the worker group: a lost fence, a loop that hangs, an ignored checkpoint.

Uses ``ray.train.v2._internal``: the public ``UserCallback`` gets neither states nor sizes nor decisions, and runs
after Ray has written its snapshot.
"""

import functools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ray.train import WorkerGroupError
from ray.train.v2._internal.execution.callback import ControllerCallback, ReportCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.failure_handling import FailureDecision

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.checkpoint_names import loop_name
from prefect_elastic_train.core.ray_output import tag_own_records
from prefect_elastic_train.core.size_limits import bounded_metrics
from prefect_elastic_train.core.threads import start_thread
from prefect_elastic_train.runs import commits
from prefect_elastic_train.runs.run_directory import SEED_COMMIT
from prefect_elastic_train.storage.retries import Waits, collect_waits, waiting_since
from prefect_elastic_train.worker.loop_inspection import collect_commit_report
from prefect_elastic_train.worker.worker_callbacks import WorkerHooks

from .controller_state import ControllerState
from .failures import causes_of, is_of_node, permanent_reason
from .worker_queries import query_workers

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 2.0  # to send the last events
_MAX_LOGGED_ERRORS = 10  # exceptions of this callback that are logged with their traceback
_MAX_RANKS = 32  # whose use of the hardware is published
_REPORT_QUERY_SECONDS = 1.0  # for the ranks' reports after a commit; the controller waits meanwhile

#: Seconds without a turn of the control loop after which the state is logged, and after which the controller counts as
#: hung, unless validations may still run. Ray gives up a runtime environment after 600 s, but restarts a process that
#: does not boot without a limit.
_SLOW_SECONDS = 60.0
_HUNG_SECONDS = 900.0
_SLOW_STATES = {
    "SCHEDULING": "starting workers (if they do not boot, raylet.out and worker-* of the nodes' logs show the reason)",
    "SHUTTING_DOWN": "shutting down (validations may still run, which timeout_s of their task configuration limits)",
}


def _suppress_errors(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a callback method: log and count its exceptions instead of raising them.

    Two exceptions are raised: FencedOffError, which ends the attempt, and WorkerGroupError, which fails the worker
    group.
    """

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except (commits.FencedOffError, WorkerGroupError):
            raise
        except Exception:
            self.errors += 1
            if self.errors <= _MAX_LOGGED_ERRORS:
                logger.warning("%s failed; training goes on", method.__name__, exc_info=True)
            return None

    return wrapper


class RunCallback(ControllerCallback, WorkerGroupCallback, ReportCallback):  # type: ignore[misc]
    """Callback of Ray Train in the controller, which publishes the progress of an attempt to the driver.

    Attributes:
        errors: Number of exceptions that this callback has suppressed.
        hooks: The callback of Ray Train in the workers.
    """

    errors = 0
    _polled_commit_count = 0  # number of commits at the last poll
    _reports_since_checkpoint = 0
    _state_name = "INITIALIZING"

    def __init__(self, state: ControllerState) -> None:
        context = state.settings.context
        self.hooks = WorkerHooks(context)
        self._state = state
        self._store = state.settings.store
        self._attempt = context.attempt
        self._workers: list[Any] = []  # workers of the worker group that trains
        self._turned_at = time.monotonic()  # time of the control loop's last turn

    @_suppress_errors
    def after_controller_start(self, train_run_context: Any) -> None:
        tag_own_records()
        start_thread(self._send_heartbeats)

    @_suppress_errors
    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        """Publish the controller's state if it has changed. Ray Train calls this at each poll, also if it has not."""
        self._turned_at = time.monotonic()
        name = current_state._state_type.state_name
        if name != self._state_name:
            self._state_name = name
            self._state.is_draining = name == "PREEMPTING"
            self._state.publish(ev.StateChanged(state=name))

    @_suppress_errors
    def before_controller_execute_resize_decision(self, resize_decision: Any) -> None:
        """Publish the resize of a healthy worker group. If no worker group runs, publish nothing."""
        if self._workers:
            self._state.begin_startup()
            self._state.publish(
                ev.WorkerGroupResized(
                    old_size=len(self._workers),
                    new_size=resize_decision.num_workers,
                    reason=resize_decision.reason,
                    waited_seconds=resize_decision.waited_seconds,
                    reports_lost=0 if resize_decision.reason == "memory" else self._reports_since_checkpoint,
                )
            )

    @_suppress_errors
    def before_controller_execute_failure_decision(self, failure_decision: FailureDecision) -> None:
        """Publish the failure or the preemption of a worker group.

        Raises:
            FencedOffError: Another attempt has taken over the run, which may have made the worker group fail.
        """
        with suppress(OSError):
            commits.check_fence(self._store, self._attempt)
        state = self._state
        failures = state.failures
        state.failures = {}
        if not failures and not state.is_draining:
            return
        state.group_failures += 1
        state.begin_startup()
        event_type = ev.WorkersPreempted if state.is_preempted else ev.WorkerFailed
        state.publish(
            event_type(
                causes=causes_of(failures),
                retried=failure_decision is FailureDecision.RETRY,
                gives_up=permanent_reason(failures.values()) or "the budget is exhausted",
                reports_lost=0 if state.keepers.are_used else self._reports_since_checkpoint,
                in_memory=state.keepers.are_used,
                left=state.failures_left,
            )
        )
        nodes = {
            self._workers[rank].metadata.node_id
            for rank, error in failures.items()
            if self._workers and is_of_node(error)
        }
        # On several nodes, the one that fails first makes the others fail.
        if len(nodes) == 1 and not state.is_preempted:
            state.strikes.add(dict.fromkeys(nodes, "workers crashed, hung or had wrong results"))

    @_suppress_errors
    def before_worker_group_start(self, worker_group_context: Any) -> None:
        """Choose the recovery point that the worker group restores, and delete what interrupted saves have left.

        These are checkpoint files and unfinished uploads. No worker runs at this time.

        Raises:
            FencedOffError: Another attempt has taken over the run.
        """
        state = self._state
        state.mark_phase("decision")
        self.hooks.begin_group(state.settings.context.failures + state.group_failures, state.skipped_steps)
        state.keepers.restored_point = None
        commits.check_fence(self._store, self._attempt)  # states of a later attempt must not be sealed
        self.hooks.restored_states = state.keepers.newest_states(state.commits.newest or state.commits.newest_commit())
        removed = commits.remove_leftovers(self._store, self._attempt)
        commits.check_fence(self._store, self._attempt)  # nor its uploads aborted
        self._store.abort_uploads()
        if removed:
            logger.warning("Removed checkpoints that no commit needs: %s", ", ".join(map(loop_name, removed)))
        state.mark_phase("cleanup")

    @_suppress_errors
    def after_worker_group_start(self, worker_group: Any) -> None:
        state = self._state
        self._workers = worker_group.get_workers()
        self.hooks.previous = [(worker.metadata.node_id, worker.metadata.pid) for worker in self._workers]
        self._reports_since_checkpoint = 0
        state.commit_count = 0
        state.budget.begin_group()
        newest = state.commits.newest
        checkpoint = newest.checkpoint if newest else ""
        # The counters of another run, from which this one was started, are not comparable.
        metrics = newest.latest["metrics"] if newest and newest.id != SEED_COMMIT else {}
        restored = self.hooks.restored_states
        step = restored[0][0].header.step if restored else 0
        redone = max(0, state.loops.step - step) if restored else 0
        state.loops.begin_group(self._workers, "" if restored else loop_name(checkpoint), metrics)
        ranks = {
            f"{worker.metadata.node_ip}:{worker.metadata.pid}": worker.distributed_context.world_rank
            for worker in self._workers
        }
        state.mark_phase("process group")
        state.publish(
            ev.WorkerGroupStarted(
                world_size=len(ranks),
                checkpoint=checkpoint,
                restored_step=step,
                redone_steps=redone,
                ranks=ranks,
                parts=state.phases,
            )
        )

    @_suppress_errors
    def check_reports(self, statuses: Sequence[Any]) -> None:
        """Check the status of each rank before Ray Train handles its report. The worker group calls this at each poll.

        Raises:
            WorkerGroupError: The worker group has to fail, since its loop hangs or has ignored its checkpoint.
        """
        self._state.loops.check(statuses)
        if self._state.loops.ignored:  # its training repeats earlier work
            self._state.budget.end_group()

    @_suppress_errors
    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Store the errors of the ranks for a failure decision that follows the poll.

        If a node of the worker group is draining and a checkpoint was committed since the last poll, restart the worker
        group at once, by moving the drain's deadline into the past. The work is committed, and each further step until
        the deadline would be done again. Ray waits for the deadline, and uses the earliest one that a worker was
        notified of.
        """
        state = self._state
        # The errors of the statuses have tracebacks. Those in Ray's exception have lost them.
        state.failures = {
            rank: status.error for rank, status in worker_group_status.worker_statuses.items() if status.error
        }
        preemption = worker_group_status.get_preemption_info()
        if preemption and state.commit_count > self._polled_commit_count:
            expired = type(preemption)(deadline_ms=1, preempted_node_to_ranks=preemption.preempted_node_to_ranks)
            for worker in self._workers:
                worker.actor.mark_preempt.remote(expired)
        self._polled_commit_count = state.commit_count

    @_suppress_errors
    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        self._workers = []
        self._state.budget.end_group()

    @_suppress_errors
    def after_worker_group_shutdown(self, worker_group_context: Any) -> None:
        self._state.mark_phase("shutdown")

    @_suppress_errors
    def after_report(self, training_report: Any, metrics: list[dict[str, Any]]) -> None:
        """Publish the metrics of rank 0 from a report. If the report has a checkpoint, publish its commit.

        Ray has written its snapshot, and so the commit, before it calls this.
        """
        state = self._state
        newest = state.commits.newest
        world_size = len(self._workers)
        rank_zero = bounded_metrics(metrics[0], state.settings.context.score_attribute)
        if training_report.checkpoint is None or newest is None:
            self._reports_since_checkpoint += 1
            state.publish(ev.Reported(metrics=rank_zero, world_size=world_size))
            return
        state.commit_count += 1
        self._reports_since_checkpoint = 0
        state.budget.commit()
        if state.commit_count == 1:
            state.keepers.free_before(self._attempt, self.hooks.group)
        state.publish(
            ev.CheckpointCommitted(
                checkpoint=newest.checkpoint,
                size_bytes=sum(newest.manifest.get(newest.checkpoint, {}).values()),
                metrics=rank_zero,
                world_size=world_size,
            )
        )
        step = rank_zero.get("step", 0)
        uri = f"{state.settings.context.run_uri}/{newest.checkpoint}"
        reports = query_workers(self._workers, collect_commit_report, _REPORT_QUERY_SECONDS, step, uri)
        waits = (report.waits for report in reports.values())
        self._publish_waits("ranks", max(waits, key=lambda waited: waited.seconds, default=Waits()))
        stalled = round(max((report.stalled for report in reports.values()), default=0.0), 2)
        if stalled:
            state.publish(ev.CheckpointStalled(seconds=stalled))
        if 0 in reports and reports[0].save_plan:
            state.publish(ev.SavesPlanned(plan=reports[0].save_plan))
        usage = sorted(
            ((rank, report.usage) for rank, report in reports.items()), key=lambda each: each[1].memory_bytes
        )
        if usage:
            state.publish(ev.RanksMeasured(usage=dict(usage[-_MAX_RANKS:])))

    @_suppress_errors
    def after_controller_finish(self, result: Any) -> None:
        self.before_controller_abort()

    @_suppress_errors
    def before_controller_abort(self) -> None:
        """Kill the standby workers, and send the last events. Called at both kinds of the controller's end."""
        self._state.standbys.release()
        self._publish_waits("controller", collect_waits())
        self._state.sender.close(_CLOSE_SECONDS)

    def _publish_waits(self, who: str, waits: Waits) -> None:
        if waits.tries:
            self._state.publish(
                ev.StorageWaited(who=who, seconds=round(waits.seconds, 3), tries=waits.tries, last=waits.last)
            )

    def _send_heartbeats(self) -> None:
        while not self._state.sender.closed.wait(ev.ALIVE_SECONDS):
            now = time.monotonic()
            doing = self._state_name
            since = self._turned_at
            if waiting := waiting_since():
                doing = "waiting for the storage"
                since = waiting
            elif now - since > _SLOW_SECONDS:
                doing = _SLOW_STATES.get(doing, doing.lower())
                if now - since > _HUNG_SECONDS and self._state_name != "SHUTTING_DOWN":
                    continue  # without heartbeats the driver is replaced
            else:
                self._publish_waits("controller", collect_waits())
            self._state.publish(ev.ControllerAlive(doing=doing, seconds=now - since))
