"""What the output of a driver says of its attempt, however that output reaches the supervisor."""

from __future__ import annotations

import time
from collections import deque

from prefect_elastic_train.core.bounds import cut
from prefect_elastic_train.core.events import (
    EVENT_TAG,
    AttemptEnded,
    AttemptStarted,
    ControllerAlive,
    Event,
    decode_event,
)
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.core.rank_errors import last_cause
from prefect_elastic_train.core.ray_output import WORKER_LINE, without_marks

__all__ = ["AttemptAccount"]

_LAST_WORDS = 30
_LAST_WORD_BYTES = 1000


class AttemptAccount:
    """What is known of an attempt from its driver's output so far.

    Attributes:
        attempt: Its number in the run directory, 0 until it is begun.
        ended: Its last word, None until that was said.
        ended_at: When that came, by the monotonic clock.
    """

    def __init__(self) -> None:
        self.attempt = 0
        self.ended: AttemptEnded | None = None
        self.ended_at = float("inf")
        self._alive_at = time.monotonic()
        self._doing = "starting"
        #: What the driver itself has written last.
        self._last_words: deque[str] = deque(maxlen=_LAST_WORDS)

    def take(self, line: bytes) -> Event | str:
        """Take a line in, and give the event that it is, or its text."""
        text = line.decode(errors="replace").rstrip("\n")
        event = decode_event(text[len(EVENT_TAG) :]) if text.startswith(EVENT_TAG) else None
        if event is None and not text:
            return text
        if event is None:
            words = without_marks(text)
            if not WORKER_LINE.match(words):
                self._last_words.append(cut(words, _LAST_WORD_BYTES))
            return text
        if isinstance(event, AttemptStarted):
            self.attempt = event.attempt
            self.seen_alive()
        elif isinstance(event, ControllerAlive):
            self.seen_alive()
            self._doing = event.doing
        elif isinstance(event, AttemptEnded):
            self.ended, self.ended_at = event, time.monotonic()
        return event

    def seen_alive(self) -> None:
        """Count the time without a sign of life from now."""
        self._alive_at = time.monotonic()

    def hung(self, limit_seconds: float) -> AttemptEnded | None:
        """Give the end of an attempt that gave no sign of life for so long."""
        if time.monotonic() - self._alive_at <= limit_seconds:
            return None
        return self.given_up(
            Outcome.DRIVER_LOST,
            f"the driver and Ray Train's controller gave no sign of life for {limit_seconds:g} s, last {self._doing}",
        )

    def given_up(self, outcome: Outcome, message: str) -> AttemptEnded:
        """Give the end of an attempt that did not say how it ended."""
        return AttemptEnded(attempt=self.attempt, outcome=outcome, message=message)

    def last_error(self) -> str:
        """Return the error that the driver itself wrote last, as the end of a message; empty if it wrote none."""
        cause = last_cause(self._last_words)
        return f": {cause}" if cause else ""
