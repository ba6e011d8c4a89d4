"""The sign of life of the current attempt, for another flow run that wants the run, and its look at the fence."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from prefect_elastic_train.core.records import Heartbeat, encode
from prefect_elastic_train.runs import layout
from prefect_elastic_train.runs.commits import newest_attempt
from prefect_elastic_train.storage.store import RunStore

#: Seconds between two beats.
HEARTBEAT_SECONDS = 5.0

logger = logging.getLogger(__name__)


class HeartbeatWriter:
    """Writes ``heartbeat.json`` from a thread until it is stopped. Errors are logged once and passed over.

    Args:
        store: The run directory.
        attempt: The attempt that lives.
        on_fenced_off: Called, once, when a later attempt has begun; nothing is written from then on.
        interval_seconds: Time between two beats.
    """

    def __init__(
        self,
        store: RunStore,
        attempt: int,
        on_fenced_off: Callable[[], object] = lambda: None,
        interval_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        self._store = store
        self._on_fenced_off = on_fenced_off
        self._attempt = attempt
        self._interval = interval_seconds
        self._stopped = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="elastic-train-heartbeat", daemon=True)

    def start(self) -> None:
        """Write the first beat, then go on in the background."""
        self._thread.start()

    def stop(self) -> None:
        """Stop writing; returns within two seconds."""
        self._stopped.set()
        self._thread.join(timeout=2)

    def _run(self) -> None:
        beat = 0
        while True:
            beat += 1
            record = Heartbeat(attempt=self._attempt, beat=beat, interval_seconds=self._interval)
            try:
                if newest_attempt(self._store) > self._attempt:
                    self._on_fenced_off()
                    return
                self._store.replace(layout.HEARTBEAT, encode(record))
                self._failing = False
            except Exception as error:  # noqa: BLE001 - a beat that ends for good looks like a death
                if not self._failing:
                    logger.warning("could not write the heartbeat, will keep trying: %s", error)
                self._failing = True
            if self._stopped.wait(self._interval):
                return
