"""What the driver decides without a cluster: about the loop it was given, and about how ``fit()`` ended."""

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray.exceptions
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerHealthCheckTimeoutError
from ray.train.v2.api.exceptions import PreemptionError
from ray.train.v2.api.preemption import PreemptionInfo

from prefect_elastic_train.controller.scaling_policy import requester_id
from prefect_elastic_train.core.events import AttemptEnded
from prefect_elastic_train.core.outcomes import AttemptFailedError, ConfigurationError, Outcome
from prefect_elastic_train.core.payload import Payload, dump_payload
from prefect_elastic_train.core.ray_output import Details
from prefect_elastic_train.core.request import DriverSpec, write_spec
from prefect_elastic_train.core.settings import ClusterSettings, LocalStorageSettings, ScalingSettings
from prefect_elastic_train.driver import attempt, event_relay
from prefect_elastic_train.driver.attempt import Attempt
from prefect_elastic_train.driver.endings import final_event_of_error, final_event_of_signal
from prefect_elastic_train.driver.event_relay import EventOutput
from prefect_elastic_train.driver.joining import join_cluster, limit_to_local_cluster
from prefect_elastic_train.driver.termination_signals import count_signals, watch_signals
from prefect_elastic_train.driver.user_code import load_payload
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.commits import FencedOffError
from prefect_elastic_train.storage import retries
from prefect_elastic_train.storage.store import LocalRunStore
from tests.support.processes import free_port, wait_for
from tests.unit.support import spec


def _spec(payload: bytes, folder: str) -> DriverSpec:
    """A driver is sent a payload, by a flow that imports from a folder."""
    return replace(spec(), request=replace(spec().request, payload=payload), sys_path=[folder])


class _Callable:
    """An object that is called as a loop."""

    def __call__(self, config: dict[str, Any]) -> str:
        return "called"


def test_a_cluster_that_does_not_answer_at_the_address_of_the_environment_is_told_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    cluster = ClusterSettings(address="auto", connect_timeout_seconds=0.1)
    with pytest.raises(AttemptFailedError, match="correct the address of the RayCluster, or RAY_ADDRESS if"):
        join_cluster(spec(cluster=cluster))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with train loops, where only the flow finds them."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "a_users_loops.py").write_text(
        "class Trainer:\n    @staticmethod\n    def loop(config): return 'nested'\n"
        "def loop(config): return 'plain'\nNUMBER = 7\n"
    )
    (tmp_path / "broken_loops.py").write_text("raise RuntimeError('no licence')\n")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("loop", "returned"),
    [
        (lambda config, extra="sent": extra, "sent"),
        (lambda config, *arguments, **more: "sent", "sent"),
        (functools.partial(lambda config, other: other, other="bound"), "bound"),
        (_Callable(), "called"),
        ("a_users_loops:loop", "plain"),
        ("a_users_loops:Trainer.loop", "nested"),
    ],
)
def test_the_driver_prepares_a_loop_that_was_sent_and_one_that_it_imports_where_the_flow_found_it(
    folder: str, loop: Any, returned: str
) -> None:
    assert load_payload(_spec(dump_payload(Payload(loop)), folder)).train_loop({}) == returned


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b"torn", "cannot load train loop 'loop'"),
        (Payload("nowhere:loop"), "'nowhere:loop'.*'nowhere'.*ModuleNotFoundError"),
        (Payload("a_users_loops:Trainer.missing"), "'a_users_loops'.*no 'Trainer.missing'"),
        (Payload("a_users_loops:NUMBER"), "must be a function or the import path of one, got int"),
        (Payload("broken_loops:loop"), "cannot be imported.*RuntimeError: no licence"),
        (Payload(lambda config, other: None), r"parameters \(config, other\); it may require none"),
        (Payload(lambda: None, dataset_config="all"), "dataset_config must be Ray's DataConfig, got 'all'"),
    ],
)
def test_what_cannot_be_prepared_ends_the_attempt_as_invalid(folder: str, payload: Payload | bytes, says: str) -> None:
    sent = payload if isinstance(payload, bytes) else dump_payload(payload)
    with pytest.raises(ConfigurationError, match=says):
        load_payload(_spec(sent, folder))


def test_a_backend_with_replica_groups_is_refused(folder: str) -> None:
    torchft = pytest.importorskip("ray.train.v2.torch.torchft_config")
    payload = Payload(lambda: None, torch_config=torchft.TorchftConfig({}))
    with pytest.raises(ConfigurationError, match="torch_config is a TorchftConfig: replica groups are not supported"):
        load_payload(_spec(dump_payload(payload), folder))


LARGE = ScalingSettings(min_workers=4, max_workers=8, resources_per_worker={"CPU": 2})


