"""The text of events for users, the same in the log and in the report.

Belongs to the flow process and the driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.causes import causes
from prefect_elastic_train.core.checkpoint_names import loop_name
from prefect_elastic_train.core.size_limits import truncate
from prefect_elastic_train.report.formats import format_metrics, size

MIN_REPORTED_WAIT_SECONDS = 3.0  # shorter waits for the storage are not shown
_MAX_METRICS = 500


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
    description: Description | None = _Describer(checkpoint, locations or {}).handle(event)
    return description


class _Describer(ev.EventHandler):
    def __init__(self, checkpoint: str, locations: Mapping[int, str]) -> None:
        self._checkpoint = checkpoint
        self._locations = locations

    def on_cluster_wanted(self, _: ev.ClusterWanted) -> Description:
        return Description("starting or joining the Ray cluster")

    def on_cluster_connected(self, event: ev.ClusterConnected) -> Description:
        cpus = event.resources.get("CPU", 0)
        gpus = event.resources.get("GPU", 0)
        return Description(f"connected to the Ray cluster at {event.address} ({cpus:g} CPUs, {gpus:g} GPUs)")

    def on_attempt_started(self, event: ev.AttemptStarted) -> Description:
        start = _start(event.checkpoint)
        if event.attempt > 1:
            return Description(f"attempt {event.attempt}: a new driver resumes from {start}", event.previous_end)
        return Description(f"attempt {event.attempt} starts from {start}")

    def on_worker_group_started(self, event: ev.WorkerGroupStarted) -> Description:
        workers = "1 worker starts" if event.world_size == 1 else f"{event.world_size} workers start"
        offer = f"; checkpoint {loop_name(event.checkpoint)} is offered" if event.checkpoint else ""
        return Description(f"{workers} the loop{offer}")

    def on_loop_warned(self, event: ev.LoopWarned) -> Description:
        return Description(event.message, is_warning=True)

    def on_saves_planned(self, event: ev.SavesPlanned) -> Description:
        return Description(f"the loop saves {event.plan}")

    def on_standbys_parked(self, event: ev.StandbysParked) -> Description:
        memory = f", {event.size_bytes / 2**20:.0f} MiB each" if event.parked else ""
        lacking = "; there is no memory for more" if event.parked < event.wanted else ""
        return Description(f"{event.parked} of {event.wanted} standby workers are ready{memory}{lacking}")

    def on_worker_group_resized(self, event: ev.WorkerGroupResized) -> Description:
        missing = ", which was not committed in time" if event.reason == "patience" else ""
        return Description(
            f"the worker group is resized from {event.old_size} to {event.new_size} workers",
            reason=f"waited {event.waited_seconds:.0f} s for a checkpoint{missing}",
            reaction=f"reports that are done again: {event.reports_lost}" if event.reports_lost else "",
        )

    def on_group_failed(self, event: ev.GroupFailed) -> Description:
        lost = event.reports_lost
        if event.retried:
            repeated = f"; reports since then, which are done again: {lost}" if lost else ""
            reaction = f"the worker group is restarted from {_start(self._checkpoint)}{repeated}"
        else:
            reaction = event.gives_up + (f"; reports since the last checkpoint: {lost}" if lost else "")
        reasons = causes(event.errors, event.also, self._locations) or ["a node was drained or reclaimed"]
        kind = "preemption" if isinstance(event, ev.WorkersPreempted) else "worker failure"
        return Description(kind, "; ".join(reasons), reaction, is_warning=True)

    def on_waiting_for_capacity(self, event: ev.WaitingForCapacity) -> Description:
        seconds = event.at - event.since if event.since else 0.0
        fitting = f"{event.possible_workers} of at least {event.min_workers} workers fit"
        return Description(
            "waiting for capacity" + (f" for {seconds:.0f} s" if seconds >= 1 else ""),
            f"{fitting}, with {event.resources_per_worker} each; lacking: {event.missing or 'more of them'}",
            is_warning=True,
        )

    def on_storage_waited(self, event: ev.StorageWaited) -> Description | None:
        if event.seconds < MIN_REPORTED_WAIT_SECONDS:
            return None
        message = f"the {event.who} waited {event.seconds:.1f} s for the storage"
        reason = f"{event.tries} requests failed and were retried; last: {event.last}"
        return Description(message, reason, is_warning=True)

    def on_checkpoint_committed(self, event: ev.CheckpointCommitted) -> Description:
        message = f"checkpoint {loop_name(event.checkpoint)} is committed ({size(event.size_bytes)})"
        return Description(message, truncate(format_metrics(event.metrics), _MAX_METRICS))

    def on_attempt_ended(self, event: ev.AttemptEnded) -> Description | None:
        return Description("nothing to train", event.message) if event.already_finished else None


def _start(checkpoint: str) -> str:
    return f"checkpoint {loop_name(checkpoint)}" if checkpoint else "the beginning"
