"""Standing still after the report that a restart was waiting for, in a worker: what came next would be done again."""

from __future__ import annotations

import logging
import threading
import time

from prefect_elastic_train.loop import notice

logger = logging.getLogger(__name__)

#: Seconds that a rank stands still; and between two looks.
_HOLD_SECONDS, _LOOK_SECONDS = 60.0, 0.02
_reporting = threading.local()


def saw_checkpoint() -> None:
    """Remember that the report which this thread makes has a checkpoint."""
    _reporting.checkpoint = True


def hold_after_report() -> None:
    """Stand still after a report that a restart was waiting for; bounded, and ended by a withdrawal."""
    had_checkpoint = getattr(_reporting, "checkpoint", False)
    _reporting.checkpoint = False
    asked_to_save, notice.known.asked_to_save = notice.known.asked_to_save, False
    context = notice.train_context() if had_checkpoint or asked_to_save else None
    coming = notice.coming_restart(context) if context is not None else None
    deadline = time.monotonic() + _HOLD_SECONDS
    while coming is not None and notice.coming_restart(context) == coming:
        if time.monotonic() > deadline:
            logger.warning("The restart that was announced did not come within %g s; training goes on", _HOLD_SECONDS)
            return
        time.sleep(_LOOK_SECONDS)
