"""What runs in the cluster, as far as it needs no cluster: translation, scaling decisions, callbacks."""

from __future__ import annotations

import inspect
import pickle
import time
from collections.abc import Iterator

import pytest
from pyarrow import fs
from ray.exceptions import ActorDiedError
from ray.train import Checkpoint
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.controller.state import InitializingState, PreemptingState, RunningState
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2._internal.execution.scaling_policy import ResizeDecision
from ray.train.v2._internal.execution.training_report import _TrainingReport
from ray.train.v2._internal.execution.worker_group.poll import WorkerGroupPollStatus, WorkerStatus
from ray.train.v2.api.config import FailureConfig
from ray.train.v2.api.exceptions import WorkerGroupError
from ray.train.v2.api.preemption import PreemptionInfo

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.bounds import plain_metrics
from prefect_elastic_train.core.checkpoint_names import physical_name
from prefect_elastic_train.core.outcomes import StorageFaultError
from prefect_elastic_train.core.settings import CheckpointSettings, FailureSettings, ScalingSettings
from prefect_elastic_train.driver.relay import EventReceiver
from prefect_elastic_train.elastic import callbacks, loop_watch
from prefect_elastic_train.elastic.callbacks import RunCallback
from prefect_elastic_train.elastic.checkpoints import readable, run_filesystem
from prefect_elastic_train.elastic.failures import storage_fault
from prefect_elastic_train.elastic.loop_state import in_report, stalling, take_stall
from prefect_elastic_train.elastic.policy import GrowthDecision, RunFailurePolicy
from prefect_elastic_train.elastic.sizing import Reason
from prefect_elastic_train.elastic.translate import checkpoint_config, failure_config, run_config, scaling_config
from prefect_elastic_train.elastic.worker_group import RunWorkerGroup
from prefect_elastic_train.runs import layout
from prefect_elastic_train.storage.retries import Waits
from prefect_elastic_train.storage.store import LocalRunStore
from tests.support.processes import wait_for
from tests.unit.support import Training, begin


@pytest.mark.parametrize("workers", [(1, 1), (2, 2), (1, 8)])
def test_scaling_is_always_elastic_also_when_the_minimum_is_the_maximum(workers: tuple[int, int]) -> None:
    config = scaling_config(ScalingSettings(min_workers=workers[0], max_workers=workers[1]))
    assert config.num_workers == workers
    assert config.elasticity_enabled
    assert (config.min_workers, config.max_workers) == workers


def test_every_field_of_scaling_reaches_ray() -> None:
    settings = ScalingSettings(
        min_workers=2,
        max_workers=4,
        accelerator="gpu",
        resources_per_worker={"CPU": 3, "GPU": 2},
        resize_check_interval_seconds=7,
        placement_strategy="SPREAD",
        label_selector={"market-type": "spot"},
        accelerator_type="A100",
    )
    config = scaling_config(settings)
    assert config.use_gpu
    assert not config.use_tpu
    assert config.resources_per_worker == {"CPU": 3, "GPU": 2}
    assert config.elastic_resize_monitor_interval_s == 7
    assert config.placement_strategy == "SPREAD"
    assert config.label_selector == {"market-type": "spot"}
    assert config.accelerator_type == "A100"
    tpu = scaling_config(
        ScalingSettings(min_workers=4, max_workers=4, accelerator="tpu", topology="4x4", accelerator_type="TPU-V6E")
    )
    assert tpu.use_tpu
    assert tpu.topology == "4x4"


def test_a_worker_gets_one_of_its_accelerator_by_default() -> None:
    assert scaling_config(ScalingSettings())._resources_per_worker_not_none == {"CPU": 1}
    assert scaling_config(ScalingSettings(accelerator="gpu"))._resources_per_worker_not_none["GPU"] == 1


