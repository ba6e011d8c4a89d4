"""Trying everything that a training needs, before one is started: ``elastic-train doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

#: As it should be; trainings run, but something is wrong; could not be looked at; trainings cannot run like this.
LEVELS = ("ok", "warn", "skip", "fail")


@dataclass(frozen=True)
class Finding:
    """One thing that a check has found.

    Attributes:
        level: How good or bad it is, one of :data:`LEVELS`.
        message: What it is.
        remedy: What to do about it; empty if there is nothing to do, or the message says it.
        check: Name of the check.
    """

    level: str
    message: str
    remedy: str = ""
    check: str = ""


#: A finding of each level, from its message and its remedy.
ok, warn, skip, fail = (partial(Finding, level) for level in LEVELS)
