"""The scaling policy before a cluster that the test decides on."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
from ray.exceptions import GetTimeoutError, RayActorError
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision
from ray.train.v2._internal.execution.worker_group.poll import WorkerGroupPollStatus, WorkerStatus

from prefect_elastic_train.core.settings import ScalingSettings
from prefect_elastic_train.elastic import callbacks, policy, worker_group
from prefect_elastic_train.elastic import policy as policy_module
from prefect_elastic_train.elastic.capacity import Node
from prefect_elastic_train.elastic.failures import CapacityTimeoutError
from prefect_elastic_train.elastic.policy import GrowthDecision, RunScalingPolicy
from prefect_elastic_train.elastic.sizing import Reason
from prefect_elastic_train.elastic.translate import scaling_config
from prefect_elastic_train.loop.notice import announce


class Cluster(RunScalingPolicy):
    """The policy before nodes of one CPU each."""

    fits: int | None = 0
    taken: Collection[int] = ()

    def _maybe_send_resource_request(self) -> None:
        """Nobody is there to ask."""

    def _get_nodes(self) -> list[Node]:
        assert self.fits is not None
        return [
            Node(f"n{number}", total={"CPU": 1.0}, available={"CPU": 0.0 if number in self.taken else 1.0})
            for number in range(self.fits)
        ]

    def _get_reserved_resources(self) -> dict[str, dict[str, float]] | None:
        return None if self.fits is None else {"any": {"CPU": 100.0}}


class Callback(SimpleNamespace):
    """What the policy sees of the callback in its controller."""

    def __init__(self) -> None:
        super().__init__(groups_started=0, lost=0, has_checkpoint=True, commits=0, waiting=[])

    def release_group(self) -> int:
        lost, self.lost = self.lost, 0
        return lost

    def take_commit(self) -> bool:
        committed, self.commits = self.commits > 0, 0
        return committed

    def waiting_for_capacity(self, possible: int, missing: str, since: float) -> None:
        self.waiting.append((possible, missing))


@pytest.fixture
def callback(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callback]:
    """The callback that the policy meets."""
    found = Callback()
    monkeypatch.setattr(callbacks, "_current", found)
    return found


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "_REST_SECONDS", 0.001)
    monkeypatch.setattr(policy, "_LOOK_SECONDS", 0.0)


@pytest.mark.parametrize(("error", "told"), [(GetTimeoutError("late"), False), (RayActorError(), True)])
def test_a_late_answer_about_a_reservation_is_no_warning(
    error: Exception, told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def ask(**_: Any) -> None:
        raise error

    coordinator = SimpleNamespace(request_resources=SimpleNamespace(remote=ask))
    monkeypatch.setattr(policy_module._Reservation, "_autoscaling_coordinator", coordinator)
    policy_module._Reservation("run-x").send_resource_request(scaling_config(ScalingSettings()), 1)
    assert ("Could not reserve resources" in caplog.text) is told


def _policy(minimum: int, maximum: int, interval: float = 0.01, **patience: float) -> Cluster:
    settings = ScalingSettings(
        min_workers=minimum,
        max_workers=maximum,
        resize_check_interval_seconds=interval,
        **{"stability_delay_seconds": 0, "resize_patience_seconds": 0, **patience},
    )
    return Cluster(scaling_config(settings), "run-x", settings)


class Worker:
    """A worker on a node, and what it was told."""

    def __init__(self, node_id: str) -> None:
        self.metadata = SimpleNamespace(node_id=node_id)
        self.told: list[Any] = []

    def execute_async(self, function: Any, *arguments: Any) -> None:
        assert function is announce
        self.told.extend(arguments)


def _group(size: int, started_at: float = 1.0) -> SimpleNamespace:
    workers = [Worker(f"n{number}") for number in range(size)]
    return SimpleNamespace(workers=workers, num_workers=size, start_time=started_at)


def _healthy(size: int) -> WorkerGroupPollStatus:
    return WorkerGroupPollStatus({rank: WorkerStatus(running=True) for rank in range(size)})


def test_training_starts_as_large_as_fits_between_minimum_and_maximum() -> None:
    for fits, size in ((2, 2), (3, 3), (4, 4), (9, 4)):
        policy = _policy(2, 4)
        policy.fits = fits
        decision = policy.make_decision_for_non_running_worker_group()
        assert isinstance(decision, ResizeDecision)
        assert decision.num_workers == size


@pytest.fixture
def told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait is told of in its first moment."""
    monkeypatch.setattr(policy_module, "_WORTH_TELLING_SECONDS", 0.0)