def test_budgets_and_checkpoints_reach_ray() -> None:
    failures = failure_config(
        FailureSettings(
            max_failures=7,
            max_preemption_failures=5,
            preemption_grace_seconds=3,
            relax_collectives_on_preemption=True,
        )
    )
    assert failures.max_failures == 7
    assert failures.max_preemption_failures == 5
    assert failures.preemption_grace_s == 3
    assert failures.relax_collectives_on_preemption
    checkpoints = checkpoint_config(CheckpointSettings(keep=3, score_attribute="loss", score_order="min"))
    assert checkpoints.num_to_keep == 3
    assert checkpoints.checkpoint_score_attribute == "loss"
    assert checkpoints.checkpoint_score_order == "min"
    assert checkpoint_config(CheckpointSettings()).num_to_keep is None
    assert checkpoint_config(CheckpointSettings()).checkpoint_score_attribute is None


def test_ray_is_told_where_the_run_is_and_through_which_filesystem() -> None:
    filesystem = run_filesystem(LocalRunStore("/runs/mnist"), 1)
    config = run_config(
        name="mnist",
        storage_path="/runs",
        storage_filesystem=filesystem,
        failures=FailureSettings(),
        checkpoints=CheckpointSettings(),
        worker_runtime_env={"env_vars": {"A": "1"}},
    )
    assert (config.name, config.storage_path, config.storage_filesystem) == ("mnist", "/runs", filesystem)
    assert config.worker_runtime_env == {"env_vars": {"A": "1"}}


class Controller:
    """A callback as it lives in a controller, and what the driver hears from it."""

    def __init__(self, store: LocalRunStore) -> None:
        self.events: list[ev.Event] = []
        self.receiver = EventReceiver(self.events.append)
        scaling = ScalingSettings(min_workers=2, max_workers=2)
        callback = RunCallback(self.receiver.receiving, store, attempt=1, scaling=scaling)
        self.callback: RunCallback = pickle.loads(pickle.dumps(callback))
        self.callback.after_controller_start(None)

    def heard(self) -> list[ev.Event]:
        """Let all be sent, and give it."""
        self.callback.after_controller_finish(None)
        last = len(self.events)
        deadline = time.monotonic() + 0.15
        while time.monotonic() < deadline:
            if len(self.events) != last:
                last, deadline = len(self.events), time.monotonic() + 0.15
            time.sleep(0.01)
        return self.events


@pytest.fixture
def controller(store: LocalRunStore) -> Iterator[Controller]:
    """A controller of the first attempt."""
    begin(store)
    controller = Controller(store)
    yield controller
    controller.receiver.close()
    callbacks._current = None


def _failing(errors: dict[int, Exception]) -> WorkerGroupPollStatus:
    return WorkerGroupPollStatus({rank: WorkerStatus(running=False, error=error) for rank, error in errors.items()})


def test_no_hook_lets_an_exception_out_whatever_it_is_given(controller: Controller) -> None:
    hooks = [name for name in vars(RunCallback) if name.startswith(("before_", "after_", "on_"))]
    raising = 0
    for name in hooks:
        hook = getattr(controller.callback, name)
        arguments = [object() for _ in inspect.signature(hook).parameters]
        before = controller.callback.errors
        assert hook(*arguments) is None
        raising += controller.callback.errors > before
    assert raising >= 4, "the test gave them nothing that they stumble over"
    assert controller.callback.errors == raising


