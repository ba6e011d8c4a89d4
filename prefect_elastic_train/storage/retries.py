"""Repeating what fails with a passing fault, below Ray, for a bounded time; and what that has cost."""

from __future__ import annotations

import errno
import logging
import math
import os
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import tenacity

from prefect_elastic_train.core.outcomes import StorageFaultError
from prefect_elastic_train.storage.faults import Fault, chain, diagnose

logger = logging.getLogger("prefect_elastic_train.storage")

Answer = TypeVar("Answer")

_BACK_OFF = tenacity.wait_random_exponential(multiplier=0.25, max=10.0)
_TELL_SECONDS = 3.0  # an operation that has failed or hung for so long is reported


@dataclass
class Waits:
    """What this process has waited for its storage."""

    seconds: float = 0.0  # from first failure to success or surrender, of all operations; those at one time count once
    #: Tries that failed, and what was wrong last.
    tries: int = 0
    last: str = ""


# Of the process, which waits as a whole: what it has waited since that was taken last, and when that was counted last.
_lock = threading.Lock()
_waits = Waits()
_counted_at = 0.0
#: Start of each running operation. On a hard mount whose server does not answer, none succeeds or fails.
_begun: list[float] = []


def take_waits() -> Waits:
    """Return what this process has waited for its storage since the last call, up to the last try of what goes on."""
    global _waits
    with _lock:
        taken = _waits
        _waits = Waits()
        return taken


def waiting_since() -> float | None:
    """Return the start of the oldest operation, on the monotonic clock; None if none has run for some seconds."""
    oldest = min([*_begun], default=math.inf)
    return oldest if time.monotonic() - oldest > _TELL_SECONDS else None


@contextmanager
def operation() -> Iterator[None]:
    """Have the time of the ``with`` count as one operation of :func:`waiting_since`."""
    began = time.monotonic()
    _begun.append(began)
    try:
        yield
    finally:
        _begun.remove(began)


def _count(began: float, failed: str = "") -> None:
    """Count an operation that waits since ``began`` and a try of it that failed, if any; of several at a time one."""
    global _counted_at
    with _lock:
        now = time.monotonic()
        _waits.seconds += now - max(began, _counted_at)
        _counted_at = now
        if failed:
            _waits.tries += 1
            _waits.last = failed


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
    #: A file that, while it is there, makes the storage one that does not answer: a rehearsal's.
    outage: str = ""

    def call(self, what: str, operation: Callable[[], Answer]) -> Answer:
        """Carry out an operation.

        Args:
            what: The operation, for messages, such as ``"write runs/a/b.json"``.
            operation: May be carried out several times, also after it has succeeded and its answer was lost.

        Raises:
            StorageFaultError: It failed for good, or for too long.
            Exception: What says nothing of the storage, as it is.
        """

        def attempt() -> Answer:
            self._check_outage()
            return operation()

        with self._rules(what) as rules:
            return tenacity.Retrying(**rules)(attempt)

    async def call_async(self, what: str, operation: Callable[[], Awaitable[Answer]]) -> Answer:
        """Carry out an operation of an event loop."""

        async def attempt() -> Answer:  # tenacity awaits what was defined to be
            self._check_outage()
            return await operation()

        with self._rules(what) as rules:
            answer: Answer = await tenacity.AsyncRetrying(**rules)(attempt)
            return answer

    def _check_outage(self) -> None:
        if self.outage and os.path.exists(self.outage):
            raise TimeoutError(errno.ETIMEDOUT, "no answer, as is rehearsed")

    def at_most(self, seconds: float) -> Retries:
        """Return the same for those who rather do without than wait."""
        return replace(self, seconds=min(seconds, self.seconds))

    def without_secrets(self, text: str) -> str:
        """Return a text with the secrets masked."""
        for secret in self.hidden:
            text = text.replace(secret, "***")
        return text

    @contextmanager
    def _rules(self, what: str) -> Iterator[dict[str, Any]]:
        """Yield the arguments of tenacity's for one operation, which ends with the ``with``."""
        began, tries, is_told = 0.0, 0, False

        def elapsed() -> float:
            return time.monotonic() - began if tries else 0.0

        def gives_up(state: tenacity.RetryCallState) -> bool:
            nonlocal began, tries, is_told
            error = _error_of(state)
            fault = diagnose(error)
            # A fault in our words is of an operation within this one, which was repeated long enough.
            if fault is None or fault.permanent or isinstance(error, StorageFaultError):
                return True
            began, tries = began or time.monotonic(), tries + 1
            _count(began, self._summary(error))
            if elapsed() >= _TELL_SECONDS and not is_told:
                is_told = True
                says = "%s does not answer for %.0f s, tried %d times to %s, goes on for up to %.0f s: %s"
                logger.warning(says, self.where, elapsed(), tries, what, self.seconds, self._summary(error))
            return elapsed() >= self.seconds

        def give_up(state: tenacity.RetryCallState) -> None:
            # Called outside of any handler: nothing is noted as what this was raised while.
            raise self._in_our_words(_error_of(state), what, f"tried {tries} times for {elapsed():.0f} s")

        try:
            with operation():
                yield {
                    "retry": tenacity.retry_if_exception_type(BaseException),
                    "wait": lambda state: min(_BACK_OFF(state), max(0.0, self.seconds - elapsed())),
                    "stop": gives_up,
                    "retry_error_callback": give_up,
                }
        finally:
            if tries:
                _count(began)

    def _in_our_words(self, error: BaseException, what: str, tried: str) -> BaseException:
        """Return a fault of the storage as one error class; anything else as it is, unless it shows a secret."""
        fault = diagnose(error)
        shown = [*traceback.format_exception(error), *(repr(one) for one in chain(error))]
        holds_a_secret = any(secret in text for secret in self.hidden for text in shown)
        if isinstance(error, StorageFaultError) or (fault is None and not holds_a_secret):
            return error
        says = f"{what}: {self._summary(error)}"
        if fault is not None and fault.permanent:
            says = f"{what}: {fault.kind}: {self._summary(error)}. To go on, {fault.advice}"
        elif fault is not None:
            says = f"{what}, {tried}: {self._summary(error)}. Is it up and reachable from this machine?"
        fault = fault or Fault("unknown", permanent=True)
        told = StorageFaultError(f"{self.where}: cannot {says}", kind=fault.kind, permanent=fault.permanent)
        told.__cause__ = None if holds_a_secret else error
        return told

    def _summary(self, error: BaseException) -> str:
        return self.without_secrets(f"{type(error).__name__}: {error!s}")[:400]


def _error_of(state: tenacity.RetryCallState) -> BaseException:
    assert state.outcome is not None
    error = state.outcome.exception()
    assert error is not None
    return error
