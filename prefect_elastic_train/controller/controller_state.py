"""The state of a run's controller, which its policies, callbacks and worker groups share."""

import time
from dataclasses import dataclass

from prefect_elastic_train.core.events import Event
from prefect_elastic_train.core.settings import FailureSettings, ScalingSettings
from prefect_elastic_train.loop.context import RunContext
from prefect_elastic_train.runs.commits import CommitLog
from prefect_elastic_train.storage.store import RunStore

from .budget import FailureWindow
from .event_queue import EventSender, ReceiverAddress
from .keepers import Keepers
from .loop_watch import LoopWatch
from .node_strikes import NodeStrikes
from .standby import Standbys


@dataclass(frozen=True)
class ControllerSettings:
    """The settings with which a driver starts its controller.

    Attributes:
        receiver: The address at which the driver receives events.
        store: The run directory.
        context: The run context that workers get.
        framework: Framework of the train loop, such as ``"torch"``, or ``"none"``.
        scaling, failures: The settings of the blocks for scaling and for failures.
        requester_id: The id for reservations with Ray's coordinator; empty for none, on a cluster without other users.
        standby: ``"off"``, ``"auto"`` (as memory allows) or ``"on"``.
        recovery_memory_fraction: Largest share of a node's memory for recovery points.
    """

    receiver: ReceiverAddress
    store: RunStore
    context: RunContext
    framework: str
    scaling: ScalingSettings
    failures: FailureSettings
    requester_id: str
    standby: str
    recovery_memory_fraction: float


class ControllerState:
    """The state of one controller process, which lives as long as an attempt.

    Attributes:
        settings: The settings of the controller.
        budget: The failures of worker groups that still count.
        loops: The checks of the train loops.
        commits: The writer of commits.
        standbys: The standby workers.
        keepers: The keepers of recovery points.
        strikes: The strikes against nodes.
        left_out: Ids of the nodes that the next worker group does not use, with the reasons.
        phases: Seconds that each phase of the start of a worker group took.
        failures: Errors of the ranks in the last poll or start of a worker group, for the failure decision that
            follows.
        group_failures: Number of failures of worker groups, lost nodes included.
        is_preempted: True if the last failure counts as a preemption.
        failures_left: Failures that the budget allows after the last one, None for any number.
        skipped_steps: Steps whose batches sessions skip, since their guards have found a problem at them.
        assumed_nodes: Ids of the nodes from which the size of the next worker group was decided.
        commit_count: Number of checkpoints committed by the current worker group.
        is_draining: True while a node of the worker group is about to be lost and the group still trains.
    """

    group_failures = 0
    is_preempted = False
    failures_left: int | None = None
    commit_count = 0
    is_draining = False

    def __init__(self, settings: ControllerSettings) -> None:
        failures = settings.failures
        self.settings = settings
        self.budget = FailureWindow(failures.forgive_after_seconds)
        self.loops = LoopWatch(failures, self.publish)
        self.commits = CommitLog(settings.store, settings.context.attempt)
        self.commits.trained_seconds = self.budget.trained_seconds
        self.standbys = Standbys(settings.framework, settings.standby, self.publish)
        self.keepers = Keepers(settings.context.run_id, settings.recovery_memory_fraction)
        self.strikes = NodeStrikes(settings.store, settings.context.run_id, failures)
        self.left_out: dict[str, str] = {}
        self.begin_startup()
        self.failures: dict[int, Exception] = {}
        self.assumed_nodes: set[str] = set()
        self.skipped_steps: set[int] = set()
        self.sender = EventSender(settings.receiver, self.loops.announce_end)

    def publish(self, event: Event) -> None:
        """Send an event to the driver, with the current optimizer step of the training."""
        self.sender.put(event.model_copy(update={"step": self.loops.step}))

    def begin_startup(self) -> None:
        """Begin to measure the phases from the end of a worker group to the training of the next one."""
        self.phases: dict[str, float] = {}
        self._marked_at = time.monotonic()

    def mark_phase(self, phase: str) -> None:
        """Record the time since the previous mark under the name of a phase."""
        now = time.monotonic()
        self.phases[phase] = round(now - self._marked_at, 3)
        self._marked_at = now
