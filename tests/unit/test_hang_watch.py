"""When a loop hangs, and when it is only slow: learned limits, and what is observed of its threads."""

import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from prefect_elastic_train.controller import hang_watch
from prefect_elastic_train.controller.hang_watch import LEARNING_STEPS, HangWatch, find_hung_ranks, phase_limit
from prefect_elastic_train.loop.phases import PhaseReport, Phases
from prefect_elastic_train.worker import thread_activity
from prefect_elastic_train.worker.thread_activity import ThreadActivity, observe_threads

STEP = 0.3
#: Durations of steps, of which the median is that of `STEP`.
DISTRIBUTIONS = {
    "log-normal": lambda random, count: STEP * random.lognormal(sigma=1.0, size=count),
    "Pareto": lambda random, count: STEP / 2**0.5 * (1 + random.pareto(2.0, size=count)),
    "pauses": lambda random, count: np.where(random.random(count) < 1e-3, 30.0, 1.0) * random.gamma(9, STEP / 9, count),
}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_million_heavy_tailed_steps_stay_within_the_learned_limit(distribution: str) -> None:
    """More than three days of training."""
    durations = DISTRIBUTIONS[distribution](np.random.default_rng(42), 1_000_000)
    longest = np.maximum.accumulate(durations)
    suspects = [
        step
        for step in np.flatnonzero(durations[1:] > 4.0) + 1  # the shortest limit
        if durations[step] > phase_limit("step", longest[step - 1], step)
    ]
    assert suspects == []
    assert phase_limit("step", longest[LEARNING_STEPS], LEARNING_STEPS) < 200, "a hang is found in minutes"


@pytest.mark.parametrize(
    ("phase", "longest", "steps", "limit"),
    [
        ("step", 0.3, LEARNING_STEPS, 4.5),
        ("step", 0.01, LEARNING_STEPS, 4.0),
        ("step", 0.3, LEARNING_STEPS - 1, 1800.0),
        ("first step", 0.0, 0, 1800.0),
        ("evaluation", 0.001, 10**6, 600.0),
        ("evaluation", 100.0, 10**6, 1500.0),
        ("loading", 0.001, 10**6, 600.0),
        ("save", 60.0, 10**6, 3900.0),
        ("step", 200.0, LEARNING_STEPS, 1800.0),
        ("step", 3600.0, LEARNING_STEPS, 7200.0),
    ],
)
def test_the_limit_of_a_phase_is_a_multiple_of_its_longest_duration_within_bounds(
    phase: str, longest: float, steps: int, limit: float
) -> None:
    assert phase_limit(phase, longest, steps) == limit


WAITING = ThreadActivity(is_stopped=False, is_still=True, stack="waits for other ranks at …")
STOPPED, STUCK = WAITING._replace(is_stopped=True), WAITING._replace(stack="is at …")
SLOW = STUCK._replace(is_still=False)


@pytest.mark.parametrize(
    ("activities", "over", "hung"),
    [
        ({0: WAITING, 1: STOPPED}, {0}, {1}),
        ({0: WAITING, 1: STUCK}, {0, 1}, {1}),
        ({0: SLOW, 1: STUCK}, {0, 1}, {1}),
        ({0: WAITING, 1: STUCK}, {0}, set()),  # rank 1 is in a phase that may take longer
        ({0: WAITING, 1: SLOW}, {0, 1}, set()),
        ({0: WAITING, 1: WAITING}, {0, 1}, {0, 1}),  # a deadlock
        ({0: WAITING}, {0, 1}, set()),  # rank 1 could not be observed
        ({0: WAITING._replace(is_still=False), 1: WAITING._replace(stack="")}, {0, 1}, set()),  # py-spy may not read it
    ],
)
def test_a_rank_hangs_if_its_thread_is_idle_and_waits_for_no_other_rank(
    activities: dict[int, ThreadActivity], over: set[int], hung: set[int]
) -> None:
    assert find_hung_ranks(activities, over, 2) == hung


