"""The run's history: its events in numbered segments, written by the driver and read by whoever comes later."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.runs import layout
from prefect_elastic_train.storage.store import RunStore

logger = logging.getLogger(__name__)

_SEGMENT_BYTES = 256 * 1024
_WRITE_SECONDS = 2.0
#: After each so many reports of a worker group that were kept, those without a checkpoint are a second further apart.
_REPORTS_IN_FULL = 2000
_MAX_REPORT_SECONDS = 8.0
#: The first line of a segment with an ``r`` in its name is a summary of all before it.
_SEGMENT = re.compile(r"(\d{4,})-(\d{3,})(r?)\.jsonl")
_RECALLED = b'"kind":"run_recalled"'


def read_history(store: RunStore, recent: bool = False) -> Iterator[ev.Event]:
    """Yield the events of all attempts in order; a torn line is passed over.

    The recent ones begin with the newest :class:`RunRecalled`, a summary of all before; all if there is none.
    """
    found = filter(None, map(_SEGMENT.fullmatch, store.names(layout.EVENTS)))
    segments = sorted(found, key=lambda match: (int(match[1]), int(match[2])))
    for segment in segments[max((index for index, match in enumerate(segments) if recent and match[3]), default=0) :]:
        lines = (store.read(f"{layout.EVENTS}/{segment[0]}") or b"").splitlines()
        yield from (event for event in map(ev.decode_event, lines) if event is not None)


class HistoryWriter:
    """Writes the events of one attempt, a segment as a whole until it is full. Errors are logged and passed over."""

    def __init__(self, store: RunStore, attempt: int) -> None:
        self._store = store
        self._attempt = attempt
        self._segment = 0
        self._lines: list[bytes] = []
        #: Segments that are not written as they are, by number; a full one stays here until it is.
        self._unwritten: dict[int, list[bytes]] = {}
        self._urgent = threading.Event()
        self._closed = False
        self._lock = threading.Lock()
        self._last_report_at = 0.0
        self._reports_kept = 0
        #: The newest report if it was left out: what happens next shall know how far the training was.
        self._left_out: list[ev.Event] = []
        self._thread = threading.Thread(target=self._run, name="elastic-train-history", daemon=True)
        self._thread.start()

    def add(self, event: ev.Event) -> None:
        """Take an event; signs of life, and of a long run most reports without a checkpoint, are left out."""
        if isinstance(event, ev.ControllerAlive):
            return
        if isinstance(event, ev.Reported):
            pause = min(_MAX_REPORT_SECONDS, self._reports_kept // _REPORTS_IN_FULL)
            if 0 <= event.at - self._last_report_at < pause:
                self._left_out = [event]
                return
            self._last_report_at = event.at
            self._reports_kept += 1
        if isinstance(event, ev.WorkerGroupStarted):
            self._reports_kept = 0
        before, self._left_out = self._left_out, []
        self._add(*([] if isinstance(event, ev.Reported | ev.CheckpointCommitted) else before), event)
        if not isinstance(event, ev.Reported):
            self._urgent.set()

    def close(self) -> None:
        """Write what is left; returns within some seconds. May be called again after a last word."""
        self._add(*self._left_out)
        self._left_out = []
        self._closed = True
        self._urgent.set()
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._write()

    def _add(self, *events: ev.Event) -> None:
        for line in [ev.encode_event(event).encode() + b"\n" for event in events]:
            with self._lock:
                is_full = sum(map(len, self._lines)) + len(line) > _SEGMENT_BYTES
                if self._lines and (is_full or _RECALLED in line):
                    self._segment, self._lines = self._segment + 1, []
                self._lines.append(line)
                self._unwritten[self._segment] = self._lines

    def _run(self) -> None:
        while not self._closed:
            self._urgent.wait(_WRITE_SECONDS)
            self._urgent.clear()
            self._write()
            time.sleep(0.2)

    def _write(self) -> None:
        with self._lock:  # not held while the storage is waited for: events come in meanwhile
            unwritten = {segment: list(lines) for segment, lines in self._unwritten.items()}
        try:
            for segment, lines in sorted(unwritten.items()):
                mark = "r" * (_RECALLED in lines[0])
                self._store.replace(f"{layout.EVENTS}/{self._attempt:04d}-{segment:03d}{mark}.jsonl", b"".join(lines))
                with self._lock:
                    if len(self._unwritten.get(segment, [])) == len(lines):
                        self._unwritten.pop(segment, None)
        except Exception as error:  # noqa: BLE001 - training matters more
            logger.warning("could not write the history, will try again: %s", error)
