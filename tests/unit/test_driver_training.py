"""What the driver decides without a cluster: about the loop it was given, and about how ``fit()`` ended."""

from __future__ import annotations

import functools
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray.exceptions
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError
from ray.train.v2.api.exceptions import PreemptionError
from ray.train.v2.api.preemption import PreemptionInfo

from prefect_elastic_train.core.events import AttemptEnded
from prefect_elastic_train.core.outcomes import AttemptFailedError, ConfigurationError, Outcome
from prefect_elastic_train.core.ray_output import Details
from prefect_elastic_train.core.records import Owner
from prefect_elastic_train.core.request import Payload, RunRequest, dump_payload
from prefect_elastic_train.core.settings import (
    ClusterSettings,
    ScalingSettings,
)
from prefect_elastic_train.core.spec import DriverSpec
from prefect_elastic_train.core.storage_settings import LocalStorageSettings
from prefect_elastic_train.driver import attempt, telling
from prefect_elastic_train.driver import fit as training
from prefect_elastic_train.driver.attempt import Attempt
from prefect_elastic_train.driver.endings import classify, end_by_error, end_by_signal
from prefect_elastic_train.driver.fit import check_loop, prepare, resolve_loop
from prefect_elastic_train.driver.joining import fit_local_cluster
from prefect_elastic_train.driver.relay import EventOutput
from prefect_elastic_train.runs.commits import FencedOffError
from prefect_elastic_train.runs.identity import fingerprint
from prefect_elastic_train.storage.store import LocalRunStore
from tests.unit.support import spec


@pytest.fixture(autouse=True)
def _path_as_before() -> Iterator[None]:
    path = list(sys.path)
    yield
    sys.path[:] = path


def _spec(payload: bytes = b"", **settings: Any) -> DriverSpec:
    request = RunRequest("mnist", Owner(flow_run_id="1"), fingerprint("m:loop", "none", {}), payload=payload)
    return spec(request, **settings)


class _Callable:
    """An object that is called as a loop."""

    def __call__(self, config: dict[str, Any]) -> None:
        """Train."""

    def method(self, config: dict[str, Any]) -> None:
        """Train."""


def _two(config: dict[str, Any], other: int) -> None:
    """Not a loop."""


LOOPS: list[Callable[..., Any]] = [
    lambda: None,
    lambda config: None,
    lambda config, extra=1: None,
    lambda *arguments: None,
    lambda **arguments: None,
    lambda config, *arguments, **more: None,
    _Callable(),
    _Callable().method,
    functools.partial(_two, other=1),
]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_of_nothing_or_of_the_config_is_accepted(loop: Callable[..., Any]) -> None:
    check_loop(loop)


@pytest.mark.parametrize("loop", [_two, lambda config, other: None, lambda config, other, *, more: None])
def test_a_loop_that_wants_more_is_refused_with_the_names(loop: Callable[..., Any]) -> None:
    with pytest.raises(ConfigurationError) as refused:
        check_loop(loop)
    for words in (loop.__name__, "config, other", "it may take none, or one"):
        assert words in str(refused.value)