@pytest.mark.parametrize(
    ("scaling", "extra_cpus", "expected"),
    [
        (LARGE, 0, 8),  # capacity decides, as always
        (LARGE, 1, "min_workers=4 need 8 CPU, and the local cluster on this machine has 7 for them"),
        (ScalingSettings(max_workers=12), 3, 5),
        (ScalingSettings(accelerator="gpu"), 0, "need 1 GPU"),
        (ScalingSettings(max_workers=2, placement_strategy="STRICT_SPREAD"), 0, "one node without labels"),
    ],
)
def test_what_a_local_cluster_can_never_hold_is_refused_with_the_numbers(
    scaling: ScalingSettings, extra_cpus: int, expected: int | str
) -> None:
    told = spec(replace(spec().request, extra_cpus=extra_cpus), scaling=scaling)
    joined = replace(told, cluster=ClusterSettings(address="auto"))
    assert limit_to_local_cluster(joined, {}) == scaling, "others may join it"
    if isinstance(expected, int):
        assert limit_to_local_cluster(told, {"CPU": 8.0}).max_workers == expected
        return
    with pytest.raises(AttemptFailedError, match=expected) as refused:
        limit_to_local_cluster(told, {"CPU": 8.0})
    assert refused.value.outcome is Outcome.INVALID


STORAGE = LocalStorageSettings(path="/runs")

_MIXED = RuntimeError(
    "… This means the checkpoints are not consistent.Got a mix of the following checkpoint paths: "
    "{'/run/a', '/run/b'}\nThis is unexpected -- please file a Github issue."
)
_PREEMPTED = PreemptionInfo(deadline_ms=None, preempted_node_to_ranks={"n": [1]})

ENDS = [
    (AttemptFailedError("gone", outcome=Outcome.CLUSTER_LOST, final=True), "cluster_lost", "gone"),
    (WorkerGroupError("[Rank 1] …\n", {1: ValueError("nan\n3")}), "user_error", ": rank 1: ValueError: nan"),
    (WorkerGroupError("boom", {0: WorkerHealthCheckTimeoutError("a worker hangs")}), "cluster_lost", ""),
    (ControllerError(FencedOffError("attempt 1 was taken over by attempt 2")), "invalid", ""),
    (ControllerError(RuntimeError("FencedOffError: attempt 1 was taken over")), "invalid", ""),
    (ControllerError(OSError(28, "No space left on device")), "storage_error", ""),
    (ControllerError(TimeoutError(110, "the mount does not answer")), "driver_lost", ""),
    (ControllerError(ValueError("a bug of Ray")), "driver_lost", ""),
    (ControllerError(_MIXED), "user_error", "none may upload. The folders: {'/run/a', '/run/b'}"),
    (ray.exceptions.ActorDiedError(), "driver_lost", ""),
    (ray.exceptions.RaySystemError("GCS is gone"), "cluster_lost", ""),
    (ConnectionError("GCS is gone"), "cluster_lost", "the Ray cluster was lost: GCS is gone"),
    (TypeError("Could not serialize the function loop"), "invalid", ""),
    (PreemptionError(_PREEMPTED), "cluster_lost", ""),
    (ray.exceptions.GetTimeoutError("the controller does not answer"), "cluster_lost", ""),
    (ConfigurationError("no such run"), "invalid", "no such run"),
    (ModuleNotFoundError("No module named 'jax'"), "invalid", "cannot import a module: No module named 'jax'"),
    (PermissionError("read-only"), "storage_error", "write permission for this user"),
    (KeyError("a bug"), "driver_lost", "the driver failed: KeyError: 'a bug'"),
]


@pytest.mark.parametrize(("error", "outcome", "says"), ENDS)
def test_what_was_raised_in_fit_or_around_it_becomes_an_outcome(error: Exception, outcome: str, says: str) -> None:
    ended = final_event_of_error(error, STORAGE)
    assert (ended.outcome.value, ended.final) == (outcome, getattr(error, "final", False))
    assert ended.message.endswith(says)


def test_an_error_before_ray_train_is_needed_is_told_without_its_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray.train")
    monkeypatch.setitem(sys.modules, "ray.exceptions", None)  # as where Ray's installation is broken
    assert final_event_of_error(PermissionError("read-only"), STORAGE).outcome is Outcome.STORAGE_ERROR


def test_a_forked_process_counts_its_own_signals() -> None:
    before = count_signals(signal.SIGUSR1)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGUSR1, lambda *_: None)
        signal.set_wakeup_fd(-1)
        watch_signals()
        signal.raise_signal(signal.SIGUSR1)
        time.sleep(0.5)
        os._exit(count_signals(signal.SIGUSR1) - before)
    time.sleep(0.2)
    assert count_signals(signal.SIGUSR1) == before
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


@pytest.mark.parametrize(
    ("said", "outcome"), [("timed_out", "timed_out"), ("cancelled", "cancelled"), ("", "driver_lost")]
)
def test_a_driver_that_got_a_signal_ends_as_its_supervisor_has_said(tmp_path: Path, said: str, outcome: str) -> None:
    (tmp_path / "stop").write_text(said)
    assert final_event_of_signal(spec(), tmp_path / "spec").outcome == outcome


#: A driver that is told to end while the error of its attempt is judged, by its supervisor and by the guard.
_ENDED_WHILE_JUDGED = """
import os, signal, sys
from prefect_elastic_train.driver import __main__ as driver

driver.Attempt.run = lambda self: 1 / 0
driver.final_event_of_error = lambda *_: os.kill(os.getpid(), signal.SIGINT)
driver.main(sys.argv[1:])
"""


