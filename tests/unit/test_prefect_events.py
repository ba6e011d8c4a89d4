"""What Prefect is told of a run, as docs/events.md has it."""

import json
import math
from typing import Any

import pytest

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.causes import Cause
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.orchestration.prefect_events import PREFIX, RunEvent, end_event, translate
from prefect_elastic_train.report.run_report import RunReport

T = 1_763_770_000.0
BLOCK = "training-storage-s3/prod"
BASE = {"run_name": "llama", "run_uri": "s3://b/llama", "attempt": 1, "storage_block": BLOCK}
BIG = "x" * 1_000_000

STARTED = ev.AttemptStarted(at=T, sequence=1, attempt=1, run_name="llama", run_uri="s3://b/llama")
GROUP = ev.WorkerGroupStarted(at=T + 10, sequence=2, attempt=1, world_size=4, checkpoint="")


def _told(*events: ev.Event, **settings: Any) -> list[RunEvent]:
    """What is told of a sequence of events, all of it small JSON."""
    report, told = RunReport(run_name="llama", storage_block=BLOCK, **settings), []
    for event in events:
        report.add(event)
        told += translate(event, report)
    for one in told:
        assert len(json.dumps(one.payload, allow_nan=False)) < 64_000
    return told


def committed(number: int, **metrics: Any) -> ev.CheckpointCommitted:
    return ev.CheckpointCommitted(
        at=T + number, sequence=number, attempt=1, checkpoint=f"c{number}", size_bytes=7, metrics=metrics
    )


CAUSES = [Cause([0, 2, 3], "RuntimeError: Connection closed", is_consequence=True), Cause([1], "The actor died")]
NONE = {"reports_lost": 0, "worker_failures": 0, "preemptions": 0, "ranks": [], "reasons": []}
PREEMPTED = {**NONE, "retried": False, "gives_up": "the budget is used up", "preemptions": 1}
FAILED = {
    "retried": True,
    "gives_up": "",
    "reports_lost": 2,
    "worker_failures": 1,
    "preemptions": 0,
    "ranks": [0, 1, 2, 3],
    "reasons": ["rank 1: The actor died"],
}
CAPACITY = {"possible_workers": 1, "min_workers": 2, "resources_per_worker": {"GPU": 1.0}, "missing": "1 GPU"}
WAITED = {"who": "ranks", "seconds": 4.5, "tries": 7, "last": "SlowDown"}
WARNED = {"message": "it began again", "checkpoint": "c1"}
RESIZED = {"old_size": 4, "new_size": 6, "reason": "patience", "waited_seconds": 1.25, "reports_lost": 2}
FROM = {"checkpoint": "from-base-x", "started_from": "s3://b/base/x"}
AGAIN = STARTED.model_copy(update={"attempt": 2, "checkpoint": "c1", "previous_end": "killed"})
RESTARTED = {"attempt": 2, "checkpoint": "c1", "reason": "killed", "driver_restarts": 1, "counted": 0}
COMMITTED = {"checkpoint": "c9", "checkpoint_uri": "s3://b/llama/c9", "size_bytes": 7, "checkpoints_made": 1}


@pytest.mark.parametrize(
    ("event", "name", "payload"),
    [
        (STARTED.model_copy(update=FROM), "started", FROM),
        (AGAIN, "driver-restarted", RESTARTED),
        (GROUP, "workers-started", {"world_size": 4, "restored_step": 0, "redone_steps": 0, "checkpoint": ""}),
        (ev.WorkerGroupResized(**RESIZED), "resized", RESIZED),
        (ev.WorkerFailed(causes=CAUSES, retried=True, reports_lost=2), "worker-failed", FAILED),
        (ev.WorkersPreempted(retried=False), "preempted", PREEMPTED),
        (ev.WaitingForCapacity(**CAPACITY, since=T), "waiting-for-capacity", {**CAPACITY, "since": T}),
        (ev.LoopWarned(**WARNED, problem="checkpoint-ignored"), "checkpoint-ignored", WARNED),
        (ev.StorageWaited(**WAITED), "storage-waited", WAITED),
        (
            committed(9, loss=0.5, acc=math.nan, text="x"),
            "checkpoint",
            {**COMMITTED, "metrics": {"loss": 0.5, "acc": "nan", "text": "x"}},
        ),
    ],
)
def test_an_event_is_told_by_its_name_with_its_payload(event: ev.Event, name: str, payload: dict[str, Any]) -> None:
    event = event.model_copy(update={"at": T + 20, "attempt": event.attempt or 1, "sequence": 9})
    told = _told(event) if name == "started" else _told(STARTED, event)
    assert told[-1] == RunEvent(f"{PREFIX}{name}", T + 20, {**BASE, **payload}, f"{event.attempt}-9")