def test_a_wait_that_is_over_in_a_moment_is_not_told(callback: Callback) -> None:
    policy = _policy(2, 4)
    policy.fits = 1
    assert isinstance(policy.make_decision_for_non_running_worker_group(), NoopDecision)
    policy.fits = 2
    policy._looked_at = -1.0
    assert isinstance(policy.make_decision_for_non_running_worker_group(), ResizeDecision)
    assert callback.waiting == [], "what a lost group held was being given back"


@pytest.mark.usefixtures("told_at_once")
def test_below_the_minimum_it_waits_and_says_what_is_missing_once_in_a_while(callback: Callback) -> None:
    policy = _policy(3, 4)
    policy.fits = 1
    for _ in range(5):
        assert isinstance(policy.make_decision_for_non_running_worker_group(), NoopDecision)
    ((possible, missing),) = callback.waiting
    assert possible == 1
    assert "2 more worker(s) with CPU=1 each" in missing


@pytest.mark.usefixtures("told_at_once")
def test_a_cluster_that_does_not_answer_is_waited_for(callback: Callback) -> None:
    policy = _policy(1, 4)
    policy.fits = None
    assert isinstance(policy.make_decision_for_non_running_worker_group(), NoopDecision)
    assert "answer" in callback.waiting[0][1]


def test_a_wait_for_capacity_that_is_bounded_ends_with_what_is_missing() -> None:
    policy = _policy(2, 4, capacity_timeout_seconds=0.2)
    policy.fits = 1
    assert isinstance(policy.make_decision_for_non_running_worker_group(), NoopDecision)
    time.sleep(0.2)
    with pytest.raises(CapacityTimeoutError, match=r"1 more worker.*capacity_timeout_seconds"):
        policy.make_decision_for_non_running_worker_group()


def test_the_maximum_has_its_time_to_come_before_training_starts_smaller() -> None:
    policy = _policy(1, 4, wait_for_max_seconds=0.3)
    policy.fits = 2
    started = time.monotonic()
    decision: Any = policy.make_decision_for_non_running_worker_group()
    assert isinstance(decision, NoopDecision)
    while isinstance(decision, NoopDecision) and time.monotonic() - started < 5:
        decision = policy.make_decision_for_non_running_worker_group()
    assert time.monotonic() - started >= 0.3
    assert decision.num_workers == 2


def test_a_restart_after_a_loss_does_not_wait_for_the_maximum() -> None:
    policy = _policy(1, 4, wait_for_max_seconds=60)
    policy.fits = 4
    assert isinstance(policy.make_decision_for_non_running_worker_group(), ResizeDecision)
    policy.fits = 2
    again: Any = policy.make_decision_for_non_running_worker_group()
    assert again.num_workers == 2


def test_a_restart_waits_a_moment_for_what_the_lost_group_gives_back(callback: Callback) -> None:
    policy = _policy(2, 4)
    policy.fits = 4
    assert isinstance(policy.make_decision_for_non_running_worker_group(), ResizeDecision)
    callback.groups_started, callback.lost = 1, 4
    policy.taken = (0, 1)
    assert isinstance(policy.make_decision_for_non_running_worker_group(), NoopDecision)
    policy.taken = ()
    decision: Any = policy.make_decision_for_non_running_worker_group()
    assert decision.num_workers == 4


