"""Whether a loop goes on from its checkpoint, from what it reports and from what it has asked for."""

from __future__ import annotations

from typing import Any

import pytest
from ray.train.v2._internal.execution.training_report import _TrainingReport
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus

from prefect_elastic_train.core.events import Event, LoopWarned
from prefect_elastic_train.elastic import loop_watch
from prefect_elastic_train.elastic.loop_state import LoopState
from prefect_elastic_train.elastic.loop_watch import LoopWatch, Offer, Verdict, missing_ranks

NEVER, ASKED, OPENED = LoopState(), LoopState(asked=True), LoopState(asked=True, opened=True)


def judged(
    before: dict[str, Any],
    reports: list[dict[str, Any]],
    state: LoopState,
    saves: bool = False,
    same_size: bool | None = True,
) -> list[Any]:
    """Verdicts after each report, up to the first that is clear."""
    offer, found = Offer("checkpoint_a", before, same_size), []
    for metrics in reports:
        found.append(offer.judge(metrics, saves, lambda: state))
        if found[-1] is not None:
            break
    return found


@pytest.mark.parametrize(
    ("before", "reports", "state"),
    [
        ({"step": 8}, [{"step": 9}], OPENED),
        ({"step": 8}, [{"step": 9}], NEVER),  # it restores its state by means of its own
        ({"step": 8, "epoch": 0}, [{"step": 0, "epoch": 1}], OPENED),
        ({"epoch": 2}, [{"epoch": 2}], OPENED),
        ({"step": 8, "global_step": 108}, [{"step": 1, "global_step": 109}], OPENED),
        ({"step": 7}, [{"step": 0}, {"step": 6}, {"step": 7}, {"step": 0}], OPENED),  # of an epoch
        ({"loss": 1.0}, [{"loss": 0.9}], OPENED),
        ({"step": 8}, [{"phase": "warm"}, {"step": 9}], NEVER),
        ({}, [{"step": 0}], OPENED),  # another run's checkpoint
        ({"step": float("nan")}, [{"step": 1}], OPENED),
        ({"iteration": 12, "epoch": 3}, [{"iteration": 13, "epoch": 0}], OPENED),  # epochs of an iteration
        ({"epoch": 2.0, "step": 100}, [{"epoch": 1.01, "step": 101}], OPENED),  # epochs of fewer workers
    ],
)
def test_a_loop_that_goes_on_is_not_suspected(
    before: dict[str, Any], reports: list[dict[str, Any]], state: LoopState
) -> None:
    verdicts = judged(before, reports, state)
    assert verdicts[:-1] == [None] * (len(reports) - 1)
    assert verdicts[-1].ignored is False


@pytest.mark.parametrize(
    ("before", "reports", "state", "reason", "again"),
    [
        ({"step": 8}, [{"step": 1}], NEVER, "it never called ray.train.get_checkpoint()", 1.0),
        ({"step": 8}, [{"step": 1}], ASKED, "never read what it got", 1.0),
        ({"step": 8}, [{"step": 1}, {"step": 8}, {"step": 9}], OPENED, "did not go on where that ends", 1.0),
        ({"global_step": 100}, [{"global_step": 75}], OPENED, "did not go on where that ends", 0.25),
        ({"epoch": 4, "step": 9}, [{"epoch": 2, "step": 0}], OPENED, "did not go on where that ends", 0.5),
        ({"epoch": 1, "step": 10}, [{"epoch": 1, "step": 0}], OPENED, "did not go on where that ends", 0.5),
        ({"epoch": 0}, [{"epoch": 0}], NEVER, "it never called ray.train.get_checkpoint()", 1.0),
        ({"loss": 1.0}, [{"loss": 2.0}, {"loss": 1.9}], NEVER, "it never called ray.train.get_checkpoint()", 1.0),
        ({}, [{"step": 0}, {"step": 1}], ASKED, "never read what it got", 1.0),
    ],
)
def test_a_loop_that_begins_again_is_told_with_the_reason_and_what_it_does_again(
    before: dict[str, Any], reports: list[dict[str, Any]], state: LoopState, reason: str, again: float
) -> None:
    *unclear, verdict = judged(before, reports, state)
    assert (unclear, verdict.ignored, verdict.again) == ([None] * (len(reports) - 1), True, again)
    assert reason in verdict.message


@pytest.mark.parametrize("reports", [[{"step": 75}], [{"step": step} for step in range(51)]])
def test_with_another_number_of_workers_a_loop_that_reads_its_checkpoint_may_count_otherwise(
    reports: list[dict[str, Any]],
) -> None:
    assert judged({"step": 150}, reports, OPENED, same_size=False)[-1].ignored is False
    assert judged({"step": 150}, reports, NEVER, same_size=False)[-1].ignored is True


