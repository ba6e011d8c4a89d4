"""What a driver tells its supervisor, and what the run's history consists of.

Events travel as tagged JSON lines on the driver's standard output, between whatever else is printed there.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from prefect_elastic_train.core.bounds import MAX_EVENT_BYTES, MAX_MESSAGE_BYTES, as_json, cut, shortened
from prefect_elastic_train.core.outcomes import Outcome

logger = logging.getLogger(__name__)

#: Begins a line of the driver's output that is an event.
EVENT_TAG = "@elastic-train-event "

#: Seconds between two `ControllerAlive` of a living controller, or of the driver where it stands in for it.
ALIVE_SECONDS = 2.0


class _Event(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, ser_json_inf_nan="constants")

    #: Number of the event within its attempt, 0 until the driver has numbered it.
    sequence: int = 0
    #: Seconds since the epoch.
    at: float = Field(default_factory=time.time)
    attempt: int = 0
    #: Whether the event may be dropped when a channel is full.
    droppable: ClassVar[bool] = False
    #: Another kind's name by which it may be handled, too.
    family: ClassVar[str] = ""


class ClusterWanted(_Event):
    """The run is not finished, so the driver needs its local cluster."""

    kind: Literal["cluster_wanted"] = "cluster_wanted"


class ClusterConnected(_Event):
    """The driver has joined the Ray cluster."""

    kind: Literal["cluster_connected"] = "cluster_connected"
    address: str
    dashboard_url: str = ""
    resources: dict[str, float] = Field(default_factory=dict)


class AttemptStarted(_Event):
    """The attempt holds the fence; training starts from ``checkpoint`` (empty: from the beginning)."""

    kind: Literal["attempt_started"] = "attempt_started"
    run_name: str
    run_uri: str
    checkpoint: str = ""
    notes: list[str] = Field(default_factory=list)
    #: When the checkpoint was committed, and when the driver's process began, in seconds since the epoch; 0: unknown.
    checkpoint_at: float = 0.0
    driver_started_at: float = 0.0
    #: Which one it is of the flow run's attempts since the last end that no automatic restart followed; 0: unknown.
    counted: int = 0
    #: How the attempt before it ended, as far as the supervisor of both has seen it.
    previous_end: str = ""
    #: The checkpoint of another run that the run started from; empty for none.
    started_from: str = ""
    #: What was reported with that one, if the attempt starts from its copy.
    inherited: dict[str, Any] = Field(default_factory=dict)


class StateChanged(_Event):
    """Ray Train's controller went into another state, such as ``SCHEDULING`` or ``RUNNING``."""

    kind: Literal["state_changed"] = "state_changed"
    state: str


class WaitingForCapacity(_Event):
    """The cluster cannot hold ``min_workers`` now: what is missing, and since when (seconds since the epoch)."""

    kind: Literal["waiting_for_capacity"] = "waiting_for_capacity"
    possible_workers: int
    min_workers: int
    resources_per_worker: dict[str, float]
    missing: str = ""
    since: float = 0.0


class WorkerGroupStarted(_Event):
    """A worker group trains. ``ranks`` maps a worker's process id to its rank, for log lines."""

    kind: Literal["worker_group_started"] = "worker_group_started"
    world_size: int
    checkpoint: str = ""
    ranks: dict[str, int] = Field(default_factory=dict)


class CheckpointTaken(_Event):
    """The loop goes on from the checkpoint that its worker group was offered; ``where`` is its first report's place."""

    kind: Literal["checkpoint_taken"] = "checkpoint_taken"
    checkpoint: str
    where: str = ""


class LoopWarned(_Event):
    """Something is wrong with the loop itself.

    ``problem`` is ``"checkpoint-ignored"`` (it began again although a checkpoint is there), ``"no-checkpoint"`` (it
    has never saved one), or ``"ranks-missing"`` (only some of its ranks report; ``ranks`` do not).
    """

    kind: Literal["loop_warned"] = "loop_warned"
    problem: Literal["checkpoint-ignored", "no-checkpoint", "ranks-missing"]
    #: What is wrong and the way out.
    message: str
    checkpoint: str = ""
    #: Share of the work up to the checkpoint that is done again, 0 to 1.
    again: float = 0.0
    #: All of that has been done again by now; what the worker group has done so far was nothing else.
    is_redone: bool = False
    ranks: list[int] = Field(default_factory=list)


class WorkerGroupResized(_Event):
    """A healthy worker group is taken down to start with another size.

    ``reason`` is ``"commit"``, right after one, or ``"patience"``: none came within ``resize_patience_seconds``.
    """

    kind: Literal["worker_group_resized"] = "worker_group_resized"
    old_size: int
    new_size: int
    reason: str = ""
    #: Seconds from the decision until it was carried out.
    waited_seconds: float = 0.0
    #: Reports since the last checkpoint, which are done again.
    reports_lost: int = 0
    #: Seconds of work since the last checkpoint, which are done again.
    seconds_lost: float = 0.0