def test_an_answer_that_is_an_error_does_not_keep_the_others_from_being_told(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(reference: str, timeout: float) -> tuple[Waits, float]:
        if reference == "fails":
            raise ActorDiedError
        return Waits(seconds=2.0, tries=3, last="TimeoutError: slow"), 0.0

    answered = ["answers"]
    monkeypatch.setattr(loop_watch.ray, "wait", lambda asked, **_: ([one for one in asked if one in answered], []))
    monkeypatch.setattr(loop_watch.ray, "get", get)
    controller.callback._asked = ["answers", "fails"]
    controller.callback.after_worker_group_poll_status(_failing({}))
    assert controller.callback._asked, "one has not answered yet"
    answered.append("fails")
    controller.callback.after_worker_group_poll_status(_failing({}))
    assert controller.callback._asked == []
    assert [event.tries for event in controller.heard() if isinstance(event, ev.StorageWaited)] == [3]


def test_a_state_is_told_once_however_often_ray_tells_it(controller: Controller) -> None:
    for state in (RunningState(), RunningState(), InitializingState(), RunningState()):
        controller.callback.after_controller_state_update(InitializingState(), state)
    states = [event.state for event in controller.heard() if isinstance(event, ev.StateChanged)]
    assert states == ["RUNNING", "INITIALIZING", "RUNNING"]


def test_a_report_is_told_as_progress_and_a_checkpoint_as_lifecycle(
    controller: Controller, store: LocalRunStore
) -> None:
    Training(store, 1).upload("ckpt-1", {"model.pt": b"12345"})
    controller.callback.after_report(_TrainingReport(None, {"loss": 1}, validation=False), [{"loss": 1}, {"loss": 9}])
    checkpoint = Checkpoint(f"{store.path}/ckpt-1", fs.LocalFileSystem())
    controller.callback.after_report(_TrainingReport(checkpoint, {"loss": 0.5}, validation=False), [{"loss": 0.5}])
    first, commit = controller.heard()
    assert isinstance(first, ev.Reported)
    assert (first.metrics, first.droppable) == ({"loss": 1}, True)
    assert isinstance(commit, ev.CheckpointCommitted)
    assert (commit.metrics, commit.droppable) == ({"loss": 0.5}, False)
    assert (commit.checkpoint, commit.size_bytes) == ("ckpt-1", 5)


def test_a_commit_is_told_also_when_its_size_cannot_be_seen(
    controller: Controller, store: LocalRunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(name: str) -> dict[str, int]:
        raise OSError("EIO")

    monkeypatch.setattr(controller.callback._store, "file_sizes", fails)
    checkpoint = Checkpoint(f"{store.path}/ckpt-1", fs.LocalFileSystem())
    controller.callback.after_report(_TrainingReport(checkpoint, {"loss": 0.5}, validation=False), [{"loss": 0.5}])
    (commit,) = controller.heard()
    assert isinstance(commit, ev.CheckpointCommitted)
    assert (commit.checkpoint, commit.size_bytes) == ("ckpt-1", 0)
    assert controller.callback.take_commit(), "and a growth may use it"


def test_a_failure_is_told_with_the_errors_of_the_ranks_and_what_it_costs(controller: Controller) -> None:
    report = _TrainingReport(None, {}, validation=False)
    for _ in range(3):
        controller.callback.after_report(report, [{}])
    died = WorkerHealthCheckFailedError("worker died", ActorDiedError())
    controller.callback.after_worker_group_poll_status(_failing({0: ValueError("nan"), 3: died}))
    controller.callback.before_controller_execute_failure_decision(FailureDecision.RETRY)
    failure = controller.heard()[-1]
    assert isinstance(failure, ev.WorkerFailed)
    assert failure.errors.keys() == {"0", "3"}
    assert failure.errors["0"] == "ValueError: nan"
    assert failure.errors["3"] == f"WorkerHealthCheckFailedError: {died}"
    assert failure.also == {}
    assert (failure.retried, failure.reports_lost, failure.droppable) == (True, 3, False)


@pytest.mark.parametrize(
    ("permanent", "why"), [(True, "the storage refuses for good"), (False, "the budget is used up")]
)
def test_a_failure_that_ends_the_training_is_told_with_the_reason(
    controller: Controller, permanent: bool, why: str
) -> None:
    fault = StorageFaultError("expired", kind="credentials", permanent=permanent)
    controller.callback.after_worker_group_poll_status(_failing({0: ValueError("nan"), 3: fault}))
    controller.callback.before_controller_execute_failure_decision(FailureDecision.RAISE)
    failure = controller.heard()[-1]
    assert isinstance(failure, ev.WorkerFailed)
    assert (failure.retried, failure.gives_up) == (False, why)


def test_a_resize_is_told_of_a_healthy_group_only(controller: Controller) -> None:
    resize = ResizeDecision(num_workers=4, resources_per_worker={"CPU": 1})
    controller.callback.before_controller_execute_resize_decision(resize)
    controller.callback._world_size = 2
    controller.callback.before_controller_execute_resize_decision(resize)
    controller.callback.after_worker_group_poll_status(_failing({0: ValueError("nan")}))
    controller.callback.before_controller_execute_resize_decision(resize)
    resizes = [event for event in controller.heard() if isinstance(event, ev.WorkerGroupResized)]
    assert [(event.old_size, event.new_size) for event in resizes] == [(2, 4)]


def test_the_policy_and_the_callback_meet_in_the_controller(controller: Controller) -> None:
    meeting = callbacks.current()
    assert meeting is not None
    meeting.waiting_for_capacity(1, "1 more worker", since=12.0)
    (event,) = controller.heard()
    assert isinstance(event, ev.WaitingForCapacity)
    assert (event.possible_workers, event.min_workers, event.resources_per_worker) == (1, 2, {"CPU": 1.0})
    assert (event.missing, event.since) == ("1 more worker", 12.0)


def test_a_commit_is_told_to_the_policy_once(controller: Controller, store: LocalRunStore) -> None:
    callback = controller.callback
    callback.after_report(_TrainingReport(None, {}, validation=False), [{}])
    assert (callback.take_commit(), callback.has_checkpoint) == (False, False)
    Training(store, 1).upload("ckpt-1")
    checkpoint = Checkpoint(f"{store.path}/ckpt-1", fs.LocalFileSystem())
    callback.after_report(_TrainingReport(checkpoint, {}, validation=False), [{}])
    assert (callback.take_commit(), callback.has_checkpoint) == (True, True)
    assert not callback.take_commit()


class Told:
    """A worker's actor, as far as the callback talks to it."""

    def __init__(self) -> None:
        self.infos: list[PreemptionInfo] = []
        self.actor = self.mark_preempt = self

    def remote(self, info: PreemptionInfo) -> None:
        self.infos.append(info)


class Group:
    """A worker group of one worker."""

    def __init__(self) -> None:
        self.worker = Told()

    def get_workers(self) -> list[Told]:
        return [self.worker]


@pytest.mark.parametrize("commits_first", [True, False])
def test_a_drain_is_over_with_the_next_commit(
    controller: Controller, store: LocalRunStore, commits_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks, "ask", lambda workers, question: [])
    callback, group = controller.callback, Group()
    callback._worker_group = group
    callback._preemption_grace_seconds = 20.0
    renewals: list[str] = []
    callback.renew_reservation = lambda: renewals.append("renewed")
    notice = PreemptionInfo(deadline_ms=int((time.time() + 300) * 1000), preempted_node_to_ranks={"n": [0]})
    noticed = WorkerGroupPollStatus({0: WorkerStatus(running=True, preemption_info=notice)})
    if not commits_first:
        callback.after_worker_group_poll_status(noticed)
        assert not group.worker.infos, "nothing is committed yet"
    Training(store, 1).upload("ckpt-1")
    checkpoint = Checkpoint(f"{store.path}/ckpt-1", fs.LocalFileSystem())
    callback.after_report(_TrainingReport(checkpoint, {}, validation=False), [{}])
    callback.after_worker_group_poll_status(noticed)
    assert callback.errors == 0
    assert renewals, "Ray asks the policy for nothing during a drain"
    (told,) = group.worker.infos
    assert told.preempted_node_to_ranks == {"n": [0]}
    # Ray adds the grace again.
    assert told.deadline_ms is not None
    assert told.deadline_ms / 1000 == pytest.approx(time.time() - 20, abs=5)


def test_a_growth_is_told_with_its_reason_and_its_cost(controller: Controller) -> None:
    controller.callback._world_size = 2
    for _ in range(3):
        controller.callback.after_report(_TrainingReport(None, {}, validation=False), [{}])
    controller.callback._last_commit_at = time.time() - 60
    decision = GrowthDecision(4, {"CPU": 1}, reason=Reason.PATIENCE, waited_seconds=90.0)
    controller.callback.before_controller_execute_resize_decision(decision)
    event = controller.heard()[-1]
    assert isinstance(event, ev.WorkerGroupResized)
    assert (event.old_size, event.new_size, event.reason, event.waited_seconds) == (2, 4, "patience", 90.0)
    assert event.reports_lost == 3
    assert event.seconds_lost == pytest.approx(60, abs=5)


def test_what_no_commit_needs_is_gone_before_a_worker_group_starts_and_told_by_why(
    controller: Controller, store: LocalRunStore, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(store, 1, keep=1)
    for name in ("old", "new", "half"):
        training.upload(physical_name(name, 1))
        if name != "half":
            training.commit(physical_name(name, 1))
    controller.callback.before_worker_group_start(None)
    assert controller.callback.errors == 0
    assert store.folders() == [layout.STATE_FOLDER, physical_name("new", 1)]
    assert "no commit needs: half (upload interrupted), old (no longer kept)" in caplog.text


class Scalar:
    """A number as torch gives it: it has an item, and a size that is a method."""

    def __init__(self, *values: float) -> None:
        self._values = values

    def size(self) -> tuple[int, ...]:
        return () if len(self._values) == 1 else (len(self._values),)

    def item(self) -> float:
        if len(self._values) != 1:
            raise RuntimeError("a Tensor with more than one element cannot be converted to Scalar")
        return self._values[0]


def test_metrics_are_plain_numbers_or_short_text() -> None:
    import numpy as np

    plain = plain_metrics(
        {
            "int": 1,
            "float": 0.5,
            "text": "x",
            "none": None,
            "bool": True,
            "numpy": np.float32(0.25),
            "one": np.array([3]),
            "many": np.arange(3),
            "tensor": Scalar(0.75),
            "tensors": Scalar(1, 2),
            "object": [1] * 1000,
            7: 8,
        }
    )
    assert plain["numpy"] == 0.25
    assert type(plain["numpy"]) is float
    assert plain["one"] == 3
    assert plain["many"] == "[0 1 2]"
    assert plain["tensor"] == 0.75
    assert isinstance(plain["tensors"], str)
    assert len(plain["object"]) <= 200
    assert "bytes left out" in plain["object"]
    assert plain["7"] == 8
    for name, value in {"int": 1, "float": 0.5, "text": "x", "none": None, "bool": True}.items():
        assert plain[name] is value or plain[name] == value


def test_a_controller_shows_signs_of_life_that_say_what_it_does(
    store: LocalRunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks, "ALIVE_SECONDS", 0.05)
    controller = Controller(store)
    controller.callback.after_controller_state_update(InitializingState(), RunningState())
    try:
        alive = wait_for(
            lambda: [event for event in controller.events if isinstance(event, ev.ControllerAlive)], 5, "a sign of life"
        )
        assert alive[-1].doing in ("INITIALIZING", "RUNNING")
        assert alive[-1].droppable
        wait_for(lambda: controller.events[-1].kind == "controller_alive" and len(controller.events) > 4, 5, "more")
        assert [e for e in controller.events if isinstance(e, ev.ControllerAlive)][-1].doing == "RUNNING"
    finally:
        controller.callback.before_controller_abort()
        controller.receiver.close()
        callbacks._current = None


def test_a_checkpoint_on_this_machine_is_read_in_place(store: LocalRunStore) -> None:
    begin(store)
    Training(store, 1).upload("ckpt-1", {"model.pt": b"12345"})
    stored = Checkpoint(f"{store.path}/ckpt-1", run_filesystem(store, 1))
    found = readable(stored)
    assert found is not None
    with found.as_directory() as folder:
        assert folder == stored.path
    elsewhere = Checkpoint("/another/machine/ckpt-1", run_filesystem(store, 1))
    assert readable(elsewhere) is elsewhere
    assert readable(None) is None


def test_a_group_that_has_failed_gives_back_what_it_holds_once(controller: Controller) -> None:
    ended: list[str] = []

    class Group:
        def get_workers(self) -> list[str]:
            return ["one", "two"]

        def shutdown(self) -> None:
            ended.append("group")
            raise RuntimeError("the cluster does not answer")

    controller.callback._worker_group = Group()
    assert not controller.callback.release_group(), "an error is passed over"
    assert controller.callback.errors == 1
    assert controller.callback.release_group() == 0
    assert ended == ["group"]


@pytest.mark.parametrize(("draining", "decision"), [(True, FailureDecision.RETRY), (False, FailureDecision.RAISE)])
def test_what_fails_while_a_node_is_drained_is_charged_to_the_drain(
    controller: Controller, draining: bool, decision: FailureDecision
) -> None:
    policy = RunFailurePolicy(FailureConfig(max_failures=0, max_preemption_failures=1))
    preemption = PreemptionInfo(deadline_ms=None, preempted_node_to_ranks={"n0": [0]})
    state = PreemptingState(preemption_info=preemption, detected_at_s=0.0) if draining else RunningState()
    controller.callback.after_controller_state_update(InitializingState(), state)
    broken = WorkerGroupError("ranks failed", {1: RuntimeError("Connection closed by peer")})
    assert policy.make_decision(broken) is decision
    controller.callback.after_worker_group_poll_status(_failing(dict(broken.worker_failures)))
    controller.callback.before_controller_execute_failure_decision(decision)
    assert isinstance(controller.heard()[-1], ev.WorkersPreempted if draining else ev.WorkerFailed)
    if draining:
        assert policy.make_decision(broken) is FailureDecision.RAISE, "that budget has an end too"


@pytest.mark.parametrize("first", [True, False])
def test_of_several_faults_of_the_storage_the_permanent_one_counts(first: bool) -> None:
    faults = [StorageFaultError("one", kind="outage", permanent=first)]
    faults += [StorageFaultError("other", kind="credentials", permanent=not first)]
    error = WorkerGroupError("ranks failed", {0: ValueError("nan"), **dict(enumerate(faults, 1))})
    fault = storage_fault(error)
    assert fault is not None
    assert fault.permanent
    policy = RunFailurePolicy(FailureConfig(max_failures=-1))
    assert policy.make_decision(error) is FailureDecision.RAISE
    passing = WorkerGroupError("ranks failed", {0: next(fault for fault in faults if not fault.permanent)})
    assert policy.make_decision(passing) is FailureDecision.RETRY


def test_a_worker_group_that_gave_back_what_it_held_is_none_to_the_controller() -> None:
    group = RunWorkerGroup.__new__(RunWorkerGroup)
    group._worker_group_state = group._latest_poll_status = None
    assert not group, "or the controller would ask it for its workers and state"
    assert group.get_workers() == []
    assert group.get_latest_poll_status() is None
    group.shutdown()
    group.abort()


def test_the_loop_stands_still_for_what_its_own_report_uploads_and_not_for_others() -> None:
    take_stall()
    with in_report(), stalling():
        time.sleep(0.05)
    with stalling():  # another thread's upload
        time.sleep(0.5)
    assert 0.05 <= take_stall() < 0.5
    assert take_stall() == 0


def test_standing_still_is_told_when_it_is_worth_a_word(controller: Controller) -> None:
    for seconds in (0.0, 0.004, 0.004, 0.004, 2.5):
        controller.callback.tell_stall(seconds)
    told = [event.seconds for event in controller.heard() if isinstance(event, ev.CheckpointStalled)]
    assert told == [0.012, 2.5]
