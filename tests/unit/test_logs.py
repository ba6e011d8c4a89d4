"""The run's output as lines of a log."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace

import pytest

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.orchestration import logs
from prefect_elastic_train.orchestration.logs import OutputLimits, RunLog

Lines = pytest.LogCaptureFixture


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What is logged, details included."""
    caplog.set_level(logging.DEBUG, "run")
    return caplog


def _log(lines: Lines, lines_per_second: float = 1000) -> RunLog:
    """A log of the third attempt, whose beginning is no longer among the lines."""
    log = RunLog(logging.getLogger("run"), lines_per_second)
    log.event(ev.AttemptStarted(attempt=3, run_name="mnist", run_uri="/runs/mnist"))
    log.event(ev.WorkerGroupStarted(world_size=3, ranks=RANKS))
    lines.clear()
    return log


def _let_through(limits: OutputLimits, source: str, lines: int) -> int:
    return sum(limits.allows(source) for _ in range(lines))


RANKS = {"10.0.0.1:77": 0, "10.0.0.12:77": 1, "10.0.0.1:78": 2}


def test_each_source_has_ten_seconds_worth_of_lines_in_ten_seconds_and_the_other_ranks_share_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(logs, "time", SimpleNamespace(monotonic=lambda: clock.now))
    limits = OutputLimits(10)
    for _ in range(3):
        told = {rank: _let_through(limits, f"rank {rank}", 1000) for rank in range(1, 100)}
        assert sum(told.values()) == told[1] == 100
        assert _let_through(limits, "driver", 1000) == 100
        assert _let_through(limits, "rank 0", 5000) == 5000, "in full, whatever the others print"
        assert limits.end_window() == ""
        clock.now += 10
        assert limits.end_window().startswith(f"[{99 * 1000 - 100 + 900} lines of output left out: 1000 of rank ")


def test_what_was_left_out_is_a_line_of_the_log_by_source(lines: Lines) -> None:
    log = _log(lines, lines_per_second=1)
    for number in range(1, 9):
        for line in range(10 + number):
            log.line("driver", f"(Actor{number} pid=5) line {line}")
    for _ in range(2):
        log.close()
    named = "8 of Actor8, 7 of Actor7, 6 of Actor6, 5 of Actor5, 4 of Actor4"
    assert (len(lines.messages), lines.messages[-1]) == (81, f"[36 lines of output left out: {named}]")


def test_of_a_progress_bar_the_log_has_the_last_state_now_and_then(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(logs, "time", SimpleNamespace(monotonic=lambda: clock.now))
    log = _log(lines)
    for number in range(0, 960, 2):  # a minute, as tqdm writes and Ray's log monitor reads
        log.line("driver", f"(RayTrainWorker pid=77) \r{number}/1200\r{number + 1}/1200")
        clock.now += 0.125
    log.line("driver", "(RayTrainWorker pid=77) \r        \r")  # tqdm removes its bar
    log.line("driver", "(RayTrainWorker pid=78) \r1/9")
    log.line("driver", "(RayTrainWorker pid=77) loss 0.5\r")
    log.close()
    expected = ["rank 0] 1/1200", "rank 0] 481/1200", "rank 2] 1/9", "rank 0] loss 0.5"]
    assert lines.messages == [f"[attempt 3 {line}" for line in expected]


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL])
def test_what_a_loop_logs_keeps_its_level(lines: Lines, level: int) -> None:
    _log(lines).line("driver", f"(RayTrainWorker pid=77) {logging.getLevelName(level)}: the data: bad")
    assert lines.record_tuples == [("run", level, "[attempt 3 rank 0] the data: bad")]


def test_events_are_never_left_out(lines: Lines) -> None:
    log = _log(lines, lines_per_second=0.1)
    for number in range(150):
        log.line("driver", str(number))
        log.event(ev.WorkerGroupResized(old_size=1, new_size=number))
    assert sum("resized" in text for text in lines.messages) == 150


def test_checkpoints_are_told_of_every_half_minute_and_when_something_else_is(lines: Lines) -> None:
    log = _log(lines)
    for at in range(1000, 1065, 5):
        log.event(ev.CheckpointCommitted(at=at, checkpoint=f"c{at}.a0003.g01.r0001", size_bytes=1, metrics={}))
    said = [
        "Checkpoint c1000 is committed (1 Byte)",
        "Checkpoint c1030 is committed (1 Byte); 5 more since the last line",
        "Checkpoint c1060 is committed (1 Byte); 5 more since the last line",
    ]
    assert lines.messages == said
    log.event(ev.CheckpointCommitted(at=1062, checkpoint="c1062", size_bytes=1, metrics={"loss": 1}))
    log.event(ev.CheckpointCommitted(at=1064, checkpoint="c1064", size_bytes=1, metrics={"loss": 0.5}))
    log.event(ev.WorkerGroupResized(at=1065, old_size=1, new_size=2))
    assert lines.messages[3] == "Checkpoint c1064 is committed (1 Byte): loss=0.5; 1 more since the last line"
    log.event(ev.CheckpointCommitted(at=1066, checkpoint="c1066", size_bytes=1, metrics={}, world_size=2))
    log.event(ev.ControllerAlive(at=1070, doing="", seconds=1))
    assert lines.messages[5:] == ["2 workers train again after 1.0 s"]
    log.event(ev.ControllerAlive(at=1094, doing="", seconds=1))
    log.close()
    assert lines.messages[6:] == ["Checkpoint c1066 is committed (1 Byte)"]


