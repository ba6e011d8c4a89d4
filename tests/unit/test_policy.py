"""The policies before a cluster that the test decides on."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, RayActorError
from ray.train import ControllerError, RunConfig
from ray.train.v2._internal.callbacks import preemption_callback
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution import preemption
from ray.train.v2._internal.execution.controller.state import (
    FinishedState,
    PreemptingState,
    ReschedulingState,
    RunningState,
    SchedulingState,
)
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2._internal.execution.scaling_policy import NoopDecision
from ray.train.v2._internal.execution.worker_group.poll import WorkerGroupPollStatus, WorkerStatus
from ray.train.v2.api.config import FailureConfig
from ray.train.v2.api.exceptions import WorkerGroupError

from prefect_elastic_train.controller import budget, controller, ray_compatibility, scaling_policy, worker_group
from prefect_elastic_train.controller.budget import FailureWindow
from prefect_elastic_train.controller.controller import TrainController
from prefect_elastic_train.controller.failure_policy import RunFailurePolicy
from prefect_elastic_train.controller.failures import CapacityTimeoutError, causes_of
from prefect_elastic_train.controller.loop_watch import LoopWatch
from prefect_elastic_train.controller.scaling_policy import RunScalingPolicy
from prefect_elastic_train.controller.sizing import Node
from prefect_elastic_train.controller.worker_group import RunWorkerGroup
from prefect_elastic_train.core.causes import describe_causes
from prefect_elastic_train.core.events import NodesLeftOut
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.core.settings import FailureSettings, LocalStorageSettings, ScalingSettings
from prefect_elastic_train.driver.endings import final_event_of_error
from prefect_elastic_train.driver.ray_configs import scaling_config
from prefect_elastic_train.loop.recovery_points import RecoveryPointError, StateHeader
from prefect_elastic_train.loop.restart_notice import set_announced_growth
from prefect_elastic_train.worker.loop_inspection import Position

Later = Callable[[float], None]


class Cluster(RunScalingPolicy):
    """The policy before nodes of one CPU each; None for a cluster that does not answer."""

    shared: State
    group: SimpleNamespace
    fits: int | None = 0
    taken: Collection[int] = ()
    asked = 0

    def show(self, fits: int | None) -> None:
        """Let the cluster have so many nodes."""
        self.fits = fits
        scaling_policy.cluster_nodes = self._nodes  # type: ignore[attr-defined]

    def _nodes(self) -> list[Node]:
        self.asked += 1
        if self.fits is None:
            raise GetTimeoutError
        taken = dict.fromkeys(self.taken, 0.0)
        return [Node(f"n{n}", {"CPU": 1.0}, {"CPU": taken.get(n, 1.0)}) for n in range(self.fits)]

    def start(self, fits: int | None, fails: Exception | None = None) -> int:
        """Return how many workers are started where so many fit, 0 for none yet; the start may fail."""
        self.show(fits)
        decision = self.make_decision_for_non_running_worker_group()
        size = getattr(decision, "num_workers", 0)
        if size:
            following = ReschedulingState(ControllerError(fails)) if fails else RunningState()
            self.after_controller_state_update(SchedulingState(decision), following)
        return size

    def grow(
        self, fits: int | None, committed: bool = False, finished: bool = False, held: Collection[int] = (0, 0)
    ) -> Any:
        """Return what is decided about a healthy group where so many fit, None for nothing.

        ``held``: the number of the growth for which each rank holds its work in memory, 0 for none.
        """
        self.show(fits)
        self.shared.commit_count += committed
        status = WorkerGroupPollStatus({rank: WorkerStatus(running=not finished) for rank in range(len(held))})
        for rank, number in enumerate(held):
            status.worker_statuses[rank].position = Position(1.0, 0, 9, 9, True, held_for=number)
        decision = self.make_decision_for_running_worker_group(self.group, status)
        return None if isinstance(decision, NoopDecision) else decision


class Strikes:
    """The nodes that have too many strikes."""

    def __init__(self) -> None:
        self.struck: dict[str, str] = {}

    def nodes_to_leave_out(self) -> dict[str, str]:
        return self.struck

    def add(self, nodes: dict[str, str], count: int) -> None:
        assert count == FailureSettings().node_strikes
        self.struck |= nodes


class State(SimpleNamespace):
    """The part of the controller's state that the policies use."""

    def __init__(self, scaling: ScalingSettings | None = None, requester_id: str = "") -> None:
        self.waiting = []
        self.failures = {}
        self.settings = SimpleNamespace(
            scaling=scaling or ScalingSettings(max_workers=4), requester_id=requester_id, failures=FailureSettings()
        )
        super().__init__(
            commit_count=0,
            is_draining=False,
            budget=FailureWindow(0),
            commits=SimpleNamespace(newest="a commit"),
            loops=LoopWatch(FailureSettings(), lambda event: None),
            standbys=SimpleNamespace(release=lambda: None, assign=lambda *arguments: {}),
            keepers=SimpleNamespace(restored_point=None, failures=Counter()),
            skipped_steps=set(),
            strikes=Strikes(),
            left_out={},
            publish=self.waiting.append,
        )

    def policy(self) -> RunScalingPolicy:
        """Return the scaling policy of a controller with this state."""
        return RunScalingPolicy(scaling_config(self.settings.scaling), self)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch) -> State:
    """The controller's state."""
    found = State()
    monkeypatch.setattr(Cluster, "shared", found, raising=False)
    monkeypatch.setattr(scaling_policy, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(scaling_policy, "cluster_nodes", None)  # put back afterwards
    monkeypatch.setattr(scaling_policy, "remove_orphaned_placement_groups", lambda: 0)
    return found


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Later:
    """Lets seconds pass."""
    passed = []
    clock = SimpleNamespace(monotonic=lambda: 1000 + sum(passed), time=time.time, sleep=time.sleep)
    for module in (scaling_policy, budget):
        monkeypatch.setattr(module, "time", clock)
    return passed.append


def _policy(minimum: int = 1, maximum: int = 4, **more: float) -> Cluster:
    defaults = {"stability_delay_seconds": 0, "resize_patience_seconds": 0, "resize_check_interval_seconds": 1}
    settings = ScalingSettings(min_workers=minimum, max_workers=maximum, **{**defaults, **more})
    Cluster.shared.settings.scaling = settings
    policy = Cluster(scaling_config(settings), Cluster.shared)
    policy.group = _group(2)
    return policy


class Worker:
    """A worker on a node, and what it was told."""

    def __init__(self, node_id: str) -> None:
        self.metadata, self.told = SimpleNamespace(node_id=node_id), []

    def execute_async(self, function: Any, *arguments: Any) -> None:
        assert function is set_announced_growth
        self.told.extend(arguments)


def _group(size: int) -> SimpleNamespace:
    return SimpleNamespace(workers=[Worker(f"n{number}") for number in range(size)])


def _context(max_preemption_failures: int = -1) -> Any:
    """The part of a run's context that the policy reads."""
    failures = FailureConfig(max_preemption_failures=max_preemption_failures)
    return SimpleNamespace(run_config=RunConfig(failure_config=failures))


def test_training_starts_as_large_as_fits_between_minimum_and_maximum(state: State) -> None:
    assert [_policy(2, 4).start(fits) for fits in (1, 2, 3, 9, 4)] == [0, 2, 3, 4, 4]
    assert state.assumed_nodes == {"n0", "n1", "n2", "n3"}


def test_a_node_with_strikes_is_left_out_unless_too_few_workers_fit_on_the_others(state: State, later: Later) -> None:
    policy = _policy(2, 4)
    state.strikes.struck = {"n0": "it crashed"}
    assert policy.start(4) == 3
    assert policy.start(4) == 3
    assert [event.nodes for event in state.waiting] == [state.left_out] == [{"n0": "it crashed"}], "published once"
    policy.group = _group(3)
    assert policy.grow(4) is None  # while a group trains, no wait begins
    later(100.0)
    policy.taken = {1, 2}  # the group that has just ended seems to hold them still
    assert policy.start(4) == 0
    later(6.0)
    assert policy.start(2) == 0
    policy.taken = ()
    assert policy.start(2) == 2, "there is no other"
    assert [event.nodes for event in state.waiting if isinstance(event, NodesLeftOut)][1:] == [state.left_out] == [{}]


def test_a_straggler_is_replaced_at_a_commit_if_a_spare_node_is_there(state: State, later: Later) -> None:
    policy = _policy(2, 2)
    state.settings.failures = FailureSettings(on_straggler="replace")
    state.loops.stragglers.slow_nodes = lambda: {"n0": "slow"}
    for spare in (0, 1):
        later(2.0)
        assert policy.grow(2 + spare) is None  # the ranks are notified
        decision = policy.grow(2 + spare, committed=True)
        assert bool(decision) == bool(spare)
    assert (decision.num_workers, decision.reason) == (2, "commit")
    assert state.strikes.struck == state.left_out == {"n0": "slow"}
    state.settings.failures = FailureSettings()
    later(2.0)
    assert policy.grow(9, committed=True) is None, "by default, it is only reported"


def test_what_a_dead_driver_has_left_behind_is_taken_back_rather_than_to_start_smaller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = _policy()
    policy.taken = {0, 1, 2}

    def remove():
        policy.taken = ()
        return 1

    monkeypatch.setattr(scaling_policy, "remove_orphaned_placement_groups", remove)
    assert policy.start(4) == 4


def test_below_the_minimum_it_says_what_is_missing_once_in_a_while_but_not_in_the_first_moment(
    state: State, later: Later
) -> None:
    policy = _policy(3, 4)
    assert policy.start(1) == 0
    assert state.waiting == []  # what a lost group held is being given back
    later(3.0)
    assert [policy.start(1) for _ in range(3)] == [0, 0, 0]
    (event,) = state.waiting
    assert (event.possible_workers, event.min_workers, event.resources_per_worker) == (1, 3, {"CPU": 1.0})
    assert event.missing == "2 more worker(s) with CPU=1 each"
    assert event.since == pytest.approx(time.time() - 3, abs=1)
    later(11.0)
    assert policy.start(None) == 0
    assert state.waiting[1].missing == "an answer of the cluster"


def test_the_maximum_has_its_time_to_come_before_training_starts_smaller_but_after_a_loss_only_a_moment(
    later: Later,
) -> None:
    policy = _policy(wait_for_max_seconds=60)
    assert policy.start(2) == 0
    later(60.0)
    assert policy.start(2) == 2
    later(100.0)
    assert policy.grow(2) is None
    assert policy.start(1) == 0  # the lost group may give something back
    later(2.0)
    assert policy.start(1) == 1


def test_a_size_that_was_counted_and_not_placed_is_not_asked_for_again(later: Later) -> None:
    policy = _policy()
    assert policy.start(4, fails=WorkerGroupStartupTimeoutError(4)) == 4
    policy.group = _group(3)
    assert policy.grow(4) is policy.grow(4, committed=True) is None
    later(600.0)
    assert policy.grow(4) is None
    assert policy.grow(4, committed=True).num_workers == 4


@pytest.mark.parametrize(
    ("failure", "told", "retried"),
    [
        (WorkerGroupStartupTimeoutError(2), "room for 2 worker(s), which seemed free and was not", 2),
        (WorkerGroupStartupFailedError("a worker died"), "a successful start (the last one failed: a worker died)", 4),
    ],
)
def test_a_start_that_fails_is_told_bounded_and_tried_again_after_a_pause(
    state: State, later: Later, failure: Exception, told: str, retried: int
) -> None:
    policy = _policy(2, 4, capacity_timeout_seconds=4)
    policy.start(2, fails=failure)
    assert policy.start(4) == 0  # it pauses
    later(1.0)
    assert policy.start(4, fails=failure) == retried  # smaller only for want of room
    later(3.0)
    with pytest.raises(CapacityTimeoutError, match=re.escape(told)):
        policy.start(4)
    assert state.waiting[0].missing == told


def test_a_restart_leaves_out_what_has_only_just_come_unless_it_is_needed() -> None:
    policy, needy = _policy(stability_delay_seconds=60), _policy(3, stability_delay_seconds=60)
    assert [policy.start(fits) for fits in (2, 3)] == [2, 2]  # what is there at first counts
    assert [needy.start(fits) for fits in (2, 3)] == [0, 3]


def test_a_healthy_group_grows_at_its_next_commit_and_is_told_before(later: Later) -> None:
    policy = _policy()
    assert policy.grow(2, committed=True) is None
    assert policy.grow(4) is None
    assert policy.group.workers[0].told == []  # it looks once in an interval
    later(1.0)
    assert [policy.grow(4) for _ in range(3)] == [None] * 3
    assert [worker.told for worker in policy.group.workers] == [[1], [1]]
    decision = policy.grow(4, committed=True)
    assert (decision.num_workers, decision.reason) == (4, "commit")


def test_a_healthy_group_grows_without_a_commit_once_all_ranks_hold_their_work_in_memory_for_this_growth() -> None:
    policy = _policy()
    assert policy.grow(4, held=(1, 1)) is None  # it is announced just now
    assert policy.grow(4, held=(1, 0)) is None
    decision = policy.grow(4, held=(1, 1))
    assert (decision.num_workers, decision.reason) == (4, "memory")
    policy.start(4)
    assert policy.grow(5, held=(1, 1)) is None
    assert policy.grow(5, held=(1, 1)) is None, "that was for the growth before"


def test_a_commit_while_the_cluster_does_not_answer_is_used_when_it_does() -> None:
    policy = _policy()
    assert policy.grow(4) is None
    assert policy.grow(None, committed=True) is None
    assert policy.grow(4).reason == "commit"  # the ranks have stood still since then


def test_a_commit_is_of_no_use_to_a_growth_that_was_not_announced_nor_to_another_group(
    state: State, later: Later
) -> None:
    policy = _policy()
    assert policy.grow(4, committed=True) is None
    later(1.0)
    assert policy.grow(4) is None  # its ranks have trained on since then
    policy.start(2)
    state.commit_count += 1
    assert policy.grow(4) is None  # it was announced to the group before


def test_a_cluster_that_does_not_answer_is_asked_about_growth_once_in_an_interval(
    later: Later,
) -> None:
    policy = _policy()
    for seconds in (0.0, 0.0, 1.0):
        later(seconds)
        assert policy.grow(None) is None
    assert policy.asked == 2


def test_a_worker_that_cannot_be_told_of_a_growth_does_not_end_the_training() -> None:
    policy = _policy()
    policy.group.workers[0].execute_async = lambda *arguments: 1 / 0
    assert policy.grow(4) is None


def test_a_growth_is_called_off_when_the_capacity_goes_again_and_needs_no_commit_when_patience_is_over(
    state: State, later: Later
) -> None:
    policy = _policy(resize_patience_seconds=90)
    policy.grow(4)
    assert policy.grow(2, committed=True) is None
    assert policy.group.workers[0].told == [1, 0]
    later(1.0)
    assert policy.grow(3) is None
    later(90.0)
    state.commits.newest = None
    assert policy.grow(4) is None  # it would throw away all work
    later(1.0)
    state.commits.newest = "a commit"
    decision = policy.grow(4)
    assert (decision.reason, decision.waited_seconds) == ("patience", 91)


def test_a_group_grows_and_restarts_no_further_than_its_session_has_samples_for_which_is_said_once(
    state: State, caplog: pytest.LogCaptureFixture
) -> None:
    wide = _policy(1, 8)
    assert wide.start(1) == 1
    with caplog.at_level(logging.WARNING):
        state.loops.most_workers = 2
        wide.group = _group(1)
        assert wide.grow(8) is None
        assert wide.grow(8, committed=True).num_workers == 2
        wide.group = _group(2)
        assert wide.grow(8, committed=True) is None
        assert wide.start(8) == 2  # after a failure
    [warning] = caplog.messages
    assert warning.startswith("At most 2 worker(s) will train, since a step has no samples or shards for more")
    assert _policy(1, 2).start(8) == 2
    assert caplog.messages == [warning]  # max_workers=2 needs no warning


def test_a_group_never_shrinks_and_is_left_alone_when_a_rank_has_finished() -> None:
    policy = _policy()
    policy.group = _group(3)
    assert policy.grow(1) is policy.grow(1, committed=True) is None
    assert policy.grow(4, finished=True) is None
    assert policy.group.workers[0].told == []


@pytest.mark.parametrize(("each", "total"), [(0.2, 4), (0.6, 3)])
def test_what_is_asked_for_fits_also_by_a_coordinator_that_counts_in_floating_point(each: float, total: float) -> None:
    policy = State(ScalingSettings(resources_per_worker={"CPU": each})).policy()
    asked, left, bundles = policy.scaling_config._resources_per_worker_not_none["CPU"], total, 0
    while left >= asked:
        left, bundles = left - asked, bundles + 1
    assert bundles == int(round(total * 10) // round(each * 10))


class _InThisProcess:
    """Ray's coordinator without an actor: what is called remotely is called at once."""

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._coordinator, name))


