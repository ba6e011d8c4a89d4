"""An attempt as its supervisor sees it, wherever the driver runs: what is heard of it, and following it to its end."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prefect_elastic_train.core.bounds import cut
from prefect_elastic_train.core.events import (
    EVENT_TAG,
    AttemptEnded,
    AttemptStarted,
    ControllerAlive,
    Event,
    decode_event,
)
from prefect_elastic_train.core.operator_settings import ElasticTrainSettings
from prefect_elastic_train.core.outcomes import Outcome
from prefect_elastic_train.core.rank_errors import last_cause
from prefect_elastic_train.core.ray_output import WORKER_LINE, without_marks

#: How often a follower looks after everything but the driver's output.
TURN_SECONDS = 0.2
_LAST_WORDS, _LAST_WORD_BYTES = 30, 1000


@dataclass(eq=False)
class Follower:
    """Follows drivers, one at a time: what is done with what they say, and who may end them.

    Attributes:
        settings: The operator's settings.
        on_event: Called with each event of the driver.
        on_line: Called with each other line of output: where it came from, and the text.
        check_stop: Called several times a second; what it raises ends the driver and passes on.
        on_note: Called with what this machine has to say of a driver.
        on_past_event: Called with each event of a job from before it was followed.
        detaches: Whether a job shall go on without us after what `check_stop` raised, or was raised in this thread.
        followed_until: Up to when the flow run has told of a job that is found running, in seconds since the epoch.
    """

    settings: ElasticTrainSettings
    on_event: Callable[[Event], None]
    on_line: Callable[[str, str], None]
    check_stop: Callable[[], None] = lambda: None
    on_note: Callable[[str], None] = lambda text: None
    on_past_event: Callable[[Event], None] = lambda event: None
    detaches: Callable[[BaseException], bool] = lambda reason: False
    followed_until: Callable[[], float] = time.time

    def turn(self) -> None:
        """Do what has to be done several times a second, whatever is waited for."""
        self.check_stop()

    def wait(self, seconds: float) -> None:
        """Wait, and look after everything meanwhile."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.turn()
            time.sleep(TURN_SECONDS)

    def follow(self, driver: Driver) -> AttemptEnded:
        """Follow a driver to its end, or until it is given up, and return how the attempt ended."""
        try:
            driver.start()
            while (ended := driver.look()) is None:
                self.turn()
                looked_at = time.monotonic()
                for source, line in driver.lines():
                    driver.take(source, line)
                    if time.monotonic() - looked_at > TURN_SECONDS:
                        looked_at = time.monotonic()
                        self.turn()
            return ended
        except BaseException as reason:
            driver.leave(reason)
            raise
        finally:
            driver.close()


class Driver(ABC):
    """A driver, wherever it runs, who follows it, and what is known of its attempt from its output so far."""

    def __init__(self, follower: Follower) -> None:
        self.follower = follower
        #: Its number in the run directory, 0 until it is begun.
        self._attempt = 0
        self._ended: AttemptEnded | None = None
        self._ended_at = float("inf")
        self._alive_at = time.monotonic()
        self._doing = "starting"
        #: What the driver itself has written last.
        self._last_words: deque[str] = deque(maxlen=_LAST_WORDS)

    @abstractmethod
    def start(self) -> None:
        """Have it run, and be ready for its output."""

    @abstractmethod
    def lines(self) -> Iterator[tuple[str, bytes]]:
        """What it has written since the last time, with where it came from; a little while is waited for it."""

    @abstractmethod
    def look(self) -> AttemptEnded | None:
        """How the attempt ended, once the driver has gone and its output was taken, or it has to be given up."""

    @abstractmethod
    def leave(self, reason: BaseException) -> None:
        """Prepare for the end of the following, by what was raised, before the driver has gone."""

    @abstractmethod
    def close(self) -> None:
        """Follow it no longer."""

    def take(self, source: str, line: bytes) -> None:
        """Take a line in, and tell the event that it is, or its text."""
        text = line.decode(errors="replace").rstrip("\n")
        event = decode_event(text[len(EVENT_TAG) :]) if text.startswith(EVENT_TAG) else None
        if event is None:
            words = without_marks(text)
            if words and not WORKER_LINE.match(words):
                self._last_words.append(cut(words, _LAST_WORD_BYTES))
            self.tell_line(source, text)
            return
        if isinstance(event, AttemptStarted):
            self._attempt = event.attempt
            self.seen_alive()
        elif isinstance(event, ControllerAlive):
            self._doing = event.doing
            self.seen_alive()
        elif isinstance(event, AttemptEnded):
            self._ended, self._ended_at = event, time.monotonic()
        self.tell(event)

    def tell(self, event: Event) -> None:
        """Hand an event on."""
        self.follower.on_event(event)

    def tell_line(self, source: str, text: str) -> None:
        """Hand a line on that is no event."""
        self.follower.on_line(source, text)

    def seen_alive(self) -> None:
        """Count the time without a sign of life from now."""
        self._alive_at = time.monotonic()

    def hung(self) -> AttemptEnded | None:
        """The end of an attempt that gave no sign of life for too long, else None."""
        limit = self.follower.settings.liveness_timeout_seconds
        if time.monotonic() - self._alive_at <= limit:
            return None
        silence = f"{limit:g} s, last {self._doing}"
        return self.lost(f"the driver and Ray Train's controller gave no sign of life for {silence}")

    def lost(self, message: str, outcome: Outcome = Outcome.DRIVER_LOST) -> AttemptEnded:
        """The end of an attempt that did not say how it ended."""
        return AttemptEnded(attempt=self._attempt, outcome=outcome, message=message)

    def lost_last_word(self) -> AttemptEnded:
        """The end of an attempt whose driver ended well without a word."""
        return self.lost("the driver ended well, but its last word was lost: the next one finds the result")

    def last_error(self) -> str:
        """Return the error that the driver itself wrote last, as the end of a message; empty if it wrote none."""
        cause = last_cause(self._last_words)
        return f": {cause}" if cause else ""
