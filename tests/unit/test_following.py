"""Following a driver from outside: real processes that speak, fall silent, crash, or leave something behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefect_elastic_train import TrainingResult
from prefect_elastic_train.core.events import (
    EVENT_TAG,
    AttemptEnded,
    AttemptStarted,
    ControllerAlive,
    Event,
    StateChanged,
    encode_event,
)
from prefect_elastic_train.core.operator_settings import ElasticTrainSettings
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.core.settings import (
    ClusterSettings,
)
from prefect_elastic_train.core.storage_settings import LocalStorageSettings
from prefect_elastic_train.runs.attempts import end_attempt
from prefect_elastic_train.storage.store import LocalRunStore
from prefect_elastic_train.supervisor.attempt import Follower
from prefect_elastic_train.supervisor.child import ChildDriver
from prefect_elastic_train.supervisor.runtime import Runtime
from tests.support.processes import attempts
from tests.unit.support import begin, spec

SPEC = spec(cluster=ClusterSettings(address="auto"))

STARTED = AttemptStarted(attempt=4, run_name="mnist", run_uri="/runs/mnist")


def _say(event: Event) -> str:
    """Return the code with which a driver tells an event."""
    return f"print({EVENT_TAG + encode_event(event)!r}, flush=True)\n"


class Supervisor:
    """A supervisor, and what it was told."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.lines: list[tuple[str, str]] = []

    def follow(self, code: str, liveness: float = 60.0, check_stop: Callable[[], None] = lambda: None) -> AttemptEnded:
        """Follow a driver that runs some code to its end."""
        follower = Follower(
            ElasticTrainSettings(liveness_timeout_seconds=liveness, stop_grace_seconds=0.1),
            self.events.append,
            lambda source, text: self.lines.append((source, text)),
            check_stop,
        )
        driver = ChildDriver(
            follower, [sys.executable, "-c", f"import os, signal, subprocess, sys, time\n{code}"], dict(os.environ)
        )
        try:
            return follower.follow(driver) or driver.given_up(Outcome.COMPLETED, "without a last word")
        finally:
            driver.stop()


@pytest.fixture
def supervisor() -> Supervisor:
    """A supervisor without a cluster."""
    return Supervisor()


def test_the_last_word_of_a_driver_is_how_the_attempt_ended(supervisor: Supervisor) -> None:
    last = AttemptEnded(attempt=4, outcome=Outcome.USER_ERROR, message="ValueError")
    ended = supervisor.follow(_say(STARTED) + "print('epoch 1')\nprint('oh', file=sys.stderr)\n" + _say(last))
    assert ended == last
    assert supervisor.events == [STARTED, last]
    assert sorted(supervisor.lines) == [("driver", "epoch 1"), ("stderr", "oh")]


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "signal 9"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "signal 11"),
        ("os._exit(7)", "exit code 7"),
    ],
)
def test_a_driver_that_went_without_a_word_was_lost(supervisor: Supervisor, code: str, how: str) -> None:
    ended = supervisor.follow(_say(STARTED) + "print('last words', flush=True)\n" + code)
    assert ended.outcome is Outcome.DRIVER_LOST
    assert ended.attempt == 4
    assert how in ended.message
    assert "words" not in ended.message, "its output is told line by line, as it comes"


def test_the_traceback_of_a_driver_that_failed_to_start_is_told(supervisor: Supervisor) -> None:
    ended = supervisor.follow("raise RuntimeError('no such package')")
    assert ended.outcome is Outcome.DRIVER_LOST
    assert "RuntimeError: no such package" in ended.message


@pytest.mark.parametrize("chatter", ["time.sleep(60)", "while True: print('epoch', flush=True); time.sleep(0.01)"])
def test_a_driver_without_a_sign_of_life_is_given_up_whatever_it_prints(supervisor: Supervisor, chatter: str) -> None:
    alive = ControllerAlive(doing="SCHEDULING", seconds=1)
    started = time.monotonic()
    ended = supervisor.follow(_say(STARTED) + _say(alive) + chatter, liveness=0.5)
    assert time.monotonic() - started < 10
    assert ended.outcome is Outcome.DRIVER_LOST
    assert "no sign of life for 0.5 s" in ended.message
    assert "SCHEDULING" in ended.message


