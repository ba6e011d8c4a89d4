"""Standing still after the report that a restart was waiting for, in a worker: what came next would be done again."""

from __future__ import annotations

import logging
import sys
import threading
import time

from prefect_elastic_train.loop import notice

logger = logging.getLogger(__name__)

#: Seconds that a rank stands still; and between two looks.
_HOLD_SECONDS, _LOOK_SECONDS = 60.0, 0.02
_reporting = threading.local()
#: How many reports Ray had counted before this worker's first one: those of the run's earlier groups.
reports_before = 0


def saw_checkpoint() -> None:
    """Remember that the report which this thread makes has a checkpoint."""
    _reporting.checkpoint = True


def last_report_before_notice() -> int:
    """Return the last report of this worker that a coming restart does not wait for, 0 if any checkpoint will do.

    A loop that asks saves once more. What it had reported before may be uploaded only now, and would cost all since.
    """
    known, context = notice.known, notice.train_context()
    coming = notice.coming_restart(context) if context is not None and known.asked_at else None
    if coming is None:
        return 0
    return known.reports - reports_before if coming == known.answered else sys.maxsize


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
