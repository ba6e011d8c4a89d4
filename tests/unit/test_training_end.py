"""What Prefect is told of the end of a training whose next attempt did not come."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
from prefect.exceptions import TerminationSignal

from prefect_elastic_train.orchestration import task as training
from prefect_elastic_train.orchestration.cancellation import StopReason
from prefect_elastic_train.orchestration.publisher import Publisher
from prefect_elastic_train.report.run_report import RunReport

FLOW_RUN = "8e9f4f5e-6f0a-4d0c-8d27-0d4f8a3d9f11"


def _loop() -> None:
    """A train loop."""


@pytest.fixture
def request_of_a_flow() -> training._Request:
    return replace(training._request(train_loop=_loop), flow_run_ids=(FLOW_RUN,))


@pytest.fixture
def report(request_of_a_flow: training._Request) -> Iterator[RunReport]:
    """What is shown of a training that waits for its next attempt."""
    report = RunReport(run_name="mnist", attempt=1)
    publisher = Publisher(report)
    publisher.abandon()  # nothing is written anywhere
    training._publishers[request_of_a_flow.key] = publisher
    yield report
    assert request_of_a_flow.key not in training._publishers


@pytest.mark.parametrize(
    ("error", "wanted", "state"),
    [
        (TerminationSignal(signal=15), True, "cancelled"),
        (TerminationSignal(signal=15), False, "interrupted"),
        (KeyboardInterrupt(), False, "cancelled"),
        (asyncio.CancelledError(), False, "cancelled"),
        (TimeoutError("the flow's own"), False, "timed out"),
        (None, True, "cancelled"),
        (None, False, "interrupted"),
    ],
)
def test_a_wait_that_was_ended_is_told_by_who_ended_it(
    monkeypatch: pytest.MonkeyPatch,
    request_of_a_flow: training._Request,
    report: RunReport,
    error: BaseException | None,
    wanted: bool,
    state: str,
) -> None:
    monkeypatch.setattr(training, "wants_an_end", lambda ids, seconds: wanted)
    training._close_waiting(request_of_a_flow, error)
    assert report.state == state


def test_a_wait_that_the_state_of_the_flow_run_has_ended_is_cancelled(
    request_of_a_flow: training._Request, report: RunReport
) -> None:
    stop = training._Stop(StopReason.CANCELLING, FLOW_RUN)
    training._stopped_waiting[request_of_a_flow.key] = stop
    training._close_waiting(request_of_a_flow, TerminationSignal(signal=15))
    assert report.state == "cancelled"
    assert request_of_a_flow.key not in training._stopped_waiting


def test_what_ended_the_wait_is_seen_where_it_is_closed(
    monkeypatch: pytest.MonkeyPatch, request_of_a_flow: training._Request, report: RunReport
) -> None:
    def _interrupted(request: training._Request) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "_request", lambda **arguments: request_of_a_flow)
    monkeypatch.setattr(training, "_with_budget", lambda task, request: _interrupted)
    with pytest.raises(KeyboardInterrupt):
        training.elastic_train(_loop)
    assert report.state == "cancelled"
