"""What an attempt tells: numbered events for the supervisor and the history, signs of life, and details for people."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect_elastic_train.core.events import ALIVE_SECONDS, ControllerAlive, Event, GroupFailed, Report, RunRecalled
from prefect_elastic_train.core.ray_output import Details
from prefect_elastic_train.core.spec import DriverSpec
from prefect_elastic_train.driver.relay import EventOutput
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.history import HistoryWriter, read_history
from prefect_elastic_train.storage.retrying_store import RetryingStore

logger = logging.getLogger("prefect_elastic_train.driver")

#: How long after a failure what Ray says of it is written: the lines of other processes take a moment to come.
_DETAILS_SECONDS = 2.0
#: How long the history may take to read before an attempt begins.
_RECALL_SECONDS = 20.0


class AttemptTeller:
    """Numbers the events of an attempt and sends them on, into the history once the attempt is begun; for any thread.

    Args:
        output: To the supervisor.
        details: What Ray has said itself.
        store: The run directory.

    Attributes:
        attempt: Number of the attempt, 0 until it is begun.
        history: Where its events are kept from then on.
    """

    def __init__(self, output: EventOutput, details: Details, store: RetryingStore) -> None:
        self.attempt = 0
        self.history: HistoryWriter | None = None
        self._output = output
        self._details = details
        self._store = store
        self._lock = threading.Lock()
        self._sequence = 0
        self._reports = 0

    def emit(self, event: Event) -> None:
        """Number an event and send it to the supervisor and into the history."""
        with self._lock:
            self._sequence += 1
            update: dict[str, Any] = {"sequence": self._sequence, "attempt": self.attempt}
            if isinstance(event, Report):
                self._reports += 1
                update["index"] = self._reports
            event = event.model_copy(update=update)
            self._output.put(event)
            if self.history is not None:
                self.history.add(event)
        if isinstance(event, GroupFailed):
            self._details.keep_errors(event.errors, event.also)
            later = threading.Timer(_DETAILS_SECONDS, self.write_details)
            later.daemon = True
            later.start()

    def close(self) -> None:
        """Wait, for a while, until everything is told."""
        if self.history is not None:
            self.history.close()

    def write_details(self) -> None:
        """Write what Ray has said itself beside the run's records."""
        try:
            self._store.impatient(1.0).replace(layout.details_name(self.attempt), self._details.content())
        except OSError as error:
            logger.warning("could not write the details of what failed: %s", error)

    def recall(self, spec: DriverSpec) -> None:
        """Tell a supervisor what it may not have seen: what the history adds up to. Not at any price."""
        from prefect_elastic_train.report.run_report import RunReport

        deadline = time.monotonic() + _RECALL_SECONDS
        report = RunReport(
            run_name=spec.request.run_name,
            score_attribute=spec.checkpoints.score_attribute,
            score_order=spec.checkpoints.score_order,
        )
        with self.showing_life("reading the history"):
            try:
                for event in read_history(self._store.impatient(_RECALL_SECONDS)):
                    report.take(event)
                    if time.monotonic() > deadline:
                        logger.warning("the history takes too long to read; the run's report begins anew")
                        return
                self.emit(RunRecalled(report=report.model_dump(mode="json")))
            except Exception as error:  # noqa: BLE001 - a report is no reason to end a training
                logger.warning("the history cannot be read; the run's report begins anew: %s", error)

    @contextmanager
    def showing_life(self, doing: str) -> Iterator[None]:
        """Stand in for the controller, which does not live yet, during what may rightly take its time."""
        done = threading.Event()
        since = time.time()

        def run() -> None:
            while not done.wait(ALIVE_SECONDS):
                self.emit(ControllerAlive(doing=doing, seconds=time.time() - since, droppable=True))

        threading.Thread(target=run, daemon=True).start()
        try:
            yield
        finally:
            done.set()
