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
from contextlib import suppress
from typing import Any

from ray.train import WorkerGroupError
from ray.train.v2._internal.execution.callback import ControllerCallback, ReportCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2._internal.execution.scaling_policy import ResizeDecision
from ray.train.v2._internal.execution.worker_group.poll import _is_preempted_actor

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.bounds import bounded_metrics
from prefect_elastic_train.core.checkpoint_names import loop_name
from prefect_elastic_train.core.ray_output import distinct, mark_told
from prefect_elastic_train.core.settings import FailureSettings
from prefect_elastic_train.elastic.budget import Forgiveness
from prefect_elastic_train.elastic.loop_watch import LoopWatch, ask, in_full, take_news, why_never_again
from prefect_elastic_train.elastic.sending import EventSender, Receiving
from prefect_elastic_train.runs import commits
from prefect_elastic_train.runs.model import SEED_COMMIT, RunDirectory
from prefect_elastic_train.runs.resume import remove_interrupted_uploads
from prefect_elastic_train.runs.snapshots import latest_checkpoint
from prefect_elastic_train.storage.retries import Waits, take_waits, waiting_since
from prefect_elastic_train.storage.store import RunStore

logger = logging.getLogger(__name__)

#: Exceptions of our own that are told of, each with its traceback.
_TOLD_ERRORS = 10
#: How long the ranks may take to say at a commit what they have waited for; the controller stands still meanwhile.
_ANSWER_SECONDS = 1.0

#: Seconds between log lines about a controller that stands in one state, and after which it counts as hung, unless
#: validations may still run. Ray gives up a runtime environment after 600 s, but restarts a process that does not boot
#: again and again, without a bound.
_SLOW_SECONDS = 60.0
_HUNG_SECONDS = 900.0
_STANDING = {
    "SCHEDULING": "starting workers; if they do not boot, Ray's logs (raylet.out, worker-*) show the reason",
    "SHUTTING_DOWN": "shutting down; validations may still run, which ValidationTaskConfig(timeout_s=...) limits",
}

#: The callback of this controller process. Policy and callbacks are pickled one by one, so they meet here.
_current: RunCallback | None = None


def current() -> RunCallback:
    """Return the callback of this controller process, for policies and worker groups."""
    assert _current is not None, "the controller has not started"
    return _current