def test_a_wait_for_capacity_is_told_once_and_the_ordinary_course_of_things_not() -> None:
    wait, ordinary = ev.WaitingForCapacity(**CAPACITY), ev.Reported(metrics={"loss": 1}, world_size=1)
    brief = ev.StorageWaited(who="ranks", seconds=0.5)
    names = [told.name.removeprefix(PREFIX) for told in _told(STARTED, wait, wait, GROUP, ordinary, brief, wait)]
    assert names == ["started", "waiting-for-capacity", "workers-started", "waiting-for-capacity"]


def test_a_checkpoint_that_is_the_best_so_far_is_told_as_that_too() -> None:
    made = [committed(1, acc=0.5), committed(2, acc=0.25), committed(3, acc=0.75), committed(4)]
    told = [(one.name.removeprefix(PREFIX), one.payload) for one in _told(STARTED, *made, score_attribute="acc")]
    names = ["started", "checkpoint", "best-checkpoint", "checkpoint", "checkpoint", "best-checkpoint", "checkpoint"]
    assert [name for name, _ in told] == names
    best = {"checkpoint_uri": "s3://b/llama/c3", "score_attribute": "acc", "score": 0.75}
    assert told[5][1].items() >= best.items()


EXTREME = [
    ev.WorkerFailed(
        causes=[Cause([*range(rank, 20_000, 200)], "bad" * 80, traceback=BIG[:20_000]) for rank in range(200)],
        retried=True,
    ),
    committed(1, **{BIG: 0.5, "acc": math.inf, **{f"metric {number}": 0.5 for number in range(5000)}}),
    committed(1, acc=0.5, text=BIG, tokens=list(range(100_000))),
]


@pytest.mark.parametrize("event", EXTREME)
def test_an_event_is_small_whatever_happened(event: ev.Event) -> None:
    assert _told(STARTED, event, score_attribute="acc")[1:]


def test_the_end_tells_what_there_was() -> None:
    report = RunReport(run_name="llama", score_attribute="acc", storage_block=BLOCK)
    failure = ev.WorkerFailed(at=T + 45, attempt=1, retried=True, reports_lost=2)
    reported = ev.Reported(at=T + 42, attempt=1, metrics={"loss": math.inf, "acc": 0.5}, world_size=4)
    end = ev.AttemptEnded(at=T + 60, attempt=1, outcome=Outcome.COMPLETED)
    for event in (STARTED, GROUP, committed(30, acc=0.9), committed(40, acc=0.5), reported, failure, GROUP, end):
        report.add(event)
    told = end_event(report, "completed", T + 61, "all went well")
    assert (told.name, told.at) == (f"{PREFIX}completed", T + 61)
    expected = {
        **BASE,
        "outcome": "completed",
        "message": "all went well",
        "checkpoint_uri": "s3://b/llama/c40",
        "best_checkpoint_uri": "s3://b/llama/c30",
        "metrics": {"loss": "inf", "acc": 0.5},
        "attempts": 1,
        "worker_failures": 1,
        "driver_restarts": 0,
        "reports_lost": 2,
        "storage_wait_seconds": 0.0,
        "goodput": report.tally.account().goodput,
    }
    assert told.payload | expected == told.payload
    assert told.payload["time"]["wall_seconds"] == 60
    report.add(ev.Reported(metrics={f"{number}{BIG[:100]}": BIG for number in range(5000)}, world_size=1))
    assert len(json.dumps(end_event(report, "timed-out", T + 61, BIG).payload, allow_nan=False)) < 64_000


def test_the_end_of_a_training_that_never_began_has_only_its_outcome_and_message() -> None:
    payload = end_event(RunReport(run_name="llama", storage_block=BLOCK), "failed", T, BIG).payload
    assert payload == {**BASE, "run_uri": "", "attempt": 0, "outcome": "failed", "message": BIG[:2000]}
