"""Ray Train's worker actor, with our additions to each poll.

Uses ``ray.train.v2._internal``, since Ray has no public way to replace the worker's class.
"""

import logging
import time
from typing import Any

from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker as RaysTrainWorker

from prefect_elastic_train.storage.retries import waiting_since

from . import loop_inspection
from .rank_failures import portable_failure

logger = logging.getLogger(__name__)

_SLOW_SECONDS = 60.0  # duration of an upload or download, between two warnings


class RayTrainWorker(RaysTrainWorker):  # type: ignore[misc]
    """Ray Train's worker, whose poll status also has the session's position and the seconds for which the loop waited.

    It sends the loop's exceptions as text. It has the name of Ray's class, which appears in process titles and logs.
    """

    _warned_at = 0.0
    _active_at = 0.0  # time of the last poll in which the loop did not wait for Ray or other ranks; 0: none

    def poll_status(self) -> Any:
        status = super().poll_status()
        status.position = loop_inspection.session_position()
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