def test_the_policy_reserves_under_the_runs_own_id_and_sees_a_new_node_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinators = scaling_policy.rays.autoscaling_coordinator_client
    monkeypatch.setattr(coordinators, "AUTOSCALING_REQUESTS_EXPIRE_TIME_S", 180)
    nodes: list[dict[str, Any]] = []
    coordinator = ray_compatibility._AutoscalingCoordinatorActor(lambda: 0.0, lambda *_, **__: None, lambda: nodes)
    client = coordinators.TrainAutoscalingCoordinatorClient
    monkeypatch.setattr(client, "_autoscaling_coordinator", _InThisProcess(coordinator))
    monkeypatch.setattr(ray_compatibility.ray, "get", lambda answer, timeout: answer)
    policy = State(requester_id="run-x").policy()
    policy.after_controller_start(_context())
    assert list(coordinator._ongoing_reqs) == ["run-x"]
    assert coordinator._ongoing_reqs["run-x"].expiration_time == 60  # two renewals fit in
    monkeypatch.setattr(scaling_policy, "cluster_nodes", lambda: [Node("n0", {"CPU": 4.0}, {"CPU": 4.0})])
    assert policy._capacity(0.0, {})[0] == 0
    nodes.append({"NodeID": "n0", "Alive": True, "Resources": {"CPU": 2.0}, "Labels": {}})
    assert policy._capacity(0.0, {})[0] == 2  # as many as are reserved


