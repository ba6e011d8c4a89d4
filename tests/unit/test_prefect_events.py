"""What Prefect is told of a run, as docs/events.md has it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.orchestration.prefect_events import RunEvent, ending, translate
from prefect_elastic_train.report.run_report import RunReport

T = 1_763_770_000.0
COMMON = {"storage_block": "training-storage-s3/prod"}
BASE = {"run_name": "llama", "run_uri": "s3://b/llama", "attempt": 1, **COMMON}
BIG = "x" * 1_000_000

STARTED = ev.AttemptStarted(at=T, sequence=1, attempt=1, run_name="llama", run_uri="s3://b/llama")
GROUP = ev.WorkerGroupStarted(at=T + 10, sequence=2, attempt=1, world_size=4, checkpoint="")


def _told(*events: ev.Event, **settings: Any) -> list[RunEvent]:
    """Give what is told of a sequence of events."""
    report = RunReport(run_name="llama", **settings)
    told = []
    for event in events:
        report.take(event)
        told += list(translate(event, report, COMMON))
    return told


def _last(*events: ev.Event, **settings: Any) -> RunEvent:
    told = _told(STARTED, *events, **settings)[-1]
    assert told.payload.items() >= BASE.items()
    json.dumps(told.payload, allow_nan=False)
    return RunEvent(told.name, told.at, {key: told.payload[key] for key in told.payload if key not in BASE}, told.key)


def committed(number: int, **metrics: Any) -> ev.CheckpointCommitted:
    return ev.CheckpointCommitted(
        at=T + number, sequence=number, attempt=1, checkpoint=f"c{number}", size_bytes=7, metrics=metrics
    )


def test_the_first_attempt_is_the_start_of_the_run() -> None:
    source = {"checkpoint": "from-base-x", "started_from": "s3://b/base/x"}
    (told,) = _told(STARTED.model_copy(update=source))
    assert told == RunEvent("elastic-train.run.started", T, {**BASE, **source}, "1-1")


def test_a_later_attempt_is_a_driver_that_was_restarted_with_its_reason() -> None:
    second = STARTED.model_copy(update={"at": T + 50, "attempt": 2, "checkpoint": "c1", "previous_end": "killed"})
    told = _told(STARTED, second)[-1]
    assert told.name == "elastic-train.run.driver-restarted"
    assert told.payload == {**BASE, "attempt": 2, "checkpoint": "c1", "reason": "killed", "driver_restarts": 1}


ERRORS = {"1": "The actor died", "0": "RuntimeError: Connection closed"}


@pytest.mark.parametrize(
    ("event", "name", "payload"),
    [
        (GROUP, "workers-started", {"world_size": 4, "checkpoint": ""}),
        (
            ev.WorkerGroupResized(old_size=4, new_size=6, reason="patience", waited_seconds=1.23456, reports_lost=2),
            "resized",
            {"old_size": 4, "new_size": 6, "reason": "patience", "waited_seconds": 1.235, "reports_lost": 2},
        ),
        (
            ev.WorkerFailed(errors=ERRORS, also={"0": [2, 3]}, retried=True, reports_lost=2),
            "worker-failed",
            {
                "ranks": [0, 1, 2, 3],
                "reasons": ["rank 1: The actor died"],
                "retried": True,
                "reports_lost": 2,
                "worker_failures": 1,
                "preemptions": 0,
            },
        ),
        (
            ev.WorkersPreempted(errors={}, retried=False, reports_lost=1),
            "preempted",
            {
                "ranks": [],
                "reasons": [],
                "retried": False,
                "reports_lost": 1,
                "worker_failures": 0,
                "preemptions": 1,
            },
        ),
        (
            ev.WaitingForCapacity(
                possible_workers=1, min_workers=2, resources_per_worker={"GPU": 1.0}, missing="1 GPU", since=T
            ),
            "waiting-for-capacity",
            {"possible_workers": 1, "min_workers": 2, "resources_per_worker": {"GPU": 1.0}, "missing": "1 GPU"},
        ),
        (
            ev.LoopWarned(problem="checkpoint-ignored", message="it began again", checkpoint="c1", again=1.0),
            "checkpoint-ignored",
            {"message": "it began again", "checkpoint": "c1", "ranks": []},
        ),
        (
            ev.StorageWaited(who="ranks", seconds=4.5, tries=7, last="SlowDown"),
            "storage-waited",
            {"who": "ranks", "seconds": 4.5, "tries": 7, "last": "SlowDown"},
        ),
        (
            ev.CheckpointCommitted(checkpoint="c1", size_bytes=7, metrics={"loss": 0.5, "acc": math.nan, "text": "x"}),
            "checkpoint",
            {
                "checkpoint": "c1",
                "checkpoint_uri": "s3://b/llama/c1",
                "size_bytes": 7,
                "metrics": {"loss": 0.5, "acc": "nan", "text": "x"},
                "checkpoints_made": 1,
            },
        ),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_an_event_is_told_by_its_name_with_its_payload(event: ev.Event, name: str, payload: dict[str, Any]) -> None:
    event = event.model_copy(update={"at": T + 20, "attempt": 1, "sequence": 9})
    assert _last(event) == RunEvent(f"elastic-train.run.{name}", T + 20, payload, "1-9")


@pytest.mark.parametrize(
    "event",
    [
        ev.ClusterWanted(),
        ev.ClusterConnected(address="x"),
        ev.StateChanged(state="RUNNING"),
        ev.Reported(metrics={"loss": 1}, world_size=1),
        ev.CheckpointStalled(seconds=1),
        ev.ControllerAlive(doing="RUNNING", seconds=1),
        ev.AttemptEnded(outcome=Outcome.COMPLETED),
        ev.RunRecalled(report=RunReport(run_name="x").model_dump(mode="json")),
    ],
    ids=lambda event: event.kind,
)
def test_prefect_is_not_told_of_the_ordinary_course_of_things(event: ev.Event) -> None:
    assert _told(event) == []


def test_a_wait_for_capacity_is_told_once() -> None:
    wait = ev.WaitingForCapacity(possible_workers=1, min_workers=2, resources_per_worker={})
    names = [told.name.removeprefix("elastic-train.run.") for told in _told(STARTED, wait, wait, GROUP, wait)]
    assert names == ["started", "waiting-for-capacity", "workers-started", "waiting-for-capacity"]


@pytest.mark.parametrize(("order", "best"), [("max", ["c1", "c3"]), ("min", ["c1", "c2"])])
def test_a_checkpoint_that_is_the_best_so_far_is_told_as_that_too(order: str, best: list[str]) -> None:
    made = [committed(1, acc=0.5), committed(2, acc=0.25), committed(3, acc=0.75), committed(4, acc=0.6), committed(5)]
    told = _told(STARTED, *made, score_attribute="acc", score_order=order)
    assert sum(one.name == "elastic-train.run.checkpoint" for one in told) == 5
    found = [one for one in told if one.name == "elastic-train.run.best-checkpoint"]
    assert [one.payload["checkpoint"] for one in found] == best
    assert [one.payload["checkpoint_uri"] for one in found] == [f"s3://b/llama/{name}" for name in best]
    assert found[0].payload["score_attribute"] == "acc"
    assert found[0].payload["score"] == 0.5


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_a_diverged_score_can_be_told(score: float) -> None:
    for told in _told(STARTED, committed(1, acc=score), score_attribute="acc"):
        json.dumps(told.payload, allow_nan=False)


EXTREME: list[ev.Event] = [
    STARTED.model_copy(update={"attempt": 2, "previous_end": BIG, "notes": [BIG] * 3}),
    ev.WorkerFailed(errors={str(rank): f"{'abc'[rank % 3] * (rank + 1)}Error: {BIG[:20_000]}" for rank in range(200)},
                 also={"0": list(range(200, 20_000))}, retried=True),
    ev.WorkersPreempted(errors={"0": BIG}, also={"0": list(range(1, 20_000, 2))}, retried=True),
    ev.WaitingForCapacity(possible_workers=0, min_workers=1, resources_per_worker={"GPU": 1.0}, missing=BIG),
    ev.LoopWarned(problem="ranks-missing", message=BIG, ranks=list(range(3000))),
    ev.StorageWaited(who="ranks", seconds=4, last=BIG),
    committed(1, **{f"metric {number}": 0.5 for number in range(5000)}),
    committed(1, **{BIG: 0.5, "acc": 0.5}),
    committed(1, acc=0.5, text=BIG),
    committed(1, acc=0.5, tokens=list(range(100_000))),
]  # fmt: skip


@pytest.mark.parametrize("event", EXTREME, ids=lambda event: event.kind)
def test_an_event_is_small_whatever_happened(event: ev.Event) -> None:
    told = _told(STARTED, event, score_attribute="acc")[1:]
    assert told
    for one in told:
        assert len(json.dumps(one.payload)) < 64_000


def test_an_event_is_the_same_whenever_it_is_told_and_no_two_are_alike() -> None:
    events: list[ev.Event] = [STARTED, GROUP, committed(3, acc=1), committed(4, acc=2)]
    events += [event.model_copy(update={"attempt": 2}) for event in events]
    told, again = _told(*events, score_attribute="acc"), _told(*events, score_attribute="acc")
    assert told == again
    assert len({(one.name, one.key) for one in told}) == len(told) == 12


def _finished() -> RunReport:
    report = RunReport(run_name="llama", score_attribute="acc")
    made = [committed(30, acc=0.9), committed(40, acc=0.5)]
    failure = ev.WorkerFailed(at=T + 45, attempt=1, errors={}, retried=True, reports_lost=2)
    reports = [
        ev.Reported(at=T + at, attempt=1, metrics={"loss": math.inf, "acc": 0.5}, world_size=4) for at in (30, 42)
    ]
    end = ev.AttemptEnded(at=T + 60, attempt=1, outcome=Outcome.COMPLETED)
    for event in (STARTED, GROUP, reports[0], made[0], made[1], reports[1], failure, GROUP, end):
        report.take(event)
    return report


def test_the_end_tells_what_there_was() -> None:
    report = _finished()
    told = ending(report, "completed", T + 61, "all went well", COMMON)
    assert (told.name, told.at) == ("elastic-train.run.completed", T + 61)
    account = report.tally.account()
    assert told.payload == {
        **BASE,
        "outcome": "completed",
        "message": "all went well",
        "checkpoint_uri": "s3://b/llama/c40",
        "best_checkpoint_uri": "s3://b/llama/c30",
        "metrics": {"loss": "inf", "acc": 0.5},
        "attempts": 1,
        "worker_failures": 1,
        "preemptions": 0,
        "resizes": 0,
        "driver_restarts": 0,
        "steps_lost": 2,
        "goodput": account.goodput,
        "time": account.model_dump(),
    }
    assert account.wall_seconds == 60
    json.dumps(told.payload, allow_nan=False)


@pytest.mark.parametrize(("own", "best"), [(0.6, "from-night-1-c9"), (0.95, "c30")])
def test_a_checkpoint_of_the_run_before_stays_the_best_until_one_is_better(own: float, best: str) -> None:
    inherited = {"checkpoint": "from-night-1-c9", "checkpoint_at": T, "inherited": {"acc": 0.9}}
    report = RunReport(run_name="llama", score_attribute="acc")
    told = []
    for event in (STARTED.model_copy(update=inherited), GROUP, committed(30, acc=own)):
        report.take(event)
        told += [one.name for one in translate(event, report, COMMON)]
    assert ("elastic-train.run.best-checkpoint" in told) == (best == "c30")
    payload = ending(report, "completed", T + 61, "", COMMON).payload
    assert payload["best_checkpoint_uri"] == f"s3://b/llama/{best}"
    assert payload["checkpoint_uri"] == "s3://b/llama/c30"


def test_the_end_of_a_training_that_never_began_can_be_told() -> None:
    told = ending(RunReport(run_name="llama"), "failed", T, BIG, COMMON)
    assert told.payload["outcome"] == "failed"
    assert "checkpoint_uri" not in told.payload, "nobody knows what the run has"
    assert told.payload["message"] == BIG[:2000]


def test_the_end_is_small_and_the_same_whenever_it_is_told() -> None:
    report = _finished()
    report.take(ev.Reported(metrics={f"{number}{BIG[:100]}": BIG for number in range(5000)}, world_size=1))
    told = ending(report, "timed-out", T + 61, BIG, COMMON)
    assert len(json.dumps(told.payload)) < 64_000
    assert told == ending(report, "timed-out", T + 61, BIG, COMMON)
