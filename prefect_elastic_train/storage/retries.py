"""Retries of operations that fail with a transient fault, for a bounded time, and the time spent on them.

They run below Ray, in every process.
"""

import asyncio
import logging
import math
import os
import random
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from prefect_elastic_train.core.outcomes import StorageFaultError

from .fault_classes import Fault, chain, diagnose

logger = logging.getLogger("prefect_elastic_train.storage")

Result = TypeVar("Result")

#: Longest pause after the first failed try, which doubles after each further one, and its limit.
_FIRST_PAUSE_SECONDS = 0.25
_MAX_PAUSE_SECONDS = 10.0
_random = random.SystemRandom()  # the loop's own generator must not depend on retries
_REPORT_SECONDS = 3.0  # an operation that has failed or hung for this long is reported


@dataclass
class Waits:
    """Time that this process has waited for its storage, and the tries that failed."""

    seconds: float = 0.0  # from first failures to success or to giving up; concurrent operations count once
    tries: int = 0  # that failed
    last: str = ""  # error of the last failed try


# One for the process: the loop, its uploads and the controller wait for the same storage.
_lock = threading.Lock()
_waits = Waits()
_counted_until = 0.0
#: Start of each running operation. On a hard mount whose server does not answer, none succeeds or fails.
_running: list[float] = []


def collect_waits() -> Waits:
    """Return the time that this process has waited for its storage since the last call of this function. Thread-safe.

    For an operation that is still running, it is the time up to its last try.
    """
    global _waits
    with _lock:
        waits = _waits
        _waits = Waits()
        return waits


def waiting_since() -> float | None:
    """Return the start of the oldest storage operation that is running, in seconds of the monotonic clock.

    Return None if all running operations are younger than some seconds.
    """
    oldest = min([*_running], default=math.inf)
    return oldest if time.monotonic() - oldest > _REPORT_SECONDS else None


@contextmanager
def operation() -> Iterator[None]:
    """Count the ``with`` block as one running operation of the storage."""
    began = time.monotonic()
    _running.append(began)
    try:
        yield
    finally:
        _running.remove(began)


def _count_wait(began: float, failed: str = "") -> None:
    """Add the time since ``began`` to the time that this process has waited for its storage. Thread-safe.

    Time that a concurrent operation has added is not added again. ``failed`` is the error of a failed try, which is
    counted; empty for none.
    """
    global _counted_until
    with _lock:
        now = time.monotonic()
        _waits.seconds += now - max(began, _counted_until)
        _counted_until = now
        if failed:
            _waits.tries += 1
            _waits.last = failed


@dataclass(frozen=True)
class Retries:
    """Retries operations that fail with a transient fault, with exponential back-off and jitter, for a bounded time.

    Attributes:
        seconds: Time from the first failure after which the fault is raised. 0: no retries.
        storage: URI of the storage, for messages.
        secrets: Secrets that are masked in messages.
        outage: A file; while it exists, the storage does not answer. For rehearsals.
    """

    seconds: float
    storage: str = "the storage"
    secrets: tuple[str, ...] = field(default=(), repr=False)
    outage: str = ""

    def call(self, title: str, action: Callable[[], Result]) -> Result:
        """Run an operation of the storage, with retries after transient faults, and return its result.

        Args:
            title: The operation in messages, such as ``"write runs/a/b.json"``.
            action: The operation. It may run several times, also after it has succeeded and its response was lost.

        Raises:
            StorageFaultError: A permanent fault of the storage, or a transient one for too long.
            Exception: Any other error, unchanged.
        """

        with operation(), closing(self._pauses(title)) as pauses:
            next(pauses)
            while True:
                try:
                    self._check_outage()
                    return action()
                except Exception as error:  # noqa: BLE001 - raised again unless it is a transient fault
                    failure = error
                time.sleep(pauses.send(failure))

    async def call_async(self, title: str, action: Callable[[], Awaitable[Result]]) -> Result:
        """Run an operation of the storage in an event loop, with retries, as :meth:`call` does without one."""
        with operation(), closing(self._pauses(title)) as pauses:
            next(pauses)
            while True:
                try:
                    self._check_outage()
                    return await action()
                except Exception as error:  # noqa: BLE001 - raised again unless it is a transient fault
                    failure = error
                await asyncio.sleep(pauses.send(failure))

    def _check_outage(self) -> None:
        if self.outage and os.path.exists(self.outage):
            raise TimeoutError("no answer: this outage is rehearsed")

    def without_secrets(self, text: str) -> str:
        """Return text in which asterisks replace the secrets of the storage."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text

    def _pauses(self, title: str) -> Generator[float, Exception, None]:
        """Yield the pause in seconds after each failed try of an operation, whose error is sent to this generator.

        The first value has no meaning. If the operation is not tried again, the generator raises its error. It does so
        outside of any ``except`` block, so the error gets no context, which could contain a secret.
        """
        error = yield 0.0
        began = time.monotonic()
        elapsed = 0.0
        tries = 0
        is_reported = False
        try:
            while _is_transient(error):
                tries += 1
                elapsed = time.monotonic() - began
                summary = self._summary(error)
                _count_wait(began, summary)
                if elapsed >= _REPORT_SECONDS and not is_reported:
                    is_reported = True
                    message = "%s does not answer for %.0f s, tried %d times to %s, retrying for up to %.0f s: %s"
                    logger.warning(message, self.storage, elapsed, tries, title, self.seconds, summary)
                if elapsed >= self.seconds:
                    break
                longest = min(_FIRST_PAUSE_SECONDS * 2 ** min(tries - 1, 10), _MAX_PAUSE_SECONDS)
                error = yield min(_random.uniform(0.0, longest), self.seconds - elapsed)
            outlook = f"It was tried {tries} times for {elapsed:.0f} s. Is it up and reachable from this machine?"
            raise self._translate(error, title, outlook)
        finally:
            if tries:
                _count_wait(began)

    def _translate(self, error: Exception, title: str, outlook: str) -> Exception:
        """Return a StorageFaultError for an error that is a fault of the storage or contains a secret of it.

        Return any other error unchanged.
        """
        fault = diagnose(error)
        texts = [*traceback.format_exception(error), *map(repr, chain(error))]
        has_secret = any(secret in text for secret in self.secrets for text in texts)
        if isinstance(error, StorageFaultError) or (fault is None and not has_secret):
            return error
        fault = fault or Fault("unknown", "correct the settings of the storage block")
        remedy = f"To go on, {fault.advice}" if fault.permanent else outlook
        message = f"{self.storage}: cannot {title}: {fault.kind}: {self._summary(error)}. {remedy}"
        translated = StorageFaultError(message, kind=fault.kind, permanent=fault.permanent)
        translated.__cause__ = None if has_secret else error
        return translated

    def _summary(self, error: BaseException) -> str:
        return self.without_secrets(f"{type(error).__name__}: {error!s}")[:400]


def _is_transient(error: Exception) -> bool:
    """Return True if an operation is retried after an error."""
    fault = diagnose(error)
    # A StorageFaultError comes from an inner operation that was retried long enough.
    return fault is not None and not fault.permanent and not isinstance(error, StorageFaultError)