def test_workers_are_polled_soon_after_a_report_unless_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    found = TrainController.__new__(TrainController)
    found._health_check_interval_s = found._longest_interval = 0.1
    statuses = {}

    async def poll(self):
        return SimpleNamespace(worker_statuses=statuses)

    monkeypatch.setattr(controller.rays_controller.TrainController, "_poll_workers", poll)

    def interval(workers, report=None):
        statuses.clear()
        statuses.update({rank: WorkerStatus(running=True, training_report=report) for rank in range(workers)})
        asyncio.run(found._poll_workers())
        return round(found._health_check_interval_s, 4)

    report = object()
    assert [interval(32), interval(32, report), interval(32, report)] == [0.1, 0.01, 0.01]
    assert [interval(32) for _ in range(7)] == [0.015, 0.0225, 0.0338, 0.0506, 0.0759, 0.1, 0.1]
    assert interval(33, report) == 0.1  # each poll costs the controller time


def test_a_run_that_is_alone_on_its_cluster_reserves_nothing_and_boots_no_coordinator() -> None:
    alone = State().policy()
    alone.after_controller_start(_context())
    alone.after_controller_state_update(RunningState(), RunningState())
    assert alone._coordinator_client is None


@pytest.mark.parametrize(
    ("seconds", "free", "max_preemption_failures", "is_told"),
    [
        (3600.0, 1.0, -1, True),  # another group can start
        (3600.0, 0.0, -1, False),
        (59.0, 0.0, -1, True),  # time to save
        (0.0, 0.0, -1, False),  # without a deadline
        (0.0, 1.0, 0, False),  # the training would end
        (59.0, 1.0, 0, True),
    ],
)
def test_workers_learn_of_a_drain_when_another_group_can_start_or_shortly_before_its_deadline(
    monkeypatch: pytest.MonkeyPatch, seconds: float, free: float, max_preemption_failures: int, is_told: bool
) -> None:
    monkeypatch.setattr(preemption_callback, "PreemptionWatcher", preemption.PreemptionWatcher)  # put back afterwards
    monkeypatch.setattr(preemption.PreemptionWatcher, "_build_failure_domain_map", staticmethod(dict))
    monkeypatch.setattr(preemption.PreemptionWatcher, "_watch_loop", lambda self: None)
    drained = {"n0": int(1000 * (time.time() + seconds)) if seconds else 0, "of nobody": 1}
    monkeypatch.setattr(preemption, "_get_draining_nodes", lambda: drained)
    nodes = [
        Node("n1", {"CPU": 1.0}, {"CPU": 0.0}),
        Node("n2", {"CPU": 1.0}, {"CPU": free}),
    ]
    monkeypatch.setattr(scaling_policy, "cluster_nodes", lambda: nodes)
    policy = State(ScalingSettings(min_workers=2, max_workers=2)).policy()
    policy.after_controller_start(_context(max_preemption_failures))
    kind = cloudpickle.loads(cloudpickle.dumps(preemption_callback.PreemptionWatcher))  # as for an actor
    notices = []
    worker = SimpleNamespace(mark_preempt=SimpleNamespace(remote=notices.append))
    watcher = kind({"n0": [0], "n1": [1]}, worker_actors_by_rank={0: worker})
    for _ in range(3):
        watcher._poll_once()
    assert [notice.preempted_node_to_ranks for notice in notices] == [{"n0": [0]}] * is_told
    if not is_told:
        drained["n0"] = int(1000 * (time.time() + 30))
        watcher._poll_once()
        assert len(notices) == 1  # it is looked at again