class GroupFailed(_Event):
    """The worker group failed.

    ``errors`` maps a rank to its traceback, each different one once; ``also`` has the other ranks with the same.
    """

    family: ClassVar[str] = "group_failed"
    errors: dict[str, str]
    also: dict[str, list[int]] = Field(default_factory=dict)
    retried: bool
    #: Why not, if it is not.
    gives_up: str = "the budget is used up"
    #: Reports since the last checkpoint, which are done again.
    reports_lost: int = 0


class WorkerFailed(GroupFailed):
    """Ranks of the worker group failed."""

    kind: Literal["worker_failed"] = "worker_failed"


class WorkersPreempted(GroupFailed):
    """A node of the worker group was drained or reclaimed."""

    kind: Literal["workers_preempted"] = "workers_preempted"


class Report(_Event):
    """All ranks reported."""

    family: ClassVar[str] = "report"
    #: Number of the report within the attempt, counted by the driver.
    index: int = 0
    metrics: dict[str, Any]
    world_size: int = 0


class Reported(Report):
    """All ranks reported, without a checkpoint."""

    kind: Literal["reported"] = "reported"
    droppable: ClassVar[bool] = True


class CheckpointCommitted(Report):
    """All ranks reported with a checkpoint, and it is durable: a restart will not fall behind it."""

    kind: Literal["checkpoint_committed"] = "checkpoint_committed"
    checkpoint: str
    size_bytes: int


class StorageWaited(_Event):
    """The storage did not answer for a while, and does again: what that has cost.

    ``who`` waited: ``"controller"``, or ``"ranks"``, whose longest wait ``seconds`` is.
    """

    kind: Literal["storage_waited"] = "storage_waited"
    who: str
    seconds: float
    #: Requests that failed and were repeated.
    tries: int = 0
    #: What was wrong, last.
    last: str = ""


class CheckpointStalled(_Event):
    """The loop stood still while checkpoints were written: for so long on the slowest rank since this was last told."""

    kind: Literal["checkpoint_stalled"] = "checkpoint_stalled"
    seconds: float


class RunRecalled(_Event):
    """What the history before this attempt adds up to, for a supervisor that has not seen it. Not in the history."""

    kind: Literal["run_recalled"] = "run_recalled"
    #: A :class:`prefect_elastic_train.report.run_report.RunReport` as JSON.
    report: dict[str, Any]


class ControllerAlive(_Event):
    """The controller's process lives; ``doing`` says what it does, ``seconds`` since when."""

    kind: Literal["controller_alive"] = "controller_alive"
    droppable: ClassVar[bool] = True
    doing: str
    seconds: float
    callback_errors: int = 0


class AttemptEnded(_Event):
    """The last word of an attempt."""

    kind: Literal["attempt_ended"] = "attempt_ended"
    outcome: Outcome
    message: Annotated[str, AfterValidator(partial(cut, most=MAX_MESSAGE_BYTES))] = ""
    #: Begun by an earlier attempt and finished then; this driver had nothing to do.
    already_finished: bool = False
    final: bool = False
    result: dict[str, Any] | None = None


Event = Annotated[
    AttemptEnded
    | AttemptStarted
    | CheckpointCommitted
    | CheckpointStalled
    | CheckpointTaken
    | ClusterConnected
    | ClusterWanted
    | ControllerAlive
    | LoopWarned
    | Reported
    | RunRecalled
    | StateChanged
    | StorageWaited
    | WaitingForCapacity
    | WorkerFailed
    | WorkerGroupResized
    | WorkerGroupStarted
    | WorkersPreempted,
    Field(discriminator="kind"),
]

_ADAPTER: TypeAdapter[Event] = TypeAdapter(Event)
_KINDS = get_args(get_args(Event)[0])
_METHODS = {f"on_{name}" for event in _KINDS for name in (event.model_fields["kind"].default, event.family)}


class EventHandler:
    """Hands each event to its method ``on_<kind>`` or ``on_<family>``, as :class:`ast.NodeVisitor` does.

    Any other event is passed over.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if unknown := {name for name in vars(cls) if name.startswith("on_")} - _METHODS:
            raise TypeError(f"{cls.__name__} handles events that there are not: {', '.join(sorted(unknown))}")

    def handle(self, event: Event) -> Any:
        """Return what the method for this kind of event returns, None if there is none."""
        method = getattr(self, f"on_{event.kind}", None) or getattr(self, f"on_{event.family}", None)
        return None if method is None else method(event)


def encode_event(event: Event) -> str:
    """An event as one line of JSON without its tag, of at most :data:`bounds.MAX_EVENT_BYTES`."""
    text = as_json(event)
    size = len(text.encode())
    if size <= MAX_EVENT_BYTES:
        return text
    # What may be large is bounded where it comes from; this is for what nobody has thought of.
    logger.warning("an event of kind %s is cut from %d to %d bytes", event.kind, size, MAX_EVENT_BYTES)
    whole, most = event.model_dump(), MAX_EVENT_BYTES
    while len(text.encode()) > MAX_EVENT_BYTES and most > 1:
        most //= 2
        text = as_json(type(event).model_validate(shortened(whole, most)))
    return text


def decode_event(text: str | bytes) -> Event | None:
    """Read an event, or None if it is none that this version knows."""
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError:
        return None
