"""Ray Train's worker actor, with our additions to each poll.

Uses ``ray.train.v2._internal``, since Ray has no public way to replace the worker's class.
"""

import logging
import os
import signal
import time
from contextlib import suppress
from typing import Any

from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker as RaysTrainWorker

from prefect_elastic_train.core.threads import start_thread
from prefect_elastic_train.core.time_limits import TERMINATION_GRACE_SECONDS
from prefect_elastic_train.storage.retries import waiting_since

from . import loop_inspection
from .rank_failures import portable_failure

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05  # between two checks for a commit
_SLOW_SECONDS = 60.0  # duration of an upload or download, between two warnings


class RayTrainWorker(RaysTrainWorker):  # type: ignore[misc]
    """Ray Train's worker, whose poll status also has the session's position and phase, and how long the loop waited.

    It sends the loop's exceptions as text. It has the name of Ray's class, which appears in process titles and logs.
    """

    _is_ending = False  # SIGTERM was sent to this process
    _warned_at = 0.0
    _active_at = 0.0  # time of the last poll in which the loop did not wait for Ray or other ranks; 0: none

    def __init__(self) -> None:
        super().__init__()
        with suppress(ValueError):  # not in the main thread
            self._rays_handler = signal.signal(signal.SIGTERM, self._handle_termination)

    def _handle_termination(self, number: int, frame: Any) -> None:
        """Handle SIGTERM: let a session save, and end the process after it. A second SIGTERM ends it at once."""
        signal.signal(signal.SIGTERM, self._rays_handler)
        self._is_ending = True  # the next poll reports it
        start_thread(self._end_after_save)

    def _end_after_save(self) -> None:
        deadline = time.monotonic() + TERMINATION_GRACE_SECONDS
        while time.monotonic() < deadline and not loop_inspection.is_all_committed():
            time.sleep(_POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    def poll_status(self) -> Any:
        status = super().poll_status()
        status.position = loop_inspection.session_position()
        status.is_ending = self._is_ending
        status.phase = loop_inspection.session_phase()
        status.error = portable_failure(status.error)
        now = time.monotonic()
        if not (self._active_at and loop_inspection.is_waiting()):
            self._active_at = now
        status.waited = now - self._active_at
        began = waiting_since()
        if began and now - max(began, self._warned_at) > _SLOW_SECONDS:
            self._warned_at = now
            logger.warning("The storage has not finished an upload or download for %.0f s", now - began)
        return status
