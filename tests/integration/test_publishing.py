"""What a training writes to Prefect, on a real server: in place, seldom, and without anybody waiting for it."""

import re
import secrets
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.settings import PREFECT_API_URL, temporary_settings
from typer.testing import CliRunner

from prefect_elastic_train.cli import app
from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.causes import Cause
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.orchestration import report_publisher as publisher_module
from prefect_elastic_train.orchestration.report_publisher import PAGE_KEY, Publisher, read_page
from prefect_elastic_train.report import pictures
from prefect_elastic_train.report.overview import TrainingRow
from prefect_elastic_train.report.run_report import RunReport
from tests.support.processes import free_port, wait_for
from tests.support.reports import artifacts_of, report_of, run_events

pytestmark = pytest.mark.usefixtures("api")

Make = Callable[..., Publisher]


@flow
def training() -> None:
    """Stand for the flow whose run the artifacts belong to."""


@pytest.fixture
def flow_run_id(client: SyncPrefectClient) -> str:
    return str(client.create_flow_run(training).id)


@pytest.fixture
def name() -> str:
    """A run of its own."""
    return f"run-{secrets.token_hex(4)}"


@pytest.fixture
def make(flow_run_id: str, name: str) -> Iterator[Make]:
    """Makes publishers, and ends them."""
    made: list[Publisher] = []

    def make_publisher(on_error: Callable[[str], None] = print, name: str = name, **more: Any) -> Publisher:
        report = RunReport(run_name=name, run_uri=f"/runs/{name}", score_attribute="loss", score_order="min")
        made.append(Publisher(report, on_error, flow_run_id=flow_run_id, **more))
        made[-1].start()
        return made[-1]

    yield make_publisher
    for publisher in made:
        publisher.close()


def _begin(publisher: Publisher, workers: int = 2, told: bool = False) -> Publisher:
    uri = publisher.report.run_uri
    publisher.add(ev.AttemptStarted(sequence=1, attempt=1, run_name="r", run_uri=uri, counted=1), replayed=told)
    ranks = {f"10.0.0.1:{rank}": rank for rank in range(workers)}
    publisher.add(ev.WorkerGroupStarted(sequence=2, attempt=1, world_size=workers, ranks=ranks), replayed=told)
    return publisher


def _failed(sequence: int) -> ev.Event:
    return ev.WorkerFailed(sequence=sequence, attempt=1, causes=[Cause([1], "ValueError: nan")], retried=True)


def _report(index: int, total: int = 1000, checkpoint: str = "") -> ev.Event:
    metrics = {"step": index, "total_steps": total, "loss": 1 / index}
    common = {"sequence": 2 * index + 2, "attempt": 1, "index": index, "metrics": metrics, "world_size": 2}
    if checkpoint:
        return ev.CheckpointCommitted(**common, checkpoint=checkpoint, size_bytes=1000)
    return ev.Reported(**common)


def _rows(client: SyncPrefectClient, read: Callable[..., Any] = read_page) -> dict[str, TrainingRow]:
    return {row.cells["training"]: row for row in read(client)[1].values()}


def _names(client: SyncPrefectClient, name: str) -> list[str]:
    return [event["event"].rpartition(".")[2] for event in run_events(client, run_name=name)]


def test_one_report_and_one_progress_are_updated_in_place_and_an_earlier_process_keeps_its_own(
    make: Make, client: SyncPrefectClient, flow_run_id: str, name: str
) -> None:
    publisher = _begin(make())
    publisher.add(_report(250, checkpoint="checkpoint-1"))
    publisher.close()
    [progress] = artifacts_of(client, flow_run_id, "progress")
    assert (progress.data, progress.key) == (25.0, f"elastic-train-progress-{name}")
    assert "Training: step 250 of 1,000 (25.0%)" in report_of(client, flow_run_id)
    publisher = _begin(make())  # the flow run was resumed
    publisher.add(_report(500))
    wait_for(lambda: len(artifacts_of(client, flow_run_id, "progress")) == 2, 20, "its first progress")
    publisher.add(_report(1000, checkpoint="checkpoint-2"))
    publisher.add(ev.AttemptEnded(sequence=9999, attempt=1, outcome=Outcome.COMPLETED))
    publisher.end("completed")
    reports = sorted(str(artifact.data) for artifact in artifacts_of(client, flow_run_id, "markdown"))
    assert reports[0].startswith("## Completed: step 1,000 of 1,000")
    assert "Training: step 250 of 1,000" in reports[1], "as it was"
    progress = max(artifacts_of(client, flow_run_id, "progress"), key=lambda artifact: artifact.data)
    assert progress.description.startswith("Completed: step 1,000 of 1,000")
    updates = {"event": {"name": ["prefect.artifact.updated"]}, "resource": {"id": [f"prefect.artifact.{progress.id}"]}}
    found = client.request("POST", "/events/filter", json={"filter": updates}).json()
    assert found["total"] == 0, "an event at each update would carry all of the report"


