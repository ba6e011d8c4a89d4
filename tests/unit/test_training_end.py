"""What Prefect is told of the end of a training whose next attempt did not come."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prefect.exceptions import Abort, TerminationSignal

from prefect_elastic_train.core.events import AttemptStarted
from prefect_elastic_train.core.outcomes import AttemptFailedError, Outcome, TrainingTimeoutError
from prefect_elastic_train.orchestration import task
from prefect_elastic_train.orchestration.cancellation import Stop, StopReason
from prefect_elastic_train.orchestration.endings import End, SilentEndError, detaches, ending_of
from prefect_elastic_train.orchestration.publisher import Publisher
from prefect_elastic_train.orchestration.task import elastic_train
from prefect_elastic_train.report.run_report import RunReport

ENDS: list[tuple[BaseException, bool, End | None]] = [
    (TerminationSignal(signal=15), True, End.CANCELLED),
    (TerminationSignal(signal=15), False, End.INTERRUPTED),
    (KeyboardInterrupt(), False, End.CANCELLED),
    (asyncio.CancelledError(), False, End.CANCELLED),
    (TimeoutError("the flow's own"), False, End.TIMED_OUT),
    (TrainingTimeoutError("late", outcome=Outcome.TIMED_OUT), False, End.TIMED_OUT),
    (Stop(), True, End.CANCELLED),
    (Stop(), False, End.INTERRUPTED),
    (Stop(StopReason.CANCELLING, "1"), False, End.CANCELLED),
    (Stop(StopReason.OVER, "1"), True, End.INTERRUPTED),
    (Stop(StopReason.TAKEN_OVER, "1"), False, None),
    (SilentEndError("taken over", outcome=Outcome.SUPERSEDED), False, None),
    (Abort("taken over"), False, None),
    (AttemptFailedError("stopped", outcome=Outcome.CANCELLED), False, End.CANCELLED),
    (AttemptFailedError("the head died", outcome=Outcome.CLUSTER_LOST), True, End.FAILED),
    (ValueError("a bug"), True, End.FAILED),
]


@pytest.mark.parametrize(("error", "wanted", "end"), ENDS)
def test_an_end_is_told_by_who_ended_the_training(error: BaseException, wanted: bool, end: End | None) -> None:
    ending = ending_of(error, False, lambda: wanted)
    assert (ending.end if ending else None) is end


def test_a_job_that_goes_on_is_told_as_that_and_as_no_event() -> None:
    ending = ending_of(TerminationSignal(signal=15), True, lambda: False)
    assert ending is not None
    assert (ending.end, ending.told) == (End.LEFT, True)


@pytest.mark.parametrize(
    ("reason", "terminated", "wanted", "goes_on"),
    [
        (Stop(), True, False, True),
        (Stop(), True, True, False),
        (Stop(), False, False, False),
        (TerminationSignal(signal=15), False, False, True),
        (KeyboardInterrupt(), False, False, False),
        (TimeoutError(), True, False, False),
        (Stop(StopReason.CANCELLING, "1"), True, False, False),
        (Stop(StopReason.OVER, "1"), True, False, False),
        (Stop(StopReason.TAKEN_OVER, "1"), False, True, True),
    ],
)
def test_a_job_goes_on_without_its_flow_process_unless_somebody_wants_its_end(
    reason: BaseException, terminated: bool, wanted: bool, goes_on: bool
) -> None:
    assert detaches(reason, terminated, lambda: wanted) is goes_on


def test_what_ended_the_wait_for_an_attempt_is_told_where_the_training_was_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = RunReport(run_name="mnist", attempt=1)
    publisher = Publisher(report)
    publisher.abandon()  # nothing is written anywhere

    def _interrupted(training: Any) -> None:
        training._publisher = publisher
        raise KeyboardInterrupt

    monkeypatch.setattr(task, "_with_budget", lambda template, training: _interrupted)
    with pytest.raises(KeyboardInterrupt):
        elastic_train(lambda: None)
    assert report.state == "cancelled"


def test_a_wait_that_the_state_of_the_flow_run_has_ended_is_cancelled() -> None:
    report = RunReport(run_name="mnist", attempt=1)
    training = elastic_train.ask(lambda: None)
    training._publisher = Publisher(report)
    training._publisher.abandon()
    training._stopped = Stop(StopReason.CANCELLING, "1")
    training.end(TerminationSignal(signal=15))
    assert (report.state, training._publisher) == ("cancelled", None)


class _BrokenLog:
    """A log that cannot take anything."""

    def __getattr__(self, name: str) -> Any:
        raise ValueError(f"no {name} today")


def test_a_log_that_fails_is_told_of_once_and_the_report_gets_its_events(caplog: pytest.LogCaptureFixture) -> None:
    report = RunReport(run_name="mnist")
    training, log = elastic_train.ask(lambda: None), _BrokenLog()
    training._publisher = Publisher(report)
    training._publisher.abandon()
    training._log = log  # type: ignore[assignment]
    with caplog.at_level("ERROR"):
        training._take(AttemptStarted(attempt=2, run_name="mnist", run_uri="/runs/mnist"))
        training._take_past(AttemptStarted(attempt=3, run_name="mnist", run_uri="/runs/mnist"))
        training._take_line("driver", "a line")
        training._note("a note")
    assert report.attempt == 3
    assert [record.message for record in caplog.records].count(
        "some of the training's output cannot be written to its log"
    ) == 1
