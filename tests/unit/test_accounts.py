"""Counts and time account of a history, on examples computed by hand from docs/goodput.md and on random histories."""

import itertools
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

#: The events of a timeline.
KINDS = {
    "started": ev.AttemptStarted,
    "group": ev.WorkerGroupStarted,
    "first": ev.FirstStep,
    "report": ev.Reported,
    "commit": ev.CheckpointCommitted,
    "stalled": ev.CheckpointStalled,
    "ignored": ev.LoopWarned,
    "failed": ev.WorkerFailed,
    "preempted": ev.WorkersPreempted,
    "resized": ev.WorkerGroupResized,
    "state": ev.StateChanged,
    "waiting": ev.WaitingForCapacity,
    "ended": ev.AttemptEnded,
    "connected": ev.ClusterConnected,
    "recalled": ev.RunRecalled,
    "alive": ev.ControllerAlive,
}
#: Fields that matter to no test; each event takes those that it has.
DEFAULTS = {
    **dict.fromkeys(("run_name", "run_uri", "message", "address", "doing"), "it"),
    **dict.fromkeys(("size_bytes", "seconds", "possible_workers", "min_workers", "old_size"), 1),
    **dict.fromkeys(("world_size", "new_size"), 2),
    **{name: {} for name in ("metrics", "resources_per_worker", "report")},
    "problem": "checkpoint-ignored",
    "retried": True,
    "outcome": "completed",
}


def event(kind: str, at: float, **fields: Any) -> ev.Event:
    """An event so many seconds after T, as are the times among its fields."""
    fields = {**DEFAULTS, "at": at, **fields}
    if kind == "started":
        fields = {"attempt": 1, "counted": fields.get("attempt", 1), **fields}
    elif kind == "commit":
        fields = {"checkpoint": f"checkpoint {at}", **fields}
    times = {"at", "driver_started_at", "checkpoint_at", "since"} & fields.keys()
    return KINDS[kind](**{**fields, **{name: T + float(fields[name]) for name in times}})


def timeline(text: str) -> list[ev.Event]:
    """Events such as ``group 20, report 60..80``: kind, time (here every ten seconds), and fields.

    The reports of an attempt are numbered, as its driver does.
    """
    events: list[ev.Event] = []
    index = 0
    for item in text.split(", "):
        kind, at, *rest = item.split()
        fields = dict(field.split("=") for field in rest)
        if "saved" in fields:
            fields["metrics"] = {"step": int(fields.pop("saved"))}
        first, _, last = at.partition("..")
        for seconds in range(int(first), int(last or first) + 1, 10):
            index = 0 if kind == "started" else int(fields.get("index", index + (kind in ("report", "commit"))))
            events.append(event(kind, seconds, **{"index": index, **fields}))
    return events


def tally_of(events: list[ev.Event]) -> Tally:
    tally = Tally()
    for each in events:
        tally.add(each)
    return tally


def parts(account: TimeAccount) -> dict[str, float]:
    """What is more than nothing, without ``_seconds``."""
    return {name.removesuffix("_seconds"): seconds for name, seconds in account.model_dump().items() if seconds}


#: A group's start at 20, its first step at 50 and a report each ten seconds from 60 on; a checkpoint at 120.
ROUTINE = "started 10 driver_started_at=0, group 20, report 60..110"
KEPT = f"{ROUTINE}, commit 120 checkpoint=a"
SECOND = "started 170 driver_started_at=160 attempt=2"
LATER = "group 180, report 195..245"
PERSON = "started 1010 driver_started_at=1000 attempt=2 checkpoint=a"
AGAIN = "group 1020, report 1030..1080"
MANY = ", ".join([ROUTINE, *(f"commit {120 + number} checkpoint=c{number}" for number in range(200))])
#: A session that trains ten steps a second.
SESSION = "started 0, group 0, first 60 step=0, commit 603 checkpoint=a step=5430 saved=5400"
OFTEN = SESSION.replace("commit", "report 70..590, commit")
RESUMED = "group 605, first 665 step=5400, report 690, ended 700"
STALLS = ", ".join(f"commit {at}, stalled {at} seconds=6" for at in range(40, 140, 10))

