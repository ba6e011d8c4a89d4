"""Counts and time account of a history, on examples computed by hand from docs/goodput.md and on random histories."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.core.result import TimeAccount
from prefect_elastic_train.report.accounts import Accounts, Tally, add_up
from tests.unit.support import examples

T = 1_700_000_000.0


def started(
    at: float,
    began: float | None = None,
    attempt: int = 1,
    checkpoint: str = "",
    committed: float = 0,
    counted: int = 0,
    **more: Any,
) -> ev.AttemptStarted:
    return ev.AttemptStarted(
        at=T + at,
        attempt=attempt,
        run_name="mnist",
        run_uri="/runs/mnist",
        driver_started_at=0.0 if began is None else T + began,
        checkpoint=checkpoint,
        checkpoint_at=T + committed if committed else 0.0,
        counted=counted or attempt,
        **more,
    )


def group(at: float, size: int = 2) -> ev.WorkerGroupStarted:
    return ev.WorkerGroupStarted(at=T + at, world_size=size)


def report(at: float, index: int = 0, attempt: int = 1, **metrics: Any) -> ev.Reported:
    return ev.Reported(at=T + at, attempt=attempt, index=index, metrics=metrics, world_size=2)


def reports(first: int, last: int, every: int = 10) -> list[ev.Event]:
    return [report(at) for at in range(first, last + 1, every)]


def commit(at: float, name: str = "", index: int = 0, attempt: int = 1) -> ev.CheckpointCommitted:
    return ev.CheckpointCommitted(
        at=T + at, attempt=attempt, index=index, checkpoint=name, size_bytes=1, metrics={}, world_size=2
    )


def failed(at: float, retried: bool = True, left: int | None = None) -> ev.WorkerFailed:
    return ev.WorkerFailed(at=T + at, errors={"1": "killed"}, retried=retried, left=left)


def resized(at: float) -> ev.WorkerGroupResized:
    return ev.WorkerGroupResized(at=T + at, old_size=1, new_size=2)


def state(at: float, name: str) -> ev.StateChanged:
    return ev.StateChanged(at=T + at, state=name)


def waiting(at: float, since: float = 0.0) -> ev.WaitingForCapacity:
    since = T + since if since else 0.0
    return ev.WaitingForCapacity(at=T + at, since=since, possible_workers=0, min_workers=1, resources_per_worker={})


def stalled(at: float, seconds: float) -> ev.CheckpointStalled:
    return ev.CheckpointStalled(at=T + at, seconds=seconds)


def ignored(at: float) -> ev.LoopWarned:
    return ev.LoopWarned(at=T + at, problem="checkpoint-ignored", message="it")


def ended(at: float, outcome: Outcome = Outcome.COMPLETED, final: bool = False) -> ev.AttemptEnded:
    return ev.AttemptEnded(at=T + at, outcome=outcome, final=final)


def numbered(*events: ev.Event) -> list[ev.Event]:
    """Number the reports of an attempt as its driver does."""
    index, found = 0, list[ev.Event]()
    for event in events:
        if isinstance(event, ev.Report):
            index += 1
            event = event.model_copy(update={"index": index})
        found.append(event)
    return found


def tally_of(events: Iterable[ev.Event]) -> Tally:
    tally = Tally()
    for event in events:
        tally.add(event)
    return tally


def parts(account: TimeAccount) -> dict[str, float]:
    """What is more than nothing, without ``_seconds``."""
    return {name.removesuffix("_seconds"): seconds for name, seconds in account.model_dump().items() if seconds}


#: A group's start at 20, its first step at 50 and a report each ten seconds from 60 on; a checkpoint at 120.
ROUTINE = [started(10, 0), group(20), *reports(60, 110)]
KEPT = [*ROUTINE, commit(120, "a")]
LATER = [group(180), *reports(195, 245)]
AGAIN = [group(1020), *reports(1030, 1080)]
MANY = [*ROUTINE, *(commit(120 + number, f"c{number}") for number in range(200))]

TIMES: dict[str, tuple[list[ev.Event], dict[str, float]]] = {
    # The first report came 40 s after the group's start, ten of which are a report's usual time.
    "a run without a fault is start-up, training and wind-up": (
        [*KEPT, state(120, "SHUTTING_DOWN"), ended(125)],
        {"wall": 125, "productive": 70, "startup": 50 + 5},
    ),
    "what no checkpoint preserved is kept if the loop returns": (
        [*ROUTINE, state(115, "SHUTTING_DOWN"), ended(120)],
        {"wall": 120, "productive": 65, "startup": 55},
    ),
    "so is what a loop did that returns without a report": (
        [started(10, 0), group(20), ended(100)],
        {"wall": 100, "productive": 80, "startup": 20},
    ),
    "what no checkpoint preserved is lost if the attempt fails": (
        [*KEPT, report(130), ended(135, Outcome.USER_ERROR)],
        {"wall": 135, "productive": 70, "startup": 50, "lost": 15},
    ),
    # 15 s of preparation and ten of training to the new group's first report.
    "a worker failure costs what came after the commit and the restart": (
        [*KEPT, report(130), failed(133), group(140), *reports(165, 215), commit(225, "b"), ended(225)],
        {"wall": 225, "productive": 70 + 70, "startup": 50, "lost": 13, "restart": 7 + 15},
    ),
    "a resize is told apart from a failure": (
        [*KEPT, resized(121), group(140), *reports(155, 205)],
        {"wall": 205, "productive": 70 + 60, "startup": 50, "lost": 1, "resize": 19 + 5},
    ),
    "a driver that is killed without a word costs from its last sign on": (
        [*KEPT, report(130), started(170, 160, 2, "a", 120), *LATER],
        {"wall": 245, "productive": 70 + 60, "startup": 50, "lost": 10, "restart": 30 + 20 + 5},
    ),
    "a commit that a killed driver could not tell of preserves what it had trained": (
        [*KEPT, report(130), started(170, 160, 2, "b", 131), *LATER],
        {"wall": 245, "productive": 70 + 10 + 60, "startup": 50, "restart": 30 + 20 + 5},
    ),
    "an attempt that dies before it trains is start-up and then restart": (
        [started(10, 0), started(40, 30, 2), started(70, 60, 3), group(80), *reports(90, 140)],
        {"wall": 140, "productive": 60, "startup": 10, "restart": 70},
    ),
    "waiting for capacity counts from when it began": (
        [started(10, 0), waiting(30, 12), waiting(60, 12), state(75, "SCHEDULING"), group(80), *reports(90, 140)],
        {"wall": 140, "productive": 60, "startup": 12 + 5, "waiting_for_capacity": 63},
    ),
    "standing still for a checkpoint is no training": (
        [*KEPT, stalled(121, 4), *reports(130, 140)],
        {"wall": 140, "productive": 86, "startup": 50, "checkpoint_stall": 4},
    ),
    # 20 s of preparation; then each report takes 4 s of training and 6 s of standing still.
    "a stall that every report has is not taken for training before the first": (
        [started(10, 0), group(10), *(event for at in range(40, 140, 10) for event in (commit(at), stalled(at, 6)))],
        {"wall": 130, "productive": 40, "startup": 30, "checkpoint_stall": 60},
    ),
    "a stall is never more than there was training": (
        [*KEPT, stalled(120, 1000), started(170, 160, 2, "a", 120)],
        {"wall": 170, "startup": 50, "checkpoint_stall": 70, "restart": 50},
    ),
    "a run that is taken up again after its end was stopped in between": (
        [*KEPT, ended(125, Outcome.CLUSTER_LOST, final=True), started(1010, 1000, 2, "a", 120, counted=5), *AGAIN],
        {"wall": 125 + 80, "stopped": 875, "productive": 70 + 60, "lost": 5, "startup": 50 + 20},
    ),
    # Its flow run had ended as well: nothing was going to start it again.
    "so was one whose driver was lost, at the first attempt of a person": (
        [*KEPT, started(1010, 1000, 2, "a", counted=1), *AGAIN],
        {"wall": 120 + 80, "stopped": 880, "productive": 70 + 60, "startup": 50 + 20},
    ),
    "and a finished run that is asked for its result and then continued": (
        [*KEPT, ended(120), ended(500).model_copy(update={"already_finished": True}), started(1010, 1000, 2, "a")],
        {"wall": 130, "stopped": 880, "productive": 70, "startup": 60},
    ),
    "an end that an automatic restart follows is no stop": (
        [*KEPT, ended(120, Outcome.CLUSTER_LOST), started(170, 160, 2, "a")],
        {"wall": 170, "productive": 70, "startup": 50, "restart": 50},
    ),
    "training after a damaged commit is lost after all": (
        [*KEPT, commit(150, "b"), commit(190, "c"), ended(200, Outcome.CLUSTER_LOST), started(220, 210, 2, "a")],
        {"wall": 220, "productive": 70, "startup": 50, "lost": 30 + 40 + 10, "restart": 20},
    ),
    "an attempt from the beginning loses everything before": (
        [*KEPT, commit(150, "b"), started(220, 210, 2)],
        {"wall": 220, "startup": 50, "lost": 100, "restart": 70},
    ),
    "so does one from the checkpoint of another run that the run began with": (
        [started(10, 0, 1, "x", 5), *KEPT[1:], commit(150, "b"), started(220, 210, 2, "x", 5)],
        {"wall": 220, "startup": 50, "lost": 100, "restart": 70},
    ),
    # The loop did all again, so that going back to "d" preserves nothing of what came after.
    "a commit before a loop that ignored it preserves nothing any more": (
        numbered(
            *(started(0), group(0), *map(commit, (10, 20, 30)), commit(40, "d"), failed(40), group(50), ignored(60)),
            *(*map(commit, (60, 70, 80)), started(100, 90, 2, "d", 40)),
        ),
        {"wall": 100, "restart": 10 + 20, "lost": 40 + 30},
    ),
    "the oldest that is remembered, the fiftieth, loses what came after": (
        [*MANY, started(400, 390, 2, "c150")],
        {"wall": 400, "productive": 70 + 150, "startup": 50, "lost": 49, "restart": 81},
    ),
    "one commit more is too old": (
        [*MANY, started(400, 390, 2, "c149")],
        {"wall": 400, "productive": 70 + 199, "startup": 50, "restart": 81},
    ),
    # The usual 10 s of the 40 until the first report were training, which a preserves.
    "so does a commit before a report's usual time is known": (
        [started(10, 0), group(20), commit(60, "a"), commit(70, "b"), report(80), started(170, 160, 2, "a")],
        {"wall": 170, "productive": 10, "startup": 50, "lost": 10 + 10, "restart": 90},
    ),
    "a later group that reported once is measured by the one before": (
        [*KEPT, failed(120), group(130), report(155), failed(160)],
        {"wall": 160, "productive": 70, "startup": 50, "restart": 10 + 15, "lost": 10 + 5},
    ),
    "signs of life and what others say take no time": (
        [
            *(ev.ClusterConnected(at=T - 5000, address="x"), *KEPT, ev.RunRecalled(at=T + 6000, report={})),
            ev.ControllerAlive(at=T + 5000, doing="RUNNING", seconds=1),
        ],
        {"wall": 120, "productive": 70, "startup": 50},
    ),
    "a history that has not begun adds up to nothing": ([group(10), *reports(20, 50), failed(60)], {}),
}


@pytest.mark.parametrize(("events", "spent"), TIMES.values(), ids=TIMES.keys())
def test_where_the_time_goes(events: list[ev.Event], spent: dict[str, float]) -> None:
    account = tally_of(events).account()
    assert parts(account) == spent
    assert account.goodput == (pytest.approx(spent.get("productive", 0) / spent["wall"], abs=1e-4) if spent else 0)


def test_a_run_counts_until_now_while_it_lives_and_no_longer_once_it_has_ended() -> None:
    waits = tally_of([started(10, 0), waiting(20, since=15)])
    assert parts(waits.account(T + 60)) == {"wall": 60, "startup": 15, "waiting_for_capacity": 45}
    done = tally_of([*KEPT, ended(120)])
    assert done.account(T + 10_000) == done.account()


def test_a_run_with_a_failure_a_resize_and_a_lost_driver() -> None:
    first = [started(0), group(10), report(20), commit(30), report(40), report(50), failed(55, left=0)]
    accounts = add_up(
        [
            *numbered(*first, group(65, size=1), report(75), commit(85, "c"), resized(90), group(100), report(110)),
            ev.StorageWaited(at=T + 110, who="ranks", seconds=4.5),
            ev.WorkersPreempted(at=T + 110, errors={}, retried=True),
            started(200, attempt=2, checkpoint="c", left={"driver restart": 2, "worker failure": 3}),
            group(210),
            *numbered(commit(220, attempt=2), report(230, attempt=2, loss=0.5)),
            ended(240),
        ]
    )
    counts = {
        "attempts": 2,
        "worker_failures": 1,
        "preemptions": 1,
        "resizes": 1,
        "reports_lost": 2 + 0 + 1,
        "steps_redone": 0,
    }
    counts |= {
        "left": {"worker failure": 3, "driver restart": 2},
        "storage_wait_seconds": 4.5,
        "last_metrics": {"loss": 0.5},
        "reports": 9,
    }
    assert accounts.model_dump(exclude={"time", "world_sizes", "history"}) == counts
    assert [(size.at - T, size.size) for size in accounts.world_sizes] == [(10, 2), (65, 1), (100, 2), (210, 2)]
    assert accounts.history[-1] == {"loss": 0.5, "_attempt": 2, "_at": T + 230, "_world_size": 2}


def first_step(at: float, step: int = 0) -> ev.FirstStep:
    return ev.FirstStep(at=T + at, step=step, world_size=2)


def _of_sessions(
    interval: float, prepares: float, trains: float, groups: int, attempts: bool
) -> tuple[list[ev.Event], float]:
    """Groups that prepare, train ten steps a second, report at times, save at the end and fail 5 s after.

    With the true seconds of training that was kept. A save is uploaded for 3 s. With `attempts` every other group ends
    with its driver.
    """
    events: list[ev.Event] = [started(0, 0)]
    attempt, name, kept, now = 1, "", 0, 0.0
    for number in range(groups):
        events.append(group(now))
        begins, saves = now + prepares, now + prepares + trains
        found = [(begins + 0.3, first_step(begins, kept))]
        reports = int((trains + 5) / interval)
        times = [begins + 0.4 + interval * count for count in range(reports + 1)]
        found += [(at, report(at).model_copy(update={"step": kept + int((at - begins) * 10)})) for at in times]
        name, saved = f"c{number}", kept + round(trains * 10)
        made = commit(saves + 3, name).model_copy(update={"step": saved + 30, "metrics": {"step": saved}})
        now = saves + 5
        found = [(at, event) for at, event in [*found, (saves + 3, made)] if at <= now]
        events += [event for _, event in sorted(found, key=lambda one: one[0])]
        kept = saved
        if number == groups - 1:
            events.append(ended(now))
        elif attempts and number % 2:
            attempt += 1
            events += [ended(now, Outcome.CLUSTER_LOST).model_copy(update={"step": saved + 50})]
            events.append(started(now, now, attempt, name, saves + 3))
        else:
            events.append(failed(now).model_copy(update={"step": saved + 50}))
    return events, groups * trains + 5


@pytest.mark.parametrize("attempts", [False, True])
@pytest.mark.parametrize(("prepares", "trains", "groups"), [(60, 540, 6), (30, 90, 20), (30, 90, 1)])
@pytest.mark.parametrize("interval", [0.1, 5, 20, 60, 100])
def test_the_goodput_of_a_session_is_right_however_seldom_it_reports(
    interval: float, prepares: float, trains: float, groups: int, attempts: bool
) -> None:
    events, truth = _of_sessions(interval, prepares, trains, groups, attempts)
    tally = tally_of(events)
    account = tally.account()
    assert account.productive_seconds == pytest.approx(truth, abs=0.1 * groups)
    assert account.goodput == pytest.approx(truth / account.wall_seconds, abs=0.01)
    assert account.startup_seconds == pytest.approx(prepares, abs=0.01)
    assert account.restart_seconds == pytest.approx(prepares * (groups - 1), abs=0.01)
    assert account.lost_seconds == pytest.approx(5 * (groups - 1), abs=0.1 * groups)
    assert tally.steps_redone == 50 * (groups - 1)


def test_steps_are_done_again_once_for_each_group_that_did_them() -> None:
    lost = failed(30).model_copy(update={"step": 40})
    first = [started(0), group(1), first_step(2), lost]
    assert tally_of(first).steps_redone == 0, "nothing is done again until somebody does"
    unborn = [*first, group(31), failed(40), group(41), first_step(42, 30)]
    assert tally_of(unborn).steps_redone == 10, "a group that did no step did none again"
    twice = [*unborn, failed(50).model_copy(update={"step": 35}), group(51), first_step(52, 30)]
    assert tally_of(twice).steps_redone == 10 + 5
    other = [*twice, started(70, attempt=2), group(71), first_step(72, 0)]
    assert tally_of(other).steps_redone == 15 + 30, "the new driver found no checkpoint"
    assert add_up(other).steps_redone == 45


GIVEN_UP = numbered(
    started(0), group(1), commit(2), report(3), failed(4, retried=False), ended(5, Outcome.CLUSTER_LOST)
)
FOUR = [started(0), group(0), *(commit(10 * number) for number in range(1, 5)), failed(40), group(50)]


@pytest.mark.parametrize(
    ("events", "lost"),
    [
        (GIVEN_UP, 0),  # nothing is done again until somebody does
        ([*GIVEN_UP, started(10, attempt=2), group(11)], 1),
        (numbered(started(0), group(1), commit(2), report(3), report(4), resized(9), group(10)), 2),
        (numbered(started(0), group(0), commit(50), report(100), ended(100)), 0),
        (numbered(started(0), group(0), *reports(1, 90), commit(91), failed(95), group(96), report(97)), 0),
        # Some were dropped on the way, as their numbers tell.
        ([started(0), group(0), commit(1, index=1), report(2, index=2), report(5, index=5), failed(6), group(7)], 4),
        (numbered(*FOUR, ignored(60), *(commit(number) for number in range(60, 100, 10))), 4),
    ],
)
def test_reports_that_are_done_again_are_lost(events: list[ev.Event], lost: int) -> None:
    assert add_up(events).reports_lost == lost


@pytest.mark.parametrize("count", [0, 2000, 2001, 9001])
def test_a_long_history_is_thinned_evenly_within_a_factor_of_two_with_first_and_last(count: int) -> None:
    accounts = add_up(report(index, index, step=index) for index in range(count))
    steps = [row["step"] for row in accounts.history]
    assert accounts.reports == count
    assert len(steps) == count if count <= 2000 else 1000 <= len(steps) <= 2000
    assert [*steps[:1], *steps[-1:]] == [*[0] * bool(count), *[count - 1] * bool(count)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(steps)]
    assert all(gap > 0 for gap in gaps), "in order, none twice"
    assert max(gaps[:-1], default=1) <= 2 * min(gaps[:-1], default=1)


@st.composite
def histories(draw: st.DrawFn, monotone: bool = True) -> list[ev.Event]:
    """Attempts with any events in any order; the clock goes on, or jumps where another driver begins."""
    events: list[ev.Event] = []
    at = 0.0
    commits: list[tuple[str, float]] = [("", 0.0)]
    pauses = st.sampled_from([0.0, 0.001, 1.0, 7.5, 3600.0])
    for attempt in range(1, draw(st.integers(1, 4)) + 1):
        if not monotone:
            at += draw(st.sampled_from([0.0, -1.0, -500.0, -100_000.0, 100_000.0]))
        began = at + draw(pauses)
        at = began + draw(pauses)
        checkpoint, committed = draw(st.sampled_from([*commits, ("unknown", at - draw(pauses))]))
        events.append(started(at, began, attempt, checkpoint, committed, draw(st.integers(0, 3))))
        body: list[ev.Event] = []
        for number, kind in enumerate(draw(st.lists(st.sampled_from("gggbbrrrrrrcccsssfpzwuuui"), max_size=25))):
            at += draw(pauses)
            name = f"{attempt}-{number}"
            if kind == "c":
                commits.append((name, at))
            made: dict[str, Callable[[], ev.Event]] = {
                "g": lambda: group(at),
                "b": lambda: first_step(at - draw(pauses), draw(st.integers(0, 9))),
                "r": lambda: report(at, attempt=attempt),
                "c": lambda: commit(at, name, attempt=attempt),
                "s": lambda: stalled(at, draw(pauses)),
                "f": lambda: failed(at, draw(st.booleans())),
                "p": lambda: ev.WorkersPreempted(at=T + at, errors={}, retried=True),
                "z": lambda: resized(at),
                "w": lambda: waiting(at, max(0.0, at - draw(pauses))),
                "u": lambda: state(at, draw(st.sampled_from(["SCHEDULING", "SHUTTING_DOWN", "RUNNING"]))),
                "i": lambda: ignored(at),
            }
            body.append(made[kind]())
        events += numbered(*body)
        if draw(st.booleans()):
            at += draw(pauses)
            events.append(ended(at, draw(st.sampled_from(Outcome)), draw(st.booleans())))
    return events


def _adds_up(account: TimeAccount) -> None:
    fields = account.model_dump()
    assert all(seconds >= 0 for seconds in fields.values()), fields
    wall, _ = fields.pop("wall_seconds"), fields.pop("stopped_seconds")
    assert sum(fields.values()) == pytest.approx(wall, abs=0.01)
    assert 0 <= account.goodput <= 1


@examples(100)
@given(events=histories())
def test_every_moment_is_of_one_part_and_losses_are_never_more_than_was_reported(events: list[ev.Event]) -> None:
    accounts = add_up(events)
    _adds_up(accounts.time)
    whole = max(event.at for event in events) - events[0].driver_started_at  # type: ignore[union-attr]
    assert accounts.time.wall_seconds + accounts.time.stopped_seconds == pytest.approx(whole, abs=0.01)
    assert 0 <= accounts.reports_lost <= 2 * accounts.reports, "lost with a group, and once more by a loop that ignores"
    assert accounts == Accounts.model_validate_json(accounts.model_dump_json())


@examples(60)
@given(events=histories(monotone=False), data=st.data())
def test_the_parts_add_up_whatever_the_clocks_and_a_tally_goes_on_from_its_state(
    events: list[ev.Event], data: st.DataObject
) -> None:
    place, tally = data.draw(st.integers(0, len(events))), Tally()
    for number, event in enumerate(events):
        tally.add(event)
        before = tally.model_dump_json()
        _adds_up(tally.account())
        _adds_up(tally.account(event.at + 100))
        assert tally.model_dump_json() == before, "asking changes nothing"
        tally = Tally.model_validate_json(before) if number == place else tally
    assert tally == tally_of(events)
