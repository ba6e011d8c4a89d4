"""What a training writes to Prefect, on a real server: in place, seldom, and without anybody waiting for it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from prefect_elastic_train.core.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    Event,
    Reported,
    WorkerFailed,
    WorkerGroupStarted,
)
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.orchestration import publisher as publishing
from prefect_elastic_train.orchestration.prefect_events import RunEvent
from prefect_elastic_train.orchestration.publisher import ARTIFACT_SECONDS, Publisher, artifact_key
from prefect_elastic_train.report.run_report import RunReport
from tests.support.processes import free_port, wait_for
from tests.support.reports import artifacts_of, report_of, run_events

pytestmark = pytest.mark.usefixtures("api")

Make = Callable[..., Publisher]


@flow
def training() -> None:
    """Stand for the flow whose run the artifacts belong to."""


@pytest.fixture
def client() -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client


@pytest.fixture
def flow_run_id(client: SyncPrefectClient) -> str:
    return str(client.create_flow_run(training).id)


@pytest.fixture
def make(flow_run_id: str) -> Iterator[Make]:
    """Makes publishers, and ends them."""
    made: list[Publisher] = []

    def make_publisher(run_name: str = "mnist", **more: Any) -> Publisher:
        report = RunReport(run_name=run_name, score_attribute="loss", score_order="min")
        made.append(Publisher(report, flow_run_id=flow_run_id, storage_block="training-storage-local/prod", **more))
        return made[-1]

    yield make_publisher
    for publisher in made:
        publisher.close()


def _begin(publisher: Publisher, workers: int = 2) -> None:
    publisher.take(AttemptStarted(sequence=1, attempt=1, run_name="mnist", run_uri="/runs/mnist", counted=1))
    ranks = {f"10.0.0.1:{rank}": rank for rank in range(workers)}
    publisher.take(WorkerGroupStarted(sequence=2, attempt=1, world_size=workers, ranks=ranks))


def _report(index: int, total: int = 1000, checkpoint: str = "") -> list[Event]:
    metrics = {"step": index, "total_steps": total, "loss": 1 / index}
    common = {"sequence": 2 * index + 2, "attempt": 1, "index": index, "metrics": metrics, "world_size": 2}
    if not checkpoint:
        return [Reported(**common)]
    return [CheckpointCommitted(**common, checkpoint=checkpoint, size_bytes=1000)]


def test_one_report_and_one_progress_are_updated_in_place_and_an_earlier_process_keeps_its_own(
    make: Make, client: SyncPrefectClient, flow_run_id: str
) -> None:
    publisher = make()
    _begin(publisher)
    for event in _report(250, checkpoint="checkpoint-1"):
        publisher.take(event)
    publisher.close()
    [progress] = artifacts_of(client, flow_run_id, "progress")
    assert progress.data == 25.0
    assert progress.key == artifact_key("mnist", "progress") == "elastic-train-progress-mnist"
    assert "Training: step 250 of 1,000 (25.0%)" in report_of(client, flow_run_id)
    publisher = make()  # the flow run was resumed
    _begin(publisher)
    wait_for(lambda: len(artifacts_of(client, flow_run_id, "markdown")) == 2, 20, "its first report")
    for event in _report(1000, checkpoint="checkpoint-2"):
        publisher.take(event)
    publisher.take(AttemptEnded(sequence=9999, attempt=1, outcome=Outcome.COMPLETED))
    publisher.end("completed")
    reports = sorted(str(artifact.data) for artifact in artifacts_of(client, flow_run_id, "markdown"))
    assert reports[0].startswith("## Completed: step 1,000 of 1,000")
    assert "Training: step 250 of 1,000" in reports[1], "as it was"
    progress = max(artifacts_of(client, flow_run_id, "progress"), key=lambda artifact: artifact.data)
    assert progress.data == 100.0
    assert progress.description.startswith("Completed: step 1,000 of 1,000")
    updates = {"event": {"name": ["prefect.artifact.updated"]}, "resource": {"id": [f"prefect.artifact.{progress.id}"]}}
    found = client.request("POST", "/events/filter", json={"filter": updates}).json()
    assert found["total"] == 0, "an event at each update would carry all of the report"


def test_events_relate_to_what_their_training_belongs_to(make: Make, client: SyncPrefectClient) -> None:
    nightly = {"prefect.resource.id": "prefect.deployment.nightly", "prefect.resource.role": "deployment"}
    publisher = make("related", related=[nightly])
    _begin(publisher)
    publisher.end("completed")
    told = run_events(client, run_name="related")
    assert len(told) == 3
    assert all(nightly in event["related"] for event in told)


def test_report_that_somebody_has_deleted_is_made_anew(make: Make, client: SyncPrefectClient, flow_run_id: str) -> None:
    publisher = make()
    _begin(publisher)
    [artifact] = wait_for(lambda: artifacts_of(client, flow_run_id, "markdown"), 20, "the report")
    client.delete_artifact(artifact.id)
    publisher.end("failed", "the disk is full")
    report = report_of(client, flow_run_id)
    assert "## Failed" in report
    assert "the disk is full" in report
    assert publisher.errors == 0


def test_end_is_told_after_an_error_of_the_api(make: Make, client: SyncPrefectClient, flow_run_id: str) -> None:
    publisher = make("bumpy")
    _begin(publisher)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Publisher, "_put", lambda *arguments: 1 / 0)
        wait_for(lambda: publisher.errors, 10, "an error")
    for sequence in range(3, 300):
        publisher.take(WorkerFailed(sequence=sequence, attempt=1, errors={"1": "ValueError: nan"}, retried=True))
    publisher.end("failed", "the disk is full")
    # After an error nobody waits for the API longer than a second; the thread goes on.
    wait_for(
        lambda: artifacts_of(client, flow_run_id, "markdown") and "## Failed" in report_of(client, flow_run_id),
        30,
        "the report of the end",
    )
    names = [event["event"].rpartition(".")[2] for event in run_events(client, run_name="bumpy")]
    assert (names[0], names[-1]) == ("started", "failed")
    assert names.count("worker-failed") == 297


def test_log_of_a_job_that_is_read_once_more_counts_once(
    make: Make, client: SyncPrefectClient, flow_run_id: str
) -> None:
    publisher = make()
    for told in (False, True):
        publisher.take(AttemptStarted(sequence=1, attempt=1, run_name="mnist", run_uri="/runs/mnist"), told=told)
        publisher.take(WorkerFailed(sequence=2, attempt=1, errors={"1": "ValueError: nan"}, retried=True), told=told)
    publisher.close()
    assert "1 worker failure" in report_of(client, flow_run_id)


def test_event_that_is_told_again_is_one_event(make: Make, client: SyncPrefectClient) -> None:
    failed = WorkerFailed(sequence=7, attempt=1, errors={"1": "ValueError: nan"}, retried=True)
    first = make("told-again")
    _begin(first)
    first.take(failed)
    first.close()
    again = make("told-again")
    _begin(again)
    again.take(failed)
    again.end("completed")
    names = [event["event"].rpartition(".")[2] for event in run_events(client, run_name="told-again")]
    assert sorted(names) == ["completed", "started", "worker-failed", "workers-started"]


def test_past_events_count_for_the_report_and_are_not_told(
    make: Make, client: SyncPrefectClient, flow_run_id: str
) -> None:
    publisher = make("past")
    publisher.take(AttemptStarted(sequence=1, attempt=1, run_name="past", run_uri="/runs/past"), told=True)
    publisher.take(WorkerFailed(sequence=2, attempt=1, errors={"1": "ValueError: nan"}, retried=True), told=True)
    publisher.end("cancelled", "enough")
    assert [event["event"] for event in run_events(client, run_name="past")] == ["elastic-train.run.cancelled"]
    assert "1 worker failure" in report_of(client, flow_run_id)


def test_many_events_of_many_workers_are_few_writes(
    make: Make, client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 8
    writes: dict[str, list[float]] = {}
    put, send = Publisher._put, publishing.send

    def counted_put(self: Publisher, client: SyncPrefectClient, kind: str, data: object, text: str) -> None:
        writes.setdefault(kind, []).append(time.monotonic())
        put(self, client, kind, data, text)

    def counted_send(event: RunEvent, *arguments: Any) -> None:
        writes.setdefault("event", []).append(time.monotonic())
        send(event, *arguments)

    monkeypatch.setattr(Publisher, "_put", counted_put)
    monkeypatch.setattr(publishing, "send", counted_send)
    publisher = make()
    _begin(publisher, workers=1000)
    began = time.monotonic()
    for index in range(1, 100 * seconds):
        for event in _report(index, 100 * seconds, checkpoint=f"checkpoint-{index}" if index % 20 == 0 else ""):
            publisher.take(event)
        time.sleep(max(0.0, began + index / 100 - time.monotonic()))
    assert writes["markdown"], "it is written"
    for kind in ("markdown", "progress"):
        gaps = [later - earlier for earlier, later in itertools.pairwise(writes.get(kind, []))]
        assert min(gaps, default=ARTIFACT_SECONDS) > ARTIFACT_SECONDS - 0.1
    assert len(writes["event"]) == 4, "the beginning, and the first checkpoint and best checkpoint of many"
    assert publisher.errors == 0


def test_nobody_waits_for_an_api_that_is_away(make: Make) -> None:
    with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{free_port()}/api"}):
        publisher = make()
        began = time.monotonic()
        _begin(publisher)
        for index in range(1, 2000):
            for event in _report(index, checkpoint=f"checkpoint-{index}"):
                publisher.take(event)
        assert time.monotonic() - began < 2
        publisher.end("completed")
        assert time.monotonic() - began < 9


def test_run_that_is_no_flow_runs_has_its_report_too(client: SyncPrefectClient) -> None:
    run_name = f"alone-{time.time_ns()}"
    publisher = Publisher(RunReport(run_name=run_name))
    _begin(publisher)
    publisher.close()
    [artifact] = [made for made in client.read_artifacts(limit=200) if made.key == artifact_key(run_name)]
    assert isinstance(artifact.id, UUID)
    assert "**2 workers**" in str(artifact.data)
