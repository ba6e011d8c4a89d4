"""Repeating what fails with a passing fault, below Ray, for a bounded time; and what that has cost."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import tenacity

from prefect_elastic_train.core.outcomes import StorageFaultError
from prefect_elastic_train.storage.faults import chain, diagnose

logger = logging.getLogger("prefect_elastic_train.storage")

Answer = TypeVar("Answer")

#: Longest pause between two tries, in seconds; there is jitter in each.
_MAX_PAUSE_SECONDS = 10.0
_BACK_OFF = tenacity.wait_random_exponential(multiplier=0.25, max=_MAX_PAUSE_SECONDS)
#: An operation that has failed for so long is told, and again after so long.
_TELL_SECONDS = (3.0, 60.0)


@dataclass
class Waits:
    """What this process has waited for its storage.

    Attributes:
        seconds: From first failure to success or surrender, of all operations; those at one time count once.
        tries: Tries that failed.
        last: What was wrong, last.
    """

    seconds: float = 0.0
    tries: int = 0
    last: str = ""


class _Record:
    """The waits of this process. Operations that wait at the same time wait for one storage: their time counts once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting = 0
        self._since = 0.0
        self._waits = Waits()

    def begin(self) -> None:
        with self._lock:
            if not self._waiting:
                self._since = time.monotonic()
            self._waiting += 1

    def failed(self, what: str) -> None:
        with self._lock:
            self._waits.tries += 1
            self._waits.last = what

    def end(self) -> None:
        with self._lock:
            self._waiting -= 1
            if not self._waiting:
                self._waits.seconds += time.monotonic() - self._since

    def take(self) -> Waits:
        with self._lock:
            taken, self._waits = self._waits, Waits()
            if self._waiting:  # what goes on is counted up to now, and from now on again
                now = time.monotonic()
                taken.seconds += now - self._since
                self._since = now
            return taken

    def since(self) -> float | None:
        with self._lock:
            return self._since if self._waiting else None


#: One a process, for whoever waits is the process: any code in it may wait for the storage.
_record = _Record()


def take_waits() -> Waits:
    """Return what this process has waited for its storage since this was asked last."""
    return _record.take()


def waiting_since() -> float | None:
    """Return when the wait began that goes on now, on the monotonic clock; None if nothing waits."""
    return _record.since()


@dataclass(frozen=True)
class Retries:
    """Repeats what fails with a passing fault, with exponential back-off and jitter, for a bounded time.

    Attributes:
        seconds: From the first failure on; after that the fault is raised. 0: nothing is repeated.
        where: The storage, for messages.
        hidden: Secrets that no message may show.
    """

    seconds: float = 300.0
    where: str = "the storage"
    hidden: tuple[str, ...] = field(default=(), repr=False)

    def call(self, what: str, operation: Callable[[], Answer]) -> Answer:
        """Carry out an operation.

        Args:
            what: The operation, for messages, such as ``"write runs/a/b.json"``.
            operation: May be carried out several times, also after it has succeeded and its answer was lost.

        Raises:
            StorageFaultError: It failed for good, or for too long.
            Exception: What says nothing of the storage, as it is.
        """
        return self.call_counted(what, lambda tries: operation())

    def call_counted(self, what: str, operation: Callable[[int], Answer]) -> Answer:
        """Carry out an operation that is told how many tries have failed before."""
        effort = _Effort(self, what)
        try:
            answer: Answer = tenacity.Retrying(**effort.rules)(lambda: operation(effort.tries))
            effort.has_succeeded = True
            return answer
        except Exception as error:  # noqa: BLE001 - raised below, without what it would be shown with
            failed = effort.failure(error)
        finally:
            effort.end()
        raise failed

    async def call_async(self, what: str, operation: Callable[[], Awaitable[Answer]]) -> Answer:
        """Carry out an operation of an event loop."""
        effort = _Effort(self, what)

        async def attempt() -> Answer:  # tenacity awaits what was defined to be
            return await operation()

        try:
            answer: Answer = await tenacity.AsyncRetrying(**effort.rules)(attempt)
            effort.has_succeeded = True
            return answer
        except Exception as error:  # noqa: BLE001 - raised below, without what it would be shown with
            failed = effort.failure(error)
        finally:
            effort.end()
        raise failed

    def without_secrets(self, text: str) -> str:
        """Return a text with the secrets masked."""
        for secret in self.hidden:
            text = text.replace(secret, "***")
        return text


