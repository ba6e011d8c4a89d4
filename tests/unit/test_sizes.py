"""Whatever a loop reports, and however often: the run ends with its result, and nothing that is told of it is large."""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from prefect_elastic_train import TrainingResult
from prefect_elastic_train.core.bounds import MAX_EVENT_BYTES, MAX_LOG_BYTES, size_of
from prefect_elastic_train.core.events import Event, Report, encode_event
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.core.ray_output import Details
from prefect_elastic_train.core.settings import CheckpointSettings, FailureSettings
from prefect_elastic_train.core.spec import DriverSpec
from prefect_elastic_train.core.storage_settings import LocalStorageSettings
from prefect_elastic_train.driver.attempt import Attempt
from prefect_elastic_train.driver.relay import EventOutput
from prefect_elastic_train.elastic.callbacks import RunCallback
from prefect_elastic_train.orchestration import prefect_events
from prefect_elastic_train.orchestration.logs import RunLog
from prefect_elastic_train.report import markdown
from prefect_elastic_train.report.run_report import RunReport
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.attempts import Finished, peek
from prefect_elastic_train.supervisor.attempt import AttemptAccount
from prefect_elastic_train.supervisor.child import read_lines
from tests.unit.support import Training, examples, private_folder, spec

SCORE = "score of a name that is longer than all others"


def spec_of(folder: str) -> DriverSpec:
    return spec(checkpoints=CheckpointSettings(score_attribute=SCORE), storage=LocalStorageSettings(path=folder))


class Supervisor(logging.Handler):
    """What a flow process hears of its driver, and what it makes of that for Prefect."""

    def __init__(self) -> None:
        super().__init__()
        read, write = os.pipe()
        self._writer = os.fdopen(write, "w")
        self.output = EventOutput(self._writer)
        self.account = AttemptAccount()
        self.report = RunReport(run_name="mnist", score_attribute=SCORE)
        self.events: list[Event] = []
        self.records: list[int] = []
        self.payloads: list[int] = []
        self.texts: list[str] = []
        logger = logging.Logger("sizes")
        logger.addHandler(self)
        self._log = RunLog(logger, 1000)
        self._lines: queue.Queue[tuple[str, bytes | None]] = queue.Queue()
        read_lines(os.fdopen(read, "rb"), "driver", self._lines)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(len(record.getMessage().encode()))

    def _run(self) -> None:
        while (line := self._lines.get()[1]) is not None:
            said = self.account.take(line)
            if isinstance(said, str):
                self.texts.append(said)
                continue
            self.events.append(said)
            self._log.event(said)
            self.report.take(said)
            self.payloads += [size_of(told.payload) for told in prefect_events.translate(said, self.report, {})]

    def hear_all(self) -> TrainingResult:
        """Wait for the driver's last word, and give the result that it brings."""
        self.output.close()
        os.close(self.output._descriptor)
        self._writer.close()
        self._thread.join(30)
        assert self.texts == []
        assert self.account.ended is not None
        assert self.account.ended.outcome is Outcome.COMPLETED
        return TrainingResult.model_validate(self.account.ended.result)


def train(folder: str, reports: list[dict[str, Any]], every: int) -> Supervisor:
    """Train as driver and controller do, with a checkpoint at every so manieth report and at the last."""
    supervisor = Supervisor()
    driver = Attempt(spec_of(folder), supervisor.output, Details())
    begun = driver.begin()
    assert not isinstance(begun, Finished)
    assert driver._receiver is not None
    training = Training(driver.store, begun.attempt)
    controller = RunCallback(driver._receiver.receiving, driver.store, begun.attempt, FailureSettings(), SCORE)
    controller.after_controller_start(None)
    kept = training.snapshot["checkpoint_results"]
    for index, metrics in enumerate(reports):
        made = None
        if index % every == 0 or index == len(reports) - 1:
            training.upload(f"checkpoint_{index}")
            kept.append({"version": 0, "checkpoint_dir_name": f"checkpoint_{index}", "metrics": metrics})
            made = SimpleNamespace(path=f"{training.store.path}/checkpoint_{index}")
        controller.after_report(SimpleNamespace(checkpoint=made), [metrics])
    training.snapshot |= {"checkpoint_report_indices": [*range(len(kept))], "latest_checkpoint_result": kept[-1]}
    training.log.commit(json.dumps(training.snapshot).encode())
    controller.after_controller_finish(None)
    driver.close(driver.complete())
    return supervisor


