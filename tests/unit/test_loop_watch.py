"""What is told of loops: from what they report, what they have asked for, and who waits for whom."""

import gc
import inspect
import queue
import re
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jax.experimental import multihost_utils
from ray.exceptions import ActorDiedError
from ray.train import WorkerGroupError, collective
from ray.train.v2._internal.exceptions import UserExceptionWithTraceback, WorkerHealthCheckFailedError
from ray.train.v2._internal.execution import context as rays_context
from ray.train.v2._internal.execution.training_report import _TrainingReport
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus
from ray.train.v2._internal.execution.worker_group.thread_runner import ThreadRunner
from torch.distributed._functional_collectives import wait_tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_all_gather_copy_out

from prefect_elastic_train import loop
from prefect_elastic_train.controller import loop_watch, worker_group
from prefect_elastic_train.controller.failures import (
    IgnoredCheckpointError,
    causes_of,
    classify_failure,
    must_await_cause,
)
from prefect_elastic_train.controller.loop_watch import LoopWatch
from prefect_elastic_train.core.events import FirstStep
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.core.settings import FailureSettings
from prefect_elastic_train.loop.phases import PhaseReport
from prefect_elastic_train.trackers.tracked_run import TrackedRun
from prefect_elastic_train.worker import loop_inspection
from prefect_elastic_train.worker.rank_failures import portable_failure
from prefect_elastic_train.worker.train_worker import RayTrainWorker
from tests.support.processes import wait_for

NEVER, OPENED = False, True
CHECKPOINT = object()
RUNNING = [WorkerStatus(True, None, None)]


