"""The Prefect events of a run, for automations. ``docs/events.md`` has their payloads."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import chain
from typing import Any

from prefect.events import emit_event

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.causes import causes
from prefect_elastic_train.core.checkpoint_names import loop_name
from prefect_elastic_train.core.result import Counts
from prefect_elastic_train.report.descriptions import MIN_REPORTED_WAIT_SECONDS
from prefect_elastic_train.report.run_report import RunReport

PREFIX = "elastic-train.run."
CHECKPOINT = f"{PREFIX}checkpoint"
BEST_CHECKPOINT = f"{PREFIX}best-checkpoint"
COMPLETED = f"{PREFIX}completed"
WORKER_FAILED = f"{PREFIX}worker-failed"
DRIVER_RESTARTED = f"{PREFIX}driver-restarted"
#: Events that only an attempt has that began to train or to start workers.
ATTEMPT_EVENTS = [f"{PREFIX}started", DRIVER_RESTARTED, f"{PREFIX}workers-started", CHECKPOINT]
#: Events that may be frequent, of which only some are sent.
FREQUENT_EVENTS = (CHECKPOINT, BEST_CHECKPOINT, f"{PREFIX}storage-waited")

_NAMESPACE = uuid.UUID("5a1d4a8e-7d0c-4a9d-8a55-3c4f1c1f7e11")
_MAX_TEXT = 2000
_MAX_METRICS = 50
_MAX_RANKS = 1000

_Payload = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class RunEvent:
    """A Prefect event about a run. Its name begins with ``elastic-train.run.``."""

    name: str
    at: float
    payload: dict[str, Any]
    #: Identifies the event within the run. An event that is sent twice has the same key.
    key: str

    def send(self, flow_run_id: str, related: Sequence[Mapping[str, str]] = ()) -> None:
        """Put this event into the queue of Prefect's client.

        Prefect adds the current flow run and task run with their related resources; ``related`` has further resources.
        """
        name = self.payload["run_name"]
        run_uri = self.payload["run_uri"]
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
            # The flow run and the URI distinguish runs of one name in different storages.
            id=uuid.uuid5(_NAMESPACE, f"{flow_run_id}|{run_uri}|{self.name}|{self.key}"),
        )


def translate(event: ev.Event, report: RunReport, storage_block: str) -> list[RunEvent]:
    """Return the Prefect events to send for an event of a training that is already added to the report."""
    payloads: list[_Payload] = _Payloads(report).handle(event) or []
    common = _common_payload(report, storage_block)
    key = f"{event.attempt}-{event.sequence}"
    return [RunEvent(f"{PREFIX}{name}", event.at, common | payload, key) for name, payload in payloads]


def _common_payload(report: RunReport, storage_block: str) -> dict[str, Any]:
    return {**report.model_dump(include={"run_name", "run_uri", "attempt"}), "storage_block": storage_block}


@dataclass
class _Payloads(ev.EventHandler):
    """Translates each kind of event of a training into the names and payloads of Prefect events."""

    _report: RunReport

    def on_attempt_started(self, event: ev.AttemptStarted) -> list[_Payload]:
        checkpoint = loop_name(event.checkpoint)
        if event.attempt <= 1:
            return [("started", {"checkpoint": checkpoint, "started_from": event.started_from[:_MAX_TEXT]})]
        report = self._report
        reasons = (incident.reason for incident in reversed(report.incidents) if incident.kind == "driver")
        payload = {
            "checkpoint": checkpoint,
            "reason": next(reasons, "")[:_MAX_TEXT],
            "driver_restarts": report.driver_restarts,
            "counted": event.counted,
        }
        return [("driver-restarted", payload)]

    def on_worker_group_started(self, event: ev.WorkerGroupStarted) -> list[_Payload]:
        return [("workers-started", {"world_size": event.world_size, "checkpoint": loop_name(event.checkpoint)})]

    def on_worker_group_resized(self, event: ev.WorkerGroupResized) -> list[_Payload]:
        payload = event.model_dump(include={"old_size", "new_size", "reason", "reports_lost"})
        return [("resized", {**payload, "waited_seconds": round(event.waited_seconds, 3)})]

    def on_group_failed(self, event: ev.GroupFailed) -> list[_Payload]:
        payload = {
            "ranks": sorted({*map(int, event.errors), *chain.from_iterable(event.also.values())})[:_MAX_RANKS],
            "reasons": causes(event.errors, event.also),
            **event.model_dump(include={"retried", "reports_lost"}),
            "gives_up": "" if event.retried else event.gives_up,
            **self._report.tally.model_dump(include={"worker_failures", "preemptions"}),
        }
        return [("preempted" if isinstance(event, ev.WorkersPreempted) else "worker-failed", payload)]

    def on_loop_warned(self, event: ev.LoopWarned) -> list[_Payload]:
        return [(event.problem, {"message": event.message[:_MAX_TEXT], "checkpoint": loop_name(event.checkpoint)})]

    def on_waiting_for_capacity(self, event: ev.WaitingForCapacity) -> list[_Payload]:
        if not self._report.is_new_wait:
            return []
        payload = event.model_dump(include={"possible_workers", "min_workers", "resources_per_worker"})
        return [("waiting-for-capacity", {**payload, "missing": event.missing[:_MAX_TEXT]})]

    def on_storage_waited(self, event: ev.StorageWaited) -> list[_Payload]:
        if event.seconds < MIN_REPORTED_WAIT_SECONDS:
            return []
        payload = event.model_dump(include={"who", "seconds", "tries"})
        return [("storage-waited", {**payload, "last": event.last[:_MAX_TEXT]})]

    def on_checkpoint_committed(self, event: ev.CheckpointCommitted) -> list[_Payload]:
        report = self._report
        checkpoint = report.checkpoints[-1]
        payload = {
            "checkpoint": loop_name(checkpoint.name),
            "checkpoint_uri": f"{report.run_uri}/{checkpoint.name}",
            "size_bytes": checkpoint.size_bytes,
            "metrics": _json_metrics(checkpoint.metrics),
            "checkpoints_made": report.checkpoints_made,
        }
        if report.best is not checkpoint:
            return [("checkpoint", payload)]
        score = {"score_attribute": report.score_attribute, **_json_metrics({"score": checkpoint.score})}
        return [("checkpoint", payload), ("best-checkpoint", {**payload, **score})]


def end_event(report: RunReport, name: str, at: float, message: str, storage_block: str) -> RunEvent:
    """Return the Prefect event for the end of a training.

    ``name`` is the final state of the training, such as ``timed-out``, and ``message`` the reason.
    """
    payload = _common_payload(report, storage_block)
    payload |= {"outcome": report.outcome or name, "message": message[:_MAX_TEXT]}
    if report.attempt:  # else no driver has reported on the run
        account = report.tally.account()
        newest = report.checkpoints[-1] if report.checkpoints else None
        payload |= {
            "checkpoint_uri": f"{report.run_uri}/{newest.name}" if newest else "",
            "best_checkpoint_uri": f"{report.run_uri}/{report.best.name}" if report.best else "",
            "metrics": _json_metrics(report.metrics),
            **report.tally.model_dump(include={*Counts.model_fields} - {"storage_wait_seconds"}),
            "driver_restarts": report.driver_restarts,
            "goodput": account.goodput,
            "time": account.model_dump(),
        }
    return RunEvent(f"{PREFIX}{name}", at, payload, f"{report.attempt}-end-{at}")


def _json_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first 50 metrics for a Prefect event, with NaN and infinity as text, which strict JSON requires."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in list(metrics.items())[:_MAX_METRICS]
    }
