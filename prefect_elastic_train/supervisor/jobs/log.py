"""The log of a job's driver, line by line, whatever happens to the connection.

The dashboard gives the end of a log, from so many lines before it, and no position in it. So each connection begins
some lines back, and what is known already is passed over: a line with an event is like no other, since events are
numbered.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

from prefect_elastic_train.core.events import EVENT_TAG
from prefect_elastic_train.core.lines import whole_lines
from prefect_elastic_train.core.outcomes import AttemptFailedError
from prefect_elastic_train.supervisor.jobs.api import Job, JobsApi, UnreachableError

__all__ = ["JobLog"]

logger = logging.getLogger(__name__)

_ALL = -1
#: How many lines before its end a log is read from, one after the other until the last known line is among them.
_LOOK_BACK = (500, 20_000, _ALL)
_TAG = EVENT_TAG.encode()
_PAUSES_SECONDS = (0.5, 1.0, 2.0, 5.0)


class _GapError(Exception):
    """The last known line is not among those that were asked for."""


class JobLog:
    """Follows a job's log in a thread of its own.

    Args:
        api: The dashboard.
        job: The job, whose driver has started.
        take: Called with each line, once and in order, from another thread.
    """

    def __init__(self, api: JobsApi, job: Job, take: Callable[[bytes], None]) -> None:
        self._api = api
        self._job = job
        self._take = take
        self._lock = threading.Lock()
        #: The last line with an event, and how many other lines have come since.
        self._anchor = b""
        self._since_anchor = 0
        #: The thread whose lines count: one that hangs in a connection is left behind.
        self._reader: threading.Thread | None = None
        #: Whether the log can be read, so that a silence is the driver's.
        self.is_readable = False
        #: Whether it was read to its very last line.
        self.is_complete = False

    def start(self) -> None:
        """Begin to follow."""
        self._start(self._follow)

    def finish(self) -> None:
        """Read the log of a job that has ended to its very last line, and try that until it works or `stop`."""

        def run() -> None:
            failures = 0
            while self._is_current() and not self.is_complete:
                if self._catch_up(to_the_end=True):
                    self.is_complete = True
                else:
                    time.sleep(_PAUSES_SECONDS[min(failures, len(_PAUSES_SECONDS) - 1)])
                    failures += 1

        self._start(run)

    def stop(self) -> None:
        """Take no more lines."""
        with self._lock:
            self._reader = None

    def _start(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._guarded, args=(run,), name="elastic-train-job-log", daemon=True)
        with self._lock:
            self._reader = thread
        thread.start()

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception:
            if self._is_current():
                logger.warning("the job's log is not followed any more", exc_info=True)

    def _is_current(self) -> bool:
        return self._reader is threading.current_thread()

    def _follow(self) -> None:
        failures = 0
        while self._is_current():
            self.is_readable = self._catch_up()
            failures = 0 if self.is_readable else failures + 1
            if self.is_readable:
                try:
                    self._read(_LOOK_BACK[0], follow=True)
                except (UnreachableError, AttemptFailedError) as error:  # a silent driver looks like this, too
                    logger.debug("the log of job %s broke off: %s", self._job.submission_id, error)
            time.sleep(_PAUSES_SECONDS[min(failures, len(_PAUSES_SECONDS) - 1)])

    def _catch_up(self, *, to_the_end: bool = False) -> bool:
        """Read what is there beyond the last known line; tell whether that worked."""
        try:
            for lines in _LOOK_BACK if self._anchor else (_ALL,):
                if self._read(lines, follow=False, to_the_end=to_the_end):
                    return True
        except (UnreachableError, AttemptFailedError) as error:
            logger.debug("the log of job %s cannot be read now: %s", self._job.submission_id, error)
        return False

    def _read(self, lines: int, *, follow: bool, to_the_end: bool = False) -> bool:
        """Read, and tell whether the last known line was among what was read."""
        lines = lines if self._anchor else _ALL
        try:
            with self._api.log(self._job, lines, follow=follow) as pieces:
                self._take_new(whole_lines(pieces, with_rest=to_the_end), lines)
        except _GapError:
            return False
        return True

    def _take_new(self, found: Iterator[bytes], asked_for: int) -> None:
        looking = bool(self._anchor)
        known = 0 if looking else self._since_anchor
        for number, line in enumerate(found, start=1):
            new = False
            with self._lock:
                if not self._is_current():
                    return
                if looking:
                    if line == self._anchor:
                        looking, known = False, self._since_anchor
                    elif number == asked_for:
                        raise _GapError
                elif known:
                    known -= 1
                else:
                    if line.startswith(_TAG):
                        self._anchor, self._since_anchor = line, 0
                    else:
                        self._since_anchor += 1
                    new = True
            if new:
                self._take(line)  # which may wait, and is not to hold up who takes over
        if looking and self._is_current():
            raise _GapError
