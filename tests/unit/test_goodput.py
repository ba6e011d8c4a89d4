"""Where a run's wall time goes, on examples computed by hand from docs/goodput.md and on any sequence of events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.core.result import TimeAccount
from prefect_elastic_train.report.goodput import GoodputMeter
from tests.unit.support import examples

#: When the runs of these tests begin, in seconds since the epoch.
T = 1_700_000_000.0


def started(
    at: float, began: float, attempt: int = 1, checkpoint: str = "", committed: float = 0.0, counted: int = 0
) -> ev.AttemptStarted:
    return ev.AttemptStarted(
        at=T + at,
        attempt=attempt,
        run_name="mnist",
        run_uri="/runs/mnist",
        driver_started_at=T + began,
        checkpoint=checkpoint,
        checkpoint_at=T + committed if committed else 0.0,
        counted=counted or attempt,
    )


def group(at: float) -> ev.WorkerGroupStarted:
    return ev.WorkerGroupStarted(at=T + at, world_size=2)


def report(at: float) -> ev.Reported:
    return ev.Reported(at=T + at, metrics={}, world_size=2)


def commit(at: float, checkpoint: str) -> list[ev.Event]:
    return [ev.CheckpointCommitted(at=T + at, checkpoint=checkpoint, size_bytes=1, metrics={})]


def reports(first: float, last: float, every: float = 10) -> list[ev.Event]:
    count = round((last - first) / every) + 1
    return [report(first + number * every) for number in range(count)]


def failed(at: float, retried: bool = True) -> ev.WorkerFailed:
    return ev.WorkerFailed(at=T + at, errors={"1": "killed"}, retried=retried)


def resized(at: float) -> ev.WorkerGroupResized:
    return ev.WorkerGroupResized(at=T + at, old_size=1, new_size=2)


def state(at: float, name: str) -> ev.StateChanged:
    return ev.StateChanged(at=T + at, state=name)


def waiting(at: float, since: float = 0.0) -> ev.WaitingForCapacity:
    since = T + since if since else 0.0
    return ev.WaitingForCapacity(at=T + at, since=since, possible_workers=0, min_workers=1, resources_per_worker={})


def stalled(at: float, seconds: float) -> ev.CheckpointStalled:
    return ev.CheckpointStalled(at=T + at, seconds=seconds)


def ended(at: float, outcome: Outcome, final: bool = False) -> ev.AttemptEnded:
    return ev.AttemptEnded(at=T + at, outcome=outcome, final=final)


def parts(account: TimeAccount) -> dict[str, float]:
    """Give what is more than nothing, without ``_seconds``."""
    fields = account.model_dump()
    return {name.removesuffix("_seconds"): seconds for name, seconds in fields.items() if seconds}


def measure(events: Sequence[ev.Event]) -> TimeAccount:
    meter = GoodputMeter()
    for event in events:
        meter.take(event)
    return meter.account()


def spent(*events: ev.Event | Sequence[ev.Event]) -> dict[str, float]:
    flat = [event for item in events for event in (item if isinstance(item, Sequence) else [item])]
    return parts(measure(flat))


#: A group's start at 20, its first step at 50 and a report each ten seconds from 60 on.
STEADY = [started(10, 0), group(20), *reports(60, 110)]


def test_a_run_without_a_fault_is_start_up_training_and_wind_up() -> None:
    account = measure([*STEADY, *commit(120, "a"), state(120, "SHUTTING_DOWN"), ended(125, Outcome.COMPLETED)])
    # The first report came 40 s after the group's start, ten of which are a report's usual time.
    assert parts(account) == {"wall": 125, "productive": 70, "startup": 50 + 5}
    assert account.goodput == pytest.approx(70 / 125)


def test_what_no_checkpoint_preserved_is_kept_if_the_loop_returns() -> None:
    assert spent(STEADY, state(115, "SHUTTING_DOWN"), ended(120, Outcome.COMPLETED)) == {
        "wall": 120,
        "productive": 65,
        "startup": 55,
    }


@pytest.mark.parametrize("outcome", [Outcome.USER_ERROR, Outcome.CANCELLED, Outcome.NO_PROGRESS, Outcome.CLUSTER_LOST])
def test_what_no_checkpoint_preserved_is_lost_if_the_attempt_ends_otherwise(outcome: Outcome) -> None:
    assert spent(STEADY, *commit(120, "a"), report(130), ended(135, outcome)) == {
        "wall": 135,
        "productive": 70,
        "startup": 50,
        "lost": 15,
    }


def test_a_worker_failure_costs_what_came_after_the_commit_and_the_restart() -> None:
    events = [
        *STEADY,
        *commit(120, "a"),
        report(130),
        failed(133),
        group(140),
        *reports(165, 215),  # 15 s of preparation and ten of training to the first one
        *commit(225, "b"),
        ended(225, Outcome.COMPLETED),
    ]
    assert spent(events) == {
        "wall": 225,
        "productive": 70 + 70,
        "startup": 50,
        "lost": 13,
        "restart": 7 + 15,
    }


def test_a_resize_is_told_apart_from_a_failure() -> None:
    events = [*STEADY, *commit(120, "a"), resized(121), group(140), *reports(155, 205)]
    assert spent(events) == {"wall": 205, "productive": 70 + 60, "startup": 50, "lost": 1, "resize": 19 + 5}


def test_a_driver_that_is_killed_without_a_word_costs_from_its_last_sign_on() -> None:
    events = [
        *STEADY,
        *commit(120, "a"),
        report(130),  # the last sign
        started(170, began=160, attempt=2, checkpoint="a", committed=120),
        group(180),
        *reports(195, 245),
    ]
    assert spent(events) == {
        "wall": 245,
        "productive": 70 + 60,
        "startup": 50,
        "lost": 10,
        "restart": 30 + 20 + 5,
    }


def test_a_commit_that_a_killed_driver_could_not_tell_of_is_found_by_the_next_attempt() -> None:
    events = [*STEADY, *commit(120, "a"), report(130)]
    later = [group(180), *reports(190, 240)]
    found = started(170, began=160, attempt=2, checkpoint="b", committed=131)
    assert spent(events, found, later) == {
        "wall": 240,
        "productive": 70 + 11 + 60,
        "startup": 50,
        "restart": 160 - 131 + 20,
    }


def test_a_commit_that_was_told_of_too_late_preserves_what_came_before_it() -> None:
    # The last sign came after the commit, whose own word is lost.
    events = [*STEADY, *commit(120, "a"), report(130), report(140)]
    found = started(170, began=160, attempt=2, checkpoint="b", committed=131)
    assert spent(events, found) == {"wall": 170, "productive": 81, "startup": 50, "lost": 9, "restart": 30}


def test_an_attempt_that_dies_before_it_trains_is_start_up_and_then_restart() -> None:
    events = [started(10, 0), started(40, began=30, attempt=2), started(70, began=60, attempt=3), group(80)]
    assert spent(events, reports(90, 140)) == {"wall": 140, "productive": 60, "startup": 10, "restart": 70}


def test_waiting_for_capacity_counts_from_when_it_began() -> None:
    events = [
        started(10, 0),
        waiting(30, since=12),
        waiting(60, since=12),
        state(75, "SCHEDULING"),
        group(80),
        *reports(90, 140),
    ]
    assert spent(events) == {"wall": 140, "productive": 60, "startup": 12 + 5, "waiting_for_capacity": 63}


def test_waiting_for_capacity_without_its_beginning_counts_from_when_it_is_told() -> None:
    events = [started(10, 0), waiting(30), state(75, "SCHEDULING"), group(80), *reports(90, 140)]
    assert spent(events) == {"wall": 140, "productive": 60, "startup": 30 + 5, "waiting_for_capacity": 45}


def test_waiting_after_a_failure_is_waiting_and_what_follows_is_restart() -> None:
    events = [*STEADY, *commit(120, "a"), failed(120), waiting(130, since=125), state(150, "SCHEDULING"), group(160)]
    assert spent(events, reports(170, 220)) == {
        "wall": 220,
        "productive": 70 + 60,
        "startup": 50,
        "restart": 5 + 10,
        "waiting_for_capacity": 25,
    }


def test_a_group_that_trains_waits_for_nothing() -> None:
    # Said while there is no room to grow, for instance.
    assert spent(STEADY, waiting(115, since=100), report(120)) == {"wall": 120, "productive": 70, "startup": 50}


def test_a_run_that_waits_in_the_end_counts_as_waiting_until_now() -> None:
    meter = GoodputMeter()
    for event in (started(10, 0), waiting(20, since=15)):
        meter.take(event)
    assert parts(meter.account(T + 60)) == {"wall": 60, "startup": 15, "waiting_for_capacity": 45}


def test_standing_still_for_a_checkpoint_is_no_training() -> None:
    events = [*STEADY, *commit(120, "a"), stalled(121, 4), *reports(130, 140)]
    assert spent(events) == {"wall": 140, "productive": 86, "startup": 50, "checkpoint_stall": 4}


def test_standing_still_before_the_first_report_is_no_training_either() -> None:
    # 20 s for a checkpoint at the first step, then 10 s a step.
    events = [started(10, 0), group(20), *commit(60, "a"), stalled(60, 20), *reports(70, 120)]
    assert spent(events) == {"wall": 120, "productive": 10 + 60, "startup": 30, "checkpoint_stall": 20}


def test_a_stall_that_every_report_has_is_not_taken_for_training_before_the_first() -> None:
    # 20 s of preparation; then each report takes 4 s of training and 6 s of standing still.
    events: list[ev.Event] = [started(10, 0), group(10)]
    for number in range(10):
        at = 40 + 10.0 * number
        events += [*commit(at, f"c{number}"), stalled(at, 6)]
    account = spent(events)
    assert account["checkpoint_stall"] == 60
    assert account["productive"] == pytest.approx(40)
    assert account["startup"] == pytest.approx(30)


def test_a_stall_is_never_more_than_there_was_training() -> None:
    assert spent(started(10, 0), group(20), stalled(25, 100)) == {"wall": 25, "startup": 25}
    events = [*STEADY, *commit(120, "a"), *commit(130, "b"), stalled(130, 1000)]
    account = measure(events)
    assert account.wall_seconds == 130
    assert account.productive_seconds >= 0


def test_a_run_that_is_taken_up_again_after_its_end_was_stopped_in_between() -> None:
    events = [
        *STEADY,
        *commit(120, "a"),
        ended(125, Outcome.CLUSTER_LOST, final=True),
        started(1010, began=1000, attempt=2, checkpoint="a", committed=120, counted=5),
        group(1020),
        *reports(1030, 1080),
    ]
    assert spent(events) == {
        "wall": 125 + 80,
        "stopped": 875,
        "productive": 70 + 60,
        "lost": 5,
        "startup": 50 + 20,
    }


def test_the_first_attempt_of_a_person_after_a_lost_driver_was_stopped_in_between() -> None:
    # Its flow run had ended as well: nothing was going to start it again.
    events = [*STEADY, *commit(120, "a"), started(1010, 1000, attempt=2, checkpoint="a", counted=1), group(1020)]
    assert spent(events, reports(1030, 1080)) == {
        "wall": 120 + 80,
        "stopped": 880,
        "productive": 70 + 60,
        "startup": 50 + 20,
    }


def test_an_end_that_an_automatic_restart_follows_is_no_stop() -> None:
    events = [*STEADY, *commit(120, "a"), ended(120, Outcome.CLUSTER_LOST), started(170, 160, attempt=2)]
    events[-1] = started(170, 160, attempt=2, checkpoint="a", counted=2)
    assert spent(events) == {"wall": 170, "productive": 70, "startup": 50, "restart": 50}


@pytest.mark.parametrize("outcome", [Outcome.CANCELLED, Outcome.USER_ERROR, Outcome.TIMED_OUT, Outcome.NO_PROGRESS])
def test_time_after_an_end_for_good_is_stopped_until_somebody_goes_on(outcome: Outcome) -> None:
    events = [*STEADY, *commit(120, "a"), ended(120, outcome), started(1010, 1000, 2, checkpoint="a", counted=2)]
    assert spent(events) == {"wall": 130, "stopped": 880, "productive": 70, "startup": 60}


def test_time_after_the_end_of_a_run_is_not_counted() -> None:
    meter = GoodputMeter()
    for event in [*STEADY, *commit(120, "a"), ended(120, Outcome.COMPLETED)]:
        meter.take(event)
    assert meter.account(T + 10_000) == meter.account()
    assert meter.account().wall_seconds == 120


def test_a_finished_run_that_is_asked_for_its_result_and_then_continued_was_stopped_all_the_while() -> None:
    again = ev.AttemptEnded(at=T + 500, outcome=Outcome.COMPLETED, already_finished=True)
    done = [*STEADY, *commit(120, "a"), ended(120, Outcome.COMPLETED)]
    goes_on = started(1010, began=1000, attempt=2, checkpoint="a")
    expected = {"wall": 130, "stopped": 880, "productive": 70, "startup": 60}
    assert spent(done, goes_on) == expected
    assert spent(done, again, goes_on) == expected


def test_training_after_a_damaged_commit_is_lost_after_all() -> None:
    events = [
        *STEADY,
        *commit(120, "a"),
        *commit(150, "b"),
        *commit(190, "c"),
        ended(200, Outcome.CLUSTER_LOST),
        started(220, began=210, attempt=2, checkpoint="a"),
    ]
    assert spent(events) == {"wall": 220, "productive": 70, "startup": 50, "lost": 30 + 40 + 10, "restart": 20}


def test_an_attempt_from_the_beginning_loses_everything_before() -> None:
    events = [*STEADY, *commit(120, "a"), *commit(150, "b"), started(220, began=210, attempt=2)]
    assert spent(events) == {"wall": 220, "startup": 50, "lost": 100, "restart": 70}


def test_a_run_that_goes_back_to_the_checkpoint_it_was_seeded_with_loses_everything_since() -> None:
    first = started(10, 0, checkpoint="from-base-x", committed=5)
    again = started(220, 210, attempt=2, checkpoint="from-base-x", committed=5)
    events = [first, *STEADY[1:], *commit(120, "a"), *commit(150, "b"), again]
    assert spent(events) == {"wall": 220, "startup": 50, "lost": 100, "restart": 70}


def test_a_checkpoint_that_is_too_old_to_be_remembered_costs_no_kept_training() -> None:
    events = [*STEADY]
    for number in range(200):
        events += commit(120 + number, f"c{number}")
    assert spent(events, started(400, 390, attempt=2, checkpoint="c3"))["productive"] == 70 + 199


def test_a_fallback_among_the_last_of_many_commits_loses_what_came_after() -> None:
    events = [*STEADY]
    for number in range(200):
        events += commit(120 + number, f"c{number}")
    account = spent(events, started(400, 390, attempt=2, checkpoint="c150"))
    assert (account["productive"], account["lost"]) == (70 + 150, 49)


def test_commits_before_a_report_s_usual_time_is_known_are_right_after_many_others() -> None:
    events = [*STEADY]
    for number in range(60):
        events += commit(120 + number, f"c{number}")
    events += [failed(179), group(180), *commit(200, "x"), *commit(210, "y"), *commit(220, "z")]
    # The usual 10 s of the 20 until the first report were training, which x preserves.
    assert spent(events, started(300, 290, attempt=2, checkpoint="x"))["productive"] == 70 + 59 + 10


def test_each_fallback_counts_against_the_commit_that_it_goes_on_from() -> None:
    events = [
        *STEADY,
        *commit(120, "a"),
        *commit(150, "b"),
        started(170, began=160, attempt=2, checkpoint="a"),  # 30 s are lost
        group(170),
        *reports(180, 230),
        *commit(240, "c"),
        *commit(250, "d"),
        started(270, began=260, attempt=3, checkpoint="c"),  # 10 s are lost
    ]
    account = spent(events)
    assert account["lost"] == 30 + 10
    assert account["productive"] == 70 + 70


def test_the_first_hour_of_a_loop_that_reports_once_an_hour_counts_as_the_second_one_lasts() -> None:
    events = [started(10, 0), group(20), report(20 + 4000), report(20 + 4000 + 3600)]
    assert spent(events) == {"wall": 7620, "productive": 7200, "startup": 420}


def test_the_usual_time_is_the_median_so_that_one_slow_report_does_not_matter() -> None:
    events = [started(10, 0), group(10), *map(report, [60, 70, 80, 380, 390, 400])]
    assert spent(events) == {"wall": 400, "productive": 350, "startup": 50}


def test_a_first_report_that_is_faster_than_usual_was_all_training() -> None:
    assert spent(started(10, 0), group(10), reports(13, 63)) == {"wall": 63, "productive": 53, "startup": 10}


def test_a_later_group_that_reported_once_is_measured_by_the_one_before() -> None:
    events = [*STEADY, *commit(120, "a"), failed(120), group(130), report(155), failed(160)]
    assert spent(events) == {"wall": 160, "productive": 70, "startup": 50, "restart": 10 + 15, "lost": 10 + 5}


def test_a_group_that_never_reported_has_not_trained() -> None:
    events = [*STEADY, *commit(120, "a"), failed(120), group(130), failed(155), group(160), *reports(170, 220)]
    assert spent(events) == {"wall": 220, "productive": 130, "startup": 50, "restart": 10 + 25 + 5}


def test_a_commit_before_the_usual_time_is_known_keeps_what_came_before_it() -> None:
    events = [started(10, 0), group(20), *commit(60, "a"), report(70), failed(75)]
    assert spent(events) == {"wall": 75, "startup": 50, "productive": 10, "lost": 15}


def test_a_loop_that_returns_without_a_report_counts_the_same_however_its_end_is_told() -> None:
    quiet = [started(10, 0), group(20)]
    told = spent(quiet, state(100, "SHUTTING_DOWN"), ended(100, Outcome.COMPLETED))
    assert told == spent(quiet, ended(100, Outcome.COMPLETED))


def test_signs_of_life_and_what_others_say_take_no_time() -> None:
    said: list[ev.Event] = [
        ev.ControllerAlive(at=T + 5000, doing="RUNNING", seconds=1),
        ev.ClusterConnected(at=T - 5000, address="x"),
        ev.RunRecalled(at=T + 6000, report={}),
    ]
    assert spent(said, STEADY, said) == spent(STEADY)


def test_a_history_that_has_not_begun_adds_up_to_nothing() -> None:
    assert measure([]) == TimeAccount()
    assert measure([group(10), *reports(20, 50), failed(60)]) == TimeAccount()
    assert GoodputMeter().account(T) == TimeAccount()


def test_a_driver_of_unknown_age_begins_with_its_attempt() -> None:
    unknown = started(10, 0).model_copy(update={"driver_started_at": 0.0})
    assert spent(unknown, group(20), reports(30, 80)) == {"wall": 80 - 10, "productive": 60, "startup": 10}


# Any sequence of events.

_OUTCOMES = st.sampled_from(Outcome)


@st.composite
def histories(draw: st.DrawFn, monotone: bool = True) -> list[ev.Event]:
    """Give attempts with any events in any order; the clock goes on, or jumps where another driver begins."""
    events: list[ev.Event] = []
    at = 0.0
    commits: list[tuple[str, float]] = [("", 0.0)]
    pauses = st.sampled_from([0.0, 0.001, 0.3, 1.0, 7.5, 60.0, 3600.0])
    for attempt in range(1, draw(st.integers(1, 4)) + 1):
        if not monotone:
            at += draw(st.sampled_from([0.0, -1.0, -500.0, -100_000.0, 100_000.0]))
        began = at + draw(pauses)
        at = began + draw(pauses)
        checkpoint, committed = draw(st.sampled_from([*commits, ("unknown", at - draw(pauses))]))
        counted = draw(st.integers(0, 3))
        events.append(started(at, began, attempt, checkpoint, committed, counted))
        for number, kind in enumerate(draw(st.lists(st.sampled_from("ggrrrrrrcccsssfpzwuvxo"), max_size=25))):
            at += draw(pauses)
            name = f"{attempt}-{number}"
            if kind == "c":
                commits.append((name, at))
            events += {
                "g": lambda: [group(at)],
                "r": lambda: [report(at)],
                "c": lambda: commit(at, name),
                "s": lambda: [stalled(at, draw(pauses))],
                "f": lambda: [failed(at, draw(st.booleans()))],
                "p": lambda: [ev.WorkersPreempted(at=T + at, errors={}, retried=True)],
                "z": lambda: [resized(at)],
                "w": lambda: [waiting(at, max(0.0, at - draw(pauses)))],
                "u": lambda: [state(at, "SCHEDULING")],
                "v": lambda: [state(at, "SHUTTING_DOWN")],
                "x": lambda: [state(at, "RUNNING")],
                "o": lambda: [ev.StorageWaited(at=T + at, who="ranks", seconds=1)],
            }[kind]()
        if draw(st.booleans()):
            at += draw(pauses)
            events.append(ended(at, draw(_OUTCOMES), draw(st.booleans())))
    return events


def _adds_up(account: TimeAccount) -> None:
    fields = account.model_dump()
    assert all(seconds >= 0 for seconds in fields.values()), fields
    wall, _ = fields.pop("wall_seconds"), fields.pop("stopped_seconds")
    assert sum(fields.values()) == pytest.approx(wall, abs=0.01)
    assert 0 <= account.goodput <= 1


@examples(300)
@given(events=histories())
def test_every_moment_from_the_first_driver_to_the_last_event_is_of_one_part(events: list[ev.Event]) -> None:
    account = measure(events)
    _adds_up(account)
    first, last = events[0], events[-1]
    assert isinstance(first, ev.AttemptStarted)
    whole = last.at - first.driver_started_at
    assert account.wall_seconds + account.stopped_seconds == pytest.approx(whole, abs=0.01)


@examples(300)
@given(events=histories(monotone=False))
def test_the_parts_add_up_also_if_the_clock_of_another_driver_is_another(events: list[ev.Event]) -> None:
    meter = GoodputMeter()
    for event in events:
        meter.take(event)
        _adds_up(meter.account())
        _adds_up(meter.account(event.at + 100))


@examples(150)
@given(events=histories(), data=st.data())
def test_an_account_that_goes_on_from_its_state_is_the_same(events: list[ev.Event], data: Any) -> None:
    place = data.draw(st.integers(0, len(events)))
    meter = GoodputMeter()
    for event in events[:place]:
        meter.take(event)
    before = meter.model_dump_json()
    meter.account()
    meter.account(T + 1_000_000)
    assert meter.model_dump_json() == before, "asking changes nothing"
    meter = GoodputMeter.model_validate_json(before)
    for event in events[place:]:
        meter.take(event)
    assert meter.account() == measure(events)


@examples(100)
@given(events=histories())
def test_nothing_that_was_spent_is_unspent_but_what_was_trained(events: list[ev.Event]) -> None:
    """Setting up, waiting and stopping are facts; only what was training may turn out to be something else."""
    meter, before = GoodputMeter(), TimeAccount()
    for event in events:
        meter.take(event)
        account = meter.account()
        for name in ("waiting_for_capacity_seconds", "checkpoint_stall_seconds", "stopped_seconds"):
            assert getattr(account, name) >= getattr(before, name) - 0.001, name
        before = account


def test_the_state_stays_small_however_long_the_run() -> None:
    meter = GoodputMeter()
    meter.take(started(10, 0))
    meter.take(group(20))
    for number in range(20_000):
        for event in commit(30 + number, f"checkpoint-{number}"):
            meter.take(event)
    assert len(meter.model_dump_json()) < 10_000


def test_a_warning_before_a_groups_first_report_leaves_the_time_to_it_as_it_is() -> None:
    meter = GoodputMeter()
    warned = ev.LoopWarned(
        at=T + 30, problem="checkpoint-ignored", message="it begins again", again=1.0, is_redone=True
    )
    before, after = [started(10, 0), group(20)], [*reports(40, 70), ended(70, Outcome.COMPLETED)]
    for event in [*before, warned, *after]:
        meter.take(event)
    without = GoodputMeter()
    for event in [*before, *after]:
        without.take(event)
    assert meter.account() == without.account()