TIMES = {
    # The first report came 40 s after the group's start, ten of which are a report's usual time.
    "a run without a fault is start-up, training and wind-up": (
        f"{KEPT}, state 120 state=SHUTTING_DOWN, ended 125 => wall 125, productive 70, startup 55"
    ),
    "what no checkpoint preserved is kept if the loop returns": (
        f"{ROUTINE}, state 115 state=SHUTTING_DOWN, ended 120 => wall 120, productive 65, startup 55"
    ),
    "so is what a loop did that returns without a report": (
        "started 10 driver_started_at=0, group 20, ended 100 => wall 100, productive 80, startup 20"
    ),
    "what no checkpoint preserved is lost if the attempt fails": (
        f"{KEPT}, report 130, ended 135 outcome=user_error => wall 135, productive 70, startup 50, lost 15"
    ),
    # 15 s of preparation and ten of training to the new group's first report.
    "a worker failure costs what came after the commit and the restart": (
        f"{KEPT}, report 130, failed 133, group 140, report 165..215, commit 225, ended 225 => "
        "wall 225, productive 140, startup 50, lost 13, restart 22"
    ),
    "a resize is told apart from a failure": (
        f"{KEPT}, resized 121, group 140, report 155..205 => wall 205, productive 130, startup 50, lost 1, resize 24"
    ),
    "a driver that is killed without a word costs from its last sign on": (
        f"{KEPT}, report 130, {SECOND} checkpoint=a checkpoint_at=120, {LATER} => "
        "wall 245, productive 130, startup 50, lost 10, restart 55"
    ),
    "a commit that a killed driver could not tell of preserves what it had trained": (
        f"{KEPT}, report 130, {SECOND} checkpoint=b checkpoint_at=131, {LATER} => "
        "wall 245, productive 140, startup 50, restart 55"
    ),
    "an attempt that dies before it trains is start-up and then restart": (
        "started 10 driver_started_at=0, started 40 driver_started_at=30 attempt=2, "
        "started 70 driver_started_at=60 attempt=3, group 80, report 90..140 => "
        "wall 140, productive 60, startup 10, restart 70"
    ),
    "waiting for capacity counts from when it began": (
        "started 10 driver_started_at=0, waiting 30 since=12, waiting 60 since=12, state 75 state=SCHEDULING, "
        "group 80, report 90..140 => wall 140, productive 60, startup 17, waiting_for_capacity 63"
    ),
    "standing still for a checkpoint is no training": (
        f"{KEPT}, stalled 121 seconds=4, report 130..140 => wall 140, productive 86, startup 50, checkpoint_stall 4"
    ),
    # 20 s of preparation; then each report takes 4 s of training and 6 s of standing still.
    "a stall that every report has is not taken for training before the first": (
        f"started 10 driver_started_at=0, group 10, {STALLS} => "
        "wall 130, productive 40, startup 30, checkpoint_stall 60"
    ),
    "a stall is never more than there was training": (
        f"{KEPT}, stalled 120 seconds=1000, {SECOND} checkpoint=a checkpoint_at=120 => "
        "wall 170, startup 50, checkpoint_stall 70, restart 50"
    ),
    "a run that is taken up again after its end was stopped in between": (
        f"{KEPT}, ended 125 outcome=cluster_lost final=1, {PERSON} checkpoint_at=120 counted=5, {AGAIN} => "
        "wall 205, stopped 875, productive 130, lost 5, startup 70"
    ),
    # Its flow run had ended as well: nothing was going to start it again.
    "so was one whose driver was lost, at the first attempt of a person": (
        f"{KEPT}, {PERSON} counted=1, {AGAIN} => wall 200, stopped 880, productive 130, startup 70"
    ),
    "and a finished run that is asked for its result and then continued": (
        f"{KEPT}, ended 120, ended 500 already_finished=1, {PERSON} => wall 130, stopped 880, productive 70, startup 60"
    ),
    "an end that an automatic restart follows is no stop": (
        f"{KEPT}, ended 120 outcome=cluster_lost, {SECOND} checkpoint=a => "
        "wall 170, productive 70, startup 50, restart 50"
    ),
    "training after a damaged commit is lost after all": (
        f"{KEPT}, commit 150 checkpoint=b, commit 190 checkpoint=c, ended 200 outcome=cluster_lost, "
        "started 220 driver_started_at=210 attempt=2 checkpoint=a => "
        "wall 220, productive 70, startup 50, lost 80, restart 20"
    ),
    "an attempt from the beginning loses everything before": (
        f"{KEPT}, commit 150 checkpoint=b, started 220 driver_started_at=210 attempt=2 => "
        "wall 220, startup 50, lost 100, restart 70"
    ),
    "so does one from the checkpoint of another run that the run began with": (
        "started 10 driver_started_at=0 checkpoint=x checkpoint_at=5, group 20, report 60..110, commit 120..150, "
        "started 220 driver_started_at=210 attempt=2 checkpoint=x checkpoint_at=5 => "
        "wall 220, startup 50, lost 100, restart 70"
    ),
    # The loop did all again, so that going back to "d" preserves nothing of what came after.
    "a commit before a loop that ignored it preserves nothing any more": (
        "started 0, group 0, commit 10..30, commit 40 checkpoint=d, failed 40, group 50, ignored 60, commit 60..80, "
        "started 100 driver_started_at=90 attempt=2 checkpoint=d checkpoint_at=40 => wall 100, restart 30, lost 70"
    ),
    "the oldest that is remembered, the fiftieth, loses what came after": (
        f"{MANY}, started 400 driver_started_at=390 attempt=2 checkpoint=c150 => "
        "wall 400, productive 220, startup 50, lost 49, restart 81"
    ),
    "one commit more is too old": (
        f"{MANY}, started 400 driver_started_at=390 attempt=2 checkpoint=c149 => "
        "wall 400, productive 269, startup 50, restart 81"
    ),
    # The usual 10 s of the 40 until the first report were training, which a preserves.
    "so does a commit before a report's usual time is known": (
        "started 10 driver_started_at=0, group 20, commit 60 checkpoint=a, commit 70 checkpoint=b, report 80, "
        f"{SECOND} checkpoint=a => wall 170, productive 10, startup 50, lost 20, restart 90"
    ),
    "a later group that reported once is measured by the one before": (
        f"{KEPT}, failed 120, group 130, report 155, failed 160 => "
        "wall 160, productive 70, startup 50, restart 25, lost 15"
    ),
    # 5 s of training come after the step that the checkpoint has, three of them during its upload.
    "with a session the first step tells the start from the training, however seldom it reports": (
        f"{SESSION}, failed 605 step=5450, {RESUMED} => wall 700, productive 575, startup 60, restart 60, lost 5"
    ),
    "and however often": (
        f"{OFTEN}, failed 605 step=5450, {RESUMED} => wall 700, productive 575, startup 60, restart 60, lost 5"
    ),
    "also if the driver is lost": (
        f"{SESSION}, ended 605 outcome=cluster_lost step=5450, started 605 driver_started_at=605 attempt=2 "
        f"checkpoint=a checkpoint_at=603, {RESUMED} => wall 700, productive 575, startup 60, restart 60, lost 5"
    ),
    "signs of life and what others say take no time": (
        f"connected -5000, {KEPT}, recalled 6000, alive 5000 => wall 120, productive 70, startup 50"
    ),
    "a history that has not begun adds up to nothing": "group 10, report 20..50, failed 60 => ",
}


