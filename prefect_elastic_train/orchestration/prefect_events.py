"""The run's events as events of Prefect, which automations act on. `docs/events.md` has their payloads."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from prefect_elastic_train.core.checkpoint_names import loop_name
from prefect_elastic_train.core.events import (
    AttemptStarted,
    CheckpointCommitted,
    Event,
    LoopWarned,
    StorageWaited,
    WaitingForCapacity,
    WorkerFailed,
    WorkerGroupResized,
    WorkerGroupStarted,
    WorkersPreempted,
)
from prefect_elastic_train.core.rank_errors import all_ranks, causes
from prefect_elastic_train.report.run_report import WORTH_TELLING_SECONDS, Checkpoint, RunReport

__all__ = ["BEST_CHECKPOINT", "CHECKPOINT", "COMPLETED", "STORAGE_WAITED", "RunEvent", "ending", "send", "translate"]

PREFIX = "elastic-train.run."
CHECKPOINT = f"{PREFIX}checkpoint"
BEST_CHECKPOINT = f"{PREFIX}best-checkpoint"
COMPLETED = f"{PREFIX}completed"
STORAGE_WAITED = f"{PREFIX}storage-waited"

_NAMESPACE = uuid.UUID("5a1d4a8e-7d0c-4a9d-8a55-3c4f1c1f7e11")
_MAX_TEXT = 2000
_MAX_METRICS = 50
_MAX_RANKS = 1000


@dataclass(frozen=True)
class RunEvent:
    """An event of a run as Prefect gets it.

    Attributes:
        name: Its name with the prefix.
        at: When it happened, in seconds since the epoch.
        payload: Plain values, of some kilobytes at most.
        key: Tells it from every other event of the run; the same when it is told again.
    """

    name: str
    at: float
    payload: dict[str, Any] = field(default_factory=dict)
    key: str = ""


def translate(event: Event, report: RunReport, common: Mapping[str, Any]) -> Iterator[RunEvent]:
    """Give what Prefect is told of an event.

    Args:
        event: The event.
        report: The run's state, which has taken the event in.
        common: What every payload has besides.
    """
    key = f"{event.attempt}-{event.sequence}"

    def told(name: str, **payload: Any) -> RunEvent:
        base = {"run_name": report.run_name, "run_uri": report.run_uri, "attempt": report.attempt, **common}
        return RunEvent(f"{PREFIX}{name}", event.at, {**base, **payload}, key)

    if isinstance(event, AttemptStarted):
        if report.attempt_before:
            why = report.incident_of("driver")
            yield told(
                "driver-restarted",
                checkpoint=loop_name(event.checkpoint),
                reason=why.why[:_MAX_TEXT] if why else "",
                driver_restarts=report.driver_restarts,
            )
        else:
            yield told("started", checkpoint=loop_name(event.checkpoint), started_from=event.started_from[:_MAX_TEXT])
    elif isinstance(event, WorkerGroupStarted):
        yield told("workers-started", world_size=event.world_size, checkpoint=loop_name(event.checkpoint))
    elif isinstance(event, WorkerGroupResized):
        yield told(
            "resized",
            old_size=event.old_size,
            new_size=event.new_size,
            reason=event.reason,
            waited_seconds=round(event.waited_seconds, 3),
            reports_lost=event.reports_lost,
        )
    elif isinstance(event, WorkerFailed | WorkersPreempted):
        yield told(
            "preempted" if isinstance(event, WorkersPreempted) else "worker-failed",
            ranks=all_ranks(event.errors, event.also)[:_MAX_RANKS],
            reasons=causes(event.errors, event.also),
            retried=event.retried,
            reports_lost=event.reports_lost,
            worker_failures=report.tally.worker_failures,
            preemptions=report.tally.preemptions,
        )
    elif isinstance(event, LoopWarned):
        yield told(
            event.problem,
            message=event.message[:_MAX_TEXT],
            checkpoint=loop_name(event.checkpoint),
            ranks=event.ranks[:_MAX_RANKS],
        )
    elif isinstance(event, WaitingForCapacity):
        if report.waits_anew:
            yield told(
                "waiting-for-capacity",
                possible_workers=event.possible_workers,
                min_workers=event.min_workers,
                resources_per_worker=event.resources_per_worker,
                missing=event.missing[:_MAX_TEXT],
            )
    elif isinstance(event, StorageWaited) and event.seconds >= WORTH_TELLING_SECONDS:
        yield told(
            "storage-waited", who=event.who, seconds=event.seconds, tries=event.tries, last=event.last[:_MAX_TEXT]
        )
    elif isinstance(event, CheckpointCommitted) and report.checkpoints:
        made = report.checkpoints[-1]
        payload = _checkpoint(made, report)
        yield told("checkpoint", **payload)
        if report.best is not None and report.best.name == made.name and report.best.at == made.at:
            yield told(
                "best-checkpoint", **payload, score_attribute=report.score_attribute, score=_plain_value(made.score)
            )


def ending(report: RunReport, name: str, at: float, message: str, common: Mapping[str, Any]) -> RunEvent:
    """Give what Prefect is told of the end of a training.

    Args:
        report: The run's last state.
        name: ``completed``, ``failed``, ``cancelled``, ``timed-out`` or ``interrupted``.
        at: When, in seconds since the epoch.
        message: What there is to say of it.
        common: What every payload has besides.
    """
    account = report.tally.meter.account()
    newest = report.checkpoints[-1] if report.checkpoints else None
    payload = {
        "run_name": report.run_name,
        "run_uri": report.run_uri,
        "attempt": report.attempt,
        **common,
        "outcome": report.outcome or name,
        "message": message[:_MAX_TEXT],
    }
    if not report.attempt:  # no driver has told what the run has
        return RunEvent(f"{PREFIX}{name}", at, payload, f"{report.attempt}-end-{at}")
    payload |= {
        "checkpoint_uri": f"{report.run_uri}/{newest.name}" if newest else "",
        "best_checkpoint_uri": f"{report.run_uri}/{report.best.name}" if report.best else "",
        "metrics": _plain(report.metrics),
        "attempts": report.tally.attempts,
        "worker_failures": report.tally.worker_failures,
        "preemptions": report.tally.preemptions,
        "resizes": report.tally.resizes,
        "driver_restarts": report.driver_restarts,
        "steps_lost": report.tally.steps_lost,
        "goodput": account.goodput,
        "time": account.model_dump(),
    }
    return RunEvent(f"{PREFIX}{name}", at, payload, f"{report.attempt}-end-{at}")


def send(event: RunEvent, report_name: str, flow_run_id: str, related: Sequence[Mapping[str, str]] = ()) -> None:
    """Hand an event to Prefect's own queue. Prefect adds the flow run, the task run and what these relate to itself.

    Args:
        event: What is told.
        report_name: Name of the run.
        flow_run_id: Whose run it is; tells runs of one name in different storages apart.
        related: What the event relates to besides.
    """
    from prefect.events import emit_event

    emit_event(
        event=event.name,
        resource={
            "prefect.resource.id": f"elastic-train.run.{report_name}",
            "prefect.resource.name": report_name,
            "elastic-train.run-uri": str(event.payload.get("run_uri", ""))[:500],
        },
        occurred=datetime.fromtimestamp(event.at, timezone.utc),
        related=[dict(resource) for resource in related],
        payload=event.payload,
        id=uuid.uuid5(_NAMESPACE, f"{flow_run_id}|{event.payload.get('run_uri')}|{event.name}|{event.key}"),
    )


def _checkpoint(made: Checkpoint, report: RunReport) -> dict[str, Any]:
    return {
        "checkpoint": loop_name(made.name),
        "checkpoint_uri": f"{report.run_uri}/{made.name}",
        "size_bytes": made.size_bytes,
        "metrics": _plain(made.metrics),
        "checkpoints_made": report.checkpoints_made,
    }


def _plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Give metrics as JSON that every reader takes: what is no finite number becomes text."""
    return {name: _plain_value(value) for name, value in list(metrics.items())[:_MAX_METRICS]}


def _plain_value(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