def test_the_page_of_all_trainings_has_a_row_of_each_and_those_in_trouble_come_first(
    make: Make, client: SyncPrefectClient, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{name}-{state}" for state in ("failed", "trains", "completed")]
    publishers = []
    for run_name in reversed(names):
        publishers.append(_begin(make(name=run_name)))
        publishers[-1].add(_report(250, checkpoint="checkpoint-1"))
    completed, trains, failed = publishers
    for publisher in (trains, failed):
        publisher.add(_failed(600))
    failed.end("failed", "ValueError: nan")
    trains.close()
    completed.end("completed")

    def rows() -> dict[str, dict[str, str]]:
        return {run: row.cells for run, row in _rows(client).items() if run in names}

    assert [*rows()] == names
    assert {row["failures"] for row in rows().values()} == {"none", "1 × ValueError: nan"}
    assert rows()[names[2]]["state"] == "Completed: step 250 of 1,000"
    [page] = [artifact for artifact in client.read_artifacts() if artifact.key == PAGE_KEY]
    assert f"| [{names[0]}](" in str(page.data)
    listed = CliRunner().invoke(app, ["runs", "list"]).stdout
    assert [run for run in re.findall(r"run-\w+-\w+", listed) if run in names] == names


def test_a_last_row_that_another_process_overwrites_is_written_again(
    make: Make, client: SyncPrefectClient, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = _begin(make())
    wait_for(lambda: name in _rows(client), 20, "its row")
    page, before = read_page(client)
    read, overwritten = publisher_module.read_page, list[bool]()

    def overwritten_once(api: SyncPrefectClient) -> Any:
        state = _rows(api)[name].cells["state"]
        if state == "Completed" and not overwritten:  # by a process that has read the page before
            overwritten.append(True)
            metadata = {key: row.model_dump_json() for key, row in before.items()}
            client.request("PATCH", "/artifacts/{id}", path_params={"id": page}, json={"metadata_": metadata})
        return read(api)

    monkeypatch.setattr(publisher_module, "read_page", overwritten_once)
    publisher.end("completed")
    assert (_rows(client, read)[name].cells["state"], overwritten) == ("Completed", [True])


def test_runs_of_one_name_in_two_storages_and_long_names_have_rows_of_their_own(
    make: Make, client: SyncPrefectClient
) -> None:
    name = secrets.token_hex(30)
    names = [f"{name}-1", f"{name}-1", f"{name}-2"]
    publishers = [make(name=run_name) for run_name in names]
    for number, publisher in enumerate(publishers):
        publisher.report.run_uri = f"s3://bucket-{number}/{publisher.report.run_name}"
    for number, publisher in enumerate(publishers):
        _begin(publisher, workers=number + 1).close()
    rows = [row for row in read_page(client)[1].values() if row.cells["training"] == names[0][:50]]
    assert sorted(row.cells["size"] for row in rows) == ["1", "2", "3"]


def test_a_row_is_written_less_often_beside_many_live_trainings_and_a_lost_one_comes_back(
    make: Make, client: SyncPrefectClient, name: str
) -> None:
    publisher = _begin(make())
    own = wait_for(lambda: _rows(client).get(name), 20, "its row")
    cells = own.cells | {"training": "another"}
    live = [own.model_copy(update={"key": f"{name}-{n}", "cells": cells}) for n in range(80)]

    def overwrite(rows: list[TrainingRow]) -> None:
        metadata = {row.key: row.model_dump_json() for row in rows}
        client.request(
            "PATCH", "/artifacts/{id}", path_params={"id": read_page(client)[0]}, json={"metadata_": metadata}
        )

    overwrite(live)
    publisher._due_at["page"] = 0.0
    publisher.add(_failed(7))
    wait_for(lambda: name in _rows(client), 20, "its row again")
    wait_for(lambda: publisher._due_at["page"] > time.monotonic() + 60, 5, "the time of the next update")
    assert publisher._due_at["page"] < time.monotonic() + 1.5 * 81
    publisher.close()
    overwrite([])


def test_events_relate_to_what_their_training_belongs_to_and_are_one_however_often_they_are_told(
    make: Make, client: SyncPrefectClient, flow_run_id: str, name: str
) -> None:
    nightly = {"prefect.resource.id": "prefect.deployment.nightly", "prefect.resource.role": "deployment"}
    for told in (False, False, True):  # the last one begins where Prefect was told before
        publisher = _begin(make(related=[nightly]), told=told)
        for _ in range(2):
            publisher.add(_failed(7), replayed=told)
        publisher.close()
    _begin(make(related=[nightly])).end("completed")
    assert sorted(_names(client, name)) == ["completed", "started", "worker-failed", "workers-started"]
    assert all(nightly in event["related"] for event in run_events(client, run_name=name))
    reports = "".join(str(one.data) for one in artifacts_of(client, flow_run_id, "markdown"))
    assert reports.count("1 × ValueError: nan") >= 3
    assert "2 × " not in reports


def test_report_that_somebody_has_deleted_is_made_anew_and_no_event_is_lost(
    make: Make, client: SyncPrefectClient, flow_run_id: str, name: str
) -> None:
    publisher = _begin(make())
    [artifact] = wait_for(lambda: artifacts_of(client, flow_run_id, "markdown"), 20, "the report")
    client.delete_artifact(artifact.id)
    for sequence in range(3, 300):
        publisher.add(_failed(sequence))
    publisher.end("failed", "the disk is full")
    [report] = wait_for(lambda: artifacts_of(client, flow_run_id, "markdown"), 30, "the report of the end")
    assert "## Failed" in report.data
    assert "the disk is full" in report.data
    names = _names(client, name)
    assert (names[0], names[-1], names.count("worker-failed")) == ("started", "failed", 297)


def test_many_events_of_many_workers_are_few_writes_and_fewer_plots(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    interval, write, put = 0.5, Publisher._write, Publisher._put
    written, drawn, kinds = list[float](), list[float](), list[str]()

    def timed_write(self: Publisher, *arguments: Any) -> None:
        written.append(time.monotonic())
        write(self, *arguments)

    def counted_put(self: Publisher, client: SyncPrefectClient, kind: str, *arguments: Any) -> None:
        put(self, client, kind, *arguments)
        kinds.append(kind)

    def draw(report: RunReport, now: float) -> str:
        drawn.append(time.monotonic())
        return ""

    monkeypatch.setattr(Publisher, "_write", timed_write)
    monkeypatch.setattr(Publisher, "_put", counted_put)
    monkeypatch.setattr(pictures, "draw", draw)
    monkeypatch.setattr(publisher_module, "ARTIFACT_SECONDS", interval)
    monkeypatch.setattr(publisher_module, "_PLOT_SECONDS", 3 * interval)
    told: list[str] = []
    publisher = _begin(make(interval_seconds=interval, on_error=told.append), workers=1000)
    began, index = time.monotonic(), 0
    while len(drawn) < 4 and time.monotonic() < began + 60:
        index += 1
        publisher.add(_report(index, 10_000, checkpoint=f"checkpoint-{index}" if index % 20 == 0 else ""))
        time.sleep(max(0.0, began + index / 100 - time.monotonic()))
    assert len(drawn) == 4
    assert min(later - earlier for earlier, later in pairwise(drawn)) >= 3 * interval
    assert min(later - earlier for earlier, later in pairwise(written)) >= interval
    assert 1 <= kinds.count("progress") <= 1 + (time.monotonic() - began) / 30, "it comes less often"
    assert told == []


def test_nothing_is_drawn_after_the_close(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    drawing = []

    def draw(report: RunReport, now: float) -> str:
        drawing.append("begun")
        time.sleep(2)
        drawing.append("ended")
        return ""

    monkeypatch.setattr(publisher_module, "PUBLISHER_CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(pictures, "draw", draw)
    publisher = _begin(make())
    publisher.add(_report(250, checkpoint="checkpoint-1"))
    wait_for(lambda: drawing, 20, "the first drawing")
    publisher.close()
    assert drawing == ["begun", "ended"]


def test_nobody_waits_for_an_api_that_is_away(make: Make) -> None:
    with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{free_port()}/api"}):
        publisher = make()
        began = time.monotonic()
        _begin(publisher)
        for index in range(1, 500):
            publisher.add(_report(index, checkpoint=f"checkpoint-{index}"))
        assert time.monotonic() - began < 2
        publisher.end("completed")
        assert time.monotonic() - began < 9