@pytest.mark.parametrize("text", TIMES.values(), ids=TIMES.keys())
def test_where_the_time_goes(text: str) -> None:
    events, _, expected = text.partition(" => ")
    spent = {name: float(seconds) for name, seconds in (part.split() for part in expected.split(", ") if part)}
    account = tally_of(timeline(events)).account()
    assert parts(account) == spent
    assert account.goodput == (pytest.approx(spent.get("productive", 0) / spent["wall"], abs=1e-4) if spent else 0)


def test_a_run_counts_until_now_while_it_lives_and_no_longer_once_it_has_ended() -> None:
    waits = tally_of(timeline("started 10 driver_started_at=0, waiting 20 since=15"))
    assert parts(waits.account(T + 60)) == {"wall": 60, "startup": 15, "waiting_for_capacity": 45}
    done = tally_of(timeline(f"{KEPT}, ended 120"))
    assert done.account(T + 10_000) == done.account()


def test_a_run_with_a_failure_a_resize_and_a_lost_driver() -> None:
    events = timeline(
        "started 0, group 10, report 20, commit 30, report 40..50, failed 55 left=0, group 65 world_size=1, report 75, "
        "commit 85 checkpoint=c, resized 90, group 100, report 110, preempted 110"
    )
    left = {"driver restart": 2, "worker failure": 3}
    events += [
        ev.StorageWaited(at=T + 110, who="ranks", seconds=4.5),
        event("started", 200, attempt=2, checkpoint="c", left=left),
        *timeline("group 210, commit 220"),
        event("report", 230, attempt=2, index=2, metrics={"loss": 0.5}),
        event("ended", 240),
    ]
    accounts = add_up(events)
    counts = {
        "attempts": 2,
        "worker_failures": 1,
        "preemptions": 1,
        "resizes": 1,
        "reports_lost": 2 + 0 + 1,
        "steps_redone": 0,
        "left": left,
        "storage_wait_seconds": 4.5,
        "last_metrics": {"loss": 0.5},
        "reports": 9,
    }
    assert accounts.model_dump(exclude={"time", "world_sizes", "history"}) == counts
    assert [(size.at - T, size.size) for size in accounts.world_sizes] == [(10, 2), (65, 1), (100, 2), (210, 2)]
    assert accounts.history[-1] == {"loss": 0.5, "_attempt": 2, "_at": T + 230, "_world_size": 2}