def test_what_is_reserved_is_renewed_during_a_drain_too_and_not_after_the_end() -> None:
    policy, renewed = State(requester_id="run-x").policy(), []
    policy._maybe_send_resource_request = lambda: renewed.append("in time")
    for current in (PreemptingState(None, 0.0), RunningState(), FinishedState()):
        policy.after_controller_state_update(current, current)
    assert renewed == ["in time"] * 2


@pytest.mark.parametrize(
    ("after", "trained", "commits", "decision"),
    [
        (60, 70, True, FailureDecision.RETRY),
        (60, 50, True, FailureDecision.RAISE),
        (60, 70, False, FailureDecision.RAISE),
        (0, 1e9, True, FailureDecision.RAISE),
    ],
)
def test_a_failure_is_forgiven_by_training_that_is_committed_and_by_no_other_time(
    state: State,
    later: Later,
    after: float,
    trained: float,
    commits: bool,
    decision: FailureDecision,
) -> None:
    state.budget = FailureWindow(after)
    failure_policy = RunFailurePolicy(FailureConfig(max_failures=1, max_preemption_failures=0), state)
    failure = WorkerGroupError("a rank failed", {0: ValueError("nan")})

    def train(seconds):
        state.budget.begin_group()
        later(seconds)
        state.budget.commit()

    train(1000)
    assert failure_policy.make_decision(failure) is FailureDecision.RETRY
    assert state.failures_left == 0
    state.budget.end_group()
    later(1000)  # waits for capacity
    train(trained if commits else 1)
    later(0 if commits else trained)
    assert failure_policy.make_decision(failure) is decision
    state.is_draining = True
    assert failure_policy.make_decision(failure) is FailureDecision.RAISE  # preemptions are counted apart