SCRIPT = """
import subprocess, sys, threading, time

def hang():
    print(threading.get_native_id(), flush=True)
    {body}

thread = threading.Thread(target=hang, daemon=True)
thread.start()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("body", "suspended", "expected"),
    [
        ("threading.Lock().acquire() and threading.Event().wait()", False, (False, True)),
        ("threading.Event().wait()", True, (True, True)),
        ("\n    while True: pass", False, (False, False)),
        ("\n    while True: time.sleep(0.1)", False, (False, False)),
        ("subprocess.run([sys.executable, '-c', 'while True: pass'])", False, (False, False)),
    ],
)
def test_a_thread_is_observed_from_outside_of_its_process(
    monkeypatch: pytest.MonkeyPatch, body: str, suspended: bool, expected: tuple[bool, bool]
) -> None:
    monkeypatch.setattr(thread_activity, "_SECONDS", (1.0, 1.0))
    process = subprocess.Popen([sys.executable, "-c", SCRIPT.format(body=body)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        thread = int(process.stdout.readline())
        time.sleep(0.2)
        if suspended:
            psutil.Process(process.pid).suspend()
        activity = observe_threads({3: (process.pid, thread), 4: (process.pid, 1)})
        assert [*activity] == [3], "a thread that is not there is left out"
        assert (activity[3].is_stopped, activity[3].is_still) == expected
        assert ", in hang" in activity[3].stack
        assert not activity[3].stack.startswith("waits")
    finally:
        for child in psutil.Process(process.pid).children():
            child.kill()
        process.kill()
        process.communicate()


class _Watched:
    """Two ranks at times that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.observations = 0
        monkeypatch.setattr(hang_watch.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(HangWatch, "_observe", self._observe)
        self.events: list[Any] = []
        self.watch = HangWatch(self.events.append)
        self.watch.begin_group([None, None])

    def _observe(self, now: float) -> None:
        self.observations += 1

    def poll(self, *reports: PhaseReport | None, running: bool = True) -> None:
        self.watch.check([SimpleNamespace(running=running, phase=report) for report in reports])


def _report(name: str, seconds: float, steps: int = 60, **longest: float) -> PhaseReport:
    return PhaseReport(name, seconds, steps, {"step": STEP} | longest, 1)


def test_a_rank_is_observed_once_it_exceeds_the_limit_of_its_phase_also_if_it_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = _Watched(monkeypatch)
    for slow in (_report("evaluation", 60 * STEP), _report("save", 60.0), _report("loading", 20.0)):
        watched.poll(slow, _report("step", 4.4))
    assert watched.observations == 0
    [learned] = watched.events
    assert learned.limit == "4.5 s; the longest so far took 0.3 s"
    watched.poll(_report("step", 0.1), _report("step", 0.1))
    watched.now += 4.3
    watched.watch.check([SimpleNamespace(running=True)] * 2)  # no answers
    assert watched.observations == 0
    watched.now += 0.2
    watched.watch.check([SimpleNamespace(running=True)] * 2)
    assert watched.observations == 1


def test_a_rank_that_does_not_answer_is_observed_in_any_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = _Watched(monkeypatch)
    saving = [SimpleNamespace(running=True, phase=_report("save", 0.1)), SimpleNamespace(running=True)]
    watched.poll(_report("save", 0.1), _report("save", 0.1))
    watched.now += 4.4
    watched.watch.check(saving)
    assert watched.observations == 0
    watched.now += 0.2
    watched.watch.check(saving)
    assert watched.observations == 1


def test_ranks_that_have_left_their_session_are_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = _Watched(monkeypatch)
    watched.poll(_report("step", 0.1), _report("step", 0.1))
    watched.poll(None, None)
    watched.now += 10_000
    watched.watch.check([SimpleNamespace(running=True)] * 2)
    watched.poll(_report("step", 9999.0), _report("step", 9999.0), running=False)
    assert watched.observations == 0


def test_phases_measure_what_they_contain_and_interrupted_ones_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr("prefect_elastic_train.loop.phases.time.monotonic", lambda: now)
    phases = Phases()
    assert phases.report(0) is None
    for name, seconds in [("loading", 2.0), ("step", 3.0), ("save", 4.0), ("step", 1.0), ("loading", 1.0)]:
        phases.begin(name)
        now += seconds
    report = phases.report(7)
    assert report is not None
    assert report[:3] == ("loading", 1.0, 7)
    assert {name: report.longest[name] for name in ("loading", "step", "save")} == {"loading": 2, "step": 3, "save": 4}
    assert report.thread_id == threading.get_native_id()
