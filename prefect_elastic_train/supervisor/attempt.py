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
        """Take a line in, and return the event that it is, or its text."""
        text = line.decode(errors="replace").rstrip("\n")
        event = decode_event(text[len(EVENT_TAG) :]) if text.startswith(EVENT_TAG) else None
        if event is None:
            words = without_marks(text)
            if words and not WORKER_LINE.match(words):
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
        """The end of an attempt that gave no sign of life for so long, else None."""
        if time.monotonic() - self._alive_at <= limit_seconds:
            return None
        silence = f"{limit_seconds:g} s, last {self._doing}"
        message = f"the driver and Ray Train's controller gave no sign of life for {silence}"
        return self.given_up(Outcome.DRIVER_LOST, message)

    def given_up(self, outcome: Outcome, message: str) -> AttemptEnded:
        """The end of an attempt that did not say how it ended."""
        return AttemptEnded(attempt=self.attempt, outcome=outcome, message=message)

    def last_error(self) -> str:
        """Return the error that the driver itself wrote last, as the end of a message; empty if it wrote none."""
        cause = last_cause(self._last_words)
        return f": {cause}" if cause else ""


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

    def follow(self, driver: Driver) -> AttemptEnded | None:
        """Follow a driver to its end, or until it is given up; None as :meth:`Driver.outcome`."""
        while not driver.has_gone():
            self.turn()
            given_up = driver.look()
            if given_up is not None:
                return given_up
            looked_at = time.monotonic()
            for source, line in driver.lines():
                driver.tell(source, line)
                if time.monotonic() - looked_at > TURN_SECONDS:
                    looked_at = time.monotonic()
                    self.turn()
        return driver.outcome()


class Driver(AttemptAccount, ABC):
    """A driver that was started, wherever it runs, and who follows it."""

    def __init__(self, follower: Follower) -> None:
        super().__init__()
        self.follower = follower

    @abstractmethod
    def lines(self) -> Iterator[tuple[str, bytes]]:
        """What it has written since the last time, with where it came from; a little while is waited for it."""

    @abstractmethod
    def has_gone(self) -> bool:
        """Whether it has ended and all its output was taken."""

    @abstractmethod
    def look(self) -> AttemptEnded | None:
        """How the attempt ended, if the driver has to be given up."""

    @abstractmethod
    def outcome(self) -> AttemptEnded | None:
        """How the attempt of a driver that has gone ended; None if it ended well without a word of that."""

    def tell(self, source: str, line: bytes) -> Event | str:
        """Take a line in, tell it, and return the event that it is, or its text."""
        said = self.take(line)
        if isinstance(said, str):
            self.follower.on_line(source, said)
        else:
            self.follower.on_event(said)
        return said
