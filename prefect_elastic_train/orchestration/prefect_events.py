"""The Prefect events of a run, for automations. ``docs/events.md`` has their payloads."""

import math
import uuid
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple

from prefect.events import RelatedResource, emit_event

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.causes import describe_causes
from prefect_elastic_train.core.checkpoint_names import loop_name
from prefect_elastic_train.core.result import Counts
from prefect_elastic_train.report.descriptions import MIN_REPORTED_WAIT_SECONDS
from prefect_elastic_train.report.run_report import RunReport

PREFIX = "elastic-train.run."
WORKER_FAILED = f"{PREFIX}worker-failed"
DRIVER_RESTARTED = f"{PREFIX}driver-restarted"
#: Events that are sent once an attempt has begun to start workers or to train.
ATTEMPT_EVENTS = [f"{PREFIX}started", DRIVER_RESTARTED, f"{PREFIX}workers-started", f"{PREFIX}checkpoint"]
#: Events that may be frequent, of which only some are sent.
FREQUENT_EVENTS = (f"{PREFIX}checkpoint", f"{PREFIX}best-checkpoint", f"{PREFIX}storage-waited")

#: Fields that all events of a training have.
_COMMON_FIELDS = {*ev.Event.model_fields, "kind"}
#: Greatest length of texts and of lists, such as the list of failed ranks.
_MAX_LENGTH = 2000


class RunEvent(NamedTuple):
    """A Prefect event about a run. Its name begins with ``elastic-train.run.``."""

    name: str
    at: float
    payload: dict[str, Any]
    #: Identifies the event within the run. An event that is sent twice has the same key.
    key: str

    def send(self, flow_run_id: str, related: Sequence[RelatedResource]) -> None:
        """Put this event into the queue of Prefect's client.

        Prefect adds the current flow run and task run with their related resources; ``related`` has further resources.
        """
        emit_event(
            event=self.name,
            resource={
                "prefect.resource.id": f"{PREFIX}{self.payload['run_name']}",
                "prefect.resource.name": self.payload["run_name"],
                "elastic-train.run-uri": self.payload["run_uri"][:500],
            },
            occurred=datetime.fromtimestamp(self.at, timezone.utc),
            related=[*related],
            payload=self.payload,
            # The flow run and the URI distinguish runs of one name in different storages.
            id=uuid.uuid5(uuid.NAMESPACE_URL, f"{flow_run_id}|{self.payload['run_uri']}|{self.name}|{self.key}"),
        )


def translate(event: ev.Event, report: RunReport) -> list[RunEvent]:
    """Return the Prefect events to send for an event of a training that is already added to the report."""
    return [
        # An event without a number is one of the supervisor, such as a wait before the first attempt.
        _run_event(report, name, event.at, payload, f"{event.attempt}-{event.sequence or event.at}")
        for name, payload in _payloads(event, report)
    ]


def end_event(report: RunReport, name: str, at: float, message: str) -> RunEvent:
    """Return the Prefect event for the end of a training.

    ``name`` is the final state of the training, such as ``timed-out``, and ``message`` the reason.
    """
    payload: dict[str, Any] = {"outcome": report.outcome or name, "message": message}
    if report.attempt:  # else no driver has reported on the run
        account = report.tally.account()
        payload |= {
            "checkpoint_uri": f"{report.run_uri}/{report.checkpoints[-1].name}" if report.checkpoints else "",
            "best_checkpoint_uri": f"{report.run_uri}/{report.best.name}" if report.best else "",
            "metrics": report.metrics,
            **report.tally.model_dump(include={*Counts.model_fields}),
            "driver_restarts": report.driver_restarts,
            "goodput": account.goodput,
            "time": account.model_dump(),
        }
    return _run_event(report, name, at, payload, f"{report.attempt}-end-{at}")


def _run_event(report: RunReport, name: str, at: float, payload: dict[str, Any], key: str) -> RunEvent:
    common = report.model_dump(include={"run_name", "run_uri", "attempt", "storage_block"})
    return RunEvent(f"{PREFIX}{name}", at, _bounded(common | payload), key)


def _bounded(value: Any) -> Any:
    """Return a value of a payload with limited texts and lists. The report has limited the number of metrics.

    NaN and infinity become text, because strict JSON excludes them.
    """
    if isinstance(value, dict):
        return {name: _bounded(item) for name, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value[:_MAX_LENGTH] if isinstance(value, str | list) else value


def _payloads(event: ev.Event, report: RunReport) -> Iterator[tuple[str, dict[str, Any]]]:
    """Translate an event of a training: yield the names and payloads of Prefect events."""
    match event:
        case ev.AttemptStarted(attempt=0 | 1):
            yield "started", {"checkpoint": loop_name(event.checkpoint), "started_from": event.started_from}
        case ev.AttemptStarted():
            reasons = (incident.reason for incident in reversed(report.incidents) if incident.kind == "driver")
            yield (
                "driver-restarted",
                {
                    "checkpoint": loop_name(event.checkpoint),
                    "reason": next(reasons, ""),
                    "driver_restarts": report.driver_restarts,
                    "counted": event.counted,
                },
            )
        case ev.WorkerGroupStarted():
            sizes = event.model_dump(include={"world_size", "restored_step", "redone_steps"})
            yield "workers-started", sizes | {"checkpoint": loop_name(event.checkpoint)}
        case ev.WorkerGroupResized():
            yield "resized", event.model_dump(exclude=_COMMON_FIELDS)
        case ev.GroupFailed():
            payload = {
                "ranks": sorted(rank for cause in event.causes for rank in cause.ranks),
                "reasons": describe_causes(event.causes),
                **event.model_dump(include={"retried", "reports_lost"}),
                "gives_up": "" if event.retried else event.gives_up,
                **report.tally.model_dump(include={"worker_failures", "preemptions"}),
            }
            yield "preempted" if isinstance(event, ev.WorkersPreempted) else "worker-failed", payload
        case ev.LoopWarned():
            yield event.problem, {"message": event.message, "checkpoint": loop_name(event.checkpoint)}
        case ev.WaitingForCapacity() if not report.is_new_wait:
            return
        case ev.StorageWaited() if event.seconds < MIN_REPORTED_WAIT_SECONDS:
            return
        case (
            ev.StragglerFound() | ev.NodesLeftOut() | ev.BlocksChanged() | ev.WaitingForCapacity() | ev.StorageWaited()
        ):
            yield event.kind.replace("_", "-"), event.model_dump(exclude=_COMMON_FIELDS)
        case ev.CheckpointCommitted():
            checkpoint = report.checkpoints[-1]
            payload = {
                "checkpoint": loop_name(checkpoint.name),
                "checkpoint_uri": f"{report.run_uri}/{checkpoint.name}",
                "size_bytes": checkpoint.size_bytes,
                "metrics": checkpoint.metrics,
                "checkpoints_made": report.checkpoints_made,
            }
            yield "checkpoint", payload
            if report.best is checkpoint:
                yield (
                    "best-checkpoint",
                    payload | {"score_attribute": report.score_attribute, "score": checkpoint.score},
                )
