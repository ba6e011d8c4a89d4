"""The run's output as lines of a log."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterable, Iterator

import pytest

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.orchestration.limits import OutputLimits
from prefect_elastic_train.orchestration.logs import RunLog


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def texts(self) -> list[str]:
        return [record.getMessage() for record in self.records]


@pytest.fixture
def lines() -> Iterator[Lines]:
    """A logger that keeps its lines, as ``elastic_train_test``."""
    handler = Lines()
    logger = logging.getLogger("elastic_train_test")
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def _log(lines_per_second: float = 1000) -> RunLog:
    log = RunLog(logging.getLogger("elastic_train_test"), lines_per_second)
    log.event(ev.AttemptStarted(attempt=3, run_name="mnist", run_uri="/runs/mnist"))
    return log


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def _let_through(limits: OutputLimits, source: str, texts: Iterable[str]) -> list[str]:
    return [text for text in texts if limits.lets_through(source, text)]


def _numbered(count: int) -> list[str]:
    return [f"line {number}" for number in range(count)]


TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "/work/train.py", line 31, in loop',
    "    step(batch)",
    "    ~~~~^^^^^^^",
    '  File "/work/model.py", line 7, in step',
    "    raise ValueError(number)",
    "ValueError: bad batch 17",
]
CHAINED = [
    *TRACEBACK,
    "",
    "During handling of the above exception, another exception occurred:",
    "",
    *TRACEBACK[:-1],
    "RuntimeError: CUDA error: device-side assert triggered",
    "CUDA kernel errors might be asynchronously reported at some other API call.",
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
    "",
    "Device-side assertions were explicitly omitted for this error check.",
    "",
    "The above exception was the direct cause of the following exception:",
    "",
    *TRACEBACK,
]
GROUP = [
    "  + Exception Group Traceback (most recent call last):",
    '  |   File "/work/train.py", line 1, in <module>',
    '  |     raise ExceptionGroup("two", [a, b])',
    "  | ExceptionGroup: two (2 sub-exceptions)",
    "  +-+---------------- 1 ----------------",
    "    | ValueError: a",
    "    +---------------- 2 ----------------",
    "    | ValueError: b",
    "    +------------------------------------",
]
ALL_TRACEBACKS = pytest.mark.parametrize("traceback", [TRACEBACK, CHAINED, GROUP], ids=["plain", "chained", "group"])


def test_output_is_limited_to_a_burst_and_then_a_rate_and_what_is_left_out_is_counted() -> None:
    clock = Clock()
    limits = OutputLimits(20, clock)
    assert len(_let_through(limits, "driver", _numbered(1000))) == 200, "a burst is ten seconds' worth"
    assert limits.notice() == "", "a notice comes at most each ten seconds"
    clock.now += 10
    assert limits.notice() == "[800 lines of output left out: 800 of driver]"
    assert limits.notice() == ""
    assert len(_let_through(limits, "driver", _numbered(1000))) == 200
    assert limits.notice(at_once=True) == "[800 lines of output left out: 800 of driver]"
    clock.now += 1
    assert len(_let_through(limits, "driver", _numbered(1000))) == 20


def test_the_count_of_what_was_left_out_is_a_line_of_the_log(lines: Lines) -> None:
    log = _log(lines_per_second=2)
    for number in range(100):
        log.line("driver", f"line {number}")
    let_through = sum("line " in text and "left out" not in text for text in lines.texts)
    assert 20 <= let_through <= 25
    log.close()
    left = 100 - let_through
    assert lines.texts[-1] == f"[{left} lines of output left out: {left} of driver]"
    log.close()
    assert sum("left out" in text for text in lines.texts) == 1


def test_rank_0_is_let_through_in_full_whatever_the_others_print() -> None:
    clock = Clock()
    limits = OutputLimits(1, clock)
    for _ in range(60):
        for rank in range(1, 20):
            _let_through(limits, f"rank {rank}", _numbered(50))
        _let_through(limits, "driver", _numbered(50))
        assert len(_let_through(limits, "rank 0", _numbered(500))) == 500
        clock.now += 1
    assert "rank 0" not in limits.notice(at_once=True)


def test_the_other_ranks_share_what_a_source_has() -> None:
    clock = Clock()
    limits = OutputLimits(10, clock)
    told = {rank: len(_let_through(limits, f"rank {rank}", _numbered(1000))) for rank in range(1, 100)}
    assert sum(told.values()) == told[1] == 100
    clock.now += 10
    told = {rank: len(_let_through(limits, f"rank {rank}", _numbered(3))) for rank in range(1, 100)}
    assert sum(told.values()) == 100
    assert _let_through(limits, "driver", ["x"]) == ["x"], "the driver has its own"
    assert _let_through(limits, "TrainController", ["x"]) == ["x"]


def test_what_was_left_out_is_told_for_each_source() -> None:
    limits = OutputLimits(1, Clock())
    for number in range(1, 9):
        _let_through(limits, f"Actor{number}", _numbered(10 + number))
    assert limits.notice(at_once=True) == (
        "[36 lines of output left out: 8 of Actor8, 7 of Actor7, 6 of Actor6, 5 of Actor5, 4 of Actor4 and 3 others]"
    )


@ALL_TRACEBACKS
def test_a_traceback_is_told_whole_when_nothing_else_is(traceback: list[str]) -> None:
    limits = OutputLimits(1, Clock())
    _let_through(limits, "rank 1", _numbered(1000))
    assert _let_through(limits, "rank 1", traceback) == traceback


@ALL_TRACEBACKS
def test_a_traceback_of_a_rank_0_that_floods_the_log_is_told_whole(traceback: list[str]) -> None:
    limits = OutputLimits(1, Clock())
    assert len(_let_through(limits, "rank 0", _numbered(12_000))) < 12_000
    assert _let_through(limits, "rank 0", traceback) == traceback
    assert len(_let_through(limits, "rank 0", _numbered(100))) < 30, "its message may have more lines"


@ALL_TRACEBACKS
def test_tracebacks_of_a_thousand_ranks_are_told_whole_or_not_at_all(traceback: list[str]) -> None:
    limits = OutputLimits(1, Clock())
    for rank in range(1, 1001):
        _let_through(limits, f"rank {rank}", _numbered(20))
    told = [_let_through(limits, f"rank {rank}", traceback) for rank in range(1, 1001)]
    assert all(one in ([], traceback) for one in told)
    assert sum(map(bool, told)) == 20
    assert _let_through(limits, "rank 0", traceback) == traceback, "in full, whatever the others say"


@ALL_TRACEBACKS
def test_tracebacks_that_come_line_by_line_in_turn_are_told_whole_or_not_at_all(traceback: list[str]) -> None:
    clock = Clock()
    limits = OutputLimits(1, clock)
    told: dict[int, list[str]] = {rank: [] for rank in range(1, 61)}
    for text in traceback:
        clock.now += 0.001
        for rank, one in told.items():
            one += _let_through(limits, f"rank {rank}", [text])
    assert all(one in ([], traceback) for one in told.values())
    assert sum(map(bool, told.values())) == 20


def test_tracebacks_that_come_fast_after_one_another_are_limited() -> None:
    """A loop that logs an exception at each step is no reason to let everything through."""
    clock = Clock()
    limits = OutputLimits(1, clock)
    told = 0
    for _ in range(100 * 20):  # 20 a second for 100 seconds
        told += len(_let_through(limits, "rank 1", TRACEBACK))
        clock.now += 0.05
    assert told <= (20 + 0.5 * 100 + 2) * len(TRACEBACK) + 110


def test_what_follows_a_traceback_that_was_left_out_is_not_lost_with_it() -> None:
    clock = Clock()
    limits = OutputLimits(10, clock)
    for rank in range(2, 22):
        _let_through(limits, f"rank {rank}", TRACEBACK)
    assert _let_through(limits, "driver", TRACEBACK) == []
    clock.now += 1
    assert _let_through(limits, "driver", _numbered(5)) == _numbered(5)


def test_a_worker_s_traceback_with_empty_lines_is_told_whole(lines: Lines) -> None:
    log = _log(lines_per_second=0.1)
    log.event(ev.WorkerGroupStarted(world_size=3, ranks=RANKS))
    for number in range(50):
        log.line("driver", f"(RayTrainWorker pid=78) noise {number}")
    lines.records.clear()
    for text in CHAINED:
        log.line("driver", f"(RayTrainWorker pid=78) {text}")
    told = [line.removeprefix("[attempt 3 rank 2] ") for line in lines.texts]
    assert [text for text in told if text.strip()] == [text for text in CHAINED if text.strip()]


def test_sources_without_end_are_forgotten() -> None:
    limits = OutputLimits(1, Clock())
    for number in range(20_000):
        limits.lets_through(f"worker {number}", "hello")
    assert len(limits._sources) <= 5000


def test_the_different_errors_of_a_failure_are_told_whole_up_to_a_few(lines: Lines) -> None:
    log = _log()
    lines.records.clear()
    errors = {str(rank): "\n".join([*TRACEBACK, f"end {rank}"]) for rank in range(12)}
    log.event(ev.WorkerFailed(errors=errors, also={"3": [20, 21]}, retried=True))
    log.event(ev.WorkerFailed(errors=errors, also={"3": [20, 21]}, retried=True))
    first, second = lines.texts
    assert [str(rank) for rank in range(12) if errors[str(rank)] in first] == ["0", "1", "2", "3", "4"]
    assert "[ranks 3, 20-21] Traceback" in first
    assert first.endswith("\nand 7 other errors of other ranks")
    assert len(second.splitlines()) == 1, "the same is not told in full again"


def test_events_are_never_left_out(lines: Lines) -> None:
    log = _log(lines_per_second=0.1)
    for number in range(50):
        log.line("driver", str(number))
        log.event(ev.WorkerGroupResized(old_size=1, new_size=number))
    assert sum("resized" in text for text in lines.texts) == 50


def test_empty_lines_are_left_out_uncounted(lines: Lines) -> None:
    log = _log(lines_per_second=0.1)
    lines.records.clear()
    for _ in range(100):
        log.line("driver", "  ")
    log.line("driver", "text")
    log.close()
    assert lines.texts == ["[attempt 3 driver] text"]


def test_a_very_long_line_is_cut_with_a_note(lines: Lines) -> None:
    log = _log()
    log.line("driver", "x" * 100_000)
    assert len(lines.texts[-1]) <= 8000
    assert "bytes left out" in lines.texts[-1]


def test_an_event_that_cannot_be_read_is_told_as_lost(lines: Lines) -> None:
    _log().line("driver", ev.EVENT_TAG + '{"kind": "attempt_en')
    assert lines.records[-1].levelname == "WARNING"
    assert "is lost" in lines.texts[-1]


RANKS = {"10.0.0.1:77": 0, "10.0.0.12:77": 1, "10.0.0.1:78": 2}


@pytest.mark.parametrize(
    ("text", "tagged"),
    [
        ("plain words", "[attempt 3 driver] plain words"),
        ("(RayTrainWorker pid=78) loss 0.5", "[attempt 3 rank 2] loss 0.5"),
        ("(RayTrainWorker pid=77, ip=10.0.0.12) loss 0.5", "[attempt 3 rank 1] loss 0.5"),
        ("(RayTrainWorker pid=77, ip=10.0.0.1) loss 0.5", "[attempt 3 rank 0] loss 0.5"),
        ("\x1b[36m(RayTrainWorker pid=78)\x1b[0m loss 0.5", "[attempt 3 rank 2] loss 0.5"),
        ("\x1b[33m(RayTrainWorker pid=78, ip=10.0.0.1)\x1b[0m \x1b[1mbold\x1b[0m", "[attempt 3 rank 2] bold"),
        ("(RayTrainWorker pid=99) early", "[attempt 3 worker 99] early"),
        ("\x1b[36m(TrainController pid=5)\x1b[0m state", "[attempt 3 TrainController] state"),
        ("(map_batches pid=6) rows", "[attempt 3 map_batches] rows"),
        ("(not a prefix) text", "[attempt 3 driver] (not a prefix) text"),
        ("\x1b[31mred\x1b[0m", "[attempt 3 driver] red"),
    ],
)
def test_a_workers_line_is_tagged_with_its_rank_and_has_no_colours(lines: Lines, text: str, tagged: str) -> None:
    log = _log()
    log.event(ev.WorkerGroupStarted(world_size=3, ranks=RANKS))
    log.line("driver", text)
    assert lines.texts[-1] == tagged


def test_ranks_are_those_of_the_newest_worker_group(lines: Lines) -> None:
    log = _log()
    log.event(ev.WorkerGroupStarted(world_size=2, ranks={"10.0.0.1:77": 1}))
    log.event(ev.WorkerGroupStarted(world_size=1, ranks={"10.0.0.1:77": 0}))
    log.line("driver", "(RayTrainWorker pid=77) hello")
    assert lines.texts[-1] == "[attempt 3 rank 0] hello"


DIED = """WorkerHealthCheckFailedError: A worker health check failed.
The actor died unexpectedly before finishing this task.
The actor is dead because its worker process has died. Worker exit detail: Worker unexpectedly exits with a connection \
error code 2. End of file. Some common causes include: (1) the process was killed by the OOM killer"""


def test_a_killed_worker_is_a_line_that_says_who_died_and_from_where_training_goes_on(lines: Lines) -> None:
    log = _log()
    log.event(ev.WorkerGroupStarted(world_size=3, ranks=RANKS))
    log.event(ev.CheckpointCommitted(checkpoint="ckpt-7", size_bytes=1, metrics={}))
    broken = "Traceback (most recent call last):\n  …\n"
    broken += "RuntimeError: [/gloo/pair.cc:534] Connection closed by peer [10.0.0.12]:3412"
    log.event(ev.WorkerFailed(errors={"0": broken, "1": DIED}, also={"0": [2]}, retried=True, reports_lost=3))
    assert lines.texts[-1] == (
        "Worker failure: rank 1 (pid 77, node 10.0.0.12): its process was killed or has crashed; the worker group is "
        "restarted from checkpoint ckpt-7, 3 reports since then are done again; details: "
        "/runs/mnist/.elastic_train/logs/0003.log"
    )


def test_waits_for_the_storage_are_told_when_they_are_long_or_have_become_so(lines: Lines) -> None:
    log = _log()
    lines.records.clear()
    for seconds in (0.0, 0.4, 2.5, 0.2, 5.0):
        log.event(ev.StorageWaited(who="workers", seconds=seconds, tries=2, last="reset"))
    assert [text.split(" failed")[0] for text in lines.texts] == [
        "The workers waited 3.1 s for the storage together with 3 waits before, in which 8 requests",
        "The workers waited 5.0 s for the storage, in which 2 requests",
    ]


SAID: list[tuple[ev.Event, int, list[str]]] = [
    (
        ev.ClusterConnected(address="10.0.0.1:6379", resources={"CPU": 8.0, "GPU": 2.0}),
        logging.INFO,
        ["10.0.0.1:6379", "8 CPUs", "2 GPUs"],
    ),
    (
        ev.AttemptStarted(attempt=2, run_name="mnist", run_uri="/runs/mnist", checkpoint="ckpt-7"),
        logging.INFO,
        ["Attempt 2", "mnist", "from checkpoint ckpt-7", "/runs/mnist"],
    ),
    (ev.WorkerGroupStarted(world_size=4), logging.INFO, ["4 workers", "from the beginning"]),
    (ev.WorkerGroupStarted(world_size=4, checkpoint="a"), logging.INFO, ["4 workers", "checkpoint a is offered"]),
    (ev.CheckpointTaken(checkpoint="a", where="step 9"), logging.INFO, ["goes on from checkpoint a", "step 9"]),
    (ev.LoopWarned(problem="no-checkpoint", message="the loop never saves"), logging.WARNING, ["The loop never saves"]),
    (ev.WorkerGroupResized(old_size=2, new_size=4), logging.INFO, ["from 2 to 4"]),
    (
        ev.WorkerFailed(errors={"1": "ValueError: nan"}, retried=True, reports_lost=3),
        logging.WARNING,
        [
            "Worker failure: rank 1: ValueError: nan; ",
            "restarted from the beginning, 3 reports since then are done again",
        ],
    ),
    (ev.WorkersPreempted(errors={}, retried=False), logging.WARNING, ["Preemption", "budget is used up"]),
    (
        ev.WaitingForCapacity(possible_workers=1, min_workers=2, resources_per_worker={"GPU": 1.0}),
        logging.WARNING,
        ["1 workers fit", "at least 2", "GPU"],
    ),
    (
        ev.CheckpointCommitted(checkpoint="ckpt-7", size_bytes=3 * 1024 * 1024, metrics={"loss": 0.123456, "step": 7}),
        logging.INFO,
        ["ckpt-7", "3.0 MiB", "loss=0.1235", "step=7"],
    ),
]


@pytest.mark.parametrize(("event", "level", "words"), SAID, ids=lambda value: getattr(value, "kind", ""))
def test_a_person_is_told_of_an_event_in_words(lines: Lines, event: ev.Event, level: int, words: list[str]) -> None:
    log = _log()
    lines.records.clear()
    log.event(event)
    assert len(lines.records) == 1
    assert lines.records[0].levelno == level
    for word in words:
        assert word in lines.texts[0]


def test_repairs_are_said_loudly(lines: Lines) -> None:
    log = _log()
    log.event(ev.AttemptStarted(attempt=4, run_name="mnist", run_uri="/runs/mnist", notes=["a was dropped", "b too"]))
    warnings = [record.getMessage() for record in lines.records if record.levelno == logging.WARNING]
    assert warnings == ["Run mnist: a was dropped", "Run mnist: b too"]


@pytest.mark.parametrize(
    "event",
    [ev.ControllerAlive(doing="RUNNING", seconds=1), ev.Reported(metrics={}, world_size=1), ev.StateChanged(state="X")],
)
def test_progress_is_no_line_for_a_person(lines: Lines, event: ev.Event) -> None:
    log = _log()
    lines.records.clear()
    log.event(event)
    assert not [record for record in lines.records if record.levelno > logging.DEBUG]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (5 * 1024**3, "5.0 GiB"),
        (3 * 1024**4, "3.0 TiB"),
    ],
)
def test_sizes_are_told_in_units_a_person_reads(lines: Lines, size: int, text: str) -> None:
    _log().event(ev.CheckpointCommitted(checkpoint="a", size_bytes=size, metrics={}))
    assert f"({text})" in lines.texts[-1]


def test_a_log_whose_reader_went_does_not_end_the_training() -> None:
    """Behind a runner that was killed: rich answers a broken pipe with SystemExit."""
    code = """
import logging, os, sys
read_end, write_end = os.pipe()
os.close(read_end)
os.dup2(write_end, 1)
os.dup2(write_end, 2)
from prefect.logging.handlers import PrefectConsoleHandler
from prefect_elastic_train.core.events import AttemptStarted
from prefect_elastic_train.core.rank_errors import distinct
from prefect_elastic_train.orchestration.limits import OutputLimits
from prefect_elastic_train.orchestration.logs import RunLog
logger = logging.getLogger("run")
logger.addHandler(PrefectConsoleHandler(sys.stderr))
logger.setLevel(logging.INFO)
heard = []
class Heard(logging.Handler):
    def emit(self, record):
        heard.append(record.getMessage())
logger.addHandler(Heard())
log = RunLog(logger, 100)
for attempt in range(3):
    log.event(AttemptStarted(attempt=attempt, run_name="r", run_uri="/r"))
os._exit(10 + len(heard))
"""
    ended = subprocess.run([sys.executable, "-c", code], timeout=60)
    assert ended.returncode == 12, "at most the first line is lost to others"
