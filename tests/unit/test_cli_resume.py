"""`elastic-train resume` and the storages that it looks into."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from uuid import UUID

import prefect.client.orchestration
import pytest
from typer.testing import CliRunner

from prefect_elastic_train.cli import app
from prefect_elastic_train.core.outcomes import StorageFaultError
from prefect_elastic_train.orchestration import dead_runs
from prefect_elastic_train.storage.opening import Storage


def test_resume_waits_for_a_storage_less_than_trainings_do_and_says_in_one_line_that_it_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []

    def flow_run_of(run: str, storages: Sequence[Storage]) -> UUID:
        waits.extend(storage.retries.seconds for storage in storages)
        raise StorageFaultError("s3://bucket/runs is away", kind="away", permanent=False)

    monkeypatch.setattr(dead_runs, "flow_run_of", flow_run_of)
    monkeypatch.setattr(prefect.client.orchestration, "get_client", lambda **_: nullcontext())
    done = CliRunner().invoke(app, ["resume", "mnist", "--storage", "s3://bucket/runs"])
    assert (done.exit_code, done.output) == (1, "error: s3://bucket/runs is away\n")
    assert waits == [20]