def test_a_loop_that_wants_its_config_by_name_only_is_refused() -> None:
    def loop(*, config: dict[str, Any]) -> None:
        """Ray passes the config by position."""

    with pytest.raises(ConfigurationError, match="config"):
        check_loop(loop)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with train loops."""
    (tmp_path / "a_users_package").mkdir()
    (tmp_path / "a_users_package" / "__init__.py").write_text("")
    (tmp_path / "a_users_package" / "training.py").write_text(
        "class Trainer:\n    @staticmethod\n    def loop(config): return 'nested'\n"
        "def loop(config): return 'plain'\nNUMBER = 7\n"
    )
    (tmp_path / "a_users_package" / "broken.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "a_users_package"


def test_a_loop_is_found_by_its_path(package: str) -> None:
    assert resolve_loop(f"{package}.training:loop")({}) == "plain"
    assert resolve_loop(f"{package}.training:Trainer.loop")({}) == "nested"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere:loop", ["'nowhere:loop'", "'nowhere'", "ModuleNotFoundError"]),
        ("a_users_package.training:missing", ["'a_users_package.training'", "no 'missing'"]),
        ("a_users_package.training:Trainer.missing", ["no 'Trainer.missing'"]),
        ("a_users_package.training", ["has no"]),
        ("a_users_package.training:NUMBER", ["is a int", "must be a function"]),
        ("a_users_package.broken:loop", ["cannot be imported", "RuntimeError: no licence"]),
    ],
)
def test_a_path_without_a_loop_is_refused_with_what_is_wrong(package: str, path: str, words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as refused:
        resolve_loop(path)
    for word in words:
        assert word in str(refused.value)


def test_the_driver_prepares_a_loop_that_was_sent_and_one_that_it_imports(package: str) -> None:
    sent = prepare(_spec(dump_payload(Payload(train_loop=lambda config: "sent"))))
    assert sent.train_loop({}) == "sent"
    imported = prepare(_spec(dump_payload(Payload(train_loop=f"{package}.training:loop"))))
    assert imported.train_loop({}) == "plain"


def test_the_driver_finds_modules_where_the_flow_found_them(tmp_path: Path) -> None:
    (tmp_path / "beside_the_flow.py").write_text("def loop(config): return 'beside'\n")
    payload = dump_payload(Payload(train_loop="beside_the_flow:loop"))
    assert prepare(_spec(payload, sys_path=[str(tmp_path)])).train_loop({}) == "beside"


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"torn", ["'loop'", "cannot load train loop"]),
        (pickle.dumps(Payload(train_loop="nowhere:loop")), ["'nowhere:loop'"]),
        (dump_payload(Payload(train_loop=lambda a, b: None)), ["requires 2 arguments"]),
    ],
    ids=["torn", "not there", "wants more"],
)
def test_a_loop_that_cannot_be_prepared_ends_the_attempt_as_invalid(payload: bytes, words: list[str]) -> None:
    with pytest.raises(AttemptFailedError) as failed:
        prepare(_spec(payload))
    assert failed.value.outcome is Outcome.INVALID
    for word in words:
        assert word in str(failed.value)


def test_what_a_local_cluster_can_never_hold_is_refused_with_the_numbers() -> None:
    spec = _spec(scaling=ScalingSettings(min_workers=4, max_workers=8, resources_per_worker={"CPU": 2}))
    fit_local_cluster(spec, {"CPU": 8.0})
    with pytest.raises(AttemptFailedError) as refused:
        fit_local_cluster(spec, {"CPU": 7.0})
    assert refused.value.outcome is Outcome.INVALID
    assert "min_workers=4 need 8 CPU, and the local cluster on this machine has 7" in str(refused.value)
    gpus = _spec(scaling=ScalingSettings(accelerator="gpu"))
    with pytest.raises(AttemptFailedError, match="need 1 GPU"):
        fit_local_cluster(gpus, {"CPU": 64.0})


def test_workers_on_a_local_cluster_leave_a_cpu_to_the_datasets() -> None:
    spec = _spec(scaling=ScalingSettings(min_workers=1, max_workers=8))
    assert fit_local_cluster(spec, {"CPU": 3.0}).max_workers == 8, "capacity decides, as always"
    with_datasets = replace(spec, request=replace(spec.request, has_datasets=True))
    assert fit_local_cluster(with_datasets, {"CPU": 3.0}).max_workers == 2
    large = replace(with_datasets, scaling=ScalingSettings(min_workers=3, max_workers=3))
    with pytest.raises(AttemptFailedError, match="has 2 beside the 1 for the datasets"):
        fit_local_cluster(large, {"CPU": 3.0})


def test_a_cluster_that_others_may_join_is_never_too_small() -> None:
    spec = _spec(scaling=ScalingSettings(min_workers=100, max_workers=100), cluster=ClusterSettings(address="auto"))
    assert fit_local_cluster(spec, {"CPU": 1.0}) == spec.scaling


def _worker_died() -> Exception:
    """Give what Ray Train says of a rank whose process was killed."""
    return WorkerHealthCheckFailedError("A worker health check failed.", ray.exceptions.ActorDiedError())


ENDS: list[tuple[Exception, Outcome]] = [
    (WorkerGroupError("boom", {0: ValueError("user")}), Outcome.USER_ERROR),
    (WorkerGroupError("boom", {0: ValueError("user"), 1: ConnectionError("peer closed")}), Outcome.USER_ERROR),
    (WorkerGroupError("boom", {1: _worker_died()}), Outcome.CLUSTER_LOST),
    (WorkerGroupError("boom", {0: RuntimeError("Connection closed by peer"), 1: _worker_died()}), Outcome.CLUSTER_LOST),
    (WorkerGroupError("boom", {0: WorkerHealthCheckTimeoutError("a worker hangs")}), Outcome.CLUSTER_LOST),
    (WorkerGroupError("boom", {0: ray.exceptions.OutOfMemoryError("killed")}), Outcome.CLUSTER_LOST),
    (ControllerError(FencedOffError("attempt 1 was taken over by attempt 2")), Outcome.INVALID),
    (ControllerError(RuntimeError("FencedOffError: attempt 1 was taken over")), Outcome.INVALID),
    (ControllerError(OSError(28, "No space left on device")), Outcome.STORAGE_ERROR),
    (ControllerError(PermissionError("read-only")), Outcome.STORAGE_ERROR),
    (ControllerError(ValueError("a bug of Ray")), Outcome.DRIVER_LOST),
    (ray.exceptions.ActorDiedError(), Outcome.DRIVER_LOST),
    (ray.exceptions.ActorUnavailableError("gone", None), Outcome.DRIVER_LOST),
    (ray.exceptions.RaySystemError("GCS is gone"), Outcome.CLUSTER_LOST),
    (ConnectionError("GCS is gone"), Outcome.CLUSTER_LOST),
    (TypeError("Could not serialize the function loop"), Outcome.INVALID),
    (PreemptionError(PreemptionInfo(deadline_ms=None, preempted_node_to_ranks={"n": [1]})), Outcome.CLUSTER_LOST),
    (ray.exceptions.GetTimeoutError("the controller does not answer"), Outcome.CLUSTER_LOST),
]


@pytest.mark.parametrize(("error", "outcome"), ENDS, ids=lambda value: type(value).__name__)
def test_what_fit_raised_becomes_an_outcome(error: Exception, outcome: Outcome) -> None:
    failed = classify(error, attempt=3)
    assert failed.outcome is outcome
    assert failed.attempt == 3


REST: list[tuple[Exception, Outcome, str]] = [
    (AttemptFailedError("gone", outcome=Outcome.CLUSTER_LOST, final=True), Outcome.CLUSTER_LOST, "gone"),
    (ConfigurationError("no such run"), Outcome.INVALID, "no such run"),
    (ConnectionError("GCS is gone"), Outcome.CLUSTER_LOST, "the Ray cluster was lost: GCS is gone"),
    (OSError(5, "I/O error"), Outcome.DRIVER_LOST, "cannot use storage '/runs'"),
    (PermissionError("read-only"), Outcome.STORAGE_ERROR, "write permission for this user"),
    (KeyError("a bug"), Outcome.DRIVER_LOST, "the driver failed: KeyError"),
]


@pytest.mark.parametrize(("error", "outcome", "says"), REST)
def test_what_was_raised_around_fit_becomes_an_outcome(error: Exception, outcome: Outcome, says: str) -> None:
    ended = end_by_error(error, LocalStorageSettings(path="/runs"))
    assert ended.outcome is outcome
    assert says in ended.message
    assert ended.final == getattr(error, "final", False)


@pytest.mark.parametrize(
    ("said", "outcome"),
    [("timed_out", Outcome.TIMED_OUT), ("cancelled", Outcome.CANCELLED), ("", Outcome.DRIVER_LOST)],
)
def test_a_driver_that_got_a_signal_ends_as_its_supervisor_has_said(
    tmp_path: Path, said: str, outcome: Outcome
) -> None:
    (tmp_path / "stop").write_text(said)
    assert end_by_signal(_spec(), tmp_path / "spec").outcome is outcome


def test_the_message_of_a_user_error_is_a_line_with_rank_and_cause() -> None:
    failed = classify(WorkerGroupError("[Rank 1] Traceback\n  …\n", {1: ValueError("nan\nof three")}), attempt=1)
    assert str(failed) == "the train loop failed more often than max_failures allows: rank 1: ValueError: nan"


def test_every_attempt_of_a_run_reserves_under_the_same_name_and_no_other_run_does(tmp_path: Path) -> None:
    def requester(folder: str) -> str:
        return training.requester_id(LocalRunStore(str(tmp_path / folder)))

    assert requester("a/mnist") == requester("a/mnist")
    assert len({requester("a/mnist"), requester("b/mnist"), requester("a/cifar")}) == 3
    assert "mnist" in requester("a/mnist")


def test_a_driver_shows_life_while_it_takes_a_run_over_in_a_slow_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telling, "ALIVE_SECONDS", 0.05)
    monkeypatch.setattr(LocalRunStore, "folders", lambda self, folder="": time.sleep(0.5) or [])
    with (tmp_path / "output").open("w") as file:
        output = EventOutput(file)
    driver = Attempt(replace(_spec(), storage=LocalStorageSettings(path=str(tmp_path))), output, Details())
    assert driver.begin().attempt == 1
    output.close()
    assert (tmp_path / "output").read_text().count('"controller_alive"') > 3


def test_a_driver_shows_life_while_it_records_its_end_and_says_it_before_it_is_noted_for_other_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "output"
    with told.open("w") as file:
        output = EventOutput(file)
    driver = Attempt(replace(_spec(), storage=LocalStorageSettings(path=str(tmp_path))), output, Details())
    driver.begin()
    before = told.read_text().count('"controller_alive"')
    monkeypatch.setattr(telling, "ALIVE_SECONDS", 0.05)
    monkeypatch.setattr(attempt, "_LEAVE_SECONDS", 0.5)
    monkeypatch.setattr(attempt, "end_attempt", lambda *arguments, **named: time.sleep(0.5))
    away = threading.Event()
    monkeypatch.setattr(attempt, "note_completed", lambda storage, name: away.wait(20))
    began = time.monotonic()
    driver.close(AttemptEnded(outcome=Outcome.COMPLETED, attempt=1, result={}))
    assert time.monotonic() - began < 10
    away.set()
    output.close()
    text = told.read_text()
    assert text.count('"controller_alive"') - before > 3
    assert '"attempt_ended"' in text
