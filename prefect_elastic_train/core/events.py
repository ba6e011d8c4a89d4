"""Events of a run: a driver sends them to its supervisor in tagged lines of its output, and keeps them as the history.

Belongs to all processes.
"""

import json
import logging
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, Field, computed_field

from prefect_elastic_train.trackers.tracked_run import TrackedRun

from .causes import Cause
from .outcomes import Outcome
from .size_limits import MAX_EVENT_BYTES, MAX_MESSAGE_BYTES, as_json, size_of, truncate

logger = logging.getLogger(__name__)

#: Marks a line of the driver's output as an event.
EVENT_TAG = "@elastic-train-event "

#: Seconds between two `ControllerAlive`, which the controller sends, or the driver while there is no controller.
ALIVE_SECONDS = 2.0


def _snake(event_type: type) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", event_type.__name__).lower()


class Event(BaseModel, extra="ignore", frozen=True, ser_json_inf_nan="constants"):
    """Base class of the events of a run. Times are in seconds since the epoch."""

    #: Number of the event within its attempt; 0 until the driver assigns it.
    sequence: int = 0
    at: float = Field(default_factory=time.time)
    attempt: int = 0
    #: Optimizer steps of the worker group's session at the controller's last poll; 0: none, or unknown.
    step: int = 0

    @computed_field  # type: ignore[prop-decorator]
    @property
    def kind(self) -> str:
        """Type of the event in JSON: the name of its class in lower case, such as ``checkpoint_committed``."""
        return _snake(type(self))


class ClusterWanted(Event):
    """The run is not finished, so the driver needs its local cluster to be started."""


class ClusterConnected(Event):
    """The driver has joined the Ray cluster."""

    address: str
    dashboard_url: str = ""
    resources: dict[str, float] = {}


class AttemptStarted(Event):
    """The attempt holds the fence; training starts from ``checkpoint`` (empty: from scratch)."""

    run_name: str
    run_uri: str
    checkpoint: str = ""
    notes: list[str] = []
    #: Time of the checkpoint's commit; 0: unknown.
    checkpoint_at: float = 0.0
    #: Start of the driver's process; 0: unknown.
    driver_started_at: float = 0.0
    #: Number of the attempt among those of the flow run since the last end without an automatic restart; 0: unknown.
    counted: int = 0
    #: Remaining failures of each limited budget, such as ``{"worker failure": 3}``.
    left: dict[str, int] = {}
    #: Outcome and message of the attempt before; empty: unknown.
    previous_end: str = ""
    #: The checkpoint of another run that the run started from; empty for none.
    started_from: str = ""
    #: Metrics that were reported with that checkpoint, if the attempt starts from its copy.
    inherited: dict[str, Any] = {}


class StateChanged(Event):
    """Ray Train's controller entered another of its states, such as ``SCHEDULING`` or ``RUNNING``."""

    state: str


class WaitingForCapacity(Event):
    """The cluster has no room for ``min_workers`` workers, since ``since``."""

    possible_workers: int
    min_workers: int
    resources_per_worker: dict[str, float]
    missing: str = ""
    since: float = 0.0


class WorkerGroupStarted(Event):
    """A worker group starts the loop.

    It continues from ``checkpoint``, or from the later ``restored_step`` (0: none), which is in memory. Of the steps
    after ``restored_step``, ``redone_steps`` were done at the last poll of the worker group before. ``ranks`` maps
    ``<node address>:<process id>`` of a worker to its rank. ``parts`` has the seconds of each phase of the worker
    group's start, in order, from the start of the controller or its decision to restart the workers.
    """

    world_size: int
    checkpoint: str = ""
    restored_step: int = 0
    redone_steps: int = 0
    ranks: dict[str, int] = {}
    parts: dict[str, float] = {}


class FirstStep(Event):
    """The first step of a worker group's session began on all ranks; ``step`` counts the steps before it."""

    world_size: int = 0


class LoopWarned(Event):
    """The loop ignored its checkpoint, never saved one, has ranks that wait for others, or has stopped reporting."""

    problem: Literal["checkpoint-ignored", "no-checkpoint", "ranks-wait", "no-report"]
    message: str
    checkpoint: str = ""


class StragglerFound(Event):
    """A rank needs ``seconds`` for its own work of a step, for which most ranks need only ``usual_seconds``."""

    rank: int
    node_id: str
    seconds: float
    usual_seconds: float


class NodesLeftOut(Event):
    """The nodes that are left out changed: ``nodes`` maps the id of each to the reasons. Empty: none is left out."""

    nodes: dict[str, str]


class BlocksChanged(Event):
    """A saved block of the training has other values. The next attempt uses them; ``is_applied``: it starts now."""

    is_applied: bool = False


class SavesPlanned(Event):
    """The interval between checkpoints changed; ``plan`` has the interval and its reason as text."""

    plan: str


class TrackersOpened(Event):
    """The session sends the metrics of its steps to the runs ``runs`` in trackers."""

    runs: list[TrackedRun]


class StallTimeoutLearned(Event):
    """The time limit of a step changed; ``limit`` has it and its reason as text. See ``stall_timeout_seconds``."""

    limit: str


class StandbysParked(Event):
    """``parked`` of ``wanted`` standby workers are ready, one for each worker; ``size_bytes`` is the memory of one."""

    parked: int
    wanted: int
    size_bytes: int


