"""The score of a checkpoint, which ranks checkpoints everywhere. Belongs to all processes."""

import numbers
from collections.abc import Mapping
from typing import Any

_MAX_SCORE = 1e300  # larger numbers do not count as a score: Ray Train could not compare or write them


def score_of(metrics: Mapping[str, Any], attribute: str) -> float | None:
    """Return the score in the metrics of a checkpoint: the metric ``attribute``; ``a/b`` is ``b`` in the mapping ``a``.

    Return None if there is no such metric, or if it is no finite number: Ray Train's snapshot cannot hold NaN or
    infinity.
    """
    value: Any = metrics.get(attribute)
    outer, _, inner = attribute.partition("/")
    if value is None and inner and isinstance(metrics.get(outer), Mapping):
        return score_of(metrics[outer], inner)
    is_number = isinstance(value, numbers.Real)
    return float(value) if is_number and -_MAX_SCORE < value < _MAX_SCORE else None


def score_key(metrics: Mapping[str, Any], attribute: str, order: str) -> tuple[bool, float]:
    """Return a sort key for a checkpoint from its metrics: the highest for the best score, the lowest without a score.

    ``attribute`` names the metric; ``order`` is ``"max"`` if a higher one is better, else ``"min"``.
    """
    score = score_of(metrics, attribute)
    return score is not None, (score or 0.0) * (1 if order == "max" else -1)
