"""The notice of a coming restart, as the loop of one rank sees it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from prefect_elastic_train.elastic.loop_callback import LoopCallback
from prefect_elastic_train.loop import RunContext, notice, resize_requested


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """This process as the only worker of a group."""
    from ray.train.v2._internal.execution import context

    found = SimpleNamespace(
        preemption_context=SimpleNamespace(preemption_info=None), get_world_size=lambda: found.size, size=1
    )
    monkeypatch.setattr(context, "_train_context", found)
    monkeypatch.setattr(notice, "_notice", notice._Notice())
    return found


def _report(checkpoint: bool) -> float:
    """Report as Ray Train's worker does; give how long that took."""
    started = time.monotonic()
    callback = LoopCallback(RunContext("run", "", 1, "", ""))
    with callback.on_report():
        if checkpoint:
            with callback.on_checkpoint_transfer():
                pass
    return time.monotonic() - started


def _asked_until(answer: bool, seconds: float = 2.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if resize_requested() is answer:
            return True
        time.sleep(0.001)
    return False


def test_outside_of_a_training_nothing_is_requested_and_ray_is_not_imported() -> None:
    code = (
        "import sys; from prefect_elastic_train.loop import resize_requested; "
        "assert [resize_requested() for _ in range(3)] == [False] * 3; assert 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_growth_is_told_once(worker: SimpleNamespace) -> None:
    assert not resize_requested()
    notice.announce(1)
    assert _asked_until(True)
    assert not _asked_until(True, 0.6)
    notice.announce(0)
    assert not _asked_until(True, 0.6)
    notice.announce(2)
    assert _asked_until(True)


def test_a_drain_is_told_once_and_again_when_another_node_goes(worker: SimpleNamespace) -> None:
    worker.preemption_context.preemption_info = SimpleNamespace(preempted_node_to_ranks={"a": [0]}, deadline_ms=1)
    assert _asked_until(True)
    worker.preemption_context.preemption_info = SimpleNamespace(preempted_node_to_ranks={"a": [0]}, deadline_ms=0)
    assert not _asked_until(True, 0.6)
    worker.preemption_context.preemption_info = SimpleNamespace(
        preempted_node_to_ranks={"a": [0], "b": [1]}, deadline_ms=0
    )
    assert _asked_until(True)


def test_the_ranks_ask_together_four_times_a_second_however_quick_the_loop_is(
    worker: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray.train.collective

    worker.size = 2
    broadcasts: list[Any] = []
    monkeypatch.setattr(ray.train.collective, "broadcast_from_rank_zero", lambda data: broadcasts.append(data) or data)
    started, questions = time.monotonic(), 0
    while time.monotonic() - started < 1.5:
        resize_requested()
        questions += 1
        time.sleep(0.005)
    # On from none, the silence at most doubles, up to 25 questions.
    assert len(broadcasts) <= 6 + 5 + questions / 25
    assert questions > 50


def test_every_rank_answers_as_rank_0_does(worker: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray.train.collective

    worker.size = 2
    answers = iter([(None, 2), (("growth", 1), 0)])
    monkeypatch.setattr(ray.train.collective, "broadcast_from_rank_zero", lambda data: next(answers))
    assert [resize_requested() for _ in range(4)] == [False, False, False, True]


def test_a_report_with_a_checkpoint_stands_still_until_the_growth_is_called_off(worker: SimpleNamespace) -> None:
    assert _report(checkpoint=True) < 2
    notice.announce(1)
    assert _report(checkpoint=False) < 2
    threading.Timer(0.5, notice.announce, (0,)).start()
    assert 0.4 < _report(checkpoint=True) < 5


def test_a_loop_that_was_told_to_save_stands_still_in_its_next_report(worker: SimpleNamespace) -> None:
    notice.announce(1)
    assert _asked_until(True)
    threading.Timer(0.5, notice.announce, (0,)).start()
    assert 0.4 < _report(checkpoint=False) < 5
    assert _report(checkpoint=False) < 2


def test_it_does_not_stand_still_for_ever(worker: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "_HOLD_SECONDS", 0.3)
    notice.announce(1)
    assert 0.2 < _report(checkpoint=True) < 2


def test_a_report_that_fails_is_not_waited_after(worker: SimpleNamespace) -> None:
    notice.announce(1)
    started = time.monotonic()
    callback = LoopCallback(RunContext("run", "", 1, "", ""))
    with pytest.raises(OSError), callback.on_report(), callback.on_checkpoint_transfer():
        raise OSError("disk full")
    assert time.monotonic() - started < 2
