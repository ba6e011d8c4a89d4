"""The run's output as lines of a log."""

import logging
from types import SimpleNamespace

import pytest

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.causes import Cause
from prefect_elastic_train.orchestration import logs
from prefect_elastic_train.orchestration.logs import OutputLimits, RunLog

Lines = pytest.LogCaptureFixture
RANKS = {"10.0.0.1:77": 0, "10.0.0.12:77": 1, "10.0.0.1:78": 2}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What is logged, details included."""
    caplog.set_level(logging.DEBUG, "run")
    return caplog


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time of the log."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(logs, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def _log(lines: Lines, *items: ev.Event | str, lines_per_second: float = 1000) -> RunLog:
    """A log of the third attempt, whose beginning is no longer among the lines, with events and lines of output."""
    log = RunLog(logging.getLogger("run"), lines_per_second)
    _add(log, _started(3), ev.WorkerGroupStarted(at=1000, world_size=3, ranks=RANKS))
    lines.clear()
    _add(log, *items)
    return log


def _add(log: RunLog, *items: ev.Event | str) -> None:
    for item in items:
        if isinstance(item, str):
            log.line("driver", item)
        else:
            log.event(item)


def _started(attempt: int, **fields: object) -> ev.AttemptStarted:
    return ev.AttemptStarted(
        attempt=attempt, run_name="mnist", run_uri="/runs/mnist", checkpoint="ckpt-7", at=1000, **fields
    )


def _committed(at: float, world_size: int = 0, **metrics: float) -> ev.CheckpointCommitted:
    name = f"c{at:g}.a0003.g01.r0001"
    return ev.CheckpointCommitted(
        at=at, checkpoint=name, size_bytes=3 * 1024**2, metrics=metrics, world_size=world_size
    )


def _alive(at: float) -> ev.ControllerAlive:
    return ev.ControllerAlive(at=at, doing="", seconds=1)


def _let_through(limits: OutputLimits, source: str, lines: int) -> int:
    return sum(limits.admit_line(source) for _ in range(lines))


def test_each_source_has_ten_seconds_worth_of_lines_in_ten_seconds_and_the_other_ranks_share_one(
    clock: SimpleNamespace,
) -> None:
    limits = OutputLimits(10)
    for _ in range(3):
        told = {rank: _let_through(limits, f"rank {rank}", 1000) for rank in range(1, 100)}
        assert sum(told.values()) == told[1] == 100
        assert _let_through(limits, "driver", 1000) == 100
        assert _let_through(limits, "rank 0", 5000) == 5000, "in full, whatever the others print"
        assert limits.end_window() == ""
        clock.now += 10
        assert limits.end_window().startswith(f"[{99 * 1000 - 100 + 900} lines of output left out: 1000 of rank ")


def test_what_was_left_out_is_a_line_of_the_log_by_source_and_no_event_is(lines: Lines) -> None:
    output = [f"(Actor{number} pid=5) line {line}" for number in range(1, 9) for line in range(10 + number)]
    resized = [ev.WorkerGroupResized(old_size=1, new_size=number) for number in range(50)]
    log = _log(lines, *output, *resized, lines_per_second=1)
    for _ in range(2):
        log.close()
    named = "8 of Actor8, 7 of Actor7, 6 of Actor6, 5 of Actor5, 4 of Actor4"
    assert (len(lines.messages), lines.messages[-1]) == (131, f"[36 lines of output left out: {named}]")


def test_of_a_progress_bar_the_log_has_the_last_state_now_and_then(lines: Lines, clock: SimpleNamespace) -> None:
    log = _log(lines)
    for number in range(0, 960, 2):  # a minute, as tqdm writes and Ray's log monitor reads
        _add(log, f"(RayTrainWorker pid=77) \r{number}/1200\r{number + 1}/1200")
        clock.now += 0.125
    removed = "(RayTrainWorker pid=77) \r        \r"  # tqdm removes its bar
    _add(log, removed, "(RayTrainWorker pid=78) \r1/9", "(RayTrainWorker pid=77) loss 0.5\r")
    expected = ["rank 0] 1/1200", "rank 0] 481/1200", "rank 2] 1/9", "rank 0] loss 0.5"]
    assert lines.messages == [f"[attempt 3 {line}" for line in expected]


def test_checkpoints_are_told_of_every_half_minute_and_when_something_else_is(lines: Lines) -> None:
    log = _log(lines, *map(_committed, range(1000, 1065, 5)))
    more = "5 more since the last line"
    assert lines.messages == [
        "Checkpoint c1000 is committed (3.0 MiB)",
        f"Checkpoint c1030 is committed (3.0 MiB); {more}",
        f"Checkpoint c1060 is committed (3.0 MiB); {more}",
    ]
    lines.clear()
    resized = ev.WorkerGroupResized(at=1065, old_size=1, new_size=2)
    _add(log, _committed(1062, loss=1), _committed(1064, loss=0.123456), resized)
    _add(log, _committed(1066, world_size=2), _alive(1070))
    first, _, last = lines.messages
    assert first == "Checkpoint c1064 is committed (3.0 MiB): loss=0.1235; 1 more since the last line"
    assert last == "Training again after 1.0 s; workers: 2"
    lines.clear()
    log.close()
    assert lines.messages == ["Checkpoint c1066 is committed (3.0 MiB)"]


def test_a_restart_says_how_long_nobody_trained(lines: Lines) -> None:
    failed = ev.WorkerFailed(at=2000, retried=True)
    log = _log(lines, failed, ev.WorkerGroupStarted(at=2002, world_size=2), _alive(2005))
    assert "again after" not in lines.text, "nobody trains yet"
    _add(log, ev.FirstStep(at=2013.8, world_size=2), ev.Reported(at=2014, metrics={}, world_size=2), _alive(2050))
    _add(log, _started(4), ev.WorkerGroupStarted(at=2068, world_size=1))
    _add(log, ev.Reported(at=2070, metrics={}, world_size=1))
    assert [text for text in lines.messages if "again after" in text] == [
        "Training again after 13.8 s; workers: 2",
        "Training again after 20.0 s; workers: 1",
    ]


def test_what_a_training_has_stood_in_for_a_minute_is_told_each_minute_and_what_it_trains_is_not(lines: Lines) -> None:
    for seconds in (2.0, 58.0, 60.4, 62.4, 120.3):
        doing = ("looking whether the run is free", "RUNNING")
        _log(lines, *(ev.ControllerAlive(doing=what, seconds=seconds) for what in doing))
        expected = [f"The training has been {doing[0]} for {seconds:.0f} s"] if seconds in (60.4, 120.3) else []
        assert lines.messages == expected


def test_empty_lines_are_left_out_uncounted_long_ones_cut_and_events_that_cannot_be_read_are_told(lines: Lines) -> None:
    empty = ["  ", "(RayTrainWorker pid=77) "] * 50
    _log(lines, *empty, "x" * 100_000, ev.EVENT_TAG + '{"kind": "attempt_en' + 900 * "x", lines_per_second=0.1).close()
    long, unread = lines.records
    assert len(long.getMessage()) <= 8000
    assert "bytes left out" in long.getMessage()
    assert (unread.levelname, "is lost" in unread.getMessage()) == ("WARNING", True)
    assert len(unread.getMessage()) < 400


@pytest.mark.parametrize(
    ("text", "tagged"),
    [
        ("(RayTrainWorker pid=77, ip=10.0.0.12) loss 0.5", "rank 1] loss 0.5"),
        ("(RayTrainWorker pid=77) loss 0.5", "rank 0] loss 0.5"),
        ("\x1b[33m(RayTrainWorker pid=78, ip=10.0.0.1)\x1b[0m \x1b[1mbold\x1b[0m", "rank 2] bold"),
        ("(RayTrainWorker pid=99) early", "worker 99] early"),
        ("\x1b[36m(TrainController pid=5)\x1b[0m state", "TrainController] state"),
        ("(not a prefix) text", "driver] (not a prefix) text"),
    ],
)
def test_a_workers_line_is_tagged_with_its_rank_and_has_no_colours(lines: Lines, text: str, tagged: str) -> None:
    _log(lines, text)
    assert lines.messages == [f"[attempt 3 {tagged}"]


def test_what_a_loop_logs_keeps_its_level(lines: Lines) -> None:
    _log(lines, "(RayTrainWorker pid=77) ERROR: the data: bad")
    assert lines.record_tuples == [("run", logging.ERROR, "[attempt 3 rank 0] the data: bad")]


def test_a_failed_group_is_a_line_that_says_who_died_and_from_where_training_goes_on_with_the_loops_errors_whole(
    lines: Lines,
) -> None:
    causes = [
        Cause([1], "its process was killed or has crashed", is_death=True, traceback="Worker exit detail:\nof Ray"),
        Cause([0, 3], "ValueError: bad", traceback="Traceback (most recent call last):\nValueError: bad\n"),
        Cause([2], "RuntimeError: Connection closed by peer", is_consequence=True, traceback="Traceback\nof gloo"),
    ]
    log = _log(lines, _committed(1007), ev.WorkerFailed(causes=causes, retried=True, reports_lost=3))
    assert log.loop_error == "\n[ranks 0, 3] Traceback (most recent call last):\nValueError: bad"
    assert lines.messages[-1] == (
        "Worker failure: rank 1 (pid 77, node 10.0.0.12): its process was killed or has crashed; ranks 0, 3: "
        "ValueError: bad; the worker group is restarted from checkpoint c1007; reports since then, which are done "
        f"again: 3; details: /runs/mnist/.elastic_train/logs/0003.log{log.loop_error}"
    )


def test_repairs_are_said_loudly_progress_is_not_and_ranks_are_the_newest_worker_groups(lines: Lines) -> None:
    log = _log(lines, ev.Reported(metrics={}, world_size=1), ev.StorageWaited(who="workers", seconds=0.4))
    assert lines.messages == []
    _add(
        log,
        _started(2, notes=["a was dropped", "b too"]),
        ev.LoopWarned(problem="no-checkpoint", message="it saves not"),
    )
    assert lines.messages[0].startswith("Attempt 2 starts from checkpoint ckpt-7; run directory /runs/mnist; its")
    warnings = [record.getMessage() for record in lines.records if record.levelno == logging.WARNING]
    assert warnings == ["Run mnist: a was dropped", "Run mnist: b too", "It saves not"]
    _add(log, ev.WorkerGroupStarted(world_size=1, ranks={"10.0.0.1:78": 0}), "(RayTrainWorker pid=78) hello")
    assert lines.messages[-1] == "[attempt 2 rank 0] hello"


# Behind a runner that was killed, rich answers a broken pipe with SystemExit.
@pytest.mark.parametrize("error", [ValueError("no handler takes this"), SystemExit(1)])
def test_a_log_that_cannot_be_written_is_said_once_and_harms_nothing(lines: Lines, error: BaseException) -> None:
    class Broken(logging.Logger):
        def log(self, *arguments, **more):
            raise error

    _add(RunLog(Broken("run"), 1000), _started(2), _started(3), "a line")
    said = ["some of the training's output cannot be written to its log"]
    assert lines.messages == said * isinstance(error, ValueError)