def test_a_size_that_was_counted_and_not_placed_is_not_asked_for_again(
    callback: Callback, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_group, "_failure", WorkerGroupStartupTimeoutError(4))
    policy = _policy(1, 4)
    policy.fits = 4
    policy.make_decision_for_non_running_worker_group()
    second: Any = policy.make_decision_for_non_running_worker_group()
    assert second.num_workers == 3
    callback.groups_started = 1
    group = _group(3)
    callback.commits = 1
    assert isinstance(policy.make_decision_for_running_worker_group(group, _healthy(3)), NoopDecision)


def test_a_smallest_group_that_is_never_placed_is_told_and_bounded(
    callback: Callback, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = _policy(2, 4, capacity_timeout_seconds=0.3)
    policy.fits = 2
    assert isinstance(policy.make_decision_for_non_running_worker_group(), ResizeDecision)
    monkeypatch.setattr(worker_group, "_failure", WorkerGroupStartupTimeoutError(2))
    assert isinstance(policy.make_decision_for_non_running_worker_group(), NoopDecision), "it pauses"
    time.sleep(0.3)
    with pytest.raises(CapacityTimeoutError, match="looked free and was not"):
        policy.make_decision_for_non_running_worker_group()
    assert "looked free and was not" in callback.waiting[0][1]


def test_a_group_that_lost_a_node_before_it_was_placed_may_be_as_large_again(
    callback: Callback, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = _policy(1, 4)
    policy.fits = 4
    policy.make_decision_for_non_running_worker_group()
    monkeypatch.setattr(worker_group, "_failure", WorkerGroupStartupTimeoutError(4))
    policy.fits = 3
    second: Any = policy.make_decision_for_non_running_worker_group()
    assert second.num_workers == 3
    callback.groups_started, callback.lost, policy.fits = 1, 3, 4
    third: Any = policy.make_decision_for_non_running_worker_group()
    assert third.num_workers == 4


def test_a_group_that_does_not_start_is_told_and_tried_again_after_a_pause(
    callback: Callback, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = _policy(2, 4)
    policy.fits = 4
    policy.make_decision_for_non_running_worker_group()
    monkeypatch.setattr(worker_group, "_failure", WorkerGroupStartupFailedError("a worker died"))
    assert isinstance(policy.make_decision_for_non_running_worker_group(), NoopDecision)
    assert "a worker died" in callback.waiting[0][1]
    time.sleep(1.1)
    again: Any = policy.make_decision_for_non_running_worker_group()
    assert again.num_workers == 4, "not for want of room"


def test_what_goes_wrong_in_a_look_before_a_start_does_not_end_the_training(
    callback: Callback, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = _policy(1, 4)
    monkeypatch.setattr(policy, "_get_nodes", lambda: 1 / 0)
    assert isinstance(policy.make_decision_for_non_running_worker_group(), NoopDecision)


@pytest.mark.usefixtures("told_at_once")
def test_free_nodes_that_are_reserved_for_another_training_are_told_as_such(
    callback: Callback, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = _policy(2, 4)
    policy.fits = 4
    monkeypatch.setattr(policy, "_get_reserved_resources", lambda: {"any": {"CPU": 1.0}})
    assert isinstance(policy.make_decision_for_non_running_worker_group(), NoopDecision)
    assert "reserves what is free for another training" in callback.waiting[0][1]


def test_a_restart_leaves_out_what_has_only_just_come(callback: Callback) -> None:
    policy = _policy(1, 4, stability_delay_seconds=60)
    policy.fits = 2
    first: Any = policy.make_decision_for_non_running_worker_group()
    assert first.num_workers == 2, "what is there at first counts"
    callback.groups_started, callback.lost = 1, 2
    policy.fits = 3
    second: Any = policy.make_decision_for_non_running_worker_group()
    assert second.num_workers == 2
    needy = _policy(3, 4, stability_delay_seconds=60)
    needy.fits = 2
    assert isinstance(needy.make_decision_for_non_running_worker_group(), NoopDecision)
    needy.fits = 3
    third: Any = needy.make_decision_for_non_running_worker_group()
    assert third.num_workers == 3, "without it, there would not be enough"


def test_a_healthy_group_grows_at_its_next_commit_and_is_told_before(callback: Callback) -> None:
    policy = _policy(1, 4)
    policy.fits = 2
    group = _group(2)
    assert isinstance(policy.make_decision_for_running_worker_group(group, _healthy(2)), NoopDecision)
    policy.fits = 4
    time.sleep(0.02)
    for _ in range(3):
        assert isinstance(policy.make_decision_for_running_worker_group(group, _healthy(2)), NoopDecision)
    assert [worker.told for worker in group.workers] == [[1], [1]]
    callback.commits = 1
    decision = policy.make_decision_for_running_worker_group(group, _healthy(2))
    assert isinstance(decision, GrowthDecision)
    assert (decision.num_workers, decision.reason) == (4, Reason.COMMIT)


def test_a_commit_while_the_cluster_does_not_answer_is_used_when_it_does(callback: Callback) -> None:
    policy = _policy(1, 4)
    policy.fits, group = 4, _group(2)
    assert isinstance(policy.make_decision_for_running_worker_group(group, _healthy(2)), NoopDecision)
    policy.fits, callback.commits = None, 1
    assert isinstance(policy.make_decision_for_running_worker_group(group, _healthy(2)), NoopDecision)
    policy.fits = 4
    decision: Any = policy.make_decision_for_running_worker_group(group, _healthy(2))
    assert decision.reason is Reason.COMMIT, "the ranks have stood still since then"


def test_a_growth_is_called_off_when_the_capacity_goes_again(callback: Callback) -> None:
    policy = _policy(1, 4)
    policy.fits = 4
    group = _group(2)
    policy.make_decision_for_running_worker_group(group, _healthy(2))
    policy.fits = 2
    callback.commits = 1
    assert isinstance(policy.make_decision_for_running_worker_group(group, _healthy(2)), NoopDecision)
    assert group.workers[0].told == [1, 0]


def test_a_loop_that_does_not_commit_is_resized_when_patience_is_over(callback: Callback) -> None:
    policy = _policy(1, 4, resize_patience_seconds=0.2)
    policy.fits = 4
    group = _group(2)
    started = time.monotonic()
    decision: Any = NoopDecision()
    while isinstance(decision, NoopDecision) and time.monotonic() - started < 5:
        decision = policy.make_decision_for_running_worker_group(group, _healthy(2))
    assert decision.reason is Reason.PATIENCE
    assert decision.waited_seconds >= 0.2


def test_a_group_is_left_alone_when_a_rank_has_finished(callback: Callback) -> None:
    policy = _policy(1, 4)
    policy.fits = 4
    callback.commits = 1
    status = WorkerGroupPollStatus({0: WorkerStatus(running=True), 1: WorkerStatus(running=False)})
    assert isinstance(policy.make_decision_for_running_worker_group(_group(2), status), NoopDecision)


def test_a_healthy_group_never_shrinks(callback: Callback) -> None:
    policy = _policy(1, 4)
    policy.fits = 1
    callback.commits = 1
    assert isinstance(policy.make_decision_for_running_worker_group(_group(3), _healthy(3)), NoopDecision)


def test_what_goes_wrong_in_a_growth_decision_does_not_end_the_training(callback: Callback) -> None:
    policy = _policy(1, 4)
    broken: Any = object()
    assert isinstance(policy.make_decision_for_running_worker_group(broken, broken), NoopDecision)


def test_the_policy_travels_to_the_controller() -> None:
    settings = ScalingSettings(max_workers=4, wait_for_max_seconds=5)
    config = scaling_config(settings)
    travelled = cloudpickle.loads(cloudpickle.dumps(RunScalingPolicy(config, "run-x", settings)))
    assert travelled._run_requester_id == "run-x"
    assert travelled.scaling_config.max_workers == 4
    assert travelled._settings.wait_for_max_seconds == 5.0
