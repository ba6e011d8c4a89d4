"""The interface between a supervisor and the flow that it works for."""

import logging
import time

from prefect_elastic_train.core.events import Event


class Follower:
    """Interface through which a supervisor passes a training's events, output and notes to the flow.

    A subclass overrides the methods that it needs. It also decides when the training stops. By default, the methods
    have no effect. All methods are called in the thread that runs the attempt.
    """

    def on_event(self, event: Event, replayed: bool) -> None:
        """Handle an event of the driver. The supervisor calls this for each event.

        Args:
            event: The event.
            replayed: True if an earlier process of the flow run has handled the event already.
        """

    def on_line(self, source: str, text: str) -> None:
        """Handle a line of output that is not an event. The supervisor calls this for each such line.

        Args:
            source: ``"driver"``, ``"stderr"`` or ``"cluster"``.
            text: The line.
        """

    def on_note(self, text: str, level: int = logging.INFO) -> None:
        """Handle a note about the training's processes, meant for the user's log. The supervisor calls this."""

    def check_stop(self) -> None:
        """Raise an exception if the driver has to stop, else return. The supervisor calls this several times a second.

        The supervisor stops the driver, and ``TrainingProcesses.run_attempt`` raises the same exception.
        """

    def saves_first(self, reason: BaseException) -> bool:
        """Return True if the driver's session saves before `reason`, which was raised here, ends the attempt."""
        return False

    def keeps_job(self, reason: BaseException) -> bool:
        """Return True if the driver's Ray job continues after `reason` has made the flow process stop following it."""
        return False

    def logged_until(self) -> float:
        """Return the time up to which the flow run has received a running Ray job's events, in seconds since the epoch.

        When a supervisor follows a job that already runs, it treats events up to this time as replayed.
        """
        return time.time()
