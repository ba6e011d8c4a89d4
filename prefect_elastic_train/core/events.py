"""What a driver tells its supervisor, in tagged lines of its output, and what the run's history consists of."""

from __future__ import annotations

import json
import logging
import re
import time
from functools import cache, partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, Field, computed_field

from prefect_elastic_train.core.bounds import MAX_EVENT_BYTES, MAX_MESSAGE_BYTES, as_json, cut, size_of
from prefect_elastic_train.core.outcomes import Outcome

logger = logging.getLogger(__name__)

#: Begins a line of the driver's output that is an event.
EVENT_TAG = "@elastic-train-event "

#: Seconds between two `ControllerAlive` of a living controller, or of the driver where it stands in for it.
ALIVE_SECONDS = 2.0


@cache
def _snake(event_type: type) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", event_type.__name__).lower()


class Event(BaseModel, extra="ignore", frozen=True, ser_json_inf_nan="constants"):
    """Something that happened in an attempt."""

    #: Number of the event within its attempt, 0 until the driver has numbered it.
    sequence: int = 0
    at: float = Field(default_factory=time.time)
    attempt: int = 0
    #: Optimizer steps that the worker group's session had done when the controller polled it last; 0: none, or unknown.
    step: int = 0
    #: Whether the event may be dropped when a channel is full.
    droppable: ClassVar[bool] = False

    @computed_field  # type: ignore[prop-decorator]
    @property
    def kind(self) -> str:
        """What the event is, in JSON: the name of its class as ``checkpoint_committed``."""
        return _snake(type(self))


class ClusterWanted(Event):
    """The run is not finished, so the driver needs its local cluster."""


class ClusterConnected(Event):
    """The driver has joined the Ray cluster."""

    address: str
    dashboard_url: str = ""
    resources: dict[str, float] = Field(default_factory=dict)


class AttemptStarted(Event):
    """The attempt holds the fence; training starts from ``checkpoint`` (empty: from the beginning)."""

    run_name: str
    run_uri: str
    checkpoint: str = ""
    notes: list[str] = Field(default_factory=list)
    #: When the checkpoint was committed, and when the driver's process began, in seconds since the epoch; 0: unknown.
    checkpoint_at: float = 0.0
    driver_started_at: float = 0.0
    #: Which one it is of the flow run's attempts since the last end that no automatic restart followed; 0: unknown.
    counted: int = 0
    #: What is left of each budget, by its name in words; those without a bound are left out.
    left: dict[str, int] = Field(default_factory=dict)
    previous_end: str = ""
    #: The checkpoint of another run that the run started from; empty for none.
    started_from: str = ""
    #: What was reported with that one, if the attempt starts from its copy.
    inherited: dict[str, Any] = Field(default_factory=dict)


class StateChanged(Event):
    """Ray Train's controller went into another state, such as ``SCHEDULING`` or ``RUNNING``."""

    state: str


class WaitingForCapacity(Event):
    """The cluster cannot hold ``min_workers`` now: what is missing, and since when (seconds since the epoch)."""

    possible_workers: int
    min_workers: int
    resources_per_worker: dict[str, float]
    missing: str = ""
    since: float = 0.0


class WorkerGroupStarted(Event):
    """A worker group trains. ``ranks`` maps a worker's process id to its rank, for log lines.

    ``parts`` are the seconds since the controller began, or decided to restart, by what was done in them, in order.
    """

    world_size: int
    checkpoint: str = ""
    ranks: dict[str, int] = Field(default_factory=dict)
    parts: dict[str, float] = Field(default_factory=dict)


class FirstStep(Event):
    """The first step of a worker group's session began on all ranks. ``step`` counts the steps done before it."""

    world_size: int = 0


class LoopWarned(Event):
    """The loop began again although a checkpoint is there, has never saved one, or has ranks that wait for others."""

    problem: Literal["checkpoint-ignored", "no-checkpoint", "ranks-wait"]
    message: str
    checkpoint: str = ""


class SavesPlanned(Event):
    """How often the loop saves, if that has changed, and why; in words."""

    words: str


class StandbysParked(Event):
    """So many standby workers are warm, of one beside each worker, and what one takes of the memory."""

    parked: int
    wanted: int
    size_bytes: int

    @property
    def words(self) -> str:
        """How many there are, and what they take or why there are no more."""
        each = f", {self.size_bytes / 2**20:.0f} MiB each" if self.parked else ""
        lacking = "; there is no memory for more" if self.parked < self.wanted else ""
        return f"{self.parked} of {self.wanted} standby workers are ready{each}{lacking}"