def find_finished(folder: str) -> TrainingResult:
    """Ask for the run once more, as the driver of a retry does."""
    supervisor = Supervisor()
    driver = Attempt(spec_of(folder), supervisor.output, Details())
    finished = peek(driver.store, driver.spec)
    assert finished is not None
    driver.close(driver.finish(finished))
    return supervisor.hear_all()


#: Names and values by what they are, so that a failing example can be read.
NAMES = {"plain": "loss", "counter": "step", "long": "n" * 100_000, "no text": "caf\udce9", "control": "\0" * 300}
VALUES: dict[str, Any] = {
    "number": 0.5,
    "huge": 10**400,
    "nan": math.nan,
    "infinite": math.inf,
    "none": None,
    "text": "x" * 1_000_000,
    "no text": "caf\udce9",
    "control": "\0🙂" * 500,
    "nested": {"a": [{"b": "c"}] * 50},
}


@examples(5)
@given(
    kinds=st.dictionaries(st.sampled_from([*NAMES]), st.sampled_from([*VALUES])),
    width=st.sampled_from([0, 40, 3000, 30_000]),
    reports=st.integers(1, 900),
    every=st.integers(1, 900),
)
@example(kinds={}, width=40, reports=1000, every=1000)
@example(kinds={}, width=10, reports=900, every=1)
@example(kinds={"plain": "text", "no text": "nan"}, width=30_000, reports=2, every=1)
def test_a_run_ends_with_its_result_and_nothing_that_is_told_of_it_is_large(
    kinds: dict[str, str], width: int, reports: int, every: int
) -> None:
    some = {NAMES[name]: VALUES[value] for name, value in kinds.items()}
    reports = min(reports, 40_000 // (width + 10 + size_of(some) // 20) + 1)
    wide = {f"layer_{number}": number / 7 for number in range(width)}
    with private_folder() as folder:
        metrics = [{**some, **wide, SCORE: index} for index in range(reports)]
        supervisor = train(folder, metrics, every)
        result = supervisor.hear_all()
        assert find_finished(folder).model_dump_json() == result.model_dump_json()
        run = Path(folder, "mnist")
        assert (run / layout.ended_name(1)).stat().st_size < 2 * MAX_EVENT_BYTES
        segments = list((run / layout.EVENTS).iterdir())
        assert max(segment.stat().st_size for segment in segments) < 2 * MAX_EVENT_BYTES
    told = [event for event in supervisor.events if isinstance(event, Report)]
    assert [event.metrics[SCORE] for event in told] == [*range(reports)], "no report is lost"
    made = len({*range(0, reports, every), reports - 1})
    assert len(result.history) + result.left_out.get("history", 0) == reports
    assert len(result.best_checkpoints) + result.left_out.get("best_checkpoints", 0) == made
    assert len(result.metrics_dataframe()) == len(result.history)
    assert [result.history[row]["_at"] for row in (0, -1)] == [told[row].at for row in (0, -1)]
    assert result.checkpoint_uri == result.best_checkpoints[-1].uri == f"{run}/checkpoint_{reports - 1}"
    assert result.metrics[SCORE] == result.best_checkpoints[-1].metrics[SCORE] == reports - 1
    if width >= 3000:
        assert "metrics left out" in result.metrics["…"]
    assert max(len(encode_event(event).encode()) for event in supervisor.events) <= MAX_EVENT_BYTES
    assert max(supervisor.records) <= MAX_LOG_BYTES
    assert max(supervisor.payloads) < 100_000
    assert len(markdown.render(supervisor.report, 0.0).encode()) <= markdown.MAX_BYTES
