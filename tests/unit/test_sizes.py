"""Whatever a loop reports, and however often: the run ends with its result, and nothing that is told of it is large."""

import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefect_elastic_train import TrainingResult
from prefect_elastic_train.core.events import EVENT_TAG, AttemptEnded, Event, Report, decode_event, encode_event
from prefect_elastic_train.core.ray_output import Details
from prefect_elastic_train.core.records import CommitRecord
from prefect_elastic_train.core.settings import CheckpointSettings, FailureSettings, LocalStorageSettings
from prefect_elastic_train.core.size_limits import MAX_EVENT_BYTES, MAX_LOG_BYTES, size_of
from prefect_elastic_train.driver.attempt import Attempt
from prefect_elastic_train.driver.event_relay import EventOutput
from prefect_elastic_train.orchestration import prefect_events
from prefect_elastic_train.orchestration.logs import RunLog
from prefect_elastic_train.report import markdown
from prefect_elastic_train.report.run_report import RunReport
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.attempts import Begun, check_run_is_free
from prefect_elastic_train.runs.run_directory import RunDirectory
from tests.unit.support import Training, private_folder, run_callback, spec

SCORE = "score of a name that is longer than all others"


class Supervisor:
    """What a flow process hears of its driver, and what it makes of that for Prefect."""

    def __init__(self, folder: str) -> None:
        self._file = Path(folder, "output")
        with self._file.open("w") as file:
            self.output = EventOutput(file)
        checkpoints = CheckpointSettings(score_attribute=SCORE)
        told = spec(checkpoints=checkpoints, storage=LocalStorageSettings(path=folder))
        self.driver = Attempt(told, self.output, Details())
        self.report = RunReport(run_name="mnist", score_attribute=SCORE)
        self.events: list[Event] = []
        self.payloads: list[int] = []

    def hear_all(self) -> TrainingResult:
        """Hear all up to the driver's last word, and return the result that it brings."""
        self.output.close(10)
        log = RunLog(logging.getLogger("sizes"), 1000)
        for line in filter(None, self._file.read_bytes().split(b"\n")):
            said = decode_event(line.removeprefix(EVENT_TAG.encode()))
            assert said is not None, "only events are told"
            self.events.append(said)
            log.event(said)
            self.report.add(said)
            self.payloads += [size_of(told.payload) for told in prefect_events.translate(said, self.report)]
        ended = self.events[-1]
        assert isinstance(ended, AttemptEnded)
        return TrainingResult.model_validate(ended.result)


def train(folder: str, reports: list[dict[str, Any]], every: int) -> Supervisor:
    """Train as driver and controller do, with a checkpoint now and then and at the last report."""
    supervisor = Supervisor(folder)
    driver = supervisor.driver
    begun = driver.begin()
    assert isinstance(begun, Begun)
    training = Training(driver.store, begun.attempt)
    controller = run_callback(driver._receiver.address, driver.store, begun.attempt, FailureSettings(), SCORE)
    controller.after_controller_start(None)
    kept = training.snapshot["checkpoint_results"]
    for index, metrics in enumerate(reports):
        made = None
        if index % every == 0 or index == len(reports) - 1:
            training.upload(f"checkpoint_{index}")
            kept.append({"version": 0, "checkpoint_dir_name": f"checkpoint_{index}", "metrics": metrics})
            made = kept[-1]
            controller._state.commits.newest = CommitRecord(
                attempt=begun.attempt, sequence=index, snapshot={"latest_checkpoint_result": made}, manifest={}
            )
        controller.after_report(SimpleNamespace(checkpoint=made), [metrics])
    training.snapshot |= {"checkpoint_report_indices": [*range(len(kept))], "latest_checkpoint_result": kept[-1]}
    training.log.commit(json.dumps(training.snapshot).encode())
    controller.after_controller_finish(None)
    driver.close(driver._complete())
    return supervisor


def find_finished(folder: str) -> TrainingResult:
    """Ask for the run once more, as the driver of a retry does."""
    supervisor = Supervisor(folder)
    finished = check_run_is_free(RunDirectory(supervisor.driver.store), supervisor.driver.spec.request)
    assert finished is not None
    supervisor.driver.close(supervisor.driver._end_of_finished(finished))
    return supervisor.hear_all()


STRANGE = {
    "loss": 0.5,
    "n" * 100_000: "x" * 1_000_000,
    "caf\udce9": "caf\udce9",
    "\0" * 300: "\0🙂" * 500,
    "huge": 10**400,
    "nan": math.nan,
    "infinite": -math.inf,
    "none": None,
    "nested": {"a": [{"b": "c"}] * 50},
}


@pytest.mark.parametrize(
    ("metrics", "width", "reports", "every"),
    [({}, 0, 1, 1), ({}, 40, 400, 400), ({}, 40, 400, 1), (STRANGE, 40, 2, 1), (STRANGE, 4_000, 2, 1)],
)
def test_a_run_ends_with_its_result_and_nothing_that_is_told_of_it_is_large(
    metrics: dict[str, Any], width: int, reports: int, every: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "sizes")
    wide = {f"layer_{number}": number / 7 for number in range(width)}
    with private_folder() as folder:
        supervisor = train(folder, [{**metrics, **wide, SCORE: index} for index in range(reports)], every)
        result = supervisor.hear_all()
        assert find_finished(folder).model_dump_json() == result.model_dump_json()
        run = Path(folder, "mnist")
        assert (run / layout.ended_name(1)).stat().st_size < 2 * MAX_EVENT_BYTES
        assert all(segment.stat().st_size < 2 * MAX_EVENT_BYTES for segment in (run / layout.EVENTS).iterdir())
    told = [event for event in supervisor.events if isinstance(event, Report)]
    assert [event.metrics[SCORE] for event in told] == [*range(reports)], "no report is lost"
    assert len(result.history) + result.left_out.get("history", 0) == reports
    made = len({*range(0, reports, every), reports - 1})
    assert len(result.best_checkpoints) + result.left_out.get("best_checkpoints", 0) == made
    assert [result.history[row]["_at"] for row in (0, -1)] == [told[row].at for row in (0, -1)]
    assert result.checkpoint_uri == result.best_checkpoints[-1].uri == f"{run}/checkpoint_{reports - 1}"
    assert result.metrics[SCORE] == result.best_checkpoints[-1].metrics[SCORE] == reports - 1
    assert ("metrics left out" in str(result.metrics.get("…"))) == (width > 1000)
    assert max(len(encode_event(event).encode()) for event in supervisor.events) <= MAX_EVENT_BYTES
    assert max(len(message.encode()) for message in caplog.messages) <= MAX_LOG_BYTES
    assert max(supervisor.payloads) < 100_000
    assert len(markdown.render(supervisor.report, 0.0).encode()) <= 60_000