class WorkerGroupResized(Event):
    """A healthy group goes down for another size, right after a ``"commit"`` or, as none came, by ``"patience"``."""

    old_size: int
    new_size: int
    reason: str = ""
    #: Seconds from the decision until it was carried out.
    waited_seconds: float = 0.0
    #: Reports since the last checkpoint, which are done again.
    reports_lost: int = 0


class GroupFailed(Event):
    """Each different traceback by the first rank that has it; ``also`` has the others with the same."""

    errors: dict[str, str]
    also: dict[str, list[int]] = Field(default_factory=dict)
    retried: bool
    gives_up: str = "the budget is used up"
    #: Reports since the last checkpoint, which are done again.
    reports_lost: int = 0
    #: How many more of the kind may follow before one of them is made up for; None for any number.
    left: int | None = None


class WorkerFailed(GroupFailed):
    """Ranks of the worker group failed."""


class WorkersPreempted(GroupFailed):
    """A node of the worker group was drained or reclaimed."""


class Report(Event):
    """All ranks reported."""

    #: Number of the report within the attempt, counted by the driver.
    index: int = 0
    metrics: dict[str, Any]
    world_size: int = 0


class Reported(Report):
    """All ranks reported, without a checkpoint."""

    droppable: ClassVar[bool] = True


class CheckpointCommitted(Report):
    """All ranks reported with a checkpoint, and it is durable: a restart will not fall behind it."""

    checkpoint: str
    size_bytes: int


class StorageWaited(Event):
    """The storage did not answer ``who`` for a while, and does again: the controller, or the slowest of the ranks."""

    who: str
    seconds: float
    tries: int = 0
    last: str = ""


class CheckpointStalled(Event):
    """The loop stood still while checkpoints were written: for so long on the slowest rank since this was last told."""

    seconds: float


class RunRecalled(Event):
    """Summary of the history so far, for a supervisor that has not seen it, and for the next driver."""

    #: A :class:`prefect_elastic_train.report.run_report.RunReport` as JSON.
    report: dict[str, Any]


class ControllerAlive(Event):
    """The controller's process lives; ``doing`` says what it does, ``seconds`` since when."""

    droppable: ClassVar[bool] = True
    doing: str
    seconds: float


class AttemptEnded(Event):
    """The last word of an attempt."""

    outcome: Outcome
    message: Annotated[str, AfterValidator(partial(cut, most=MAX_MESSAGE_BYTES))] = ""
    #: Begun by an earlier attempt and finished then; this driver had nothing to do.
    already_finished: bool = False
    #: What may be wrong with a result of an earlier attempt, such as values that cannot be compared; empty for nothing.
    warning: str = ""
    final: bool = False
    result: dict[str, Any] | None = None


KINDS: dict[str, type[Event]] = {
    _snake(kind): kind
    for base in (Event, GroupFailed, Report)
    for kind in base.__subclasses__()
    if not kind.__subclasses__()
}


#: What comes in the course of a training, and is no news.
STEADY = (CheckpointCommitted, CheckpointStalled, ControllerAlive, Reported, SavesPlanned, StandbysParked)


class EventHandler:
    """Hands each event to its method ``on_<kind>``, or that of a base class, as ``on_report``, or none."""

    def handle(self, event: Event) -> Any:
        """Return what the method for this kind of event returns, None if there is none."""
        methods = (getattr(self, f"on_{_snake(kind)}", None) for kind in type(event).__mro__)
        method = next(filter(None, methods), None)
        return None if method is None else method(event)


def encode_event(event: Event) -> str:
    """An event as one line of JSON without its tag, of at most :data:`bounds.MAX_EVENT_BYTES`."""
    text = as_json(event)
    size = len(text.encode())
    if size <= MAX_EVENT_BYTES:
        return text
    # What may be large is bounded where it comes from; this is for what nobody has thought of.
    logger.warning("an event of kind %s has %d bytes: its large fields are left empty", event.kind, size)
    empty = {name: type(value)() for name, value in event if size_of(value) > MAX_EVENT_BYTES // 50}
    return as_json(event.model_copy(update=empty))


def decode_event(text: str | bytes) -> Event | None:
    """Read an event, or None if it is none that this version knows."""
    try:
        fields = json.loads(text)
        return KINDS[fields["kind"]].model_validate(fields)
    except (ValueError, LookupError, TypeError):
        return None
