"""Running checks beside each other, each for a bounded time."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from prefect_elastic_train.core.masking import without_credentials
from prefect_elastic_train.core.outcomes import ElasticTrainError
from prefect_elastic_train.doctor.findings import Finding, Level, fail

__all__ = ["Look"]


class Look:
    """A check that goes on in a thread of its own from now on.

    The thread is left to itself when its time is up, so a check must end by itself what it has started.

    Args:
        name: Of the check.
        check: Gives what it finds, one after the other.
        seconds: How long it may take.
        too_slow: What to do if it takes longer.
    """

    def __init__(self, name: str, check: Callable[[], Iterable[Finding]], seconds: float, too_slow: str) -> None:
        self._name = name
        self._check = check
        self._seconds = seconds
        self._too_slow = too_slow
        self._deadline = time.monotonic() + seconds
        self._found: list[Finding] = []
        # Prefect's settings live in context variables.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name=f"doctor-{name}", daemon=True)
        self._thread.start()

    def findings(self) -> list[Finding]:
        """Wait for the check, for as long as it may take, and give what it has found."""
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        found = list(self._found)
        if self._thread.is_alive():
            found.append(fail(f"no answer within {self._seconds:g} s", self._too_slow))
        return [replace(one, check=self._name, message=_clean(one.message), remedy=_clean(one.remedy)) for one in found]

    def is_good(self) -> bool:
        """Wait for the check, and tell whether it has found nothing that keeps trainings from running."""
        return all(one.level is not Level.FAIL for one in self.findings())

    def _run(self) -> None:
        try:
            for one in self._check():
                self._found.append(one)
        except ElasticTrainError as error:
            self._found.append(fail(str(error)))
        except Exception as error:  # noqa: BLE001 - whatever goes wrong in a check is a finding
            self._found.append(fail(f"{type(error).__name__}: {error}"))


def _clean(text: str) -> str:
    """Leave out line ends, and passwords that stand in a URL."""
    return without_credentials(" ".join(text.split()))