def test_a_signal_while_an_error_is_judged_does_not_cut_the_last_word(tmp_path: Path) -> None:
    write_spec(spec(storage=LocalStorageSettings(path=str(tmp_path))), tmp_path / "spec")
    (tmp_path / "stop").write_text("cancelled")
    command = [sys.executable, "-c", _ENDED_WHILE_JUDGED, str(tmp_path / "spec")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert '"outcome":"cancelled"' in done.stdout, done.stderr


def test_every_attempt_of_a_run_reserves_under_the_same_name_and_no_other_run_does() -> None:
    names = [requester_id(LocalRunStore(f"/tmp/{folder}")) for folder in ("a/mnist", "a/mnist", "b/mnist", "a/cifar")]
    assert names[0] == names[1]
    assert len({*names}) == 3


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    """A driver that tells a file of itself, and often."""
    monkeypatch.setattr(event_relay.ev, "ALIVE_SECONDS", 0.02)
    with (tmp_path / "output").open("w") as file:
        return Attempt(spec(storage=LocalStorageSettings(path=str(tmp_path))), EventOutput(file), Details())


def test_a_driver_shows_life_in_a_slow_storage_and_says_its_end_before_it_is_noted_for_other_runs(
    driver: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = threading.Event()
    monkeypatch.setattr(attempt, "EXIT_STEP_SECONDS", 0.2)
    monkeypatch.setattr(LocalRunStore, "file_sizes", lambda self, folder: time.sleep(0.2) or {})
    monkeypatch.setattr(attempt, "end_attempt", lambda *arguments, **named: time.sleep(0.2))
    monkeypatch.setattr(attempt, "record_completed_run", lambda storage, name: away.wait(20))
    output = tmp_path / "output"

    def heartbeats_during(step: Callable[[], object]) -> int:
        driver.recorder.set_activity("")
        before = output.read_text().count('"controller_alive"')
        step()
        return output.read_text().count('"controller_alive"') - before

    assert heartbeats_during(driver.begin) > 3
    ended = AttemptEnded(outcome=Outcome.COMPLETED, attempt=1, result={})
    began = time.monotonic()
    assert heartbeats_during(lambda: driver.close(ended)) > 3
    assert time.monotonic() - began < 5
    away.set()
    wait_for(lambda: '"attempt_ended"' in output.read_text(), 10, "the final event")


def test_a_driver_shows_since_when_its_storage_neither_answers_nor_fails(
    driver: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standing = tmp_path / "mnist" / "standing"
    monkeypatch.setattr(retries, "_REPORT_SECONDS", 0.2)
    standing.parent.mkdir(exist_ok=True)
    os.mkfifo(standing)  # a reader hangs until somebody writes, as on a hard mount whose server is away
    reading = threading.Thread(target=driver.store.read, args=["standing"])
    reading.start()
    wait_for(lambda: '"doing":"waiting for the storage"' in (tmp_path / "output").read_text(), 10, "the heartbeat")
    standing.write_bytes(b"there it is")
    reading.join(10)
    assert retries.waiting_since() is None


@pytest.mark.parametrize(("successor", "outcome"), [("1", "superseded"), ("2", "invalid")])
def test_an_attempt_that_was_told_to_end_learns_in_a_second_that_it_was_taken_over(
    driver: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, successor: str, outcome: str
) -> None:
    patience: list[float] = []
    driver.begin()
    driver._stop_heartbeat()  # else it may see the successor first, and interrupt this process
    monkeypatch.setattr(LocalRunStore, "with_retry_limit", lambda self, seconds: patience.append(seconds) or self)
    monkeypatch.setattr(attempt, "count_signals", lambda: 1)
    first, second = (tmp_path / "mnist" / layout.attempt_name(number) for number in (1, 2))
    record = json.loads(first.read_text())
    record["owner"]["flow_run_id"] = successor
    assert driver.find_successor() is None
    second.write_text(json.dumps(record))
    driver.close(AttemptEnded(outcome=Outcome.DRIVER_LOST))
    wait_for(lambda: f'"outcome":"{outcome}"' in (tmp_path / "output").read_text(), 10, "the final event")
    assert patience[0] == 1.0


@pytest.mark.parametrize(
    ("request_of", "says"),
    [
        ({"begun": True}, "the storage is not mounted here"),
        ({"resume_from": "misspelt"}, "resume_from='misspelt'"),  # else the run's name would belong to it
    ],
)
def test_nothing_is_written_where_the_storage_or_the_source_of_a_run_is_missing(
    tmp_path: Path, request_of: dict[str, Any], says: str
) -> None:
    wanted = spec(replace(spec().request, **request_of), storage=LocalStorageSettings(path=f"{tmp_path}/runs"))
    with open(tmp_path / "events", "w") as file, pytest.raises(AttemptFailedError, match=says):
        Attempt(wanted, EventOutput(file), Details()).run()
    assert not [*tmp_path.glob("runs/*")]
    assert "cluster_wanted" not in (tmp_path / "events").read_text()
