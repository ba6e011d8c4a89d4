"""What a history adds up to, on examples computed by hand."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.report.accounts import Accounts, Tally, add_up

#: When the runs of these tests begin, in seconds since the epoch.
T = 1_700_000_000.0


def started(at: float, attempt: int = 1, checkpoint: str = "") -> ev.AttemptStarted:
    return ev.AttemptStarted(at=T + at, attempt=attempt, run_name="mnist", run_uri="/runs/mnist", checkpoint=checkpoint)


def group(at: float, size: int = 2) -> ev.WorkerGroupStarted:
    return ev.WorkerGroupStarted(at=T + at, world_size=size)


def report(at: float, index: int, attempt: int = 1, **metrics: Any) -> ev.Reported:
    return ev.Reported(at=T + at, attempt=attempt, index=index, metrics=metrics, world_size=2)


def commit(at: float, index: int, attempt: int = 1, **metrics: Any) -> list[ev.Event]:
    name = f"checkpoint-{attempt}-{index}"
    return [
        ev.CheckpointCommitted(
            at=T + at, attempt=attempt, index=index, checkpoint=name, size_bytes=1, metrics=metrics, world_size=2
        )
    ]


def failed(at: float, lost: int, retried: bool = True) -> ev.WorkerFailed:
    return ev.WorkerFailed(at=T + at, errors={"1": "killed"}, retried=retried, reports_lost=lost)


def preempted(at: float, lost: int, retried: bool = True) -> ev.WorkersPreempted:
    return ev.WorkersPreempted(at=T + at, errors={}, retried=retried, reports_lost=lost)


def resized(at: float) -> ev.WorkerGroupResized:
    return ev.WorkerGroupResized(at=T + at, old_size=1, new_size=2)


def ended(at: float, outcome: Outcome) -> ev.AttemptEnded:
    return ev.AttemptEnded(at=T + at, outcome=outcome)


def spent(accounts: Accounts) -> dict[str, float]:
    """Give the parts of the time that are more than nothing, without ``_seconds``."""
    return {name.removesuffix("_seconds"): seconds for name, seconds in accounts.time.model_dump().items() if seconds}


def test_a_run_with_a_failure_a_resize_and_a_lost_driver() -> None:
    accounts = add_up(
        [
            started(100),
            group(110, size=2),  # until the commit at 130 it is kept
            report(120, 1),
            *commit(130, 2),
            report(140, 3),
            report(150, 4),
            failed(155, lost=2),
            group(165, size=1),  # until the commit at 185
            report(175, 5),
            *commit(185, 6),
            resized(190),
            group(200, size=2),  # nothing is kept: the driver dies after one report
            report(210, 7),
            started(300, attempt=2, checkpoint="checkpoint-1-6"),
            group(310, size=2),  # training completes, so all is kept
            *commit(320, 1, attempt=2),
            report(330, 2, attempt=2, loss=0.5),
            ended(340, Outcome.COMPLETED),
        ]
    )
    assert accounts.attempts == 2
    assert accounts.worker_failures == 1
    assert accounts.preemptions == 0
    assert accounts.resizes == 1
    assert accounts.steps_lost == 2 + 0 + 1
    assert spent(accounts) == {
        "wall": 240,
        "productive": 20 + 20 + 30,
        "startup": 10,
        "restart": 10 + 90 + 10,
        "resize": 10,
        "lost": 25 + 5 + 10,
    }
    assert accounts.time.goodput == pytest.approx(70 / 240, abs=1e-4)
    assert [(size.at - T, size.size) for size in accounts.world_sizes] == [(110, 2), (165, 1), (200, 2), (310, 2)]
    assert accounts.last_metrics == {"loss": 0.5}


@pytest.mark.parametrize(("again", "lost"), [(1.0, 4), (0.5, 2)])
def test_what_a_loop_does_again_although_a_checkpoint_kept_it_is_lost(again: float, lost: int) -> None:
    accounts = add_up(
        [
            started(0),
            group(0),
            *[event for n in range(1, 5) for event in commit(10 * n, n)],
            failed(40, lost=0),
            group(50),
            ev.LoopWarned(at=T + 60, problem="checkpoint-ignored", message="it began again", again=again),
            *[event for n in range(5, 9) for event in commit(10 * n + 10, n)],
            ended(90, Outcome.COMPLETED),
        ]
    )
    assert accounts.steps_lost == lost
    assert spent(accounts) == {"wall": 90, "productive": 80 - 10 * lost, "restart": 10, "lost": 10 * lost}


def test_what_a_loop_has_done_again_by_now_is_all_that_its_group_has_done() -> None:
    late = ev.LoopWarned(at=T + 70, problem="checkpoint-ignored", message="late", again=1.0, is_redone=True)
    early = [event for n in range(1, 5) for event in commit(10 * n, n)]
    accounts = add_up(
        [started(0), group(0), *early, failed(40, lost=0), group(50), *commit(60, 5), *commit(70, 6), late]
    )
    assert accounts.steps_lost == 2
    assert spent(accounts)["lost"] == 20


def test_a_later_group_of_an_attempt_loses_only_its_own_reports() -> None:
    accounts = add_up(
        [
            started(0),
            group(1),
            *[event for index in range(1, 101) for event in commit(1 + index, index)],
            preempted(110, lost=0),
            group(120),
            report(121, 101),
            report(122, 102),
            started(200, attempt=2),
            group(210),
            *commit(220, 1, attempt=2),
            ended(221, Outcome.COMPLETED),
        ]
    )
    assert accounts.preemptions == 1
    assert accounts.steps_lost == 2


def test_reports_that_a_new_driver_does_again_are_lost_also_when_the_cluster_had_given_up() -> None:
    given_up = [
        started(0),
        group(1),
        *commit(2, 1),
        report(3, 2),
        failed(4, lost=1, retried=False),
        ended(5, Outcome.CLUSTER_LOST),
    ]
    assert add_up(given_up).steps_lost == 0, "nothing is done again until somebody does"
    assert add_up([*given_up, started(10, attempt=2), group(11), *commit(12, 1, attempt=2)]).steps_lost == 1


def test_a_resize_loses_the_reports_since_the_last_checkpoint() -> None:
    events = [started(0), group(1), *commit(2, 1), report(3, 2), report(4, 3), resized(9), group(10)]
    accounts = add_up(events)
    assert accounts.steps_lost == 2
    assert accounts.resizes == 1


def test_a_completed_attempt_keeps_the_reports_after_its_last_checkpoint() -> None:
    events = [started(0), group(0), *commit(50, 1), report(100, 2), ended(100, Outcome.COMPLETED)]
    assert add_up(events).time.goodput == 1.0
    assert add_up(events).steps_lost == 0
    given_up = add_up([*events[:-1], ended(100, Outcome.USER_ERROR)])
    assert spent(given_up) == {"wall": 100, "productive": 50, "lost": 50}


def test_an_empty_history_adds_up_to_nothing() -> None:
    assert add_up([]) == Accounts()
    assert add_up([started(5)]) == Accounts(attempts=1)
    assert add_up([ev.ClusterConnected(at=1, address="x"), ev.StateChanged(at=3, state="RUNNING")]) == Accounts()


def test_each_report_is_a_row_with_where_and_when() -> None:
    accounts = add_up([started(0), group(1), report(2, 1, loss=0.5), report(3, 1, attempt=2, loss=0.25, acc=1)])
    assert accounts.history == [
        {"loss": 0.5, "_attempt": 1, "_at": T + 2, "_world_size": 2},
        {"loss": 0.25, "acc": 1, "_attempt": 2, "_at": T + 3, "_world_size": 2},
    ]


@pytest.mark.parametrize("reports", [1, 2, 1999, 2000, 2001, 4000, 4001, 4002, 5000, 12_001, 50_000])
def test_a_long_history_is_thinned_evenly_within_a_factor_of_two_with_first_and_last(reports: int) -> None:
    history = add_up(report(index, index, step=index) for index in range(reports)).history
    steps = [row["step"] for row in history]
    assert len(steps) == reports if reports <= 2000 else 1000 <= len(steps) <= 2000
    assert (steps[0], steps[-1]) == (0, reports - 1)
    gaps = [later - earlier for earlier, later in itertools.pairwise(steps)]
    assert all(gap > 0 for gap in gaps), "in order, none twice"
    assert max(gaps[:-1], default=1) <= 2 * min(gaps[:-1], default=1)


def test_a_long_history_is_thinned_as_it_is_read() -> None:
    def endless() -> Iterator[ev.Event]:
        for index in range(100_000):
            yield report(index, index, step=index, loss=0.5)

    tracemalloc.start()
    try:
        rows = len(add_up(endless()).history)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert rows <= 2000
    assert peak < 10_000_000


@st.composite
def histories(draw: st.DrawFn) -> list[ev.Event]:
    """Events in any order, with times that do not go back."""
    at, index, attempt = 0.0, 0, 1
    events: list[ev.Event] = []
    for kind in draw(st.lists(st.sampled_from("gggrrrccfpsae"), max_size=30)):
        at += draw(st.floats(0, 100))
        index += kind in "rc"
        if kind == "a":
            attempt += 1
            index = 0
        lost = draw(st.integers(0, 3))
        retried = draw(st.booleans())
        events += {
            "g": lambda: [group(at)],
            "r": lambda: [report(at, index, attempt)],
            "c": lambda: commit(at, index, attempt),
            "f": lambda: [failed(at, lost, retried)],
            "p": lambda: [preempted(at, lost, retried)],
            "s": lambda: [resized(at)],
            "a": lambda: [started(at, attempt)],
            "e": lambda: [ended(at, draw(st.sampled_from(Outcome)))],
        }[kind]()
    return events


@given(events=histories())
def test_goodput_is_a_share_and_losses_are_never_more_than_was_reported(events: list[ev.Event]) -> None:
    accounts = add_up(events)
    assert 0 <= accounts.time.goodput <= 1
    told = sum(event.reports_lost for event in events if isinstance(event, ev.WorkerFailed | ev.WorkersPreempted))
    reports = sum(isinstance(event, ev.Report) for event in events)
    assert 0 <= accounts.steps_lost <= reports + told
    assert len(accounts.history) == reports
    assert accounts.attempts == len({event.attempt for event in events if isinstance(event, ev.AttemptStarted)})
    assert accounts == Accounts.model_validate_json(accounts.model_dump_json())


@given(events=histories(), data=st.data())
def test_a_tally_that_goes_on_from_its_state_comes_to_the_same(events: list[ev.Event], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(events)))
    whole, parted = Tally(), Tally()
    for event in events:
        whole.take(event)
    for event in events[:place]:
        parted.take(event)
    parted = Tally.model_validate_json(parted.model_dump_json())
    for event in events[place:]:
        parted.take(event)
    assert parted == whole
