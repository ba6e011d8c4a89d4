"""`elastic-train resume` and the storages that it looks into."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from uuid import UUID

import pytest
from typer.testing import CliRunner

from prefect_elastic_train.cli import app, resuming
from prefect_elastic_train.cli.opening import open_briefly
from prefect_elastic_train.core.outcomes import ConfigurationError, StorageFaultError
from prefect_elastic_train.core.storage_settings import S3StorageSettings
from prefect_elastic_train.orchestration import dead_runs
from prefect_elastic_train.storage.opening import Storage


@pytest.fixture(autouse=True)
def _without_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "prefect_api", nullcontext)


def test_a_person_waits_for_a_storage_only_so_long() -> None:
    patient = S3StorageSettings(bucket_path="bucket/runs")
    assert open_briefly(patient).retries.seconds == 20
    assert open_briefly(patient.model_copy(update={"retry_seconds": 5})).retries.seconds == 5


def test_resume_does_not_wait_for_a_storage_for_as_long_as_trainings_do(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def flow_run_of(run: str, storages: Sequence[Storage]) -> UUID:
        waits.extend(storage.retries.seconds for storage in storages)
        raise ConfigurationError("no such run")

    monkeypatch.setattr(dead_runs, "flow_run_of", flow_run_of)
    assert CliRunner().invoke(app, ["resume", "mnist", "--storage", "s3://bucket/runs"]).exit_code == 1
    assert waits == [20]


def test_a_storage_that_is_away_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def resume(*_: object, **__: object) -> list[str]:
        raise StorageFaultError("s3://bucket/runs is away", kind="away", permanent=False)

    monkeypatch.setattr(dead_runs, "resume", resume)
    done = CliRunner().invoke(app, ["resume", str(UUID(int=1)), "--storage", "s3://bucket/runs"])
    assert (done.exit_code, done.output) == (1, "error: s3://bucket/runs is away\n")