class _Effort:
    """One operation and its tries."""

    def __init__(self, retries: Retries, what: str) -> None:
        self._retries = retries
        self._what = what
        self._first_failure = 0.0
        self._tell_at = 0.0
        self.tries = 0
        self.has_succeeded = False

    @property
    def rules(self) -> dict[str, Any]:
        """Arguments of tenacity's."""
        return {
            "retry": tenacity.retry_if_exception(self._passes),
            "wait": self._pause,
            "stop": self._is_over,
            "after": self._failed,
            "reraise": True,
        }

    def end(self) -> None:
        """Note that the operation is over; a long wait that helped is told."""
        if not self.tries:
            return
        _record.end()
        if self.has_succeeded and self._tell_at > self._first_failure + _TELL_SECONDS[0]:
            logger.warning("%s is back after %.0f s (%s)", self._retries.where, self._elapsed(), self._what)

    def failure(self, error: Exception) -> Exception:
        """Return a fault of the storage in our words; anything else as it is.

        What it was raised from comes with it, unless that shows a secret.
        """
        fault = diagnose(error)
        holds_a_secret = self._holds_a_secret(error)
        if isinstance(error, StorageFaultError) or (fault is None and not holds_a_secret):
            return error
        where, what = self._retries.where, self._what
        kind, permanent = (fault.kind, fault.permanent) if fault is not None else ("unknown", True)
        if fault is None:
            message = f"{where}: cannot {what}: {self._summary(error)}"
        elif permanent:
            message = f"{where}: cannot {what}: {kind}: {self._summary(error)}. To go on, {fault.advice}"
        else:
            message = (
                f"{where}: cannot {what}, tried {max(self.tries, 1)} times for {self._elapsed():.0f} s: "
                f"{self._summary(error)}. Is it up and reachable from this machine?"
            )
        told = StorageFaultError(message, kind=kind, permanent=permanent)
        told.__cause__ = None if holds_a_secret else error
        return told

    def _passes(self, error: BaseException) -> bool:
        if isinstance(error, StorageFaultError):
            return False  # of an operation within this one, which was repeated long enough
        fault = diagnose(error) if isinstance(error, Exception) else None
        return fault is not None and not fault.permanent

    def _is_over(self, state: tenacity.RetryCallState) -> bool:
        return (bool(self.tries) and self._elapsed() >= self._retries.seconds) or self._retries.seconds <= 0

    def _pause(self, state: tenacity.RetryCallState) -> float:
        """Return the pause before the next try, the last of which comes when the time is over."""
        return min(_BACK_OFF(state), max(0.0, self._retries.seconds - self._elapsed()))

    def _failed(self, state: tenacity.RetryCallState) -> None:
        now = time.monotonic()
        if not self.tries:
            _record.begin()
            self._first_failure = now
            self._tell_at = now + _TELL_SECONDS[0]
        self.tries += 1
        error = state.outcome.exception() if state.outcome is not None else None
        summary = self._summary(error)
        _record.failed(summary)
        if now >= self._tell_at:
            self._tell_at = now + _TELL_SECONDS[1]
            logger.warning(
                "%s does not answer for %.0f s, tried %d times to %s, goes on for up to %.0f s: %s",
                self._retries.where,
                self._elapsed(),
                self.tries,
                self._what,
                self._retries.seconds,
                summary,
            )

    def _elapsed(self) -> float:
        return time.monotonic() - self._first_failure if self.tries else 0.0

    def _holds_a_secret(self, error: BaseException) -> bool:
        shown = [*traceback.format_exception(error), *(repr(one) for one in chain(error))]
        return any(secret in text for secret in self._retries.hidden for text in shown)

    def _summary(self, error: BaseException | None) -> str:
        text = f"{type(error).__name__}: {error!s}" if error is not None else ""
        return self._retries.without_secrets(text)[:400]
