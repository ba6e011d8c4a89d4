"""What runs in the cluster, as far as it needs no cluster: translation, and the callbacks of controller and workers."""

import inspect
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from pyarrow import fs
from ray.exceptions import ActorDiedError
from ray.train import Checkpoint, CheckpointConfig, FailureConfig
from ray.train.v2._internal.exceptions import UserExceptionWithTraceback, WorkerHealthCheckFailedError
from ray.train.v2._internal.execution import context
from ray.train.v2._internal.execution.controller.state import (
    InitializingState,
    PreemptingState,
    RestartingState,
    RunningState,
    SchedulingState,
    ShuttingDownState,
)
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2._internal.execution.scaling_policy import ResizeDecision
from ray.train.v2._internal.execution.training_report import _TrainingReport
from ray.train.v2._internal.execution.worker_group.poll import WorkerGroupPollStatus, WorkerStatus
from ray.train.v2.api.exceptions import WorkerGroupError
from ray.train.v2.api.preemption import PreemptionInfo

from prefect_elastic_train.controller import callbacks, worker_queries
from prefect_elastic_train.controller.callbacks import RunCallback
from prefect_elastic_train.controller.failure_policy import RunFailurePolicy
from prefect_elastic_train.controller.scaling_policy import GrowthDecision
from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.causes import Cause
from prefect_elastic_train.core.checkpoint_names import physical_name
from prefect_elastic_train.core.outcomes import StorageFaultError
from prefect_elastic_train.core.settings import CheckpointSettings, FailureSettings, ScalingSettings
from prefect_elastic_train.core.version import ray_minor
from prefect_elastic_train.driver.event_relay import EventReceiver
from prefect_elastic_train.driver.ray_configs import run_config, scaling_config
from prefect_elastic_train.loop import RunContext
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.commits import FencedOffError
from prefect_elastic_train.storage import retries
from prefect_elastic_train.storage.retries import Waits
from prefect_elastic_train.storage.store import LocalRunStore
from prefect_elastic_train.worker import loop_inspection, train_worker, worker_callbacks
from prefect_elastic_train.worker.loop_inspection import CommitReport, collect_commit_report
from prefect_elastic_train.worker.rank_failures import portable_failure
from prefect_elastic_train.worker.worker_callbacks import WorkerHooks
from tests.support.processes import wait_for
from tests.unit.support import Training, begin, claim, run_callback


def test_every_field_of_scaling_reaches_ray_and_it_is_elastic_also_at_a_fixed_size() -> None:
    values = {"placement_strategy": "SPREAD", "label_selector": {"market-type": "spot"}, "accelerator_type": "A100"}
    values |= {"resources_per_worker": {"CPU": 3, "GPU": 2}}
    settings = ScalingSettings(
        min_workers=2, max_workers=2, accelerator="gpu", resize_check_interval_seconds=7, **values
    )
    values |= {"use_gpu": True, "use_tpu": False, "elastic_resize_monitor_interval_s": 7}
    values |= {"num_workers": (2, 2), "elasticity_enabled": True}
    config = scaling_config(settings)
    assert {name: getattr(config, name) for name in values} == values


def test_run_budgets_and_checkpoints_reach_ray() -> None:
    budgets = {"max_failures": 7, "max_preemption_failures": 5}
    if ray_minor() >= (2, 60):
        budgets |= {"relax_collectives_on_preemption": True, "preemption_grace_seconds": 3}
    wanted = claim(worker_runtime_env={"env_vars": {"A": "1"}}, **budgets)
    checkpoints = CheckpointSettings(keep=3, score_attribute="loss", score_order="min")
    config = run_config(replace(wanted, checkpoints=checkpoints), "/runs", None)
    assert (config.name, config.storage_path) == ("mnist", "/runs")
    assert config.worker_runtime_env == {"env_vars": {"A": "1"}}
    assert config.failure_config == FailureConfig(**{name.replace("seconds", "s"): budgets[name] for name in budgets})
    assert config.checkpoint_config == CheckpointConfig(
        num_to_keep=3, checkpoint_score_attribute="loss", checkpoint_score_order="min"
    )


class Worker(SimpleNamespace):
    """A worker's actor, as far as the callback talks to it."""

    def __init__(self, answer: Any = None) -> None:
        self.infos: list[PreemptionInfo] = []
        actor = SimpleNamespace(mark_preempt=SimpleNamespace(remote=self.infos.append))
        super().__init__(actor=actor, answer=answer, execute_async=lambda question, *arguments: self)

    __hash__ = object.__hash__


