"""The notice of a coming restart, as the loop of one rank sees it."""

import threading
import time
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest

from prefect_elastic_train.loop import RunContext, resize_requested, restart_notice
from prefect_elastic_train.worker import worker_callbacks
from prefect_elastic_train.worker.worker_callbacks import WorkerHooks
from tests.unit.support import python


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """This process as the only worker of a group."""
    from ray.train.v2._internal.execution import context

    found = SimpleNamespace(
        preemption_context=SimpleNamespace(preemption_info=None),
        get_world_size=lambda: found.size,
        get_world_rank=lambda: 0,
        size=1,
        report_order_condition=threading.Condition(),
        report_call_index=1,
        current_report_index=0,
    )
    monkeypatch.setattr(context, "_train_context", found)
    monkeypatch.setattr(restart_notice, "state", restart_notice.RestartNotice())
    return found


def _report(checkpoint: bool, error: OSError | None = None) -> float:
    """Report as Ray Train's worker does, which an error may end, and return how long that took."""
    started = time.monotonic()
    callback = WorkerHooks(RunContext("run", "", 1, "", ""))
    with suppress(OSError), callback.on_report(), callback.on_checkpoint_transfer() if checkpoint else nullcontext():
        if error is not None:
            raise error
    return time.monotonic() - started


def _answers() -> list[bool]:
    """Ask more often than a broadcast may be left out."""
    return [resize_requested() for _ in range(40)]


def test_outside_of_a_training_nothing_is_requested_and_ray_is_not_imported() -> None:
    python(
        "from prefect_elastic_train.loop import resize_requested; "
        "assert [resize_requested() for _ in range(3)] == [False] * 3; assert 'ray' not in sys.modules"
    )


def test_each_growth_is_told_once(worker: SimpleNamespace) -> None:
    assert sum(_answers()) == 0
    for growth, told in ((1, 1), (1, 0), (0, 0), (2, 1)):
        restart_notice.set_announced_growth(growth)
        assert sum(_answers()) == told


def test_a_loop_that_asks_beside_its_session_does_not_take_the_notice_of_it(worker: SimpleNamespace) -> None:
    restart_notice.set_announced_growth(1)
    assert sum(_answers()) == 1
    assert [restart_notice.poll_restart(lambda: "decided", together=True) for _ in range(2)] == [
        (True, "decided"),
        (False, "decided"),
    ]
    assert sum(_answers()) == 0


def test_a_drain_is_told_once_and_again_when_another_node_goes(worker: SimpleNamespace) -> None:
    for nodes, deadline, told in (({"a": [0]}, 1, 1), ({"a": [0]}, 0, 0), ({"a": [0], "b": [1]}, 0, 1)):
        info = SimpleNamespace(preempted_node_to_ranks=nodes, deadline_ms=deadline)
        worker.preemption_context.preemption_info = info
        assert sum(_answers()) == told


def test_the_ranks_ask_together_four_times_a_second_however_quick_the_loop_is_and_answer_as_rank_0(
    worker: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray.train.collective

    def broadcast(data):
        broadcasts.append(data)
        return next(answers, data)

    worker.size = 2
    broadcasts = []
    answers = iter([(None, 2, None), (1, 0, None)])
    monkeypatch.setattr(ray.train.collective, "broadcast_from_rank_zero", broadcast)
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(restart_notice, "time", clock)
    assert [resize_requested() for _ in range(4)] == [False, False, False, True]
    for _ in range(400):
        clock.now += 0.005
        resize_requested()
    # On from none, the silence at most doubles, up to 25 questions.
    assert 400 / 26 <= len(broadcasts) <= 8 + 400 / 25


@pytest.mark.parametrize("told", [False, True])
def test_a_report_that_the_growth_waits_for_stands_still_until_it_is_called_off(
    worker: SimpleNamespace, told: bool
) -> None:
    assert _report(checkpoint=True) < 1
    restart_notice.set_announced_growth(1)
    assert not told or any(_answers())
    threading.Timer(0.2, restart_notice.set_announced_growth, (0,)).start()
    assert 0.15 < _report(checkpoint=not told) < 5
    assert _report(checkpoint=True) < 1


def test_it_does_not_stand_still_for_ever_nor_after_an_ordinary_report_or_one_that_failed(
    worker: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_callbacks, "_HOLD_SECONDS", 0.2)
    restart_notice.set_announced_growth(1)
    assert _report(checkpoint=False) < 0.15
    assert 0.15 < _report(checkpoint=True) < 2
    assert _report(checkpoint=True, error=OSError("disk full")) < 0.15