def test_a_restart_says_how_long_nobody_trained(lines: Lines) -> None:
    log = _log(lines)
    t = time.time() + 100
    log.event(ev.WorkerFailed(at=t, errors={"0": "gone"}, retried=True))
    log.event(ev.WorkerGroupStarted(at=t + 1.84, world_size=2, checkpoint="a"))
    log.event(ev.ControllerAlive(at=t + 5, doing="", seconds=1))
    assert lines.messages[1:] == ["2 workers start the loop; checkpoint a is offered"], "nobody trains yet"
    log.event(ev.FirstStep(at=t + 13.81, world_size=2))
    log.event(ev.Reported(at=t + 14, metrics={}, world_size=2))
    log.event(ev.ControllerAlive(at=t + 50, doing="", seconds=1))
    log.event(ev.AttemptStarted(**BEGUN, at=t + 60, driver_started_at=t + 59))
    log.event(ev.WorkerGroupStarted(at=t + 68, world_size=1, checkpoint="a"))
    log.event(ev.Reported(at=t + 70, metrics={}, world_size=1))
    assert [text for text in lines.messages if "again after" in text] == [
        "2 workers train again after 13.8 s",
        "1 worker trains again after 20.0 s",
    ]


def test_what_a_training_has_stood_in_for_a_minute_is_told_each_minute_and_what_it_trains_is_not(lines: Lines) -> None:
    log = _log(lines)
    for seconds in (2.0, 58.0, 60.4, 62.4, 120.3):
        log.event(ev.ControllerAlive(doing="looking whether the run is free", seconds=seconds))
        log.event(ev.ControllerAlive(doing="RUNNING", seconds=seconds))
    start = "The training has been looking whether the run is free for"
    assert lines.messages == [f"{start} 60 s", f"{start} 120 s"]


def test_the_different_errors_of_a_failure_are_told_whole(lines: Lines) -> None:
    errors = {str(rank): f"Traceback (most recent call last):\nValueError: {rank}" for rank in range(12)}
    _log(lines).event(ev.WorkerFailed(errors=errors, also={"3": [20, 21]}, retried=True))
    [text] = lines.messages
    assert all(error in text for error in errors.values())
    assert "[ranks 3, 20-21] Traceback" in text


def test_empty_lines_are_left_out_uncounted_long_ones_cut_and_events_that_cannot_be_read_are_told(lines: Lines) -> None:
    log = _log(lines, lines_per_second=0.1)
    for text in ["  ", "(RayTrainWorker pid=77) "] * 50 + ["x" * 100_000, ev.EVENT_TAG + '{"kind": "attempt_en']:
        log.line("driver", text)
    log.close()
    long, unread = lines.records
    assert len(long.getMessage()) <= 8000
    assert "bytes left out" in long.getMessage()
    assert (unread.levelname, "is lost" in unread.getMessage()) == ("WARNING", True)


@pytest.mark.parametrize(
    ("text", "tagged"),
    [
        ("plain words", "driver] plain words"),
        ("(RayTrainWorker pid=78) loss 0.5", "rank 2] loss 0.5"),
        ("(RayTrainWorker pid=77, ip=10.0.0.12) loss 0.5", "rank 1] loss 0.5"),
        ("(RayTrainWorker pid=77) loss 0.5", "rank 0] loss 0.5"),
        ("\x1b[33m(RayTrainWorker pid=78, ip=10.0.0.1)\x1b[0m \x1b[1mbold\x1b[0m", "rank 2] bold"),
        ("(RayTrainWorker pid=99) early", "worker 99] early"),
        ("\x1b[36m(TrainController pid=5)\x1b[0m state", "TrainController] state"),
        ("(not a prefix) text", "driver] (not a prefix) text"),
    ],
)
def test_a_workers_line_is_tagged_with_its_rank_and_has_no_colours(lines: Lines, text: str, tagged: str) -> None:
    _log(lines).line("driver", text)
    assert lines.messages == [f"[attempt 3 {tagged}"]