class Watched:
    """A loop of one worker at times that the test sets; a worker without a state does not answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: bool = False, hangs_after_seconds: Any = 0.0) -> None:
        self.now = 100.0
        monkeypatch.setattr(loop_watch.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(
            loop_watch,
            "query_workers",
            lambda workers, function, seconds=0: {0: workers[0]} if workers[0] is not None else {},
        )
        self.events = []
        settings = FailureSettings(
            ignored_checkpoint="fail" if fails else "warn", stall_timeout_seconds=hangs_after_seconds
        )
        self.watch = LoopWatch(settings, self.events.append)
        self.watch.begin_group(["is at loop.py\nthread 1:\n…"], "", {})

    def resume(self, opened: bool | None, before: dict[str, Any], *reports: dict[str, Any]) -> Any:
        """Have a loop that has or has not opened it report from a checkpoint on; return what it fails of."""
        self.watch.begin_group([opened], "checkpoint_a", before)
        looks = [self._look("saves" in made, made) for made in reports]
        assert looks[:-1] == [None] * (len(looks) - 1)
        return looks[-1]

    def _look(self, saves: bool, metrics: dict[str, Any]) -> Any:
        return self.check([WorkerStatus(True, None, _TrainingReport(CHECKPOINT if saves else None, metrics, False))])

    def check(self, statuses: list[WorkerStatus]) -> WorkerGroupError | None:
        """Have a poll find these; return what the group fails of."""
        try:
            self.watch.check(statuses)
        except WorkerGroupError as error:
            return error
        return None

    def report(self, times: int, seconds: float, saves: bool = False) -> None:
        """Have the loop report so often, so many seconds apart."""
        for _ in range(times):
            self.now += seconds
            self._look(saves, {})

    @property
    def problems(self) -> list[str]:
        """What was told."""
        return [event.problem for event in self.events]


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize(
    ("opened", "before", "reports", "message"),
    [
        (NEVER, {"step": 8}, [{"step": 9}], None),  # it restores its state by means of its own
        (NEVER, {"step": 8}, [{"phase": "warm"}, {"step": 9}], None),
        (NEVER, {"step": 8, "epoch": 0}, [{"step": 0, "epoch": 1}], None),
        (OPENED, {"step": 7}, [{"step": 0}], None),  # of an epoch
        (None, {"step": 8}, [{"step": 1}], None),  # it may have read it
        (NEVER, {"step": 8}, [{"step": 1}], "at step 1, although the checkpoint of step 8 exists (checkpoint_a): it"),
        (NEVER, {"epoch": 0}, [{"epoch": 0}], "it never read what ray.train.get_checkpoint() returns. Restore model"),
        (
            NEVER,
            {"step": float("nan")},
            [{"step": 2}, {"step": 3}],
            "from the beginning, although the checkpoint exists",
        ),
        (NEVER, {"loss": 1.0}, [{"loss": 2.0, "saves": 1}], ""),  # before it replaces another
    ],
)
def test_a_loop_that_begins_again_is_told_with_the_reason_and_ended_if_so_asked_and_no_other_is_suspected(
    monkeypatch: pytest.MonkeyPatch,
    opened: bool | None,
    before: dict[str, Any],
    reports: list[dict[str, Any]],
    message: str | None,
    fails: bool,
) -> None:
    watched = Watched(monkeypatch, fails)
    failure = watched.resume(opened, before, *reports)
    if message is None:
        assert (failure, watched.events) == (None, [])
        return
    (told,) = watched.events
    assert told.problem == "checkpoint-ignored"
    assert message in told.message
    assert isinstance(failure.worker_failures[0], IgnoredCheckpointError) if fails else failure is None


def test_a_loop_without_a_checkpoint_is_told_of_once_when_that_costs_something(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Watched(monkeypatch)
    slow.report(9, 5.0)
    assert slow.problems == []
    slow.report(20, 5.0)
    assert slow.problems == ["no-checkpoint"]

    quick = Watched(monkeypatch)
    quick.report(100, 0.1)
    assert quick.problems == []  # it may save at each hundredth
    quick.watch.check([WorkerStatus(False, None, None)])
    assert quick.problems == ["no-checkpoint"]

    saving = Watched(monkeypatch)
    saving.report(9, 0.1)
    saving.report(1, 0.1, saves=True)
    saving.report(50, 60.0)
    assert saving.problems == []


def test_a_loop_that_reports_nothing_for_too_long_fails_with_what_each_rank_was_doing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hung = Watched(monkeypatch, hangs_after_seconds=60.0)
    hung.now += 1000.0  # the workers are set up
    assert hung.check(RUNNING) is None
    hung.now += 59.0
    hung.report(1, 0.0, saves=True)
    hung.now += 60.0
    assert hung.check(RUNNING) is None
    hung.now += 1.0
    failure = hung.check(RUNNING)
    (cause,) = causes_of(failure.worker_failures)
    assert cause.message == "HungLoopError: no report for 60 s; the rank is at loop.py"
    assert cause.traceback == f"{cause.message}\nthread 1:\n…"
    assert hung.check([WorkerStatus(False, None, None)]) is None  # a loop that has returned hangs no more


def test_a_loop_without_a_session_that_stops_reporting_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, hangs_after_seconds="auto")
    watched.report(12, 20.0, saves=True)
    watched.now += 199.0
    for seconds, problems in [(0, []), (2, ["no-report"]), (500, ["no-report"])]:
        watched.now += seconds
        assert watched.check(RUNNING) is None
        assert watched.problems == problems
    [event] = watched.events
    assert event.message.startswith("the loop has not reported for 200 s, 20 s at most before: rank 0 is at loop.py")
    watched.report(1, 0.0, saves=True)
    watched.now += 10_000
    assert watched.check([_status(phase=PhaseReport("step", 1.0, 0, {}, 1))]) is None
    assert watched.problems == ["no-report"], "a session is watched by its phases"


def _status(**more: Any) -> Any:
    status = WorkerStatus(True, None, None)
    vars(status).update(more)
    return status


def _waited(seconds: float) -> Any:
    return _status(waited=seconds)


def test_ranks_that_wait_for_others_are_told_of_once_with_where_each_rank_is(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    lines = {0: "at train.py:31", 1: "at train.py:40", 2: "at train.py:40"}
    monkeypatch.setattr(loop_watch, "query_workers", lambda workers, function, seconds=0: lines)
    watched.watch.begin_group([""] * 4, "", {})
    for seconds in (44.0, 46.0, 47.0):
        assert watched.check([_waited(seconds), _waited(0.0), _waited(0.0), *RUNNING]) is None
        assert watched.problems == ["ranks-wait"] * (seconds > 45)
    (event,) = watched.events
    assert "rank 0 at train.py:31; ranks 1-2 at train.py:40; rank 3 does not answer" in event.message


def test_a_rank_that_answers_no_poll_is_told_of_though_nobody_waits_for_it_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch)
    for group in (0, 1):
        watched.watch.begin_group([""] * 2, "", {})
        watched.watch.check([_waited(0.0), _waited(0.0)])
        for seconds in (44.0, 2.0):
            assert len(watched.problems) == group
            watched.now += seconds
            watched.watch.check([_waited(0.0), *RUNNING])
    assert watched.problems == ["ranks-wait", "ranks-wait"]


def test_a_worker_knows_how_long_its_loop_waits_for_ray_and_at_which_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goes_on, runner = queue.SimpleQueue[None](), ThreadRunner()
    waits = ThreadRunner()

    def barrier():
        waits._monitor_target()  # a line of the loop, from which Ray waits

    def loop():
        goes_on.get()
        barrier()

    execution = SimpleNamespace(result_queue=queue.Queue(), training_thread_runner=runner)
    context = SimpleNamespace(execution_context=execution, preemption_context=SimpleNamespace(preemption_info=None))
    monkeypatch.setattr(rays_context, "_train_context", context)
    worker = RayTrainWorker()

    def waited():
        return float(worker.poll_status().waited)

    runner.run(loop)
    assert waited() == pytest.approx(0.0, abs=0.05)
    time.sleep(0.2)
    assert waited() == pytest.approx(0.0, abs=0.05)  # it does something of its own
    assert re.match(rf"is at {re.escape(__file__)}:\d+ in loop: goes_on.get\(\)\n", loop_inspection.thread_stacks())
    goes_on.put(None)
    wait_for(lambda: waited() > 0.3, 5, "the wait")
    stacks = loop_inspection.thread_stacks()
    assert re.match(
        rf"waits for other ranks at {re.escape(__file__)}:\d+ in barrier: waits\._monitor_target\(\)", stacks
    )
    waits.get_exception_queue().put(None)
    wait_for(lambda: not worker.poll_status().running, 5, "the end of the loop")
    assert waited() == pytest.approx(0.0, abs=0.05)  # a loop that has returned waits for nobody


@pytest.mark.parametrize(
    ("function", "waits"),
    [
        (dist.recv, True),
        (wait_tensor, True),  # DTensor
        (foreach_all_gather_copy_out, True),  # FSDP2
        (multihost_utils.process_allgather, True),
        (multihost_utils.sync_global_devices, True),
        (collective.broadcast_from_rank_zero, True),
        (queue.Queue.get, False),
        (torch.autograd.backward, False),
    ],
)
def test_a_rank_in_a_collective_is_told_apart_from_one_that_is_elsewhere(
    monkeypatch: pytest.MonkeyPatch, function: Any, waits: bool
) -> None:
    function = inspect.unwrap(function)
    line = f'  File "{inspect.getsourcefile(function)}", line 7, in {function.__name__}\n'
    monkeypatch.setattr(loop_inspection.traceback, "format_stack", lambda frame: [line])
    assert loop_inspection.thread_stacks().startswith("waits for other ranks at" if waits else "is at") is True


def test_how_often_a_session_saves_is_told_with_its_reason_when_it_changes_and_a_stack_says_how_far_it_is() -> None:
    def plan():
        return loop_inspection.collect_commit_report(0, "").save_plan

    loop_inspection.state.interval = 0.0
    with loop.session(loop.ArrayState(count=0), steps=5, global_batch=1) as session:
        assert plan().startswith("every 10 s: ")
        assert plan() == ""
        session.cadence.blocked, session.cadence.background = 5.0, 4.0
        session.cadence.failures, session.cadence.trained_seconds = 3, 7200.0
        told = plan()
        assert (
            "a save blocks the loop for 5 s and takes 4 s in the background, and a failure is expected every 50 min"
            in told
        )
        assert told.endswith("(3 in 120 min so far; before the first failure, one in 6 h)")
        session.cadence.blocked = 5.1
        assert plan() == ""
        session.step()
        assert "\nsession.step() was called up to step 1 of 5" in loop_inspection.thread_stacks()
    with loop.session(loop.ArrayState(count=0), steps=5, global_batch=1, save_every=50):
        assert plan() == "every 50 steps, as configured"


def _raised(error: Exception) -> Any:
    """What the controller gets of an error that the loop has raised."""
    return portable_failure(UserExceptionWithTraceback(error, f"Traceback (most recent call last):\n{error}"))


_DEAD = WorkerHealthCheckFailedError("A worker health check failed.", ActorDiedError())
_GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection {} by peer [127.0.0.1]:33421"
_RESET, _CLOSED = [_raised(RuntimeError(_GLOO.format(how))) for how in ("reset", "closed")]
_NAN = _raised(ValueError("the loss is not a number"))
_WRAPPED = KeyError("gradients")
_WRAPPED.__context__ = RuntimeError(_GLOO.format("reset"))


@pytest.mark.parametrize(
    ("failures", "waited", "waits", "outcome"),
    [
        ([_RESET, None], 0.0, True, Outcome.CLUSTER_LOST),
        ([_raised(_WRAPPED), None], 0.0, True, Outcome.CLUSTER_LOST),
        ([_RESET, None], 9.0, True, Outcome.CLUSTER_LOST),
        ([_RESET, None], 10.0, False, Outcome.CLUSTER_LOST),
        ([_RESET, _CLOSED], 0.0, False, Outcome.CLUSTER_LOST),  # there is nobody to wait for
        ([_RESET, _DEAD, None], 0.0, False, Outcome.CLUSTER_LOST),
        ([_NAN, _DEAD], 0.0, False, Outcome.CLUSTER_LOST),  # some collectives raise what only their users know
        ([_RESET, _NAN, None], 0.0, False, Outcome.USER_ERROR),
    ],
)
def test_broken_collectives_wait_for_their_cause_within_a_bound_and_nothing_else_does(
    failures: list[Exception | None], waited: float, waits: bool, outcome: Outcome
) -> None:
    assert must_await_cause(failures, waited) is waits
    assert classify_failure([failure for failure in failures if failure])[0] is outcome


@pytest.mark.parametrize(
    ("name", "message", "is_consequence"),
    [
        ("RuntimeError", "[unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete", True),
        ("DistBackendError", "NCCL error in: NCCLUtils.hpp:268, remote process exited or a network error", True),
        ("DistBackendError", "NCCL error in: NCCLUtils.hpp:5, unhandled system error (run with NCCL_DEBUG=INFO)", True),
        ("DistBackendError", "NCCL error in: NCCLUtils.hpp:268\nncclRemoteError: a call failed", True),
        ("DistBackendError", "NCCL communicator was aborted on rank 1.", True),
        ("DistNetworkError", "failed to recv, got 0 bytes", True),
        ("DistStoreError", "Socket Timeout", True),
        ("JaxRuntimeError", "UNAVAILABLE: Failed to send RPC to coordination service", True),
        ("JaxRuntimeError", "INTERNAL: Gloo AllReduce failed: Connection reset by peer", True),
        ("DistBackendError", "NCCL error in: NCCLUtils.hpp:5, invalid usage. Duplicate GPU detected", False),
        ("RuntimeError", "ProcessGroupNCCL is only supported with GPUs, no GPUs found!", False),
        ("RuntimeError", "dataset download failed: connection reset by peer", False),
        ("ConnectionError", "Connection reset by peer", False),
    ],
)
def test_the_errors_of_collectives_that_lost_a_peer_are_told_from_those_of_the_loop(
    name: str, message: str, is_consequence: bool
) -> None:
    assert _raised(type(name, (Exception,), {})(message)).is_consequence is is_consequence


def _poll_until_known(monkeypatch: pytest.MonkeyPatch, *polls: list[WorkerStatus]) -> tuple[list[WorkerStatus], float]:
    """What callbacks get to see of polls that follow each other, the last one again and again, and after what time."""
    coming, now = list(polls), [0.0]
    monkeypatch.setattr(worker_group.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(worker_group.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    poll = lambda self, timeout: coming.pop(0) if coming[1:] else coming[0]  # noqa: E731
    monkeypatch.setattr(worker_group.WorkerGroup, "_poll_workers_and_collect_errors", poll)
    seen = []
    group = worker_group.RunWorkerGroup.__new__(worker_group.RunWorkerGroup)
    group.callback = SimpleNamespace(check_reports=seen.append)
    statuses = group._poll_workers_and_collect_errors(0.1)
    assert seen == [statuses]  # callbacks and policies see the last poll, once
    return statuses, now[0]


def _fails(error: Exception, report: Any = None) -> WorkerStatus:
    return WorkerStatus(False, error, report)


def test_all_who_decide_by_a_failure_see_its_cause_with_it_within_a_bound_and_no_report_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = _TrainingReport(CHECKPOINT, {"step": 7}, False)
    dead = [_fails(_RESET), _fails(_DEAD)]
    first = [_fails(_RESET, report), WorkerStatus(True, None, report)]
    statuses, seconds = _poll_until_known(monkeypatch, first, [_fails(_RESET), *RUNNING], dead)
    assert [status.error for status in statuses] == [_RESET, _DEAD]
    assert [status.training_report for status in statuses] == [report, report]
    assert seconds < 1
    assert (
        10 <= _poll_until_known(monkeypatch, [_fails(_RESET), *RUNNING])[1] <= 11
    )  # the other lives, and says nothing


def test_the_first_step_is_published_once_when_it_has_begun_on_all_ranks_and_steps_are_those_of_the_foremost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch)
    monkeypatch.setattr(loop_watch.time, "time", lambda: 5000.0)

    def look(*positions):
        watched.watch.check([_status(position=position) for position in positions])

    look()
    look(None, None)
    look(loop_inspection.Position(0.3, 300, 302, 64, False, 0), None)
    assert watched.events == []
    look(loop_inspection.Position(0.6, 300, 305, 64, False, 0), loop_inspection.Position(0.25, 300, 302, 64, False, 0))
    look(loop_inspection.Position(0.9, 300, 309, 64, False, 0), loop_inspection.Position(0.5, 300, 306, 64, False, 0))
    (first,) = watched.events
    assert isinstance(first, FirstStep)
    assert (first.at, first.world_size, watched.watch.step) == (5000.0 - 0.25, 2, 309)
    watched.watch.begin_group(["in loop.py"], "", {})
    assert watched.watch.step == 0  # the next group's session has begun no step
    assert watched.watch.most_workers == 64  # and has the same samples


def test_the_runs_in_trackers_are_published_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    run = TrackedRun("mlflow", {}, {})
    linked = TrackedRun("mlflow", {}, {}, "https://mlflow/run")
    for tracked in ([], [run], [run], [linked], [linked]):
        ranks = [loop_inspection.Position(0.1, 0, 1, 64, False, 0, tracked), None]
        watched.watch.check([_status(position=position) for position in ranks])
    assert [event.runs for event in watched.events] == [[run], [linked]]


def test_looking_at_the_loop_leaves_the_garbage_collector_out_of_it_and_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    current_frames = sys._current_frames
    monkeypatch.setattr(sys, "_current_frames", lambda: seen.append(gc.isenabled()) or current_frames())
    for was_enabled in (False, True):
        (gc.enable if was_enabled else gc.disable)()
        try:
            loop_inspection.thread_stacks()
            assert gc.isenabled() is was_enabled
        finally:
            gc.enable()
    assert seen
    assert not any(seen)
