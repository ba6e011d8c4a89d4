"""What a check has found."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Finding", "Level", "fail", "ok", "skip", "warn"]


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


def ok(message: str) -> Finding:
    """Give a finding that all is well."""
    return Finding(Level.OK, message)


def warn(message: str, remedy: str = "") -> Finding:
    """Give a finding that trainings can live with."""
    return Finding(Level.WARN, message, remedy)


def skip(message: str, check: str = "") -> Finding:
    """Give a finding that nothing could be found out."""
    return Finding(Level.SKIP, message, check=check)


def fail(message: str, remedy: str = "") -> Finding:
    """Give a finding that keeps trainings from running."""
    return Finding(Level.FAIL, message, remedy)