#: Ray's notice of a drain.
NOTICE = PreemptionInfo(deadline_ms=int((time.time() + 300) * 1000), preempted_node_to_ranks={"n": [0]})


class Controller:
    """A callback as it lives in a controller, and what the driver hears from it."""

    def __init__(self, store: LocalRunStore) -> None:
        self.events: list[ev.Event] = []
        self.store = store
        self.receiver = EventReceiver(self.events.append)
        self.callback = run_callback(self.receiver.address, store, attempt=1, failures=FailureSettings())
        self.state = self.callback._state
        self.training = Training(store, 1)
        self.training.log = self.state.commits
        self.callback.after_controller_start(None)

    def report(self, times: int = 1, checkpoint: str = "", **metrics: Any) -> None:
        """Have the ranks report so often."""
        made = Checkpoint(f"{self.store.path}/{checkpoint}", fs.LocalFileSystem()) if checkpoint else None
        if checkpoint:
            self.training.report(checkpoint, metrics)
        for _ in range(times):
            self.callback.after_report(_TrainingReport(made, metrics, validation=False), [metrics, {"loss": 9}])

    def poll(self, errors: dict[int, Exception], preemption: PreemptionInfo | None = None) -> None:
        """Have a poll find these errors of ranks, and the notice of a drain."""
        found = {rank: WorkerStatus(running=False, error=error) for rank, error in errors.items()}
        found[9] = WorkerStatus(running=True, preemption_info=preemption)
        self.callback.after_worker_group_poll_status(WorkerGroupPollStatus(found))

    def fail(self, error: WorkerGroupError, **budgets: int) -> FailureDecision:
        """Decide about a failure, and return the decision."""
        decision = RunFailurePolicy(FailureConfig(**budgets), self.state).make_decision(error)
        self.callback.before_controller_execute_failure_decision(decision)
        return decision

    def close(self) -> None:
        """Stop its threads."""
        self.callback.before_controller_abort()
        self.receiver.close()

    def heard(self) -> list[Any]:
        """Let all be sent, and give it."""
        self.state.publish(ev.StateChanged(state="last"))
        self.callback.after_controller_finish(None)
        wait_for(lambda: self.events and getattr(self.events[-1], "state", "") == "last", 5, "the last event")
        return self.events[:-1]