def _never_raises(method: Callable[..., Any]) -> Callable[..., Any]:
    """Count and log what a callback raises, and go on, unless it is meant to end the attempt or the worker group."""

    @functools.wraps(method)
    def wrapper(self: RunCallback, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except (commits.FencedOffError, WorkerGroupError):
            raise
        except Exception:
            self.errors += 1
            if self.errors <= _TOLD_ERRORS:
                logger.warning("%s failed; training goes on", method.__name__, exc_info=True)
            return None

    return wrapper


class RunCallback(ControllerCallback, WorkerGroupCallback, ReportCallback):  # type: ignore[misc]
    """Reports the life of the controller of ``attempt`` to the driver, which listens at ``receiving``.

    Attributes:
        errors: Exceptions that this callback has passed over.
        group_failures: How often a worker group has failed, or lost a node.
        failures: Errors of the ranks in the last poll or start, for the decision that follows.
        start_failure: Why the last worker group did not start, until the scaling policy has taken that in.
        counted_on: Nodes that the size of the next worker group was decided from.
        checkpoint: What a restart now would begin from, empty for nothing.
        budget: Which of the failures count.
        left: How many more may follow the last one, None for any number.
        loops: Observes the loops of the worker groups.
    """

    def __init__(
        self, receiving: Receiving, store: RunStore, attempt: int, failures: FailureSettings, score_attribute: str = ""
    ) -> None:
        self._receiving = receiving
        self._store = store
        self._attempt = attempt
        self._grace_seconds = failures.preemption_grace_seconds
        self._score_attribute = score_attribute
        self.loops = LoopWatch(failures.ignored_checkpoint == "fail", self.tell, failures.stall_timeout_seconds)
        self._sender: EventSender | None = None  # made in the controller: a lock cannot be pickled on its way there
        self.budget = Forgiveness(failures.forgive_after_seconds)
        self.left: int | None = None
        self._state = "INITIALIZING"
        self._state_since = time.time()
        self._turned_at = time.monotonic()  # time of the control loop's last turn
        self._workers: list[Any] = []  # of the group that trains
        self.failures: dict[int, Exception] = {}
        self._has_committed = False
        self._reports_since_checkpoint = 0
        self._parts = dict[str, float]()
        self._passed_at = 0.0  # of the start of a worker group
        self.errors = self.group_failures = 0
        self.start_failure: Exception | None = None
        self.counted_on: frozenset[str] = frozenset()
        self.checkpoint = ""

    @property
    def is_draining(self) -> bool:
        """Whether a node of the group is about to go, and the group still trains."""
        return self._state == "PREEMPTING"

    def take_commit(self) -> bool:
        """Return whether a checkpoint was committed since this was asked last; the policy asks once a turn."""
        committed = self._has_committed
        self._has_committed = False
        return committed

    def tell(self, event: ev.Event) -> None:
        """Send an event to the driver."""
        if self._sender is not None:
            self._sender.put(event.model_copy(update={"step": self.loops.step}))

    def passed(self, part: str) -> None:
        """Note that a part of the next worker group's start is over; an empty one begins anew."""
        now = time.monotonic()
        self._parts = {**self._parts, part: round(now - self._passed_at, 3)} if part else {}
        self._passed_at = now

    @_never_raises
    def after_controller_start(self, train_run_context: Any) -> None:
        global _current
        _current = self
        commits.trained_seconds = lambda: self.budget.kept if self.loops.ignored else self.budget.seconds()
        mark_told()
        self.passed("")
        self._sender = EventSender(self._receiving)
        threading.Thread(target=self._show_life, args=(self._sender.closed,), daemon=True).start()

    @_never_raises
    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        """Report a new state; Ray calls this at every poll, changed or not."""
        self._turned_at = time.monotonic()
        name = current_state._state_type.state_name
        if name != self._state:
            self._state = name
            self._state_since = time.time()
            self.tell(ev.StateChanged(state=name))

    @_never_raises
    def before_controller_execute_resize_decision(self, resize_decision: ResizeDecision) -> None:
        """Report that a healthy worker group gives way to another; none is started for an attempt that lost the run."""
        self._stop_if_fenced_off()
        if not self._workers:
            return
        self.passed("")
        self.tell(
            ev.WorkerGroupResized(
                old_size=len(self._workers),
                new_size=resize_decision.num_workers,
                reason=getattr(resize_decision, "reason", ""),
                waited_seconds=getattr(resize_decision, "waited_seconds", 0.0),
                reports_lost=self._reports_since_checkpoint,
            )
        )

    @_never_raises
    def before_controller_execute_failure_decision(self, failure_decision: FailureDecision) -> None:
        """Report a failure of the worker group, of which another attempt that has taken over may be the cause."""
        self._stop_if_fenced_off()
        failures = self.failures
        self.failures = {}
        if not failures and not self.is_draining:
            return
        self.group_failures += 1
        self.passed("")
        is_preempted = self.is_draining or any(_is_preempted_actor(failure) for failure in failures.values())
        errors, also = distinct({rank: in_full(failure) for rank, failure in failures.items()})
        event_type = ev.WorkersPreempted if is_preempted else ev.WorkerFailed
        self.tell(
            event_type(
                errors=errors,
                also=also,
                retried=failure_decision is FailureDecision.RETRY,
                gives_up=why_never_again(failures.values()) or "the budget is used up",
                reports_lost=self._reports_since_checkpoint,
                left=self.left,
            )
        )

    @_never_raises
    def before_worker_group_start(self, worker_group_context: Any) -> None:
        """Remove what interrupted uploads left behind: no worker runs now."""
        self.passed("decision")
        with suppress(commits.FencedOffError):  # the next decision ends this attempt
            removed = remove_interrupted_uploads(self._store, self._attempt)
            commits.check_fence(self._store, self._attempt)  # what a successor uploads is not abandoned
            self._store.abandon_uploads()
            if removed:
                logger.warning("Removed checkpoints that no commit needs: %s", ", ".join(map(loop_name, removed)))
        self.passed("tidying up")

    @_never_raises
    def after_worker_group_start(self, worker_group: Any) -> None:
        self._workers = worker_group.get_workers()
        self.budget.begin()
        self._reports_since_checkpoint = 0
        self._has_committed = False
        commit = RunDirectory(self._store, self._attempt).newest_commit
        latest = latest_checkpoint(commit.snapshot) if commit is not None else None
        self.checkpoint = latest["checkpoint_dir_name"] if latest else ""
        # What another run has counted says nothing of this one.
        is_own = commit is not None and (commit.attempt, commit.sequence) != SEED_COMMIT
        self.loops.begin(self._workers, loop_name(self.checkpoint), latest["metrics"] if latest and is_own else {})
        ranks = {
            f"{worker.metadata.node_ip}:{worker.metadata.pid}": worker.distributed_context.world_rank
            for worker in self._workers
        }
        self.passed("process group")
        self.tell(
            ev.WorkerGroupStarted(world_size=len(ranks), checkpoint=self.checkpoint, ranks=ranks, parts=self._parts)
        )

    @_never_raises
    def look_at_reports(self, statuses: Sequence[Any]) -> None:
        """Look at what a poll has found before Ray Train does; raise what the worker group fails of, if it does."""
        if failure := self.loops.look(statuses):
            raise failure

    @_never_raises
    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Remember the errors of the ranks for the failure decision that follows; end a drain that has its commit."""
        # The statuses' own errors have tracebacks; those that Ray hands out have lost them.
        self.failures = {
            rank: status.error
            for rank, status in worker_group_status.worker_statuses.items()
            if status.error is not None
        }
        preemption = worker_group_status.get_preemption_info()
        if preemption is not None and self.take_commit():
            self._end_drain(preemption)

    @_never_raises
    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        self._workers = []
        self.budget.end()

    @_never_raises
    def after_worker_group_shutdown(self, worker_group_context: Any) -> None:
        self.passed("end of the old workers")

    @_never_raises
    def after_report(self, training_report: Any, metrics: list[dict[str, Any]]) -> None:
        """Report what rank 0 reported, and the commit that came with it: Ray has written its snapshot."""
        checkpoint = training_report.checkpoint
        world_size = len(self._workers)
        rank_zero = bounded_metrics(metrics[0], self._score_attribute) if metrics else {}
        if not checkpoint:
            self._reports_since_checkpoint += 1
            self.tell(ev.Reported(metrics=rank_zero, world_size=world_size))
            return
        name = checkpoint.path.rstrip("/").removeprefix(f"{self._store.path}/")
        self.checkpoint = name
        self._has_committed = True
        if not self.loops.ignored:  # else it repeats what was done before
            self.budget.commit()
        size = self._reports_since_checkpoint = 0
        with suppress(Exception):  # the commit is told all the same
            size = sum((self._store.file_sizes(name) or {}).values())
        self.tell(ev.CheckpointCommitted(checkpoint=name, size_bytes=size, metrics=rank_zero, world_size=world_size))
        answers = ask(self._workers, take_news, _ANSWER_SECONDS)
        _, _, plan = answers.get(0, (None, 0.0, ""))
        self._tell_waits("ranks", [waits for waits, *_ in answers.values()])
        stalled = max((stalled for _, stalled, *_ in answers.values()), default=0.0)
        if stalled >= 0.01:
            self.tell(ev.CheckpointStalled(seconds=round(stalled, 3)))
        if plan:
            self.tell(ev.SavesPlanned(words=plan))

    @_never_raises
    def after_controller_finish(self, result: Any) -> None:
        self._stop_sending(timeout_seconds=3.0)

    @_never_raises
    def before_controller_abort(self) -> None:
        self._stop_sending(timeout_seconds=1.0)

    def _end_drain(self, preemption: Any) -> None:
        """Restart at once: the work is committed, and every step until the deadline would be done twice.

        Ray waits for the deadline, and takes the earliest that a worker has been told.
        """
        over = type(preemption)(
            deadline_ms=int((time.time() - self._grace_seconds) * 1000),
            preempted_node_to_ranks=preemption.preempted_node_to_ranks,
        )
        for worker in self._workers:
            worker.actor.mark_preempt.remote(over)

    def _stop_if_fenced_off(self) -> None:
        """Let nothing pass but that another attempt has taken over."""
        try:
            commits.check_fence(self._store, self._attempt)
        except OSError:
            self.errors += 1

    def _tell_waits(self, who: str, waits: Sequence[Waits]) -> None:
        tries = sum(waited.tries for waited in waits)
        if tries:
            longest = max(waits, key=lambda waited: waited.seconds)
            self.tell(ev.StorageWaited(who=who, seconds=round(longest.seconds, 3), tries=tries, last=longest.last))

    def _stop_sending(self, timeout_seconds: float) -> None:
        self._tell_waits("controller", [take_waits()])
        if self._sender is not None:
            self._sender.close(timeout_seconds)

    def _show_life(self, closed: threading.Event) -> None:
        while not closed.wait(ev.ALIVE_SECONDS):
            if (waiting := waiting_since()) is not None:
                doing = "waiting for the storage"
                seconds = time.monotonic() - waiting
            else:
                self._tell_waits("controller", [take_waits()])
                doing = self._state
                seconds = time.time() - self._state_since
                standing = time.monotonic() - self._turned_at
                if standing > _SLOW_SECONDS:
                    doing = _STANDING.get(doing, doing.lower())
                    if standing % _SLOW_SECONDS < ev.ALIVE_SECONDS:
                        logger.warning("No worker trains after %.0f s of %s", standing, doing)
                    if standing > _HUNG_SECONDS and self._state != "SHUTTING_DOWN":
                        continue  # without heartbeats the driver is replaced
            self.tell(ev.ControllerAlive(doing=doing, seconds=seconds))
