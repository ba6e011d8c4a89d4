"""The run's history: its events in numbered segments, written by the driver."""

import itertools
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Iterator

from prefect_elastic_train.core import events as ev
from prefect_elastic_train.core.threads import start_thread
from prefect_elastic_train.storage.store import RunStore

from . import layout

logger = logging.getLogger(__name__)

_SEGMENT_BYTES = 256 * 1024
_WRITE_SECONDS = 2.0
#: Reports without a checkpoint are thinned: the minimum time between two grows by 1 s with each so many that are kept.
_REPORTS_IN_FULL = 2000
_MAX_REPORT_SECONDS = 8.0
#: The first line of a segment with an ``r`` in its name is a summary of all segments before it.
_SEGMENT = re.compile(r"(\d{4,})-(\d{3,})(r?)\.jsonl")


def read_history(store: RunStore, recent: bool = False) -> Iterator[ev.Event]:
    """Yield the events of all attempts from the history of a run, oldest first; torn lines are skipped.

    With ``recent``, start at the newest :class:`RunRecalled`, a summary of all events before it, if there is one.
    """
    matches = filter(None, map(_SEGMENT.fullmatch, store.names(layout.EVENTS)))
    segments = sorted(matches, key=lambda match: (int(match[1]), int(match[2])))
    first = max((index for index, match in enumerate(segments) if recent and match[3]), default=0)
    for segment in segments[first:]:
        lines = (store.read(f"{layout.EVENTS}/{segment[0]}") or b"").splitlines()
        yield from filter(None, map(ev.decode_event, lines))


class HistoryWriter:
    """Writes the events of one attempt into the history of its run, from a thread.

    Each write replaces a whole segment. After an error, which is logged, it tries again.
    """

    _name = ""  # name of the current segment
    _content = b""
    _closed = False
    _last_report_at = 0.0
    _reports_kept = 0  # since the start of the worker group

    def __init__(self, store: RunStore, attempt: int) -> None:
        self._store = store
        self._attempt = attempt
        self._segments = itertools.count()
        self._events: deque[ev.Event] = deque()  # events that are not in a segment yet
        self._unwritten: dict[str, bytes] = {}  # content of the segments that have changed, by name
        self._urgent = threading.Event()
        self._skipped: list[ev.Event] = []  # the newest report if it was left out; kept if another event follows
        self._thread = start_thread(self._run)

    def add(self, event: ev.Event) -> None:
        """Add an event to the history. Heartbeats are left out, and in a long run most reports without a checkpoint."""
        if isinstance(event, ev.ControllerAlive):
            return
        if isinstance(event, ev.Reported):
            pause = min(_MAX_REPORT_SECONDS, self._reports_kept // _REPORTS_IN_FULL)
            if 0 <= event.at - self._last_report_at < pause:
                self._skipped = [event]
                return
            self._last_report_at = event.at
            self._reports_kept += 1
        if isinstance(event, ev.WorkerGroupStarted):
            self._reports_kept = 0
        if not isinstance(event, ev.Report):
            self._events += self._skipped
        self._skipped = []
        self._events.append(event)
        if not isinstance(event, ev.Reported):
            self._urgent.set()

    def close(self) -> None:
        """Write the remaining events into the history, and stop the thread. Return within some seconds.

        It may be called again after another event was added.
        """
        self._events += self._skipped
        self._skipped = []
        self._closed = True
        self._urgent.set()
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._write()

    def _run(self) -> None:
        while not self._closed:
            self._urgent.wait(_WRITE_SECONDS)
            self._urgent.clear()
            self._write()
            time.sleep(0.2)

    def _write(self) -> None:
        """Add the waiting events to segments and write these; called by one thread at a time."""
        try:
            while self._events:
                event = self._events.popleft()
                line = ev.encode_event(event).encode() + b"\n"
                is_summary = isinstance(event, ev.RunRecalled)
                if not self._content or is_summary or len(self._content) + len(line) > _SEGMENT_BYTES:
                    number = f"{self._attempt:04d}-{next(self._segments):03d}"
                    self._name = f"{layout.EVENTS}/{number}{'r' if is_summary else ''}.jsonl"
                    self._content = b""
                self._content += line
                self._unwritten[self._name] = self._content
            for name in list(self._unwritten):
                self._store.replace(name, self._unwritten[name])
                del self._unwritten[name]
        except Exception as error:  # noqa: BLE001 - training matters more
            logger.warning("could not write the history, will try again: %s", error)
