"""Loops that hang: they are found by what their own steps taught, and loops that are only slow are left alone."""

import re
import time
from pathlib import Path

import psutil
import pytest

from prefect_elastic_train.core.events import LoopWarned, StallTimeoutLearned, WorkerFailed
from tests.support.clusters import RayHead
from tests.support.processes import Start, wait_for
from tests.support.reports import history
from tests.support.session_training import SessionTraining


def test_a_stopped_rank_is_found_in_seconds_with_its_stack_and_the_group_is_restarted(
    start: Start, head: RayHead, tmp_path: Path
) -> None:
    training = SessionTraining(start, tmp_path, sleep=0.3, recovery_points=1, cluster=head.block)
    two = training.group(2, steps=60)
    psutil.Process(two[1]["pid"]).suspend()
    stopped_at = time.time()
    training.group(2)
    assert training.end(attempts=1, worker_failures=1) == [2, 2]
    [failure] = history(training.flow.run, WorkerFailed)
    assert failure.at - stopped_at < 10
    waiting, stopped = failure.causes
    assert (stopped.ranks, waiting.ranks, waiting.is_consequence) == ([1], [0], True)
    assert re.match(r"HungLoopError: no progress for .* rank is stopped \(SIGSTOP\) and is at \S+ in ", stopped.message)
    assert ", in torch_loop" in stopped.traceback
    assert ", in torch_loop" in waiting.traceback
    [learned, *_] = history(training.flow.run, StallTimeoutLearned)
    assert re.fullmatch(r"[4-7]\.\d s; the longest so far took 0\.[34]\d? s", learned.limit)


@pytest.mark.full
def test_a_rank_that_waits_for_a_lock_is_found_and_the_group_is_restarted(
    start: Start, head: RayHead, tmp_path: Path
) -> None:
    hang = {"hangs": (70, 1)}
    training = SessionTraining(start, tmp_path, sleep=0.1, recovery_points=1, disturbances=hang, cluster=head.block)
    training.group(2, steps=60)
    hung = wait_for(lambda: [*tmp_path.glob("*.hung")], 60, "the hang")[0].stat().st_mtime
    training.group(2)
    assert training.end(attempts=1, worker_failures=1) == [2, 2]
    [failure] = history(training.flow.run, WorkerFailed)
    assert failure.at - hung < 40
    waiting, stuck = failure.causes
    assert (stuck.ranks, waiting.ranks, waiting.is_consequence) == ([1], [0], True)
    assert re.search(r"the rank is at \S+ in _hang: threading.Event\(\)\.wait\(\)", stuck.message)


@pytest.mark.full
def test_slow_evaluations_saves_and_batches_are_no_hang(start: Start, head: RayHead, tmp_path: Path) -> None:
    """Each takes at least 60 times as long as a step (0.3 s). The slow sample is the first of an epoch."""
    slow = {"pauses": {"60": 18.0, "90": 18.0}, "slow_save": (5, 60.0), "slow_sample": (801, 20.0)}
    training = SessionTraining(start, tmp_path, sleep=0.3, disturbances=slow, cluster=head.block)
    training.group(2, steps=100)
    assert training.end(attempts=1, worker_failures=0) == [2]
    assert history(training.flow.run, LoopWarned) == []