@pytest.mark.parametrize(
    ("before", "reports", "state", "same_size", "sure"),
    [
        ({"step": 8}, [{"step": 1}], NEVER, None, True),
        ({"epoch": 3}, [{"epoch": 0}], OPENED, True, True),
        ({"epoch": 3}, [{"epoch": 0}], OPENED, None, False),
        ({"epoch": 3, "step": 8}, [{"epoch": 3, "step": 0}], OPENED, True, False),  # it begins its epoch anew
        ({"step": 8}, [{"step": 1}, {"step": 9}], OPENED, True, False),  # too late, and perhaps an epoch's
    ],
)
def test_only_a_loop_that_is_wrong_for_sure_may_end_the_training(
    before: dict[str, Any], reports: list[dict[str, Any]], state: LoopState, same_size: bool | None, sure: bool
) -> None:
    verdict = judged(before, reports, state, same_size=same_size)[-1]
    assert (verdict.ignored, verdict.is_sure) == (True, sure)


def test_a_loop_that_counts_nothing_is_judged_before_its_first_checkpoint_replaces_another() -> None:
    (verdict,) = judged({"loss": 1.0}, [{"loss": 2.0}], NEVER, saves=True)
    assert isinstance(verdict, Verdict)
    assert verdict.ignored


def test_ranks_that_keep_others_waiting_are_named_and_nobody_else() -> None:
    waits, later, behind = (LoopState(reports=5), 31.0), (LoopState(reports=5), 0.0), (LoopState(reports=4), 0.0)
    assert missing_ranks({0: waits, 1: behind, 2: waits}, 3) == ([0, 2], [1])
    uploading = (LoopState(reports=4, in_report=True), 0.0)
    assert missing_ranks({0: waits, 1: uploading, 2: behind}, 3) == ([0], [2]), "one is still in its report before"
    assert missing_ranks({0: waits, 2: waits}, 3) == ([0, 2], [1]), "a rank that does not answer"
    assert missing_ranks({0: waits, 1: later}, 2) == ([], []), "one that uploads has begun its report"
    assert missing_ranks({0: (LoopState(reports=5), 29.0), 1: behind}, 2) == ([], []), "not for long"
    assert missing_ranks({0: behind, 1: behind}, 2) == ([], [])


class Watched:
    """A loop of one worker at times that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hangs_after_seconds: float = 0.0) -> None:
        self.now = 100.0
        monkeypatch.setattr(loop_watch.time, "monotonic", lambda: self.now)
        self.events: list[Event] = []
        self.watch = LoopWatch(False, self.events.append, hangs_after_seconds)
        self.watch.begin([object()], "", {})

    def report(self, times: int, seconds: float, saves: bool = False) -> None:
        """Have the loop report so often, so many seconds apart."""
        for _ in range(times):
            self.now += seconds
            self.watch.look([WorkerStatus(True, None, _TrainingReport(CHECKPOINT if saves else None, {}, False))])

    @property
    def problems(self) -> list[str]:
        """What was told."""
        return [event.problem for event in self.events if isinstance(event, LoopWarned)]


CHECKPOINT: Any = object()


def test_a_loop_without_a_checkpoint_is_told_of_once_when_that_costs_something(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Watched(monkeypatch)
    slow.report(9, 5.0)
    assert slow.problems == []
    slow.report(20, 5.0)
    assert slow.problems == ["no-checkpoint"]

    quick = Watched(monkeypatch)
    quick.report(100, 0.1)
    assert quick.problems == [], "it may save at each hundredth"
    quick.watch.look([WorkerStatus(False, None, None)])
    assert quick.problems == ["no-checkpoint"]

    seldom = Watched(monkeypatch)
    seldom.report(2, 310.0)
    assert seldom.problems == ["no-checkpoint"]

    saving = Watched(monkeypatch)
    saving.report(9, 0.1)
    saving.report(1, 0.1, saves=True)
    saving.report(50, 60.0)
    assert saving.problems == []


def test_a_loop_that_reports_nothing_for_too_long_fails_with_what_each_rank_was_doing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hung = Watched(monkeypatch, hangs_after_seconds=60.0)
    monkeypatch.setattr(loop_watch, "ask", lambda workers, question: workers)
    monkeypatch.setattr(loop_watch, "answers_of", lambda asked, seconds: {0: "in loop.py"})
    running = [WorkerStatus(True, None, None)]
    hung.now += 1000.0  # the workers are set up
    assert hung.watch.look(running) is None
    hung.now += 59.0
    hung.report(1, 0.0, saves=True)
    hung.now += 60.0
    assert hung.watch.look(running) is None
    hung.now += 1.0
    failure = hung.watch.look(running)
    assert failure is not None
    assert "no report for 60 s; the rank was here:\nin loop.py" in str(failure.worker_failures[0])
    assert hung.watch.look([WorkerStatus(False, None, None)]) is None, "a loop that has returned hangs no more"