def test_signs_of_life_keep_a_driver(supervisor: Supervisor) -> None:
    alive = _say(ControllerAlive(doing="RUNNING", seconds=1))
    last = AttemptEnded(attempt=4, outcome=Outcome.COMPLETED, result={})
    code = _say(STARTED) + "for _ in range(8):\n    time.sleep(0.2)\n    " + alive + _say(last)
    assert supervisor.follow(code, liveness=1.0) == last


def test_a_driver_that_dies_while_something_it_started_holds_its_output_is_noticed(supervisor: Supervisor) -> None:
    child = "import time; time.sleep(30)"
    code = _say(STARTED) + f"subprocess.Popen([sys.executable, '-c', {child!r}])\nos.kill(os.getpid(), signal.SIGKILL)"
    started = time.monotonic()
    ended = supervisor.follow(code)
    assert time.monotonic() - started < 15
    assert ended.outcome is Outcome.DRIVER_LOST
    assert "signal 9" in ended.message


def test_a_request_to_stop_is_seen_while_a_driver_chatters(supervisor: Supervisor) -> None:
    class Stop(BaseException):
        """The user cancelled."""

    until = time.monotonic() + 0.5

    def check_stop() -> None:
        if time.monotonic() > until:
            raise Stop

    with pytest.raises(Stop):
        supervisor.follow("while True: print('epoch', flush=True)", check_stop=check_stop)
    assert time.monotonic() - until < 5


@pytest.mark.parametrize(
    "line",
    [EVENT_TAG, EVENT_TAG + "{}", EVENT_TAG + '{"kind": "danced"}', "x" + EVENT_TAG + encode_event(STARTED)],
)
def test_a_line_that_is_no_event_is_output(supervisor: Supervisor, line: str) -> None:
    ended = supervisor.follow(f"print({line!r})")
    assert supervisor.events == []
    assert supervisor.lines == [("driver", line)]
    assert ended.attempt == 0


def test_the_error_that_a_driver_wrote_last_is_told_in_a_line(supervisor: Supervisor) -> None:
    core = "[2026-11-22 15:36:29,080 E 6449 6500] (python-core-driver) gcs_rpc_client.h:199: Failed to connect to GCS."
    said = [core, "  Stack of the core", "(RayTrainWorker pid=7) ValueError: of a rank", "\\x1b[36mmore words\\x1b[0m"]
    ended = supervisor.follow("".join(f'print("{line}")\n' for line in said) + "os._exit(1)")
    assert ended.message.endswith("was ended by exit code 1: Failed to connect to GCS.")


def test_events_reach_the_supervisor_in_their_order(supervisor: Supervisor) -> None:
    states = [StateChanged(state=str(number)) for number in range(300)]
    supervisor.follow("".join(_say(state) for state in states))
    assert supervisor.events == states


def test_signal_names_are_told_for_signals_without_a_python_name(supervisor: Supervisor) -> None:
    number: Any = signal.SIGRTMIN + 3
    ended = supervisor.follow(f"os.kill(os.getpid(), {int(number)})")
    assert ended.outcome is Outcome.DRIVER_LOST
    assert f"signal {int(number)}" in ended.message


def test_a_finished_training_whose_last_word_was_lost_is_found_by_the_next_driver_in_a_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalRunStore(f"{tmp_path}/runs/mnist")
    begun = begin(store, SPEC)
    rows = [{f"metric_{number}": number / 7 for number in range(40)}] * 2000
    result = TrainingResult(run_name="mnist", run_uri=store.uri, history=rows)
    end_attempt(store, begun.attempt, "completed", result=result.model_dump(mode="json"))
    first = "'prefect_elastic_train.driver' in sys.orig_argv and not os.path.exists('once')"
    (tmp_path / "sitecustomize.py").write_text(f"import os, sys\nif {first}:\n    open('once', 'w')\n    os._exit(0)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    notes: list[str] = []
    runtime = Runtime(ElasticTrainSettings(), lambda event: None, lambda source, text: None, on_note=notes.append)
    try:
        ended = runtime.run_attempt(replace(SPEC, storage=LocalStorageSettings(path=f"{tmp_path}/runs")))
    finally:
        runtime.close()
    assert (ended.outcome, ended.already_finished) == (Outcome.COMPLETED, True)
    assert ["last word was lost" in note for note in notes] == [True]
    found = TrainingResult.model_validate(ended.result)
    assert len(found.history) + found.left_out["history"] == 2000
    assert len(attempts(tmp_path / "runs/mnist")) == 1, "no attempt was burnt"
