"""The run's events as events of Prefect, which automations act on. `docs/events.md` has their payloads."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from prefect.events import emit_event

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.checkpoint_names import loop_name
from prefect_elastic_train.core.rank_errors import all_ranks, causes
from prefect_elastic_train.report.run_report import WORTH_TELLING_SECONDS, RunReport

PREFIX = "elastic-train.run."
CHECKPOINT = f"{PREFIX}checkpoint"
BEST_CHECKPOINT = f"{PREFIX}best-checkpoint"
COMPLETED = f"{PREFIX}completed"
STORAGE_WAITED = f"{PREFIX}storage-waited"

_NAMESPACE = uuid.UUID("5a1d4a8e-7d0c-4a9d-8a55-3c4f1c1f7e11")
_MAX_TEXT = 2000
_MAX_METRICS = 50
_MAX_RANKS = 1000

_Told = list[tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class RunEvent:
    """An event of a run as Prefect gets it, under its name with the prefix."""

    name: str
    at: float
    payload: dict[str, Any]
    #: Tells it from every other event of the run; the same when it is told again.
    key: str

    def send(self, flow_run_id: str, related: Sequence[Mapping[str, str]] = ()) -> None:
        """Hand it to Prefect's own queue. Prefect adds flow run and task run, and what these relate to, itself."""
        name, run_uri = self.payload["run_name"], self.payload["run_uri"]
        emit_event(
            event=self.name,
            resource={
                "prefect.resource.id": f"elastic-train.run.{name}",
                "prefect.resource.name": name,
                "elastic-train.run-uri": run_uri[:500],
            },
            occurred=datetime.fromtimestamp(self.at, timezone.utc),
            related=[dict(resource) for resource in related],
            payload=self.payload,
            # Whose run it is tells runs of one name in different storages apart.
            id=uuid.uuid5(_NAMESPACE, f"{flow_run_id}|{run_uri}|{self.name}|{self.key}"),
        )


def translate(event: ev.Event, report: RunReport, storage_block: str) -> list[RunEvent]:
    """Return what Prefect is told of an event that the report has taken in."""
    told: _Told = _Payloads(report).handle(event) or []
    base, key = _base(report, storage_block), f"{event.attempt}-{event.sequence}"
    return [RunEvent(f"{PREFIX}{name}", event.at, base | payload, key) for name, payload in told]


def _base(report: RunReport, storage_block: str) -> dict[str, Any]:
    return {**report.model_dump(include={"run_name", "run_uri", "attempt"}), "storage_block": storage_block}


class _Payloads(ev.EventHandler):
    """Names and payloads of what Prefect is told of an event."""

    def __init__(self, report: RunReport) -> None:
        self._report = report

    def on_attempt_started(self, event: ev.AttemptStarted) -> _Told:
        report, told = self._report, {"checkpoint": loop_name(event.checkpoint)}
        if event.attempt <= 1:
            return [("started", {**told, "started_from": event.started_from[:_MAX_TEXT]})]
        why = next((incident.why for incident in reversed(report.incidents) if incident.kind == "driver"), "")
        told["reason"] = why[:_MAX_TEXT]
        return [("driver-restarted", {**told, "driver_restarts": report.driver_restarts})]

    def on_worker_group_started(self, event: ev.WorkerGroupStarted) -> _Told:
        return [("workers-started", {"world_size": event.world_size, "checkpoint": loop_name(event.checkpoint)})]

    def on_worker_group_resized(self, event: ev.WorkerGroupResized) -> _Told:
        told = event.model_dump(include={"old_size", "new_size", "reason", "reports_lost"})
        return [("resized", {**told, "waited_seconds": round(event.waited_seconds, 3)})]

    def on_group_failed(self, event: ev.GroupFailed) -> _Told:
        told = {
            "ranks": all_ranks(event.errors, event.also)[:_MAX_RANKS],
            "reasons": causes(event.errors, event.also),
            **event.model_dump(include={"retried", "reports_lost"}),
            **self._report.tally.model_dump(include={"worker_failures", "preemptions"}),
        }
        return [("preempted" if isinstance(event, ev.WorkersPreempted) else "worker-failed", told)]

    def on_loop_warned(self, event: ev.LoopWarned) -> _Told:
        told = {"message": event.message[:_MAX_TEXT], "checkpoint": loop_name(event.checkpoint)}
        return [(event.problem, told)]

    def on_waiting_for_capacity(self, event: ev.WaitingForCapacity) -> _Told:
        told = event.model_dump(include={"possible_workers", "min_workers", "resources_per_worker"})
        missing = {"missing": event.missing[:_MAX_TEXT]}
        return [("waiting-for-capacity", {**told, **missing})] if self._report.waits_anew else []

    def on_storage_waited(self, event: ev.StorageWaited) -> _Told:
        told = {**event.model_dump(include={"who", "seconds", "tries"}), "last": event.last[:_MAX_TEXT]}
        return [("storage-waited", told)] if event.seconds >= WORTH_TELLING_SECONDS else []

    def on_checkpoint_committed(self, event: ev.CheckpointCommitted) -> _Told:
        report, made = self._report, self._report.checkpoints[-1]
        payload = {
            "checkpoint": loop_name(made.name),
            "checkpoint_uri": f"{report.run_uri}/{made.name}",
            "size_bytes": made.size_bytes,
            "metrics": _plain(made.metrics),
            "checkpoints_made": report.checkpoints_made,
        }
        if report.best is not made:
            return [("checkpoint", payload)]
        score = {"score_attribute": report.score_attribute, **_plain({"score": made.score})}
        return [("checkpoint", payload), ("best-checkpoint", {**payload, **score})]


def ending(report: RunReport, name: str, at: float, message: str, storage_block: str) -> RunEvent:
    """Return what Prefect is told of the end of a training by its last state, such as ``timed-out``, and why."""
    payload = _base(report, storage_block) | {"outcome": report.outcome or name, "message": message[:_MAX_TEXT]}
    if report.attempt:  # else no driver has told what the run has
        account = report.tally.account()
        newest = report.checkpoints[-1] if report.checkpoints else None
        payload |= {
            "checkpoint_uri": f"{report.run_uri}/{newest.name}" if newest else "",
            "best_checkpoint_uri": f"{report.run_uri}/{report.best.name}" if report.best else "",
            "metrics": _plain(report.metrics),
            **report.tally.model_dump(include={"attempts", "worker_failures", "preemptions", "resizes", "steps_lost"}),
            "driver_restarts": report.driver_restarts,
            "goodput": account.goodput,
            "time": account.model_dump(),
        }
    return RunEvent(f"{PREFIX}{name}", at, payload, f"{report.attempt}-end-{at}")


def _plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as JSON that every reader takes: what is no finite number becomes text."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in list(metrics.items())[:_MAX_METRICS]
    }
