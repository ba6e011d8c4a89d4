"""What checks find, and a check that runs beside others for a bounded time."""

from __future__ import annotations

import contextvars
import enum
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from prefect_elastic_train.core.masking import without_credentials
from prefect_elastic_train.core.outcomes import ElasticTrainError


class Level(str, enum.Enum):
    """How good or bad something is."""

    #: As it should be.
    OK = "ok"
    #: Trainings run, and something is not as it should be.
    WARN = "warn"
    #: Could not be looked at, for a reason that another finding tells, or that is nobody's fault.
    SKIP = "skip"
    #: Trainings cannot run like this.
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One thing that a check has found.

    Attributes:
        level: How good or bad it is.
        message: What it is.
        remedy: What to do about it; empty if there is nothing to do, or the message says it.
        check: Name of the check.
    """

    level: Level
    message: str
    remedy: str = ""
    check: str = ""


#: A finding of each level, from its message and its remedy.
ok, warn, skip, fail = (partial(Finding, level) for level in Level)


class Check:
    """A check that goes on in a thread of its own from now on.

    The thread is left to itself when its time is up, so a check must end by itself what it has started.

    Args:
        name: Of the check.
        look: Yields what it finds.
        seconds: How long it may take.
        too_slow: What to do if it takes longer.
    """

    def __init__(
        self,
        name: str,
        look: Callable[[], Iterable[Finding]],
        seconds: float,
        too_slow: str = "see what is slow, or give more --timeout",
    ) -> None:
        self._name, self._look, self._seconds, self._too_slow = name, look, seconds, too_slow
        self._deadline = time.monotonic() + seconds
        self._found: list[Finding] = []
        # Prefect's settings live in context variables.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name=f"doctor-{name}", daemon=True)
        self._thread.start()

    def findings(self) -> list[Finding]:
        """Wait for the check, for as long as it may take, and return what it has found, without any password."""
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        found = list(self._found)
        if self._thread.is_alive():
            found.append(fail(f"no answer within {self._seconds:g} s", self._too_slow))
        return [replace(one, check=self._name, message=_clean(one.message), remedy=_clean(one.remedy)) for one in found]

    def is_good(self) -> bool:
        """Wait for the check; whether it has found nothing that keeps trainings from running."""
        return all(one.level is not Level.FAIL for one in self.findings())

    def _run(self) -> None:
        try:
            for one in self._look():
                self._found.append(one)
        except ElasticTrainError as error:
            self._found.append(fail(str(error)))
        except Exception as error:  # noqa: BLE001 - whatever goes wrong in a check is a finding
            self._found.append(fail(f"{type(error).__name__}: {error}"))


def _clean(text: str) -> str:
    """Leave out line ends, and passwords that stand in a URL."""
    return without_credentials(" ".join(text.split()))