def test_a_failure_without_a_rank_as_of_rays_detector_of_nccl_hangs_counts_and_is_told(state: State) -> None:
    policy = RunFailurePolicy(FailureConfig(max_failures=1), state)
    hang = WorkerGroupError("1 of 2 communicators have a collective mismatch\nTo debug: …", {})
    decisions = [policy.make_decision(hang) for _ in range(2)]
    assert decisions == [FailureDecision.RETRY, FailureDecision.RAISE]
    said = "the worker group: WorkerGroupError: 1 of 2 communicators have a collective mismatch"
    assert describe_causes(causes_of(state.failures)) == [said]
    event = final_event_of_error(hang, LocalStorageSettings(path="/runs"))
    assert (event.outcome, event.message) == (
        Outcome.USER_ERROR,
        f"the train loop failed more often than max_failures allows: {said}",
    )


def test_a_group_that_fails_before_its_first_step_from_a_recovery_point_does_not_count(state: State) -> None:
    failure_policy = RunFailurePolicy(FailureConfig(max_failures=0), state)
    failure = WorkerGroupError("a rank failed", {0: RecoveryPointError("damaged")})
    state.keepers.restored_point = StateHeader("run", 1, 1, 7, 1, 0, 0, 0, 0)
    assert failure_policy.make_decision(failure) is FailureDecision.RETRY
    assert state.keepers.failures == {state.keepers.restored_point: 1}, "with three, the checkpoint is restored"
    state.loops.has_stepped = True
    assert failure_policy.make_decision(failure) is FailureDecision.RAISE


