"""What is told of a training: its report and events in Prefect, and the history in its run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterType
from prefect.client.schemas.objects import Artifact

from prefect_elastic_train.runs.history import read_history
from prefect_elastic_train.storage.store import LocalRunStore
from tests.support.processes import T, wait_for

PREFIX = "elastic-train.run."
_ENDINGS = {f"{PREFIX}{name}" for name in ("completed", "failed", "cancelled", "timed-out", "interrupted")}


def artifacts_of(client: SyncPrefectClient, flow_run_id: str, kind: str) -> list[Artifact]:
    """The artifacts of a type that a flow run has."""
    of_run, of_kind = ArtifactFilterFlowRunId(any_=[UUID(flow_run_id)]), ArtifactFilterType(any_=[kind])
    return client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id=of_run, type=of_kind))


def report_of(client: SyncPrefectClient, flow_run_id: str) -> str:
    """The report of a flow run's only training."""
    [artifact] = artifacts_of(client, flow_run_id, "markdown")
    return str(artifact.data)


def history(run: Path | str | None, kind: type[T]) -> list[T]:
    """The events of a kind in the history of a run, the oldest first."""
    events = read_history(LocalRunStore(str(run))) if run else []
    return [event for event in events if isinstance(event, kind)]


def run_events(client: SyncPrefectClient, flow_run_id: str = "", run_name: str = "") -> list[dict[str, Any]]:
    """The events of a flow run's training, or of a run, in their order, once the last one is there."""
    related = {"related": {"id": [f"prefect.flow-run.{flow_run_id}"]}} if flow_run_id else {}
    resource = {"resource": {"id": [f"elastic-train.run.{run_name}"]}} if run_name else {}
    wanted = {"event": {"prefix": [PREFIX]}, "order": "ASC", **related, **resource}

    def read() -> list[dict[str, Any]]:
        page = client.request("POST", "/events/filter", json={"filter": wanted, "limit": 50}).json()
        events: list[dict[str, Any]] = page["events"]
        while page.get("next_page"):
            page = client._client.get(page["next_page"]).json()
            events += page["events"]
        return events if _ENDINGS & {event["event"] for event in events} else []

    return wait_for(read, 30, "the last event")
