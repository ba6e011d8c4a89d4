"""The log of a job's driver, line by line, whatever happens to the connection.

The dashboard gives the end of a log, from so many lines before it, and no position in it. So each reading begins
some lines back, and what is known already is passed over: a line with an event is like no other, since events are
numbered.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ray.job_submission import JobDetails

from prefect_elastic_train.core.events import EVENT_TAG
from prefect_elastic_train.core.lines import whole_lines
from prefect_elastic_train.supervisor.job_client import JobClient, UnreachableError

_ALL = -1
#: How many lines before its end a log is read from at least, how many times more if the last known line is not among
#: them, and from how many on all of it is read.
_LEAST_LINES, _GROWTH, _MOST_LINES = 100, 10, 1_000_000
_TAG = EVENT_TAG.encode()


class JobLog:
    """Reads a log again and again, and each of its lines once.

    Args:
        client: The dashboard.
    """

    def __init__(self, client: JobClient) -> None:
        self._client = client
        #: The last line with an event, and how many other lines have come since.
        self._anchor = b""
        self._since_anchor = 0

    def read(self, job: JobDetails, *, to_the_end: bool = False) -> Iterator[bytes]:
        """Read the lines that have come since the last time.

        Args:
            job: The job, whose driver has started.
            to_the_end: The job has ended, so that what comes after the last newline is a line, too.

        Raises:
            UnreachableError: The log cannot be read, or only in part; the next time goes on from there.
        """
        asked = _LEAST_LINES + 2 * self._since_anchor if self._anchor else _ALL
        lines = whole_lines(self._client.log(job, asked), with_rest=to_the_end)
        while self._anchor and self._anchor not in lines:  # which takes them in up to the last known one
            if asked == _ALL:
                raise UnreachableError("the log does not hold what it held before")
            asked = asked * _GROWTH if asked < _MOST_LINES else _ALL
            lines = whole_lines(self._client.log(job, asked), with_rest=to_the_end)
        for line in islice(lines, self._since_anchor, None):
            if line.startswith(_TAG):
                self._anchor, self._since_anchor = line, 0
            else:
                self._since_anchor += 1
            yield line