def test_a_loop_that_saves_when_it_starts_and_then_fails_at_the_same_step_is_never_forgiven(
    later: Later,
) -> None:
    found, counts = FailureWindow(3600), []
    for _ in range(5):
        found.begin_group()
        found.commit()
        later(4000)
        counts.append(found.record_failure(is_preemption=False))
        found.end_group()
    assert counts == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("fails", [True, False])
def test_a_lost_group_gives_back_what_it_holds_before_the_next_is_decided(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    said = []

    def shut_down():
        said.append("ended")
        if fails:
            raise RuntimeError("the cluster does not answer")

    controller = TrainController.__new__(TrainController)
    controller._worker_group = SimpleNamespace(shutdown=shut_down)
    controller._scaling_policy = SimpleNamespace(
        make_decision_for_non_running_worker_group=lambda: said.append("decided") or NoopDecision()
    )
    controller._run_attempt_id = "1"
    following = controller._make_and_handle_scaling_decision_for_non_running_worker_group("RESTARTING").next_state
    assert (said, following, controller.get_worker_group()) == (["ended", "decided"], "RESTARTING", None)


def _starting_group(
    state: State, monkeypatch: pytest.MonkeyPatch, living: Collection[str], start: Callable[[Any], object]
) -> tuple[RunWorkerGroup, list[str]]:
    """Return a worker group whose start was decided from the nodes a and b, and what of it is ended."""
    ended = []
    handle = SimpleNamespace(shutdown=lambda: ended.append("placement group"))
    state.assumed_nodes = {"a", "b"}
    state.mark_phase = lambda phase: None
    monkeypatch.setattr(worker_group.WorkerGroup, "_start", start)
    monkeypatch.setattr(worker_group.WorkerGroup, "_create_placement_group", lambda *arguments: handle)
    monkeypatch.setattr(worker_group, "cluster_nodes", lambda: [Node(name, {}, {}) for name in living])
    monkeypatch.setattr(worker_group, "_NODES_SECONDS", 0.001)
    group = RunWorkerGroup.__new__(RunWorkerGroup)
    group.state = state  # type: ignore[assignment]
    group._worker_group_state = SimpleNamespace(shutdown=lambda: ended.append("workers"))
    group._worker_group_context = SimpleNamespace(num_workers=2)
    group._world_rank_to_ongoing_poll = {}
    return group, ended


_DIED = RayActorError()
_WRAPPED = WorkerGroupStartupFailedError("At least one of the worker actors failed to initialize.")
_WRAPPED.__cause__ = _DIED


@pytest.mark.parametrize("living", ["ab", "a"])
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (_DIED, WorkerGroupError),
        (_WRAPPED, WorkerGroupError),
        (ActorUnschedulableError("no place"), WorkerGroupError),
        (WorkerGroupStartupTimeoutError(2), WorkerGroupStartupTimeoutError),
    ],
)
def test_a_start_leaves_no_worker_behind_and_fails_for_a_lost_node_while_a_dead_worker_is_a_failure_of_the_group(
    state: State, monkeypatch: pytest.MonkeyPatch, error: Exception, living: str, raised: type[Exception]
) -> None:
    def fail(self):
        raise error

    group, ended = _starting_group(state, monkeypatch, living, fail)
    with pytest.raises(raised if living == "ab" else WorkerGroupStartupFailedError) as caught:
        group._start()
    if isinstance(caught.value, WorkerGroupError):
        assert caught.value.worker_failures == dict.fromkeys((0, 1), error.__cause__ or error)
    assert ended == ["workers"]
    assert not group.has_started()


@pytest.mark.parametrize(
    ("living", "placed_on", "is_given_up"), [("ab", "", False), ("a", "", True), ("a", "a", False)]
)
def test_a_start_is_given_up_when_a_node_goes_that_it_was_decided_from_or_is_placed_on(
    state: State, monkeypatch: pytest.MonkeyPatch, living: str, placed_on: str, is_given_up: bool
) -> None:
    def start(self):
        self._create_placement_group(scaling_config(ScalingSettings()), None)
        if placed_on:
            self._create_workers(0, None, {})
        time.sleep(0.2)

    bundles = dict(enumerate(placed_on))
    monkeypatch.setattr(worker_group, "placement_group_table", lambda of: {"bundles_to_node_id": bundles})
    group, ended = _starting_group(state, monkeypatch, living, start)
    group._start()
    assert ended == ["placement group"] * is_given_up
    assert not [thread for thread in threading.enumerate() if thread.name.endswith("_watch_nodes")]