LOST = "started 0, group 1, first 2 step=0, failed 30 step=40"
UNBORN = f"{LOST}, group 31, failed 40, group 41, first 42 step=30"
TWICE = f"{UNBORN}, failed 50 step=35, group 51, first 52 step=30"


@pytest.mark.parametrize(
    ("events", "redone"),
    [
        (LOST, 0),  # nothing is done again until somebody does
        (UNBORN, 10),  # a group that did no step did none again
        (TWICE, 10 + 5),
        (f"{TWICE}, started 70 attempt=2, group 71, first 72 step=0", 15 + 30),  # the new driver found no checkpoint
    ],
)
def test_steps_are_done_again_once_for_each_group_that_did_them(events: str, redone: int) -> None:
    assert add_up(timeline(events)).steps_redone == redone


GIVEN_UP = "started 0, group 1, commit 2, report 3, failed 4 retried=0, ended 5 outcome=cluster_lost"


@pytest.mark.parametrize(
    ("events", "lost"),
    [
        (GIVEN_UP, 0),  # nothing is done again until somebody does
        (f"{GIVEN_UP}, started 10 attempt=2, group 11", 1),
        ("started 0, group 1, commit 2, report 3, report 4, resized 9, group 10", 2),
        ("started 0, group 0, commit 50, report 100, ended 100", 0),
        ("started 0, group 0, report 1..90, commit 91, failed 95, group 96, report 97", 0),
        # Some were dropped on the way, as their numbers tell.
        ("started 0, group 0, commit 1, report 2, report 5 index=5, failed 6, group 7", 4),
        ("started 0, group 0, commit 10..40, failed 40, group 50, ignored 60, commit 60..90", 4),
    ],
)
def test_reports_that_are_done_again_are_lost(events: str, lost: int) -> None:
    assert add_up(timeline(events)).reports_lost == lost