class WorkerGroupResized(Event):
    """A healthy group is stopped to change its size: by a ``"commit"``, by ``"memory"`` or by ``"patience"``.

    ``"memory"``: all ranks hold their state in a recovery point. ``"patience"``: neither came in time.
    """

    old_size: int
    new_size: int
    reason: str = ""
    #: Seconds between decision and stop.
    waited_seconds: float = 0.0
    #: Reports since the last checkpoint, which are repeated.
    reports_lost: int = 0


class GroupFailed(Event):
    """Ranks of a worker group failed. ``causes`` has each different error once."""

    causes: list[Cause] = []
    retried: bool
    gives_up: str = "the budget is used up"
    #: Reports since the last checkpoint, which are repeated.
    reports_lost: int = 0
    #: True if the session makes recovery points.
    in_memory: bool = False
    #: Location of the file with the tracebacks and stacks; empty: unknown.
    details: str = ""
    #: Further failures of this kind that the budget allows; None: not limited.
    left: int | None = None


class WorkerFailed(GroupFailed):
    """Ranks of the worker group failed by an error or died."""


class WorkersPreempted(GroupFailed):
    """A node of the worker group was drained or reclaimed."""


class Report(Event):
    """All ranks of the worker group called ``ray.train.report``."""

    #: Number of the report within the attempt, counted by the driver.
    index: int = 0
    metrics: dict[str, Any]
    world_size: int = 0


class Reported(Report):
    """All ranks of the worker group called ``ray.train.report``, without a checkpoint."""


class CheckpointCommitted(Report):
    """All ranks reported with a checkpoint, and it is durable: restarts continue from it or from a later one."""

    checkpoint: str
    size_bytes: int


class StorageWaited(Event):
    """The controller or the slowest rank (``who``) waited for the storage, which answers again."""

    who: str
    seconds: float
    tries: int = 0
    last: str = ""


class CheckpointStalled(Event):
    """Seconds that checkpoints blocked the loop on the slowest rank, since the previous event of this kind."""

    seconds: float


class RunRecalled(Event):
    """Summary of a run's history up to this event, for the next driver and for a supervisor without it."""

    #: A :class:`prefect_elastic_train.report.run_report.RunReport` as JSON.
    report: dict[str, Any]


class ControllerAlive(Event):
    """Heartbeat of the controller or, without one, of the driver: its activity, and the seconds since that began."""

    doing: str
    seconds: float


class RankUsage(NamedTuple):
    """Use of the hardware by the process of a rank.

    Attributes:
        cpu_percent: Share of one CPU core since the commit before, without child processes; may be above 100.
        memory_bytes: Resident memory.
        gpu_bytes: Memory of GPUs that torch has reserved.
    """

    cpu_percent: float
    memory_bytes: int
    gpu_bytes: int


class RanksMeasured(Event):
    """Use of the hardware at a commit, by rank: of all ranks, or of those with the most memory."""

    usage: dict[int, RankUsage]


class AttemptEnded(Event):
    """The final event of an attempt."""

    outcome: Outcome
    message: Annotated[str, AfterValidator(partial(truncate, limit=MAX_MESSAGE_BYTES))] = ""
    #: An earlier attempt had finished the run, so this driver had nothing to do.
    already_finished: bool = False
    #: Doubt about the result of an earlier attempt, such as values that cannot be compared; empty for none.
    warning: str = ""
    final: bool = False
    result: dict[str, Any] | None = None


KINDS: dict[str, type[Event]] = {
    _snake(kind): kind
    for base in (Event, GroupFailed, Report)
    for kind in base.__subclasses__()
    if not kind.__subclasses__()
}


#: Events of which the newest one shows if a session trains: a FirstStep.
SESSION_EVENTS = (FirstStep, WorkerGroupStarted, GroupFailed, WorkerGroupResized)

#: Events that are dropped when a channel is full.
DROPPABLE = (ControllerAlive, Reported, RanksMeasured)

#: Function that publishes an event.
Publish = Callable[[Event], None]

#: Events of training without incidents.
ROUTINE = (
    *DROPPABLE,
    CheckpointCommitted,
    CheckpointStalled,
    SavesPlanned,
    StallTimeoutLearned,
    StandbysParked,
    TrackersOpened,
)


def encode_event(event: Event) -> str:
    """Return an event as one line of JSON, without :data:`EVENT_TAG`, of at most :data:`size_limits.MAX_EVENT_BYTES`.

    If the event is larger, its large fields are left empty.
    """
    text = as_json(event)
    size = len(text.encode())
    if size <= MAX_EVENT_BYTES:
        return text
    # Fields that may be large are bounded at their source; this is the last resort.
    logger.warning("an event of kind %s has %d bytes: its large fields are left empty", event.kind, size)
    empty = {name: type(value)() for name, value in event if size_of(value) > MAX_EVENT_BYTES // 50}
    return as_json(event.model_copy(update=empty))


def decode_event(text: str | bytes) -> Event | None:
    """Return the event in a line of JSON; None for a text that is not an event of this version."""
    try:
        fields = json.loads(text)
        return KINDS[fields["kind"]].model_validate(fields)
    except (ValueError, LookupError, TypeError):
        return None
