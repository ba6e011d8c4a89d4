"""How often something may be done, and which lines of a run's output are let through.

Each source has its share, and tracebacks stay whole.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

#: Seconds' worth of lines that may come at once.
_BURST_SECONDS = 10.0
#: Lines a second of rank 0, which is let through in full by any measure of a log that people read.
_IN_FULL = 1000.0
_TRACEBACK = re.compile(r"Traceback \(most recent call last\)")
_CHAINED = re.compile(r"^(During handling of the above exception|The above exception was the direct cause)")
#: Tracebacks that are let through at once, and a second; each is let through whole or not at all.
_TRACEBACKS = 20.0
_TRACEBACKS_PER_SECOND = 0.5
_MAX_TRACEBACK_LINES = 2000
#: An exception's message may have more lines, which nothing marks: so many, if they come so soon.
_MESSAGE_LINES = 20
_MESSAGE_SECONDS = 0.5
#: Between two notices of what was left out.
_NOTICE_SECONDS = 10.0
_MAX_SOURCES = 5000


class TokenBucket:
    """Lets through a burst, and a rate on average. For one thread.

    Args:
        per_second: The rate.
        burst: How many at once, at least 1.
        clock: Gives the time in seconds.
    """

    def __init__(self, per_second: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = per_second
        self._burst = max(1.0, burst)
        self._tokens = self._burst
        self._clock = clock
        self._filled_at = clock()

    def take(self) -> bool:
        """Take one if there is one."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._rate)
        self._filled_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


@dataclass
class _Source:
    """What one process prints."""

    bucket: TokenBucket
    #: Whether a traceback is being printed, and is let through.
    in_traceback: bool = False
    lets_traceback: bool = False
    #: Whether the next traceback belongs to the last one.
    is_chained: bool = False
    lines: int = 0
    #: Lines that may still belong to the exception's message, and until when.
    message_lines: int = 0
    message_until: float = 0.0


class OutputLimits:
    """Decides for each line. For one thread.

    Args:
        lines_per_second: What each source may print, with a burst of ten seconds' worth; ranks other than 0 together
            as much. Rank 0 is let through in full, which is 1,000 lines a second.
        clock: Gives the time in seconds.
    """

    def __init__(self, lines_per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = lines_per_second
        self._clock = clock
        self._sources: dict[str, _Source] = {}
        self._ranks = self._bucket(lines_per_second)
        self._tracebacks = TokenBucket(_TRACEBACKS_PER_SECOND, _TRACEBACKS, clock)
        self._left_out: Counter[str] = Counter()
        self._noticed_at = clock()

    def lets_through(self, source: str, text: str) -> bool:
        """Return whether a line is let through.

        Args:
            source: Who prints, such as ``rank 3`` or ``driver``.
            text: The line, without its prefix.
        """
        known = self._sources.get(source)
        if known is None:
            if len(self._sources) >= _MAX_SOURCES:
                self._sources.clear()
            rate = _IN_FULL if source == "rank 0" else self._rate
            known = self._sources[source] = _Source(self._bucket(rate))
        let = self._of_traceback(known, text)
        if let is None or (source == "rank 0" and not let):
            let = known.bucket.take() and (not _is_other_rank(source) or self._ranks.take())
        if not let:
            self._left_out[source] += 1
        return let

    def notice(self, at_once: bool = False) -> str:
        """Return what was left out since the last notice; empty if nothing was, or if that is too soon."""
        now = self._clock()
        if not self._left_out or (not at_once and now - self._noticed_at < _NOTICE_SECONDS):
            return ""
        self._noticed_at = now
        left_out, self._left_out = self._left_out, Counter()
        words = [f"{count} of {source}" for source, count in left_out.most_common(5)]
        more = len(left_out) - len(words)
        others = f" and {more} others" if more > 0 else ""
        return f"[{left_out.total()} lines of output left out: {', '.join(words)}{others}]"

    def _bucket(self, rate: float) -> TokenBucket:
        return TokenBucket(rate, _BURST_SECONDS * rate, self._clock)

    def _of_traceback(self, source: _Source, text: str) -> bool | None:
        """Decide for a line of a traceback; None for any other."""
        if _TRACEBACK.search(text):
            if not source.in_traceback and not source.is_chained:
                source.lets_traceback = self._tracebacks.take()
                source.lines = 0
            source.in_traceback, source.is_chained = True, False
            source.lines += 1
            return source.lets_traceback
        if source.in_traceback:
            source.lines += 1
            if not text[:1].isspace() and not text.startswith(("|", "+")):  # the exception itself
                source.in_traceback = False
                source.message_lines = _MESSAGE_LINES
                source.message_until = self._clock() + _MESSAGE_SECONDS
            if source.lines > _MAX_TRACEBACK_LINES:
                source.in_traceback = False
            return source.lets_traceback
        if source.message_lines > 0 and self._clock() < source.message_until:
            source.is_chained = source.is_chained or bool(_CHAINED.match(text))
            source.message_lines -= 1
            return source.lets_traceback
        source.is_chained = False
        return None


def _is_other_rank(source: str) -> bool:
    return source != "rank 0" and source.startswith(("rank ", "worker "))