@pytest.mark.parametrize("count", [2000, 2001, 9001])
def test_a_long_history_is_thinned_evenly_within_a_factor_of_two_with_first_and_last(count: int) -> None:
    accounts = add_up(event("report", index, index=index, metrics={"step": index}) for index in range(count))
    steps = [row["step"] for row in accounts.history]
    assert accounts.reports == count
    assert len(steps) == count if count <= 2000 else 1000 <= len(steps) <= 2000
    assert (steps[0], steps[-1]) == (0, count - 1)
    gaps = [later - earlier for earlier, later in itertools.pairwise(steps)]
    assert all(gap > 0 for gap in gaps), "in order, none twice"
    assert max(gaps[:-1]) <= 2 * min(gaps[:-1])


#: Kinds of events in random histories: reports are the most frequent.
_DRAWN = [*KINDS][1:12] + ["first"] + ["group", "commit", "stalled", "state"] * 2 + ["report"] * 5


@st.composite
def histories(draw: st.DrawFn, monotone: bool) -> list[ev.Event]:
    """Attempts with any events in any order; the clock goes on, or jumps where another driver begins."""
    events: list[ev.Event] = []
    at = 0.0
    commits = [("", 0.0)]
    pauses = st.sampled_from([0.0, 0.001, 1.0, 7.5, 3600.0])
    for attempt in range(1, draw(st.integers(1, 4)) + 1):
        if not monotone:
            at += draw(st.sampled_from([0.0, -1.0, -500.0, -100_000.0, 100_000.0]))
        began = at + draw(pauses)
        at = began + draw(pauses)
        checkpoint, committed = draw(st.sampled_from([*commits, ("unknown", at - draw(pauses))]))
        begun = {"checkpoint": checkpoint, "checkpoint_at": committed, "counted": draw(st.integers(0, 3))}
        events.append(event("started", at, attempt=attempt, driver_started_at=began, **begun))
        kinds = draw(st.lists(st.sampled_from(_DRAWN), max_size=25))
        for number, kind in enumerate(kinds):
            pause = draw(pauses)
            at += draw(pauses)
            name = f"{attempt}-{number}"
            if kind == "commit":
                commits.append((name, at))
            # Each event takes those of these fields that it has.
            fields = {
                "attempt": attempt,
                "index": sum(each in ("report", "commit") for each in kinds[: number + 1]),
                "step": draw(st.integers(0, 9)),
                "checkpoint": name,
                "seconds": pause,
                "since": max(0.0, at - pause),
                "state": draw(st.sampled_from(["SCHEDULING", "SHUTTING_DOWN", "RUNNING"])),
            }
            events.append(event(kind, at - pause if kind == "first" else at, **fields))  # it may be told late
        if draw(st.booleans()):
            at += draw(pauses)
            events.append(event("ended", at, outcome=draw(st.sampled_from(Outcome)), final=draw(st.booleans())))
    return events


def _adds_up(account: TimeAccount) -> None:
    fields = account.model_dump()
    assert all(seconds >= 0 for seconds in fields.values()), fields
    wall, _ = fields.pop("wall_seconds"), fields.pop("stopped_seconds")
    assert sum(fields.values()) == pytest.approx(wall, abs=0.01)
    assert 0 <= account.goodput <= 1


@examples(120)
@given(monotone=st.booleans(), data=st.data())
def test_every_moment_is_of_one_part_whatever_the_clocks_and_a_tally_goes_on_from_its_state(
    monotone: bool, data: st.DataObject
) -> None:
    events = data.draw(histories(monotone))
    place, tally = data.draw(st.integers(0, len(events))), Tally()
    for number, each in enumerate(events):
        tally.add(each)
        before = tally.model_dump_json()
        _adds_up(tally.account())
        _adds_up(tally.account(each.at + 100))
        assert tally.model_dump_json() == before, "asking changes nothing"
        tally = Tally.model_validate_json(before) if number == place else tally
    assert tally == tally_of(events)
    accounts = add_up(events)
    assert 0 <= accounts.reports_lost <= 2 * accounts.reports, "lost with a group, and once more by a loop that ignores"
    assert accounts == Accounts.model_validate_json(accounts.model_dump_json())
    if monotone:
        whole = max(each.at for each in events) - events[0].driver_started_at
        assert accounts.time.wall_seconds + accounts.time.stopped_seconds == pytest.approx(whole, abs=0.01)
