"""The state of a run's controller, which its policies, callbacks and worker groups share."""

import time
from dataclasses import dataclass

from prefect_elastic_train.controller.budget import FailureWindow
from prefect_elastic_train.controller.event_queue import EventSender, ReceiverAddress
from prefect_elastic_train.controller.loop_watch import LoopWatch
from prefect_elastic_train.controller.standby import Standbys
from prefect_elastic_train.core.events import Event
from prefect_elastic_train.core.settings import FailureSettings, ScalingSettings
from prefect_elastic_train.loop.context import RunContext
from prefect_elastic_train.runs.commits import CommitLog
from prefect_elastic_train.storage.store import RunStore


@dataclass(frozen=True)
class ControllerSettings:
    """The settings with which a driver starts its controller.

    Attributes:
        receiver: The address at which the driver receives events.
        store: The run directory.
        context: The run context that workers get.
        framework: ``"torch"``, ``"jax"`` or ``"none"``.
        scaling, failures: The settings of the blocks for scaling and for failures.
        requester_id: The id for reservations with Ray's coordinator; empty for none, on a cluster without other users.
        standby: ``"off"``, ``"auto"`` (as memory allows) or ``"on"``.
    """

    receiver: ReceiverAddress
    store: RunStore
    context: RunContext
    framework: str
    scaling: ScalingSettings
    failures: FailureSettings
    requester_id: str = ""
    standby: str = "off"


class ControllerState:
    """The state of one controller process, which lives as long as an attempt.

    Attributes:
        settings: The settings of the controller.
        budget: The failures of worker groups that still count.
        loops: The checks of the train loops.
        commits: The writer of commits.
        standbys: The standby workers.
        timing: The phases of the start of a worker group.
        failures: Errors of the ranks in the last poll or start of a worker group, for the failure decision that
            follows.
        group_failures: Number of failures of worker groups, lost nodes included.
        failures_left: Failures that the budget allows after the last one, None for any number.
        start_failure: Error of the last worker group that did not start; None once the scaling policy has read it.
        assumed_nodes: Ids of the nodes from which the size of the next worker group was decided.
        checkpoint: Folder of the checkpoint that the next worker group would restore, empty for none.
        commit_count: Number of checkpoints committed by the current worker group.
        is_draining: True while a node of the worker group is about to be lost and the group still trains.
    """

    def __init__(self, settings: ControllerSettings) -> None:
        failures = settings.failures
        self.settings = settings
        self.budget = FailureWindow(failures.forgive_after_seconds)
        self.loops = LoopWatch(failures.ignored_checkpoint == "fail", self.publish, failures.stall_timeout_seconds)
        self.commits = CommitLog(settings.store, settings.context.attempt)
        self.commits.trained_seconds = self.committed_training_seconds
        self.standbys = Standbys(settings.framework, settings.standby, self.publish)
        self.timing = StartupTiming()
        self.failures: dict[int, Exception] = {}
        self.group_failures = 0
        self.failures_left: int | None = None
        self.start_failure: Exception | None = None
        self.assumed_nodes: set[str] = set()
        self.checkpoint = ""
        self.commit_count = 0
        self.is_draining = False
        self.sender = EventSender(settings.receiver)

    def publish(self, event: Event) -> None:
        """Send an event to the driver, with the current optimizer step of the training."""
        self.sender.put(event.model_copy(update={"step": self.loops.step}))

    def committed_training_seconds(self) -> float:
        """Return the seconds of training in a commit that is made now. A loop that ignored its checkpoint adds none."""
        return self.budget.committed if self.loops.ignored else self.budget.trained_seconds()


class StartupTiming:
    """Measures the phases from the end of a worker group to the training of the next one.

    The first phase begins when this object is created.
    """

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}  # seconds
        self._marked_at = time.monotonic()

    def mark(self, phase: str) -> None:
        """Record the time since the previous mark under the name of a phase."""
        now = time.monotonic()
        self.phases[phase] = round(now - self._marked_at, 3)
        self._marked_at = now
