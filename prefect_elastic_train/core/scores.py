"""The score of a checkpoint, by which the best one is chosen wherever that is done."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

_MAX_SCORE = 1e300  # larger numbers do not count as a score: Ray Train could not compare or write them


def score_of(metrics: Mapping[str, Any], attribute: str) -> float | None:
    """Return the score that was reported under a name, ``a/b`` for ``b`` in the mapping ``a``.

    Return None if there is none, or if it is not a finite number: Ray Train's file cannot hold NaN or infinity.
    """
    value: Any = metrics.get(attribute)
    outer, _, inner = attribute.partition("/")
    if value is None and inner and isinstance(metrics.get(outer), Mapping):
        return score_of(metrics[outer], inner)
    is_number = isinstance(value, numbers.Real)
    return float(value) if is_number and -_MAX_SCORE < value < _MAX_SCORE else None


def rank_of(metrics: Mapping[str, Any], attribute: str, order: str) -> tuple[bool, float]:
    """Return the key by which checkpoints are compared, highest for the best and lowest without a score."""
    score = score_of(metrics, attribute)
    return score is not None, (score or 0.0) * (1 if order == "max" else -1)
