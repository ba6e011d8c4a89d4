"""What is told of loops: from what they report, what they have asked for, and who waits for whom."""

from __future__ import annotations

from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from ray.train.v2._internal.exceptions import UserExceptionWithTraceback, WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.training_report import _TrainingReport
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus

from prefect_elastic_train import loop
from prefect_elastic_train.core import ray_output
from prefect_elastic_train.core.events import Event, LoopWarned
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.elastic import loop_watch
from prefect_elastic_train.elastic.loop_watch import IgnoredCheckpointError, LoopWatch

NEVER, OPENED = False, True
CHECKPOINT: Any = object()
RUNNING = [WorkerStatus(True, None, None)]


class Watched:
    """A loop of one worker at times that the test sets; a worker without a state does not answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: bool = False, hangs_after_seconds: float = 0.0) -> None:
        self.now = 100.0
        monkeypatch.setattr(loop_watch.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(
            loop_watch, "ask", lambda workers, question, seconds: {0: workers[0]} if workers[0] is not None else {}
        )
        self.events: list[Event] = []
        self.watch = LoopWatch(fails, self.events.append, hangs_after_seconds)
        self.watch.begin(["in loop.py"], "", {})

    def resume(self, opened: bool | None, before: dict[str, Any], *reports: dict[str, Any]) -> Any:
        """Have a loop that has or has not opened it report from a checkpoint on; return what it fails of."""
        self.watch.begin([opened], "checkpoint_a", before)
        looks = [self._look(made.pop("saves", 0) == 1, made) for made in map(dict, reports)]
        assert looks[:-1] == [None] * (len(looks) - 1)
        return looks[-1]

    def _look(self, saves: bool, metrics: dict[str, Any]) -> Any:
        report = _TrainingReport(CHECKPOINT if saves else None, metrics, False)
        return self.watch.look([WorkerStatus(True, None, report)])

    def report(self, times: int, seconds: float, saves: bool = False) -> None:
        """Have the loop report so often, so many seconds apart."""
        for _ in range(times):
            self.now += seconds
            self._look(saves, {})

    @property
    def problems(self) -> list[str]:
        """What was told."""
        return [event.problem for event in self.events if isinstance(event, LoopWarned)]


@pytest.mark.parametrize(
    ("opened", "before", "reports"),
    [
        (OPENED, {"step": 8}, [{"step": 9}]),
        (NEVER, {"step": 8}, [{"step": 9}]),  # it restores its state by means of its own
        (NEVER, {"step": 8}, [{"phase": "warm"}, {"step": 9}]),
        (NEVER, {"step": 8, "epoch": 0}, [{"step": 0, "epoch": 1}]),
        (OPENED, {"step": 7}, [{"step": 0}]),  # of an epoch
        (OPENED, {"loss": 1.0}, [{"loss": 0.9}]),
        (OPENED, {}, [{"step": 0}]),  # another run's checkpoint
        (OPENED, {"step": float("nan")}, [{"step": 1}]),
        (None, {"step": 8}, [{"step": 1}]),  # it may have read it
    ],
)
def test_a_loop_that_goes_on_or_has_read_its_checkpoint_is_not_suspected(
    monkeypatch: pytest.MonkeyPatch, opened: bool | None, before: dict[str, Any], reports: list[dict[str, Any]]
) -> None:
    watched = Watched(monkeypatch, fails=True)
    assert watched.resume(opened, before, *reports) is None
    assert watched.events == []


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize(
    ("opened", "before", "reports", "message"),
    [
        (NEVER, {"step": 8}, [{"step": 1}], "at step 1 although the checkpoint of step 8 is there (checkpoint_a): it"),
        (NEVER, {"epoch": 0}, [{"epoch": 0}], "it never read what ray.train.get_checkpoint() returns. Restore model"),
        (NEVER, {"loss": 1.0}, [{"loss": 2.0}, {"loss": 1.9}], "again although the checkpoint is there"),
        (NEVER, {"loss": 1.0}, [{"loss": 2.0, "saves": 1}], ""),  # before it replaces another
    ],
)
def test_a_loop_that_begins_again_is_told_with_the_reason_and_ended_if_so_asked(
    monkeypatch: pytest.MonkeyPatch,
    opened: bool,
    before: dict[str, Any],
    reports: list[dict[str, Any]],
    message: str,
    fails: bool,
) -> None:
    watched = Watched(monkeypatch, fails)
    failure = watched.resume(opened, before, *reports)
    (told,) = watched.events
    assert isinstance(told, LoopWarned)
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
    assert quick.problems == [], "it may save at each hundredth"
    quick.watch.look([WorkerStatus(False, None, None)])
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
    assert hung.watch.look(RUNNING) is None
    hung.now += 59.0
    hung.report(1, 0.0, saves=True)
    hung.now += 60.0
    assert hung.watch.look(RUNNING) is None
    hung.now += 1.0
    failure = hung.watch.look(RUNNING)
    assert failure is not None
    assert "no report for 60 s; the rank was here:\nin loop.py" in str(failure.worker_failures[0])
    assert hung.watch.look([WorkerStatus(False, None, None)]) is None, "a loop that has returned hangs no more"


def test_how_often_a_session_saves_is_told_with_its_reason_when_it_changes_and_a_stack_says_how_far_it_is() -> None:
    def plan() -> str:
        return loop_watch.take_news()[2]

    loop_watch.state.interval = 0.0
    with loop.session(loop.ArrayState(count=0), steps=5, global_batch=1) as session:
        assert plan().startswith("each 10 s: ")
        assert plan() == ""
        session.cadence.blocked, session.cadence.background = 5.0, 4.0
        session.cadence.failures, session.cadence.trained_seconds = 3, 7200.0
        told = plan()
        assert "a save blocks 5 s, takes 4 s beside the steps, and a failure is expected each 50 min" in told
        assert told.endswith("(3 in 120 min so far; before any, one in 6 h)")
        session.cadence.blocked = 5.1
        assert plan() == ""
        session.step()
        assert loop_watch.stacks().startswith("session.step() was called up to step 1 of 5")
    with loop.session(loop.ArrayState(count=0), steps=5, global_batch=1, save_every=50):
        assert plan() == "each 50 steps, as asked for"


_DEAD = WorkerHealthCheckFailedError("A worker health check failed.", ActorDiedError())
_GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection {} by peer [127.0.0.1]:33421"
_RESET, _CLOSED = RuntimeError(_GLOO.format("reset")), RuntimeError(_GLOO.format("closed"))
_NAN = ValueError("the loss is not a number")
_WRAPPED = UserExceptionWithTraceback(
    KeyError("gradients"), f"Traceback (most recent call last):\nRuntimeError: {_RESET}\n\nKeyError: 'gradients'\n"
)


@pytest.mark.parametrize(
    ("failures", "waited", "outcome"),
    [
        ({0: _RESET}, 0.0, None),
        ({0: _WRAPPED}, 0.0, None),
        ({0: _RESET}, 9.0, None),
        ({0: _RESET}, 10.0, Outcome.CLUSTER_LOST),
        ({0: _RESET, 1: _CLOSED}, 0.0, Outcome.CLUSTER_LOST),  # there is nobody to wait for
        ({0: _RESET, 1: _DEAD}, 0.0, Outcome.CLUSTER_LOST),
        ({0: _NAN, 1: _DEAD}, 0.0, Outcome.CLUSTER_LOST),  # some collectives raise what only their users know
        ({0: _RESET, 1: _NAN}, 0.0, Outcome.USER_ERROR),
        ({1: _NAN}, 0.0, Outcome.USER_ERROR),
        ({1: ConnectionResetError(104, "Connection reset by peer")}, 0.0, Outcome.USER_ERROR),  # a request of the loop
    ],
)
def test_broken_collectives_wait_for_their_cause_within_a_bound_and_nothing_else_does(
    failures: dict[int, Exception], waited: float, outcome: Outcome | None
) -> None:
    assert loop_watch.cause_of(failures, workers=2, waited_seconds=waited).outcome is outcome
    assert loop_watch.cause_of(failures).outcome is not None, "a driver cannot wait"


@pytest.mark.parametrize(
    ("name", "message", "is_consequence"),
    [
        (
            "RuntimeError",
            "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:1",
            True,
        ),
        ("RuntimeError", "[unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete", True),
        (
            "DistBackendError",
            "NCCL error in: NCCLUtils.hpp:268, remote process exited or there was a network error",
            True,
        ),
        ("DistBackendError", "NCCL error in: NCCLUtils.hpp:5, unhandled system error (run with NCCL_DEBUG=INFO)", True),
        ("DistBackendError", "NCCL communicator was aborted on rank 1.", True),
        ("DistNetworkError", "The client socket has timed out after 300000ms while trying to connect", True),
        ("DistStoreError", "Socket Timeout", True),
        ("JaxRuntimeError", "UNAVAILABLE: Failed to send RPC to coordination service", True),
        ("JaxRuntimeError", "INTERNAL: Gloo AllReduce failed: Connection reset by peer", True),
        ("DistBackendError", "NCCL error in: NCCLUtils.hpp:5, invalid usage. Duplicate GPU detected", False),
        ("RuntimeError", "ProcessGroupNCCL is only supported with GPUs, no GPUs found!", False),
        ("RuntimeError", "DataLoader worker (pid 7) is killed by signal: Killed.", False),
        ("RuntimeError", "CUDA out of memory", False),
        ("ValueError", "mat1 and mat2 shapes cannot be multiplied", False),
        ("ConnectionError", "Connection reset by peer", False),
    ],
)
def test_the_errors_of_collectives_that_lost_a_peer_are_told_from_those_of_the_loop(
    name: str, message: str, is_consequence: bool
) -> None:
    assert ray_output.is_consequence(f"{name}: {message}") is is_consequence
