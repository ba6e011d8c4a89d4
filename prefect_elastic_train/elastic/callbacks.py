"""The controller's callback: the one place where what Ray Train tells becomes events, and tidying up before a start.

An exception in a callback ends the training, so none leaves this module, bar those that mean just that: the attempt
was fenced off, the loop hangs or ignores its checkpoint. Any other is counted, logged and passed over.

Uses ``ray.train.v2._internal``, since the public ``UserCallback`` sees neither states nor sizes nor decisions, and runs
after Ray has written its snapshot.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ray.train import WorkerGroupError
from ray.train.v2._internal.execution.callback import ControllerCallback, ReportCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2._internal.execution.scaling_policy import ResizeDecision
from ray.train.v2._internal.execution.worker_group.poll import _is_preempted_actor

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.bounds import bounded_metrics, plain_metrics
from prefect_elastic_train.core.checkpoint_names import loop_name
from prefect_elastic_train.core.events import ALIVE_SECONDS
from prefect_elastic_train.core.rank_errors import distinct
from prefect_elastic_train.core.ray_output import mark_told
from prefect_elastic_train.core.settings import FailureSettings, ScalingSettings
from prefect_elastic_train.elastic.failures import why_given_up
from prefect_elastic_train.elastic.loop_state import take_waits_and_stall
from prefect_elastic_train.elastic.loop_watch import LoopWatch, answers_of, ask, have_answered
from prefect_elastic_train.elastic.sending import EventSender, Receiving
from prefect_elastic_train.elastic.translate import resources_per_worker
from prefect_elastic_train.runs.commits import check_fence, newest_commit
from prefect_elastic_train.runs.model import SEED_COMMIT
from prefect_elastic_train.runs.resume import remove_interrupted_uploads
from prefect_elastic_train.runs.snapshots import latest_checkpoint
from prefect_elastic_train.storage.retries import Waits, take_waits, waiting_since
from prefect_elastic_train.storage.store import RunStore

logger = logging.getLogger(__name__)

#: Exceptions of our own that are told of, each with its traceback.
_TOLD_ERRORS = 10
#: Standing still for checkpoints that is told of.
_TOLD_STALL_SECONDS = 0.01
#: How long the last answers of a worker group that ends are waited for.
_LAST_SECONDS = 1.0

_Method = TypeVar("_Method", bound=Callable[..., Any])

#: The callback of this controller process. Policy and callbacks are pickled one by one, so they meet here.
_current: RunCallback | None = None


def current() -> RunCallback | None:
    """Return the callback of this controller process, for the policies."""
    return _current


def _never_raises(method: _Method) -> _Method:
    """Count and log what a callback raises, and go on."""

    @functools.wraps(method)
    def wrapper(self: RunCallback, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception:
            self.errors += 1
            if self.errors <= _TOLD_ERRORS:
                logger.warning("%s failed; training goes on", method.__name__, exc_info=True)
            return None

    return wrapper  # type: ignore[return-value]


class RunCallback(ControllerCallback, WorkerGroupCallback, ReportCallback):  # type: ignore[misc]
    """Reports the controller's life to the driver.

    Args:
        receiving: Where the driver listens.
        store: The run directory.
        attempt: The attempt that holds the fence.
        scaling: What the run asks for.
        failures: What ends the training, or a drain.
        score_attribute: Metric that checkpoints are ranked by; empty for none.

    Attributes:
        errors: Exceptions that this callback has passed over.
        groups_started: How many worker groups have started.
        renew_reservation: Of the policy, which Ray does not ask during a drain; None until it has been asked once.
        has_checkpoint: Whether a restart now would begin from a checkpoint.
    """

    def __init__(
        self,
        receiving: Receiving,
        store: RunStore,
        attempt: int,
        scaling: ScalingSettings,
        failures: FailureSettings | None = None,
        score_attribute: str = "",
    ) -> None:
        failures = failures or FailureSettings()
        self._receiving = receiving
        self._store = store
        self._attempt = attempt
        self._min_workers = scaling.min_workers
        self._resources_per_worker = resources_per_worker(scaling)
        self._preemption_grace_seconds = failures.preemption_grace_seconds
        self._score_attribute = score_attribute
        self._worker_group: Any = None
        self._loops = LoopWatch(
            failures.ignored_checkpoint == "fail", self._send, hangs_after_seconds=failures.stall_timeout_seconds
        )
        #: Workers that have been asked for what they waited for, and have not all answered.
        self._asked: list[Any] = []
        self._commits_of_turn = 0
        self._last_commit_at = 0.0
        self.groups_started = 0
        self.renew_reservation: Callable[[], None] | None = None
        self._sender: EventSender | None = None
        self._state = "INITIALIZING"
        self._state_since = time.time()
        self._world_size = 0
        self._last_errors: dict[int, Exception] = {}
        self._tracebacks: dict[int, str] = {}
        self._reports_since_checkpoint = 0
        self._checkpoint = ""
        #: How many workers have reported the newest checkpoint, by its name.
        self._saved_by: dict[str, int] = {}
        self._stalled = 0.0
        # Made in the controller: a lock cannot be pickled on its way there.
        self._stopped: threading.Event | None = None
        self.errors = 0

    @property
    def has_checkpoint(self) -> bool:
        """Whether a restart now would begin from a checkpoint."""
        return bool(self._checkpoint)

    @property
    def is_draining(self) -> bool:
        """Whether a node of the group is about to go, and the group still trains."""
        return self._state == "PREEMPTING"

    @_never_raises
    def release_group(self) -> int:
        """End a group that has failed, with all that it holds, and return the number of its workers; 0 without one."""
        group, self._worker_group = self._worker_group, None
        if group is None:
            return 0
        workers = len(group.get_workers())
        group.shutdown()
        return workers

    def take_commit(self) -> bool:
        """Return whether a checkpoint was committed since the last poll began; the policy asks once a turn."""
        committed, self._commits_of_turn = self._commits_of_turn > 0, 0
        return committed

    @_never_raises
    def after_controller_start(self, train_run_context: Any) -> None:
        """Begin to send, and to show signs of life."""
        global _current
        _current = self
        mark_told()
        self._sender = EventSender(self._receiving)
        self._stopped = threading.Event()
        threading.Thread(target=self._show_life, name="elastic-train-alive", daemon=True).start()

    @_never_raises
    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        """Report a new state; Ray calls this at every poll, changed or not."""
        name = current_state._state_type.state_name
        if name != self._state:
            self._state, self._state_since = name, time.time()
            self._send(ev.StateChanged(state=name))

    def before_controller_execute_resize_decision(self, resize_decision: ResizeDecision) -> None:
        """Report that a healthy worker group gives way to one of another size.

        Raises:
            FencedOffError: Another attempt has taken over, and no worker shall be started for this one.
        """
        self._stop_if_fenced_off()
        self._tell_resize(resize_decision)

    def before_controller_execute_failure_decision(self, failure_decision: FailureDecision) -> None:
        """Report a failure of the worker group and what is done about it.

        Raises:
            FencedOffError: Another attempt has taken over, which may be why this one's workers fail.
        """
        self._stop_if_fenced_off()
        self._tell_failure(failure_decision)

    @_never_raises
    def before_worker_group_start(self, worker_group_context: Any) -> None:
        """Remove what interrupted uploads left behind: no worker runs now."""
        self._last_errors = {}
        self._world_size = 0
        removed = remove_interrupted_uploads(self._store, self._attempt)
        check_fence(self._store, self._attempt)  # what a successor uploads is not abandoned
        self._store.abandon_uploads()
        if removed:
            told = ", ".join(f"{loop_name(name)} ({why})" for name, why in removed.items())
            logger.warning("Removed checkpoints that no commit needs: %s", told)

    @_never_raises
    def after_worker_group_start(self, worker_group: Any) -> None:
        """Report size and ranks of the new worker group."""
        workers = worker_group.get_workers()
        self._worker_group, self._asked = worker_group, []
        self.groups_started += 1
        self._world_size = len(workers)
        self._commits_of_turn = self._reports_since_checkpoint = 0
        self._last_commit_at = time.time()
        commit = newest_commit(self._store, self._attempt)
        latest = latest_checkpoint(commit.snapshot) if commit is not None else None
        self._checkpoint = latest["checkpoint_dir_name"] if latest else ""
        # What another run has counted says nothing of this one.
        is_own = commit is not None and (commit.attempt, commit.sequence) != SEED_COMMIT
        metrics = latest["metrics"] if latest and is_own else {}
        self._loops.begin(workers, loop_name(self._checkpoint), metrics, self._saved_by.get(self._checkpoint))
        ranks = {
            f"{worker.metadata.node_ip}:{worker.metadata.pid}": worker.distributed_context.world_rank
            for worker in workers
        }
        self._send(ev.WorkerGroupStarted(world_size=len(workers), checkpoint=self._checkpoint, ranks=ranks))

    def look_at_reports(self, statuses: Sequence[Any]) -> None:
        """Look at what a poll has found before Ray Train does.

        Raises:
            WorkerGroupError: The loop hangs, or ignores its checkpoint, which ends the training.
        """
        failure = self._look(statuses)
        if failure is not None:
            self._last_errors, self._tracebacks = dict(failure.worker_failures), {}
            raise failure

    @_never_raises
    def _look(self, statuses: Sequence[Any]) -> WorkerGroupError | None:
        return self._loops.look(statuses)

    @_never_raises
    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Remember the errors of the ranks for the failure decision that follows; end a drain that has its commit."""
        if worker_group_status.errors:
            self._last_errors = dict(worker_group_status.errors)
            # Ray hands out the loop's own exceptions, which have lost their tracebacks, and keeps those beside them.
            statuses = worker_group_status.worker_statuses
            self._tracebacks = {
                rank: getattr(statuses[rank].error, "_traceback_str", "")
                for rank in self._last_errors
                if rank in statuses
            }
        self._take_answers(0)
        preemption = worker_group_status.get_preemption_info()
        if preemption is None:
            return
        if self.renew_reservation is not None:
            self.renew_reservation()
        if self.take_commit():
            self._end_drain(preemption)

    @_never_raises
    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        """Take the last answers; the group gives back what it holds."""
        self._worker_group = None
        self._take_answers(_LAST_SECONDS)

    @_never_raises
    def before_worker_group_abort(self, worker_group_context: Any) -> None:
        """Remember that the group gives back what it holds."""
        self._worker_group = None

    @_never_raises
    def after_report(self, training_report: Any, metrics: list[dict[str, Any]]) -> None:
        """Report what rank 0 reported, and the commit that came with it: Ray has written its snapshot."""
        checkpoint = training_report.checkpoint
        name = checkpoint.path.rstrip("/").removeprefix(f"{self._store.path}/") if checkpoint else ""
        rank_zero = bounded_metrics(plain_metrics(metrics[0]), self._score_attribute) if metrics else {}
        self._reports_since_checkpoint = 0 if checkpoint else self._reports_since_checkpoint + 1
        if not checkpoint:
            self._send(ev.Reported(metrics=rank_zero, world_size=self._world_size))
            return
        self._commits_of_turn += 1
        self._last_commit_at = time.time()
        self._checkpoint = name
        self._saved_by = {name: self._world_size}
        size = self._size_of(name)
        self._send(
            ev.CheckpointCommitted(checkpoint=name, size_bytes=size, metrics=rank_zero, world_size=self._world_size)
        )
        if not self._asked and self._worker_group is not None:
            self._asked = ask(self._worker_group.get_workers(), take_waits_and_stall)

    def _size_of(self, checkpoint: str) -> int:
        """Return the bytes of a checkpoint, 0 if the storage does not say: the commit is told all the same."""
        try:
            return sum((self._store.file_sizes(checkpoint) or {}).values())
        except OSError:
            self.errors += 1
            return 0

    @_never_raises
    def after_controller_finish(self, result: Any) -> None:
        """Send what is left; the process ends soon."""
        self._stop_sending(timeout_seconds=3.0)

    @_never_raises
    def before_controller_abort(self) -> None:
        """Send what is left; the process ends at once."""
        self._stop_sending(timeout_seconds=1.0)

    @_never_raises
    def waiting_for_capacity(self, possible_workers: int, missing: str, since: float) -> None:
        """Report what the start of a worker group waits for, and since when (epoch seconds)."""
        self._send(
            ev.WaitingForCapacity(
                possible_workers=possible_workers,
                min_workers=self._min_workers,
                resources_per_worker=self._resources_per_worker,
                missing=missing,
                since=since,
            )
        )

    @_never_raises
    def _take_answers(self, timeout_seconds: float) -> None:
        """Tell what the ranks have waited for, once all have answered or none is waited for any longer."""
        if not self._asked:
            return
        if not timeout_seconds and not have_answered(self._asked):
            return
        answers, self._asked = answers_of(self._asked, timeout_seconds), []
        self.tell_waits("ranks", [waits for waits, _ in answers.values()])
        self.tell_stall(max((stall for _, stall in answers.values()), default=0.0))

    def _end_drain(self, preemption: Any) -> None:
        """Restart at once: the work is committed, and every step until the deadline would be done twice.

        Ray waits for the deadline, and takes the earliest that a worker has been told.
        """
        over = type(preemption)(
            deadline_ms=int((time.time() - self._preemption_grace_seconds) * 1000),
            preempted_node_to_ranks=preemption.preempted_node_to_ranks,
        )
        for worker in self._worker_group.get_workers():
            worker.actor.mark_preempt.remote(over)

    def _stop_if_fenced_off(self) -> None:
        """Let nothing pass but that another attempt has taken over."""
        try:
            check_fence(self._store, self._attempt)
        except OSError:
            self.errors += 1

    @_never_raises
    def _tell_resize(self, resize_decision: ResizeDecision) -> None:
        if not self._world_size or self._last_errors:
            return
        reason = getattr(resize_decision, "reason", None)
        self._send(
            ev.WorkerGroupResized(
                old_size=self._world_size,
                new_size=resize_decision.num_workers,
                reason=reason.value if reason is not None else "",
                waited_seconds=getattr(resize_decision, "waited_seconds", 0.0),
                reports_lost=self._reports_since_checkpoint,
                seconds_lost=time.time() - self._last_commit_at,
            )
        )

    @_never_raises
    def _tell_failure(self, failure_decision: FailureDecision) -> None:
        errors = self._last_errors
        if not errors and not self.is_draining:
            return
        preempted = self.is_draining or any(_is_preempted_actor(error) for error in errors.values())
        event_type = ev.WorkersPreempted if preempted else ev.WorkerFailed
        texts, also = distinct({rank: self._in_words(rank, error) for rank, error in errors.items()})
        self._send(
            event_type(
                errors=texts,
                also=also,
                retried=failure_decision is FailureDecision.RETRY,
                gives_up=why_given_up(errors.values()),
                reports_lost=self._reports_since_checkpoint,
            )
        )
        self._world_size = 0

    def _in_words(self, rank: int, error: Exception) -> str:
        return self._tracebacks.get(rank) or f"{type(error).__name__}: {error}"

    @_never_raises
    def tell_stall(self, seconds: float) -> None:
        """Report for how long the loop stood still for its checkpoints, if it did."""
        self._stalled += seconds
        if self._stalled >= _TOLD_STALL_SECONDS:
            self._send(ev.CheckpointStalled(seconds=round(self._stalled, 3)))
            self._stalled = 0.0

    @_never_raises
    def tell_waits(self, who: str, waits: Sequence[Waits]) -> None:
        """Report what processes waited for their storage, if they did."""
        tries = sum(waited.tries for waited in waits)
        if tries:
            longest = max(waits, key=lambda waited: waited.seconds)
            self._send(ev.StorageWaited(who=who, seconds=round(longest.seconds, 3), tries=tries, last=longest.last))

    def _send(self, event: ev.Event) -> None:
        if self._sender is not None:
            self._sender.send(event)

    def _stop_sending(self, timeout_seconds: float) -> None:
        self.tell_waits("controller", [take_waits()])
        if self._stopped is not None:
            self._stopped.set()
        if self._sender is not None:
            self._sender.close(timeout_seconds)

    def _show_life(self) -> None:
        while self._stopped is not None and not self._stopped.wait(ALIVE_SECONDS):
            waiting = waiting_since()
            if waiting is None:
                self.tell_waits("controller", [take_waits()])
            self._send(
                ev.ControllerAlive(
                    doing=self._state if waiting is None else "waiting for the storage",
                    seconds=time.time() - self._state_since if waiting is None else time.monotonic() - waiting,
                    callback_errors=self.errors,
                )
            )
