"""The run's output as lines of a log."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from prefect_elastic_train.driver.events import (
    AttemptStarted,
    CheckpointCommitted,
    ClusterConnected,
    ControllerAlive,
    Event,
    Reported,
    StateChanged,
    WaitingForCapacity,
    WorkerFailed,
    WorkerGroupResized,
    WorkerGroupStarted,
    WorkersPreempted,
)
from prefect_elastic_train.reporting.logs import RunLog, without_colours


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
    log.event(AttemptStarted(attempt=3, run_name="mnist", run_uri="/runs/mnist"))
    return log


def test_output_is_limited_to_a_burst_and_then_a_rate_and_what_is_left_out_is_counted(lines: Lines) -> None:
    log = _log(lines_per_second=20)
    lines.records.clear()
    for number in range(1000):
        log.line("driver", f"line {number}")
    burst = len(lines.texts)
    assert 200 <= burst <= 210, "a burst is ten seconds' worth"
    time.sleep(0.3)
    log.line("driver", "later")
    notice, later = lines.texts[burst:]
    assert notice == f"[{1000 - burst} lines of output left out: more than 20 a second]"
    assert later.endswith("later")
    for number in range(50):
        log.line("driver", f"more {number}")
    let_through = sum("more" in text and "left out" not in text for text in lines.texts)
    log.close()
    assert lines.texts[-1] == f"[{50 - let_through} lines of output left out]"
    log.close()
    assert lines.texts[-1] == f"[{50 - let_through} lines of output left out]"
    assert sum("lines of output left out" in text for text in lines.texts) == 2


def test_nothing_is_said_of_lines_left_out_when_none_was(lines: Lines) -> None:
    log = _log()
    log.line("driver", "one")
    log.close()
    assert not any("left out" in text for text in lines.texts)


def test_events_are_never_left_out(lines: Lines) -> None:
    log = _log(lines_per_second=0.1)
    for number in range(50):
        log.line("driver", str(number))
        log.event(WorkerGroupResized(old_size=1, new_size=number))
    assert sum("resized" in text for text in lines.texts) == 50


def test_empty_lines_are_left_out_uncounted(lines: Lines) -> None:
    log = _log(lines_per_second=0.1)
    lines.records.clear()
    for _ in range(100):
        log.line("driver", "  ")
    log.line("driver", "text")
    log.close()
    assert lines.texts == ["[attempt 3 driver] text"]


def test_a_very_long_line_is_cut(lines: Lines) -> None:
    log = _log()
    log.line("driver", "x" * 100_000)
    assert len(lines.texts[-1]) == 8000


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
    log.event(WorkerGroupStarted(world_size=3, ranks=RANKS))
    log.line("driver", text)
    assert lines.texts[-1] == tagged


def test_a_worker_is_not_taken_for_one_on_a_node_whose_address_begins_the_same(lines: Lines) -> None:
    log = _log()
    log.event(WorkerGroupStarted(world_size=2, ranks={"10.0.0.12:77": 1, "10.0.0.1:77": 0}))
    log.line("driver", "(RayTrainWorker pid=77, ip=10.0.0.1) hello")
    assert lines.texts[-1] == "[attempt 3 rank 0] hello"


def test_ranks_are_those_of_the_newest_worker_group(lines: Lines) -> None:
    log = _log()
    log.event(WorkerGroupStarted(world_size=2, ranks={"10.0.0.1:77": 1}))
    log.event(WorkerGroupStarted(world_size=1, ranks={"10.0.0.1:77": 0}))
    log.line("driver", "(RayTrainWorker pid=77) hello")
    assert lines.texts[-1] == "[attempt 3 rank 0] hello"


def test_what_ray_says_for_each_rank_and_report_is_left_out(lines: Lines) -> None:
    log = _log()
    lines.records.clear()
    for text in (
        "(RayTrainWorker pid=1) Reporting training result 3: TrainingReport(checkpoint=None)",
        "(RayTrainWorker pid=1) Checkpoint successfully created at: Checkpoint(path=/x)",
    ):
        log.line("driver", text)
    assert lines.texts == []


def test_colours_are_taken_out_of_any_text() -> None:
    assert without_colours("\x1b[1;31mred\x1b[0m and \x1b[36mcyan") == "red and cyan"


SAID: list[tuple[Event, int, list[str]]] = [
    (
        ClusterConnected(address="10.0.0.1:6379", resources={"CPU": 8.0, "GPU": 2.0}),
        logging.INFO,
        ["10.0.0.1:6379", "8 CPUs", "2 GPUs"],
    ),
    (
        AttemptStarted(attempt=2, run_name="mnist", run_uri="/runs/mnist", checkpoint="ckpt-7"),
        logging.INFO,
        ["Attempt 2", "mnist", "from checkpoint ckpt-7", "/runs/mnist"],
    ),
    (WorkerGroupStarted(world_size=4), logging.INFO, ["4 workers", "from the beginning"]),
    (WorkerGroupResized(old_size=2, new_size=4), logging.INFO, ["from 2 to 4"]),
    (
        WorkerFailed(errors={"1": "ValueError: nan"}, retried=True, reports_lost=3),
        logging.WARNING,
        ["Worker failure", "restarted", "3 reports", "[rank 1] ValueError: nan"],
    ),
    (WorkersPreempted(errors={}, retried=False), logging.WARNING, ["Preemption", "budget is used up"]),
    (
        WaitingForCapacity(possible_workers=1, min_workers=2, resources_per_worker={"GPU": 1.0}),
        logging.WARNING,
        ["1 workers fit", "at least 2", "GPU"],
    ),
    (
        CheckpointCommitted(checkpoint="ckpt-7", size_bytes=3 * 1024 * 1024, metrics={"loss": 0.123456, "step": 7}),
        logging.INFO,
        ["ckpt-7", "3.0 MiB", "loss=0.1235", "step=7"],
    ),
]


@pytest.mark.parametrize(("event", "level", "words"), SAID, ids=lambda value: getattr(value, "kind", ""))
def test_a_person_is_told_of_an_event_in_words(lines: Lines, event: Event, level: int, words: list[str]) -> None:
    log = _log()
    lines.records.clear()
    log.event(event)
    assert len(lines.records) == 1
    assert lines.records[0].levelno == level
    for word in words:
        assert word in lines.texts[0]


def test_repairs_are_said_loudly(lines: Lines) -> None:
    log = _log()
    log.event(AttemptStarted(attempt=4, run_name="mnist", run_uri="/runs/mnist", notes=["a was dropped", "b too"]))
    warnings = [record.getMessage() for record in lines.records if record.levelno == logging.WARNING]
    assert warnings == ["Run mnist: a was dropped", "Run mnist: b too"]


@pytest.mark.parametrize(
    "event", [ControllerAlive(doing="RUNNING", seconds=1), Reported(metrics={}, world_size=1), StateChanged(state="X")]
)
def test_progress_is_no_line_for_a_person(lines: Lines, event: Event) -> None:
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
        (3 * 1024**4, "3072.0 GiB"),
    ],
)
def test_sizes_are_told_in_units_a_person_reads(lines: Lines, size: int, text: str) -> None:
    _log().event(CheckpointCommitted(checkpoint="a", size_bytes=size, metrics={}))
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
from prefect_elastic_train.driver.events import AttemptStarted
from prefect_elastic_train.reporting.logs import RunLog
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
