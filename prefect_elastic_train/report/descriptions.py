"""The text of events for users, the same in the log and in the report.

Belongs to the flow process and the driver.
"""

from collections.abc import Mapping
from typing import NamedTuple

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.causes import describe_causes
from prefect_elastic_train.core.checkpoint_names import loop_name

from .formats import format_metrics, size

MIN_REPORTED_WAIT_SECONDS = 3.0  # shorter waits for the storage are not shown


class Description(NamedTuple):
    """The text of an event for users: the fact, its reason, and the reaction to it."""

    message: str
    reason: str = ""
    reaction: str = ""
    is_warning: bool = False

    @property
    def line(self) -> str:
        """The message, the reason and the reaction as one sentence."""
        text = self.message + (f": {self.reason}" if self.reason else "")
        text += f"; {self.reaction}" if self.reaction else ""
        return text[:1].upper() + text[1:]


def describe(event: ev.Event, checkpoint: str = "", locations: Mapping[int, str] | None = None) -> Description | None:
    """Return the text of an event for users; None if they do not need to see the event.

    Args:
        event: An event of a training.
        checkpoint: The checkpoint that a restart resumes from, as far as known.
        locations: Process and node of each rank, as text.
    """
    match event:
        case ev.ClusterWanted():
            return Description("starting or joining the Ray cluster")
        case ev.ClusterConnected():
            return Description(
                f"connected to the Ray cluster at {event.address} "
                f"({event.resources.get('CPU', 0):g} CPUs, {event.resources.get('GPU', 0):g} GPUs)"
            )
        case ev.AttemptStarted():
            return Description(f"attempt {event.attempt} starts from {_start(event.checkpoint)}", event.previous_end)
        case ev.WorkerGroupStarted():
            workers = "1 worker starts" if event.world_size == 1 else f"{event.world_size} workers start"
            offer = f"; it can restore {_start(event.checkpoint)}" if event.checkpoint else ""
            if event.restored_step:
                offer = (
                    f" from the recovery point of step {event.restored_step}; "
                    f"steps that are done again: {event.redone_steps}"
                )
            return Description(f"{workers} the loop{offer}")
        case ev.LoopWarned():
            return Description(event.message, is_warning=True)
        case ev.StragglerFound():
            return Description(
                f"rank {event.rank} on node {event.node_id} is slow",
                f"its work of a step takes {event.seconds:.3g} s, that of others {event.usual_seconds:.3g} s",
                is_warning=True,
            )
        case ev.NodesLeftOut():
            reasons = "; ".join(f"{node}: {reason}" for node, reason in event.nodes.items())
            return Description(
                f"the next worker groups leave out {len(event.nodes)} node(s)", reasons, is_warning=bool(reasons)
            )
        case ev.BlocksChanged():
            when = "a new attempt starts, which uses" if event.is_applied else "the next attempt uses"
            return Description(f"saved blocks have changed: {when} their values")
        case ev.SavesPlanned():
            return Description(f"the loop saves {event.plan}")
        case ev.StallTimeoutLearned():
            return Description(f"the time limit of a step is {event.limit}")
        case ev.StandbysParked():
            memory = f", {event.size_bytes / 2**20:.0f} MiB each" if event.parked else ""
            lacking = "; there is no memory for more" if event.parked < event.wanted else ""
            return Description(f"{event.parked} of {event.wanted} standby workers are ready{memory}{lacking}")
        case ev.WorkerGroupResized():
            awaited = {"patience": "a checkpoint, which was not committed in time", "memory": "a recovery point"}
            change = f"the worker group is resized from {event.old_size} to {event.new_size} workers"
            if event.old_size == event.new_size:
                change = "the worker group moves from the node of a straggler"
            return Description(
                change,
                reason=f"waited {event.waited_seconds:.0f} s for {awaited.get(event.reason, 'a checkpoint')}",
                reaction=f"reports that are done again: {event.reports_lost}" if event.reports_lost else "",
            )
        case ev.GroupFailed():
            return _describe_failure(event, checkpoint, locations)
        case ev.WaitingForCapacity():
            return describe_wait(event)
        case ev.StorageWaited() if event.seconds >= MIN_REPORTED_WAIT_SECONDS:
            return Description(
                f"the {event.who} waited {event.seconds:.1f} s for the storage",
                f"{event.tries} requests failed and were retried; last: {event.last}",
                is_warning=True,
            )
        case ev.CheckpointCommitted():
            return Description(
                f"{_start(event.checkpoint)} is committed ({size(event.size_bytes)})", format_metrics(event.metrics)
            )
        case ev.AttemptEnded() if event.already_finished:
            return Description("nothing to train", event.message)
    return None


def describe_wait(event: ev.WaitingForCapacity) -> Description:
    """Return the text of a wait for room in the cluster: how many workers fit, and the lacking resources."""
    seconds = event.at - event.since if event.since else 0.0
    fitting = f"{event.possible_workers} of at least {event.min_workers} workers fit"
    lacking = f"{fitting}, with {event.resources_per_worker} each; lacking: {event.missing or 'more resources'}"
    return Description(
        "waiting for capacity" + (f" for {seconds:.0f} s" if seconds >= 1 else ""),
        lacking if event.resources_per_worker else event.missing,  # none: the machine has no room for a local cluster
        is_warning=True,
    )


def _describe_failure(event: ev.GroupFailed, checkpoint: str, locations: Mapping[int, str] | None) -> Description:
    lost = event.reports_lost
    if event.retried:
        repeated = f"; reports since then, which are done again: {lost}" if lost else ""
        reaction = f"the worker group is restarted from {_start(checkpoint)}{repeated}"
        if event.in_memory:
            reaction = (
                f"the worker group is restarted from a recovery point if there is one, else from {_start(checkpoint)}"
            )
    else:
        reaction = event.gives_up + (f"; reports since the last checkpoint: {lost}" if lost else "")
    reasons = describe_causes(event.causes, locations) or ["a node was drained or reclaimed"]
    kind = "preemption" if isinstance(event, ev.WorkersPreempted) else "worker failure"
    return Description(kind, "; ".join(reasons), reaction, is_warning=True)


def _start(checkpoint: str) -> str:
    return f"checkpoint {loop_name(checkpoint)}" if checkpoint else "the beginning"