@pytest.fixture
def controller(store: LocalRunStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    """A controller of the first attempt."""
    begin(store)
    monkeypatch.setattr(callbacks, "query_workers", lambda workers, function, seconds, *more: {})
    controller = Controller(store)
    yield controller
    controller.close()


def test_no_hook_lets_an_exception_out_whatever_it_is_given(controller: Controller) -> None:
    hooks = [name for name in vars(RunCallback) if name.startswith(("before_", "after_", "on_"))]
    raising = 0
    for name in hooks:
        hook = getattr(controller.callback, name)
        arguments = [object() for _ in inspect.signature(hook).parameters]
        before = controller.callback.errors
        assert not hook(*arguments)
        raising += controller.callback.errors > before
    assert raising >= 4  # the test gave them nothing that they stumble over


def test_a_rank_that_is_gone_does_not_keep_from_telling_what_the_others_have_waited_for_at_a_commit(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks, "query_workers", worker_queries.query_workers)

    def get(worker: Worker, timeout: float) -> Any:
        return worker.answer() if callable(worker.answer) else worker.answer

    usage = ev.RankUsage(cpu_percent=90.0, memory_bytes=2**30, gpu_bytes=0)
    waits = CommitReport(Waits(seconds=2.0, tries=3, last="TimeoutError: slow"), 2.5, "every 90 s", usage)
    monkeypatch.setattr(worker_queries.ray, "wait", lambda asked, **_: ([one for one in asked if one.answer], []))
    monkeypatch.setattr(worker_queries.ray, "get", get)
    controller.callback._workers = [Worker(waits), Worker(lambda: 1 / 0), Worker(None)]
    controller.report(checkpoint="ckpt-1")
    committed, waited, stalled, planned, measured = controller.heard()
    assert (committed.kind, waited.kind, waited.tries) == ("checkpoint_committed", "storage_waited", 3)
    assert (stalled.kind, stalled.seconds) == ("checkpoint_stalled", 2.5)
    assert (planned.kind, planned.plan) == ("saves_planned", "every 90 s")
    assert (measured.kind, measured.usage) == ("ranks_measured", {0: usage})


@pytest.mark.parametrize("is_seeded", [False, True])
def test_a_new_group_is_told_with_its_ranks_and_its_checkpoint_and_compared_with_this_runs_metrics(
    controller: Controller, monkeypatch: pytest.MonkeyPatch, is_seeded: bool
) -> None:
    controller.training.report("ckpt-1", {"step": 8})
    if is_seeded:
        monkeypatch.setattr(callbacks, "SEED_COMMIT", controller.state.commits.newest.id)
    worker = SimpleNamespace(
        metadata=SimpleNamespace(node_id="n", node_ip="10.0.0.1", pid=7),
        distributed_context=SimpleNamespace(world_rank=0),
    )
    controller.callback.after_worker_group_start(SimpleNamespace(get_workers=lambda: [worker]))
    (started,) = controller.heard()
    assert (started.world_size, started.checkpoint, started.ranks) == (1, "ckpt-1", {"10.0.0.1:7": 0})
    assert controller.state.loops._counters_before == ({} if is_seeded else {"step": 8})


def test_a_group_that_restores_a_recovery_point_is_told_with_its_step_and_the_steps_that_are_done_again(
    controller: Controller,
) -> None:
    header = SimpleNamespace(step=70)
    controller.callback.hooks.restored_states = [[SimpleNamespace(header=header)]]
    controller.state.loops.step = 71
    controller.callback.after_worker_group_start(SimpleNamespace(get_workers=list))
    (started,) = controller.heard()
    assert (started.restored_step, started.redone_steps) == (70, 1)


def test_a_group_that_starts_while_the_storage_is_away_does_not_restore_the_point_of_the_one_before(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks, keepers = controller.callback.hooks, controller.state.keepers
    hooks.restored_states = keepers.restored_point = "of the group before"
    monkeypatch.setattr(callbacks.commits, "check_fence", mock.Mock(side_effect=OSError("no route")))
    controller.callback.before_worker_group_start(None)
    assert (hooks.restored_states, keepers.restored_point) == ((), None)


def test_a_state_is_told_once_however_often_ray_tells_it(controller: Controller) -> None:
    for state in (RunningState(), RunningState(), InitializingState(), RunningState()):
        controller.callback.after_controller_state_update(None, state)
    assert [event.state for event in controller.heard()] == ["RUNNING", "INITIALIZING", "RUNNING"]


def test_a_report_is_published_as_progress_and_a_commit_as_lifecycle_without_another_request(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = controller.state
    controller.report(loss=1)
    assert state.commit_count == 0
    report = controller.training.report

    def report_once(name: str, metrics: dict[str, Any]) -> None:
        report(name, metrics)
        monkeypatch.setattr(LocalRunStore, "file_sizes", lambda self, name: pytest.fail("a second listing"))

    monkeypatch.setattr(controller.training, "report", report_once)
    controller.report(checkpoint="ckpt-1", loss=0.5)
    assert state.commit_count == 1
    first, commit = controller.heard()
    assert (first.kind, first.metrics) == ("reported", {"loss": 1})
    assert (commit.kind, commit.metrics) == ("checkpoint_committed", {"loss": 0.5})
    assert (commit.checkpoint, commit.size_bytes) == ("ckpt-1", len("weights of ckpt-1"))


def test_a_failure_is_told_once_with_the_errors_of_the_ranks_and_what_it_costs(controller: Controller) -> None:
    controller.report(times=3)
    died = WorkerHealthCheckFailedError("worker died", ActorDiedError())
    raised = portable_failure(UserExceptionWithTraceback(ValueError("nan"), "Traceback …\nValueError: nan"))
    controller.poll({0: raised, 3: died})
    controller.fail(WorkerGroupError("ranks failed", {0: ValueError(), 3: died}), max_failures=1)
    controller.callback.before_controller_execute_failure_decision(FailureDecision.RETRY)
    (failure,) = [event for event in controller.heard() if isinstance(event, ev.WorkerFailed)]
    assert failure.causes == [
        Cause([0], "ValueError: nan", traceback="Traceback …\nValueError: nan"),
        Cause(
            [3],
            "WorkerHealthCheckFailedError: worker died",
            is_death=True,
            traceback=f"WorkerHealthCheckFailedError: {died}",
        ),
    ]
    assert (failure.retried, failure.reports_lost) == (True, 3)


@pytest.mark.parametrize(
    ("dead", "struck"),
    [([1], {"n1"}), ([1, 2], {"n1"}), ([0, 1], set()), ([], set())],
)
def test_deaths_are_a_strike_against_a_node_unless_workers_on_several_nodes_die(
    controller: Controller, dead: list[int], struck: set[str]
) -> None:
    nodes = ("n0", "n1", "n1")
    controller.callback._workers = [SimpleNamespace(metadata=SimpleNamespace(node_id=node)) for node in nodes]
    errors = dict.fromkeys(range(3), ValueError("nan")) | dict.fromkeys(dead, ActorDiedError())
    for _ in range(3):
        controller.fail(WorkerGroupError("ranks failed", errors), max_failures=-1)
    assert {*controller.state.strikes.nodes_to_leave_out()} == struck


@pytest.mark.parametrize("permanent_is_first", [True, False])
def test_a_permanent_fault_of_the_storage_ends_the_training_whatever_the_budget_and_is_told_as_the_reason(
    controller: Controller, permanent_is_first: bool
) -> None:
    controller.state.is_draining = True
    faults = [StorageFaultError("…", kind="outage", permanent=is_it) for is_it in (permanent_is_first, True, False)]
    error = WorkerGroupError("ranks failed", {0: ValueError("nan"), **dict(enumerate(faults, 1))})
    assert controller.fail(error, max_failures=-1) is FailureDecision.RAISE
    transient = WorkerGroupError("a rank failed", {0: faults[-1]})
    decisions = [controller.fail(transient, max_preemption_failures=1) for _ in range(2)]
    assert decisions == [FailureDecision.RETRY, FailureDecision.RAISE]
    permanent, _, exhausted = controller.heard()
    assert (permanent.retried, permanent.gives_up) == (False, "the storage refuses permanently")
    assert (exhausted.retried, exhausted.gives_up) == (False, "the budget is exhausted")


def test_workers_that_die_as_they_start_are_told_and_counted_although_no_poll_has_found_them(
    controller: Controller,
) -> None:
    for decision in (FailureDecision.RETRY, FailureDecision.RAISE):
        died = WorkerGroupError("a worker died", dict.fromkeys((0, 1), ActorDiedError()))
        assert controller.fail(died, max_failures=1) is decision
    first, second = controller.heard()
    assert (first.kind, first.left, first.retried, second.retried) == ("worker_failed", 0, True, False)
    (cause,) = first.causes
    assert (cause.ranks, cause.is_death) == ([0, 1], True)
    assert cause.message.startswith("ActorDiedError: The actor died unexpectedly")


@pytest.mark.parametrize(("draining", "decision"), [(True, FailureDecision.RETRY), (False, FailureDecision.RAISE)])
def test_what_fails_while_a_node_is_drained_is_charged_to_the_drain(
    controller: Controller, draining: bool, decision: FailureDecision
) -> None:
    budgets = {"max_failures": 0, "max_preemption_failures": 1}
    state = PreemptingState(preemption_info=NOTICE, detected_at_s=0.0) if draining else RunningState()
    controller.callback.after_controller_state_update(None, state)
    broken = WorkerGroupError("ranks failed", {1: RuntimeError("[/gloo/pair.cc:534] Connection closed by peer")})
    assert controller.fail(broken, **budgets) is decision
    assert controller.fail(broken, **budgets) is FailureDecision.RAISE  # that budget has an end too
    kind = "workers_preempted" if draining else "worker_failed"
    assert [event.kind for event in controller.heard()[-2:]] == [kind, kind]


def test_a_resize_is_told_of_a_group_that_trains_with_its_reason_and_its_cost(controller: Controller) -> None:
    callback, growth = controller.callback, GrowthDecision(4, {"CPU": 1}, reason="patience", waited_seconds=90.0)
    callback.before_controller_execute_resize_decision(ResizeDecision(2, {"CPU": 1}))
    callback._workers = [Worker(), Worker()]
    controller.report(times=3)
    callback.before_controller_execute_resize_decision(growth)
    callback.before_worker_group_shutdown(None)
    callback.before_controller_execute_resize_decision(growth)
    (event,) = [event for event in controller.heard() if isinstance(event, ev.WorkerGroupResized)]
    assert (event.old_size, event.new_size, event.reason, event.waited_seconds) == (2, 4, "patience", 90.0)
    assert event.reports_lost == 3


@pytest.mark.parametrize("noticed_before", [True, False])
def test_a_drain_is_over_with_the_next_commit_and_not_with_one_from_before_it(
    controller: Controller, noticed_before: bool
) -> None:
    callback, worker = controller.callback, Worker()
    callback._workers = [worker]
    controller.report(checkpoint="ckpt-1")
    controller.poll({})
    if noticed_before:
        controller.poll({}, NOTICE)
    assert not worker.infos  # the steps since that commit would be lost
    controller.report(checkpoint="ckpt-2")
    for _ in range(2):
        controller.poll({}, NOTICE)
    assert callback.errors == 0
    (told,) = worker.infos
    assert told.preempted_node_to_ranks == NOTICE.preempted_node_to_ranks
    assert told.deadline_ms == 1  # long ago, whatever grace Ray adds


def test_what_no_commit_needs_is_gone_before_a_worker_group_starts_and_told_by_why(
    controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(controller.store, 1, keep=1)
    for name in ("old", "new", "half"):
        training.upload(physical_name(name, 1))
        if name != "half":
            training.commit(physical_name(name, 1))
    controller.callback.before_worker_group_start(None)
    assert controller.callback.errors == 0
    assert controller.store.folders() == [layout.STATE_FOLDER, physical_name("new", 1)]
    assert "no commit needs: half, old" in caplog.text


def test_an_attempt_that_was_overtaken_starts_no_group_and_abandons_no_upload_of_its_successor(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove(store: Any, attempt: int) -> list[str]:
        begin(controller.store)  # meanwhile
        return []

    monkeypatch.setattr(callbacks.commits, "remove_leftovers", remove)
    callback, abandoned = controller.callback, []
    monkeypatch.setattr(callback._store, "abort_uploads", lambda: abandoned.append("all"))
    for hook in (callback.before_worker_group_start, callback.before_controller_execute_failure_decision):
        with pytest.raises(FencedOffError):
            hook(None)
    assert abandoned == []


@pytest.mark.parametrize(
    ("state", "warning"),
    [
        (SchedulingState(ResizeDecision(2, {"CPU": 1})), "raylet.out"),
        (RestartingState(WorkerGroupError("", {})), "restarting"),
        (ShuttingDownState(RunningState()), "validations may still run"),
    ],
)
def test_a_controller_that_stands_in_a_state_is_logged_and_given_up_unless_validations_may_still_run(
    store: LocalRunStore, monkeypatch: pytest.MonkeyPatch, state: Any, warning: str
) -> None:
    monkeypatch.setattr(callbacks, "_SLOW_SECONDS", 0.3)
    monkeypatch.setattr(callbacks, "_HUNG_SECONDS", 1.0)
    monkeypatch.setattr(callbacks.ev, "ALIVE_SECONDS", 0.05)
    controller = Controller(store)
    name = state._state_type.state_name
    controller.callback.after_controller_state_update(None, state)

    def doings() -> list[str]:
        return [event.doing for event in controller.events if isinstance(event, ev.ControllerAlive)]

    wait_for(lambda: doings().count(name) >= 3, 5, "heartbeats")
    time.sleep(1.4)
    assert warning in doings()[-1]
    assert doings()[-1].islower()  # so the flow's log has it
    heard = len(doings())
    time.sleep(0.3)
    assert (len(doings()) > heard) is (name == "SHUTTING_DOWN")
    controller.callback.after_controller_state_update(None, RunningState())
    wait_for(lambda: doings()[-1] == "RUNNING", 5, "heartbeats of a group that trains")
    controller.close()


def test_an_upload_that_does_not_end_is_an_operation_that_the_worker_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retries, "_REPORT_SECONDS", 0.05)
    monkeypatch.setattr(train_worker, "_SLOW_SECONDS", 0.2)
    monkeypatch.setattr(train_worker.RaysTrainWorker, "poll_status", lambda _: WorkerStatus(True, None, None))
    monkeypatch.setattr(loop_inspection, "_innermost_frame", lambda: None)
    worker = train_worker.RayTrainWorker()
    with WorkerHooks(RunContext("mnist", "0" * 32, 1, "", "")).on_checkpoint_transfer():
        for _ in range(10):
            worker.poll_status()
            time.sleep(0.05)
    worker.poll_status()
    assert 1 <= caplog.text.count("has not finished an upload or download") <= 2


def test_the_loop_stands_still_for_what_its_own_report_uploads_and_not_for_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    collect_commit_report(0, "")
    callback = WorkerHooks(RunContext("mnist", "0" * 32, 1, "", ""))
    train_context = SimpleNamespace(
        report_order_condition=threading.Condition(),
        report_call_index=3,
        current_report_index=1,
        preemption_context=SimpleNamespace(preemption_info=None),
    )
    monkeypatch.setattr(context, "_train_context", train_context)
    monkeypatch.setattr(worker_callbacks, "_UPLOAD_SECONDS", 0.05)
    with callback.on_report(), callback.on_checkpoint_transfer():  # which waits for an earlier one
        time.sleep(0.02)
    assert "An upload takes more than 0.05 s" in caplog.text
    with callback.on_checkpoint_transfer():  # another thread's
        time.sleep(0.2)
    report = collect_commit_report(0, "")
    assert 0.07 <= report.stalled < 0.2
    assert report.usage.memory_bytes > 2**20
    assert collect_commit_report(0, "").stalled == 0