def test_a_killed_worker_is_a_line_that_says_who_died_and_from_where_training_goes_on(lines: Lines) -> None:
    log = _log(lines)
    log.event(ev.CheckpointCommitted(checkpoint="ckpt-7", size_bytes=1, metrics={}))
    broken = "RuntimeError: [/gloo/pair.cc:534] Connection closed by peer [10.0.0.12]:3412"
    died = "The actor died unexpectedly.\nWorker exit detail: Worker unexpectedly exits with a connection error code 2."
    log.event(ev.WorkerFailed(errors={"0": broken, "1": died}, also={"0": [2]}, retried=True, reports_lost=3))
    assert lines.messages[-1] == (
        "Worker failure: rank 1 (pid 77, node 10.0.0.12): its process was killed or has crashed; the worker group is "
        "restarted from checkpoint ckpt-7; reports since then, which are done again: 3; details: "
        "/runs/mnist/.elastic_train/logs/0003.log"
    )


BEGUN = {"attempt": 2, "run_name": "mnist", "run_uri": "/runs/mnist", "checkpoint": "ckpt-7"}
CLUSTER = {"address": "10.0.0.1:6379", "resources": {"CPU": 8.0, "GPU": 2.0}}
CAPACITY = {"possible_workers": 1, "min_workers": 2, "resources_per_worker": {"GPU": 1.0}}
WAITED = {"who": "workers", "tries": 2, "last": "reset"}
METRICS = {"loss": 0.123456, "step": 7}
SAID: list[tuple[ev.Event, str]] = [
    (ev.ClusterConnected(**CLUSTER), "Connected to the Ray cluster at 10.0.0.1:6379 (8 CPUs, 2 GPUs)"),
    (
        ev.AttemptStarted(**BEGUN),
        "Attempt 2: a new driver resumes from checkpoint ckpt-7; run directory /runs/mnist; its",
    ),
    (ev.WorkerGroupStarted(world_size=4, checkpoint="a"), "4 workers start the loop; checkpoint a is offered"),
    (ev.LoopWarned(problem="no-checkpoint", message="the loop never saves"), "! The loop never saves"),
    (ev.WorkerGroupResized(old_size=2, new_size=4), "resized from 2 to 4"),
    (ev.WorkersPreempted(errors={}, retried=False), "! Preemption: a node was drained or reclaimed; "),
    (ev.WaitingForCapacity(**CAPACITY), "! Waiting for capacity: 1 of at least 2 workers fit, with "),
    (ev.StorageWaited(**WAITED, seconds=5), "! The workers waited 5.0 s for the storage: 2 requests failed"),
    (
        ev.CheckpointCommitted(checkpoint="ckpt-7", size_bytes=3 * 1024**2, metrics=METRICS),
        "Checkpoint ckpt-7 is committed (3.0 MiB): loss=0.1235, step=7",
    ),
]


@pytest.mark.parametrize(("event", "words"), SAID, ids=lambda value: getattr(value, "kind", ""))
def test_a_person_is_told_of_an_event_in_words(lines: Lines, event: ev.Event, words: str) -> None:
    _log(lines).event(event)
    [record] = lines.records
    assert record.levelno == (logging.WARNING if words.startswith("! ") else logging.INFO)
    assert words.removeprefix("! ") in record.getMessage()


def test_repairs_are_said_loudly_progress_is_not_and_ranks_are_the_newest_worker_groups(lines: Lines) -> None:
    log = _log(lines)
    log.event(ev.Reported(metrics={}, world_size=1))
    log.event(ev.StorageWaited(**WAITED, seconds=0.4))
    assert lines.messages == []
    log.event(ev.AttemptStarted(**BEGUN, notes=["a was dropped", "b too"]))
    warnings = [record.getMessage() for record in lines.records if record.levelno == logging.WARNING]
    assert warnings == ["Run mnist: a was dropped", "Run mnist: b too"]
    log.event(ev.WorkerGroupStarted(world_size=1, ranks={"10.0.0.1:78": 0}))
    log.line("driver", "(RayTrainWorker pid=78) hello")
    assert lines.messages[-1] == "[attempt 2 rank 0] hello"


CANNOT = "some of the training's output cannot be written to its log"


# Behind a runner that was killed, rich answers a broken pipe with SystemExit.
@pytest.mark.parametrize(("error", "said"), [(ValueError("no handler takes this"), [CANNOT]), (SystemExit(1), [])])
def test_a_log_that_cannot_be_written_is_said_once_and_harms_nothing(
    lines: Lines, error: BaseException, said: list[str]
) -> None:
    class Broken(logging.Logger):
        def log(self, *arguments: object, **more: object) -> None:
            raise error

    log = RunLog(Broken("run"), 1000)
    for attempt in (2, 3):
        log.event(ev.AttemptStarted(attempt=attempt, run_name="mnist", run_uri="/runs/mnist"))
    log.line("driver", "a line")
    log.close()
    assert lines.messages == said
